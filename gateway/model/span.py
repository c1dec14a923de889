"""The nouns: the records of the tape and the messages of the control API.

A *rollout* is one task given to one agent, an *attempt* one try at it, a *span* one event or operation in an attempt. A
model call is a span of kind `llm` and owns an *exchange*: the exact bytes that were sent and received. A *turn* is an
interpretation of an exchange (messages, tool calls, usage). It is made when it is read and never stored, so a fixed
parser also fixes how old calls are read.

Times are integers in nanoseconds since the epoch, durations in nanoseconds, sizes in bytes. How summaries are laid out
on the tape is `gateway.tape.store.records`, which a test holds against `Span`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final, Protocol, cast
from urllib.parse import unquote

from penstock.gateway.model.base import CALLS, Id, Noun, SpanKind

POLICY_VIOLATION: Final = "policy_violation"
"""The `error` of a tool call that a policy refused."""


class SpanStatus(StrEnum):
    """The end of a span. `open` is the only status that can still change."""

    OPEN = "open"
    """Still running (seen on the tape once it has run for a moment)."""
    OK = "ok"
    """The answer was passed on completely, its HTTP status is below 400, and it is no error and not cut short."""
    ERROR = "error"
    """The provider answered with an error (with whatever HTTP status), broke off, or could not be reached; `error` says
    which."""
    CANCELLED = "cancelled"
    """The client went away before the answer was complete."""
    INTERRUPTED = "interrupted"
    """The gateway died while the call was running; noticed at the next start."""


class Usage(Noun):
    """Token counts as the provider reported them, or as its token ids tell; None where nobody counted."""

    input_tokens: int | None = None
    """Prompt tokens, cached ones included."""
    output_tokens: int | None = None
    """Generated tokens, reasoning included."""
    cached_tokens: int | None = None
    """The part of `input_tokens` that was read from the provider's prompt cache."""
    cache_write_tokens: int | None = None
    """Prompt tokens written to the provider's prompt cache."""
    reasoning_tokens: int | None = None
    """The part of `output_tokens` that was hidden reasoning."""
    billed: dict[str, Any] | None = None
    """What else a price needs, where the answer says it (docs/finding.md#costs): parts of the counts that have another
    price, runs of the provider's tools, the tier that served it, the provider's own cost; of calls with media their
    `UNITS`."""


UNITS: Final = {"seconds": "second", "characters": "character", "images": "image"}
"""What calls with media use besides tokens, each with the name of its price."""


class Estimate(Noun):
    """Token counts that nobody gave, guessed from the length of the texts; None where there is a count."""

    input_tokens: int | None = None
    """About how many tokens the prompt has."""
    output_tokens: int | None = None
    """About how many tokens were generated, as far as the answer came."""


