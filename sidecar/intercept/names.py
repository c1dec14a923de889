"""Names for an agent in a network without a way out: each gets an address of its own, by which the sidecar knows it
again. Answers questions of type A (RFC 1035); every name has an address, and whether there is such a host is seen when
it is connected to.
"""

from __future__ import annotations

import asyncio
import struct
from ipaddress import IPv4Address
from typing import Any, Final, cast

from penstock.sidecar.intercept.hello import HOST_NAME

_FIRST: Final = int(IPv4Address("198.18.0.1"))
"""Addresses that no host has (RFC 2544)."""
_MOST: Final = (1 << 17) - 2
_A, _IN, _ANSWER, _FAILED, _NO_NAME, _SECONDS = 1, 1, 0x8180, 0x8182, 0x8183, 60


class Names:
    """Which name has which address."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def address(self, name: str) -> str | None:
        """Of a name, the same each time; None when there are no more."""
        if name not in self._addresses and len(self._addresses) < _MOST:
            made = str(IPv4Address(_FIRST + len(self._addresses)))
            self._addresses[name], self._names[made] = made, name
        return self._addresses.get(name)

    def name(self, address: str) -> str:
        """The host at an address: the name that has it, or itself."""
        return self._names.get(address, address)

    def answer(self, question: bytes) -> bytes | None:
        """The answer to a message; None where it is no question."""
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
            # A label may be of any bytes, line ends too: a proxy would be asked for it.
            code = _NO_NAME
        elif struct.unpack("!HH", asked[-4:]) == (_A, _IN):
            found = self.address(name.decode("ascii").lower())
            code = _FAILED if found is None else _ANSWER
        head = struct.pack("!HHHHHH", int.from_bytes(question[:2]), code, 1, bool(found), 0, 0)
        record = struct.pack("!HHHIH", 0xC00C, _A, _IN, _SECONDS, 4) + IPv4Address(found).packed if found else b""
        return head + asked + record


class NameServer(asyncio.DatagramProtocol):
    """Answers where the agent asks."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It listens."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """A question."""
        answer = self._names.answer(data)
        if answer is not None and self._transport is not None:
            self._transport.sendto(answer, addr)
