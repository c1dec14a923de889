"""Judges the calls of a rollout one by one: can they be trained on, and if not why? Pure; odd bytes never raise.

A call can be trained on when its answer is whole, comes from the model that is trained, and brings the engine's own
token ids and log-probabilities, and when its attempt has ended, has a trusted reward and no gap. Everything else to say
is a `Finding` (`gateway.diagnosis.findings`); some findings block, others only say that the sample is not what one
might think.

Calls of an attempt are merged into one training sequence where a prompt begins with the exact tokens of an earlier call
and its answer. If the messages go on but the tokens do not, the text was tokenised anew (`retokenised`): both calls are
still good, as two sequences. The diagnosis remembers hashes, so its memory does not grow with the tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TypeVar

from penstock.gateway.calls.turns import plain_bodies
from penstock.gateway.diagnosis.degraded import Degraded
from penstock.gateway.diagnosis.findings import (
    finding,
    of_attempt,
    of_head,
    of_request,
    of_rollout,
    of_tokens,
    of_tools,
    settled,
)
from penstock.gateway.diagnosis.tool_uses import tools_used
from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.loose_json import loads, obj
from penstock.gateway.dialects.token_ids import Tokens, common, length, read_tokens
from penstock.gateway.model.answers import AttemptDiagnosis, CallDiagnosis, Diagnosis, Finding
from penstock.gateway.model.attributes import BEGAN
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.rollout import Attempt, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.model.wording import counted

T = TypeVar("T")

MOST_CALLS = 2_000
"""Calls whose bytes one diagnosis reads."""


@dataclass(slots=True)
class Past:
    """The calls of an attempt so far, by hash."""

    tokens: dict[bytes, int] = field(default_factory=dict[bytes, int])
    """A prompt with an answer -> the call's sequence."""
    lengths: set[int] = field(default_factory=set[int])
    """Sizes of these."""
    stories: dict[bytes, Span] = field(default_factory=dict[bytes, Span])
    """A conversation with its answer -> the call."""
    settled: frozenset[int] = frozenset()
    """Calls that were refused, and whose agent then asked otherwise."""
    agents: Degraded = field(default_factory=Degraded)
    """What agents have lost to their base URL."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is judged, and by which rules."""

    rollout: RolloutSummary
    model: str | None
    exchange: Callable[[Span], Exchange | None]


def diagnose(
    rollout: RolloutSummary,
    spans: Iterable[Span],
    exchange: Callable[[Span], Exchange | None],
    model: str | None = None,
) -> Diagnosis:
    """Judge a rollout by its spans, in their order. `exchange` gives a call's bytes and is asked for one at a time;
    `model` is the one that is trained, the one of most calls when not given."""
    heads = [span for span in spans if span.kind in ("llm", "tool", "reward")]
    calls = [span for span in heads if span.kind == "llm"]
    case = Case(rollout, model or _main_model(calls), exchange)
    looked_at = frozenset((span.attempt, span.sequence) for span in calls[:MOST_CALLS])
    attempts: list[AttemptDiagnosis] = []
    for attempt in rollout.attempts:
        own = [span for span in heads if span.attempt == attempt.id]
        judged = [span for span in own if (span.attempt, span.sequence) in looked_at]
        made = _attempt(case, attempt, list(of_attempt(rollout, attempt, own)), judged)
        attempts.append(_with_tools(case, attempt, own, made))
    about = list(of_rollout(rollout))
    return Diagnosis(
        rollout=rollout.id,
        status=rollout.status,
        model=case.model,
        reward=rollout.reward,
        trainable=any(attempt.trainable for attempt in attempts),
        verdict=_verdict(rollout, about, attempts),
        findings=about,
        attempts=attempts,
        skipped=len(calls) - len(looked_at),
    )


def _with_tools(case: Case, attempt: Attempt, spans: Sequence[Span], made: AttemptDiagnosis) -> AttemptDiagnosis:
    """The diagnosis of an attempt with what there is to say of its tools. None of it keeps a call out of training."""
    if not any(span.kind == "tool" or span.tool_calls for span in spans):
        return made
    found = dict[int, list[Finding]]()
    for sequence, one in of_tools(case.rollout, attempt, tools_used(spans, case.exchange)):
        found.setdefault(sequence, []).append(one)
    calls = [
        call.model_copy(update={"findings": [*call.findings, *found.get(call.sequence, ())]}) for call in made.calls
    ]
    return made.model_copy(update={"calls": calls})


def _main_model(calls: Iterable[Span]) -> str | None:
    counts = Counter(span.model for span in calls if span.model and by_name(span.dialect).generates)
    return counts.most_common(1)[0][0] if counts else None


def _attempt(case: Case, attempt: Attempt, about: list[Finding], spans: Sequence[Span]) -> AttemptDiagnosis:
    past, blocked = Past(settled=settled(spans)), any(finding.blocks for finding in about)
    calls = [_call(case, attempt, span, past, blocked) for span in spans]
    lost = [finding(code, reason, case.rollout, attempt.id) for code, reason in past.agents.reasons()]
    good = {call.sequence for call in calls if call.trainable}
    return AttemptDiagnosis(
        attempt=attempt.id,
        status=attempt.status,
        reward=attempt.reward,
        trainable=len(good),
        sequences=sum(call.trainable and call.goes_on not in good for call in calls),
        findings=[*about, *lost],
        calls=calls,
    )