class Span(Noun):
    """The summary of a span: all that a list shows. Bodies are apart, behind `body`."""

    rollout: Id
    """The rollout it belongs to."""
    attempt: Id
    """The attempt it belongs to."""
    sequence: int
    """Its place within the attempt, from 1, by start."""
    kind: SpanKind = "llm"
    """What happened."""
    name: str | None = None
    """Name of what is no call: `reward`, `stdout`, `stderr`, an OpenTelemetry span's own name ..."""
    status: SpanStatus = SpanStatus.OK
    """How it ended."""
    start_ns: int = 0
    """When the request's head had arrived; ns since the epoch."""
    end_ns: int | None = None
    """When the last byte was passed on, or the call failed; ns since the epoch."""
    first_byte_ns: int | None = None
    """From start to the first byte of the response body; ns."""
    dialect: str = "opaque"
    """Wire format spoken, by its name in docs/dialects.md: `chat`, `messages`, `responses` ...; `opaque` if it is none
    of them."""
    method: str = "POST"
    """HTTP method."""
    path: str = ""
    """Path and query below the rollout's address, secrets masked."""
    upstream: str | None = None
    """Name of the upstream that was called; None when none was reached."""
    http_status: int | None = None
    """Status the client was sent; None when it got none."""
    error: str | None = None
    """Short reason when the status is not ok: `http_429`, `connect`, `upstream_closed`, `timeout` ... Of an answer with
    a good HTTP status: `stream_error` (an error came among its events), `error_body` (its body is an error),
    `ended_early` (its stream has no end)."""
    model: str | None = None
    """Model asked for."""
    model_served: str | None = None
    """Model that the response says it came from."""
    stream: bool = False
    """True when the response was a stream of events."""
    finish: str | None = None
    """Finish reason of the first choice, as the provider wrote it."""
    response_id: str | None = None
    """The provider's id of the response."""
    usage: Usage | None = None
    """Token counts, where reported."""
    tool_calls: int = 0
    """How many tool calls the response asked for."""
    choices: int = 0
    """How many choices the response holds (n)."""
    agent: str | None = None
    """Name of the agent or call-site, where the address gave one; else the kind of sub-agent that a header names."""
    request_bytes: int = 0
    """Size of the request body."""
    response_bytes: int = 0
    """Size of the response body as it was received (still compressed if it was)."""
    body: int | None = None
    """Reference to the exchange on the tape; None while nothing is stored."""
    truncated: bool = False
    """True when the body was too large to be kept whole; the stored part is a prefix."""
    retry_of: int | None = None
    """Sequence of the failed call that this one repeats."""
    versions: dict[str, str] | None = None
    """Versions of released resources that served it: name -> version."""
    arm: str | None = None
    """RELEASE:ARM of each release that its rollout takes part in, with commas between them."""
    trace_id: str | None = None
    """W3C trace id, 32 hex digits. Derived from the attempt unless the client sent a traceparent."""
    span_id: str | None = None
    """W3C span id, 16 hex digits, derived from trace id and sequence."""
    parent_id: str | None = None
    """Span id of the caller, from the client's traceparent."""
    attributes: dict[str, Any] | None = None
    """What only some kinds have, by OpenTelemetry name; a reward is read by `Reward.of`."""
    estimate: Estimate | None = None
    """Of a call whose tokens nobody counted."""
    cost: float | None = None
    """US dollars that a model call cost, as its provider says, or by the list of prices as it is now; None where there
    is no price or no count. Lists and single spans have it, the change feed and transcripts do not."""
    unpriced: bool = False
    """True when its tokens were counted and there is no price for its model."""

    @property
    def duration_ns(self) -> int | None:
        """Length of the call, None while it is open."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


# Calls that the gateway refuses because an engine's format cannot express them.
#
# Such a refusal is part of a negotiation if the agent then calls in another way and is answered: coding agents try
# out what an API can do. It is an error as long as no later call of its attempt was answered.

KIND: Final = "translation"
"""The `error` of these refusals in spans."""


class CallResult(Protocol):
    """The fields of a call that tell a refusal."""

    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def upstream(self) -> str | None: ...


def refused(call: CallResult) -> bool:
    """True if the call was refused before any engine was called."""
    return call.status == SpanStatus.ERROR and call.error == KIND and call.upstream is None


# W3C trace context: reads a caller's `traceparent`, and derives ids for callers that sent none.
#
# Ids are derived, not drawn: the trace id from the attempt, the span id from its place in it. They cost no bytes on
# the tape and are the same whenever a span is read or exported. Source: W3C Trace Context, §3.2.

# Version 00 ends with the flags, later versions may continue; ff is forbidden, and so are ids of only zeros.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


@lru_cache(maxsize=1024)
def trace_id(rollout: str, attempt: str) -> str:
    """The trace id of an attempt: 32 hex digits."""
    return blake2b(f"{rollout}\0{attempt}".encode(), digest_size=16, person=b"penstock.trace").hexdigest()


def span_id(trace: str, rollout: str, attempt: str, sequence: int) -> str:
    """The span id of a call: 16 hex digits."""
    name = f"{trace}\0{rollout}\0{attempt}\0{sequence}".encode()
    return blake2b(name, digest_size=8, person=b"penstock.span").hexdigest()


def parse(traceparent: str) -> tuple[str, str] | None:
    """(trace id, parent span id) of a traceparent header; None when it is not valid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip().lower())
    return None if found is None or (found[1] == "00" and found[4]) else (found[2], found[3])


# The `baggage` header: names and values that agents pass along (W3C Baggage). Pure.
#
#     baggage: user.id=ada%20l,penstock.rollout_id=r1;properties
#
# Commas separate members, properties of a member follow a semicolon, values are percent-encoded. The header belongs
# to other tools: members that cannot be read are passed over.

TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
"""A character of the names of headers and of `baggage` members (RFC 9110, 5.6.2)."""
BAGGAGE_NAME: Final = rf"^{TOKEN}{{1,128}}$"
"""Matches a member's name: a token of HTTP."""
LONGEST: Final = 256
"""Most characters of a value that is read."""


def members(header: str) -> Iterator[tuple[str, str]]:
    """(name, value as it was sent) of each member, without properties."""
    for member in header.split(","):
        name, equals, value = member.partition(";")[0].partition("=")
        if equals:
            yield name.strip(), value.strip()


def entry(header: str, name: str) -> str | None:
    """The value of the first member of this name; None where there is none, or one that is empty, longer than
    `LONGEST`, or not UTF-8."""
    sent = next((value for found, value in members(header) if found == name), "")
    try:
        value = unquote(sent, errors="strict").strip()
    except UnicodeDecodeError:
        return None
    return value if 0 < len(value) <= LONGEST else None


def masked(header: str, names: Collection[str], mask: str) -> str:
    """The header with a mask in place of the values and properties of these names."""
    found = header.split(",")
    for at, member in enumerate(found):
        name, equals, _ = member.partition("=")
        if equals and name.strip() in names:
            found[at] = f"{name}={mask}"
    return ",".join(found)


# The span of an instrumented agent in which a call was made.
#
# An agent that reports its own spans also reports how they are nested. For its calls it does so only if its HTTP
# client sends a `traceparent`. For other calls the parent is inferred, when the spans are read, from the spans of the
# same attempt on the tape:
#
# 1. The span with the id of the call's response made the call: as `gen_ai.response.id`, or at the beginning of the
#    answer that OpenInference keeps as `output.value`.
# 2. Otherwise the parent is the innermost span that was open when the call began. A call may outlive it: a span may end
#    with the head of a stream.
# 3. If several branches were open side by side, those with the id of another response are left out. If several remain,
#    the parent is the innermost span that contains them all; their ends are its candidates.
#
# Agent and gateway may have different clocks; then only the first rule is sure.

RESPONSE_ID, OUTPUT = "gen_ai.response.id", "output.value"
_ANSWER = re.compile(r'\s*\{\s*"id"\s*:\s*"([^"\\]+)"')


PROVIDER_SERVICE: Final = "claude-platform"
"""`service.name` of the spans in which Claude's API itself tells of the calls that it served."""


HOSTED_TURN: Final = "penstock.hosted.turn"
"""Attribute of a span in the trace that a provider keeps of a hosted agent's turn: the id of the turn."""


def is_provider_span(attributes: Mapping[str, Any] | None) -> bool:
    """True if a provider reports a span: no agent has made its calls in it, and its tokens are those of a recorded
    call or turn."""
    said = attributes or {}
    if HOSTED_TURN in said:
        return True
    resource = said.get("otel.resource")
    return isinstance(resource, dict) and cast(Any, resource).get("service.name") == PROVIDER_SERVICE


@dataclass(frozen=True, slots=True)
class SpanNode:
    """The needed parts of an agent's span; the whole span may be large."""

    span_id: str
    parent_id: str | None
    trace_id: str
    start_ns: int
    end_ns: int
    response_id: str | None

    @classmethod
    def of(cls, span: Span) -> SpanNode:
        """The parts of a span of kind `otel`."""
        end = span.start_ns if span.end_ns is None else span.end_ns
        answered = _response_id(span.attributes or {})
        return cls(span.span_id or "", span.parent_id, span.trace_id or "", span.start_ns, end, answered)


def _response_id(attributes: Mapping[str, Any]) -> str | None:
    named, answer = attributes.get(RESPONSE_ID), attributes.get(OUTPUT)
    if isinstance(named, str) and named:
        return named
    found = _ANSWER.match(answer) if isinstance(answer, str) else None
    return None if found is None else found[1]


@dataclass(frozen=True, slots=True)
class ParentGuess:
    """The probable place of a call."""

    parent: SpanNode | None
    """The span in which the call was made."""
    candidates: tuple[SpanNode, ...] = ()
    """The spans in which it may have been made, when there are several; `parent` contains them."""


