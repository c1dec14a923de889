"""The addon that mitmdump loads when it runs before our front; no other module imports it.

It passes every byte on at once and changes none. It prints lines of JSON: the port that it listens on, and each client
that did not trust it. It ends with the sidecar that started it, when its stdin closes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import threading
from typing import Any

_PR_SET_DUMPABLE = 4


def running() -> None:
    """Called when mitmdump listens. Its other parts read the key once more in this event, so the port is printed after
    them.
    """
    if sys.platform == "linux":  # Other processes of this user, such as the agent, cannot read the key in its memory.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
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


def tls_failed_client(data: Any) -> None:
    """Report a failed handshake with the agent."""
    host, port = data.context.server.address[:2]
    _say({"host": host, "port": port, "error": str(data.conn.error)})


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
