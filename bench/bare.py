"""The yardstick: the reverse proxy one writes first. aiohttp on both sides, uvloop, nothing recorded.

python -m bench.bare PORT UPSTREAM
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

SESSION = web.AppKey("session", ClientSession)
UPSTREAM = web.AppKey("upstream", str)
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"}


async def forward(request: web.Request) -> web.StreamResponse:
    """Forward one call: the request is read whole, the response is passed on as it comes."""
    url = request.app[UPSTREAM] + request.raw_path
    headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
    body = await request.read()
    async with request.app[SESSION].request(request.method, url, headers=headers, data=body) as upstream:
        kept = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
        response = web.StreamResponse(status=upstream.status, headers=kept)
        await response.prepare(request)
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
        await response.write_eof()
        return response


async def session(app: web.Application) -> AsyncIterator[None]:
    """Provide one client session without a limit on connections."""
    connector = TCPConnector(limit=0)
    async with ClientSession(connector=connector, auto_decompress=False, timeout=ClientTimeout(total=None)) as client:
        app[SESSION] = client
        yield


def main() -> None:
    app = web.Application(client_max_size=1 << 30)
    app[UPSTREAM] = sys.argv[2]
    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", forward)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()
