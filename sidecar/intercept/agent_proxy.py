"""The proxy of one agent: the places where it listens, and the connections that the kernel redirects to it.

`AgentProxy` knows the rollout of its connections. `agent_connection` has those of agents with a proxy in their
environment. A redirected one (`TransparentConnection`) is known by its address and its first bytes; an agent in a
network of its own gets addresses from our DNS (`DnsTable`).
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, cast

from penstock.sidecar.intercept.agent_connection import (
    AgentConnection,
    ConnectionRecord,
    ProxyState,
    UnixSocketConnection,
    http_response,
)
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import (
    ConnectionRefusal,
    EgressConnector,
    ProxyTimeouts,
    RolloutBinding,
    SpliceEnd,
)
from penstock.sidecar.intercept.namespace import BACKLOG
from penstock.sidecar.intercept.rules import InterceptPolicy


class AgentProxy:
    """The proxy of one agent."""

    def __init__(
        self,
        gateway: str,
        policy: InterceptPolicy,
        authority: CertificateStore,
        on_passed: Callable[[ConnectionRecord], None],
        limits: ProxyTimeouts | None = None,
        ours: set[int] | None = None,
    ) -> None:
        """`gateway`: its URL. `on_closed`: called with each connection that is closed. `ours`: ports of this machine
        that no agent may reach through a front.
        """
        limits = limits or ProxyTimeouts()
        self.authority = authority
        self._ways = EgressConnector(gateway, limits, set() if ours is None else ours)
        self._setting = ProxyState(policy, authority, self._ways, limits, on_passed)
        self._servers: list[asyncio.Server | asyncio.DatagramTransport | TransparentListener] = []

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen as a proxy; return the port."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: AgentConnection(self._setting), host, port, backlog=BACKLOG)
        self._servers.append(server)
        port = server.sockets[0].getsockname()[1]
        self._ways.reserved_ports.add(port)
        return port

    def start_redirected(self, port: int = 0) -> int:
        """Listen for connections that the kernel redirects here; return the port."""
        sockets = listen_sockets(port)
        self._servers.append(TransparentListener(self._setting, sockets))
        port = sockets[0].getsockname()[1]
        self._ways.reserved_ports.add(port)
        return port

    async def start_in_namespace(self, sockets: list[socket.socket]) -> None:
        """Listen in the network of an agent: on the first socket for DNS, on the others for connections."""
        names = DnsTable()
        first, *others = sockets
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: NameServer(names), sock=first)
        self._servers += [transport, TransparentListener(self._setting, others, names)]

    async def start_socket(self, path: Path, host: str) -> None:
        """Listen on a Unix socket too, for calls of one host without TLS."""
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: UnixSocketConnection(self._setting, host), path, backlog=BACKLOG)
        self._servers.append(server)
        await asyncio.to_thread(path.chmod, 0o600)

    @property
    def redirect_loop(self) -> str | None:
        """The reason why our own connections are redirected back to us; None when they are not."""
        return self._setting.redirect_loop

    def bind(self, binding: RolloutBinding) -> None:
        """Let calls pass from now on, as those of this rollout."""
        self._ways.bind(binding)

    async def release(self) -> None:
        """End the rollout: close its open connections; calls wait for the next rollout."""
        self._ways.bind(None)
        visits = list(self._setting.connections)
        for visit in visits:
            visit.abort()
        for visit in visits:
            await visit.closed.wait()

    async def stop(self) -> None:
        """Stop listening and close all connections."""
        for server in self._servers:
            server.close()
        await self.release()


# Connections that the kernel redirects here (`rules`): their agents have no proxy and know nothing of Penstock.
#
# The kernel tells the address to which a connection was made. Its first bytes name the host: they are peeked at,
# without taking them, so that the next reader gets all of them. Only on ports whose TLS may end here must an agent
# speak first; elsewhere its connection is passed on at once.

_ORIGINAL: Final = 80
"""SO_ORIGINAL_DST, and the same number for IPv6 (linux/netfilter_ipv4.h, linux/netfilter_ipv6/ip6_tables.h)."""
_DENIED: Final = b"\x15\x03\x03\x00\x02\x02\x31"
"""A refusal in TLS: the fatal alert access_denied (RFC 8446 section 6.2)."""
_AGAIN: Final = 1.0
"""Pause after a connection that could not be accepted; s."""
_HERE: Final = (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6))


def listen_sockets(port: int = 0) -> list[socket.socket]:
    """Sockets for redirected connections of IPv4 and, if this machine has it, IPv6, on the same port."""
    made: list[socket.socket] = []
    for host, family in _HERE:
        one = socket.socket(family)
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
        except OSError as error:
            one.close()
            if family == socket.AF_INET6 and error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue  # connections of IPv6 are refused then
            raise
        one.listen(BACKLOG)
        made.append(one)
        port = one.getsockname()[1]
    return made


class TransparentListener:
    """Accepts redirected connections of one agent."""

    def __init__(self, setting: ProxyState, sockets: list[socket.socket], names: DnsTable | None = None) -> None:
        """`names`: the names of an agent in a network of its own. Elsewhere a connection of our own user is our own,
        which the rules have failed to exempt.
        """
        self._setting, self._names, self._sockets = setting, names, sockets
        for one in sockets:
            one.setblocking(False)
        self._accepting = [asyncio.ensure_future(self._accept(one)) for one in sockets]

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError:
                # Usually too many files are open: try again, as servers of asyncio do.
                await asyncio.sleep(_AGAIN)
                continue
            TransparentConnection(self._setting, accepted, self._names).begin()

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        for one in self._accepting:
            one.cancel()
        for one in self._sockets:
            one.close()


class TransparentConnection(AgentConnection):
    """A redirected connection. Until its fate is known, it is a bare socket."""

    def __init__(self, setting: ProxyState, accepted: socket.socket, names: DnsTable | None) -> None:
        super().__init__(setting)
        self._bare: socket.socket | None = accepted
        self._names = names
        self._address = ""
        """The destination of the connection: an address, or the name that has it."""
        self._opening: SniffResult | None = None
        self._head = None

    def begin(self) -> None:
        """Begin to serve the accepted connection."""
        self._setting.connections.add(self)
        self._begin(self._serve())

    async def _serve(self) -> None:
        assert self._bare is not None
        self._address, port = original_destination(self._bare)
        if self._names is not None:
            self._address = self._names.name(self._address)
        self._passed = passed = ConnectionRecord(self._address, port, "deny", monotonic(), address=self._address)
        passed.action = self._setting.policy.action_for(self._address, port)
        self._known(self._bare, passed)
        if passed.action == "check" or any(port == other for _, other in self._setting.policy.hosts):
            self._opening = await self._opened(self._bare, port)
            passed.host = self._opening.name or self._address
            passed.action = self._setting.policy.action_for(passed.host, port)
        if passed.action == "deny":
            raise ConnectionRefusal(403, f"{passed.host}:{port} may not be reached from here")
        if passed.action == "intercept" and not (self._opening and self._opening.tls):
            await self._plain_through(passed.host, port)
        else:
            await self._step(passed.action, passed.host, port)

    def _known(self, bare: socket.socket, passed: ConnectionRecord) -> None:
        """Raise `ConnectionRefusal` for connections that were not redirected, and for our own."""
        if (passed.host, passed.port) == bare.getsockname()[:2]:
            raise ConnectionRefusal(403, "only redirected connections are taken here: see `penstock sidecar iptables`")
        if passed.action != "check" and self._names is None and is_own(bare):
            self._setting.redirect_loop = (
                f"the rules do not leave connections of user {os.getuid()} alone: make them with --uid"
            )
            raise ConnectionRefusal(403, self._setting.redirect_loop)

    async def _opened(self, bare: socket.socket, port: int) -> SniffResult:
        """The connection's first bytes, parsed; raises `ConnectionRefusal` when none come in time."""
        seconds = self._setting.limits.head
        try:
            async with asyncio.timeout(seconds):
                return await peek_host(bare)
        except TimeoutError:
            said = f"the agent said nothing on a connection to {self._address}:{port} for {seconds:g} s"
            raise ConnectionRefusal(403, said) from None

    async def _plain_through(self, host: str, port: int) -> None:
        """Pass the connection through the gateway without TLS."""
        end = await self._plain_way(host, port)
        await self._agree()
        self._follow(self, end)

    async def _straight(self, host: str, port: int, plain: bool = False) -> SpliceEnd:
        address: str | None = self._address
        if self._passed is not None and self._passed.action == "unrecorded":
            # The agent has named a model host, but its address may be any host's: look the name up.
            address = self._passed.address = None
        return await self._setting.egress.to_host(host, port, plain, address)

    async def _agree(self) -> None:
        """Begin to read the agent's bytes. Nothing is sent to the agent: it knows of no proxy."""
        bare, self._bare = self._bare, None
        assert bare is not None
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self, bare)

    async def _secure(self, context: ssl.SSLContext, inner: SpliceEnd) -> None:
        bare, self._bare = self._bare, None
        assert bare is not None
        seconds = self._setting.limits.handshake
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: inner, bare, ssl=context, ssl_handshake_timeout=seconds
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Skip `AgentConnection`'s wait for a head: the destination is known."""
        SpliceEnd.connection_made(self, transport)

    def data_received(self, data: bytes) -> None:
        """Pass the agent's bytes on. The first ones may name the host, which the address alone does not."""
        if self._opening is None:
            self._opening = sniff(data[:LARGEST]) or SniffResult(False, None)
            if self._passed is not None and self._opening.name is not None:
                self._passed.host = self._opening.name
        super().data_received(data)

    def _refuse(self, status: int, message: str) -> None:
        bare, self._bare = self._bare, None
        if bare is not None:
            with suppress(OSError):
                # A socket that closes with unread bytes resets the connection, and the answer would be lost.
                _ = bare.recv(LARGEST) if self._opening is not None else b""
                bare.send(self._refusal(status, message))
            bare.close()
        super()._refuse(status, message)

    def _refusal(self, status: int, message: str) -> bytes:
        if self._opening is None or (not self._opening.tls and self._opening.name is None):
            return b""
        return _DENIED if self._opening.tls else http_response(status, message)

    def abort(self) -> None:
        """Close the connection at once."""
        bare, self._bare = self._bare, None
        super().abort()
        if bare is not None:
            # Not now: the loop may still watch the socket for reading.
            asyncio.get_running_loop().call_soon(bare.close)


