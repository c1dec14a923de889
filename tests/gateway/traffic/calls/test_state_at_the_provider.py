"""Conversations of which the provider keeps a part: by which names calls find their rollout, with the official SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import openai
from aiohttp import web
from fakes.budgets import budget, spans_of, toml, uses
from fakes.local import locally
from fakes.process import Gateway, upstream
from fakes.web_site import event_stream, site

USED: dict[str, Any] = {
    "input_tokens": 30, "output_tokens": 10, "total_tokens": 40,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip
COMPACTION = {"type": "compaction", "id": "cmp_1", "encrypted_content": "c2VjcmV0"}
ANSWERS: dict[str, dict[str, Any]] = {
    "conversations": {"id": "conv_1", "object": "conversation", "created_at": 0, "metadata": {}},
    "compact": {"object": "response.compaction", "created_at": 0, "output": [COMPACTION], "usage": USED},
    "input_tokens": {"object": "response.input_tokens", "input_tokens": 30},
    "decisions": {"model": "m-1", "answers": [{"type": "predicate", "name": "p", "probability": 0.9}], "usage": USED},
    "moderations": {"id": "modr_1", "model": "m-2", "results": [{"flagged": False, "categories": {}}]},
    "items": {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False},
}


def said(text: str) -> dict[str, Any]:
    content: Any = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": content}


def asked(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def world(home: Path, config: str = "") -> AsyncGenerator[Gateway]:
    """A gateway before a provider of responses and interactions."""
    numbers = count(1)

    async def answer(request: web.Request) -> web.StreamResponse:
        given: dict[str, Any] = await request.json()
        number, last = next(numbers), request.path.rpartition("/")[2]
        if last == "interactions":
            made = {"id": f"v1_{number}", "status": "completed", "model": "gemini-4"}
            step = {"type": "model_output", "content": [{"type": "text", "text": "yes"}]}
            if not given.get("stream"):
                return web.json_response(made | {"steps": [step]})
            stream = await event_stream(request)
            for event in (
                {"event_type": "interaction.created", "interaction": made | {"status": "in_progress"}},
                {"event_type": "step.start", "index": 0, "step": step},
                {"event_type": "interaction.completed", "interaction": made},
            ):
                await stream.write(b"data: %b\n\n" % json.dumps(event).encode())
            return stream
        found = ANSWERS.get(last, {"object": "response", "status": "completed", "output": [said("yes")], "usage": USED})
        kept = {"conversation": {"id": given["conversation"]}} if "conversation" in given else {}
        return web.json_response({"id": f"resp_{number}"} | found | kept)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with site(app) as url:
        made = upstream("o", f"{url}/v1", "openai") + upstream("g", url, "gemini")
        async with locally(home, made + config) as gateway:
            yield gateway


@asynccontextmanager
async def client(gateway: Gateway) -> AsyncGenerator[openai.AsyncOpenAI]:
    """A client on a connection of its own, which no other call has joined."""
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as made:
        yield made


async def rollouts(http: aiohttp.ClientSession, gateway: Gateway, count: int) -> list[list[str]]:
    """The dialects of the calls of each rollout."""
    found: dict[str, list[str]] = {}
    for span in sorted(await spans_of(http, gateway, "", count), key=lambda one: one["start_ns"]):
        found.setdefault(span["rollout"], []).append(span["dialect"])
    return [*found.values()]


async def test_calls_of_one_conversation_are_one_rollout(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path) as gateway:
        async with client(gateway) as one:
            made = await one.conversations.create()
        for _ in range(2):
            async with client(gateway) as one:
                await one.responses.create(model="m", input="hello", conversation=made.id)
        async with client(gateway) as one:
            await one.responses.create(model="m", input="hello", conversation={"id": "conv_other"})
        assert await rollouts(http, gateway, 4) == [["conversations", "responses", "responses"], ["responses"]]


async def test_a_compacted_conversation_goes_on(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Its earlier items are gone; also one whose compaction is not known is followed by its items."""
    async with world(tmp_path) as gateway:
        first = asked("hello")
        async with client(gateway) as one:
            await one.responses.create(model="m", input=first)
        first.append(said("yes"))
        async with client(gateway) as one:
            compacted = await one.responses.compact(model="m", input=[*first, *asked("go on")])
        for ask in ("now", "and now"):
            async with client(gateway) as one:
                kept: Any = [{key: value for key, value in COMPACTION.items() if key != "id"}]
                await one.responses.create(model="m", input=[*kept, *asked(ask)])
        assert compacted.usage.total_tokens == 40
        elsewhere: Any = [{"type": "compaction", "encrypted_content": "b3RoZXI"}, *asked("x")]
        mores: list[list[Any]] = [[], [said("yes"), *asked("y")]]
        for more in mores:
            async with client(gateway) as one:
                await one.responses.create(model="m", input=[*elsewhere, *more])
        joined = ["responses", "responses_compaction", "responses", "responses"]
        assert await rollouts(http, gateway, 6) == [joined, ["responses", "responses"]]


async def test_an_interaction_goes_on(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """By the name of the earlier one, or where the client sends all steps."""
    hey: Any = {"type": "user_input", "content": [{"type": "text", "text": "hey"}]}
    answer: Any = {"type": "model_output", "content": [{"type": "text", "text": "yes"}]}
    async with world(tmp_path) as gateway:
        for request in (
            {"input": "hi", "stream": True},
            {"input": "hi", "previous_interaction_id": "v1_1"},
            {"input": "hi", "previous_interaction_id": "v1_2", "stream": True},
            {"input": "hi", "previous_interaction_id": "v1_unknown"},
            {"input": "hey", "store": False},
            {"input": [hey, {"type": "thought", "signature": "s"}, answer, hey]},
        ):
            async with aiohttp.ClientSession() as own:
                came = await own.post(f"{gateway.url}/v1beta/interactions", json={"model": "gemini-4"} | request)
                assert came.status == 200
                await came.read()
        assert [len(calls) for calls in await rollouts(http, gateway, 6)] == [3, 1, 2]


async def test_calls_beside_responses_are_counted_for_what_they_use(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    caps = toml(budget(name="cap", unit="tokens", limit=10**6), budget(name="n", limit=100))
    async with world(tmp_path, caps) as gateway, client(gateway) as one:
        await one.responses.compact(model="m", input="x")
        question: Any = {"type": "predicate", "name": "p", "instructions": "Is it?"}
        await one.decisions.create(model="m", input="x", questions=[question])
        await one.moderations.create(input=["x", "y"])
        await one.responses.input_tokens.count(model="m", input="x")
        made = await one.conversations.create(items=[{"role": "user", "content": "x"}])
        await one.conversations.items.create(made.id, items=[{"role": "user", "content": "x"}])
        spans = sorted(await spans_of(http, gateway, "", 6), key=lambda span: span["start_ns"])
        assert [(span["dialect"], span["usage"] and span["usage"]["output_tokens"]) for span in spans] == [
            ("responses_compaction", 10), ("decisions", 10), ("moderations", None), ("responses_count_tokens", None),
            ("conversations", None), ("conversations", None),
        ]  # fmt: skip
        assert [row[:3] for row in await uses(http, gateway.url)] == [("cap", "", 80), ("n", "", 2)]
