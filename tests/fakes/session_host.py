"""A provider of hosted agents, as Anthropic's sessions are: input starts turns, whose events are kept, listed in pages,
and streamed."""

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
        asked = [("agent.thinking", {}), ("agent.custom_tool_use", {"name": "weather", "input": {"city": "Bern"}})]
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
        agent = {"type": "agent", "id": "agent_1", "name": "main", "version": 1, "model": {"id": MODEL}, "tools": []}
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
        while True:
            async with self._news:
                while len(found) == at:
                    await self._news.wait()
            for one in found[at:]:
                await answer.write(f"event: message\ndata: {json.dumps(one)}\n\n".encode())
            at = len(found)


def _text(said: str) -> Event:
    return {"type": "text", "text": said}


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
