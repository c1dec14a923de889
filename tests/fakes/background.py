"""A provider of responses in the background: each gets an id, and is ready when its script says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from aiohttp import web
from fakes.web_site import event_stream, site

from examples.demo.model import named_event

USAGE = {"input_tokens": 1000, "output_tokens": 7900, "total_tokens": 8900}
SAID = "the answer of the night"
ANSWER: dict[str, Any] = {
    "id": "msg", "type": "message", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": SAID, "annotations": []}],
}  # fmt: skip


class BackgroundHost:
    """The server. `left`: how often each response is still asked for in vain; `ends`: how it ends, as a part of it."""

    def __init__(self) -> None:
        self.url = ""
        self.posts: list[Any] = []
        self.left = 0
        self.ends: dict[str, Any] = {"status": "completed", "usage": USAGE}
        self._numbers = count(1)
        self._asked: dict[str, int] = {}

    def restart(self) -> None:
        """Gives ids from the first one on, as no provider does."""
        self._numbers = count(1)

    def _state(self, name: str, ended: bool) -> dict[str, Any]:
        state: dict[str, Any] = {
            "id": name, "object": "response", "created_at": 0, "model": "o3-2025", "background": True, "tools": [],
            "parallel_tool_calls": True, "tool_choice": "auto", "output": [], "usage": None, "status": "queued",
        }  # fmt: skip
        return state | ({"output": [ANSWER]} | self.ends if ended else {})

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Takes an order. As a stream, it breaks off when that has begun."""
        self.posts.append(asked := await request.json())
        name = f"resp_{next(self._numbers)}"
        self._asked[name] = self.left
        state = self._state(name, False)
        if not asked.get("stream"):
            return web.json_response(state)
        return await _stream(request, {"type": "response.created", "response": state, "sequence_number": 0})

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """How it stands."""
        name = request.match_info["name"]
        self._asked[name] -= 1
        state = self._state(name, self._asked[name] < 0 or request.method == "POST")
        if request.query.get("stream") != "true":
            return web.json_response(state)
        return await _stream(request, {"type": f"response.{state['status']}", "response": state, "sequence_number": 9})

    async def other(self, request: web.Request) -> web.Response:
        """Whatever else is asked for."""
        self.posts.append(request.path)
        return web.json_response({})


async def _stream(request: web.Request, *events: dict[str, Any]) -> web.StreamResponse:
    answer = await event_stream(request)
    for event in events:
        await answer.write(named_event(event))
    return answer


@asynccontextmanager
async def background_host(root: str = "/v1") -> AsyncGenerator[BackgroundHost]:
    """A host on a free port. `root`: what stands before the paths of the API."""
    made, app = BackgroundHost(), web.Application()
    app.router.add_post(f"{root}/responses", made.create)
    app.router.add_route("*", root + "/responses/{name}", made.retrieve)
    app.router.add_post(root + "/responses/{name}/cancel", made.retrieve)
    app.router.add_route("*", "/{rest:.*}", made.other)
    async with site(app) as url:
        made.url = url + root
        yield made
