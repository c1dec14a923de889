"""The stage *replayed*: recorded calls are sent again to the candidate and to the incumbent, and compared.

Both legs get the recorded request, with their version in it, at the same time. The policy's judge scores each answer
against the recorded one, and `gateway.releases.canary.evidence` decides. A leg that failed (an HTTP error, no answer
in time) scores 0. A call is left out if both legs failed or the judge could not judge it. If that happens to more than
half of the calls, there is no result and the candidate does not pass. Without recorded calls it does not pass either:
the policy must skip the stage, and the audit shows that.

A replay sees one step and cannot know what would have come after another one. So it stops a plainly worse candidate and
promotes nothing. If the policy wants it, whole rollouts are then rehearsed (`gateway.traffic.trials.rehearsal.stage`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.gateway.model.facts import LEG, REPLAY_OF
from penstock.gateway.model.release import Arm, Release
from penstock.gateway.model.release_policy import REPLAY_ALPHA
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.releases.canary.evidence import PassVerdict, ReorderBuffer
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.traffic.trials.replay.judges import SHOWN, ArmComparison
from penstock.gateway.traffic.trials.replay.recorded_calls import ReplayableCall, ReplaySource, without_key
from penstock.gateway.traffic.trials.replay.sender import (
    ARM_OF,
    CANDIDATE,
    INCUMBENT,
    OutboundResult,
    ReleaseContext,
    background,
    call_name,
)


class CallReplayJob:
    """The replay of recorded calls."""

    def __init__(self, context: ReleaseContext) -> None:
        self._context = context

    async def __call__(self, release: Release, progress: JobProgress) -> JobReport:
        """Report whether the candidate passes."""
        return await CallReplay(self._context, release, progress).report()


@dataclass(frozen=True, slots=True)
class CallScores:
    """The result of one call."""

    call: str
    candidate: float | None = None
    """Score of the candidate's answer; None when there is no result."""
    incumbent: float | None = None
    problem: str = ""
    """The reason why there is no result."""
    failed: tuple[bool, bool] = (False, False)
    """True for the leg that failed: candidate, incumbent."""


