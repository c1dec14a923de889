"""Ports for servers that are started late, or again and again.

A port that the system has given once may be given to any other process as soon as nobody listens there. These are below
those that it gives by itself.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

FIRST = 10_000


def steady_ports(count: int) -> list[int]:
    """Ports in a row that nobody uses and the system gives to nobody."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        # Not of `random`: hypothesis gives it the same state in every process of a run.
        first = FIRST + secrets.randbelow(given - count - FIRST)
        found = list(range(first, first + count))
        try:
            for port in found:
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return found
