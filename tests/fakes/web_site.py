"""An aiohttp application on a port of this machine: how the servers of tests begin and end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler


def everywhere(handle: Handler) -> web.Application:
    """One that answers so whatever it is asked for, however much that is."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def event_stream(request: web.Request) -> web.StreamResponse:
    """The answer to a request: a stream of events, which has begun."""
    made = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await made.prepare(request)
    return made


@asynccontextmanager
async def site(app: web.Application, port: int = 0, unpacks: bool = True) -> AsyncGenerator[str]:
    """Its URL, while it serves; by default on a free port. `unpacks`: whether it sees bodies without their content
    encoding."""
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, auto_decompress=unpacks
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