def _call(case: Case, attempt: Attempt, span: Span, past: Past, blocked: bool) -> CallDiagnosis:
    found = list(of_head(case.rollout, attempt, span, case.model, past.settled))
    tokens, goes_on = Tokens(), None
    if by_name(span.dialect).generates:
        exchange = case.exchange(span)
        tokens = _tokens(span, exchange) if exchange else tokens
        found += of_tokens(case.rollout, span, tokens if exchange else None)
        if exchange:
            past.agents.add(span, exchange)
        if exchange and tokens.complete:
            found += of_request(case.rollout, span, obj(loads(plain_bodies(exchange)[0])))
            goes_on, before = _place(past, span, exchange, tokens)
            found += [] if before is None else [_retokenised(case, span, before, tokens)]
    return CallDiagnosis(
        sequence=span.sequence,
        model=span.model,
        prompt_tokens=length(tokens.prompt) or None,
        output_tokens=tokens.generated or None,
        trainable=not blocked and not any(finding.blocks for finding in found),
        goes_on=goes_on,
        findings=sorted(found, key=lambda finding: not finding.blocks),
    )


def _place(past: Past, span: Span, exchange: Exchange, tokens: Tokens) -> tuple[int | None, Span | None]:
    """The earlier call whose tokens this one continues, else the one whose messages it continues. From then on it is an
    earlier call itself.
    """
    dialect, (request, response) = by_name(span.dialect), plain_bodies(exchange)
    cuts = [size for size in sorted(past.lengths) if size <= len(tokens.prompt)]
    goes_on = _newest(past.tokens, _hashes(tokens.prompt[a:b] for a, b in pairwise([0, *cuts])))
    story, reply = dialect.conversation(request), dialect.reply(response, span.stream)
    before = _newest(past.stories, _hashes(map(_framed, story))) if goes_on is None else None
    for output in tokens.outputs.values():
        past.lengths.add(len(tokens.prompt) + len(output.ids))
        past.tokens[_hashes([tokens.prompt, output.ids])[-1]] = span.sequence
    if reply:
        past.stories[_hashes(map(_framed, [*story, reply]))[-1]] = span
    return goes_on, before


def _retokenised(case: Case, span: Span, before: Span, tokens: Tokens) -> Finding:
    earlier = case.exchange(before)
    old = _tokens(before, earlier) if earlier else Tokens()
    whole = old.prompt + (old.outputs[min(old.outputs)].ids if old.outputs else b"")
    same = common(whole, tokens.prompt)
    where = "prompt" if same < length(old.prompt) else "answer"
    reason = f"the messages go on from #{before.sequence}, the tokens differ from {same:,} on, in its {where}"
    made = finding("retokenised", reason, case.rollout, span.attempt, model=span.model or "its model")
    if (began := (span.attributes or {}).get(BEGAN)) is None:
        return made
    # Its route is exact already, and says why the session could not go on.
    look = f"penstock show {case.rollout.id}/{span.attempt}#{span.sequence} --raw request"
    return made.model_copy(update={"reason": f"{reason}; its session began anew ({began})", "fix": look})


def _tokens(span: Span, exchange: Exchange) -> Tokens:
    """None where no engine gives them, whatever the answer looks like."""
    if not by_name(span.dialect).token_fields:
        return Tokens()
    return read_tokens(plain_bodies(exchange)[1], span.stream)


def _hashes(pieces: Iterable[bytes]) -> list[bytes]:
    """The hash of what there is after each piece."""
    whole = blake2b(digest_size=16)
    found: list[bytes] = []
    for piece in pieces:
        whole.update(piece)
        found.append(whole.digest())
    return found


def _framed(message: bytes) -> bytes:
    return b"%d:%s" % (len(message), message)


def _newest(known: dict[bytes, T], hashes: Sequence[bytes]) -> T | None:
    """What the longest known piece stands for."""
    return next((known[hash] for hash in reversed(hashes) if hash in known), None)


def _verdict(rollout: RolloutSummary, about: Sequence[Finding], attempts: Sequence[AttemptDiagnosis]) -> str:
    good = [attempt for attempt in attempts if attempt.trainable]
    if not good:
        return f"{rollout.id} cannot be trained on: {_reason(about, attempts)}."
    calls = f"{sum(attempt.trainable for attempt in good):,} of {sum(len(a.calls) for a in attempts):,} calls"
    rows = counted(sum(attempt.sequences for attempt in good), "sequence")
    return f"{rollout.id} can be trained on: {calls}, {rows}, reward {good[-1].reward}."


def _reason(about: Sequence[Finding], attempts: Sequence[AttemptDiagnosis]) -> str:
    """The gravest finding of the newest attempt."""
    if not attempts:
        return about[0].reason if about else "it has no attempts"
    newest = attempts[-1]
    reasons = [finding.reason for finding in newest.findings if finding.blocks] or _counted(newest.calls)
    return f"{newest.attempt}: {reasons[0] if reasons else 'it has no calls'}"


def _counted(calls: Sequence[CallDiagnosis]) -> list[str]:
    """Blocking findings with their numbers of calls, the most common first."""
    codes = Counter(finding.code for call in calls for finding in call.findings[:1] if finding.blocks)
    return [", ".join(f"{code} in {n:,} of {len(calls):,} calls" for code, n in codes.most_common())] if codes else []
