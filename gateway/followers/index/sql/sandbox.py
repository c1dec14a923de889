"""Rights that a process gives up before it runs users' SQL: files outside one directory, the network, and unlimited
memory and processor time.

Landlock (Linux 5.13 and later; https://docs.kernel.org/userspace-api/landlock.html) takes rights from the calling
thread and from those that it starts: so it comes before DuckDB starts any. A handled right is lost except for paths
with a rule for it. TCP is handled from version 4 of its interface on, signals and abstract sockets from version 6 on.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from pathlib import Path
from typing import Final

MEMORY_BYTES: Final = 2 << 30
"""Limit of the address space. DuckDB's own limit is half of it, because DuckDB does not count all that it allocates."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_FILES: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""The number of file access rights in each version of the interface; later versions have no more."""
_READ_FILE, _LIST = 0b100, 0b1000
_NEEDED: Final = (Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
"""DuckDB reads the memory limit of its cgroup, and does not start if it cannot."""
_TCP, _TCP_FROM = 0b11, 4
_SCOPES, _SCOPES_FROM = 0b11, 6


class SandboxError(Exception):
    """The kernel has no Landlock, or refuses it."""


def version() -> int:
    """The version of the kernel's Landlock interface; 0 without Landlock."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, _VERSION))


def limit(seconds: float) -> None:
    """Limits the resources of this process. It can write no file at all."""
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(4 * seconds) + 5),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard))


def enclose(directory: Path) -> None:
    """Restricts this process to reading this directory, without network. Raises `SandboxError`."""
    known = version()
    if not known:
        raise SandboxError("this kernel has no Landlock")
    libc = _libc()
    handled = struct.pack(
        "=QQQ",
        (1 << _FILES.get(known, 16)) - 1,
        _TCP if known >= _TCP_FROM else 0,
        _SCOPES if known >= _SCOPES_FROM else 0,
    )
    size = 8 if known < _TCP_FROM else 16 if known < _SCOPES_FROM else 24
    rules = _called(libc.syscall(_CREATE_RULESET, handled, size, 0))
    for path in (directory, *filter(Path.exists, _NEEDED)):
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = _READ_FILE | (_LIST if path.is_dir() else 0)
        _called(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, at), 0))
        os.close(at)
    _called(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _called(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> int:
    if result < 0:
        raise SandboxError(f"the kernel refuses Landlock: {os.strerror(ctypes.get_errno())}")
    return result
