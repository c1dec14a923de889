"""Judges the calls of a rollout one by one: whether they can be trained on, and why not. Pure; odd bytes never raise.

A call can be trained on when its answer is whole, comes from the model that is trained, and brings the engine's own
token ids and log-probabilities, and when its attempt has ended, has a trusted reward and no gap. Everything else is
reported as a `Finding` (`gateway.reading.diagnosis.findings`); some findings block training, others only say that the
sample is not what one might think.

`rows` decides which calls form one training sequence, here and for `penstock samples`. The bytes of good calls are read
twice, because only the last of a client's retries counts; their tokens are not kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.model.answers import AttemptDiagnosis, CallDiagnosis, Diagnosis, Finding
from penstock.gateway.model.codes import FindingCode, SequenceStart
from penstock.gateway.model.facts import BEGAN, WEBSOCKET
from penstock.gateway.model.rollout import Attempt, RolloutSummary, deciding_attempt
from penstock.gateway.model.span import Span
from penstock.gateway.model.toml import pluralized
from penstock.gateway.model.turn import Exchange, Turn
from penstock.gateway.reading.diagnosis.findings import (
    RETRIED,
    finding,
    good_choices,
    of_attempt,
    of_head,
    of_request,
    of_rollout,
    of_tokens,
    of_tools,
    of_unread,
    recovered_refusals,
)
from penstock.gateway.reading.diagnosis.rows import RowBuilder, TrainableTokens, TrainingRow, call_messages, superseded
from penstock.gateway.reading.diagnosis.tool_uses import tools_used
from penstock.gateway.reading.turns import plain_bodies
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import Json, dumps, loads, obj, objs, text
from penstock.gateway.wire.dialects.parts import STAMP
from penstock.gateway.wire.dialects.tokens import AnswerTokens, common_prefix, length, read_tokens

# The cost of a base URL for agents that behave otherwise behind one, derived from their calls on the tape alone.
# Pure.
#
# Claude Code and Codex leave things out where the host that they call is not their maker's own. Claude Code then
# sends its version without the hash that it adds for its own host (`x-anthropic-billing-header: cc_version=...;
# cch=...`); this was measured for 2.1.197 and 2.1.330. Codex from 0.169 on sends its calls by POST instead of a
# WebSocket, and with each call all earlier items.

_CLAUDE_CODE: Final = re.compile(r"claude-cli/([0-9.]+)")
_CODEX: Final = re.compile(r"codex[\w -]*/([0-9]+)\.([0-9]+)", re.IGNORECASE)
_WEBSOCKETS_SINCE: Final = (0, 169)
_HASH: Final = "cch="
_BETAS: Final = ("prompt-caching-scope", "advanced-tool-use")
"""Beta flags that each measured version sends to its own host."""
_SEARCH: Final = "ToolSearch"
"""The tool by which Claude Code finds other tools, if their schemas are not in its calls."""


@dataclass(slots=True)
class BaseUrlEffects:
    """The effects of a base URL in the calls of one attempt."""

    claude_code: str | None = None
    """Version of Claude Code, if it was given a base URL."""
    betas: list[str] = field(default_factory=list[str])
    scoped: bool = False
    """Whether a part of its system prompt is cached for everybody."""
    tools: int = 0
    """Highest number of tool schemas in one of its calls without tool search."""
    tool_bytes: int = 0
    """Bytes of these schemas in all its calls."""
    calls: int = 0
    """Number of calls that contain schemas."""
    searches: bool = False
    """Whether it searches for tools; then calls with few schemas are a sub-agent's."""
    codex: str | None = None
    """Version of Codex, if its calls come by POST."""
    posts: int = 0
    sent: int = 0
    """Bytes of these calls."""
    repeated: int = 0
    """Bytes of these calls that the call before in the same thread contained as well."""
    _before: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    """The items of the last call, by thread."""

    def add(self, span: Span, exchange: Exchange) -> None:
        """Adds a model call; calls come in their order."""
        headers = {name.lower(): value for name, value in exchange.request_headers}
        agent = headers.get("user-agent", "")
        if found := _CLAUDE_CODE.match(agent):
            self._of_claude_code(found[1], headers.get("anthropic-beta", ""), obj(loads(plain_bodies(exchange)[0])))
        elif (found := _CODEX.match(agent)) and WEBSOCKET not in (span.attributes or {}):
            thread = headers.get("thread-id", "")
            self._of_codex((int(found[1]), int(found[2])), thread, by_name(span.dialect), plain_bodies(exchange)[0])

    def _of_claude_code(self, version: str, betas: str, asked: Json) -> None:
        system, tools = objs(asked.get("system")), objs(asked.get("tools"))
        billing = (text(system[0].get("text")) if system else None) or ""
        if not billing.startswith(STAMP) or _HASH in billing or not tools:
            return  # the maker's own host, or a call for a title
        self.claude_code, self.betas = version, [beta for beta in betas.split(",") if beta]
        self.scoped |= any("scope" in obj(part.get("cache_control")) for part in system)
        if any(tool.get("name") == _SEARCH for tool in tools):
            self.searches = True
        else:
            self.calls, self.tools = self.calls + 1, max(self.tools, len(tools))
            self.tool_bytes += len(dumps(tools))

    def _of_codex(self, version: tuple[int, int], thread: str, dialect: Dialect, body: bytes) -> None:
        if version < _WEBSOCKETS_SINCE:
            return
        story = [bytes(item) for item in dialect.items(body).raw]
        same = 0
        for old, new in zip(self._before.get(thread, ()), story, strict=False):
            if old != new:
                break
            same += len(new)
        self.codex, self._before[thread] = ".".join(map(str, version)), story
        self.posts, self.sent, self.repeated = self.posts + 1, self.sent + len(body), self.repeated + same

    def reasons(self) -> Iterator[tuple[FindingCode, str]]:
        """The code of each finding, and its reason."""
        if self.claude_code is not None:
            missing = [beta for beta in _BETAS if not any(sent.startswith(beta) for sent in self.betas)]
            lacks = (
                [] if self.scoped else ["no part of its system prompt is cached beyond its own account (scope global)"]
            )
            lacks += [f"its {len(self.betas)} beta flags lack {' and '.join(missing)}"] if missing else []
            if lacks:
                yield "base_url", f"Claude Code {self.claude_code} runs degraded behind a base URL: {', '.join(lacks)}"
        if self.tools and not self.searches:
            yield (
                "inlined_tools",
                f"{pluralized(self.calls, 'call')} brought the schemas of all its tools along, {self.tools:,} at most, "
                f"{_kilobytes(self.tool_bytes)} in all: it does not search for tools behind a base URL",
            )
        if self.codex is not None and self.repeated:
            yield (
                "no_websocket",
                f"{_kilobytes(self.repeated)} of the {_kilobytes(self.sent)} in {pluralized(self.posts, 'call')} were "
                f"sent before: Codex {self.codex} has lost its WebSocket, on which it sends them once",
            )


