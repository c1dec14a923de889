"""The tape against a plain dictionary: any order of announcing, finishing, restarting and reading.

After every step each way of reading agrees with the dictionary and `check` finds nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fakes.entries import finish, running
from fakes.forgetting import forget, overwrite
from fakes.some import some
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.tape.store.records import SpanEntry

Place = tuple[str, str, int]
rollouts = st.sampled_from(["r", "r1", "r.2"])
attempts = st.sampled_from(["a1", "a2"])
WORDS = {"": b"", "{}": b"{}", "system": b"system text " * 40, "x": b"x", "long": bytes(range(256)) * 80}
texts = st.lists(st.sampled_from(sorted(WORDS)), max_size=4).map(lambda names: b"".join(map(WORDS.__getitem__, names)))
statuses = st.sampled_from(["ok", "error", "cancelled"])


@dataclass
class Model:
    """What should be on the tape."""

    status: dict[Place, str] = field(default_factory=dict[Place, str])
    request: dict[Place, bytes] = field(default_factory=dict[Place, bytes])
    response: dict[Place, bytes] = field(default_factory=dict[Place, bytes])

    def note(self, entry: SpanEntry) -> None:
        place = entry.rollout, entry.attempt, entry.sequence
        assert entry.body is not None
        self.status[place], self.request[place] = entry.status, entry.body.request
        self.response[place] = entry.body.response


class TapeMachine(RuleBasedStateMachine):
    """Rules are what a recorder and a restart do."""

    open_calls: Bundle[tuple[int, SpanEntry]] = Bundle("open_calls")

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="penstock-test-"))
        self.store = open_store(self.path, map_bytes=1 << 20, memory_bytes=20_000)
        self.model = Model()
        self.lives = 0

    @rule(target=open_calls, rollout=rollouts, attempt=attempts, request=texts)
    def announce(self, rollout: str, attempt: str, request: bytes) -> tuple[int, SpanEntry]:
        entry = running(rollout, attempt, request)
        entry.retried = True
        self.store.write([entry])
        self.model.note(entry)
        return self.lives, entry

    @rule(call=consumes(open_calls), response=texts, status=statuses)
    def end(self, call: tuple[int, SpanEntry], response: bytes, status: str) -> None:
        life, entry = call
        if life == self.lives:
            self.store.write([finish(entry, response, status)])
            self.model.note(entry)

    @rule(places=st.lists(st.tuples(rollouts, attempts, texts, texts, statuses), min_size=1, max_size=30))
    def write_batch(self, places: list[tuple[str, str, bytes, bytes, str]]) -> None:
        entries = [finish(running(r, a, request), response, status) for r, a, request, response, status in places]
        self.store.write(entries)
        for entry in entries:
            self.model.note(entry)

    @rule(rollout=rollouts)
    def forget(self, rollout: str) -> None:
        mine = [place for place in self.model.status if place[0] == rollout]
        if not mine or any(self.model.status[place] == "open" for place in mine):
            return
        forget(self.store, rollout)
        for place in mine:
            del self.model.status[place], self.model.request[place], self.model.response[place]

    @rule()
    def overwrite(self) -> None:
        overwrite(self.store)

    @rule()
    def restart(self) -> None:
        self.lives += 1
        self.store.close()
        self.store = open_store(self.path, map_bytes=1 << 20, memory_bytes=20_000)
        for place, status in self.model.status.items():
            if status == "open":
                self.model.status[place] = "interrupted"

    @invariant()
    def every_way_of_reading_agrees(self) -> None:
        listed = {
            (span.rollout, span.attempt, span.sequence): span
            for _, rollout in self.store.rollouts()
            for span in self.store.spans(rollout.id)
        }
        assert {place: span.status.value for place, span in listed.items()} == self.model.status
        changes, cursor = self.store.changes(0, 10**6)
        assert cursor == self.store.cursor()
        for spans in ([change.span for change in changes if change.span], [span for _, span in self.store.recent()]):
            told = {(span.rollout, span.attempt, span.sequence): span for span in spans}
            assert told == listed
            assert len(spans) == len(listed)
        for place, span in listed.items():
            assert self.store.span(*place) == span
            exchange = some(self.store.exchange(span))
            assert exchange.request_body == self.model.request[place]
            assert exchange.response_body == self.model.response[place]

    @invariant()
    def sums_agree(self) -> None:
        for _, rollout in self.store.rollouts():
            for attempt in self.store.attempts(rollout.id):
                mine = [s for place, s in self.model.status.items() if place[:2] == (rollout.id, attempt.id)]
                assert attempt.spans == len(mine)
                assert attempt.totals.calls == sum(status != "open" for status in mine)
                assert attempt.totals.errors == sum(status in ("error", "interrupted") for status in mine)
                assert attempt.totals.cancelled == mine.count("cancelled")

    @invariant()
    def nothing_is_wrong(self) -> None:
        assert list(problems(self.store)) == []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)


TestTape = TapeMachine.TestCase
TestTape.settings = settings(max_examples=10, stateful_step_count=25, deadline=None)
