"""python -m bench.sidecar_load: calls a TLS host, through a proxy or without one, and measures; prints a JSON object.

--host PORT            the host, `localhost` on this port
--proxy PORT           where a tunnel to it is asked for; 0: none
--trust FILE           the authority of the certificate that is shown
--connections N        that make calls at the same time
--seconds S            for so long
--kind keep            calls on connections that stay
       new             each on a new one: tunnel and handshake count
       stream          the same as keep, but answers are streams; what counts is the age of their first event
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import ssl
import time
from dataclasses import dataclass, field

import uvloop

from bench.sidecar_host import BODY, END

_TIME = re.compile(rb'"created":([0-9]+)')
TEXT = "a word and another one; " * 40


def request(serial: int, stream: bool, port: int) -> bytes:
    """Return one call of 1 KB; each has another text."""
    said = {"model": "m", "messages": [{"role": "user", "content": f"Task {serial}: {TEXT}"}], "stream": stream}
    body = json.dumps(said, separators=(",", ":")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return f"{head}Authorization: Bearer sk-bench\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass
class Load:
    """The options of a load, and its results."""

    options: argparse.Namespace
    context: ssl.SSLContext
    until: float
    took: list[float] = field(default_factory=list[float])
    """Seconds: of calls, or the ages of first events."""
    errors: list[str] = field(default_factory=list[str])
    serial: int = 0

    async def connection(self) -> None:
        """Make calls one after the other, until the time is over."""
        reader = writer = None
        while time.monotonic() < self.until:
            began = time.monotonic()
            try:
                if reader is None or writer is None:
                    reader, writer = await self.open()
                aged = await self.call(reader, writer)
            except (OSError, ValueError, EOFError) as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                if writer is not None:
                    writer.close()
                reader = writer = None
                if len(self.errors) > 50:
                    return
                continue
            self.took.append(time.monotonic() - began if aged is None else aged)
            if self.options.kind == "new":
                writer.close()
                reader = writer = None
        if writer is not None:
            writer.close()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to the host, after its handshake."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.options.proxy or self.options.host)
        if self.options.proxy:
            writer.write(f"CONNECT localhost:{self.options.host} HTTP/1.1\r\n\r\n".encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer[:16]:
                raise ValueError(answer[:200].decode("latin-1"))
        await writer.start_tls(self.context, server_hostname="localhost")
        return reader, writer

    async def call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float | None:
        """Make one call and check its answer; return the age of a stream's first event."""
        self.serial += 1
        stream = self.options.kind == "stream"
        writer.write(request(self.serial, stream, self.options.host))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"answered {head[:200].decode('latin-1')}")
        if not stream:
            if await reader.readexactly(len(BODY)) != BODY:
                raise ValueError("another answer than the host's")
            return None
        event = await reader.readuntil(b"\n\n")
        age = time.monotonic_ns()
        sent = _TIME.search(event)
        if sent is None:
            raise ValueError(f"no time in {event[:200]!r}")
        await reader.readuntil(END[-9:])
        return (age - int(sent[1])) / 1e9


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sidecar_load")
    for name in ("--host", "--proxy", "--connections"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--trust", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--kind", choices=["keep", "new", "stream"], required=True)
    options = parser.parse_args()
    began = time.monotonic()
    load = Load(options, ssl.create_default_context(cafile=options.trust), began + options.seconds)
    await asyncio.gather(*(load.connection() for _ in range(options.connections)))
    seconds, took = time.monotonic() - began, sorted(load.took) or [0.0]
    p50, p99 = took[len(took) // 2] * 1e6, took[len(took) * 99 // 100] * 1e6
    figures = {"calls": len(load.took), "seconds": seconds, "p50_us": p50, "p99_us": p99, "errors": len(load.errors)}
    print(json.dumps(figures | {"error": load.errors[0] if load.errors else None}))


if __name__ == "__main__":
    uvloop.run(main())
