"""`penstock mcp`: tools for coding agents, and recorded tools for agents under test."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, CommandError, Url, note, with_client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.console.mcp_server.replay.replay_calls import ReplayCall
    from penstock.gateway.client.client import Client

PERSON = (
    "This is an MCP server: a coding agent starts it and speaks with it on stdin and stdout, in JSON. How to add it to "
    "one is in docs/mcp-server.md. Ctrl-C ends it."
)


def serve(*, write: Annotated[bool, Parameter(negative="")] = False, gateway: Url = LOCAL) -> None:
    """Give a coding agent tools to improve your agents: an MCP server on stdin and stdout.

    Parameters
    ----------
    write
        Let it post rewards and propose versions of prompts, too. It never starts or ends a release.
    """
    _refuse_closed()
    try:
        from penstock.console.mcp_server.server import serve as speak
    except ModuleNotFoundError as e:
        # The SDK installs anyio.
        if (e.name or "").partition(".")[0] not in ("anyio", "mcp", "mcp_types"):
            raise
        raise CommandError("an MCP server needs mcp: pip install 'penstock-gateway[mcp]'") from None

    async def ask(client: Client) -> None:
        if sys.stdin.isatty():
            note(PERSON)
        await speak(client, write)

    with_client(gateway, ask)


def replay(rollout: str, /, *, attempt: str | None = None, server: str | None = None, gateway: Url = LOCAL) -> None:
    """Play the recorded servers of a rollout as one MCP server on stdin and stdout.

    Parameters
    ----------
    rollout
        Id of the rollout.
    attempt
        Its attempt; needed where there are several.
    server
        The only server to play, by its name in the gateway's configuration.
    """
    import asyncio

    from penstock.console.mcp_server.replay.loader import load

    _refuse_closed()
    found = list["ReplayCall"]()

    async def ask(client: Client) -> None:
        found.extend(await load(client, rollout, attempt, server))

    with_client(gateway, ask)
    if sys.stdin.isatty():
        note("This is an MCP server: an MCP client starts it and speaks with it in JSON, one message a line.")
    asyncio.run(_play(found))


async def _play(calls: Sequence[ReplayCall]) -> None:
    """Plays the recorded servers until stdin ends, or the reader of stdout has gone."""
    import asyncio

    from penstock.console.mcp_server.line_reader import LineReader
    from penstock.console.mcp_server.replay.player import Player

    gone = asyncio.Event()

    def write(line: bytes) -> None:
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[os.write(sys.stdout.fileno(), rest) :]
        except BrokenPipeError:
            gone.set()

    playing = asyncio.ensure_future(Player(calls, write, note).play(LineReader(sys.stdin.fileno())))
    leaving = asyncio.ensure_future(gone.wait())
    await asyncio.wait((playing, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if playing.done():
        playing.result()


def _refuse_closed() -> None:
    if sys.stdin is None or sys.stdout is None:
        raise CommandError("stdin or stdout is closed: an MCP client starts this command and speaks with it there")
