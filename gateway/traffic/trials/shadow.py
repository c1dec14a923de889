"""The stage *shadowed*: a sample of live calls is also sent to the candidate, after their answers have gone out.

Every call is offered when it is over (`offer`); that costs nothing while no release mirrors (`mirrors` is empty). A
call is mirrored when it used the resource, its rollout is on no candidate, the draw selects it and a slot is free.
Nothing waits: a call that finds no slot is counted and dropped. The mirrored request is the request that the candidate
would have got, with the same headers. It begins when the call is on the tape, which is after its last byte has gone.

The stage is over when enough calls were mirrored, or the budget is used up. It passes unless the candidate fails more
often than the very calls that it mirrors: paired errors, in the order of the calls, in the betting test
(`gateway.releases.canary.evidence`) with alpha = 0.05; it ends at once when that is shown. Agreement with the live
answers and latency are reported and decide nothing: without a second leg of the incumbent they contain its own noise.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from penstock.gateway.model.facts import LEG, SHADOW_OF
from penstock.gateway.model.release import Pin, Release
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.releases.canary.evidence import PairedTest, ReorderBuffer
from penstock.gateway.releases.canary.outcomes import Requester, audience_includes
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.trials.judges import AnswerJudge, JudgeError, make_judge, next_action
from penstock.gateway.traffic.trials.sender import (
    CANDIDATE,
    OutboundRequest,
    OutboundResult,
    ReleaseContext,
    ReleaseSender,
    background,
    call_name,
    rewrite,
    unrepeatable,
)
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects.request_body import replace_model

ALPHA: Final = 0.05
"""Greatest probability of stopping a candidate that fails no more often."""


class ShadowJob:
    """The job of the stage `replayed`; every finished call is offered to it."""

    def __init__(self, context: ReleaseContext) -> None:
        self._context = context
        self.mirrors: dict[str, Mirror] = {}
        """Releases that mirror now, by name."""

    def offer(self, record: CallRecord, found: ResourceUse, pins: Mapping[str, Pin]) -> None:
        """Offer a finished call that was handed to the recorder; never raises and never waits."""
        for mirror in self.mirrors.values():
            mirror.offer(record, found, pins)

    async def __call__(self, release: Release, progress: JobProgress) -> JobReport:
        """Report whether the candidate passes; waits for traffic as long as it takes."""
        mirror = Mirror(self._context, release, progress)
        try:
            await mirror.prepare()
            self.mirrors[release.id] = mirror
            # Once the total is shown, people may rely on it that calls are mirrored.
            progress.total = release.policy.shadow.calls
            report = await mirror.run()
        except JudgeError as error:
            report = JobReport(False, str(error), mirror.evidence())
        finally:
            self.mirrors.pop(release.id, None)
            await mirror.stop()
        await mirror.sender.close(report.why)
        return report


@dataclass(frozen=True, slots=True)
class MirroredCall:
    """A live call and its mirror."""

    candidate: bool
    live: bool
    """True for each of the two that was answered."""
    seconds: tuple[float, float] | None = None
    """Seconds of the candidate and of the live call, where both were answered."""
    score: float | None = None
    """Agreement; None where it was not judged."""


class Mirror:
    """The mirroring of one release."""

    def __init__(self, context: ReleaseContext, release: Release, progress: JobProgress) -> None:
        self._policy = policy = release.policy.shadow
        self.sender = ReleaseSender(context, release, "shadow", policy.budget, policy.concurrency)
        self._context = context
        self._release = release
        self._progress = progress
        self._judge: AnswerJudge
        self._random = random.Random(release.salt)
        self.tasks: set[asyncio.Task[None]] = set()
        """Mirrored requests under way."""
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._begun = 0
        self._order: ReorderBuffer[MirroredCall | None] = ReorderBuffer()
        self._test = PairedTest(0.0)
        self._done: list[MirroredCall] = []
        self._left_out: Counter[str] = Counter()

    async def prepare(self) -> None:
        """Count the calls that were mirrored before a restart; raises `JudgeError`."""
        self._judge = await make_judge(self._release.policy.judge, self.sender, self._context.routes)
        for span in await self.sender.earlier_requests():
            live = await background(lambda span=span: self._live(span))
            if live is not None and span.status in (SpanStatus.OK, SpanStatus.ERROR):
                self._count(_again(span, live))
        self._look()

    def _live(self, span: Span) -> Span | None:
        said = span.attributes or {}
        name, _, sequence = str(said.get(SHADOW_OF, "")).rpartition("#")
        rollout, _, attempt = name.partition("/")
        return self._context.tape.span(rollout, attempt, int(sequence)) if said.get(LEG) == CANDIDATE else None

    async def run(self) -> JobReport:
        """Wait until enough calls were mirrored; raises `JudgeError`."""
        await self._over
        return self._report()

    async def stop(self) -> None:
        """Cancel the mirrored requests and wait for their end."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # -- a call ------------------------------------------------------------------------------------------------------

    def offer(self, record: CallRecord, found: ResourceUse, pins: Mapping[str, Pin]) -> None:
        """Mirror a finished call if it qualifies."""
        if not set(self._release.resources) & set(found.resources) or self._over.done():
            return
        if any(pin.arm == "candidate" and not pin.mixed for pin in pins.values()):
            return
        if self._random.random() >= self._policy.share or len(self._done) + len(self.tasks) >= self._policy.calls:
            return
        if len(self.tasks) >= self._policy.concurrency:
            self._left_out["no slot was free"] += 1
        elif self.sender.reserve(1 + self._judge.requests):
            task = asyncio.ensure_future(self._mirror(self._begun, record, found, pins))
            self._begun += 1
            self.tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._over.done():
            self._over.set_exception(error)
        self._look()

    async def _mirror(self, number: int, record: CallRecord, found: ResourceUse, pins: Mapping[str, Pin]) -> None:
        await self._context.recorder.flush()
        used, made = 0, await background(lambda: self._question(record, found, pins))
        mirrored: MirroredCall | None = None
        if isinstance(made, OutboundRequest):
            answer = await self.sender.ask(made)
            mirrored, judged = await self._compared(record, answer, made)
            used = 1 + judged
        elif made:
            self._left_out[made] += 1
        self.sender.release(1 + self._judge.requests - used)
        for one in self._order.put(number, mirrored):
            if one is not None:
                self._count(one)

    def _question(self, record: CallRecord, found: ResourceUse, pins: Mapping[str, Pin]) -> OutboundRequest | str:
        """Return the call as the candidate would have got it; else the reason why it is not mirrored, empty when it
        does not concern the release."""
        call, pool, catalog, release = record.call, record.pool, self._context.pins.catalog, self._release
        rollout, address = self._context.tape.rollout(call.address.rollout), call.address
        model = found.model or call.model
        mode, metadata = (address.mode, {}) if rollout is None else (rollout.mode, rollout.metadata or {})
        if not audience_includes(release.only, Requester(address.agent or "", model or "", mode, metadata)):
            return ""
        if not call.dialect.generates or record.truncated or not record.sequence or pool is None:
            return "it was not answered or recorded whole"
        problem = unrepeatable(call.dialect, record.plain)
        if problem is not None:
            return problem
        versions = {name: pins[name].version for name in found.resources}
        versions |= {name: it for name, it in release.arm_versions("candidate").items() if name in versions}
        made = rewrite(catalog, call.body, found.prompts, found.model, versions)
        if isinstance(made, str):
            return made
        body, weights = made
        if weights is None:
            # A route may have given the model another name.
            body = replace_model(body, call.dialect.model(record.plain) or "")
        elif (pool := self._context.pools.get(weights.upstream)) is None:
            return f"upstream {weights.upstream!r} is not configured any more"
        if record.convert is not None:
            body = record.convert(body)
        of = call_name(address.rollout, address.attempt, record.sequence)
        said = {SHADOW_OF: of, LEG: CANDIDATE}
        agent, families = call.address.agent, call.families
        return OutboundRequest(
            pool, call.dialect, record.request, record.path or call.path, body, said, model, agent, versions, families
        )

    async def _compared(
        self, record: CallRecord, answer: OutboundResult, asked: OutboundRequest
    ) -> tuple[MirroredCall, int]:
        """Return (the call with its mirror, requests that the judge took)."""
        if record.status != "ok" or answer.turn is None:
            return MirroredCall(answer.turn is not None, record.status == "ok"), 0
        live = await background(lambda: record.call.dialect.read(record.plain, record.response(), record.stream))
        seconds = answer.seconds, ((record.end_ns or 0) - record.request.started_ns) / 1e9
        if next_action(live) is None:
            return MirroredCall(True, True, seconds), 0
        score, used = await self._judge.score(live, answer.turn, {SHADOW_OF: asked.attributes[SHADOW_OF]})
        return MirroredCall(True, True, seconds, score), used

    # -- counting ----------------------------------------------------------------------------------------------------

    def _count(self, one: MirroredCall) -> None:
        """Count the next call in order."""
        self._done.append(one)
        self._progress.done = len(self._done)
        if self._test.harm < 1 / ALPHA:
            self._test.add(float(one.candidate), float(one.live))

    def _look(self) -> None:
        """End the stage if it is over."""
        spent = not self.tasks and self.sender.left < 1 + self._judge.requests
        enough = not self.tasks and len(self._done) >= self._policy.calls
        if not self._over.done() and (spent or enough or self._test.harm >= 1 / ALPHA):
            self._over.set_result(None)

    def _report(self) -> JobReport:
        figures = self.evidence()
        if not self._done:
            return JobReport(False, "no call was mirrored: the budget is used up; raise shadow.calls", figures)
        worse = self._test.harm >= 1 / ALPHA
        why = (
            f"of {len(self._done)} mirrored calls {figures['candidate_errors']:.1%} failed on the candidate and "
            f"{figures['live_errors']:.1%} live: it fails {'more often' if worse else 'not clearly more often'} "
            f"(e = {self._test.harm:.4g} of {1 / ALPHA:g})"
        )
        if "agreement" in figures:
            why += f"; its next action agrees with the live one in {figures['agreement']:.1%} of {figures['compared']}"
        return JobReport(not worse, why, figures)

    def evidence(self) -> dict[str, Any]:
        """Return the evidence for the audit chain."""
        done, policy = self._done, self._policy
        figures: dict[str, Any] = {"calls": len(done), "harm": self._test.harm, "alpha": ALPHA}
        if done:
            figures["candidate_errors"] = sum(not one.candidate for one in done) / len(done)
            figures["live_errors"] = sum(not one.live for one in done) / len(done)
        if seconds := [one.seconds for one in done if one.seconds is not None]:
            figures["candidate_p50_s"] = round(median(one for one, _ in seconds), 4)
            figures["live_p50_s"] = round(median(other for _, other in seconds), 4)
        if scores := [one.score for one in done if one.score is not None]:
            figures |= {"agreement": sum(scores) / len(scores), "compared": len(scores)}
        return figures | {
            "left_out": dict(self._left_out),
            "requests": self.sender.spent,
            "spans": f"{self.sender.rollout}/{self.sender.attempt}",
            "judge": self._release.policy.judge,
            "share": policy.share,
        }


def _again(span: Span, live: Span) -> MirroredCall:
    """Return a call that was mirrored before a restart, without a score."""
    both = span.status == live.status == SpanStatus.OK
    seconds = ((span.duration_ns or 0) / 1e9, (live.duration_ns or 0) / 1e9) if both else None
    return MirroredCall(span.status == SpanStatus.OK, live.status == SpanStatus.OK, seconds)
