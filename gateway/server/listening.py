"""Where the gateway listens: a port, and a Unix socket if one is configured. Whoever cannot listen is told why."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.gateway.config import Config
from penstock.gateway.model.toml import ConfigError

_BACKLOG: Final = 4096


class Listening:
    """What clients connect to."""

    def __init__(self, port: asyncio.Server, path: asyncio.Server | None, config: Config) -> None:
        self._servers = [one for one in (port, path) if one is not None]
        self._path = config.socket if path is not None else None
        name = port.sockets[0].getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    def close(self) -> None:
        """Nobody can connect any more."""
        for one in self._servers:
            one.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


async def listen(config: Config, make: Callable[[], asyncio.Protocol]) -> Listening:
    """Listens; `make` makes what serves a connection. Raises `ConfigError`."""
    loop = asyncio.get_running_loop()
    try:
        port = await loop.create_server(make, config.host, config.port, backlog=_BACKLOG, reuse_address=True)
    except OSError as error:
        raise ConfigError(_no_port(config.host, config.port, error)) from None
    if config.socket is None:
        return Listening(port, None, config)
    try:
        _vacate(config.socket)
        before = os.umask(0o177)  # only this user may connect
        try:
            path = await loop.create_unix_server(make, config.socket, backlog=_BACKLOG)
        finally:
            os.umask(before)
    except OSError as error:
        port.close()
        raise ConfigError(f"cannot listen on the socket {config.socket}: {error.strerror or error}") from None
    return Listening(port, path, config)


def _vacate(path: Path) -> None:
    """Removes the socket of a gateway that was killed, and nothing else. Raises `OSError` where it is in use."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is something else at this path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "it is taken (perhaps another gateway runs)")
        path.unlink()


def _no_port(host: str, port: int, error: OSError) -> str:
    """Why not, and the way out."""
    if error.errno == errno.EADDRINUSE:
        who = "perhaps another gateway runs"
        return f"port {port} of {host} is taken ({who}): choose another with --port, or --port 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not for this user (those below 1024 seldom are): choose another with --port"
    # A name that nobody knows, or the address of another machine.
    return f"cannot listen on {host}: it is no address of this machine; --host 127.0.0.1 is, and 0.0.0.0 is all of them"