def _kilobytes(size: int) -> str:
    return f"{size / 1000:,.0f} KB"


_TOKENS: Final = frozenset({"no_token_ids", "no_logprobs", "token_counts", "unread"})
"""Findings about tokens: an answer without other blocking findings is still one that its client waited for."""
MOST_CALLS = 2_000
"""Maximum number of calls whose bytes one diagnosis reads."""


@dataclass(frozen=True, slots=True)
class Case:
    """The rollout to judge, the trained model, and the reader of its calls' bytes."""

    rollout: RolloutSummary
    model: str | None
    exchange: Callable[[Span], Exchange | None]


def diagnose(
    rollout: RolloutSummary,
    spans: Iterable[Span],
    exchange: Callable[[Span], Exchange | None],
    model: str | None = None,
) -> Diagnosis:
    """The diagnosis of a rollout from its spans, in their order. `exchange` returns a call's bytes and is called for
    one call at a time; `model` is the trained model, by default the one of most calls."""
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
    about, counts = list(of_rollout(rollout)), _counting(rollout, attempts)
    return Diagnosis(
        rollout=rollout.id,
        status=rollout.status,
        model=case.model,
        reward=rollout.reward,
        trainable=counts is not None and counts.trainable > 0,
        sequences=0 if counts is None else counts.sequences,
        verdict=_verdict(rollout, about, counts),
        findings=about,
        attempts=attempts,
        skipped=len(calls) - len(looked_at),
    )