def original_destination(redirected: socket.socket) -> tuple[str, int]:
    """Address and port to which a connection was made before it was redirected."""
    try:
        if redirected.family == socket.AF_INET:
            port, four = struct.unpack_from("!2xH4s", redirected.getsockopt(socket.SOL_IP, _ORIGINAL, 16))
            return socket.inet_ntop(socket.AF_INET, four), port
        port, six = struct.unpack_from("!2xH4x16s", redirected.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL, 28))
        return socket.inet_ntop(socket.AF_INET6, six), port
    except OSError:  # it was not redirected
        host, port = redirected.getsockname()[:2]
        return host, port


async def peek_host(bare: socket.socket) -> SniffResult:
    """Parse the first bytes of a connection, which stay unread. Raises `ConnectionRefusal` when it ends before they are
    complete.
    """
    loop, seen = asyncio.get_running_loop(), 0
    while True:
        readable = loop.create_future()
        loop.add_reader(bare, _set, readable)
        try:
            await readable
        finally:
            loop.remove_reader(bare)
        data = bare.recv(LARGEST, socket.MSG_PEEK)
        found = sniff(data) if data else None
        if found is not None:
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            return found
        if len(data) <= seen:
            raise ConnectionRefusal(400, "the agent left before it had said where it wants to go")
        seen = len(data)
        # Wake up when there are more bytes, not while the same ones lie there.
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)