def guess_parents(agent: Iterable[SpanNode], calls: Iterable[Span]) -> dict[int, ParentGuess]:
    """By sequence, the guesses for those calls of one attempt that were made in a span of `agent`; the others are left
    out."""
    # A span that an exporter has sent twice is one span.
    by_id = {node.span_id: node for node in sorted(agent, key=lambda node: (node.start_ns, node.span_id))}
    answered = _answered(by_id.values())
    waiting = iter(by_id.values())
    following = next(waiting, None)
    open_now: list[SpanNode] = []
    found: dict[int, ParentGuess] = {}
    for call in sorted(calls, key=lambda call: call.start_ns):
        while following is not None and following.start_ns <= call.start_ns:
            open_now.append(following)
            following = next(waiting, None)
        open_now = [node for node in open_now if node.end_ns >= call.start_ns]
        sure = answered.get(call.response_id or "")
        guess = _innermost(call, open_now, by_id) if sure is None else ParentGuess(sure)
        if guess.parent is not None or guess.candidates:
            found[call.sequence] = guess
    return found


def _answered(nodes: Iterable[SpanNode]) -> dict[str, SpanNode]:
    """The innermost span of each response id; an id that several unrelated spans have is left out."""
    found: dict[str, SpanNode | None] = {}
    for node in nodes:
        if node.response_id:
            other = found.get(node.response_id, node)
            nested = other is not None and (node is other or node.parent_id == other.span_id)
            found[node.response_id] = node if nested else None
    return {name: node for name, node in found.items() if node is not None}


def _innermost(call: Span, open_now: Sequence[SpanNode], by_id: Mapping[str, SpanNode]) -> ParentGuess:
    lines = {node.span_id: [above.span_id for above in _above(node, by_id)] for node in open_now}
    outer = {above for line in lines.values() for above in line}
    leaves = [node for node in open_now if node.span_id not in outer]
    if len(leaves) > 1 and call.response_id:
        leaves = [node for node in leaves if node.response_id is None] or leaves
    if len(leaves) < 2:
        return ParentGuess(leaves[0] if leaves else None)
    first, *rest = (lines[leaf.span_id] for leaf in leaves)
    common = next((above for above in first if all(above in line for line in rest)), None)
    return ParentGuess(None if common is None else by_id[common], tuple(leaves))


def _above(node: SpanNode, by_id: Mapping[str, SpanNode]) -> Iterator[SpanNode]:
    """The spans that contain this one, innermost first. Their ids come from outside, so they may form a circle."""
    seen = {node.span_id}
    above = by_id.get(node.parent_id or "")
    while above is not None and above.span_id not in seen:
        seen.add(above.span_id)
        yield above
        above = by_id.get(above.parent_id or "")


def span_tree(spans: Sequence[Span], asked: Mapping[int, int] | None = None) -> dict[int | None, list[Span]]:
    """The spans of one attempt by the sequence of the span that contains them, None for none, each in order of time.
    `asked`: sequences of the model calls that asked for runs of tools, or started the sub-agents that made calls, by
    the sequence of the run or the call."""
    agent = [span for span in spans if span.kind == "otel"]
    served = {span.response_id: span.sequence for span in spans if span.kind == "llm" and span.response_id}
    above = [span for span in spans if span.kind in ("otel", "tool", "mcp", "event")]
    by_id = {span.span_id or "": span.sequence for span in reversed(above)}
    asked = asked or {}
    found = guess_parents(
        (SpanNode.of(span) for span in agent if not is_provider_span(span.attributes)),
        (span for span in spans if span.kind in CALLS and span.parent_id is None),
    )
    parents: dict[int, int | None] = {}
    for span in spans:
        guess = found.get(span.sequence)
        named = span.parent_id if guess is None or guess.parent is None else guess.parent.span_id
        parent = asked.get(span.sequence, by_id.get(named) if named else None)
        if parent is None and span.kind == "otel" and is_provider_span(span.attributes):
            said = span.attributes or {}
            parent = served.get(str(said.get(HOSTED_TURN, said.get(RESPONSE_ID))))
        parents[span.sequence] = _unless_circle(span.sequence, parent, parents)
    made: dict[int | None, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.sequence)) if agent else spans:
        made.setdefault(parents[span.sequence], []).append(span)
    return made


def _unless_circle(own: int, parent: int | None, parents: Mapping[int, int | None]) -> int | None:
    above = parent
    while above is not None and above != own:
        above = parents.get(above)
    return None if above == own else parent
