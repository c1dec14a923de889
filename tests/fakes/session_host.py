"""Providers of hosted agents, as Anthropic's sessions and OpenAI's agent sessions are: input starts turns, whose events
are kept, listed in pages, and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from fakes.web_site import event_stream, site

MODEL, SMALL = "claude-sonnet-4-5", "claude-haiku-4-5"
USAGE = {
    "input_tokens": 100, "output_tokens": 10, "cache_read_input_tokens": 20, "cache_creation_input_tokens": 0,
}  # fmt: skip
Event = dict[str, Any]
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)


class SessionHost:
    """The server: one session. Its agent calls a custom tool, then `bash`, then a sub-agent, and answers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        """The session's own, in order."""
        self.thread: list[Event] = []
        """Those of its sub-agent, `sthr_2`."""
        self.streams = 0
        self._number, self._news = 0, asyncio.Condition()

    def event(self, type_: str, thread: bool = False, **more: Any) -> Event:
        """The next event, a second after the last one."""
        self._number += 1
        at = (BEGAN + timedelta(seconds=self._number)).isoformat().replace("+00:00", "Z")
        made = {"id": f"sevt_{self._number}", "type": type_, "processed_at": at, **more}
        (self.thread if thread else self.events).append(made)
        return made

    def turn(self, *made: tuple[str, dict[str, Any]], thread: bool = False, usage: Event = USAGE) -> list[Event]:
        """A model turn that makes these events."""
        start = self.event("span.model_request_start", thread)
        out = [self.event(type_, thread, **more) for type_, more in made]
        self.event(
            "span.model_request_end", thread, model_request_start_id=start["id"], is_error=False, model_usage=usage
        )
        return out

    def begin(self, said: str) -> None:
        """A user says something: the agent wants the weather of the client."""
        self.event("user.message", content=[_text(said)])
        self.event("session.status_running")
        asked: list[tuple[str, Event]] = [
            ("agent.thinking", {}),
            ("agent.custom_tool_use", {"name": "weather", "input": {"city": "Bern"}}),
        ]
        use = self.turn(*asked)[-1]
        self.event("session.status_idle", stop_reason={"type": "requires_action", "event_ids": [use["id"]]})

    def go_on(self, result: Event) -> None:
        """The client's tool has answered: the agent works on and ends."""
        self.event("user.custom_tool_result", **{k: v for k, v in result.items() if k != "type"})
        self.event("session.status_running")
        (use,) = self.turn(("agent.tool_use", {"name": "bash", "input": {"command": "ls"}}))
        self.event("agent.tool_result", tool_use_id=use["id"], content=[_text("a.txt")], is_error=False)
        self.turn(("agent.thread_message_sent", {"to_session_thread_id": "sthr_2", "content": [_text("look")]}))
        self.event("session.thread_created", session_thread_id="sthr_2", agent_name="helper")
        self.event("agent.thread_message_received", True, from_session_thread_id="sthr_1", content=[_text("look")])
        self.turn(("agent.message", {"content": [_text("it is small")]}), thread=True)
        self.turn(("agent.message", {"content": [_text("It is sunny in Bern.")]}))
        self.event("session.error", error={"type": "unknown_error", "message": "a hiccup"})
        self.event("session.status_idle", stop_reason={"type": "end_turn"})

    # -- the API -------------------------------------------------------------------------------------------------------

    def _session(self) -> Event:
        agent: Event = {
            "type": "agent",
            "id": "agent_1",
            "name": "main",
            "version": 1,
            "model": {"id": MODEL},
            "tools": [],
        }
        helper = agent | {"id": "agent_2", "name": "helper", "model": {"id": SMALL}}
        at = BEGAN.isoformat()
        return {
            "id": "sesn_1", "type": "session", "status": "idle", "metadata": {}, "environment_id": "env_1",
            "agent": agent | {"multiagent": {"type": "coordinator", "agents": [helper]}}, "created_at": at,
            "updated_at": at, "usage": {}, "stats": {}, "resources": [], "vault_ids": [], "outcome_evaluations": [],
        }  # fmt: skip

    async def session(self, request: web.Request) -> web.Response:
        return web.json_response(self._session())

    async def send(self, request: web.Request) -> web.Response:
        """Takes events; they are queued at first."""
        queued: list[Event] = []
        async with self._news:
            for one in (await request.json())["events"]:
                at = len(self.events)
                self.begin(one["content"][0]["text"]) if one["type"] == "user.message" else self.go_on(one)
                queued.append(self.events[at] | {"processed_at": None})
            self._news.notify_all()
        return web.json_response({"data": queued})

    async def list(self, request: web.Request) -> web.Response:
        """A page; the cursor is a number."""
        found = self.thread if "thread" in request.match_info else self.events
        if request.query.get("order") == "desc":
            found = found[::-1]
        at, limit = int(request.query.get("page", 0)), int(request.query.get("limit", 100))
        more = str(at + limit) if at + limit < len(found) else None
        return web.json_response({"data": found[at : at + limit], "next_page": more})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """What comes from now on, until the session rests."""
        found = self.thread if "thread" in request.match_info else self.events
        at, answer = len(found), await event_stream(request)
        self.streams += 1
        while True:
            async with self._news:
                while len(found) == at:
                    await self._news.wait()
            for one in found[at:]:
                await answer.write(f"event: message\ndata: {json.dumps(one)}\n\n".encode())
            at = len(found)


