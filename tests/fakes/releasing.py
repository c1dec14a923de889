"""The tape of a gateway with recorded calls and a release, and a provider that counts: where replays are tested.

No gateway process: store, recorder, switch and upstreams are the real ones, wired as `gateway.app` does.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from fakes.experiment import CANDIDATE, STABLE, prompt
from fakes.provider import FORMATS, Provider
from fakes.waiting import News
from fakes.web_site import event_stream, everywhere, site

from examples.demo.model import DemoAnswer, DemoToolCall, Json
from penstock.gateway.app import open_store
from penstock.gateway.config import GatewayConfig, TapeSettings
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import AuditTrailEntry as UpstreamConnection
from penstock.gateway.model.release import Release
from penstock.gateway.model.release_policy import ReleasePolicy
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Exchange, Turn
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.trials.replay import CallReplay
from penstock.gateway.traffic.trials.sender import ReleaseContext
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import RouteTable
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.dialects import find
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.work.operations import SpanOperations

T = TypeVar("T")
CHAT = "/v1/chat/completions"
OLD = STABLE.replace("{date}", "Tuesday")
NEW = CANDIDATE.replace("{date}", "Tuesday")


class Counting(Provider):
    """A provider that counts what it serves at the same time, and can be made to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0
        self.waiting = 0
        """Of those that run, those that are held."""
        self.held: Callable[[Json], bool] = lambda asked: False
        """Requests that wait until `go` is set."""
        self.breaks: Callable[[Json], bool] = lambda asked: False
        """Requests whose answer begins and breaks off."""
        self.only_pings: Callable[[Json], bool] = lambda asked: False
        """Requests whose answer is a stream that stays alive and says nothing."""
        self.go = asyncio.Event()
        self.news = News()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Counts, waits and answers."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.news.tell()
            if request.method == "POST" and self.held(json.loads(await request.read())):
                await self._hold()
            if request.method == "POST" and self.breaks(json.loads(await request.read())):
                return await self._break_off(request)
            if request.method == "POST" and self.only_pings(json.loads(await request.read())):
                return await self._ping(request)
            return await super().handle(request)
        finally:
            self.running -= 1
            self.news.tell()

    async def _hold(self) -> None:
        self.waiting += 1
        self.news.tell()
        try:
            await self.go.wait()
        finally:
            self.waiting -= 1

    async def _break_off(self, request: web.Request) -> web.StreamResponse:
        begun = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
        await begun.prepare(request)
        await begun.write(b'{"id":')
        assert request.transport is not None
        request.transport.close()
        return begun

    async def _ping(self, request: web.Request) -> web.StreamResponse:
        begun = await event_stream(request)
        while True:  # until the client leaves
            await begun.write(b': ping\n\nevent: ping\ndata: {"type":"ping"}\n\n')
            await asyncio.sleep(0.01)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition on its figures holds."""
        await self.news.until(condition, self._state)

    def _state(self) -> str:
        return f"{self.running} requests run, {self.waiting} of them wait, {len(self.log)} were read"


@asynccontextmanager
async def counting() -> AsyncGenerator[Counting]:
    """A running one."""
    made = Counting()
    async with site(everywhere(made.handle), unpacks=False) as made.url:
        try:
            yield made
        finally:
            made.go.set()


def system_of(asked: Json) -> str:
    """The system text of a request, whichever API it is of."""
    found: Any = asked.get("system") or asked.get("instructions")
    return found or next((it["content"] for it in asked["messages"] if it["role"] == "system"), "")


def question_of(asked: Json) -> str:
    """What the user said last."""
    said: list[Json] = asked.get("messages") or asked.get("input") or []
    return next(it["content"] for it in reversed(said) if it["role"] == "user")


def lookup(asked: Json) -> DemoAnswer:
    """The answer of the recorded model: it looks up what was asked for."""
    return DemoAnswer(calls=(DemoToolCall("call_1", "lookup", json.dumps({"what": question_of(asked), "limit": 3})),))


def request_of(path: str, text: str, question: str, stream: bool = False, **more: Any) -> Json:
    """A request of an agent."""
    user = [{"role": "user", "content": question}]
    schema = {"type": "object", "properties": {"what": {"type": "string"}}}
    flat = {"name": "lookup", "description": "Looks things up."}
    asked: Json = {"model": "m"} | ({"stream": True} if stream else {})
    if path == "/v1/messages":
        asked |= {"max_tokens": 99, "system": text, "messages": user, "tools": [flat | {"input_schema": schema}]}
    elif path == "/v1/responses":
        asked |= {"instructions": text, "input": user, "tools": [{"type": "function", "parameters": schema} | flat]}
    else:
        system = [{"role": "system", "content": text}]
        tools = [{"type": "function", "function": flat | {"parameters": schema}}]
        asked |= {"messages": system + user, "tools": tools}
    return asked | more


@dataclass
class Bench:
    """Store, recorder, switch and upstreams of a gateway."""

    context: ReleaseContext
    provider: Counting
    progress: JobProgress = field(default_factory=lambda: JobProgress("replay"))

    async def do(self, operation: Callable[[Transaction], T]) -> T:
        """One transaction."""
        done = await self.context.recorder.submit(operation)
        await self.context.pins.reload()
        return done

    async def add(self, name: str, new: NewVersion) -> None:
        """Registers a version."""
        await self.do(lambda transaction: ReleaseOperations(transaction).add_version(name, new, self.context.now_ns()))

    async def record(
        self,
        rollout: str,
        asked: Json,
        answer: DemoAnswer | None = None,
        path: str = CHAT,
        headers: bytes = b"Content-Type: application/json\r\nAuthorization: ***\r\n",
        **more: Any,
    ) -> None:
        """A call on the tape, as the data plane would have put it there. `sent`: its body, if it is not the agent's."""
        plain, events = FORMATS[path]
        said, stream = answer or lookup(asked), bool(asked.get("stream"))
        raw = b"".join(events(asked, said)) if stream and events else json.dumps(plain(asked, said)).encode()
        body, dialect = more.pop("sent", json.dumps(asked).encode()), find("POST", path)
        facts, now = dialect.facts(body, raw, stream), self.context.now_ns()
        upstream = "anthropic" if path == "/v1/messages" else "openai"
        kind = b"text/event-stream" if stream else b"application/json"
        given: dict[str, Any] = {"start_ns": now, "end_ns": now, "upstream": upstream, "http_status": 200, "path": path}
        given |= {"dialect": dialect.name, "model": asked["model"], "stream": stream, "choices": facts.choices}
        given |= {
            "status": "ok",
            "body": StoredBody("", headers, body, b"Content-Type: " + kind + b"\r\n", raw, b"", []),
        }
        entry = SpanEntry(rollout, "a1", **(given | more))
        await self.do(lambda transaction: SpanOperations(transaction).add([entry], now))

    async def record_many(self, rollouts: int, calls: int = 1, **more: Any) -> None:
        """Calls with the stable prompt."""
        for rollout in range(rollouts):
            for call in range(calls):
                asked = request_of(more.get("path", CHAT), OLD, f"flight {rollout}.{call}")
                await self.record(f"r{rollout}", asked, **more)

    async def release(self, resource: str = "travel", candidate: str = "v2", **replay: Any) -> Release:
        """A release of two versions that is about to be replayed."""
        given = {"margin_absolute": 0.1, "replay": {"calls": 100} | replay.pop("replay", {})} | replay
        only = given.pop("only", {})
        policy = ReleasePolicy.model_validate(given)
        new = Release.model_validate(
            {"id": "new", "resource": resource, "kind": "prompt", "stable": "v1", "candidate": candidate}
            | {"policy": policy, "salt": "s", "only": only}
        )
        connection = UpstreamConnection(number=0, at_ns=0, who="ann", action="start", before=None, after="draft")
        return await self.do(
            lambda transaction: ReleaseOperations(transaction).start(new, connection, self.context.now_ns())
        )

    async def replay(self, release: Release) -> JobReport:
        """The report of a replay."""
        return await CallReplay(self.context, release, self.progress).report()

    def spans(self, rollout: str) -> list[Span]:
        """All spans of a rollout."""
        return list(self.context.tape.spans(rollout))

    def exchange(self, span: Span) -> Exchange:
        """The bytes of a call."""
        found = self.context.tape.exchange(span)
        assert found is not None
        return found

    def asked(self) -> list[Json]:
        """What the provider was asked."""
        return [json.loads(seen.body) for seen in self.provider.log]


