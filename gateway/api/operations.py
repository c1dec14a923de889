"""Requests with a body, which change something, and transcripts: answered where they were parsed.

An operation is a plain function from the checked ids of its path and its checked body, if it has one, to the model of
its answer. Workers claim, reward, finish and send heartbeats all the time, and a second server between them and the
dispatcher would cost more than the work itself. So these requests do not pass through aiohttp, as other reading ones do
(`gateway.process.dispatch`). The table is the same (`ApiRoute`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any
from urllib.parse import unquote

from multidict import CIMultiDict
from pydantic import BaseModel

from penstock.gateway.api import compression, guard
from penstock.gateway.api.guard import Control
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import DeferredAnswer
from penstock.gateway.model.base import ActionRequest, AuthenticatedRequest
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import HttpRequest

Ids = Mapping[str, str]
"""Ids of a path by their names there, checked."""
Operation = Callable[[Control, Ids, Any], Awaitable[BaseModel | DeferredAnswer]]

_UNTYPED = ("", "application/octet-stream")
"""Content types of requests that say nothing about a body."""


def head_lines(headers: Mapping[str, str]) -> bytes:
    """The lines of a head."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()


_HEADERS = head_lines(guard.JSON)
_GOOD = b"HTTP/1.1 200 OK\r\n" + _HEADERS


class Operations:
    """Serves the operations of the control API."""

    def __init__(self, control: Control, routes: Iterable[ApiRoute]) -> None:
        """`routes`: those whose `ApiRoute.operation` is true."""
        self._control = control
        self._routes: dict[tuple[str, int], list[tuple[ApiRoute, list[str]]]] = {}
        self._running: set[asyncio.Task[None]] = set()
        for route in routes:
            segments = route.path.split("/")
            self._routes.setdefault((route.method, len(segments)), []).append((route, segments))

    def find(self, method: str, target: bytes) -> tuple[ApiRoute, dict[str, str]] | None:
        """The operation that a request asks for, and the ids in its path; None if it is none."""
        path = target.partition(b"?")[0].decode("latin-1").split("/")
        for route, segments in self._routes.get((method, len(path)), ()):
            ids: dict[str, str] = {}
            for wanted, given in zip(segments, path, strict=True):
                if wanted[:1] == "{":
                    ids[wanted[1:-1]] = unquote(given)
                elif wanted != given:
                    break
            else:
                return route, ids
        return None

    def serve(
        self, client: ClientConnection, request: HttpRequest, route: ApiRoute, ids: dict[str, str], trusted: bool
    ) -> None:
        """Begin an operation. `trusted`: the data plane has checked the caller."""
        running = asyncio.ensure_future(self._answer(client, request, route, ids, trusted))
        client.served = _RunningOperation(running, client.paused)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    @property
    def running(self) -> int:
        return len(self._running)

    async def drain(self, seconds: float) -> None:
        """Wait for running operations, for at most `seconds`."""
        if left := {*self._running, *self._control.pending_operations}:
            await asyncio.wait(left, timeout=seconds)

    async def _answer(
        self, client: ClientConnection, request: HttpRequest, route: ApiRoute, ids: dict[str, str], trusted: bool
    ) -> None:
        headers = CIMultiDict[str]([(name.decode(), value.decode("latin-1")) for name, _, value in request.headers])
        key = ""
        try:
            if not trusted:
                what = f"{route.method} {route.path}"
                key = guard.check(headers, route.path, self._control.auth, needs=route.required_role, what=what)
            content_type, body = headers.get("Content-Type", ""), request.body()
            if route.body is ActionRequest and not body and content_type in _UNTYPED and "Origin" not in headers:
                # A request without a reason and not from a web page, which would name its origin.
                content_type, body = "application/json", b"{}"
            found = await operate(self._control, route, ids, content_type, body, key)
            if isinstance(found, DeferredAnswer):
                await self._control.heavy.send_result(partial(_made, found, headers), partial(_send, client, request))
                return
            body, head = guard.json_of(found), _GOOD
            if len(body) > compression.LEAST:
                body, more = await compression.compress_body_async(headers, body)
                head += head_lines(more)
        except Exception as error:
            status, reason, more, body = guard.refusal(guard.classify(error, request.method, route.path))
            head = b"HTTP/1.1 %d %b\r\n%b%b" % (status, reason.encode(), _HEADERS, head_lines(more))
        write_answer(client, request, head, body)
        client.finish(request.keep_alive)


class _RunningOperation:
    """An operation, as its connection sees it."""

    __slots__ = ("_task", "taken")

    def __init__(self, task: asyncio.Task[None], paused: bool) -> None:
        self._task, self.taken = task, asyncio.Event()
        """`taken`: set while the client has taken everything that was written."""
        if not paused:
            self.taken.set()

    def on_client_gone(self) -> None:
        """Cancel the answer: its client has left."""
        self._task.cancel()

    def hold(self) -> None:
        """Called when the client takes a long answer slowly."""
        self.taken.clear()

    def go_on(self) -> None:
        """Called when nearly all of the answer was taken."""
        self.taken.set()


def _made(found: DeferredAnswer, headers: CIMultiDict[str]) -> tuple[bytes, bytes]:
    """Head and body of an answer."""
    body, more = compression.compress_body(headers, guard.json_of(found.make()))
    return _GOOD + head_lines(more), body


async def _send(client: ClientConnection, request: HttpRequest, made: tuple[bytes, bytes]) -> None:
    """Write the answer and return when the client has taken it."""
    running = client.served
    if isinstance(running, _RunningOperation):  # the client has not left
        write_answer(client, request, *made)
        await running.taken.wait()
        client.finish(request.keep_alive)


def write_answer(client: ClientConnection, request: HttpRequest, head: bytes, body: bytes) -> None:
    """Write an answer. `head`: its first lines."""
    close = b"" if request.keep_alive else b"Connection: close\r\n"
    client.transport.write(b"%bContent-Length: %d\r\n%b\r\n%b" % (head, len(body), close, body))


async def operate(
    control: Control, route: ApiRoute, ids: Ids, content_type: str, body: bytes, key: str = ""
) -> BaseModel | DeferredAnswer:
    """Check a request and run its operation; raises `ApiError`, `OperationRefusedError` or `TapeError`. `key`: name of
    the request's key."""
    asked = None if route.body is None else guard.body_of(content_type, body, route.body)
    if isinstance(asked, AuthenticatedRequest):
        asked.set_key(key)
    for name, value in ids.items():
        guard.check_id(name, value)
    if not route.changes:
        return await route.handler(control, ids, asked)
    # A change on the tape is followed up here even if the client has left.
    doing = asyncio.ensure_future(route.handler(control, ids, asked))
    control.pending_operations.add(doing)
    doing.add_done_callback(control.pending_operations.discard)
    return await asyncio.shield(doing)
