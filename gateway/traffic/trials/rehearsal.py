"""Closed-loop replay: the agent itself does recorded rollouts again, with recorded tool results.

After the recorded calls were sent again (`trials.replay`), the agent's command runs each of the drawn rollouts twice on
a person's machine: once with the candidate, once with the incumbent. The gateway plays its tools (`tool_player`); it
may take any number of steps. A run ends as

* *answered*: the agent ended well; the policy's judge scores its last answer against the recorded rollout's;
* *diverged*: it wanted a tool result that was not recorded. It has no score, and is counted;
* *failed*: the agent failed, or ended without an answer: score 0, as for a call that fails in a replay.

A run that was lost with its worker or with a restart is done again, `TRIES` times in all. Pairs of answered or failed
runs go into the same test as replayed calls, in the order of the draw. A pair with a diverged run, or with two failed
ones, gives no result. When the *incumbent* diverged or failed in more than half of the pairs, there is no result at all
and the candidate does not pass: such an agent cannot be rehearsed. A candidate that diverges more often than the
incumbent takes another way, which need not be worse: the evidence has an e-value for it, which decides nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, islice
from typing import Any, Final, Literal

from penstock.gateway.model.facts import LEG, REHEARSAL, REPLAY_OF, is_release_call
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import UNFAILED, Attempt, AttemptStatus, Rollout, RolloutConfig
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.turns import decode_exchange, read_exchange
from penstock.gateway.releases.canary.evidence import PairedTest, ReorderBuffer
from penstock.gateway.releases.canary.outcomes import Requester
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError, unless_damaged
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.trials.judges import SHOWN, ArmComparison, next_action
from penstock.gateway.traffic.trials.replay import DAMAGED, HISTORY, CallReplay, ReplayableCall, ReplaySource
from penstock.gateway.traffic.trials.sender import (
    ARM_OF,
    CANDIDATE,
    INCUMBENT,
    RUN,
    ReleaseContext,
    ReleaseSender,
    background,
    unrepeatable,
)
from penstock.gateway.traffic.trials.tool_player import (
    DIVERGED,
    SPENT,
    UNFIT,
    Cassette,
    RehearsalAnswer,
    RehearsalContext,
    ToolPlayer,
)
from penstock.gateway.wire.dialects import OPAQUE, by_name
from penstock.gateway.wire.dialects.loose_json import dumps, loads
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, HttpRequest
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.operations import QueueOperations
from penstock.gateway.work.queue import ClaimedAttempt

LEGS: Final = (CANDIDATE, INCUMBENT)
TRIES: Final = 5
"""Times that a run is handed out at most."""
BETWEEN_S: Final = 0.05
"""Seconds between two looks at runs under way."""
LIVE: Final = (AttemptStatus.PREPARING, AttemptStatus.RUNNING)
LOST: Final = (AttemptStatus.UNRESPONSIVE, AttemptStatus.CANCELLED)
RESTARTED: Final = "restarted"
"""Short reason of a refusal: the gateway has lost the answers that the agent has had."""
OVER: Final = "rehearsal"
"""Short reason of a refusal: no rehearsal of the call's address is under way."""
_READY_S: Final = 30.0
"""Seconds that a call waits for a gateway that resumes a rehearsal."""
LegOutcome = Literal["answered", "diverged", "failed"]


class ReplayJob:
    """The job of the stage `checked`: recorded calls are sent again, then, where the policy wants it, rehearsals
    follow."""

    def __init__(self, context: ReleaseContext, rehearsals: Rehearsals, feed: ChangeFeed) -> None:
        self._context = context
        self._rehearsals = rehearsals
        self._feed = feed

    async def __call__(self, release: Release, progress: JobProgress) -> JobReport:
        """Report whether the candidate passes."""
        if not release.policy.replay.closed_loop:
            return await CallReplay(self._context, release, progress).report()
        report = await self._replayed(release, progress)
        if not report.ok:
            return report
        found = await Rehearsal(self._context, self._rehearsals, self._feed, release, progress).report()
        evidence = report.evidence | {"rehearsal": found.evidence}
        return JobReport(found.ok, f"{report.why}; rehearsed: {found.why}", evidence)

    async def _replayed(self, release: Release, progress: JobProgress) -> JobReport:
        """Return the report on the calls; after a restart, the earlier report: a judge is not asked again."""
        name = f"replay {release.id} {release.revision}"
        noted = await background(lambda: self._context.tape.note(name))
        if noted is not None:
            return JobReport(**loads(noted))
        report = await CallReplay(self._context, release, progress).report()
        await self._context.recorder.submit(
            lambda transaction: QueueOperations(transaction).note(name, dumps(asdict(report)).encode())
        )
        return report


