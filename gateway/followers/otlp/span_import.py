"""A span or a log record of OpenTelemetry as an entry of the tape, the reward that it may carry, and its attempt.

The span's attributes are kept as they are, in `Bounds`; its other parts are kept among them under `otel.` names
(`semconv`). A reward is an attribute: `penstock.reward`, or Agent Lightning's `agentlightning.reward.0.value`.
"""

from __future__ import annotations

import asyncio
import math
import re
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.followers.otlp.signals import ItemRejectedError, TelemetryItem
from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import Origin
from penstock.gateway.model.rollout import Judgement, RewardSource
from penstock.gateway.model.span import PROVIDER_SERVICE, span_tree, trace_id
from penstock.gateway.model.span import Span as TapeSpan
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.call_request import FIRST_ATTEMPT, AddressError, check_id, session_rollout

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1 import common_pb2
    from opentelemetry.proto.trace.v1 import trace_pb2

    from penstock.gateway.followers.otlp import signals

    # Or protobuf's, which has the same fields.
    from penstock.gateway.followers.otlp.signals import LogRecord

    AnyValue = common_pb2.AnyValue | signals.AnyValue
    KeyValue = common_pb2.KeyValue | signals.KeyValue
    Span = trace_pb2.Span | signals.Span
    Event = trace_pb2.Span.Event | signals.Event
    Link = trace_pb2.Span.Link | signals.Link

LONGEST_NAME = 256
MOST_EVENTS = 32
"""Most events, and most links, that are kept of one span."""
LATEST = 2**63
MOST_DROPPED = 2**32 - 1
"""The largest value of the field in a span."""
_OK, _ERROR = 1, 2
_LIGHTNING = re.compile(re.escape(semconv.LIGHTNING_REWARD) + r"(\d{1,3})\.value")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


def entry_of(span: Span, resource: dict[str, Any], scope: dict[str, Any]) -> SpanEntry:
    """A span as an entry that has no rollout yet. `resource`: the attributes of its resource; `scope`: those of its
    instrumentation. Raises `ItemRejectedError`."""
    bounds = Bounds()
    trace, own, parent = hex_id(span.trace_id), hex_id(span.span_id), hex_id(span.parent_span_id)
    start, end = span.start_time_unix_nano or 0, span.end_time_unix_nano or 0
    if not is_trace_id(trace):
        raise ItemRejectedError(
            "invalid", f"trace id {trace[:64]!r}: a span needs a trace id of 16 bytes, not all zero"
        )
    if not is_span_id(own):
        raise ItemRejectedError("invalid", f"span id {own[:64]!r}: a span needs a span id of 8 bytes, not all zero")
    if not 0 < start < LATEST or end >= LATEST:
        what = f"start {start} and end {end}"
        raise ItemRejectedError("invalid", f"{what}: a span needs both in nanoseconds since 1970, below 2^63")
    name = bounds.text(span.name or "", LONGEST_NAME)
    attributes = bounds.attributes(span.attributes)
    failed = _add_details(attributes, span, bounds)
    attributes |= scope
    if resource:
        attributes[semconv.RESOURCE] = resource
    entry = SpanEntry("", "", kind="otel", name=name or None, method="", status="error" if failed else "ok")
    # If the clock was set during the span, it may seem to end before it began.
    entry.start_ns, entry.end_ns = start, max(start, end)
    entry.trace_id, entry.span_id, entry.parent_id = trace, own, parent if is_span_id(parent) else None
    entry.agent = _agent(attributes, resource)
    if failed:
        entry.error = _short(attributes.get(semconv.ERROR)) or "otel"
    entry.attributes = attributes
    return entry


