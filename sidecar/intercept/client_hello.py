"""The host that a redirected connection names in its first bytes: the server name in a ClientHello of TLS (RFC 8446
section 4.1.2, RFC 6066 section 3), or the Host of a plain request. Pure; odd bytes never raise.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

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
