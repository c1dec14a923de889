"""The stage *replayed*: recorded calls are asked again of the candidate and of the incumbent, and compared.

Both legs get the recorded request, with their version in it, at the same time. The policy's judge scores each answer
against the recorded one, and `gateway.canary.pass_test` says what follows. A leg that failed (an HTTP error, no answer
in time) scores 0. A call is left out if both legs failed or the judge could not judge it. If that happens to more than
half of the calls, there is no result and the candidate does not pass. Without recorded calls it does not pass either:
the policy must skip the stage, and the audit shows that.

A replay sees one step and cannot know what would have come after another one. So it stops what is plainly worse and
promotes nothing. If the policy wants it, whole rollouts are then rehearsed (`gateway.releases.rehearsal.stage`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.gateway.calls.turns import read_exchange
from penstock.gateway.canary.pass_test import InOrder, Trial, Verdict
from penstock.gateway.model.attributes import LEG, REPLAY_OF
from penstock.gateway.model.policy import REPLAY_ALPHA
from penstock.gateway.model.release import Release
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.releases.jobs import Progress, Report
from penstock.gateway.releases.replay.judges import Judge, JudgeError, make_judge
from penstock.gateway.releases.replay.questions import CANDIDATE, INCUMBENT, place
from penstock.gateway.releases.replay.recorded_calls import Recorded, Recordings, without_key
from penstock.gateway.releases.replay.sender import Answer, Context, Sender, background

HOPELESS: Final = 10
"""After so many calls without any result the stage is given up."""
SHOWN: Final = 20
"""Calls that are named in the evidence because the candidate lost there."""


class Replay:
    """Recorded calls, asked again."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def __call__(self, release: Release, progress: Progress) -> Report:
        """Whether the candidate passes."""
        replaying = Replaying(self._context, release, progress)
        try:
            report = await replaying.run()
        except JudgeError as error:
            report = Report(False, str(error), replaying.evidence())
        await replaying.sender.close(report.why)
        return report


@dataclass(frozen=True, slots=True)
class Pair:
    """What became of one call."""

    call: str
    candidate: float | None = None
    """Score of the candidate's answer; None when nothing is known."""
    incumbent: float | None = None
    problem: str = ""
    """Why nothing is known."""
    failed: tuple[bool, bool] = (False, False)
    """Which leg failed, candidate and incumbent."""