def _set(readable: asyncio.Future[None]) -> None:
    if not readable.done():
        readable.set_result(None)


def is_own(accepted: socket.socket) -> bool:
    """True if a process of our own user made this connection, as far as this machine's table of sockets shows."""
    host, port = accepted.getpeername()[:2]
    packed = socket.inet_pton(accepted.family, host)
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    here = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
    table = Path("/proc/net/tcp" if accepted.family == socket.AF_INET else "/proc/net/tcp6")
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == here:
                return int(fields[7]) == os.getuid()
    return False


# The host that a redirected connection names in its first bytes: the server name in a ClientHello of TLS (RFC 8446
# section 4.1.2, RFC 6066 section 3), or the Host of a plain request. Pure; odd bytes never raise.

LARGEST: Final = 64 << 10
"""The most bytes that are examined."""
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0
_HOST: Final = re.compile(
    rb"\r\nhost:[ \t]*(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?[ \t]*\r\n", re.IGNORECASE
)
_METHOD: Final = re.compile(rb"[A-Z]{1,20}( |$)")
HOST_NAME: Final = re.compile(rb"[A-Za-z0-9._-]{1,253}")


class SniffResult(NamedTuple):
    """The first bytes of a connection, parsed."""

    tls: bool
    name: str | None
    """The host that they name; None when they name none."""


