"""What mitmdump loads where it stands before our front; nothing of ours imports it.

It lets every byte pass at once and changes none. It says on stdout, a line of JSON each, which port it listens on and
which clients did not trust it, and it ends with the sidecar that has started it: when its stdin does.
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
    """mitmdump listens. It reads its key once more when its other parts hear of that, so ours says it after them."""
    if sys.platform == "linux":  # Nobody of this user, such as the agent, reads the key in its memory.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.get_running_loop().call_soon(_listening)


def _listening() -> None:
    from mitmproxy import ctx  # pyright: ignore

    listening: Any = ctx.master.addons.get("proxyserver").listen_addrs()  # pyright: ignore
    _say({"port": listening[0][1]})


def requestheaders(flow: Any) -> None:
    """A request passes as it comes."""
    flow.request.stream = True


def responseheaders(flow: Any) -> None:
    """An answer too, with every event of a stream when it is there."""
    flow.response.stream = True


def tls_failed_client(data: Any) -> None:
    """A handshake with the agent has failed."""
    host, port = data.context.server.address[:2]
    _say({"host": host, "port": port, "error": str(data.conn.error)})


def _say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
