"""The stage *replayed*: recorded calls are sent again to the candidate and to the incumbent, and compared.

Both legs get the recorded request, with their version in it, at the same time. The policy's judge scores each answer
against the recorded one, and `releases.canary.evidence.PassTest` decides. A leg that failed (an HTTP error, no answer
in time) scores 0. A call is left out if both legs failed or the judge could not judge it. If that happens to more than
half of the calls, there is no result and the candidate does not pass. Without recorded calls it does not pass either:
the policy must skip the stage, and the audit shows that.

Calls are drawn from the newest rollouts, one of each, then a second of each and so on, up to `FEW`, so that a long
rollout does not dominate. The choice among a rollout's calls, and the order in which they are sent, follow from the
seed. Only calls that ended before the stage began are drawn, so a restarted gateway draws the same calls again.

A call qualifies when it was answered and used the resource: its span names it, or it asked for the model, or one of its
texts is known to be sent by agents. It is sent again as it was sent upstream, with another version in place of its own.
For other models that are resources it gets the stable version, which certainly exists.

A replay sees one step and cannot know what would have come after another one. So it stops a plainly worse candidate and
promotes nothing. If the policy wants it, whole rollouts are then rehearsed (`trials.rehearsal`).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from penstock.gateway.model.facts import LEG, REPLAY_OF, is_release_call
from penstock.gateway.model.release import Arm, Release
from penstock.gateway.model.release_policy import REPLAY_ALPHA
from penstock.gateway.model.resource import ModelVersion
from penstock.gateway.model.rollout import Rollout
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Exchange, Turn
from penstock.gateway.reading.turns import decode_exchange, read_exchange
from penstock.gateway.releases.canary.evidence import PassVerdict, ReorderBuffer
from penstock.gateway.releases.canary.outcomes import Requester, audience_includes
from penstock.gateway.releases.catalog import TextFindings, find_resources
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.releases.prompt_recogniser import Recogniser, RegisteredText
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store.directory import TapeError, is_damage, unless_damaged
from penstock.gateway.traffic.trials.judges import SHOWN, ArmComparison, next_action
from penstock.gateway.traffic.trials.sender import (
    ARM_OF,
    CANDIDATE,
    INCUMBENT,
    OutboundRequest,
    OutboundResult,
    ReleaseContext,
    background,
    call_name,
    rewrite,
    unrepeatable,
    without_masked_values,
)
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.wire.capture import original
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.http.redaction import MASK
from penstock.gateway.wire.http.request import HttpRequest

FEW = 5
"""Calls that are drawn from one rollout at most."""
TRIES = 20
"""Calls of a rollout that are examined for one that qualifies."""
HISTORY = 20_000
"""Rollouts that are examined, newest first."""
DAMAGED = "its record cannot be read; run `penstock check`"
"""The reason for which a damaged call, or rollout, is passed over."""


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
        return self._compared(verdict, self.evidence(verdict), why)

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


def without_key(pool: ConnectionPool | None) -> bool:
    """True if calls to an upstream need the agents' own keys, which are never recorded."""
    return pool is not None and not pool.config.has_key


# -- recorded calls, read on threads -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayableCall:
    """A call that can be sent again."""

    span: Span
    exchange: Exchange
    dialect: Dialect
    turn: Turn
    prompts: TextFindings | None
    """The places of the resource in it, if that is a text."""

    @property
    def name(self) -> str:
        """The name of the call: ROLLOUT/ATTEMPT#SEQUENCE."""
        return call_name(self.span.rollout, self.span.attempt, self.span.sequence)


@dataclass(slots=True)
class CallDraw:
    """The calls to send again."""

    spans: list[Span] = field(default_factory=list[Span])
    """In the order in which they are sent."""
    passed_over: Counter[str] = field(default_factory=Counter[str])
    """Numbers of calls that used the resource and do not qualify, by reason."""


