"""Several processes that write one tape in turns: what each remembers is what the tape has, whatever others did."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from fakes.entries import call, conversation, finish, running
from fakes.experiment import policy, prompt
from fakes.forgetting import forget
from fakes.remembered import compare
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from penstock.console.commands.check import problems
from penstock.gateway.model.base import EMPTY_ACTION
from penstock.gateway.model.queue import HeartbeatRequest, HeldAttempt, RolloutSpec
from penstock.gateway.model.release import AuditTrailEntry as Link
from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import AttemptStatus, Judgement, Outcome, RolloutConfig
from penstock.gateway.releases.canary.decision import NEXT
from penstock.gateway.releases.canary.outcomes import Requester
from penstock.gateway.releases.operations import LiveReleases, PinRequest, ReleaseOperations
from penstock.gateway.tape.store import codec
from penstock.gateway.tape.store.environment import Environment
from penstock.gateway.tape.store.erasure import OverwritePass, WipePosition
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction, WriteItem, Writer
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.work.operations import DeadlineOperations, QueueOperations, SpanOperations
from penstock.gateway.work.queue import MemoryQueue, record_sign_of_life

PHASES = (Phase.explicit, Phase.generate)
"""Without shrinking: each step commits, so that it would take minutes."""
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SECOND = 10**9
NAMES = ("r1", "r2", "r3", "q1", "q2")
WORDS = (b"x", b"system text " * 40, b"another text " * 40, bytes(range(256)) * 20)
names = st.sampled_from(NAMES)
attempts = st.sampled_from(["a1", "a2"])
texts = st.lists(st.sampled_from(WORDS), max_size=4).map(b"".join)
picks = st.integers(0, 7)
SPECS = (
    RolloutSpec(id="q1", mode="train", input={"text": "q"}, config=RolloutConfig(max_attempts=9, retry_on=["failed"])),
    RolloutSpec(id="q2", mode="val", priority=3),
    RolloutSpec(id="q3", mode="train", priority=3, config=RolloutConfig(timeout_s=30, retry_on=["timeout"])),
)

LINK = Link(number=0, at_ns=0, who="test", action="x", before=None, after="draft")


class Boom(Exception):
    """The transaction fails."""


class Turns(RuleBasedStateMachine):
    """Three writers; each rule is a turn of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=MEMORY))
        self.env = Environment(self.path, readonly=False, map_bytes=1 << 20)
        self.writers = [self.process(number) for number in range(3)]
        self.turn, self.pace, self.doomed = self.writers[0], 1, False
        self.now = 1_800_000_000 * SECOND
        self.under_way: dict[Writer, list[SpanEntry]] = {}
        self.claimed: list[tuple[str, str]] = []
        self.hidden: list[tuple[int, WipePosition]] = []

    def process(self, number: int) -> Writer:
        # With little memory attempts are read back from the tape all the time; with more there are shared bodies.
        memory = 200_000 if number else 20_000
        return Writer(self.env, f"{number:08x}", memory, (MemoryQueue(), LiveReleases()), record_sign_of_life)

    def write(self, *items: WriteItem) -> None:
        """The writer, which remembers what the tape has, writes them or fails; then it is another's turn."""
        doomed, self.doomed = self.doomed, False
        self.now += SECOND
        if doomed:
            with pytest.raises(Boom):
                self.turn.write([*items, QueuedOperation(fail)])
        else:
            compare(self.turn)
            self.turn.write(items)
        self.turn = self.writers[(self.writers.index(self.turn) + self.pace) % 3]

    def do(self, operation: Callable[[Transaction], Any]) -> Any:
        task = QueuedOperation(operation)
        self.write(task)
        return task.result

    @rule(pace=st.sampled_from([0, 1, 1, 2]))
    def choose(self, pace: int) -> None:
        """Who writes next and after that."""
        self.pace = pace

    @rule()
    def doom(self) -> None:
        self.doomed = True

    @rule(number=st.integers(0, 2))
    def restart(self, number: int) -> None:
        """A process is killed; the next one ends what it had open."""
        killed = self.writers[number]
        self.writers[number] = made = self.process(number)
        _ = self.under_way.pop(killed, None)
        self.turn = made
        made.interrupt_open({f"{other:08x}" for other in range(3) if other != number})
        compare(made)

    # -- calls -------------------------------------------------------------------------------------------------------

    @rule(name=names, attempt=attempts, text=texts)
    def call(self, name: str, attempt: str, text: bytes) -> None:
        self.write(call(name, attempt, text))

    @rule(places=st.lists(st.tuples(names, attempts, texts), min_size=32, max_size=36))
    def batch(self, places: list[tuple[str, str, bytes]]) -> None:
        self.write(*(call(*place) for place in places))

    @rule(name=names, attempt=attempts, text=texts)
    def begin(self, name: str, attempt: str, text: bytes) -> None:
        made = running(name, attempt, text)
        doomed, writer = self.doomed, self.turn
        self.write(made)
        if not doomed:
            self.under_way.setdefault(writer, []).append(made)

    @precondition(lambda self: self.under_way.get(self.turn))
    @rule(text=texts)
    def end(self, text: bytes) -> None:
        doomed, writer = self.doomed, self.turn
        made = self.under_way[writer].pop()
        self.write(finish(made, text))
        if doomed:
            self.turn = writer
            self.write(made)

    # -- the queue ---------------------------------------------------------------------------------------------------

    @rule(spec=st.sampled_from(SPECS))
    def enqueue(self, spec: RolloutSpec) -> None:
        self.do(lambda tape: QueueOperations(tape).enqueue([(spec.id or "", spec)], self.now))

    @rule(state=st.sampled_from(["open", "open", "paused"]))
    def set_state(self, state: Any) -> None:
        self.do(lambda tape: QueueOperations(tape).set_state(state, EMPTY_ACTION, self.now))

    @rule(lease=st.sampled_from([2, 60]))
    def claim(self, lease: int) -> None:
        doomed = self.doomed
        found = self.do(lambda tape: QueueOperations(tape).claim("w", 1, None, lease * SECOND, self.now))
        if not doomed:
            self.claimed += [(one.rollout.id, one.attempt.id) for one in found]

    @precondition(lambda self: self.claimed)
    @rule(pick=picks, end=st.sampled_from(["succeeded", "failed", "failed"]))
    def finish(self, pick: int, end: str) -> None:
        name = self.claimed[pick % len(self.claimed)]
        self.do(lambda tape: QueueOperations(tape).finish(name, "w", AttemptStatus(end), Outcome(), [], self.now))

    @rule(running=st.booleans(), complete=st.booleans())
    def heartbeat(self, running: bool, complete: bool) -> None:
        held = [HeldAttempt(rollout=name[0], attempt=name[1], running=running) for name in self.claimed[-2:]]
        asked = HeartbeatRequest(attempts=held, complete=complete)
        self.do(lambda tape: QueueOperations(tape).heartbeat("w", asked, 60 * SECOND, self.now))

    @rule(seconds=st.sampled_from([0, 20, 100]), name=names, attempt=attempts)
    def expire(self, seconds: int, name: str, attempt: str) -> None:
        self.now += seconds * SECOND
        self.do(lambda tape: DeadlineOperations(tape).expire([(name, attempt), *self.claimed[-3:]], self.now, 25))

    @rule(name=names, attempt=attempts, value=st.sampled_from([0.0, 1.0]))
    def reward(self, name: str, attempt: str, value: float) -> None:
        self.do(lambda tape: SpanOperations(tape).reward((name, attempt), Judgement(value=value), True, self.now))

    @rule(name=names, cancel=st.booleans())
    def cancel(self, name: str, cancel: bool) -> None:
        what = QueueOperations.cancel if cancel else QueueOperations.requeue
        self.do(lambda tape: what(QueueOperations(tape), name, None, self.now))

    # -- releases ----------------------------------------------------------------------------------------------------

    @rule(text=st.sampled_from(["one", "two"]))
    def register(self, text: str) -> None:
        self.do(lambda tape: ReleaseOperations(tape).add_version("travel", prompt(f"Text {text}"), self.now))

    @rule()
    def start(self) -> None:
        made = Release(
            id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=policy(0.5), salt="s"
        )
        self.do(lambda tape: ReleaseOperations(tape).start(made, LINK, self.now))

    @rule(stage=st.sampled_from(["next", "next", "promoted", "rolled_back"]))
    def move(self, stage: str) -> None:
        def change(tape: Transaction) -> None:
            for release in list(tape.follower(LiveReleases).releases.values()):
                after = NEXT.get(release.stage, "canary") if stage == "next" else stage
                update = {"stage": after, "split": 0.5}
                ReleaseOperations(tape).change(release.id, None, update, LINK, self.now)

        self.do(change)

    @rule(name=names)
    def pin(self, name: str) -> None:
        wanted = PinRequest(name, Requester("", "", "train", {}), ("travel",))
        self.do(lambda tape: ReleaseOperations(tape).pin(wanted, self.now))

    # -- forgetting --------------------------------------------------------------------------------------------------

    @rule(name=names)
    def hide(self, name: str) -> None:
        doomed = self.doomed

        def hidden(tape: Transaction) -> int | None:
            """Its number, where it may go."""
            known = tape.rollout(name)
            waits = known is not None and known.rollout.status.value in ("queuing", "requeuing")
            if known is None or waits or next(tape.scan("open", name.encode() + b"\0"), None) is not None:
                return None
            return tape.erasure.hide(name)

        number = self.do(hidden)
        if number is not None and not doomed:
            self.hidden.append((number, WipePosition()))
            self.claimed = [one for one in self.claimed if one[0] != name]

    @precondition(lambda self: self.hidden)
    @rule()
    def wipe(self) -> None:
        doomed, (number, place) = self.doomed, self.hidden.pop()
        (place,) = self.do(lambda tape: tape.erasure.wipe([(number, place)])) or (place,)
        if place is not None or doomed:
            self.hidden.append((number, place or WipePosition()))

    @precondition(lambda self: not self.hidden)
    @rule()
    def sweep(self) -> None:
        self.do(lambda tape: tape.erasure.sweep(tape.oldest_rollout() or 0))

    @rule()
    def overwrite(self) -> None:
        with OverwritePass(self.env) as overwriting:
            while overwriting.step() and not overwriting.is_blocked:
                pass

    def teardown(self) -> None:
        for (number, place), writer in zip(self.hidden, self.writers * 9, strict=False):
            at: WipePosition | None = place
            while at is not None:
                step = QueuedOperation(lambda tape, number=number, at=at: tape.erasure.wipe([(number, at)]))
                writer.write([step])
                assert step.result is not None
                (at,) = step.result
        for writer in self.writers:
            compare(writer)
        assert list(problems(StoreReader(self.env))) == []
        self.env.close()
        shutil.rmtree(self.path)


