"""Tests with a network of their own: they run in namespaces, in which they may listen on any port, and say which
address a name has.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from fakes.process import PATHS

ALONE: Final = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--")
"""For everybody; whoever it is is root there, and nobody else is."""
ROOT_ALONE: Final = ("unshare", "--net", "--mount", "--")
"""For root: there are other users, too."""
_UP, _RUNNING, _SIOCSIFFLAGS = 0x1, 0x40, 0x8914


def possible(alone: tuple[str, ...] = ALONE) -> bool:
    """Whether this machine gives a process namespaces of its own."""
    return shutil.which("unshare") is not None and subprocess.run([*alone, "true"], capture_output=True).returncode == 0


def run(module: str, *arguments: str, alone: tuple[str, ...] = ALONE, **env: str) -> Any:
    """What a module prints, as JSON, that is run in there. Fails with what it has said otherwise."""
    command = [*alone, sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": PATHS} | env, timeout=400
    )
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr[-6000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def loopback_up() -> None:
    """127.0.0.1 is there."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _UP | _RUNNING))


def take(address: str) -> None:
    """This machine has another address, which is none of loopback."""
    _ = subprocess.run(["ip", "address", "add", f"{address}/32", "dev", "lo"], check=True)


def know(folder: Path, hosts: str) -> None:
    """Lines of /etc/hosts."""
    file = folder / "hosts"
    file.write_text(f"127.0.0.1 localhost\n{hosts}")
    _ = subprocess.run(["mount", "--bind", file, "/etc/hosts"], check=True)