@asynccontextmanager
async def bench(home: Path, provider: Counting, config: Mapping[str, Any] | None = None) -> AsyncGenerator[Bench]:
    """One whose upstreams are the provider, with two versions of the prompt `travel`."""
    upstream = [
        {"name": "openai", "base_url": provider.openai_url, "dialect": "openai"},
        {"name": "anthropic", "base_url": provider.url, "dialect": "anthropic"},
    ]
    found = GatewayConfig.model_validate({"upstream": upstream} | dict(config or {}))
    pools = {one.name: ConnectionPool(one) for one in found.upstreams()}
    store = open_store(home / "data")
    recorder = Recorder(store, TapeSettings(), Metrics(), lambda cursor, records: None)
    pins = PinTable(ReleaseReader(store), recorder, Metrics(), Redactor(), asyncio.Future, lambda rollout, pins: None)
    recorder.start()
    async with aiohttp.ClientSession() as session:
        routes = RouteTable(found.route, pools, {one.name for one in found.upstream})
        context = ReleaseContext(store, pins, recorder, pools, routes, lambda: session, time.time_ns)
        made = Bench(context, provider)
        await made.add("travel", prompt(STABLE, sent=True))
        await made.add("travel", prompt(CANDIDATE))
        try:
            yield made
        finally:
            await recorder.close()
            for pool in pools.values():
                pool.close()
            store.close()


def turn(calls: Iterable[tuple[str, str]] = (), text: str = "", messages: Iterable[tuple[str, str]] = ()) -> Turn:
    """An exchange that ended with these tool calls, or this text."""
    parts: list[Json] = [{"type": "tool_call", "name": name, "arguments": arguments} for name, arguments in calls]
    parts += [{"type": "text", "text": text}] if text else []
    told = [{"role": role, "parts": [{"type": "text", "text": said}]} for role, said in messages]
    choices = [{"message": {"role": "assistant", "parts": parts}}]
    return Turn.model_validate({"dialect": "chat", "messages": told, "choices": choices})
