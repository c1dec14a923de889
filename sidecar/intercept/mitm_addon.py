"""The addon that mitmdump loads when it runs before our front; no other module imports it.

It passes every byte on at once and changes none. It prints lines of JSON: the port that it listens on, and each client
that did not trust it. It ends with the sidecar that started it, when its stdin closes and it has looked at the
connections that are there.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import threading
from contextlib import suppress
from typing import Any

_PR_SET_DUMPABLE = 4
_LOOK_S = 1.0
"""The longest time in which it looks at connections before it ends; s."""
_TURNS = 20
"""Turns of the loop, in which connections that wait are accepted."""
_open: set[str] = set()
"""Ids of the clients that are connected."""
_left = asyncio.Event()
"""Set when one of them leaves."""


def running() -> None:
    """Called when mitmdump listens. Its other parts read the key once more in this event, so the port is printed after
    them.
    """
    if sys.platform == "linux":  # Other processes of this user, such as the agent, cannot read the key in its memory.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.Thread(target=_end_with_stdin, args=[asyncio.get_running_loop()], daemon=True).start()
    asyncio.get_running_loop().call_soon(_listening)


def _listening() -> None:
    from mitmproxy import ctx  # pyright: ignore

    listening: Any = ctx.master.addons.get("proxyserver").listen_addrs()  # pyright: ignore
    _say({"port": listening[0][1]})


def requestheaders(flow: Any) -> None:
    """Stream each request as it comes."""
    flow.request.stream = True


def responseheaders(flow: Any) -> None:
    """Stream each response as it comes, so that every event of a stream passes at once."""
    flow.response.stream = True


def client_connected(client: Any) -> None:
    """Note a client: its handshake may fail."""
    _open.add(client.id)


def client_disconnected(client: Any) -> None:
    """Note that a client has left, after all that it sent was looked at."""
    _open.discard(client.id)
    _left.set()


def tls_failed_client(data: Any) -> None:
    """Report a failed handshake with the agent."""
    host, port = data.context.server.address[:2]
    _say({"host": host, "port": port, "error": str(data.conn.error)})


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _end_with_stdin(loop: asyncio.AbstractEventLoop) -> None:
    while os.read(0, 4096):
        pass
    looking = asyncio.run_coroutine_threadsafe(_look(), loop)
    with suppress(Exception):  # it ends in any case
        looking.result(2 * _LOOK_S)
    os._exit(0)


async def _look() -> None:
    """Wait until the clients have left: those of an agent that has ended have sent all that they will."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_LOOK_S):
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            while _open:
                _left.clear()
                await _left.wait()
