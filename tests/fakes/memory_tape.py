"""A tape in memory, and a gateway's control API served from it: for tests of what reads the tape."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

from penstock.gateway.api.guard import Control
from penstock.gateway.api.routes import make_application
from penstock.gateway.followers.webhooks import WebhookService
from penstock.gateway.model.answers import Change
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.rollout import Attempt, Rollout, Totals
from penstock.gateway.model.span import Span, SpanStatus, Usage
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.turn import Chunk, Exchange
from penstock.gateway.releases.driver import Driver
from penstock.gateway.releases.reader import ReleaseMetrics
from penstock.gateway.tape.store.audit_log import AuditLog
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.view import ALL_CHANGES, ChangeFilter
from penstock.gateway.tools.definition_enforcement import DefinitionService
from penstock.gateway.traffic.calls.admission import Auth
from penstock.gateway.traffic.trials.rehearsal import Rehearsals
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.runs import RunService

T0 = 1_790_000_000_000_000_000
"""When the tests' calls begin: 2026-09-21 14:13:20 UTC."""
EMPTY = QueueStatus(state="open", waiting={}, claimed=0, oldest_ns=None)


async def _all_written() -> None:
    """Nothing waits for the tape."""


NO_DESK = cast(
    Dispatcher, SimpleNamespace(reader=SimpleNamespace(queue=lambda: EMPTY, workers=list), flush_calls=_all_written)
)
"""Nothing waits."""
NO_RELEASES = cast(
    Driver,
    SimpleNamespace(
        reader=SimpleNamespace(releases=list), metrics=ReleaseMetrics(lambda release: [], lambda release: None)
    ),
)
"""No more, and there are none."""
NO_REHEARSALS = cast(Rehearsals, None)
NO_RUNS = cast(RunService, None)
NO_DEFINITIONS = cast(DefinitionService, None)
NO_AUDIT_LOG = cast(AuditLog, None)
NO_WEBHOOKS = cast(WebhookService, None)
SECRET = b"a secret of 16 bytes or more"


class MemoryTape:
    """Everything in dicts, with a feed of its own."""

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[str, dict[str, Attempt]] = {}
        self._spans: dict[tuple[str, str, int], tuple[int, Span]] = {}
        self._exchanges: dict[tuple[str, str, int], Exchange] = {}
        self._changes: list[Change] = []
        self.feed = ChangeFeed(0)

    def add(self, span: Span, exchange: Exchange | None = None, **about_rollout: Any) -> None:
        """Record a span, and its rollout and attempt if they are new."""
        key = (span.rollout, span.attempt, span.sequence)
        if span.rollout not in self._rollouts:
            rollout = Rollout(id=span.rollout, created_ns=span.start_ns, **about_rollout)
            self._rollouts[span.rollout], self._attempts[span.rollout] = rollout, {}
            self._changes.append(Change(cursor=self.cursor() + 1, kind="rollout", rollout=rollout))
        self._attempts[span.rollout][span.attempt] = self._grown(span)
        self._changes.append(Change(cursor=self.cursor() + 1, kind="span", span=span))
        self._spans[key] = (self.cursor(), span)
        if exchange is not None:
            self._exchanges[key] = exchange

    def _grown(self, span: Span) -> Attempt:
        attempts = self._attempts[span.rollout]
        attempt = attempts.get(span.attempt) or Attempt(
            rollout=span.rollout, id=span.attempt, sequence=len(attempts) + 1, created_ns=span.start_ns
        )
        usage, totals = span.usage or Usage(), attempt.totals
        added = Totals(
            calls=totals.calls + (span.kind == "llm"),
            errors=totals.errors + (span.status == SpanStatus.ERROR),
            cancelled=totals.cancelled + (span.status == SpanStatus.CANCELLED),
            input_tokens=(totals.input_tokens or 0) + (usage.input_tokens or 0),
            output_tokens=(totals.output_tokens or 0) + (usage.output_tokens or 0),
            tool_calls=totals.tool_calls + span.tool_calls,
        )
        return attempt.model_copy(update={"spans": span.sequence, "last_seen_ns": span.start_ns, "totals": added})

    async def tell(self) -> None:
        """Wake the followers."""
        self.feed.committed(self.cursor(), [b"s"])

    def find_response(self, response_id: str) -> Span | None:
        return next((span for _, span in self._spans.values() if span.response_id == response_id), None)

    def pass_over(self, what: str, error: TapeError) -> None:
        raise error

    def rollout(self, rid: str) -> Rollout | None:
        return self._rollouts.get(rid)

    def attempts(self, rid: str) -> list[Attempt]:
        """Copies: who reads a tape may change what it has read."""
        return [one.model_copy() for one in self._attempts.get(rid, {}).values()]

    def rollouts(self, before: int | None = None) -> Iterator[tuple[int, Rollout]]:
        numbered = list(enumerate(self._rollouts.values(), start=1))
        return ((n, rollout) for n, rollout in reversed(numbered) if before is None or n < before)

    def named(self, rollouts: Iterable[str]) -> list[tuple[int, Rollout]]:
        wanted = set(rollouts)
        return [(number, rollout) for number, rollout in self.rollouts() if rollout.id in wanted]

    def spans(
        self,
        rid: str,
        aid: str | None = None,
        after: tuple[str, int] | None = None,
        kinds: Collection[str] = (),
    ) -> Iterator[Span]:
        order = list(self._attempts.get(rid, {}))

        def place(attempt: str, sequence: int) -> tuple[int, int]:
            return order.index(attempt), sequence

        found = [span for _, span in self._spans.values() if span.rollout == rid and aid in (None, span.attempt)]
        for span in sorted(found, key=lambda s: place(s.attempt, s.sequence)):
            passed = after is not None and place(span.attempt, span.sequence) <= place(*after)
            if not passed and (not kinds or span.kind in kinds):
                yield span

    def span(self, rid: str, aid: str, sequence: int) -> Span | None:
        return self._spans.get((rid, aid, sequence), (0, None))[1]

    def recent(self, before: int | None = None) -> Iterator[tuple[int, Span]]:
        newest_first = sorted(self._spans.values(), key=lambda item: -item[0])
        return ((n, span) for n, span in newest_first if before is None or n < before)

    def at(self, cursors: Iterable[int]) -> Iterator[tuple[int, Span]]:
        known = dict(self.recent())
        return ((cursor, known[cursor]) for cursor in cursors)

    def exchange(self, span: Span) -> Exchange | None:
        return self._exchanges.get((span.rollout, span.attempt, span.sequence))

    def exchanges(self, spans: Iterable[Span]) -> Iterator[tuple[Span, Exchange | None]]:
        return ((span, self.exchange(span)) for span in spans)

    def changes(self, since: int, limit: int, wanted: ChangeFilter = ALL_CHANGES) -> tuple[list[Change], int]:
        found = self._changes[since : since + limit]
        told = [one for one in found if one.rollout is None or wanted.matches_status(one.rollout.status)]
        return told, found[-1].cursor if found else since

    def identity(self) -> str:
        return "ab" * 16

    def cursor(self) -> int:
        return len(self._changes)

    def figures(self) -> dict[str, int]:
        attempts = sum(map(len, self._attempts.values()))
        return {
            "map_bytes": 1 << 30,
            "used_bytes": 1 << 20,
            "rollouts": len(self._rollouts),
            "attempts": attempts,
            "spans": len(self._spans),
        }


