"""The sockets of the gateway: a port, with TLS if that is configured, and a Unix socket if one is. Errors say why a
socket cannot be opened. Sockets that the previous process has handed over (`process.handover`) are used unchanged.

Servers that the gateway itself starts (`gateway.api.tools`) reach it by HTTP. Where the port speaks TLS, for
which they have no trust settings, they use the Unix socket; if none is configured, one in a directory that only this
user can enter.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from penstock.gateway.client.child_process import socket_folder
from penstock.gateway.config import GatewayConfig
from penstock.gateway.model.answers import ErrorAnswer, Problem
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.settings import EVERYWHERE, TlsSettings
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.process.handover import ALONE, KEEP_SOCKET_FILE, HandoverGrant, ListenSockets
from penstock.gateway.wire.http.certificates import file_of, load_authorities, load_pair, validity

_BACKLOG: Final = 4096
_HANDSHAKE_SECONDS: Final = 15.0
_OWN: Final = "gateway.sock"


class Listeners:
    """The open sockets of the gateway."""

    def __init__(self, host: str, port: list[asyncio.Server], tls: bool) -> None:
        self._host, self._port = host, port
        self._unix: asyncio.Server | None = None
        self._path: Path | None = None
        self._removes = True
        """True if the file of the Unix socket is removed in the end."""
        self._own: TemporaryDirectory[str] | None = None
        name = port[0].sockets[0].getsockname()
        self.address: tuple[str, int] = (name[0], name[1])
        self.scheme = "https" if tls else "http"

    @property
    def own_url(self) -> str:
        """URL of the gateway for servers that it starts itself."""
        if self.scheme == "https":
            return f"unix:{self._path}"
        host, port = EVERYWHERE.get(self.address[0], self.address[0]), self.address[1]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def add_socket(
        self, path: Path | None, make: Callable[[], asyncio.Protocol], taken: HandoverGrant | None = None
    ) -> None:
        """Listen on a Unix socket too, on a private one where none is configured; raises `OSError`."""
        if path is None:
            self._own = socket_folder("penstock-", _OWN)
            path = Path(self._own.name) / _OWN
        options: dict[str, Any] = {"backlog": _BACKLOG, "start_serving": False, **KEEP_SOCKET_FILE}
        if taken is not None and taken.held.unix is not None and taken.held.path == str(path):
            taken.used.add(taken.held.unix)
            options["sock"] = socket.socket(fileno=taken.held.unix)
            # The parent of several workers does that.
            self._removes = taken.place is ALONE
        else:
            options["sock"] = bind_unix(path)
        self._unix = await asyncio.get_running_loop().create_unix_server(make, **options)
        self._path = path

    async def accept(self) -> None:
        """Serve clients from now on."""
        for one in self._servers:
            await one.start_serving()

    @property
    def _servers(self) -> list[asyncio.Server]:
        return [*self._port, *([] if self._unix is None else [self._unix])]

    @property
    def listen_sockets(self) -> ListenSockets:
        """The sockets that another process may take over: all but a private Unix socket."""
        sockets = [one.fileno() for server in self._port for one in server.sockets]
        made = ListenSockets(self._host, self.address[1], sockets)
        if self._unix is not None and self._own is None:
            made.path, made.unix = str(self._path), self._unix.sockets[0].fileno()
        return made

    def accept_no_more(self) -> None:
        """Stop accepting: new connections belong to the process that has taken over."""
        for one in self._servers:
            one.close()
        if self._own is None:
            self._path = None

    def close(self) -> None:
        """Close all sockets, and remove the file of the Unix socket if it is this process's own."""
        path = self._path
        self.accept_no_more()
        if path is not None and self._removes:
            path.unlink(missing_ok=True)
        if self._own is not None:
            self._own.cleanup()


async def listen(
    config: GatewayConfig,
    make: Callable[[], asyncio.Protocol],
    tls: ssl.SSLContext | None = None,
    taken: HandoverGrant | None = None,
) -> Listeners:
    """Open the port; `make` makes the protocol of a connection, `tls` is for the port. Raises `ConfigError`."""
    made = Listeners(config.host, await _port(config, make, tls, taken), tls is not None)
    if config.socket is not None or tls is not None:
        try:
            await made.add_socket(config.socket, make, taken)
        except OSError as error:
            made.close()
            where = "a socket of its own" if config.socket is None else f"the socket {config.socket}"
            raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
    return made


