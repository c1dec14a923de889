"""`POST /v1/traces`: spans of any instrumented agent, kept in the attempt that they belong to.

When the request is answered, its spans are durable. Spans that belong nowhere, or to another rollout than the token's,
are rejected one by one: the answer is then a partial success that says how many and why, and the metric counts them. A
reward that a span carries is kept after the spans; an agent's own is `agent`, everybody else's `user`. An exporter that
did not hear the answer sends its batch again: its spans are then there twice, with the same span ids, its rewards once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web

from penstock.gateway.model.rollout import RewardSource
from penstock.gateway.otlp import wire
from penstock.gateway.otlp.attempt_of import Rejected, Said, Scope, Traces, attempt_of, named, within
from penstock.gateway.otlp.span_in import entry_of, has_reward, judgement_of, scope_of
from penstock.gateway.otlp.values import Bounds
from penstock.gateway.otlp.wire import Failure
from penstock.gateway.queue.dispatcher import Dispatcher
from penstock.gateway.store import Store
from penstock.gateway.store.directory import TapeError
from penstock.gateway.store.operation import Refused
from penstock.gateway.store.records import Entry

if TYPE_CHECKING:
    from penstock.gateway.otlp.span_in import Span
    from penstock.gateway.otlp.wire import Request

MOST_GROUPS = 10_000
"""Resources and scopes of one request: an SDK has one or two, a collector some for each process that it hears."""
SLICE_S = 0.003
"""How long spans are looked at between two turns of the event loop."""
MOST_REASONS = 5
_HOWTO = "send them to the rollout's address or with its token, or set the resource attribute penstock.rollout_id"


class Ingest:
    """What the handler works with."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tape: Store,
        spans: Counter[tuple[str, ...]],
        request_bytes: int = wire.REQUEST_BYTES,
    ) -> None:
        """`spans` counts them by outcome; `request_bytes`: what one request may have, without its compression."""
        self.dispatcher = dispatcher
        self.tape = tape
        self.spans = spans
        self.request_bytes = request_bytes
        self.traces = Traces(tape, dispatcher.settled)


INGEST = web.AppKey("otlp", Ingest)


async def post_traces(request: web.Request) -> web.StreamResponse:
    """Spans of OpenTelemetry, as OTLP/HTTP sends them: protobuf or JSON, gzip or not. What is answered is durable."""
    ingest, encoding = request.app[INGEST], wire.JSON
    try:
        encoding = wire.encoding_of(request)
        asked = await wire.decode(encoding, await wire.body_of(request, ingest.request_bytes))
        batch = _Batch(ingest, _scope(request))
        await batch.take(asked)
        await batch.keep()
    except Failure as failure:
        return wire.refused(encoding, failure)
    except TapeError as error:
        return wire.refused(encoding, Failure(503, f"the tape does not take it: {error}"))
    return wire.accepted(encoding, batch.rejected.total(), batch.message())


def _scope(request: web.Request) -> Scope | None:
    """The scope that the dispatch has put into the path: see `gateway.server.bridge`."""
    found = request.match_info
    return Scope(found["rid"], found["aid"], found["kind"] == "token") if "rid" in found else None


class _Source(NamedTuple):
    """What the spans of one resource and instrumentation have in common."""

    resource: dict[str, Any]
    instrumentation: dict[str, Any]
    said: Said | Rejected | None
    """The rollout that the resource names, or why it cannot be that one."""


class _Batch:
    """A request on its way to the tape."""

    def __init__(self, ingest: Ingest, scope: Scope | None) -> None:
        self._ingest = ingest
        self._scope = scope
        self._entries: list[Entry] = []
        self._by_trace: list[Entry] = []
        self._attempts: dict[str, str] = {}
        self._warnings: list[str] = []
        self.rejected: Counter[tuple[str, str]] = Counter()
        """How many were not taken, by outcome and reason."""

    async def take(self, asked: Request) -> None:
        """Looks at every span."""
        until = monotonic() + SLICE_S
        for span, source in _spans(asked):
            try:
                if span is not None:
                    self._place(entry_of(span, source.resource, source.instrumentation), source)
            except Rejected as error:
                self.rejected[error.outcome, str(error)] += 1
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + SLICE_S
        if self._by_trace:
            await self._place_by_trace()

    def _place(self, entry: Entry, source: _Source) -> None:
        said = source.said or named(entry.attributes or {})
        if isinstance(said, Rejected):
            raise said
        if self._scope is not None:
            entry.rollout, entry.attempt = within(self._scope, said)
        elif said is not None:
            entry.rollout, entry.attempt = said[0], said[1] or self._attempt_of(said[0])
            self._ingest.traces.learn(entry.trace_id or "", (entry.rollout, entry.attempt))
        else:
            self._by_trace.append(entry)
            return
        self._entries.append(entry)

    def _attempt_of(self, rollout: str) -> str:
        found = self._attempts.get(rollout)
        if found is None:
            found = self._attempts[rollout] = attempt_of(self._ingest.tape, rollout)
        return found

    async def _place_by_trace(self) -> None:
        known = await self._ingest.traces.find(entry.trace_id or "" for entry in self._by_trace)
        for entry in self._by_trace:
            name = known.get(entry.trace_id or "")
            if name is None:
                self.rejected["unjoined", f"their trace belongs to no rollout, or to several; {_HOWTO}"] += 1
            else:
                entry.rollout, entry.attempt = name
                self._entries.append(entry)

    async def keep(self) -> None:
        """Hands in the spans and rewards, and counts; raises `TapeError`."""
        if self._entries:
            await self._ingest.dispatcher.add(self._entries)
        spans = self._ingest.spans
        spans["accepted",] += len(self._entries)
        for (outcome, _), count in self.rejected.items():
            spans[outcome,] += count
        await asyncio.gather(*(self._reward(entry) for entry in self._entries if has_reward(entry)))

    async def _reward(self, entry: Entry) -> None:
        source: RewardSource = "agent" if self._scope is not None and self._scope.agent_token else "user"
        try:
            await self._ingest.dispatcher.reward(entry.rollout, entry.attempt, judgement_of(entry, source))
        except (Rejected, Refused) as error:
            self._warnings.append(str(error))

    def message(self) -> str:
        """What the sender is told; empty when everything was taken."""
        reasons = [f"{count} rejected: {reason}" for (_, reason), count in self.rejected.most_common(MOST_REASONS)]
        return "; ".join(reasons + self._warnings[:MOST_REASONS])


def _spans(asked: Request) -> Iterator[tuple[Span | None, _Source]]:
    """Each span, and None for a group of them, of which any number may be empty. Raises `Failure`."""
    groups = 0
    for group in asked.resource_spans or ():
        resource = Bounds().attributes(group.resource.attributes if group.resource else None)
        said = _said(resource)
        yield None, _Source(resource, {}, said)
        for part in group.scope_spans or ():
            groups += 1
            scope = part.scope
            source = _Source(resource, {} if scope is None else scope_of(scope.name, scope.version), said)
            yield None, source
            for span in part.spans or ():
                yield span, source
        groups += 1
        if groups > MOST_GROUPS:
            raise Failure(413, f"the request has more than {MOST_GROUPS} resources and scopes; send smaller batches")


def _said(resource: dict[str, Any]) -> Said | Rejected | None:
    try:
        return named(resource)
    except Rejected as error:
        return error
