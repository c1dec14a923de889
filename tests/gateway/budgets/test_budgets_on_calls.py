"""Budgets on the calls of a real gateway: how many pass, what is counted, and what a client is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from fakes.process import Gateway, running, upstreams
from fakes.provider import serving
from fakes.waiting import until

HELLO = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello"}]}


def budget(**said: Any) -> str:
    """Configuration text for a budget."""
    told = {"name": "b", "unit": "calls", "limit": 3, "window": "total"} | said
    return "[[budget]]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in told.items())


async def call(
    http: aiohttp.ClientSession, gateway: Gateway, body: Any = HELLO, rollout: str = "r", **headers: str
) -> tuple[int, Any, Any]:
    """(status, headers, body) of a chat completion."""
    url = gateway.openai(rollout) + "/chat/completions"
    async with http.post(url, json=body, headers=headers) as answer:
        said = await answer.read()
        return answer.status, answer.headers, said


async def uses(http: aiohttp.ClientSession, gateway: Gateway, key: str | None = None) -> list[dict[str, Any]]:
    """What the control API says of budgets once no call runs any more."""
    found: list[dict[str, Any]] = []
    headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def settled() -> bool:
        nonlocal found
        async with http.get(gateway.url + "/api/budgets", headers=headers) as answer:
            found = (await answer.json())["budgets"]
        return not any(one["running"] for one in found)

    await until(settled)
    return found


async def test_no_more_calls_pass_than_there_may(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving() as provider:
        async with running(tmp_path, upstreams(openai=provider.openai_url) + budget()) as gateway:
            answers = await asyncio.gather(*(call(http, gateway) for _ in range(12)))
            assert sorted(status for status, _, _ in answers) == [200] * 3 + [429] * 9
            assert len(provider.log) == 3
            (use,) = await uses(http, gateway)
            assert (use["used"], use["reserved"], use["frees_ns"]) == (3, 0, None)
            status, headers, said = await call(http, gateway)
            print(status, headers, said)
            assert 0
