"""The first-party hosts of the agents, as one TLS server on port 443: it keeps every request as it came.

Who connects is told by the name that the client asks for (SNI). HTTP/1.1 is all that is offered, and WebSockets, which
say nothing that plain HTTP would not: a message in, the events of one answer out.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from clients.answers import answer, response_messages
from fakes.raw import frame

from penstock.sidecar.intercept.certificate_store import CertificateStore

MODELS = ("api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com", "chatgpt.com")
"""Hosts whose requests are compared."""
BESIDE = (
    "platform.claude.com",
    "downloads.claude.ai",
    "statsig.anthropic.com",
    "auth.openai.com",
    "ab.chatgpt.com",
    "api.github.com",
    "raw.githubusercontent.com",
    "registry.npmjs.org",
    "models.dev",
    "models.opencode.ai",
    "opencode.ai",
    "play.googleapis.com",
    "http-intake.logs.us5.datadoghq.com",
)
"""Others that agents are known to call; they answer 404."""
ADDRESS = "10.77.0.1"
"""None of loopback, which nobody redirects."""
_LARGEST = 64 << 20
_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_WEBSOCKET = re.compile(rb"\r\nsec-websocket-key: *([^\r]+)", re.IGNORECASE)
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, or a message on a WebSocket (then without a head)."""

    host: str
    head: bytes
    body: bytes


@dataclass
class Hosts:
    """The server, and what it was asked."""

    authority: CertificateStore = field(default_factory=lambda: CertificateStore.create_in_process([*MODELS, *BESIDE]))
    asked: list[Asked] = field(default_factory=list[Asked])

    def __post_init__(self) -> None:
        self._names = {id(self.authority.context(name)): name for name in sorted(self.authority.hosts)}

    def context(self) -> ssl.SSLContext:
        """TLS as each of the hosts."""
        made = CertificateStore.create_in_process(["localhost"]).context("localhost")

        def choose(connection: ssl.SSLObject, name: str, _: ssl.SSLContext) -> int | None:
            if name not in self.authority.hosts:
                return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
            connection.context = self.authority.context(name)
            return None

        made.sni_callback = choose  # pyright: ignore[reportAttributeAccessIssue]
        return made

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        host = self._names[id(writer.get_extra_info("ssl_object").context)]
        try:
            while True:
                asked = await self._request(host, reader)
                self.asked.append(asked)
                key = _WEBSOCKET.search(asked.head)
                if key is not None:
                    await self._talk(host, key[1], reader, writer)
                    break
                for piece in answer(host, asked.head, asked.body):
                    writer.write(piece)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _request(self, host: str, reader: asyncio.StreamReader) -> Asked:
        head = await reader.readuntil(b"\r\n\r\n")
        if (found := _LENGTH.search(head)) is not None:
            return Asked(host, head, await reader.readexactly(int(found[1])))
        body = b""
        while _CHUNKED.search(head) is not None:
            line = await reader.readuntil(b"\r\n")
            chunk = await reader.readexactly(int(line.partition(b";")[0], 16) + 2)
            body += chunk[:-2]
            if chunk == b"\r\n":
                break
        return Asked(host, head, body)

    async def _talk(self, host: str, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The messages of a WebSocket, until the client closes it."""
        accept = base64.b64encode(hashlib.sha1(key + _MAGIC).digest())
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n")
        writer.write(b"Sec-WebSocket-Accept: %b\r\n\r\n" % accept)
        text = b""
        while True:
            final, kind, payload = await _frame(reader)
            if kind == 8:
                writer.write(frame(0x88, payload))
                return
            if kind == 9:
                writer.write(frame(0x8A, payload))
                continue
            text += payload
            if final:
                self.asked.append(Asked(host, b"", text))
                for event in response_messages(json.loads(text)):
                    writer.write(frame(0x81, event))
                await writer.drain()
                text = b""


async def _frame(reader: asyncio.StreamReader) -> tuple[bool, int, bytes]:
    """Whether it is the last of its message, its kind and payload."""
    first, second = await reader.readexactly(2)
    length = second & 127
    if length > 125:
        size = 2 if length == 126 else 8
        length = int.from_bytes(await reader.readexactly(size), "big")
    mask = await reader.readexactly(4)
    masked = await reader.readexactly(length)
    whole = (mask * (length // 4 + 1))[:length]
    plain = (int.from_bytes(masked, "big") ^ int.from_bytes(whole, "big")).to_bytes(length, "big")
    return bool(first & 128), first & 15, plain


@asynccontextmanager
async def first_party(trust: Path) -> AsyncGenerator[Hosts]:
    """The hosts, on port 443 of this machine; `trust`: the file that their authority is written to."""
    made = Hosts()
    _ = await asyncio.to_thread(trust.write_text, made.authority.pem)
    server = await asyncio.start_server(made.serve, ADDRESS, 443, ssl=made.context(), limit=_LARGEST)
    try:
        yield made
    finally:
        server.close()


@asynccontextmanager
async def plain_proxy() -> AsyncGenerator[int]:
    """A proxy that connects and passes bytes on; its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host, _, port = head.split()[1].decode().partition(":")
        try:
            other, its = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(_copy(reader, its), _copy(other, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


def names(hosts: Iterable[str] = (*MODELS, *BESIDE)) -> str:
    """Lines of a hosts file in which all of them are this machine."""
    return "".join(f"{ADDRESS} {name}\n" for name in hosts)