def _text(said: str) -> Event:
    return {"type": "text", "text": said}


class AgentSessionHost:
    """OpenAI's: one session. Its agent calls a function, then runs a command, has a sub-agent look, and answers."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.items: list[Event] = []
        self.turns: list[Event] = []
        self.traces: list[Event] = []
        self._number, self._news = 0, asyncio.Condition()

    def _tell(self, kind: str, **more: Any) -> None:
        self._number += 1
        told = {"type": f"agent.session.{kind}", "event_id": f"ev_{self._number}", "session_id": "as_1", **more}
        self.events.append(told)

    def _item(self, added: bool = False, **item: Any) -> None:
        made = {"id": f"item_{len(self.items)}", "turn_id": "turn_1", "status": "completed", **item}
        self.items.append(made)
        if not added:
            self._tell("turn.item.added", turn_id="turn_1", item=made | {"status": "in_progress"})
        self._tell(f"turn.item.{'added' if added else 'done'}", turn_id="turn_1", output_index=0, item=made)

    def _turn(self, status: str, **more: Any) -> Event:
        return {
            "id": "turn_1", "object": "agent.session.turn", "agent_id": "agent_1", "session_id": "as_1",
            "status": status, "created_at": 1_790_000_000, "started_at": 1_790_000_001, **more,
        }  # fmt: skip

    def begin(self, said: str) -> None:
        self._tell("turn.created", turn_id="turn_1", turn=self._turn("queued"))
        self._item(True, type="message", role="user", content=[{"type": "input_text", "text": said}])
        self._item(type="function_call", call_id="call_1", name="weather", arguments={"city": "Bern"})
        self._tell("requires_action", session=self.state("requires_action"))

    def go_on(self, result: Event) -> None:
        self._item(True, type="function_call_output", call_id=result["call_id"], output=result["output"])
        self._item(type="command_execution", command="ls", output="a.txt", exit_code=0, duration_ms=2000)
        child = {
            "id": "sa_1", "object": "agent.session.subagent", "name": "helper", "opened_at": 1_790_000_005,
            "parent_agent_id": "agent_1", "session_id": "as_1", "status": "active",
        }  # fmt: skip
        self._tell("subagent.created", subagent=child)
        self._item(type="message", role="assistant", content=[{"type": "output_text", "text": "It is sunny."}])
        used = {
            "input_tokens": 300, "input_tokens_details": {"cached_tokens": 50}, "output_tokens": 30,
            "output_tokens_details": {"reasoning_tokens": 5}, "total_tokens": 330,
        }  # fmt: skip
        self.turns.append(self._turn("completed", completed_at=1_790_000_009, usage=used))
        self.traces = [trace_of(self.turns[-1])]
        self._tell("turn.completed", turn_id="turn_1", turn=self.turns[-1], usage=used)
        self._tell("idle", session=self.state("idle"))

    def state(self, status: str = "idle") -> Event:
        agent: Event = {"id": "agent_1", "model": "gpt-5.4-mini", "name": "main", "service_tier": "auto", "tools": []}
        return {
            "id": "as_1", "object": "agent.session", "agent": agent, "created_at": 1_790_000_000, "status": status,
            "environment": {}, "last_active_at": 1, "metadata": {}, "required_actions": [], "vault_ids": [],
        }  # fmt: skip

    async def session(self, request: web.Request) -> web.Response:
        return web.json_response(self.state())

    async def send(self, request: web.Request) -> web.Response:
        async with self._news:
            for one in (await request.json())["events"]:
                message = one["type"].endswith("input.message")
                self.begin(one["input"][0]["content"][0]["text"]) if message else self.go_on(one)
            self._news.notify_all()
        return web.Response(status=202)

    async def list(self, request: web.Request) -> web.Response:
        found = {"turns": self.turns, "items": self.items, "traces": self.traces}[request.match_info["what"]]
        return web.json_response({"object": "list", "data": found[::-1], "has_more": False})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        at, answer = len(self.events), await event_stream(request)
        while True:
            async with self._news:
                while len(self.events) == at:
                    await self._news.wait()
            for one in self.events[at:]:
                await answer.write(f"data: {json.dumps(one)}\n\n".encode())
            at = len(self.events)


def trace_of(turn: Event) -> Event:
    """The trace of a turn, as a list of a session has it: a span of the agent, in it one of a call of its model."""
    used = {"gen_ai.operation.name": "chat", "gen_ai.response.id": "resp_1", "gen_ai.usage.input_tokens": "300"}
    at = {"startTimeUnixNano": "1790000001000000000", "endTimeUnixNano": "1790000009000000000"}
    spans: list[Event] = [
        {"traceId": "AB" * 16, "spanId": "01" * 8, "name": "agent", "kind": 1, "attributes": [], **at},
        {
            "traceId": "AB" * 16, "spanId": "02" * 8, "parentSpanId": "01" * 8, "name": "chat gpt-5.4-mini", "kind": 3,
            "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in used.items()], **at,
        },
    ]  # fmt: skip
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "openai-agents"}}]}
    return {
        "id": turn["id"], "object": "agent.session.trace", "created_at": turn["created_at"], "session_id": "as_1",
        "otlp": {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {}, "spans": spans}]}]},
    }  # fmt: skip


@asynccontextmanager
async def agent_session_host() -> AsyncGenerator[tuple[AgentSessionHost, str]]:
    """A host of OpenAI's on a free port, and its base URL."""
    made, app = AgentSessionHost(), web.Application()
    one = "/v1/agents/sessions/{session}"
    app.router.add_post("/v1/agents/sessions", made.session)
    app.router.add_post(f"{one}/events", made.send)
    app.router.add_get(f"{one}/events", made.stream)
    app.router.add_get(f"{one}/{{what}}", made.list)
    async with site(app) as url:
        yield made, f"{url}/v1"


@asynccontextmanager
async def session_host() -> AsyncGenerator[tuple[SessionHost, str]]:
    """A host on a free port, and its URL."""
    made, app = SessionHost(), web.Application()
    one = "/v1/sessions/{session}"
    app.router.add_post("/v1/sessions", made.session)
    app.router.add_get(one, made.session)
    app.router.add_post(f"{one}/events", made.send)
    app.router.add_get(f"{one}/events", made.list)
    app.router.add_get(f"{one}/events/stream", made.stream)
    app.router.add_get(f"{one}/threads/{{thread}}/events", made.list)
    async with site(app) as url:
        yield made, url
