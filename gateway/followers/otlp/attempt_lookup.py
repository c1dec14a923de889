"""Finds the attempt that a span or a log record belongs to.

The first of these that names a rollout counts: the scope of the request (its address or its agent token), the
attributes of the span's resource, its own attributes, its trace, the session that it names. A log record is joined in
the same way. A trace is known when an attempt's calls carried its `traceparent`, when the gateway derives it for an
attempt (`gateway.model.span`), or when other spans of it have named the rollout. A trace that several attempts have
used names none: a guess would mix their data.

Traces are learned from the change feed when a span needs them, from where the last reading ended. They are a bounded
memory of recent calls, without a task and without space on the tape.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.gateway.followers.otlp import semconv
from penstock.gateway.model.answers import Change
from penstock.gateway.model.base import Origin
from penstock.gateway.model.span import trace_id
from penstock.gateway.tape.store import Store
from penstock.gateway.traffic.calls.call_request import FIRST_ATTEMPT, AddressError, check_id, session_rollout

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


class ItemRejectedError(ValueError):
    """A span that does not belong here; the message says why."""

    def __init__(self, outcome: Literal["unjoined", "foreign", "invalid"], message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


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
