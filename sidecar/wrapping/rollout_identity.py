"""Finds the rollout of a wrapper: the one on the command line, else the one that `penstock run` has set.

MCP clients often give a server only a few of their variables; the official SDKs do. So missing ones are taken from the
parent processes, which are the agent's own, if they belong to this user.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.sidecar.wrapping.delivery import Destination

ADDRESS: Final = "PENSTOCK_URL"
TOKEN, ADMIN_KEY = "PENSTOCK_TOKEN", "PENSTOCK_ADMIN_KEY"
_ABOVE: Final = 16
"""The most parent processes that are examined."""


def find_destination(gateway: str, rollout: str | None, attempt: str | None, own: Mapping[str, str]) -> Destination:
    """The address and key that a session is sent with. Without a rollout the gateway makes one for it."""
    if rollout is not None:
        address = f"{gateway.rstrip('/')}/rollout/{rollout}/attempt/{attempt or 'a1'}"
        return Destination(address, own.get(TOKEN) or own.get(ADMIN_KEY))
    known = own if ADDRESS in own else inherited(os.getppid())
    if address := known.get(ADDRESS):
        return Destination(address.rstrip("/"), known.get(TOKEN))
    return Destination(gateway.rstrip("/"), own.get(TOKEN) or own.get(ADMIN_KEY))


def inherited(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables of the nearest process, from `pid` upwards, that has the address of a rollout; empty when none
    has.
    """
    for _ in range(_ABOVE):
        try:
            lines = (proc / str(pid) / "environ").read_bytes().split(b"\0")
            above = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1]
        except (OSError, IndexError):
            break
        pairs = (line.decode(errors="replace").partition("=") for line in lines)
        found = {name: value for name, _, value in pairs}
        if ADDRESS in found:
            return found
        pid = int(above)
    return {}