@dataclass(frozen=True, slots=True)
class LegResult:
    """The end of a run."""

    how: LegOutcome
    why: str = ""
    turn: Turn | None = None
    """The last answer of an answered run."""


class Rehearsal(ArmComparison):
    """The rehearsal of one release."""

    def __init__(
        self, context: ReleaseContext, rehearsals: Rehearsals, feed: ChangeFeed, release: Release, progress: JobProgress
    ) -> None:
        super().__init__(context, release, progress, "rehearsal")
        self._rehearsals = rehearsals
        self._feed = feed
        self._pairs: list[tuple[RehearsalLeg, RehearsalLeg]] = []
        self._ends: dict[str, LegResult] = {}
        self._order: ReorderBuffer[int] = ReorderBuffer()
        self._scores: dict[int, tuple[float, float] | None] = {}
        """Scores of candidate and incumbent, by place in the order; None when there is no result."""
        self._diverging = PairedTest(0.0)
        self._counted = 0

    async def _run(self) -> JobReport:
        """Wait until workers have done the runs, or it is decided."""
        _ = await self.sender.earlier_requests()
        recordings = await background(lambda: ReplaySource(self._context, self._release))
        drawn = await self._drawn(lambda stopped: draw(self._context.tape, self._release, recordings, stopped))
        self._passed_over = drawn.passed_over
        if not drawn.found:
            what = f"rollouts of {self._release.resource} that can be rehearsed"
            return self._nothing(what, "replay.closed_loop = 0")
        self._progress.doing, self._progress.done, self._progress.total = "rehearsal", 0, 2 * len(drawn.found)
        release = self._release
        versions = {leg: release.arm_versions(arm) for leg, arm in ARM_OF.items()}
        for number, original in await background(lambda: list(self._numbered(drawn.found))):
            one, other = (RehearsalLeg(leg_name(release, number, leg), leg, versions[leg], original) for leg in LEGS)
            self._pairs.append((one, other))
        legs = {leg.rollout: leg for pair in self._pairs for leg in pair}
        await self._follow(ActiveRehearsal(release, self.sender, legs))
        return self._report()

    def _numbered(self, found: list[RecordedRollout]) -> Iterator[tuple[int, RecordedRollout]]:
        """Yield the originals with the numbers of their runs. Those that have runs keep theirs: an original may have
        been forgotten, or done again, since they were drawn before a restart."""
        known: dict[str, int] = {}
        for number in range(1, 2 * self._policy.closed_loop + 1):
            runs = (self._context.tape.rollout(leg_name(self._release, number, leg)) for leg in LEGS)
            known |= {str((run.metadata or {}).get(REPLAY_OF)): number for run in runs if run is not None}
        taken = set(known.values())
        free = (number for number in count(1) if number not in taken)
        for original in found:
            yield known.get(original.name) or next(free), original

    # -- following the runs ------------------------------------------------------------------------------------------

    async def _follow(self, rehearsed: ActiveRehearsal) -> None:
        cursor = self._feed.cursor
        # The run was handed out by an earlier process of the gateway.
        for leg in rehearsed.legs.values():
            await self._look(leg)
        await self._score_pairs()
        self._rehearsals.open(rehearsed)
        try:
            while not self._over:
                cursor = await self._feed.wait(cursor)
                for leg in rehearsed.legs.values():
                    if leg.state == "running" and leg.attempt is not None:
                        await self._look(leg)
                await self._score_pairs()
                await asyncio.sleep(BETWEEN_S)
        finally:
            self._rehearsals.close(rehearsed)
        for leg in rehearsed.legs.values():
            if leg.state == "running":
                await self._cancel(leg)

    @property
    def _over(self) -> bool:
        return self._counted == len(self._pairs) or super()._over

    async def _cancel(self, leg: RehearsalLeg) -> None:
        """Cancel a run: its worker hears of it with its next heartbeat and kills the agent."""
        now = self._context.now_ns()
        with suppress(OperationRefusedError):
            await self._context.recorder.submit(
                lambda transaction: QueueOperations(transaction).cancel(leg.rollout, None, now)
            )

    async def _look(self, leg: RehearsalLeg) -> None:
        """Update a run from the tape."""
        attempt, end = await background(lambda: self._read(leg))
        if attempt is not None and attempt.status in LIVE:
            leg.state, leg.attempt = "running", attempt.id
        elif end is not None:
            leg.state, self._ends[leg.rollout] = "over", end
            self._progress.done += 1
        elif attempt is not None:
            leg.state, leg.attempt = "waiting", None
            self._rehearsals.changed()

    def _read(self, leg: RehearsalLeg) -> tuple[Attempt | None, LegResult | None]:
        """Return (the newest attempt of a run, its end; None when it is not over, or must be done again)."""
        rollout = self._context.tape.rollout(leg.rollout)
        if rollout is None:
            return None, LegResult("failed", "it was forgotten") if leg.state == "running" else None
        last = next(one for one in self._context.tape.attempts(leg.rollout) if one.id == rollout.attempt)
        if last.status in LIVE:
            return last, None
        again = rollout.tries < TRIES
        spans = [span for span in self._context.tape.spans(leg.rollout, last.id) if span.kind == "llm"]
        refused = {span.error: span for span in spans if span.error in (DIVERGED, RESTARTED, SPENT, UNFIT)}
        if DIVERGED in refused:
            return last, LegResult("diverged", self._said(refused[DIVERGED]))
        if last.status in LOST or RESTARTED in refused:
            return last, None if again else LegResult("failed", f"it was lost {TRIES} times")
        if last.status != AttemptStatus.SUCCEEDED or refused:
            reason = "" if last.outcome is None else last.outcome.reason or ""
            said = self._said(next(iter(refused.values()))) if refused else reason or f"it has ended as {last.status}"
            return last, LegResult("failed", said)
        return last, self._answer([span for span in spans if is_comparable(span)])

    def _answer(self, spans: list[Span]) -> LegResult:
        if not spans:
            return LegResult("failed", "the agent has asked no model")
        span = last_answered(spans)
        exchange = self._context.tape.exchange(span)
        if exchange is None:
            return LegResult("failed", "the bytes of its last answer were not kept")
        return LegResult("answered", "", read_exchange(span.dialect, exchange, span))

    def _said(self, span: Span) -> str:
        """Return why a call was refused."""
        exchange = self._context.tape.exchange(span)
        return span.error or "" if exchange is None else read_exchange(span.dialect, exchange, span).error or ""

    # -- scoring -----------------------------------------------------------------------------------------------------

    async def _score_pairs(self) -> None:
        """Score the pairs whose runs are both over, in the order of the draw."""
        for at, pair in enumerate(self._pairs):
            if at not in self._scores and all(leg.rollout in self._ends for leg in pair):
                self._scores[at] = await self._pair(pair)
                for one in self._order.put(at, at):
                    self._count(one)

    async def _pair(self, pair: tuple[RehearsalLeg, RehearsalLeg]) -> tuple[float, float] | None:
        ends = [self._ends[leg.rollout] for leg in pair]
        if any(end.how == "diverged" for end in ends) or all(end.how == "failed" for end in ends):
            return None
        one, other = [await self._score(leg, end) for leg, end in zip(pair, ends, strict=True)]
        return None if one is None or other is None else (one, other)

    async def _score(self, leg: RehearsalLeg, end: LegResult) -> float | None:
        if end.turn is None:
            return 0.0
        original = leg.original
        return (await self._judge.score(original.last, end.turn, {REPLAY_OF: original.name})).score

    def _count(self, at: int) -> None:
        """Count the next pair in order; pairs after the decision change nothing."""
        if self._over:
            return
        self._counted += 1
        ends, scores = [self._ends[leg.rollout] for leg in self._pairs[at]], self._scores[at]
        self._diverging.add(*(float(end.how != "diverged") for end in ends))
        if scores is None:
            why = next((end.why for end in reversed(ends) if end.why), "the judge gave no score")
            self._unknown[why[:300]] += 1
            return
        self._scored(self._pairs[at][0].original.name, *scores)

    # -- the result --------------------------------------------------------------------------------------------------

    def _report(self) -> JobReport:
        astray = sum(self._number(how)[INCUMBENT] for how in ("diverged", "failed"))
        if 2 * astray > self._counted:
            reason = self._unknown.most_common(1)[0][0] if self._unknown else "its agents failed"
            why = f"nothing is known: the incumbent diverged or failed in {astray} of {self._counted} runs ({reason})"
            return JobReport(False, why, self.evidence())
        verdict = self._trial.verdict(used_up=True) or "undecided"
        why = self._trial.sentence(verdict, "last answer", "rehearsed runs")
        if not self._trial.calls:
            why = "undecided: no pair of runs could be compared; no harm is shown"
        diverged = self._number("diverged")
        if any(diverged.values()):
            why += f"; {diverged[CANDIDATE]} runs of the candidate and {diverged[INCUMBENT]} of the incumbent diverged"
        return self._compared(verdict, self.evidence(verdict), why)

    def _number(self, how: LegOutcome) -> dict[str, int]:
        """Return the numbers of runs with this end, by leg, of the pairs that were counted."""
        counted = self._pairs[: self._counted]
        return {leg: sum(self._ends[pair[at].rollout].how == how for pair in counted) for at, leg in enumerate(LEGS)}

    def evidence(self, verdict: str = "unknown") -> dict[str, Any]:
        release, policy = self._release, self._policy
        figures = self._trial.figures()
        return {
            "verdict": verdict,
            "pairs": self._counted,
            "scored": figures.pop("calls"),
            **figures,
            "diverged": self._number("diverged"),
            "diverges_more": self._diverging.harm,
            "failed": self._number("failed"),
            "unknown": dict(self._unknown.most_common(SHOWN)),
            "passed_over": dict(self._passed_over),
            "worse": self._worse[:SHOWN],
            "requests": self.sender.spent,
            "spans": f"{self.sender.rollout}/{self.sender.attempt}",
            "runs": leg_name(release, 1, "*").removesuffix("1-*") + "*",
            "judge": release.policy.judge,
            "steps": policy.steps,
        }