class Replaying:
    """One replay."""

    def __init__(self, context: Context, release: Release, progress: Progress) -> None:
        policy = release.policy.replay
        self.sender = Sender(context, release, "replay", policy.budget, policy.concurrency)
        self._context = context
        self._release = release
        self._policy = policy
        self._progress = progress
        self._recordings = Recordings(context, release)
        self._trial = Trial(policy.margin, REPLAY_ALPHA)
        self._order: InOrder[Pair] = InOrder()
        self._kept: dict[tuple[str, str], Span] = {}
        """What was answered before the gateway was restarted, by call and leg."""
        self._judge: Judge
        self._failed: Counter[str] = Counter()
        self._unknown: Counter[str] = Counter()
        self._passed_over: Counter[str] = Counter()
        self._worse: list[str] = []
        self._keyless = False

    async def run(self) -> Report:
        """Asks until it is decided; raises `JudgeError`."""
        self._judge = make_judge(self._release.policy.judge, self.sender, self._context.routes)
        for span in await self.sender.earlier():
            said = span.attributes or {}
            if span.status in (SpanStatus.OK, SpanStatus.ERROR):
                self._kept[said.get(REPLAY_OF, ""), said.get(LEG, "")] = span
        spans = await self._draw()
        self._progress.total = len(spans)
        if not spans:
            return self._nothing()
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

    async def _draw(self) -> list[Span]:
        stopped = threading.Event()
        try:
            drawn = await background(
                lambda: self._recordings.draw(self._policy.calls, self._release.salt, stopped.is_set)
            )
        finally:
            stopped.set()
        self._passed_over = drawn.passed_over
        return drawn.spans

    @property
    def _over(self) -> bool:
        hopeless = not self._trial.calls and self._unknown.total() >= HOPELESS
        return hopeless or self._trial.verdict() is not None

    # -- asking ------------------------------------------------------------------------------------------------------

    async def _work(self, calls: Iterator[tuple[int, Span]]) -> None:
        """One call after the other, while there is budget for all that it may take."""
        cost = 2 + 2 * self._judge.requests
        while not self._over and self.sender.reserve(cost):
            number, span = next(calls, (0, None))
            if span is None:
                self.sender.release(cost)
                return
            pair, used = await self._pair(span)
            self.sender.release(cost - used)
            for one in self._order.put(number, pair):
                self._count(one)

    async def _pair(self, span: Span) -> tuple[Pair, int]:
        """(what became of the call, requests that it took)."""
        recorded = await background(lambda: self._recordings.open(span))
        if isinstance(recorded, str):
            return Pair(place(span.rollout, span.attempt, span.sequence), problem=recorded), 0
        release, of = self._release, recorded.name
        legs = ((CANDIDATE, release.candidate), (INCUMBENT, release.stable))
        asked = [leg for leg, _ in legs if (of, leg) not in self._kept]
        async with asyncio.TaskGroup() as group:
            sender = [group.create_task(self._leg(recorded, leg, version)) for leg, version in legs]
        answers = [done.result() for done in sender]
        failed = answers[0].failed, answers[1].failed
        if all(failed):
            self._keyless = self._keyless or without_key(self._context.pools.get(span.upstream or ""))
            return Pair(of, problem=answers[1].problem or "", failed=failed), len(asked)
        one, first = await self._score(recorded, answers[0])
        other, second = await self._score(recorded, answers[1])
        unjudged = "" if one is not None and other is not None else "the judge gave no score"
        return Pair(of, one, other, unjudged, failed), len(asked) + first + second

    async def _leg(self, recorded: Recorded, leg: str, version: str) -> Answer:
        kept = self._kept.get((recorded.name, leg))
        if kept is not None:
            return await background(lambda: self._answered(kept))
        question = await background(lambda: self._recordings.question(recorded, version, leg))
        return Answer(None, 0.0, question) if isinstance(question, str) else await self.sender.ask(question)

    def _answered(self, span: Span) -> Answer:
        """An answer from before a restart."""
        exchange = self._context.tape.exchange(span)
        if exchange is None or span.status != SpanStatus.OK:
            return Answer(None, (span.duration_ns or 0) / 1e9, span.error)
        return Answer(read_exchange(span.dialect, exchange, span), (span.duration_ns or 0) / 1e9)

    async def _score(self, recorded: Recorded, answer: Answer) -> tuple[float | None, int]:
        if answer.turn is None:
            return 0.0, 0
        return await self._judge.score(recorded.turn, answer.turn, {REPLAY_OF: recorded.name})

    # -- counting ----------------------------------------------------------------------------------------------------

    def _count(self, pair: Pair) -> None:
        """The next call in order. What comes after the end changes nothing."""
        if self._over:
            return
        self._progress.done += 1
        self._failed.update(leg for leg, failed in zip((CANDIDATE, INCUMBENT), pair.failed, strict=True) if failed)
        if pair.candidate is None or pair.incumbent is None or pair.problem:
            self._unknown[pair.problem] += 1
            return
        self._trial.add(pair.candidate, pair.incumbent)
        if pair.candidate < pair.incumbent:
            self._worse.append(pair.call)

    def _nothing(self) -> Report:
        name = self._release.resource
        why = f"there are no recorded calls of {name} that can be asked again"
        for reason, count in self._passed_over.most_common(1):
            why += f" ({count} were passed over: {reason})"
        return Report(False, f"{why}; record some, or set replayed = 'skip'", self.evidence())

    def _report(self) -> Report:
        unknown, calls = self._unknown.total(), self._trial.calls
        if unknown > calls or not calls:
            return Report(False, self._silence(unknown, calls), self.evidence())
        verdict = self._trial.verdict(used_up=True)
        assert verdict is not None
        why = self._trial.sentence(verdict)
        if unknown:
            why += f"; {unknown} more calls say nothing ({self._unknown.most_common(1)[0][0]})"
        return Report(verdict != "fail", why, self.evidence(verdict))

    def _silence(self, unknown: int, calls: int) -> str:
        if not unknown:
            return "no call was asked: the budget of this stage is used up; raise replay.budget"
        reason = self._unknown.most_common(1)[0][0]
        why = f"nothing is known of {unknown} of {unknown + calls} calls: {reason}"
        if self._keyless and ("HTTP 401" in reason or "HTTP 403" in reason):
            why += "; agents' own keys are never recorded: give the upstream one of its own (key_env)"
        return why

    def evidence(self, verdict: Verdict | None = None) -> dict[str, Any]:
        """What the audit keeps."""
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
