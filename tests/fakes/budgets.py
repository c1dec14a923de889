"""Gateways with budgets: their configuration, calls of theirs, and what they say is used."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from fakes.local import locally
from fakes.process import Gateway, upstreams
from fakes.provider import Provider, serving
from fakes.raw import reply
from fakes.waiting import until

CHAT = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hello"}]}
ASKED = json.dumps(CHAT).encode()
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
GOOD = reply(200, json.dumps({"model": "gpt-4o", "choices": [{}], "usage": USAGE}).encode())


def budget(**said: Any) -> dict[str, Any]:
    """A budget of three calls, unless something else is said."""
    return {"name": "b", "unit": "calls", "limit": 3, "window": "total"} | said


def toml(*budgets: dict[str, Any]) -> str:
    """Budgets in penstock.toml."""
    return "".join("[[budget]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in one.items()) for one in budgets)


class Said(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def message(self) -> str:
        return json.loads(self.body)["error"]["message"]


async def call(http: aiohttp.ClientSession, gateway: Gateway, rollout: str = "r", key: str = "", **said: Any) -> Said:
    """A chat completion."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with http.post(gateway.openai(rollout) + "/chat/completions", json=CHAT | said, headers=headers) as answer:
        return Said(answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read())


async def uses(http: aiohttp.ClientSession, url: str) -> list[tuple[str, str, float, float]]:
    """(budget, whose, used, reserved), as the control API says it when no call runs any more."""
    found: list[dict[str, Any]] = []

    async def settled() -> bool:
        nonlocal found
        async with http.get(url + "/api/budgets") as answer:
            found = (await answer.json())["budgets"]
        return not any(one["running"] for one in found)

    await until(settled)
    return sorted((one["budget"], one["of"], one["used"], one["reserved"]) for one in found)


async def spans_of(http: aiohttp.ClientSession, gateway: Gateway, filter: str, count: int) -> list[dict[str, Any]]:
    """The spans that a filter finds, as soon as there are so many; more fail the test."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        nonlocal found
        async with http.get(gateway.url + "/api/spans", params={"filter": filter, "limit": 1000}) as page:
            found = (await page.json())["spans"]
        return len(found) >= count

    await until(there)
    assert len(found) == count
    return found


class World(NamedTuple):
    """A gateway and what is behind it."""

    gateway: Gateway
    provider: Provider


@asynccontextmanager
async def world(home: Path, *budgets: dict[str, Any], more: str = "") -> AsyncGenerator[World]:
    """A gateway with these budgets."""
    async with (
        serving() as provider,
        locally(home, more + upstreams(provider.openai_url, provider.url) + toml(*budgets)) as gateway,
    ):
        yield World(gateway, provider)
