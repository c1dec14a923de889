"""A provider that fails in sixteen ways, and what a caller should get of a gateway before it. A real server.

The ways are those of the public Failover Bench (scenarios S01 to S16 of its catalogue, methodology 0.1), written anew
from their description; times are shorter. The model's name says which: `s01` to `s16`, of the upstream at `/primary`.
The one at `/spare` answers what is asked of the model `spare`. Every answer is the same, so that it is seen whether a
caller has all of it. `Faulty.log` has what was asked, and when.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
from aiohttp import web
from fakes.web_site import site

from penstock.gateway.demo.model import sse

ANSWER = " ".join(f"word{number}" for number in range(60))
SPARE = "spare"
DOWN_S = 1.5
"""How long S15 is down, from the first call on."""
STALLS_S = 60.0
"""How long it is silent where it says nothing any more: longer than any test waits."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What came."""

    model: str
    at: float
    """Monotonic seconds."""
    number: int
    """Of those for this model, from 1."""


@dataclass(frozen=True, slots=True)
class Got:
    """What a caller has of a call."""

    outcome: str
    """`success`, `error`."""
    content: str
    seconds: float
    model: str | None = None
    """Which one the answer says it is of."""
    usage: bool = False
    why: str = ""

    @property
    def complete(self) -> bool:
        return self.outcome == "success" and self.content == ANSWER


@dataclass(slots=True)
class Faulty:
    """The provider."""

    url: str = ""
    log: list[Asked] = field(default_factory=list[Asked])

    def of(self, model: str) -> list[Asked]:
        """What was asked of a model."""
        return [asked for asked in self.log if asked.model == model]

    def first(self, model: str) -> float:
        """When a model was asked first."""
        return self.of(model)[0].at

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """One call."""
        body = await request.json()
        model, number = body["model"], len(self.of(body["model"])) + 1
        self.log.append(Asked(model, monotonic(), number))
        return await FAULTS.get(model, _whole)(self, request, number, body)


Fault = Callable[[Faulty, web.Request, int, dict[str, Any]], Awaitable[web.StreamResponse]]


def _refusal(status: int, message: str = "not now", code: str = "x", **headers: str) -> web.Response:
    error = {"error": {"message": message, "code": code, "type": "fake"}}
    return web.json_response(error, status=status, headers={name.replace("_", "-"): v for name, v in headers.items()})


def _events(model: str) -> Iterator[bytes]:
    def chunk(delta: dict[str, str], finish: str | None = None, **more: Any) -> bytes:
        choices = [] if more else [{"index": 0, "delta": delta, "finish_reason": finish}]
        made = {"id": "c", "object": "chat.completion.chunk", "model": model, "choices": choices} | more
        return sse(made)

    yield chunk({"role": "assistant", "content": ""})
    for word in re.findall(r"\S+\s*", ANSWER):
        yield chunk({"content": word})
    yield chunk({}, "stop")
    yield chunk({}, usage={"prompt_tokens": 9, "completion_tokens": 60, "total_tokens": 69})
    yield b"data: [DONE]\n\n"


async def _begin(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    answer.enable_chunked_encoding()
    await answer.prepare(request)
    return answer


async def _whole(
    _: Faulty, request: web.Request, number: int, body: dict[str, Any], first_s: float = 0.0, without: bytes = b"-"
) -> web.StreamResponse:
    answer = await _begin(request)
    await asyncio.sleep(first_s)
    for at, event in enumerate(_events(body["model"])):
        if without not in event:
            await answer.write(event)
        if at == 10 and body["model"] == "s10":
            await answer.write(b"data: {broken\n\n")
    await answer.write_eof()
    return answer


def _cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


async def _part(request: web.Request, body: dict[str, Any], events: int) -> web.StreamResponse:
    answer = await _begin(request)
    for _, event in zip(range(events), _events(body["model"]), strict=False):
        await answer.write(event)
    return answer


async def s01(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """429 with Retry-After, once."""
    return _refusal(429, Retry_After="1") if number == 1 else await _whole(self, request, number, body)


async def s02(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """429 without it, always."""
    return _refusal(429)


async def s03(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """500 once."""
    return _refusal(500) if number == 1 else await _whole(self, request, number, body)


async def s04(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """503 always."""
    return _refusal(503)


async def s05(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """The connection is reset before a byte, once."""
    if number > 1:
        return await _whole(self, request, number, body)
    _cut(request)
    return web.Response()


async def s06(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """It takes the request and says nothing."""
    await asyncio.sleep(STALLS_S)
    return web.Response()


async def s07(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """The head comes at once, the first token late."""
    return await _whole(self, request, number, body, first_s=STALLS_S)


async def s08(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """The stream is cut after 40 of 60 tokens."""
    answer = await _part(request, body, 41)
    _cut(request)
    return answer


async def s09(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """The stream stalls after 20 tokens."""
    answer = await _part(request, body, 21)
    await asyncio.sleep(STALLS_S)
    return answer


async def s11(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """All of the stream, without `[DONE]`."""
    return await _whole(self, request, number, body, without=b"[DONE]")


async def s12(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """The prompt is too long for its context."""
    return _refusal(400, "This model's maximum context length is 10 tokens.", "context_length_exceeded")


async def s13(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """Its content filter refuses."""
    return _refusal(400, "The content policy does not allow that.", "content_policy_violation")


async def s15(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    """503 for a while, then healthy."""
    return _refusal(503) if monotonic() - self.first("s15") < DOWN_S else await _whole(self, request, number, body)


FAULTS: dict[str, Fault] = {
    "s01": s01, "s02": s02, "s03": s03, "s04": s04, "s05": s05, "s06": s06, "s07": s07, "s08": s08, "s09": s09,
    "s11": s11, "s12": s12, "s13": s13, "s14": s08, "s15": s15, "s16": s04,
}  # fmt: skip
"""S10 (an event that is no JSON) is in the answer itself. Of S14 (a spare that takes no prefill) nothing is left where
nobody goes on with the text of another."""


@asynccontextmanager
async def faulty() -> AsyncGenerator[Faulty]:
    """The provider, while it runs."""
    made = Faulty()
    app = web.Application()
    _ = app.router.add_post("/{which:primary|spare}/v1/chat/completions", made.answer)
    async with site(app) as made.url:
        yield made


async def ask(http: aiohttp.ClientSession, url: str, model: str) -> Got:
    """One call, as a careful client reads it: an error in the stream is one, and so is a stream that breaks off."""
    began, words, of, usage = monotonic(), list[str](), None, False
    body = {"model": model, "messages": [{"role": "user", "content": "sixty words"}], "stream": True}

    def got(outcome: str, why: str = "") -> Got:
        return Got(outcome, "".join(words), monotonic() - began, of, usage, why)

    try:
        async with http.post(url, json=body) as answer:
            if answer.status != 200:
                return got("error", f"HTTP {answer.status}: {await answer.text()}")
            async for line in answer.content:
                data = line.removeprefix(b"data:").strip()
                if data == line.strip() or data == b"[DONE]":
                    continue
                try:
                    event = json.loads(data)
                except ValueError:
                    continue
                if event.get("error"):
                    return got("error", str(event["error"]))
                of, usage = event["model"], usage or bool(event.get("usage"))
                words += [choice["delta"].get("content", "") for choice in event["choices"]]
    except aiohttp.ClientError as error:
        return got("error", repr(error))
    return got("success")
