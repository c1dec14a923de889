"""Azure, Foundry, Vertex and Gemini's OpenAI endpoint: a server with their paths, keys and the fields that they add."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple
from urllib.parse import unquote

from aiohttp import web
from fakes.formats import completion, completion_events, count_tokens, embeddings, response, response_events
from fakes.web_site import event_stream, everywhere, site

from examples.demo.model import (
    DemoAnswer,
    Json,
    chat,
    chat_events,
    chat_head,
    decide,
    message,
    message_events,
    sse,
    text_of,
)

KEY: Final = "cloud-key-0123456789"
TOKEN: Final = "ya29.c.0123456789"
_P: Final = "/v1/projects/p/locations/global"
_AZURE, _GOOGLE = "azure", "google"
ROUTES: Final = (
    (
        _AZURE,
        r"/openai/deployments/(?P<model>[^/]+)/(?P<op>chat/completions|completions|embeddings)\?api-version=[^&]+",
    ),
    (_AZURE, r"/openai/(?P<op>responses)\?api-version=[^&]+"),
    (_AZURE, r"/openai/v1/(?P<op>chat/completions|embeddings|responses)"),
    (_AZURE, r"/models/(?P<op>chat/completions)\?api-version=[^&]+"),
    (_AZURE, r"/anthropic/v1/(?P<op>messages(?:/count_tokens)?)(?:\?beta=true)?"),
    (_GOOGLE, rf"{_P}/publishers/anthropic/models/(?P<op>count-tokens):rawPredict"),
    (_GOOGLE, rf"{_P}/publishers/anthropic/models/(?P<model>[^/:]+):(?P<op>raw|streamRaw)Predict"),
    (_GOOGLE, rf"{_P}/endpoints/(?:openapi|\d+)/(?P<op>chat/completions)"),
    (_GOOGLE, rf"{_P}/publishers/openai/v1/(?P<op>responses)"),
    (_GOOGLE, rf"{_P}/workspaces/w/invoke/v1/(?P<op>messages)"),
    (_GOOGLE, r"/v1beta/openai/(?P<op>chat/completions|embeddings)"),
)
FILTER: Final[Json] = {"hate": {"filtered": False, "severity": "safe"}, "jailbreak": {"filtered": False}}
FORBIDDEN: Final = "forbidden"
"""Azure's filter refuses a prompt with this word."""
REFUSED: Final[Json] = {
    "message": "The response was filtered due to the prompt triggering Azure OpenAI's content management policy.",
    "type": None, "param": "prompt", "code": "content_filter", "status": 400,
    "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": FILTER},
}  # fmt: skip


class CloudRequest(NamedTuple):
    """A request as it came."""

    path: str
    """With the query."""
    headers: dict[str, str]
    body: bytes


class CloudHost:
    """The server."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[CloudRequest] = []
        self.answer: DemoAnswer | None = None
        """What it says; what an agreeable model would where that is None."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(CloudRequest(request.raw_path, headers, await request.read()))
        cloud, found = next(((of, it) for of, at in ROUTES if (it := re.fullmatch(at, request.raw_path))), ("", None))
        keys = {headers.get(name, "").removeprefix("Bearer ") for name in ("api-key", "x-api-key", "authorization")}
        if found is None or (KEY if cloud == _AZURE else TOKEN) not in keys:
            error = {"code": "404" if found is None else "401", "message": "Resource not found or wrong key"}
            return web.json_response({"error": error}, status=int(error["code"]))
        op, asked = found["op"], json.loads(self.seen[-1].body)
        named = found.groupdict().get("model")
        assert not op.endswith("aw") or ("model" not in asked and asked["anthropic_version"]), "it takes no model"
        asked["model"] = f"{unquote(named or asked['model'])}-served"
        if FORBIDDEN in text_of(asked.get("messages", [{}])[-1].get("content")):
            return web.json_response({"error": REFUSED}, status=400)
        told = self.answer or decide(asked)
        if not asked.get("stream"):
            return web.json_response(_plain(op, cloud, asked, told))
        made = await event_stream(request)
        for event in _events(op, cloud, asked, told):
            await made.write(event)
        return made


def _plain(op: str, cloud: str, asked: Json, told: DemoAnswer) -> Json:
    match op:
        case "chat/completions":
            made = chat(asked, told)
        case "completions":
            made = completion(asked, told)
        case "embeddings":
            return embeddings(asked, told)
        case "responses":
            filters = [{"blocked": False, "source_type": "completion", "content_filter_results": FILTER}]
            return response(asked, told) | ({"content_filters": filters} if cloud == _AZURE else {})
        case "messages/count_tokens" | "count-tokens":
            return count_tokens(asked, told)
        case _:
            return message(asked, told)
    if cloud == _AZURE:
        made["prompt_filter_results"] = [{"prompt_index": 0, "content_filter_results": FILTER}]
        for choice in made["choices"]:
            choice["content_filter_results"] = FILTER
    return made


def _events(op: str, cloud: str, asked: Json, told: DemoAnswer) -> Iterable[bytes]:
    if op not in ("chat/completions", "completions"):
        return (response_events if op == "responses" else message_events)(asked, told)
    made = list((chat_events if op == "chat/completions" else completion_events)(asked, told))
    if cloud == _AZURE and op == "chat/completions":
        # The filter's verdicts come first, without a choice, and later beside a choice without a delta.
        head = chat_head(asked, "chat.completion.chunk") | {"id": ""}
        first = {"choices": [], "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": FILTER}]}
        late = {
            "index": 0,
            "finish_reason": None,
            "content_filter_results": FILTER,
            "content_filter_offsets": {"check_offset": 9},
        }
        made = [sse(head | first), *made[:-1], sse(head | {"choices": [late]}), made[-1]]
    return made


@asynccontextmanager
async def cloud_host() -> AsyncGenerator[CloudHost]:
    """A server on a free port."""
    made = CloudHost()
    async with site(everywhere(made.handle)) as made.url:
        yield made
