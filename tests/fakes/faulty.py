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
from functools import partial
from time import monotonic
from typing import Any

import aiohttp
from aiohttp import web
from fakes.web_site import event_stream, site

from examples.demo.model import sse

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


async def _whole(
    _: Faulty, request: web.Request, number: int, body: dict[str, Any], first_s: float = 0.0, without: bytes = b"-"
) -> web.StreamResponse:
    answer = await event_stream(request)
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


def refuses(status: int, message: str = "not now", code: str = "x", times: int | None = None, **headers: str) -> Fault:
    """Refuses so often, or always."""

    async def fault(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
        if times is not None and number > times:
            return await _whole(self, request, number, body)
        error = {"error": {"message": message, "code": code, "type": "fake"}}
        return web.json_response(error, status=status, headers=headers)

    return fault


def begins(tokens: int, stalls: bool = False) -> Fault:
    """Says so much of its answer, and then nothing, or nothing more for long."""

    async def fault(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
        answer = await event_stream(request)
        for _, event in zip(range(tokens + 1), _events(body["model"]), strict=False):
            await answer.write(event)
        if stalls:
            await asyncio.sleep(STALLS_S)
        else:
            _cut(request)
        return answer

    return fault


async def resets_once(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    if number > 1:
        return await _whole(self, request, number, body)
    _cut(request)
    return web.Response()


async def is_silent(*_: object) -> web.StreamResponse:
    await asyncio.sleep(STALLS_S)
    return web.Response()


async def is_down(self: Faulty, request: web.Request, number: int, body: dict[str, Any]) -> web.StreamResponse:
    down = monotonic() - self.first(body["model"]) < DOWN_S
    return await (refuses(503) if down else _whole)(self, request, number, body)


FAULTS: dict[str, Fault] = {
    "s01": refuses(429, times=1, **{"Retry-After": "1"}),
    "s02": refuses(429),  # without saying when to come back
    "s03": refuses(500, times=1),
    "s04": refuses(503),
    "s05": resets_once,  # before a byte
    "s06": is_silent,  # takes the request and says nothing
    "s07": partial(_whole, first_s=STALLS_S),  # the head comes at once, the first token late
    "s08": begins(40),  # of 60 tokens; then the stream is cut
    "s09": begins(20, stalls=True),
    "s11": partial(_whole, without=b"[DONE]"),
    "s12": refuses(400, "This model's maximum context length is 10 tokens.", "context_length_exceeded"),
    "s13": refuses(400, "The content policy does not allow that.", "content_policy_violation"),
    "s14": begins(40),
    "s15": is_down,  # 503 for a while, then healthy
    "s16": refuses(503),
}
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
