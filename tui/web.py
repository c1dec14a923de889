"""`penstock tui --web`: the TUI in a browser on this machine, by textual-serve.

textual-serve has no authentication and no check of origins, and its page loads a font from another host. So this module
guards it:

    listens          on 127.0.0.1 only
    link             has a token that works once and is exchanged for a cookie; every other request needs the cookie
    Host             must name the loopback and our port, so that no other name leads here (DNS rebinding)
    Origin           of a WebSocket must be ours; nothing but GET and HEAD is answered
    page             is our own; a Content-Security-Policy keeps everything on this machine
    processes        one for each tab, at most `MOST_TABS`, started with `--read-only` unless it is asked for more

From another machine: `ssh -L PORT:127.0.0.1:PORT HOST`, with one port at both ends.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import shlex
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web
from textual_serve.server import Server

from penstock.gateway.client.console import CommandError

HOST: Final = "127.0.0.1"
COOKIE: Final = "penstock_tui"
MOST_TABS: Final = 8
"""The most processes at a time."""
USED: Final = "This link has been used. Start `penstock tui --web` again; it prints a new one."
STRANGER: Final = (
    "This page opens by the link that `penstock tui --web` has printed, once. Start it again for a new one."
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TuiServer(Server):
    """The server of textual-serve behind guards."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """`command` starts the TUI; it inherits this process's environment, with the gateway's key."""
        # textual-serve annotates a path as PathLike without its parameter.
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            f"exec {shlex.join(command)}", host=HOST, port=port, title="Penstock"
        )
        self.public_url = f"http://{HOST}:{port}"
        self.templates_path = Path(__file__).with_name("web_page")
        self._token, self._cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._used = False
        self._tabs = 0

    @property
    def link(self) -> str:
        """The URL that opens the page, once."""
        return f"{self.public_url}/?token={self._token}"

    async def application(self) -> web.Application:
        """The pages of textual-serve behind the guard."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        made = await self._make_app()
        made.router.add_get("/focus.js", self._focus_script)
        made.middlewares.append(guard)
        made.on_response_prepare.append(self._add_headers)
        return made

    async def _focus_script(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(self.templates_path / "focus.js")

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing: the caller prints the link."""

    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Pass on only requests with the cookie that the link gives."""
        if request.headers.get("Host") != f"{HOST}:{self.port}":
            return _refused(421, f"This page is {self.public_url}; other names do not lead to it.")
        if request.method not in ("GET", "HEAD"):
            return _refused(405, "Only GET and HEAD are answered here.")
        # A HEAD, which some programs send to preview a link, does not use it up.
        if request.method == "GET" and request.path == "/" and "token" in request.query:
            return self._exchange(request.query["token"])
        if not _same(request.cookies.get(f"{COOKIE}_{self.port}", ""), self._cookie):
            return _refused(403, STRANGER)
        if request.path == "/ws" and request.headers.get("Origin") != self.public_url:
            return _refused(403, f"WebSockets are opened by the page at {self.public_url} only.")
        return await handler(request)

    def _exchange(self, token: str) -> web.Response:
        """Exchange the token for the cookie, once."""
        if not _same(token, self._token):
            return _refused(403, STRANGER)
        if self._used:
            return _refused(403, USED)
        self._used = True
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(f"{COOKIE}_{self.port}", self._cookie, httponly=True, samesite="Strict", path="/")
        return response

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Headers that keep everything on this machine, and out of caches."""
        policy = (
            f"default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; img-src 'self' "
            f"data:; connect-src 'self' ws://{HOST}:{self.port}; frame-ancestors 'none'; base-uri 'none'; "
            "form-action 'none'"
        )
        response.headers.update({
            "Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        })  # fmt: skip

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a tab: a process of its own, until the tab or the process ends."""
        if self._tabs >= MOST_TABS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_TABS} tabs are open already; close one.\n")
        self._tabs += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._tabs -= 1


def _same(given: str, expected: str) -> bool:
    # Odd bytes of a header come as surrogates.
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")


def listener(port: int) -> socket.socket:
    """A socket on the loopback; port 0 takes a free one. Raises `CommandError` when the port is not available."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
    except OSError as e:
        made.close()
        raise CommandError(f"--port: {HOST}:{port} cannot be had: {e.strerror}; leave it out for a free one") from None
    return made


async def serve(command: Sequence[str], port: int, ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is called with the link."""
    with listener(port) as sock:
        page = TuiServer(command, sock.getsockname()[1])
        # Without an access log, which would contain the token.
        runner = web.AppRunner(await page.application(), access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            ended = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
            ready(page.link)
            await ended.wait()
        finally:
            await runner.cleanup()