def _with_tools(case: Case, attempt: Attempt, spans: Sequence[Span], made: AttemptDiagnosis) -> AttemptDiagnosis:
    """The diagnosis of an attempt with the findings about its tools, none of which keeps a call out of training."""
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
    counts = Counter(span.model for span in calls if span.model and by_name(span.dialect).makes_samples)
    return counts.most_common(1)[0][0] if counts else None


def _attempt(case: Case, attempt: Attempt, about: list[Finding], spans: Sequence[Span]) -> AttemptDiagnosis:
    agents, refused = BaseUrlEffects(), recovered_refusals(spans)
    calls = {span.sequence: _call(case, attempt, span, refused, agents) for span in spans}
    lost = [finding(code, reason, case.rollout, attempt.id) for code, reason in agents.reasons()]
    late = superseded(span for span in spans if _blocks(calls[span.sequence]) <= _TOKENS)
    for sequence in late:
        calls[sequence] = _with(calls[sequence], [finding("retry", RETRIED, case.rollout, attempt.id)])
    good = [span for span in spans if calls[span.sequence].trainable]
    rows = _rows(case, good)
    for span in good:
        calls[span.sequence] = _placed(case, calls[span.sequence], span, rows)
    if any(finding.blocks for finding in about):
        calls = {sequence: call.model_copy(update={"trainable": False}) for sequence, call in calls.items()}
    trainable = sum(call.trainable for call in calls.values())
    return AttemptDiagnosis(
        attempt=attempt.id,
        status=attempt.status,
        reward=attempt.reward,
        trainable=trainable,
        sequences=len(rows) if trainable else 0,
        findings=[*about, *lost],
        calls=list(calls.values()),
    )


def _blocks(call: CallDiagnosis) -> set[str]:
    return {finding.code for finding in call.findings if finding.blocks}


def _with(call: CallDiagnosis, more: Iterable[Finding]) -> CallDiagnosis:
    """A call with more findings, the gravest first."""
    found = sorted([*call.findings, *more], key=lambda finding: not finding.blocks)
    trainable = call.trainable and not any(finding.blocks for finding in found)
    return call.model_copy(update={"findings": found, "trainable": trainable})


def _call(case: Case, attempt: Attempt, span: Span, refused: frozenset[int], agents: BaseUrlEffects) -> CallDiagnosis:
    """The diagnosis of a call by itself. `agents`: the call is added to it."""
    found = list(of_head(case.rollout, attempt, span, case.model, refused))
    tokens = AnswerTokens()
    if by_name(span.dialect).makes_samples:
        exchange = case.exchange(span)
        tokens = _tokens(span, exchange) if exchange else tokens
        found += of_tokens(case.rollout, span, tokens if exchange else None)
        if exchange:
            agents.add(span, exchange)
            found += of_unread(case.rollout, span, *plain_bodies(exchange))
        if exchange and good_choices(tokens):
            found += of_request(case.rollout, span, obj(loads(plain_bodies(exchange)[0])))
    call = CallDiagnosis(
        sequence=span.sequence,
        model=span.model,
        prompt_tokens=length(tokens.prompt) or None,
        output_tokens=tokens.generated or None,
        trainable=True,
        goes_on=None,
        begins=[],
        findings=[],
    )
    return _with(call, found)


def _rows(case: Case, good: Iterable[Span]) -> list[TrainingRow[Span]]:
    rows: RowBuilder[Span] = RowBuilder(lambda span, _: _read(case, span)[1].prompt)
    for span in good:
        turn, tokens = _read(case, span)
        spelt = [TrainableTokens(number, tokens.prompt, tokens.outputs[number].ids) for number in good_choices(tokens)]
        rows.add(span, span.agent, call_messages(turn), spelt)
    return rows.build()


