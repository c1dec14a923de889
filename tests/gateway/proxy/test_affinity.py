"""Upstreams that share a model: the calls of a rollout go to one of them, and elsewhere only while that is down."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import monotonic

import aiohttp
from fakes.faulty import ask, faulty
from fakes.process import running, upstreams
from fakes.provider import serving
from fakes.rig import CHAT
from fakes.tape import Tape

from penstock.gateway.app import Gateway
from penstock.gateway.config import Config

ROLLOUTS = 12


async def test_a_rollout_stays_where_its_conversation_is(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with faulty() as provider:
        upstreams = [{"name": name, "base_url": f"{provider.url}/{name}/v1"} for name in ("primary", "spare")]
        shared = {"model": "*", "upstream": ["primary", "spare"], "weights": {"primary": 1, "spare": 1}}
        config = {"upstream": upstreams, "route": [shared], "data": tmp_path / "data", "port": 0}
        gateway = Gateway(Config.model_validate(config))
        host, port = await gateway.start()
        url = f"http://{host}:{port}"
        tape = Tape(url, http)

        async def served(turn: int) -> dict[str, str | None]:
            """Who serves the next call of each rollout."""
            found = dict[str, str | None]()
            for name in (f"r{number}" for number in range(ROLLOUTS)):
                assert (await ask(http, f"{url}/rollout/{name}/attempt/a1{CHAT}", "well")).complete
                found[name] = (await tape.spans(name, turn))[-1].upstream
            return found

        health = gateway.pools["primary"].health
        try:
            homes = await served(1)
            assert set(homes.values()) == {"primary", "spare"}
            assert await served(2) == homes
            health.failed("connect", monotonic() + 3600)  # it rests for longer than the test takes
            assert set((await served(3)).values()) == {"spare"}
            health.answered(monotonic() + 7200)
            assert await served(4) == homes
        finally:
            await gateway.stop()


async def test_a_router_behind_is_told_the_rollout(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Unless its agent says something in that header itself; nobody else is told."""
    async with serving() as router, serving() as plain:
        told = 'session_header = "X-Session-ID"\n'
        config = upstreams(openai=router.openai_url, anthropic=plain.url)
        async with running(tmp_path, config.replace('dialect = "openai"', f'dialect = "openai"\n{told}')) as gateway:
            body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
            chat, tape = gateway.openai("r1") + "/chat/completions", Tape(gateway.url, http)
            for headers in ({}, {"x-session-id": "my-own"}):
                async with http.post(chat, json=body, headers=headers) as answer:
                    assert answer.status == 200
            async with http.post(gateway.address("r1") + "/v1/messages", json=body | {"max_tokens": 9}) as answer:
                assert answer.status == 200
            assert [sessions(seen.headers) for seen in router.log] == [
                [("X-Session-ID", "r1")],
                [("x-session-id", "my-own")],
            ]
            assert [sessions(seen.headers) for seen in plain.log] == [[]]
            await tape.spans("r1", 3)


def sessions(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() == "x-session-id"]
