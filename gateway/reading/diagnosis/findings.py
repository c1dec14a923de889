"""The rules of the diagnosis for a rollout, an attempt and a call, one function each, and the fix of each finding.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from shlex import quote
from typing import Final

from penstock.gateway.model.answers import Finding
from penstock.gateway.model.codes import FindingCode
from penstock.gateway.model.facts import CAPTURED, PREWARM, UNATTRIBUTED, is_release_call
from penstock.gateway.model.rollout import LIVE, WAITING, Attempt, AttemptStatus, Reward, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus, refused
from penstock.gateway.model.tools import ToolList
from penstock.gateway.reading.diagnosis.rows import lacks
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import Json
from penstock.gateway.wire.dialects.parts import distribution_changes, forcing_field
from penstock.gateway.wire.dialects.tokens import IDS, AnswerTokens, length
from penstock.gateway.wire.dialects.unread_content import GAP_DESCRIPTIONS, Gaps, recheck_unread

CUT: Final = frozenset({"length", "max_tokens", "max_output_tokens"})
"""Finish reasons of an answer that was not finished."""
STEERED: Final = "steered"
"""Finish reason of an answer that was ended for a successor, by `response.steer`."""
GIVEN_UP: Final = "abort"
"""vLLM's finish reason when it was stopped in the middle of an answer, which otherwise looks like a complete one."""
HARMLESS: Final[frozenset[FindingCode]] = frozenset(
    {
        *("ambiguous", "cut_off", "retokenised", "template", "forced", "sampling"),
        *("tool_unanswered", "tool_failed", "tool_denied", "tool_ambiguous"),
        *("base_url", "inlined_tools", "no_websocket"),
    }
)
"""Findings that do not keep a call out of training."""
DENIED: Final = "policy_violation"
"""The error of a tool run that a rule has stopped."""
ENDED_BADLY: Final[dict[SpanStatus, tuple[FindingCode, str]]] = {
    SpanStatus.ERROR: ("error", "it failed"),
    SpanStatus.INTERRUPTED: ("interrupted", "the gateway died while it ran"),
    SpanStatus.CANCELLED: ("cancelled", "the agent did not wait for the whole answer"),
    SpanStatus.OPEN: ("unfinished", "it still runs"),
}
_OF_TOKENS: Final = ("token_counts", "logprobs")
RETRIED: Final = "its client asked again, and the later answer counts"
_LOOK: Final = "penstock show {at}#{sequence} --raw response"
FIXES: Final[dict[FindingCode, str]] = {
    "no_reward": "penstock reward {at} VALUE",
    "untrusted_reward": "penstock reward {at} {value} --source judge",
    "unfinished": "penstock show {at}",
    "gap": "{again}",
    "ambiguous": "give each agent an address of its own (base URL .../rollout/NAME/v1), then {again}",
    "mixed_versions": "penstock spans {at} --json",
    "for_release": "penstock spans {at}",
    "no_generation": "",
    "session": "",
    "error": "{again}",
    "refused": "",
    "retry": "",
    "interrupted": "{again}",
    "cancelled": "{again}",
    "late": "finish the attempt after the agent's last call, then {again}",
    "other_model": "penstock doctor {rollout} --model {model}",
    "unattributed": "penstock show {at}#{sequence} --raw response",
    "truncated": "raise limits.recorded_bytes in penstock.toml, then {again}",
    "unreadable": _LOOK,
    "unread": f"{_LOOK}; a newer Penstock may read it, also of calls that are on the tape",
    "no_token_ids": "set train = true on the [[route]] of {model} in penstock.toml, then {again}",
    "no_logprobs": 'set train = true on the [[route]] of {model}, let the agent leave "logprobs" out, then {again}',
    "token_counts": f"{_LOOK}; update the engine, or serve without the parser of tools or reasoning that loses ids",
    "cut_off": "raise max_tokens, then {again}",
    "retokenised": 'set train = "exact" on the [[route]] of {model} in penstock.toml, then {again}',
    "template": 'set train = "exact" on the [[route]] of {model} in penstock.toml, then {again}',
    "forced": "let the agent leave the model free, or mask what the grammar forced",
    "tool_unanswered": "penstock tools {at}",
    "tool_failed": "penstock show {at}#{run}",
    "tool_denied": "penstock show {at}#{run}",
    "tool_ambiguous": "penstock tools {at}",
    "base_url": "penstock sidecar -- COMMAND, without a base URL",
    "inlined_tools": "penstock sidecar -- COMMAND, without a base URL; or ENABLE_TOOL_SEARCH=true",
    "no_websocket": "penstock sidecar -- COMMAND, and no [[route]] in penstock.toml: those need calls by POST",
    "sampling": "start vLLM with --logprobs-mode processed_logprobs, or let the agent sample with temperature 1 alone",
}


