"""python -m bench.sidecar_host FOLDER: a model host with TLS, as fast as Python can be one.

It writes its authority into the folder, prints its port, and answers calls on `localhost`. A stream has an event at
once, with the time at which it was sent, and its end after PAUSE seconds: a sidecar that waits for the whole stream
shows. `GET /` returns the number of answered calls.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from pathlib import Path

import uvloop

from penstock.sidecar.intercept.certificate_store import CertificateStore

PAUSE = 0.02
ANSWER = {
    "id": "c-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "word " * 80}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 200, "completion_tokens": 80, "total_tokens": 280},
}
BODY = json.dumps(ANSWER).encode()
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = '{"id":"c-1","object":"chat.completion.chunk","created":%d,"model":"m","choices":[]}'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)


class Host:
    """The handler of all connections, with the number of answered calls."""

    def __init__(self) -> None:
        self.answered = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the calls of one connection."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith(b"GET"):
                    said = str(self.answered).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(said), said))
                    continue
                self.answered += 1
                if b'"stream":true' in body:
                    event = b"data: %b\n\n" % (EVENT % time.monotonic_ns()).encode()
                    writer.write(STREAM + b"%x\r\n%b\r\n" % (len(event), event))
                    await asyncio.sleep(PAUSE)
                    writer.write(END)
                else:
                    writer.write(WHOLE)
        except (asyncio.IncompleteReadError, OSError):
            writer.close()


async def main() -> None:
    """Serve on a free port until killed."""
    authority = CertificateStore.create_in_process(["localhost"])
    (Path(sys.argv[1]) / "host-ca.pem").write_text(authority.pem)
    server = await asyncio.start_server(Host().serve, "127.0.0.1", 0, ssl=authority.context("localhost"))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