def sniff(data: bytes) -> SniffResult | None:
    """Parse the first bytes; None when more are needed. Bytes that are neither TLS nor HTTP name no host."""
    if not data:
        return None
    if data[0] == _HANDSHAKE:
        return _of_tls(data)
    if _METHOD.match(data[:21]) is None:
        return SniffResult(False, None)
    if b"\r\n\r\n" not in data and len(data) < LARGEST:
        return None
    found = _HOST.search(data.partition(b"\r\n\r\n")[0] + b"\r\n")
    return SniffResult(False, found and found[1].decode("ascii").strip("[]").lower())


def _of_tls(data: bytes) -> SniffResult | None:
    message = b""
    while len(data) >= 5 and data[0] == _HANDSHAKE:
        size = int.from_bytes(data[3:5])
        message += data[5 : 5 + size]
        if len(message) >= 4 and (message[0] != _CLIENT_HELLO or len(message) >= 4 + _size(message)):
            return SniffResult(True, _named(message[4 : 4 + _size(message)]) if message[0] == _CLIENT_HELLO else None)
        if len(data) < 5 + size:
            break
        data = data[5 + size :]
    whole = len(data) >= 5 and data[0] != _HANDSHAKE
    return SniffResult(True, None) if whole or len(message) + len(data) >= LARGEST else None


def _size(message: bytes) -> int:
    return int.from_bytes(message[1:4])


def _named(hello: bytes) -> str | None:
    """The server name in a ClientHello without its header."""
    rest = hello[34:]  # version, random
    for width in (1, 2, 1):  # session, cipher suites, compression methods
        size = int.from_bytes(rest[:width])
        rest = rest[width + size :]
    rest = rest[2:]
    while len(rest) >= 4:
        kind, size = int.from_bytes(rest[:2]), int.from_bytes(rest[2:4])
        if kind == _SERVER_NAME:
            name = rest[9 : 4 + size] if rest[6:7] == bytes([_HOST_NAME]) else b""
            return name.decode("ascii").lower() if HOST_NAME.fullmatch(name) else None
        rest = rest[4 + size :]
    return None


# DNS for an agent in a network without a way out: each name gets an address of its own, by which the sidecar
# recognizes it. Answers questions of type A (RFC 1035). Every name gets an address; a host that does not exist fails
# only when the agent connects.

_FIRST: Final = int(IPv4Address("198.18.0.1"))
"""The first of the addresses that no host has (RFC 2544)."""
_MOST: Final = (1 << 17) - 2
_A, _IN, _ANSWER, _FAILED, _NO_NAME, _SECONDS = 1, 1, 0x8180, 0x8182, 0x8183, 60


class DnsTable:
    """The table of names and their addresses."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address(self, name: str) -> str | None:
        """The address of a name, the same each time; None when no address is left."""
        if name not in self._addresses and len(self._addresses) < _MOST:
            made = str(IPv4Address(_FIRST + len(self._addresses)))
            self._addresses[name], self._names[made] = made, name
        return self._addresses.get(name)

    def name(self, address: str) -> str:
        """The name that has an address; the address itself if no name has it."""
        return self._names.get(address, address)

    def answer(self, question: bytes) -> bytes | None:
        """The answer to a DNS message; None when it is no question."""
        if len(question) < 12 or question[2] & 0xF8 or question[4:6] != b"\0\1":
            return None
        labels, at = list[bytes](), 12
        while at < len(question) and 0 < (size := question[at]) < 64:
            labels.append(question[at + 1 : at + 1 + size])
            at += 1 + size
        asked = question[12 : at + 5]
        if len(asked) != at - 7 or question[at] != 0:
            return None
        name, found, code = b".".join(labels), "", _ANSWER
        if HOST_NAME.fullmatch(name) is None:
            # A label may hold any bytes, line ends too, which would get into a request to a proxy.
            code = _NO_NAME
        elif struct.unpack("!HH", asked[-4:]) == (_A, _IN):
            found = self.address(name.decode("ascii").lower())
            code = _FAILED if found is None else _ANSWER
        head = struct.pack("!HHHHHH", int.from_bytes(question[:2]), code, 1, bool(found), 0, 0)
        record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _SECONDS, 4) + IPv4Address(found).packed if found else b""
        return head + asked + record


class NameServer(asyncio.DatagramProtocol):
    """Serves `DnsTable` on a datagram socket."""

    def __init__(self, names: DnsTable) -> None:
        self._names = names
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        answer = self._names.answer(data)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)
