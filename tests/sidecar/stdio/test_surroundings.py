"""What a wrapper is surrounded by: clients that read late, proxies, other gateways."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from conftest import StartGateway
from fakes.ports import steady_ports
from fakes.process import PATIENCE, ROOT
from fakes.tape import Tape
from fakes.web_site import site
from fakes.wrapping import Wrapping

from penstock.gateway.model.stdio_frames import PATH
from penstock.sidecar.stdio import spool
from penstock.sidecar.stdio.command import DRAIN_S
from penstock.sidecar.stdio.delivery import Destination, send_leftover
from penstock.sidecar.stdio.spool import LinePiece

PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'
ECHO = "import sys\nfor line in sys.stdin.buffer: sys.stdout.buffer.write(line.replace(b'\"method\":', b'\"result\":'))"
LOUD = """
import os, sys
data = b"w" * int(sys.argv[1])
while data:
    data = data[os.write(1, data) :]
os.write(2, b"said all\\n")
"""
LAST = 150_000
"""Bytes that fit into the two pipes and the wrapper, so that a server may end before any of them is read."""
AWAY = "http://127.0.0.1:9"
"""Nobody listens on the discard port."""


@asynccontextmanager
async def wrapped(home: Path, gateway: str, *server: str, **env: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A wrapper of a Python program, for a client that reads ahead as little as it can."""
    command = [sys.executable, "-m", "penstock", "mcp", "wrap", "--name", "tools", "--gateway", gateway]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--rollout", "r1", "--", sys.executable, "-c", *server),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state"), **env},
        limit=1024,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        _ = await process.communicate()


async def said_all(process: asyncio.subprocess.Process) -> None:
    """Waits until its server is about to end."""
    assert process.stderr is not None
    while (line := await process.stderr.readline()) != b"said all\n":
        assert line.startswith(b"penstock: "), line


@pytest.mark.slow
async def test_a_client_may_read_the_last_output_as_late_as_it_likes(tmp_path: Path) -> None:
    async with wrapped(tmp_path, AWAY, LOUD, str(LAST)) as process:
        await said_all(process)
        with pytest.raises(TimeoutError):  # it waits, although its server has long ended
            _ = await asyncio.wait_for(process.wait(), DRAIN_S + 1)
        assert process.stdout is not None
        assert await process.stdout.read() == b"w" * LAST
        assert await process.wait() == 0


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_a_client_that_reads_no_more(wrapping: Wrapping) -> None:
    command = wrapping.command(sys.executable, "-c", LOUD, str(LAST))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=wrapping.variables) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) != b"said all\n":
            assert line.startswith(b"penstock: "), line
        process.terminate()
        assert process.wait(PATIENCE) in (0, 128 + signal.SIGTERM)  # it may have reached the server
        assert process.stdout is not None
        assert len(process.stdout.read()) < LAST


NOBODY = "import os, runpy; os.getuid = lambda: 54321; runpy.run_module('penstock', run_name='__main__')"


@pytest.mark.slow
def test_a_user_without_a_home_uses_the_tool_all_the_same() -> None:
    wrapper = (sys.executable, "-c", NOBODY, "mcp", "wrap", "--name", "tools", "--gateway", AWAY)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*wrapper, "--", sys.executable, "-c", ECHO], input=PING, capture_output=True, env=env)
    assert (done.returncode, done.stdout) == (0, PING.replace(b"method", b"result"))
    assert done.stderr.startswith(b"penstock: nothing is recorded, because this user has no home directory: XDG_STATE")


async def test_a_gateway_on_this_machine_is_asked_without_a_proxy(
    start_gateway: StartGateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    gateway, (nobody,) = await start_gateway(""), steady_ports(1)
    proxy = f"http://127.0.0.1:{nobody}"
    proxies = {"http_proxy": proxy, "HTTP_PROXY": proxy, "no_proxy": "", "NO_PROXY": ""}
    async with wrapped(tmp_path, gateway.url, ECHO, **proxies) as process:
        assert (await process.communicate(PING))[1] == b""
    assert (await Tape(gateway.url, http).spans("r1", 2))[0].name == "ping"


async def test_the_admin_key_goes_to_its_own_gateway_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []

    async def note(request: web.Request) -> web.Response:
        keys.append(request.headers.get("Authorization"))
        return web.Response(status=401)

    application = web.Application()
    application.router.add_post(PATH, note)
    async with site(application) as url:
        folder = left_behind(tmp_path, url)
        monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "secret")
        for gateway in ("http://127.0.0.1:1", f"{url}/rollout/r1/attempt/a1"):
            assert not await asyncio.to_thread(send_leftover, folder, Destination(gateway, None), lambda: False)
    assert keys == [None, "Bearer secret"]


def left_behind(root: Path, url: str) -> Path:
    """What a wrapper has left that was killed."""
    folder = root / spool.new_session()
    made = spool.Spool(folder, 1 << 20)
    spool.write_about(folder, {"url": url, "server": "tools", "key": None})
    made.put(ord("c"), [LinePiece(PING, len(PING), True)], 1)
    made.close()
    return folder
