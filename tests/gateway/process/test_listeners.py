"""The gateway on a Unix socket: the same calls and the same control API, for one user."""

from __future__ import annotations

import socket
from pathlib import Path

import aiohttp
import pytest
from fakes.process import Gateway, running, upstreams, write_config
from fakes.provider import Provider
from fakes.tape import Tape

pytestmark = pytest.mark.slow


def config(path: Path, provider: Provider) -> str:
    return f'socket = "{path}"\n' + upstreams(openai=provider.openai_url)


async def test_calls_on_a_unix_socket(tmp_path: Path, provider: Provider, http: aiohttp.ClientSession) -> None:
    """The socket of one that was killed is taken over."""
    path = tmp_path / "gateway.sock"
    async with running(tmp_path, config(path, provider)) as gateway:
        await gateway.kill()
        assert path.exists()
        await gateway.start()
        assert path.stat().st_mode & 0o777 == 0o600
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
            asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            url = "http://localhost/rollout/r1/v1/chat/completions"
            async with client.post(url, json=asked) as answer:
                assert answer.status == 200
                there = await answer.read()
            (span,) = await Tape(gateway.url, http).spans("r1", 1)
            assert span.status == "ok"
            async with client.get("http://localhost/api/rollouts") as answer:
                assert [one["id"] for one in (await answer.json())["rollouts"]] == ["r1"]
        async with http.post(f"{gateway.openai('r2')}/chat/completions", json=asked) as answer:
            assert len(await answer.read()) == len(there)
    assert not path.exists()


@pytest.mark.parametrize("what", ["in use", "a file", "too long", "nowhere"])
async def test_where_it_cannot_listen(tmp_path: Path, provider: Provider, what: str) -> None:
    path = tmp_path / {"too long": "x" * 120, "nowhere": "no/such/folder"}.get(what, "gateway.sock")
    with socket.socket(socket.AF_UNIX) as other:
        if what == "in use":
            other.bind(str(path))
            other.listen()
        elif what == "a file":
            path.write_text("mine")
        gateway = Gateway(write_config(tmp_path, config(path, provider)), tmp_path / "data", tmp_path / "log")
        with pytest.raises(AssertionError, match=r"penstock: cannot listen on the socket .*/"):
            await gateway.start()
        assert gateway.log.count("\n") == 1
    assert what != "a file" or path.read_text() == "mine"
