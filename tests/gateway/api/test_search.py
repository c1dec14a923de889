"""Searches of a gateway, with an index and without one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest
from fakes.local import Local, locally
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.shell import Shell
from fakes.waiting import until

from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.client.client import Client
from penstock.gateway.model.state import SearchPage, SearchRow


async def talk(gateway: Local, http: aiohttp.ClientSession, rollout: str, question: str) -> None:
    """A conversation of two calls: a question, a tool call, its result, an answer. The second call is streamed."""
    said = [{"role": "system", "content": "You sell seats."}, {"role": "user", "content": question}]
    url = gateway.openai(rollout) + "/chat/completions"
    async with http.post(url, json={"model": "m", "messages": said}) as answer:
        said.append((await answer.json())["choices"][0]["message"])
    said.append({"role": "tool", "tool_call_id": "c1", "content": f"Seat 21C to {rollout.upper()} is free"})
    async with http.post(url, json={"model": "m", "messages": said, "stream": True}) as answer:
        await answer.read()


@pytest.fixture(params=["always", "never"])
async def talked(
    request: pytest.FixtureRequest, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncGenerator[Local]:
    calls = [
        DemoAnswer("", (DemoToolCall("c1", "find_seat", '{"where":"window"}'),)),
        DemoAnswer("Take it: 21C is yours."),
    ]
    provider.script = [*calls, *calls]
    config = upstreams(openai=provider.openai_url) + f'[index]\nwhen = "{request.param}"\n'
    async with locally(tmp_path, config) as gateway, Client(gateway.url) as client:
        for rollout in ("rome", "oslo"):
            await talk(gateway, http, rollout, f"A seat to {rollout.title()}, please")

        async def is_there() -> bool:
            ended = [span async for span in client.recent_spans("status:ok")]
            return len(ended) == 4 and (request.param == "never" or (await client.index()).status == "ready")

        await until(is_there)
        yield gateway


def shown(found: list[SearchRow]) -> list[str]:
    return [
        f"{one.span.rollout}#{one.span.sequence} {hit.role} {hit.part}: [{hit.match}]"
        for one in found
        for hit in one.hits
    ]


CASES: list[tuple[str, str, list[str]]] = [
    ("you sell", "", ["oslo#1 system text: [You sell]", "rome#1 system text: [You sell]"]),
    ("seat to rome", "", ["rome#1 user text: [seat to Rome]"]),
    ("21c", "rollout:oslo", ["oslo#2 tool tool_call_response: [21C]", "oslo#2 assistant text: [21C]"]),
    ("21c", "role:tool", ["oslo#2 tool tool_call_response: [21C]", "rome#2 tool tool_call_response: [21C]"]),
    ("find_seat", "part:tool_call rollout:rome", ["rome#1 assistant tool_call: [find_seat]"]),
    ("window", "-role:assistant", []),
    ("21c is yours", "stream:true rollout:r*", ["rome#2 assistant text: [21C is yours]"]),
    ("nobody said this", "", []),
]


@pytest.mark.slow
async def test_it_finds_what_was_said_where_it_was_said_first(talked: Local, tmp_path: Path) -> None:
    async with Client(talked.url) as client:
        for text, filter, wanted in CASES:
            assert shown([one async for one in client.search(text, filter)]) == wanted, (text, filter)
        await pages_and_words(client)
        await raw_bytes_and_tools_are_found_by_filters(client)
    await a_person_searches(Shell(talked.url, tmp_path))


async def pages_and_words(client: Client) -> None:
    assert len([one async for one in client.search("21c", limit=1)]) == 1
    assert [one async for one in client.search("ea", words=True)] == []
    assert len([one async for one in client.search("seat", words=True)]) == 4
    params = {"text": "seat", "limit": 3}
    page = await client.get("/api/search", SearchPage, params)
    rest = await client.get("/api/search", SearchPage, params | {"cursor": page.next})
    assert ([len(it.rows) for it in (page, rest)], rest.next) == ([3, 1], None)


async def raw_bytes_and_tools_are_found_by_filters(client: Client) -> None:
    everything = ["oslo#1", "oslo#2", "rome#1", "rome#2"]
    for filter, wanted in {
        'raw~"You sell"': everything,
        'text~"You sell"': ["oslo#1", "rome#1"],
        "tool:find_seat": ["oslo#1", "rome#1"],
        'raw~"role"': everything,
        'text~"\\"role\\""': [],
    }.items():
        found = [f"{span.rollout}#{span.sequence}" async for span in client.recent_spans(filter)]
        assert sorted(found) == wanted, filter


async def a_person_searches(shell: Shell) -> None:
    found = await shell.run("search", "21C", "role:tool", "rollout:rome")
    assert found.code == 0, found.err
    first, second = found.text.splitlines()
    assert first.startswith("rome/a1#2  ")
    assert second.startswith("  tool result: Seat 21C to ROME")
    assert len((await shell.run("search", "seat", "--json")).text.splitlines()) == 4
    nothing = await shell.run("search", "nobody said this")
    assert (nothing.code, nothing.text) == (0, "")
    assert nothing.err.startswith("No call says that; ")
    wrong = await shell.run("search", "x", "role:tol")
    assert (wrong.code, "did you mean 'tool'" in wrong.err) == (1, True)


async def test_a_wrong_search_is_refused(local: Local, http: aiohttp.ClientSession) -> None:
    for params, field in (
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "x", "filter": "role:tol"}, "filter"),
        ({"text": "x", "cursor": "x"}, "cursor"),
    ):
        async with http.get(f"{local.url}/api/search", params=params) as answer:
            assert (answer.status, (await answer.json())["error"]["field"]) == (400, field)