def finding(code: FindingCode, reason: str, rollout: RolloutSummary, attempt: str = "", **about: object) -> Finding:
    """A finding with its fix."""
    again = f"penstock requeue {rollout.id}" if rollout.origin == "queued" else "run the agent again"
    at = f"{rollout.id}/{attempt}" if attempt else rollout.id
    fix = FIXES[code].format(rollout=rollout.id, at=at, again=again, **about)
    return Finding(code=code, blocks=code not in HARMLESS, reason=reason, fix=fix)


def of_rollout(rollout: RolloutSummary) -> Iterator[Finding]:
    """Findings of the rollout, which may have no attempt yet."""
    if rollout.status in WAITING:
        waits = finding("unfinished", "it waits in the queue", rollout)
        yield waits.model_copy(update={"fix": "penstock run -- COMMAND"})


def of_attempt(rollout: RolloutSummary, attempt: Attempt, spans: Sequence[Span]) -> Iterator[Finding]:
    """Findings of an attempt as a whole. `spans`: its calls and rewards."""
    if any(map(is_release_call, spans)):
        reason = "no agent made it: the gateway made it to try a release (replay, shadow or rehearsal)"
        yield finding("for_release", reason, rollout, attempt.id)
        return
    if rollout.origin == "queued" and attempt.status in LIVE:
        yield finding("unfinished", f"it is {attempt.status}", rollout, attempt.id)
    if attempt.status == AttemptStatus.CANCELLED:
        yield finding("cancelled", "it was cancelled", rollout, attempt.id)
    if attempt.status == AttemptStatus.ENVIRONMENT:
        yield finding("cancelled", "it was handed back: its agent could not work", rollout, attempt.id)
    if attempt.totals.gaps:
        reason = f"{attempt.totals.gaps:,} of its calls could not be recorded"
        yield finding("gap", reason, rollout, attempt.id)
    if attempt.totals.ambiguous:
        many = attempt.totals.ambiguous
        reason = f"{many:,} of its calls may be another agent's, which did exactly the same and gave no address either"
        yield finding("ambiguous", reason, rollout, attempt.id)
    if attempt.reward is None:
        yield _unrewarded(rollout, attempt, [Reward.of(span) for span in spans if span.kind == "reward"])
    served = {name: sorted(versions) for name, versions in _versions(spans).items() if len(versions) > 1}
    for (_, name), versions in sorted(served.items()):
        reason = f"its calls were served by {len(versions)} versions of {name}, {', '.join(versions)}: it fell back"
        yield finding("mixed_versions", reason, rollout, attempt.id)


def recovered_refusals(spans: Sequence[Span]) -> frozenset[int]:
    """The calls of an attempt that were refused, and whose agent then asked in another way: a later call was
    answered."""
    good = (span.sequence for span in spans if span.status == SpanStatus.OK and by_name(span.dialect).generates)
    last = max(good, default=0)
    return frozenset(span.sequence for span in spans if refused(span) and span.sequence < last)