def _add_details(attributes: dict[str, Any], span: Span, bounds: Bounds) -> bool:
    """Add the parts for which the tape has no field; returns True when the span failed."""
    failed = False
    if kind := span.kind:
        attributes[semconv.SPAN_KIND] = semconv.SPAN_KINDS[kind] if 0 < kind < len(semconv.SPAN_KINDS) else kind
    if (status := span.status) is not None:
        failed = status.code == _ERROR
        if status.code == _OK:
            attributes[semconv.STATUS_CODE] = semconv.STATUS_OK
        if message := status.message:
            attributes[semconv.STATUS_DESCRIPTION] = bounds.text(message)
    if state := span.trace_state:
        attributes[semconv.TRACE_STATE] = bounds.text(state)
    if events := span.events:
        attributes[semconv.EVENTS] = [_event(event, bounds) for event in events[:MOST_EVENTS]]
        bounds.clipped |= len(events) > MOST_EVENTS
    if links := span.links:
        found = (_link(link, bounds) for link in links[:MOST_EVENTS])
        attributes[semconv.LINKS] = [link for link in found if link is not None]
        bounds.clipped |= len(links) > MOST_EVENTS
    if dropped := (span.dropped_attributes_count or 0) + bounds.dropped:
        attributes[semconv.DROPPED] = min(dropped, MOST_DROPPED)
    if bounds.clipped:
        attributes[semconv.TRUNCATED] = True
    return failed


def _event(event: Event, bounds: Bounds) -> dict[str, Any]:
    time = min(event.time_unix_nano or 0, LATEST - 1)
    found = {"name": bounds.text(event.name or "", LONGEST_NAME), "time_ns": time}
    return found | {"attributes": bounds.attributes(event.attributes)}


def _link(link: Link, bounds: Bounds) -> dict[str, Any] | None:
    """A link as JSON; None for one without valid ids."""
    trace, span = hex_id(link.trace_id), hex_id(link.span_id)
    if not is_trace_id(trace) or not is_span_id(span):
        return None
    return {"trace_id": trace, "span_id": span, "attributes": bounds.attributes(link.attributes)}


def is_trace_id(given: str) -> bool:
    return len(given) == 32 and given != _NO_TRACE


def is_span_id(given: str) -> bool:
    return len(given) == 16 and given != _NO_SPAN


def hex_id(given: bytes | str | None) -> str:
    if isinstance(given, bytes):
        return given.hex()
    return "" if given is None else given.lower()


def _agent(attributes: dict[str, Any], resource: dict[str, Any]) -> str | None:
    named = _short(attributes.get(semconv.AGENT))
    if named is None and (service := _short(resource.get(semconv.SERVICE))):
        named = None if service.startswith((semconv.UNKNOWN_SERVICE, PROVIDER_SERVICE)) else service
    return named


def _short(value: Any) -> str | None:
    """A text cut to the length of a head's own field; None if it is empty or no text."""
    return value[:LONGEST_NAME] if isinstance(value, str) and value else None


def scope_of(name: str | None, version: str | None) -> dict[str, Any]:
    """The attributes that are kept of a span's instrumentation."""
    found = {semconv.SCOPE_NAME: _short(name), semconv.SCOPE_VERSION: _short(version)}
    return {key: value for key, value in found.items() if value}


def has_reward(entry: SpanEntry) -> bool:
    """True if the entry has a reward for `judgement_of` to read."""
    attributes = entry.attributes or {}
    return semconv.REWARD in attributes or semconv.LIGHTNING_VALUE in attributes


def judgement_of(entry: SpanEntry, source: RewardSource) -> Judgement:
    """The reward that a span carries; if the span is sent again, the reward is kept once. Raises
    `ItemRejectedError`."""
    attributes = entry.attributes or {}
    value = attributes[semconv.REWARD if semconv.REWARD in attributes else semconv.LIGHTNING_VALUE]
    dimensions = dict(_dimensions(attributes))
    if not all(map(_is_number, (value, *dimensions.values()))):
        why = f"the reward of span {entry.span_id} is not a finite number: the span is kept, the reward is not"
        raise ItemRejectedError("invalid", why)
    reason = attributes.get(semconv.REWARD_REASON)
    return Judgement(
        value=value,
        dimensions=dimensions,
        source=source,
        reason=reason if isinstance(reason, str) else None,
        key=f"otel-{entry.trace_id}-{entry.span_id}",
    )