# -- recorded rollouts, read on threads --------------------------------------------------------------------------------

# Drawn are the newest that used the resource, found as `ReplaySource` finds calls, without those in which the candidate
# has answered a call; their order follows from the seed. They did not fail, their input is known, and they ended with
# words: the judge compares the last answer, and no agent may see a tool call in a rehearsal. So those do not qualify
# whose provider ran tools by itself, or which ended with a tool call that nobody answered (some agents hand over their
# result in a tool call).


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A recorded rollout that is rehearsed."""

    rollout: Rollout
    cassette: Cassette
    last: Turn
    """Its last answered exchange, which the judge compares."""

    @property
    def name(self) -> str:
        """The name of the recorded attempt: ROLLOUT/ATTEMPT."""
        return f"{self.rollout.id}/{self.rollout.attempt}"


@dataclass(slots=True)
class RolloutDraw:
    """The recorded rollouts to rehearse."""

    found: list[RecordedRollout] = field(default_factory=list[RecordedRollout])
    """The originals in the order in which they are rehearsed."""
    passed_over: Counter[str] = field(default_factory=Counter[str])
    """Numbers of rollouts that used the resource and cannot be rehearsed, by reason."""


def draw(tape: Store, release: Release, recordings: ReplaySource, stopped: Callable[[], bool]) -> RolloutDraw:
    """Return as many originals as the policy wants, at most. `stopped`: called between rollouts; True when nobody wants
    them any more."""
    drawn = RolloutDraw()
    for _, rollout in islice(tape.rollouts(), HISTORY):
        if stopped() or len(drawn.found) >= release.policy.replay.closed_loop:
            break
        found = unless_damaged(partial(_original, tape, release, recordings, rollout))
        one = DAMAGED if found is None else found
        if isinstance(one, RecordedRollout):
            drawn.found.append(one)
        elif one:
            drawn.passed_over[one] += 1
    random.Random(f"{release.salt}/rehearsal").shuffle(drawn.found)
    return drawn


def _original(tape: Store, release: Release, recordings: ReplaySource, rollout: Rollout) -> RecordedRollout | str:
    """Return the original; else the reason why it cannot be rehearsed, empty when it is not eligible."""
    ended = rollout.ended_ns is not None and rollout.ended_ns <= release.changed_ns
    if rollout.status not in UNFAILED or not ended or not _told(tape, rollout):
        return ""
    spans = [span for span in tape.spans(rollout.id, rollout.attempt) if span.kind == "llm"]
    tried = release.arm_versions("candidate").items()
    if any(is_release_call(span) or not tried.isdisjoint((span.versions or {}).items()) for span in spans):
        return ""
    used = (span for span in spans if recordings.qualifies(span, rollout))
    if not any(isinstance(recordings.open(span), ReplayableCall) for span in used):
        return ""
    if rollout.input is None:
        return "it has no input"
    return _read(tape, rollout, [span for span in spans if is_comparable(span)])


def _told(tape: Store, rollout: Rollout) -> bool:
    """True if the end of a rollout was reported, not guessed from its silence."""
    return rollout.origin == "queued" or any(one.outcome is not None for one in tape.attempts(rollout.id))


def is_comparable(span: Span) -> bool:
    """True if the span is a call whose answer can be compared."""
    good = span.kind == "llm" and span.status == SpanStatus.OK and bool(span.choices)
    return good and by_name(span.dialect).generates


def _read(tape: Store, rollout: Rollout, spans: list[Span]) -> RecordedRollout | str:
    turns: list[Turn] = []
    for span in spans:
        exchange = tape.exchange(span)
        if exchange is None or span.truncated:
            return "its bytes were not kept"
        problem = unrepeatable(by_name(span.dialect), decode_exchange(exchange).request_body)
        if problem is not None:
            return problem
        turns.append(read_exchange(span.dialect, exchange, span))
    last = turns[spans.index(last_answered(spans))]
    did = next_action(last)
    if did is None:
        return "its last answer cannot be read"
    if did.calls:
        return f"it ended with a call of {did.calls[0][0]}, which nobody answered"
    return RecordedRollout(rollout, Cassette.of(turns), last)


def last_answered(spans: list[Span]) -> Span:
    """Return the answered call whose answer came last."""
    return max(spans, key=lambda span: span.end_ns or 0)


# -- runs, for calls of their agents and for the control API -----------------------------------------------------------

# A rehearsal's runs are rollouts of their own, two for each recorded one: `RELEASE-rehearsal-aREVISION-NUMBER-LEG`. A
# call to such an address is answered here and never passed on unchanged, also when no such rehearsal is under way (it
# is over, or the gateway has just been started): an agent that got a tool call would run the tool. While no release
# has asked for a rehearsal, calls skip this check (`Catalog.rehearses`).
#
# Runs are handed out as work is, with a lease, but not from the queue: only a runner that asks for this release gets
# them. The tape has the runs that were handed out, so a restart loses no run that has ended. The results that an
# agent has had are in memory only: a run that had an answer before a restart cannot go on, is refused with that
# reason, and is rehearsed again.


@dataclass(slots=True)
class RehearsalLeg:
    """One of the two runs of a recorded rollout."""

    rollout: str
    """Rollout id of the run itself."""
    side: str
    """`candidate` or `incumbent`."""
    versions: Mapping[str, str]
    """The versions that the run gets, by resource."""
    original: RecordedRollout
    state: Literal["waiting", "running", "over"] = "waiting"
    attempt: str | None = None
    """The attempt that may call; None until the run is handed out."""
    players: dict[str, ToolPlayer] = field(default_factory=dict[str, ToolPlayer])
    """Agents at work, by attempt."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of the run's spans."""
        return {REPLAY_OF: self.original.name, LEG: self.side}

    @property
    def spec(self) -> RolloutSpec:
        """The rollout of the run. Only this module hands it out again."""
        config = RolloutConfig(max_attempts=1, retry_on=[])
        told = dict(self.attributes)
        return RolloutSpec(
            id=self.rollout, input=self.original.rollout.input, mode="test", config=config, metadata=told
        )