def fail(transaction: Transaction) -> None:
    raise Boom


@pytest.fixture
def env(tmp_path: Path) -> Generator[Environment]:
    made = Environment(tmp_path, readonly=False, map_bytes=1 << 20)
    yield made
    made.close()


@pytest.fixture
def two(env: Environment) -> tuple[Writer, Writer]:
    one, other = (
        Writer(env, f"{number:08x}", 1 << 20, (MemoryQueue(), LiveReleases()), record_sign_of_life)
        for number in range(2)
    )
    return one, other


def test_a_transaction_that_deletes_nothing_hides_none_of_another_process(
    env: Environment, two: tuple[Writer, Writer]
) -> None:
    """LMDB gives its number to the next one, which is the other's."""
    one, other = two
    one.write([call("r1")])
    one.write([QueuedOperation(lambda tape: tape.delete("live", b"not there"))])
    other.write([call("r2")])
    one.write([call("r2")])
    assert [span.sequence for span in StoreReader(env).spans("r2")] == [1, 2]
    assert list(problems(StoreReader(env))) == []


def test_nothing_stands_on_a_shared_body_that_another_process_has_cut(
    env: Environment, two: tuple[Writer, Writer]
) -> None:
    """The log does not tell of that: what is wiped belongs to others."""
    one, other = two
    text = b"system text " * 100
    for name in ("r1", "r2", "r3"):
        one.write([call(name, request=text + name.encode())])
    compare(other)
    forget(other, "r3")
    forget(other, "r2")
    compare(one)
    one.write([call("r4", request=text + b"r4")])
    assert list(problems(StoreReader(env))) == []


