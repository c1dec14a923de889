"""A model host with TLS: it keeps the bytes of every request and answers chat completions, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fakes.raw import chunk, events_head, reply

from examples.demo.model import sse
from penstock.sidecar.intercept.certificate_store import CertificateStore

ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


@dataclass
class TlsHost:
    """What it was asked."""

    port: int = 0
    trust: Path = Path()
    """File with the authority that its certificate is of."""
    asked: list[bytes] = field(default_factory=list[bytes])

    @property
    def name(self) -> str:
        """As clients call it."""
        return f"localhost:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                found = _LENGTH.search(head)
                body = await reader.readexactly(int(found[1])) if found else b""
                self.asked.append(head + body)
                self._answer(writer, b'"stream":true' in body.replace(b" ", b""))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, writer: asyncio.StreamWriter, stream: bool) -> None:
        if not stream:
            writer.write(reply(200, json.dumps(ANSWER).encode()))
            return
        writer.write(events_head())
        for text in ("hel", "lo"):
            choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
            made = ANSWER | {"object": "chat.completion.chunk", "choices": [choice], "usage": None}
            writer.write(chunk(sse(made)))
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))


@asynccontextmanager
async def tls_host(folder: Path) -> AsyncGenerator[TlsHost]:
    """A host on a free port of localhost."""
    authority, made = CertificateStore.create_in_process(["localhost"]), TlsHost()
    made.trust = folder / "host-ca.pem"
    made.trust.write_text(authority.pem)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=authority.context("localhost"))
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