async def _port(
    config: GatewayConfig, make: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None, taken: HandoverGrant | None
) -> list[asyncio.Server]:
    """Return a server for each socket of the port."""
    loop, host, port = asyncio.get_running_loop(), config.host, config.port
    options: dict[str, Any] = {"backlog": _BACKLOG, "ssl": tls, "start_serving": False}
    if tls is not None:
        options["ssl_handshake_timeout"] = _HANDSHAKE_SECONDS
    try:
        if taken is not None and host == taken.held.host and port in (0, taken.held.port):
            taken.used.update(taken.held.sockets)
            return [
                await loop.create_server(make, sock=socket.socket(fileno=one), **options) for one in taken.held.sockets
            ]
        return [await loop.create_server(make, host, port, reuse_address=True, **options)]
    except OSError as error:
        raise ConfigError(_no_port(host, port, error)) from None


def bind_ports(host: str, port: int, count: int) -> list[list[socket.socket]]:
    """Return for each of `count` processes a socket of its own on each address of a host, with the same port: the
    system shares connections out between those that listen (`SO_REUSEPORT`). Raises `ConfigError`."""
    made: list[list[socket.socket]] = [[] for _ in range(count)]
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            try:
                # The system would not report that another program shares the port already.
                _bind(family, address, port, shared=False).close()
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and len(found) > 1:
                    continue  # a name may have an IPv6 address on a machine without IPv6
                raise
            for sockets in made:
                sockets.append(_bind(family, address, port, shared=True))
                port = port or sockets[0].getsockname()[1]
        if not made[0]:
            raise OSError(errno.EADDRNOTAVAIL, host)
    except OSError as error:
        for one in chain.from_iterable(made):
            one.close()
        raise ConfigError(_no_port(host, port, error)) from None
    return made


def address_of(handle: int) -> tuple[str, int]:
    """Return the host and port on which a socket listens."""
    with socket.socket(fileno=os.dup(handle)) as one:
        host, port, *_ = one.getsockname()
    return host, port


def rebind(handle: int) -> int:
    """Replace a socket of `bind_ports`, which is closed, by one on which nobody listens yet. A socket that others
    listen on as well stays."""
    with socket.socket(fileno=os.dup(handle)) as old:
        if not old.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT):
            return handle
        family, address = old.family, old.getsockname()
    os.close(handle)
    return _bind(family, address, address[1], shared=True).detach()


def _bind(family: int, address: tuple[Any, ...], port: int, *, shared: bool) -> socket.socket:
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address[0], port, *address[2:]))
    except OSError:
        made.close()
        raise
    return made


def bind_unix(path: Path) -> socket.socket:
    """Return a Unix socket to which only this user may connect; raises `OSError`."""
    _vacate(path)
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    finally:
        os.umask(before)
    return made