def test_a_lease_that_another_process_has_renewed_stays_so(env: Environment, two: tuple[Writer, Writer]) -> None:
    """The log does not tell of that: who follows the feed need not hear of every heartbeat."""
    one, other = two
    one.write([QueuedOperation(lambda tape: QueueOperations(tape).enqueue([("q1", SPECS[0])], 1))])
    claimed = QueuedOperation(lambda tape: QueueOperations(tape).claim("w", 1, None, SECOND, 1))
    one.write([claimed])
    assert claimed.result is not None
    (got,) = claimed.result
    asked = HeartbeatRequest(attempts=[HeldAttempt(rollout="q1", attempt=got.attempt.id, running=False)])
    other.write([QueuedOperation(lambda tape: QueueOperations(tape).heartbeat("w", asked, 60 * SECOND, 2))])
    one.write([call("q1", got.attempt.id)])
    (attempt,) = StoreReader(env).attempts("q1")
    assert attempt.lease_ns == 2 + 60 * SECOND


def test_bodies_keep_their_bases_while_others_write(
    env: Environment, two: tuple[Writer, Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every call would be stored whole, or its base be read from the tape."""
    monkeypatch.setattr(TapeView, "newest_body", None)
    for entries in zip(conversation(8, "r1"), conversation(8, "r2"), strict=True):
        for writer, entry in zip(two, entries, strict=True):
            writer.write([entry])
    with env.read() as txn:
        view = TapeView(txn, env.dbs, {})
        for rollout in ("r1", "r2"):
            bodies = [span.body for span in view.spans(rollout, "a1", 0, 9)]
            stands = [codec.base_of(view.body_record(body)) for body in bodies if body is not None]
            assert stands[1:] == bodies[:-1]


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=20, stateful_step_count=40, deadline=None, phases=PHASES)
