"""A naive proxy that hands bytes on, where Penstock will stand: shows that the harness works before there is anything
to test, and what a path in front of a server's own costs without any rewriting.

Bodies go through chunk by chunk as they come, in both directions. Headers go through as they are, but those of one
connection; `Host` is the server's, as in front of a server that checks it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

HOP = frozenset({"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
CHUNK = 64 * 1024


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP)


class ByteProxy:
    """Hands every request on to one origin, without the prefix of its path."""

    def __init__(self, origin: str, prefix: str, session: aiohttp.ClientSession) -> None:
        self._origin, self._prefix, self._session = origin, prefix, session

    async def handle(self, request: web.Request) -> web.StreamResponse:
        # Some of the suite's servers have no path, and their URL under the prefix ends with it.
        path = request.raw_path.removeprefix(self._prefix)
        if not request.raw_path.startswith(self._prefix) or path[:1] not in ("", "/", "?"):
            return web.Response(status=404)
        target = self._origin + path
        asked = self._session.request(
            request.method,
            target,
            headers=_end_to_end(request.headers),
            data=request.content.iter_chunked(CHUNK) if request.can_read_body else None,
            allow_redirects=False,
        )
        async with asked as answer:
            response = web.StreamResponse(status=answer.status, headers=_end_to_end(answer.headers))
            if (length := answer.headers.get("Content-Length")) is not None:
                response.headers["Content-Length"] = length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


@asynccontextmanager
async def proxied(url: str, prefix: str = "") -> AsyncGenerator[str]:
    """The URL of a server behind a proxy on a free port, under a prefix of the path."""
    parts = urlsplit(url)
    # A client that reads a stream without end is no reason to give up, and answers stay compressed as they are.
    patience = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=patience, auto_decompress=False) as session:
        app = web.Application(client_max_size=0)
        app.router.add_route("*", "/{path:.*}", ByteProxy(f"{parts.scheme}://{parts.netloc}", prefix, session).handle)
        # A client that leaves ends its request to the server, too: that is how calls are cancelled.
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            yield f"http://localhost:{port}{prefix}{parts.path}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def prefixed(url: str) -> AsyncGenerator[str]:
    """The same under a path like those of a gateway that serves many servers."""
    async with proxied(url, "/mcp/server") as found:
        yield found