@dataclass(slots=True)
class ActiveRehearsal:
    """A release in rehearsal, with its runs."""

    release: Release
    sender: ReleaseSender
    legs: dict[str, RehearsalLeg]
    """Its runs by rollout, in the order in which they are handed out."""


def leg_name(release: Release, number: int, leg: str) -> str:
    """Return the rollout id of a run; it follows from the release, so that it is found again."""
    return f"{release.id[-80:]}{REHEARSAL}{release.revision}-{number}-{leg}"


class Rehearsals:
    """All rehearsals of a gateway."""

    def __init__(self, context: ReleaseContext) -> None:
        self._context = context
        self._under_way: dict[str, ActiveRehearsal] = {}
        self._legs: dict[str, tuple[ActiveRehearsal, RehearsalLeg]] = {}
        self._news = asyncio.Event()
        """Set, and replaced, when a new run may be had."""

    def open(self, rehearsed: ActiveRehearsal) -> None:
        """Hand out the runs of a rehearsal from now on."""
        self._under_way[rehearsed.release.id] = rehearsed
        self._legs |= {name: (rehearsed, leg) for name, leg in rehearsed.legs.items()}
        self.changed()

    def close(self, rehearsed: ActiveRehearsal) -> None:
        """End a rehearsal: calls of its runs are refused from now on."""
        self._under_way.pop(rehearsed.release.id, None)
        for name in rehearsed.legs:
            self._legs.pop(name, None)
        self.changed()

    def changed(self) -> None:
        """Wake all that wait for a run."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- calls of agents ---------------------------------------------------------------------------------------------

    def handles(self, call: CallRequest) -> bool:
        """True if a call of a run is answered by `answer`; other calls that may pass request no answer of a model."""
        return call.dialect.generates or call.dialect is OPAQUE or call.dialect.media or call.dialect.tells_sessions

    def attributes(self, rollout: str) -> Mapping[str, str]:
        """Return the attributes of spans of a run's calls."""
        found = self._legs.get(rollout)
        return {} if found is None else found[1].attributes

    async def answer(self, call: CallRequest, request: HttpRequest, prompt: str | None) -> RehearsalAnswer:
        """Return the agent's answer; raises `Refusal`. `prompt`: the prompt that the call names."""
        if call.dialect is OPAQUE or call.dialect.media or call.dialect.tells_sessions:
            message = f"a rehearsal asks models and does nothing else: {call.path[:80]!r} is not passed on"
            raise ClientFault(400, OVER, message)
        rehearsed, leg = await self._found(call.address.rollout)
        if leg.state != "running" or call.address.attempt != leg.attempt:
            raise ClientFault(400, OVER, f"the run {call.address.rollout} is over")
        async with leg.starting:
            play = leg.players.get(call.address.attempt)
            if play is None:
                play = leg.players[call.address.attempt] = await self._begin(rehearsed, leg, call.address.attempt)
        return await play.answer(call, request, prompt)

    async def _found(self, rollout: str) -> tuple[ActiveRehearsal, RehearsalLeg]:
        """Return the run, as soon as it is under way again after a restart."""
        until = asyncio.get_running_loop().time() + _READY_S
        while (found := self._legs.get(rollout)) is None:
            news = self._news
            if not await background(lambda: self._may_come(rollout)):
                raise ClientFault(400, OVER, f"the rehearsal that {rollout} is a run of is over")
            if not await _until(news, until):
                raise GatewayFault(503, OVER, f"the rehearsal that {rollout} is a run of is not under way")
        return found

    def _may_come(self, rollout: str) -> bool:
        return rollout in self._legs or any(
            one.stage == "checked" and rollout.startswith(f"{one.id[-80:]}{REHEARSAL}{one.revision}-")
            for one in ReleaseReader(self._context.tape).releases()
        )

    async def _begin(self, rehearsed: ActiveRehearsal, leg: RehearsalLeg, attempt: str) -> ToolPlayer:
        original, name = leg.original, f"{leg.rollout}/{attempt}"
        asker = Requester("", "", original.rollout.mode, original.rollout.metadata or {})
        role = RehearsalContext(rehearsed.release, leg.versions, asker, leg.attributes | {RUN: name}, original.name)
        play = ToolPlayer(self._context, rehearsed.sender, role, original.cassette.fresh_copy())
        if await background(lambda: any(map(is_comparable, self._context.tape.spans(leg.rollout, attempt)))):
            message = f"the gateway was restarted in the middle of {name}: it will be rehearsed again"
            play.refusal = ClientFault(400, RESTARTED, message)
        return play

    # -- commands that run agents ------------------------------------------------------------------------------------

    async def claim(
        self, release: str, asked: ClaimRequest, dispatcher: Dispatcher
    ) -> tuple[list[ClaimedAttempt], bool, int]:
        """Return (runs for a worker, True if there may be more of them, the number that wait); wait for runs if need
        be. Raises `OperationRefusedError`."""
        until = asyncio.get_running_loop().time() + asked.wait_s
        while True:
            news, found = self._news, ReleaseReader(self._context.tape).release(release)
            if found is None:
                message = f"there is no release {release!r}; `penstock release list` lists them"
                raise OperationRefusedError("not_found", message, "release", release)
            if not found.policy.replay.closed_loop:
                message = f"release {release} rehearses nothing: its policy has replay.closed_loop = 0"
                raise OperationRefusedError("conflict", message, "release", release)
            claimed = await self._claim(release, asked, dispatcher)
            more = found.stage in ("draft", "checked")
            if claimed or not more or not await _until(news, until):
                return claimed, more, len(self._waiting(release))

    async def _claim(self, release: str, asked: ClaimRequest, dispatcher: Dispatcher) -> list[ClaimedAttempt]:
        claimed: list[ClaimedAttempt] = []
        # Others claim while one is handed out, so the remaining runs are read anew each time.
        while len(claimed) < asked.limit and (waiting := self._waiting(release)):
            leg = waiting[0]
            leg.state = "running"
            # If its worker leaves now, it is handed out again when the lease is over.
            claimed.append(await asyncio.shield(_hand_out(leg, asked, dispatcher)))
        return claimed

    def _waiting(self, release: str) -> list[RehearsalLeg]:
        rehearsed = self._under_way.get(release)
        return [] if rehearsed is None else [leg for leg in rehearsed.legs.values() if leg.state == "waiting"]


async def _hand_out(leg: RehearsalLeg, asked: ClaimRequest, dispatcher: Dispatcher) -> ClaimedAttempt:
    try:
        made = await dispatcher.hand_out(leg.rollout, leg.spec, asked)
    except (OperationRefusedError, TapeError):
        leg.state = "waiting"
        raise
    leg.attempt = made.attempt.id
    return made


async def _until(news: asyncio.Event, until: float) -> bool:
    """Wait for news: True when there may be something new; False when it is time to give up."""
    try:
        async with asyncio.timeout_at(until):
            await news.wait()
    except TimeoutError:
        return False
    return True