def of_head(
    rollout: RolloutSummary, attempt: Attempt, span: Span, model: str | None, settled: frozenset[int]
) -> Iterator[Finding]:
    """Findings from a call's head. `recovered_refusals`: the result of the function of that name."""
    say = partial(finding, rollout=rollout, attempt=attempt.id, sequence=span.sequence)
    dialect = by_name(span.dialect)
    if dialect.session:
        yield say("session", f"{span.dialect}: what its model was told before is not in it, but spread over a session")
        return
    if not dialect.generates:
        what = "media, and no text of a conversation" if dialect.media else "no model answered"
        yield say("no_generation", f"{span.dialect}: {what}")
        return
    if by_name(span.dialect).hosted:
        yield say("no_generation", "its agent runs at the provider, which keeps the conversation and the tokens")
        return
    if (span.attributes or {}).get(PREWARM):
        yield say("no_generation", "it asked for no answer, only that its beginning is read already")
        return
    if span.sequence in settled:
        yield say("refused", "the gateway could not translate it, and its agent then asked otherwise")
    elif span.status in ENDED_BADLY:
        code, reason = ENDED_BADLY[span.status]
        yield say(code, f"{reason} ({span.error})" if span.error else reason)
    if attempt.ended_ns is not None and span.start_ns > attempt.ended_ns:
        yield say("late", "it began after the attempt had ended")
    if span.model != model:
        yield say("other_model", f"it asked for {span.model}, not for {model}", model=quote(span.model or ""))
    if (span.attributes or {}).get(UNATTRIBUTED):
        yield say("unattributed", "what came on its WebSocket may be of another answer, or nobody has asked for it")
    if span.truncated:
        yield say("truncated", "it was too large to be recorded whole")
    if span.finish == GIVEN_UP:
        yield say("interrupted", f"the engine gave it up in the middle (finish reason {span.finish})")
    if span.finish in CUT:
        yield say("cut_off", f"the model was cut off (finish reason {span.finish})")
    if span.finish == STEERED:
        steered = say("cut_off", f"its client steered the model to another answer (finish reason {span.finish})")
        yield steered.model_copy(update={"fix": ""})


def of_tokens(rollout: RolloutSummary, span: Span, tokens: AnswerTokens | None) -> Iterator[Finding]:
    """Findings from the tokens of a good call; `tokens` is None when its bytes are not on the tape."""
    say = partial(finding, rollout=rollout, attempt=span.attempt, sequence=span.sequence)
    if span.status != SpanStatus.OK:
        return
    if tokens is None or not tokens.readable:
        reason = "its bytes are not on the tape" if tokens is None else "its answer cannot be read"
        yield say("unreadable", reason)
        return
    others = {"blocks": not good_choices(tokens)}
    if not tokens.complete:
        yield _without_ids(rollout, span, tokens).model_copy(update=others)
    elif any(output.logprobs != length(output.ids) for output in tokens.outputs.values()):
        logprobs, odd = (
            sum(getattr(one, name) for one in tokens.outputs.values()) for name in ("logprobs", "invalid_logprobs")
        )
        reason = f"{logprobs:,} log-probabilities for {tokens.generated:,} tokens"
        reason += f"; {odd:,} more are above 0, or not finite" if odd else ""
        yield say("no_logprobs", reason, model=span.model or "its model").model_copy(update=others)
    if (why := tokens.count_mismatch) is not None:
        yield say("token_counts", why)


def of_unread(rollout: RolloutSummary, span: Span, request: bytes, response: bytes) -> Iterator[Finding]:
    """A finding from the decoded bytes of a good call: the parts that they contain and that were not read. `of_tokens`
    reports missing ids and log-probabilities."""
    gaps: Gaps = {key: kind for key, kind in recheck_unread(span, request, response).items() if kind not in _OF_TOKENS}
    if gaps and span.status == SpanStatus.OK:
        key = min(gaps, key=lambda one: gaps[one] == "usage")
        more = f", and {len(gaps) - 1} more" if len(gaps) > 1 else ""
        made = finding(
            "unread", f"{key} {GAP_DESCRIPTIONS[gaps[key]]}{more}", rollout, span.attempt, sequence=span.sequence
        )
        yield made.model_copy(update={"blocks": gaps[key] != "usage"})


