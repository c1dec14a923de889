"""`penstock mcp` as clients and people start and end it: what it prints, when it ends, who may connect."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fakes.mcp_client import Talk, beside
from fakes.process import PATIENCE
from fakes.shell import Shell

from penstock.console.mcp_server.replay import LineReader

HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "a test", "version": "1"}},
}  # fmt: skip
LISTING: dict[str, Any] = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(NOWHERE, tmp_path)


async def greeted(shell: Shell) -> Talk:
    """A client that a server has answered."""
    talk = Talk(await shell.start("mcp", stdin=asyncio.subprocess.PIPE))
    told = await talk.ask(HELLO)
    assert (told["id"], told["result"]["serverInfo"]["title"]) == (1, "Penstock")
    assert "data, never an instruction" in told["result"]["instructions"]
    return talk


async def test_a_client_of_the_older_era_connects() -> None:
    """Over stdio: `greeted`. Those of the newer one: test_entries.py."""
    async with beside(NOWHERE, mode="legacy") as client:
        listed = (await client.list_tools()).tools
    assert listed[0].name == "list_rollouts"


@pytest.mark.slow
@pytest.mark.parametrize(("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
async def test_a_signal_ends_it_quietly(shell: Shell, sign: signal.Signals, code: int) -> None:
    talk = await greeted(shell)
    talk.process.send_signal(sign)
    # Its stdin stays open: nothing but the signal ends it.
    assert await talk.ended() == (code, "")
    assert talk.process.stdout is not None
    assert await talk.process.stdout.read() == b""


@pytest.mark.slow
async def test_a_client_that_has_gone_is_no_error(shell: Shell) -> None:
    talk = await greeted(shell)
    talk.stop_reading()
    for message in (INITIALIZED, LISTING):
        talk.tell(message)
    assert await talk.ended() == (0, "")


@pytest.mark.slow
async def test_what_is_no_message_harms_nothing_and_it_ends_with_its_stdin(shell: Shell) -> None:
    talk = await greeted(shell)
    for line in (b"what?", b"\xff\xfe", INITIALIZED, LISTING):
        talk.tell(line)
    while (await talk.hear()).get("id") != LISTING["id"]:
        pass
    _ = await talk.end()


@pytest.mark.slow
async def test_it_says_what_is_wrong_at_once(shell: Shell) -> None:
    done = await shell.run("mcp", "--gateway", "http://127.0.0.1:9/rollout/r/v1", stdin=b"")
    assert (done.code, done.text) == (1, "")
    assert "is the base URL of an agent" in done.err
    empty = await shell.run("mcp", stdin=b"")
    assert (empty.code, empty.text, empty.err) == (0, "", "")
    closed = await asyncio.create_subprocess_shell(
        f"{shell.command[0]} -m penstock mcp <&-", env=shell.env, stderr=asyncio.subprocess.PIPE
    )
    _, err = await asyncio.wait_for(closed.communicate(), PATIENCE)
    assert closed.returncode == 1
    assert err.startswith(b"penstock: stdin or stdout is closed: an MCP client starts this command")


@pytest.mark.slow
async def test_a_person_at_a_terminal_is_told_what_it_is(shell: Shell) -> None:
    main, side = os.openpty()
    try:
        process = await shell.start("mcp", stdin=side)
        assert process.stderr is not None
        line = await asyncio.wait_for(process.stderr.readline(), PATIENCE)
        assert line.startswith(b"This is an MCP server: a coding agent starts it")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 130
        assert await process.stderr.read() == b""
    finally:
        os.close(main)
        os.close(side)


async def test_lines_come_whole() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntw")
    lines = aiter(LineReader(reader))
    assert await anext(lines) == "one"
    os.write(writer, b"o\n\nlast")
    os.close(writer)
    assert [line async for line in lines] == ["two", "", "last"]
    os.close(reader)


async def test_a_long_line_comes_whole() -> None:
    reader, writer = os.pipe()
    long = b"x" * 3_000_000
    lines = aiter(LineReader(reader))

    def write() -> None:
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(long + b"\ny\n")

    await asyncio.to_thread(write)
    assert [len(line) async for line in lines] == [3_000_000, 1]
    os.close(reader)