def _vacate(path: Path) -> None:
    """Remove the socket of a gateway that was killed, and nothing else. Raises `OSError` where it is in use."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError(errno.EEXIST, "there is something else at this path")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "it is taken (perhaps another gateway runs)")
        path.unlink()


def _no_port(host: str, port: int, error: OSError) -> str:
    """Return why the port cannot be opened, and the way out."""
    if error.errno == errno.EADDRINUSE:
        who = "perhaps another gateway runs"
        return f"port {port} of {host} is taken ({who}): choose another with --port, or --port 0 for any that is free"
    if error.errno == errno.EACCES:
        return f"port {port} of {host} is not for this user (those below 1024 seldom are): choose another with --port"
    # An unknown name, or the address of another machine.
    return f"cannot listen on {host}: it is no address of this machine; --host 127.0.0.1 is, and 0.0.0.0 is all of them"


# TLS on the agents' side: the certificate of `[tls]`, read again when its files have changed, without a restart.
#
# The listener has one context for good (`ServerTls`), which only holds the current one: each connection asks it for
# its TLS, and gets that of the context which it holds then. So a new certificate, and a new `client_ca`, are for new
# connections; existing ones go on with theirs. (A second `load_cert_chain` into one context would leave a certificate
# of another kind of key in it, and its `client_ca` could only grow.)
#
# Files are read once a second, in a thread. A change counts when the second read finds it the same, since files are
# often written one after the other. Then it is tried; if it is wrong, the log says why and the old one stays.
#
# An expired or not yet valid certificate does not prevent a start: the gateway warns and serves, since its renewal
# needs no restart then, and the Unix socket and clients that check nothing are served meanwhile. But it never
# replaces another one.

_SETTINGS: Final = "tls.certificate", "tls.key"
_PLAIN: Final = "this port of the Penstock gateway speaks HTTPS: write https:// in place of http://"
"""The answer to a client of plain HTTP."""
_log = logging.getLogger("penstock.tls")


class _Connection(ssl.SSLObject):
    """The TLS of one connection. A failed handshake is reported to the client, which then closes: by an alert, or to
    plain HTTP, by an HTTP answer. The loop would close before anything is sent; so it is told to read on, once."""

    outgoing: ssl.MemoryBIO
    """Bytes for the client."""
    _failed = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            if self._failed:
                raise
            self._failed = True
            if error.reason == "HTTP_REQUEST":
                self.outgoing.write(_plain())
            raise ssl.SSLWantReadError from error


class ServerTls(ssl.SSLContext):
    """The context of the listener."""

    def __new__(cls, settings: TlsSettings, certificate: Path, metrics: Metrics) -> ServerTls:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, settings: TlsSettings, certificate: Path, metrics: Metrics) -> None:
        """Read the files; raises `ConfigError`."""
        self._settings, self._certificate, self._metrics = settings, certificate, metrics
        self._seen: list[bytes] | str = self._read()
        self._tried: list[bytes] | str = self._seen
        self._current, metrics.certificate_expires_timestamp_seconds, problem = self._made()
        self._looking: asyncio.Future[None] | None = None
        if problem is not None:
            _log.warning("%s; clients that check it will refuse it, until there is another in its file", problem)

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        """Return the TLS of a new connection."""
        made = self._current.wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _Connection)
        made.outgoing = outgoing
        return made

    def check_files(self) -> None:
        """Begin to check the files for changes, unless a check is in progress."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))

    async def stop(self) -> None:
        """Wait for the check in progress."""
        if self._looking is not None:
            await asyncio.wait([self._looking])

    def _look(self) -> None:
        found: list[bytes] | str
        try:
            found = self._read()
        except ConfigError as error:
            found = str(error)
        before, self._seen = self._seen, found
        if found == self._tried or found != before:
            return
        self._tried = found
        try:
            if isinstance(found, str):
                raise ConfigError(found)
            made, ends, problem = self._made()
            if problem is not None:
                raise ConfigError(problem)
        except ConfigError as error:
            _log.error("the files of [tls] have changed and cannot be used; the old certificate stays: %s", error)
            return
        self._current = made
        self._metrics.certificate_expires_timestamp_seconds = ends
        _log.info("the files of [tls] have changed: new connections get the new certificate")

    def _read(self) -> list[bytes]:
        """Return the contents of the files."""
        one = self._settings
        named = {"tls.certificate": self._certificate, "tls.key": one.key, "tls.client_ca": one.client_ca}
        return [file_of(setting, path) for setting, path in named.items() if path is not None]

    def _made(self) -> tuple[ssl.SSLContext, float, str | None]:
        """Return a context of the files' contents, the time until which its certificate is valid, and what is wrong
        with that."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.sslobject_class = _Connection
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.set_alpn_protocols(["http/1.1"])
        load_pair(made, *_SETTINGS, self._certificate, self._settings.key)
        if self._settings.client_ca is not None:
            load_authorities(made, "tls.client_ca", self._settings.client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
        begins, ends = validity("tls.certificate", self._certificate)
        now, problem = datetime.now(UTC), None
        if not begins <= now <= ends:
            what = f"expired at {ends:%Y-%m-%d %H:%M}" if now > ends else f"is not valid before {begins:%Y-%m-%d %H:%M}"
            problem = f"tls.certificate {str(self._certificate)!r} {what} UTC"
        return made, ends.timestamp(), problem


def _plain() -> bytes:
    body = (
        ErrorAnswer(error=Problem(message=_PLAIN, type="invalid_request")).model_dump_json(exclude_none=True).encode()
    )
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def server_tls(settings: TlsSettings, metrics: Metrics) -> ServerTls | None:
    """Return the TLS of the port; None where it speaks plain HTTP. Raises `ConfigError`."""
    return None if settings.certificate is None else ServerTls(settings, settings.certificate, metrics)
