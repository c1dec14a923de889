"""`penstock mcp`: tools for coding agents."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url, note, with_client

if TYPE_CHECKING:
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
    if sys.stdin is None or sys.stdout is None:
        raise Failure("stdin or stdout is closed: an MCP client starts this command and speaks with it there")
    try:
        from penstock.gateway.mcp_server.server import serve as speak
    except ModuleNotFoundError as e:
        # The SDK brings anyio along.
        if (e.name or "").partition(".")[0] not in ("anyio", "mcp", "mcp_types"):
            raise
        raise Failure("an MCP server needs mcp: pip install 'penstock-gateway[mcp]'") from None

    async def ask(client: Client) -> None:
        if sys.stdin.isatty():
            note(PERSON)
        await speak(client, write)

    with_client(gateway, ask)