@dataclass(slots=True)
class Condition:
    """What the gateway says of itself."""

    not_ready: str | None = None


class Alone:
    """One process, without upstreams."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def figures(self) -> Metrics:
        return self._metrics

    async def upstreams(self) -> dict[str, UpstreamView]:
        return {}

    async def pause(self, upstream: str, bound_s: float) -> None:
        raise AssertionError(upstream)

    async def open(self, upstream: str) -> None:
        raise AssertionError(upstream)


@dataclass(slots=True)
class Serving:
    """A control API that answers."""

    tape: MemoryTape
    auth: Auth
    metrics: Metrics
    state: Condition
    runner: web.AppRunner
    port: int
    connections: list[Any] = field(default_factory=list[Any])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(
    tape: MemoryTape, admin_key: str | None = None, keep_alive_s: float = 15.0
) -> AsyncGenerator[Serving]:
    """Serve a tape on a free port."""
    auth, metrics, state = Auth(admin_key, SECRET), Metrics(), Condition()
    runner = web.AppRunner(
        make_application(
            Control(
                tape,
                NO_DESK,
                NO_RELEASES,
                NO_REHEARSALS,
                NO_RUNS,
                tape.feed,
                Alone(metrics),
                auth,
                metrics,
                state,
                NO_DEFINITIONS,
                NO_AUDIT_LOG,
                NO_WEBHOOKS,
                keep_alive_s=keep_alive_s,
            )
        ),
        shutdown_timeout=1.0,
        handler_cancellation=True,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Serving(tape, auth, metrics, state, runner, runner.addresses[0][1])
    finally:
        await runner.cleanup()


def call(sequence: int = 1, rollout: str = "r1", attempt: str = "a1", **fields: Any) -> Span:
    """A good chat call; `at_ms` and `ms` say when it began and how long it took."""
    start = T0 + fields.pop("at_ms", sequence * 1000) * 1_000_000
    end_ns = start + fields.pop("ms", 800) * 1_000_000
    usual: dict[str, Any] = {
        "start_ns": start,
        "end_ns": end_ns,
        "dialect": "chat",
        "path": "/v1/chat/completions",
        "upstream": "openai",
        "http_status": 200,
        "model": "gpt-5-mini",
        "finish": "stop",
        "choices": 1,
        "usage": Usage(input_tokens=100, output_tokens=20),
        "body": 1,
    }
    return Span(rollout=rollout, attempt=attempt, sequence=sequence, **(usual | fields))


def chat_exchange(messages: list[dict[str, Any]], answer: dict[str, Any], **asked: Any) -> Exchange:
    """A chat completion as JSON."""
    model = "gpt-5-mini"
    response = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_790_000_000,
        "model": f"{model}-2026-08-01",
        "choices": [{"index": 0, "message": {"role": "assistant", **answer}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }
    request = {"model": model, "messages": messages, **asked}
    return exchange(json.dumps(request).encode(), json.dumps(response).encode())


def exchange(request: bytes, response: bytes, content_type: str = "application/json") -> Exchange:
    """The bytes of a call."""
    return Exchange(
        url="https://api.example/v1/chat/completions",
        request_headers=[("Content-Type", "application/json"), ("Authorization", "***")],
        request_body=request,
        response_headers=[("Content-Type", content_type)],
        response_body=response,
        chunks=[Chunk(at_ns=500_000_000, size=len(response))],
    )