def _read(case: Case, span: Span) -> tuple[Turn | None, AnswerTokens]:
    exchange = case.exchange(span)
    if exchange is None:
        return None, AnswerTokens()
    return by_name(span.dialect).read(*plain_bodies(exchange), span.stream), _tokens(span, exchange)


def _placed(case: Case, call: CallDiagnosis, span: Span, rows: Sequence[TrainingRow[Span]]) -> CallDiagnosis:
    """A call with its places among the rows, and findings about the rows that begin with it."""
    begun = [row for row in rows if row.nodes[0].call is span]
    before = (node.parent for row in rows for node in row.nodes[1:] if node.call is span)
    goes_on = next((parent.call.sequence for parent in before if parent is not None), None)
    placed = call.model_copy(update={"goes_on": goes_on, "begins": [row.begins for row in begun]})
    return _with(placed, [_rewritten(case, span, row.begins, row.near) for row in begun if row.near is not None])


def _rewritten(case: Case, span: Span, why: SequenceStart, before: Span) -> Finding:
    """The finding for a row whose messages continue an earlier call while the tokens do not."""
    old, new = _read(case, before)[1], _read(case, span)[1]
    whole = old.prompt + (old.outputs[min(old.outputs)].ids if old.outputs else b"")
    same = common_prefix(whole, new.prompt)
    where = "prompt" if same < length(old.prompt) else "answer"
    reason = f"the messages go on from #{before.sequence}, the tokens differ from {same:,} on, in its {where}"
    code: FindingCode = "template" if why == "template" else "retokenised"
    made = finding(code, reason, case.rollout, span.attempt, model=span.model or "its model")
    if (began := (span.attributes or {}).get(BEGAN)) is None:
        return made
    # The call's route is exact already, and BEGAN has the reason why its session could not continue.
    look = f"penstock show {case.rollout.id}/{span.attempt}#{span.sequence} --raw request"
    return made.model_copy(update={"reason": f"{reason}; its session began anew ({began})", "fix": look})


def _tokens(span: Span, exchange: Exchange) -> AnswerTokens:
    """The tokens in a call's answer; none if engines give none in its wire format, whatever the answer looks like."""
    if not by_name(span.dialect).token_fields:
        return AnswerTokens()
    return read_tokens(plain_bodies(exchange)[1], span.stream)


def _counting(rollout: RolloutSummary, attempts: Sequence[AttemptDiagnosis]) -> AttemptDiagnosis | None:
    """The diagnosis of the attempt that is trained on; None without one."""
    wanted = deciding_attempt(rollout.attempts)
    return next((one for one in attempts if wanted is not None and one.attempt == wanted.id), None)


def _verdict(rollout: RolloutSummary, about: Sequence[Finding], counts: AttemptDiagnosis | None) -> str:
    if counts is None or not counts.trainable:
        return f"{rollout.id} cannot be trained on: {_reason(rollout, about, counts)}."
    calls = f"{counts.trainable:,} of {len(counts.calls):,} calls"
    return (
        f"{rollout.id} can be trained on: {calls}, {pluralized(counts.sequences, 'sequence')}, reward {counts.reward}."
    )


def _reason(rollout: RolloutSummary, about: Sequence[Finding], counts: AttemptDiagnosis | None) -> str:
    """The gravest finding of the attempt that counts."""
    if counts is None:
        return about[0].reason if about else "it has no attempts"
    reasons = [finding.reason for finding in counts.findings if finding.blocks] or _counted(counts.calls)
    return f"{counts.attempt}: {reasons[0] if reasons else _no_calls(rollout, counts)}"


def _no_calls(rollout: RolloutSummary, counts: AttemptDiagnosis) -> str:
    told = sum(one.totals.told for one in rollout.attempts if one.id == counts.attempt)
    return "it has no calls" + (f" but {told:,} in telemetry, without token ids" if told else "")


def _counted(calls: Sequence[CallDiagnosis]) -> list[str]:
    """The blocking findings with their numbers of calls, the most common first."""
    codes = Counter(finding.code for call in calls for finding in call.findings[:1] if finding.blocks)
    return [", ".join(f"{code} in {n:,} of {len(calls):,} calls" for code, n in codes.most_common())] if codes else []