class ReplaySource:
    """Recorded calls of a release's resources."""

    def __init__(self, context: ReleaseContext, release: Release) -> None:
        self._tape = context.tape
        self._pools = context.pools
        self._catalog = context.pins.catalog
        self._release = release
        self._known: dict[tuple[str, str], RegisteredText] = {}
        """Recognisers of a version in the requests that have it, by resource and version."""
        self._models: list[str] = []
        """Resources of the release that are models; the others are texts."""
        for name in release.resources:
            found = ReleaseReader(self._tape).resource(name)
            for version in [] if found is None else found[1]:
                content = version.read()
                if isinstance(content, ModelVersion):
                    self._models.append(name)
                    break
                self._known[name, version.version] = RegisteredText.of(name, content)
        self._texts = [name for name in release.resources if name not in self._models]

    def draw(self, wanted: int, seed: str, stopped: Callable[[], bool]) -> CallDraw:
        """Return up to `wanted` calls. `stopped`: called between rollouts; True when nobody wants them any more."""
        drawn, turns = CallDraw(), list[Iterator[Span]]()
        for _, rollout in islice(self._tape.rollouts(), HISTORY):
            if stopped() or len(drawn.spans) >= wanted:
                break
            calls = self._calls(rollout, random.Random(f"{seed}/{rollout.id}"), drawn.passed_over)
            if (first := next(calls, None)) is not None:
                drawn.spans.append(first)
                turns.append(calls)
        for _ in range(FEW - 1):
            for calls in turns:
                if not stopped() and len(drawn.spans) < wanted and (more := next(calls, None)) is not None:
                    drawn.spans.append(more)
        random.Random(seed).shuffle(drawn.spans)
        return drawn

    def _calls(self, rollout: Rollout, rng: random.Random, passed_over: Counter[str]) -> Iterator[Span]:
        """Yield the calls of a rollout that qualify, in a random order."""
        every = unless_damaged(lambda: list(self._tape.spans(rollout.id)))
        if every is None:
            passed_over[DAMAGED] += 1
            return
        spans = [span for span in every if self.qualifies(span, rollout)]
        rng.shuffle(spans)
        for span in spans[:TRIES]:
            found = self.open(span)
            if isinstance(found, ReplayableCall):
                yield span
            elif found:
                passed_over[found] += 1

    def qualifies(self, span: Span, rollout: Rollout) -> bool:
        """True if a call qualifies, as far as its head tells."""
        release, versions = self._release, span.versions or {}
        if span.kind != "llm" or span.status != SpanStatus.OK or not span.choices:
            return False
        if not by_name(span.dialect).makes_samples:
            return False
        if is_release_call(span) or span.truncated or (span.end_ns or 0) > release.changed_ns:
            return False
        if any(versions.get(name) == version for name, version in release.arm_versions("candidate").items()):
            # The candidate's own answer is no reference.
            return False
        if not self._texts and span.model not in self._models:
            return False
        asker = Requester(span.agent or "", span.model or "", rollout.mode, rollout.metadata or {})
        return audience_includes(release.only, asker)

    def open(self, span: Span) -> ReplayableCall | str:
        """Return the whole call; else why it does not qualify, empty when it does not concern the resource."""
        dialect = by_name(span.dialect)
        try:
            exchange = self._tape.exchange(span)
        except TapeError as error:
            if not is_damage(error):
                raise
            return DAMAGED
        if exchange is None:
            return "its bytes were not kept"
        exchange = decode_exchange(exchange)
        asked = original(dialect, exchange.request_body, span.attributes)
        exchange = exchange.model_copy(update={"request_body": asked})
        prompts = self._find(span, exchange.request_body, dialect) if self._texts else None
        if prompts is not None and not prompts.uses:
            if any(name in (span.versions or {}) for name in self._texts):
                return "its text cannot be told from what stands around it"
            if span.model not in self._models:
                return ""
            prompts = None
        problem = unrepeatable(dialect, exchange.request_body)
        if problem is not None:
            return problem
        turn = read_exchange(span.dialect, exchange, span)
        return (
            ReplayableCall(span, exchange, dialect, turn, prompts) if next_action(turn) else "its answer cannot be read"
        )

    def _find(self, span: Span, body: bytes, dialect: Dialect) -> TextFindings:
        known: list[RegisteredText] = []
        for name in self._texts:
            written = self._known.get((name, (span.versions or {}).get(name, "")))
            known += self._catalog.recogniser.only(name).known if written is None else [written]
        return find_resources(body, dialect, Recogniser(known))

    # -- asked again -------------------------------------------------------------------------------------------------

    def question(self, recorded: ReplayableCall, arm: Arm, leg: str) -> OutboundRequest | str:
        """Return the call with the versions of an arm in it; else why that is impossible."""
        span, catalog = recorded.span, self._catalog
        model = span.model if span.model in catalog.models else None
        given = self._release.arm_versions(arm)
        versions = {name: version for name, version in given.items() if name in self._texts or name == model}
        if model is not None and model not in versions:
            versions[model] = catalog.stable[model].version
        made = rewrite(catalog, recorded.exchange.request_body, recorded.prompts, model, versions)
        if isinstance(made, str):
            return made
        body, weights = made
        pool = self._pools.get((span.upstream or "") if weights is None else weights.upstream)
        if pool is None:
            return f"upstream {span.upstream if weights is None else weights.upstream!r} is not configured any more"
        return OutboundRequest(
            pool,
            recorded.dialect,
            _request(span, recorded.exchange),
            without_masked_values(span.path),
            body,
            {REPLAY_OF: recorded.name, LEG: leg},
            span.model,
            span.agent,
            versions,
        )


def _request(span: Span, exchange: Exchange) -> HttpRequest:
    """Return the request's method and headers, without those whose values were masked."""
    request = HttpRequest()
    request.method = span.method
    for name, value in exchange.request_headers:
        if MASK.decode() not in value:
            request.headers.append((name.lower().encode("latin-1"), name.encode("latin-1"), value.encode("latin-1")))
    return request
