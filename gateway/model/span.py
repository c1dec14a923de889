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
from collections.abc import Collection, Iterator
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Final
from urllib.parse import unquote

from penstock.gateway.model.base import Id, Noun, SpanKind

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
    price, runs of the provider's tools, the tier that served it, the provider's own cost."""


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
    """Name of the agent or call-site, where the address gave one."""
    request_bytes: int = 0
    """Size of the request body."""
    response_bytes: int = 0
    """Size of the response body as it was received (still compressed if it was)."""
    body: int | None = None
    """Reference to the exchange on the tape; None while nothing is stored."""
    truncated: bool = False
    """True when the body was too large to be kept whole; the stored part is a prefix."""
    retry_of: int | None = None
    """Sequence of the call that this one repeats, when the client said it was a retry."""
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

    @property
    def duration_ns(self) -> int | None:
        """Length of the call, None while it is open."""
        return None if self.end_ns is None else self.end_ns - self.start_ns


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
