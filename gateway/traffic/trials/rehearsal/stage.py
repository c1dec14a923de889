"""Closed-loop replay: the agent itself does recorded rollouts again, with recorded tool results.

After the recorded calls were sent again (`replay`), the agent's command runs each of the drawn rollouts
(`recorded_rollouts`) twice on a person's machine: once with the candidate, once with the incumbent. The gateway plays
its tools (`tool_player`); it may take any number of steps. A run ends as

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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, Final, Literal

from penstock.gateway.model.facts import REPLAY_OF
from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import Attempt, AttemptStatus
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.releases.canary.evidence import PairedTest, ReorderBuffer
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.traffic.trials.rehearsal.recorded_rollouts import (
    RecordedRollout,
    draw,
    is_comparable,
    last_answered,
)
from penstock.gateway.traffic.trials.rehearsal.rehearsals import (
    RESTARTED,
    ActiveRehearsal,
    RehearsalLeg,
    Rehearsals,
    leg_name,
)
from penstock.gateway.traffic.trials.rehearsal.tool_player import DIVERGED, SPENT, UNFIT
from penstock.gateway.traffic.trials.replay.judges import SHOWN, ArmComparison
from penstock.gateway.traffic.trials.replay.recorded_calls import ReplaySource
from penstock.gateway.traffic.trials.replay.sender import ARM_OF, CANDIDATE, INCUMBENT, ReleaseContext, background
from penstock.gateway.traffic.trials.replay.stage import CallReplayJob
from penstock.gateway.wire.dialects.loose_json import dumps, loads
from penstock.gateway.work.operations import QueueOperations

LEGS: Final = (CANDIDATE, INCUMBENT)
TRIES: Final = 5
"""Times that a run is handed out at most."""
BETWEEN_S: Final = 0.05
"""Seconds between two looks at runs under way."""
LIVE: Final = (AttemptStatus.PREPARING, AttemptStatus.RUNNING)
LOST: Final = (AttemptStatus.UNRESPONSIVE, AttemptStatus.CANCELLED)
LegOutcome = Literal["answered", "diverged", "failed"]


@dataclass(frozen=True, slots=True)
class LegResult:
    """The end of a run."""

    how: LegOutcome
    why: str = ""
    turn: Turn | None = None
    """The last answer of an answered run."""


class ReplayJob:
    """The job of the stage `checked`: recorded calls are sent again, then, where the policy wants it, rehearsals
    follow."""

    def __init__(self, context: ReleaseContext, rehearsals: Rehearsals, feed: ChangeFeed) -> None:
        self._context = context
        self._replay = CallReplayJob(context)
        self._rehearsals = rehearsals
        self._feed = feed

    async def __call__(self, release: Release, progress: JobProgress) -> JobReport:
        """Report whether the candidate passes."""
        if not release.policy.replay.closed_loop:
            return await self._replay(release, progress)
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
        report = await self._replay(release, progress)
        await self._context.recorder.submit(
            lambda transaction: QueueOperations(transaction).note(name, dumps(asdict(report)).encode())
        )
        return report


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
        return JobReport(verdict != "fail", why, self.evidence(verdict))

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
