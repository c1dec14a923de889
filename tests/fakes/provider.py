"""A scripted model provider: a real server that speaks the wire formats of OpenAI and Anthropic.

What it says next is decided by its script: a list of answers, taken in turn, or a function of the request; by default
it behaves like an agreeable model (`demo.model.decide`). It keeps every request as it came and every response
as it went, so that a test can compare both ends of the wire:

    provider.script = [Failure(429, headers={"Retry-After": "7"}), Answer("hello")]
    ...
    assert provider.log[-1].body == tape.request

Alone: `python -m fakes.provider --port 0` prints its address and serves until it is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from fakes.formats import (
    Failure,
    anthropic_models,
    completion,
    completion_events,
    count_tokens,
    embeddings,
    error_body,
    openai_models,
    response,
    response_events,
)
from fakes.packing import PACKERS, flushed
from fakes.web_site import everywhere, site

from examples.demo.model import DemoAnswer, Json, chat, chat_events, decide, message, message_events
from penstock.gateway.reading.turns import decode_body

Outcome = DemoAnswer | Failure
Script = Callable[[Json], Outcome] | list[Outcome]
Plain = Callable[[Json, DemoAnswer], Json]
Events = Callable[[Json, DemoAnswer], Iterator[bytes]]

FORMATS: dict[str, tuple[Plain, Events | None]] = {
    "/v1/chat/completions": (chat, chat_events),
    "/v1/completions": (completion, completion_events),
    "/v1/responses": (response, response_events),
    "/backend-api/codex/responses": (response, response_events),
    "/v1/embeddings": (embeddings, None),
    "/v1/messages": (message, message_events),
    "/v1/messages/count_tokens": (count_tokens, None),
}
EXTRA_HEADERS = [("x-request-id", "req_fake"), ("request-id", "req_fake"), ("X-Vendor", "one"), ("X-Vendor", "two")]


@dataclass(slots=True)
class Seen:
    """One call: the request as it came, content encoding kept, and the response as it went."""

    method: str
    path: str
    """With the query, as it stood on the request line."""
    headers: list[tuple[str, str]]
    body: bytes
    status: int = 0
    response_headers: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    response: bytes = b""

    def header(self, name: str) -> str | None:
        """A request header."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def streamed(self) -> bool:
        """True when the response was a stream of events."""
        return any(value.startswith("text/event-stream") for _, value in self.response_headers)

    @property
    def model(self) -> str | None:
        """The model that was asked for."""
        return json.loads(self.plain)["model"] if self.body else None

    @property
    def plain(self) -> bytes:
        """The request without its content encoding."""
        body, problem = decode_body(self.body, self.header("content-encoding"))
        assert problem is None
        return body

    @property
    def family(self) -> str:
        """Which API is being spoken."""
        speaks_anthropic = self.path.startswith("/v1/messages") or self.header("anthropic-version")
        return "anthropic" if speaks_anthropic else "openai"


class Provider:
    """The server, its script and its log."""

    def __init__(self) -> None:
        self.url = ""
        self.script: Script = decide
        self.key: str | None = None
        """When set, calls without this key are refused with 401."""
        self.formats: Mapping[str, tuple[Plain, Events | None]] = FORMATS
        """What it answers, by path."""
        self.encoding = ""
        """Content encoding of what it answers, of `fakes.packing`; streams are flushed event by event."""
        self.headers: Mapping[str, str] = {}
        """What its answers have besides."""
        self.log: list[Seen] = []

    @property
    def openai_url(self) -> str:
        """What an OpenAI client takes for its base URL."""
        return self.url + "/v1"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one call."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        seen = Seen(request.method, request.raw_path, headers, await request.read())
        self.log.append(seen)
        if not self._admits(seen):
            return await self._fail(request, seen, Failure(401, "Incorrect API key provided.", "invalid_api_key"))
        if request.method in ("GET", "HEAD"):
            return await self._look_up(request, seen)
        return await self._generate(request, seen)

    def _admits(self, seen: Seen) -> bool:
        keys = (seen.header("x-api-key"), (seen.header("authorization") or "").removeprefix("Bearer "))
        return self.key is None or self.key in keys

    async def _look_up(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if request.path == "/" and request.method == "HEAD":
            return await self._send(request, seen, web.Response())
        if request.path == "/v1/models":
            listed = anthropic_models() if seen.family == "anthropic" else openai_models()
            return await self._send_json(request, seen, listed)
        return await self._fail(request, seen, Failure(404, f"Unknown path {request.path}."))

    async def _generate(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if request.path not in self.formats:
            return await self._fail(request, seen, Failure(404, f"Unknown path {request.path}."))
        try:
            asked: Json = json.loads(seen.plain)
            asked["model"]
        except (ValueError, KeyError, TypeError) as error:
            return await self._fail(request, seen, Failure(400, f"Unreadable request: {error!r}."))
        outcome = self._next(asked)
        if isinstance(outcome, Failure):
            return await self._fail(request, seen, outcome)
        plain, events = self.formats[request.path]
        if asked.get("stream") and events:
            return await self._stream(request, seen, events(asked, outcome))
        return await self._send_json(request, seen, plain(asked, outcome))

    def _next(self, asked: Json) -> Outcome:
        if callable(self.script):
            return self.script(asked)
        return self.script.pop(0) if self.script else Failure(500, "The fake's script is at its end.")

    async def _fail(self, request: web.Request, seen: Seen, failure: Failure) -> web.StreamResponse:
        body = error_body(seen.family, failure)
        made = web.Response(status=failure.status, body=body, content_type="application/json", headers=failure.headers)
        return await self._send(request, seen, made)

    async def _send_json(self, request: web.Request, seen: Seen, value: Json) -> web.StreamResponse:
        body = json.dumps(value).encode()
        made = web.Response(body=body, content_type="application/json")
        if self.encoding:
            made.body = PACKERS[self.encoding](body)
            made.headers["Content-Encoding"] = self.encoding
        return await self._send(request, seen, made)

    async def _send(self, request: web.Request, seen: Seen, made: web.Response) -> web.StreamResponse:
        seen.response = bytes(made.body or b"") if isinstance(made.body, bytes) else b""
        await self._prepare(request, seen, made)
        return made

    async def _stream(self, request: web.Request, seen: Seen, events: Iterable[bytes]) -> web.StreamResponse:
        made = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if self.encoding:
            made.headers["Content-Encoding"] = self.encoding
            events = flushed(self.encoding, events)
        await self._prepare(request, seen, made)
        for event in events:
            seen.response += event
            await made.write(event)
        return made

    async def _prepare(self, request: web.Request, seen: Seen, made: web.StreamResponse) -> None:
        for name, value in EXTRA_HEADERS:
            made.headers.add(name, value)
        made.headers.update(self.headers)
        await made.prepare(request)
        seen.status = made.status
        seen.response_headers = list(made.headers.items())


@asynccontextmanager
async def serving(port: int = 0) -> AsyncGenerator[Provider]:
    """A running provider."""
    provider = Provider()
    async with site(everywhere(provider.handle), port, unpacks=False) as provider.url:
        yield provider


async def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description="A scripted model provider.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    async with serving(parser.parse_args().port) as provider:
        print(provider.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
