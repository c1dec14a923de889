"""A provider of Google's interactions: it keeps them, streams them, and works on some in the background."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from aiohttp import web
from fakes.web_site import event_stream, site

Json = dict[str, Any]
USED: Json = {
    "total_input_tokens": 70, "total_output_tokens": 20, "total_thought_tokens": 10, "total_tokens": 100,
    "total_cached_tokens": 0, "input_tokens_by_modality": [{"modality": "text", "tokens": 70}],
}  # fmt: skip
SAID = "It is there, as far as I can see."
THOUGHT: Json = {"type": "thought", "summary": [{"type": "text", "text": "Where is it?"}], "signature": "c2ln"}
ANSWER: Json = {"type": "model_output", "content": [{"type": "text", "text": SAID}]}
CALL: Json = {"type": "function_call", "id": "call_1", "name": "look", "arguments": {"name": "é"}}


def events(made: Json) -> list[Json]:
    """An interaction as a stream."""
    told: list[Json] = [{"event_type": "interaction.created", "interaction": _head(made, "in_progress")}]
    for at, step in enumerate(made["steps"]):
        start: Json = step
        deltas = list[Json]()
        if step is THOUGHT:
            start = {"type": "thought"}
            deltas = [{"type": "thought_summary", "content": it} for it in THOUGHT["summary"]]
            deltas.append({"type": "thought_signature", "signature": THOUGHT["signature"]})
        elif step is ANSWER:
            start = {"type": "model_output"}
            deltas = [{"type": "text", "text": SAID[begin : begin + 7]} for begin in range(0, len(SAID), 7)]
        elif step is CALL:
            said = json.dumps(CALL["arguments"])
            start = CALL | {"arguments": {}}
            deltas = [
                {"type": "arguments_delta", "arguments": said[begin : begin + 4]} for begin in range(0, len(said), 4)
            ]
        told.append({"event_type": "step.start", "index": at, "step": start})
        told += [{"event_type": "step.delta", "index": at, "delta": delta} for delta in deltas]
        told.append({"event_type": "step.stop", "index": at})
    told.append({"event_type": "interaction.completed", "interaction": _head(made) | {"usage": USED}})
    return [event | {"event_id": f"{made['id']}-{number}"} for number, event in enumerate(told)]


def _head(made: Json, status: str = "") -> Json:
    told = {key: value for key, value in made.items() if key not in ("steps", "usage")}
    return told | {"status": status or made["status"]}


class InteractionsHost:
    """The server."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[Json] = []
        self.left = 0
        """How often an interaction in the background is still asked for in vain."""
        self.breaks_after = 0
        """Events after which streams of new interactions break off; 0: they do not."""
        self._made: dict[str, Json] = {}
        self._numbers = count(1)

    async def create(self, request: web.Request) -> web.StreamResponse:
        asked: Json = await request.json()
        self.asked.append(asked)
        if "x-goog-api-key" not in request.headers:
            error = {"code": 401, "message": "no key", "status": "UNAUTHENTICATED"}
            return web.json_response({"error": error}, status=401)
        earlier = asked.get("previous_interaction_id")
        if earlier is not None and earlier not in self._made:
            error = {"code": 404, "message": f"no interaction {earlier}", "status": "NOT_FOUND"}
            return web.json_response({"error": error}, status=404)
        calls = bool(asked.get("tools")) and earlier is None
        made: Json = {"id": f"v1_{next(self._numbers)}", "object": "interaction", "created": "2026-11-30T00:00:00Z"}
        made |= {"agent": asked["agent"]} if "agent" in asked else {"model": asked["model"]}
        made |= {"status": "requires_action" if calls else "completed", "service_tier": "standard", "usage": USED}
        made |= {"updated": "2026-11-30T00:00:01Z", "steps": [THOUGHT, CALL if calls else ANSWER]}
        self._made[made["id"]] = made
        if asked.get("stream"):
            return await self._stream(request, events(made), self.breaks_after)
        return web.json_response(_head(made, "in_progress") if asked.get("background") else made)

    async def get(self, request: web.Request) -> web.StreamResponse:
        made = self._made[request.match_info["name"]]
        self.left -= 1
        if request.query.get("stream") == "true":
            told = events(made)
            after = request.query.get("last_event_id")
            begun = next((at for at, event in enumerate(told, 1) if event["event_id"] == after), 0)
            return await self._stream(request, told[begun:], 0)
        return web.json_response(_head(made, "in_progress") if self.left >= 0 else made)

    async def cancel(self, request: web.Request) -> web.Response:
        return web.json_response(_head(self._made[request.match_info["name"]], "cancelled") | {"usage": USED})

    async def _stream(self, request: web.Request, told: list[Json], breaks_after: int) -> web.StreamResponse:
        answer = await event_stream(request)
        for event in told[: breaks_after or None]:
            await answer.write(f"event: {event['event_type']}\ndata: {json.dumps(event)}\n\n".encode())
        if not breaks_after:
            await answer.write(b"event: done\ndata: [DONE]\n\n")
        elif request.transport is not None:
            request.transport.close()
        return answer


@asynccontextmanager
async def interactions_host() -> AsyncGenerator[InteractionsHost]:
    """A host on a free port."""
    made, app = InteractionsHost(), web.Application()
    for place in ("/{version:v1[a-z0-9]*}/interactions", "/v1beta1/projects/{p}/locations/{l}/interactions"):
        app.router.add_post(place, made.create)
        app.router.add_get(place + "/{name}", made.get)
        app.router.add_post(place + "/{name}/cancel", made.cancel)
    async with site(app) as url:
        made.url = url
        yield made