def _dimensions(attributes: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in attributes.items():
        if key.startswith(semconv.REWARD_DIMENSION):
            yield key.removeprefix(semconv.REWARD_DIMENSION), value
    scores = {int(found[1]): value for key, value in attributes.items() if (found := _LIGHTNING.fullmatch(key))}
    # A single score is the reward itself, whatever its name.
    for number, value in scores.items() if len(scores) > 1 else ():
        name = attributes.get(f"{semconv.LIGHTNING_REWARD}{number}.name")
        yield name if isinstance(name, str) else str(number), value


# A reward may name the call that it judges. Agent Lightning writes such links as attributes,
# `agentlightning.link.N.key_match` and `.value_match`: the linked span has all of these values. That is the call
# itself, by the id of its response, or a span of the agent in which the call was made.

_LINK: Final = re.compile(re.escape(semconv.LIGHTNING_LINK) + r"(\d{1,3})\.key_match")
Links = dict[str, str]


def links_of(entry: SpanEntry) -> Links:
    """The values that a linked span has, by attribute; `trace_id` and `span_id` stand for its ids."""
    said = entry.attributes or {}
    found = {
        key: said.get(f"{semconv.LIGHTNING_LINK}{it[1]}.value_match") for key in said if (it := _LINK.fullmatch(key))
    }
    named = ((said[key], value) for key, value in found.items())
    return {key: value for key, value in named if isinstance(key, str) and isinstance(value, str)}


def linked_calls(spans: Sequence[TapeSpan], links: Links, judging: str | None) -> list[int]:
    """The sequences of an attempt's calls that links name: those that have all their values, and those that were made
    within a span that has them. `judging`: the id of the span with the links."""
    named = [span for span in spans if span.span_id != judging and _fits(span, links)]
    within, found = span_tree(spans), set[int]()
    while named:
        span = named.pop()
        if span.kind == "llm":
            found.add(span.sequence)
        named += within.get(span.sequence, ())
    return sorted(found)


def _fits(span: TapeSpan, links: Links) -> bool:
    said = span.attributes or {}
    own = {"trace_id": span.trace_id, "span_id": span.span_id}
    if span.kind == "llm":
        own[semconv.RESPONSE_ID] = span.response_id
    return all(str(own.get(key, said.get(key))) == value for key, value in links.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Log records. Coding agents log what they do: each record is an event with a name, such as `claude_code.user_prompt`,
# `codex.tool_result` or `gemini_cli.tool_call`. Agents put the name in its own field, in the attribute `event.name`,
# or in the body. Attributes are kept as those of spans are.

UNNAMED: Final = "log"
"""The name of a record without one: a line of a program's log."""
_EVENT: Final = re.compile(r"[a-z][a-z0-9_-]*(\.[a-z][a-z0-9_-]*)+")
"""Matches a body that is only the name of an event."""


def log_entry_of(record: LogRecord, resource: dict[str, Any], scope: dict[str, Any]) -> SpanEntry:
    """A record as an entry that has no rollout yet, and no time if the record has none. `resource`, `scope`: as for
    spans (`span_import.entry_of`). Raises `ItemRejectedError`."""
    at = record.time_unix_nano or record.observed_time_unix_nano or 0
    if at >= LATEST:
        raise ItemRejectedError("invalid", f"time {at}: a log record needs one in nanoseconds since 1970, below 2^63")
    bounds = Bounds()
    attributes = bounds.attributes(record.attributes)
    body = bounds.value(record.body)
    name = _name(bounds.text(record.event_name or ""), attributes, body)
    if body is not None and body != name:
        attributes[semconv.BODY] = body
    if severity := _severity(record):
        attributes[semconv.SEVERITY] = bounds.text(severity, LONGEST_NAME)
    if dropped := (record.dropped_attributes_count or 0) + bounds.dropped:
        attributes[semconv.DROPPED] = min(dropped, MOST_DROPPED)
    if bounds.clipped:
        attributes[semconv.TRUNCATED] = True
    attributes |= scope | {semconv.SIGNAL: semconv.LOG}
    if resource:
        attributes[semconv.RESOURCE] = resource
    trace, span = hex_id(record.trace_id), hex_id(record.span_id)
    entry = SpanEntry("", "", kind="event", name=name[:LONGEST_NAME], method="", status="ok", start_ns=at, end_ns=at)
    entry.trace_id = trace if is_trace_id(trace) else None
    # A span id without a trace id names no span.
    entry.parent_id = span if entry.trace_id is not None and is_span_id(span) else None
    entry.attributes = attributes
    return entry


def _name(named: str, attributes: dict[str, Any], body: Any) -> str:
    said = named or attributes.get(semconv.EVENT_NAME)
    said = said if isinstance(said, str) else ""
    # Claude Code has `user_prompt` in the attribute and `claude_code.user_prompt` in the body.
    if isinstance(body, str) and (body.endswith(f".{said}") if said else True) and _EVENT.fullmatch(body):
        return body
    return said or UNNAMED


def _severity(record: LogRecord) -> str:
    number = record.severity_number or 0
    return record.severity_text or (semconv.SEVERITIES[(number - 1) // 4] if 0 < number <= 24 else "")


# OpenTelemetry attribute values as plain values: text, bools, ints, floats, None, and lists and dicts of them.
#
# The heads of spans are read in lists, so the content of a foreign span is limited: a long text is cut, everything
# beyond the limits is left out, and the span is marked. Bytes become base64 text.
#
# The input is messages of protobuf or those of `signals`, which have the same fields.

MOST_ATTRIBUTES = 128
"""Most attributes of one span, event, link, resource or map: the SDKs' own default."""
MOST_ITEMS = 128
"""Most elements of one list."""
LONGEST_KEY = 256
"""Most characters of a key."""
LONGEST_TEXT = 8192
"""Most characters of one text."""
MOST_CHARACTERS = 65536
"""Most characters of all texts of one span, keys included."""
MOST_LOOKED = 8192
"""Most attributes and elements of one span that are read: two bytes can stand for one."""
DEEPEST = 6
"""Most levels of lists and maps."""


class Bounds:
    """The limits of one span's content; everything in the span counts towards them."""

    __slots__ = ("clipped", "dropped", "left", "looks")

    def __init__(self) -> None:
        self.left: int = MOST_CHARACTERS
        self.looks = MOST_LOOKED
        self.dropped = 0
        """Number of attributes that were left out."""
        self.clipped = False
        """True when anything was cut or left out."""

    def attributes(self, pairs: Sequence[KeyValue] | None, depth: int = 0) -> dict[str, Any]:
        """Attributes as a dict; of two with one key the last counts."""
        found: dict[str, Any] = {}
        for at, pair in enumerate(pairs or ()):
            if not self.looks:
                self.clipped = True
                self.dropped += len(pairs or ()) - at
                break
            self.looks -= 1
            key = pair.key
            size = len(key)
            if size > self.left or size > LONGEST_KEY or len(found) >= MOST_ATTRIBUTES:
                self.clipped = True
                self.dropped += 1
            else:
                self.left -= size
                found[key] = self.value(pair.value, depth)
        return found

    def value(self, value: AnyValue | None, depth: int = 0) -> Any:
        """An attribute's value as a plain value."""
        if value is None:
            return None
        if text := value.string_value:  # the commonest kind, and only one kind can be there
            return self.text(text)
        kind = value.WhichOneof("value")
        if kind == "array_value" or kind == "kvlist_value":
            return self._nested(value, kind, depth + 1)
        if kind == "bytes_value":
            raw = value.bytes_value or b""
            return self.text(raw if isinstance(raw, str) else b64encode(raw).decode())
        # An index into a table of strings exists in profiles only; here it has no meaning.
        return None if kind is None or kind == "string_value_strindex" else getattr(value, kind)

    def text(self, text: str, longest: int = LONGEST_TEXT) -> str:
        """A text, cut to the limits."""
        size = len(text)
        if size > longest or size > self.left:
            self.clipped = True
            text = text[: min(longest, self.left)]
            size = len(text)
        self.left -= size
        return text

    def _nested(self, value: AnyValue, kind: str, depth: int) -> Any:
        inner = getattr(value, kind)
        found = (inner.values if inner is not None else None) or ()
        if depth > DEEPEST:
            self.clipped = True
            return None
        if kind == "kvlist_value":
            return self.attributes(found, depth)
        # An element costs something even if it is empty.
        self.left -= min(len(found), MOST_ITEMS, self.left)
        most = min(MOST_ITEMS, self.looks)
        self.looks -= min(len(found), most)
        self.clipped |= len(found) > most
        return [self.value(one, depth) for one in islice(found, most)]


# The attempt that an item belongs to. The first of these that names a rollout counts: the scope of the request (its
# address or its agent token), the attributes of the span's resource, its own attributes, its trace, the session that
# it names. A log record is joined in the same way. A trace is known when an attempt's calls carried its
# `traceparent`, when the gateway derives it for an attempt (`gateway.model.span`), or when other spans of it have
# named the rollout. A trace that several attempts have used names none: a guess would mix their data.
#
# Traces are learned from the change feed when a span needs them, from where the last reading ended. They are a
# bounded memory of recent calls, without a task and without space on the tape.

REMEMBERED = 20_000
"""Most traces that are remembered."""
LOOKED_BACK = 20_000
"""Most changes that are read at once: if the feed has advanced further since the last reading, older ones are
skipped."""
_PAGE = 1_000

Name = tuple[str, str]
"""(rollout, attempt)."""
AttemptReference = tuple[str, str | None]
"""(rollout, attempt or None)."""


@dataclass(frozen=True, slots=True)
class RequestScope:
    """The rollout and attempt of a request, as the dispatch has found them."""

    rollout: str
    attempt: str
    kind: str
    """How the request names the rollout: by the rollout's own `token`, by an address (`open`), or by a header that
    names a `session`."""

    @property
    def agent_token(self) -> bool:
        return self.kind == "token"

    @property
    def origin(self) -> Origin:
        """The origin of a rollout that begins with this request."""
        return "implicit" if self.kind == "session" else "header"


def attempt_reference(attributes: dict[str, Any]) -> AttemptReference | None:
    """(rollout, attempt or None) named by attributes; None when they name no rollout. Raises `ItemRejectedError`."""
    rollout = _first(attributes, semconv.ROLLOUT)
    if rollout is None:
        return None
    attempt = _first(attributes, semconv.ATTEMPT)
    return _checked("rollout_id", rollout), None if attempt is None else _checked("attempt_id", attempt)


def _first(attributes: dict[str, Any], names: Iterable[str]) -> Any:
    return next((attributes[name] for name in names if name in attributes), None)


def _checked(part: str, value: Any) -> str:
    try:
        return check_id(part, str(value))
    except AddressError as error:
        raise ItemRejectedError("invalid", str(error)) from None


class TelemetrySource(NamedTuple):
    """The common parts of the items of one resource and instrumentation."""

    resource: dict[str, Any]
    instrumentation: dict[str, Any]
    said: AttemptReference | ItemRejectedError | None
    """The rollout that the resource names, or why it may not name that one."""


def source_of(item: TelemetryItem) -> TelemetrySource:
    """The common parts of the items of this item's resource and instrumentation; raises `ItemRejectedError` where one
    of these cannot be read."""
    for part, what in ((item.resource, "resource"), (item.scope, "scope")):
        if isinstance(part, ItemRejectedError):
            raise ItemRejectedError("invalid", f"its {what}: {part}")
    resource = Bounds().attributes(item.resource.attributes if item.resource else None)
    scope = {} if item.scope is None else scope_of(item.scope.name, item.scope.version)
    try:
        return TelemetrySource(resource, scope, attempt_reference(resource))
    except ItemRejectedError as error:
        return TelemetrySource(resource, scope, error)


def attempt_in_scope(scope: RequestScope, said: AttemptReference | None) -> Name:
    """The attempt of a span with this scope, given the names in the span itself. Raises `ItemRejectedError` for a
    rollout that the agent token does not open."""
    if said is None or said[0] != scope.rollout:
        if said is not None and scope.agent_token:
            raise ItemRejectedError("foreign", f"the agent token is for another rollout than {said[0]!r}")
        return scope.rollout, scope.attempt
    return scope.rollout, said[1] or scope.attempt


class Traces:
    """Known traces: the attempt of each, or None for a trace of several attempts."""

    def __init__(self, tape: Store, settled: Callable[[], Awaitable[object]]) -> None:
        """`settled` returns once everything that happened so far is on the tape."""
        self._tape = tape
        self._settled = settled
        self._cursor = 0
        self._known: OrderedDict[str, Name | None] = OrderedDict()
        self._reading = asyncio.Lock()

    def learn(self, trace: str, name: Name) -> None:
        """Note that a span of this trace belongs to this attempt."""
        known = self._known.get(trace, name)
        if known != name:
            # The trace that the gateway derives for an attempt is that attempt's, whoever else uses it.
            known = next((one for one in (name, known) if one is not None and trace == trace_id(*one)), None)
        self._known[trace] = known
        self._known.move_to_end(trace)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def find(self, traces: Iterable[str]) -> dict[str, Name]:
        """The attempts of those traces that are known to belong to one."""
        wanted = set(traces)
        if not wanted <= self._known.keys():
            await self._settled()
            async with self._reading:
                await self._catch_up()
        return {trace: name for trace in wanted if (name := self._known.get(trace)) is not None}

    async def _catch_up(self) -> None:
        end = self._tape.cursor()
        self._cursor = max(self._cursor, end - LOOKED_BACK)
        while self._cursor < end:
            changes, self._cursor = await asyncio.to_thread(self._tape.changes, self._cursor, _PAGE)
            for change in changes:
                self._learn_from(change)

    def _learn_from(self, change: Change) -> None:
        if (attempt := change.attempt) is not None:
            self.learn(trace_id(attempt.rollout, attempt.id), (attempt.rollout, attempt.id))
        elif (span := change.span) is not None and span.trace_id is not None:
            self.learn(span.trace_id, (span.rollout, span.attempt))


def attempt_of(tape: Store, rollout: str) -> str:
    """The attempt of a span that names only a rollout: the one that the queue handed out last, or the first."""
    found = tape.rollout(rollout)
    return FIRST_ATTEMPT if found is None or found.attempt is None else found.attempt


_SESSIONS = {
    "session.id": ("claude", "session"),
    "conversation.id": ("session", "thread"),
    "gen_ai.conversation.id": ("session", "thread"),
}
"""Attributes that name a session (Claude Code and others; Codex; the GenAI conventions), with the kinds of the headers
by which calls may name the same session (`calls.call_request.SESSION_HEADERS`)."""
_AGENTS = {"claude": ("claude_code.", "claude-code", "com.anthropic.claude_code"), "session": ("codex",)}
"""Beginnings of the names in telemetry of agents that are known to send such a header with their calls."""


def rollout_of_session(tape: Store, name: str | None, attributes: dict[str, Any]) -> str | None:
    """The implicit rollout of the session that telemetry names, if it exists, or if the calls of a known agent will
    open it; else None."""
    resource: dict[str, Any] = attributes.get(semconv.RESOURCE) or {}
    named = {
        kind: session_rollout(kind, session)
        for attribute in reversed(_SESSIONS)
        for kind in reversed(_SESSIONS[attribute])
        if isinstance(session := attributes.get(attribute, resource.get(attribute)), str) and session
    }
    there = next((rollout for rollout in reversed(named.values()) if tape.rollout(rollout) is not None), None)
    if there is not None or not named:
        return there
    marks = [name, attributes.get(semconv.SCOPE_NAME), resource.get(semconv.SERVICE)]
    known = (
        kind for kind, starts in _AGENTS.items() if any(isinstance(it, str) and it.startswith(starts) for it in marks)
    )
    return named.get(next(known, ""))