class CallReplay(ArmComparison):
    """The replay of one release."""

    def __init__(self, context: ReleaseContext, release: Release, progress: JobProgress) -> None:
        super().__init__(context, release, progress, "replay")
        self._recordings: ReplaySource
        self._order: ReorderBuffer[CallScores] = ReorderBuffer()
        self._kept: dict[tuple[str, str], Span] = {}
        """Spans from before the gateway was restarted, by call and leg."""
        self._failed: Counter[str] = Counter()
        self._keyless = False

    async def _run(self) -> JobReport:
        for span in await self.sender.earlier_requests():
            said = span.attributes or {}
            # An answer whose bytes were lost (the disk was full) is asked for again.
            if span.status == SpanStatus.ERROR or (span.status == SpanStatus.OK and span.body is not None):
                self._kept[said.get(REPLAY_OF, ""), said.get(LEG, "")] = span
        # A thread reads the versions, as `PinTable.reload` does: many long ones would hold up calls.
        self._recordings = await background(lambda: ReplaySource(self._context, self._release))
        drawn = await self._drawn(
            lambda stopped: self._recordings.draw(self._policy.calls, self._release.salt, stopped)
        )
        spans, self._passed_over = drawn.spans, drawn.passed_over
        self._progress.total = len(spans)
        if not spans:
            return self._nothing(f"calls of {self._release.resource} that can be asked again", "replayed = 'skip'")
        calls = iter(list(enumerate(spans)))
        workers = [asyncio.ensure_future(self._work(calls)) for _ in range(min(self._policy.concurrency, len(spans)))]
        try:
            for done in asyncio.as_completed(workers):
                await done
                if self._over:
                    break
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return self._report()

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _work(self, calls: Iterator[tuple[int, Span]]) -> None:
        """Send one call after the other, while there is budget for all that it may take."""
        cost = 2 + 2 * self._judge.requests
        while not self._over and self.sender.reserve(cost):
            if (failing := self._context.recorder.failing) is not None:
                # A request that is not kept would be sent, and paid for, again and again.
                raise TapeError(failing)
            number, span = next(calls, (0, None))
            if span is None:
                self.sender.release(cost)
                return
            pair, used = await self._pair(span)
            self.sender.release(cost - used)
            for one in self._order.put(number, pair):
                self._count(one)

    async def _pair(self, span: Span) -> tuple[CallScores, int]:
        """Return (the result of the call, requests that it took)."""
        recorded = await background(lambda: self._recordings.open(span))
        if isinstance(recorded, str):
            return CallScores(call_name(span.rollout, span.attempt, span.sequence), problem=recorded), 0
        of = recorded.name
        asked = [leg for leg in ARM_OF if (of, leg) not in self._kept]
        async with asyncio.TaskGroup() as group:
            sender = [group.create_task(self._leg(recorded, leg, arm)) for leg, arm in ARM_OF.items()]
        answers = [done.result() for done in sender]
        failed = answers[0].failed, answers[1].failed
        if all(failed):
            self._keyless = self._keyless or without_key(self._context.pools.get(span.upstream or ""))
            return CallScores(of, problem=answers[1].problem or "", failed=failed), len(asked)
        one, first = await self._score(recorded, answers[0])
        other, second = await self._score(recorded, answers[1])
        unjudged = "" if one is not None and other is not None else "the judge gave no score"
        return CallScores(of, one, other, unjudged, failed), len(asked) + first + second

    async def _leg(self, recorded: ReplayableCall, leg: str, arm: Arm) -> OutboundResult:
        kept = self._kept.get((recorded.name, leg))
        if kept is not None:
            return await background(lambda: self._answered(kept))
        question = await background(lambda: self._recordings.question(recorded, arm, leg))
        return OutboundResult(None, 0.0, question) if isinstance(question, str) else await self.sender.ask(question)

    def _answered(self, span: Span) -> OutboundResult:
        """Return an answer from before a restart."""
        exchange = self._context.tape.exchange(span)
        if exchange is None or span.status != SpanStatus.OK:
            return OutboundResult(None, (span.duration_ns or 0) / 1e9, span.error)
        return OutboundResult(read_exchange(span.dialect, exchange, span), (span.duration_ns or 0) / 1e9)

    async def _score(self, recorded: ReplayableCall, answer: OutboundResult) -> tuple[float | None, int]:
        if answer.turn is None:
            return 0.0, 0
        return await self._judge.score(recorded.turn, answer.turn, {REPLAY_OF: recorded.name})

    # -- counting ----------------------------------------------------------------------------------------------------

    def _count(self, pair: CallScores) -> None:
        """Count the next call in order; calls after the decision change nothing."""
        if self._over:
            return
        self._progress.done += 1
        self._failed.update(leg for leg, failed in zip((CANDIDATE, INCUMBENT), pair.failed, strict=True) if failed)
        if pair.candidate is None or pair.incumbent is None or pair.problem:
            self._unknown[pair.problem] += 1
            return
        self._scored(pair.call, pair.candidate, pair.incumbent)

    def _report(self) -> JobReport:
        unknown, calls = self._unknown.total(), self._trial.calls
        if unknown > calls or not calls:
            return JobReport(False, self._silence(unknown, calls), self.evidence())
        verdict = self._trial.verdict(used_up=True)
        assert verdict is not None
        why = self._trial.sentence(verdict)
        if unknown:
            why += f"; {unknown} more calls say nothing ({self._unknown.most_common(1)[0][0]})"
        return JobReport(verdict != "fail", why, self.evidence(verdict))

    def _silence(self, unknown: int, calls: int) -> str:
        if not unknown:
            return "no call was asked: the budget of this stage is used up; raise replay.calls"
        reason = self._unknown.most_common(1)[0][0]
        why = f"nothing is known of {unknown} of {unknown + calls} calls: {reason}"
        if self._keyless and ("HTTP 401" in reason or "HTTP 403" in reason):
            why += "; agents' own keys are never recorded: give the upstream one of its own (key_env)"
        return why

    def evidence(self, verdict: PassVerdict | None = None) -> dict[str, Any]:
        policy, release = self._policy, self._release
        return {
            "verdict": verdict or "unknown",
            **self._trial.figures(),
            "unknown": dict(self._unknown.most_common(SHOWN)),
            "passed_over": dict(self._passed_over),
            "failed": dict(self._failed),
            "requests": self.sender.spent,
            "worse": self._worse[:SHOWN],
            "spans": f"{self.sender.rollout}/{self.sender.attempt}",
            "judge": release.policy.judge,
            "margin": policy.margin,
            "alpha": REPLAY_ALPHA,
            "seed": release.salt,
            "until_ns": release.changed_ns,
        }