def good_choices(tokens: AnswerTokens) -> list[int]:
    """The choices that have everything that training needs; a choice that lacks something does not affect the
    others."""
    return [
        number
        for number, one in sorted(tokens.outputs.items())
        if lacks(bool(tokens.prompt), len(one.ids), one.logprobs == length(one.ids)) is None
    ]


def of_request(rollout: RolloutSummary, span: Span, asked: Json) -> Iterator[Finding]:
    """Findings from the request of a good call about the log-probabilities of its answer."""
    say = partial(finding, rollout=rollout, attempt=span.attempt)
    if (what := forcing_field(asked)) is not None:
        yield say("forced", f"a grammar forced tokens ({what}); their log-probabilities are those under it")
    if what := distribution_changes(asked):
        reason = (
            f"it was sampled with {', '.join(what)}; vLLM's log-probabilities are those before, if not told otherwise"
        )
        yield say("sampling", reason)


def of_tools(rollout: RolloutSummary, attempt: Attempt, used: ToolList) -> Iterator[tuple[int, Finding]]:
    """Findings from the tools that an attempt used, each with the model call that it concerns."""
    say = partial(finding, rollout=rollout, attempt=attempt.id)
    for one in used.unanswered:
        ran = f"#{one.run} ran {one.tool}" if one.run is not None else f"it asked for {one.tool}"
        yield one.asked_by, say("tool_unanswered", f"{ran}, and no later call carries the result")
    lost = {one.run for one in used.unanswered if one.run is not None}
    for use in used.tools:
        if use.grade == "ambiguous" and use.span not in lost:
            what = f"#{use.span} {use.tool}" if use.span is not None else f"{use.tool} inside the agent"
            for sequence in use.candidates:
                yield sequence, say("tool_ambiguous", f"{what} may have been for it: {use.reason}")
        if use.asked_by is not None and use.status in (SpanStatus.ERROR, SpanStatus.INTERRUPTED):
            denied = use.error == DENIED
            reason = f"#{use.span} {use.tool} was {'stopped by a rule' if denied else f'run and failed ({use.error})'}"
            yield use.asked_by, say("tool_denied" if denied else "tool_failed", reason, run=use.span)


def _unrewarded(rollout: RolloutSummary, attempt: Attempt, rewards: Sequence[Reward]) -> Finding:
    untrusted = [reward for reward in rewards if reward.value is not None and not reward.trusted]
    if untrusted:
        newest = untrusted[-1]
        reason = f"only its {newest.source} says how well it went ({newest.value:g})"
        return finding("untrusted_reward", reason, rollout, attempt.id, value=f"{newest.value:g}")
    reason = "its rewards have dimensions and no value" if rewards else "nobody said how well it went"
    return finding("no_reward", reason, rollout, attempt.id)


def _without_ids(rollout: RolloutSummary, span: Span, tokens: AnswerTokens) -> Finding:
    say = partial(finding, "no_token_ids", rollout=rollout, attempt=span.attempt, model=span.model or "its model")
    if not by_name(span.dialect).token_fields:
        made = say(reason=f"no engine returns token ids for {span.dialect}")
        return made.model_copy(update={"fix": "let the agent speak chat completions: " + made.fix})
    missing = "prompt" if not tokens.prompt else "answer"
    made = say(reason=f"the engine returned no token ids of the {missing}")
    asked = IDS in (span.attributes or {}).get(CAPTURED, ())
    return (
        made.model_copy(update={"fix": "serve the model by an engine that gives them, such as vLLM"}) if asked else made
    )


def _versions(spans: Sequence[Span]) -> dict[tuple[str, str], set[str]]:
    """The versions that served the calls, by agent and resource: two agents of a rollout may belong to different
    audiences."""
    served: dict[tuple[str, str], set[str]] = {}
    for span in spans:
        for name, version in (span.versions or {}).items():
            served.setdefault((span.agent or "", name), set()).add(version)
    return served
