"""DNS for an agent in a network without a way out: each name gets an address of its own, by which the sidecar recognizes
it.
"""

from __future__ import annotations

import asyncio
import struct
from ipaddress import IPv4Address
from typing import Any, Final, cast

from penstock.sidecar.intercept.client_hello import HOST_NAME

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
