"""The typed client for synchronous code: the same methods, and each waits for its answer.

    with SyncClient() as client:
        for span in client.spans("my-rollout", filter="status:failed"): ...
        transcript = client.transcript("my-rollout")

There is one client, the asynchronous one. Here it runs on the event loop of a thread, and every method below is made
from the client's own, with its parameters and its answer: type checkers and editors see both. Several threads may use
it, also where an event loop runs already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast, overload

from penstock.gateway.client.client import Client

P = ParamSpec("P")
T = TypeVar("T")


@overload
def _waited(
    method: Callable[Concatenate[Client, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[SyncClient, P], T]: ...
@overload
def _waited(
    method: Callable[Concatenate[Client, P], AsyncIterator[T]],
) -> Callable[Concatenate[SyncClient, P], Generator[T]]: ...
def _waited(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls one of `Client` and waits for its answer, or for each item where it iterates."""

    @functools.wraps(method)
    def answer(self: SyncClient, *args: Any, **named: Any) -> Any:
        return self.wait(method(self.client, *args, **named))

    @functools.wraps(method)
    def iterate(self: SyncClient, *args: Any, **named: Any) -> Generator[Any]:
        return self.each(method(self.client, *args, **named))

    return iterate if inspect.isasyncgenfunction(method) else answer


class SyncClient:
    """A connection to a gateway's control API. Use it as a context manager."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        """`url`, `key`: as `Client` has them."""
        self.client = Client(url, key)
        """The asynchronous client. Only the thread of this object may use it: see `wait`."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    def __enter__(self) -> Self:
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._live(ready),), name="penstock", daemon=True)
        self._thread.start()
        ready.result()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None and self._loop is not None and self._end is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    async def _live(self, ready: Future[None]) -> None:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.client)
            except Exception as e:
                ready.set_exception(e)
                return
            self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
            ready.set_result(None)
            await self._end.wait()
            self._loop = None

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine that uses `client` on its event loop, and returns the result."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("use `with SyncClient(...)`")
        answer = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return answer.result()
        finally:
            answer.cancel()  # if the wait was interrupted, the coroutine is cancelled

    def each(self, pieces: AsyncGenerator[T]) -> Generator[T]:
        """Runs an asynchronous generator that uses `client`, and yields its items."""
        end = object()
        try:
            while (piece := self.wait(anext(pieces, end))) is not end:
                yield cast("T", piece)
        finally:
            with suppress(RuntimeError):  # if the wait was interrupted, it still runs, and ends when it is cancelled
                self.wait(pieces.aclose())

    # Reading
    rollouts = _waited(Client.rollouts)
    rollout_page = _waited(Client.rollout_page)
    rollouts_by_id = _waited(Client.rollouts_by_id)
    filter_fields = _waited(Client.filter_fields)
    spans = _waited(Client.spans)
    recent_spans = _waited(Client.recent_spans)
    prices = _waited(Client.prices)
    budgets = _waited(Client.budgets)
    forget = _waited(Client.forget)
    hold_rollout = _waited(Client.hold_rollout)
    lift_hold = _waited(Client.lift_hold)
    retention = _waited(Client.retention)
    holds = _waited(Client.holds)
    forgotten = _waited(Client.forgotten)
    search = _waited(Client.search)
    rollout = _waited(Client.rollout)
    diagnosis = _waited(Client.diagnosis)
    tools = _waited(Client.tools)
    tool_list = _waited(Client.tool_list)
    attempts = _waited(Client.attempts)
    span = _waited(Client.span)
    transcript = _waited(Client.transcript)
    request_body = _waited(Client.request_body)
    response_body = _waited(Client.response_body)
    exchanges = _waited(Client.exchanges)
    whole_rollouts = _waited(Client.whole_rollouts)
    stats = _waited(Client.stats)
    breakdown = _waited(Client.breakdown)
    unread = _waited(Client.unread)
    readiness = _waited(Client.readiness)
    whoami = _waited(Client.whoami)
    audit_log = _waited(Client.audit_log)
    make_token = _waited(Client.make_token)
    changes = _waited(Client.changes)
    digests = _waited(Client.digests)
    change_page = _waited(Client.change_page)

    # Work
    enqueue = _waited(Client.enqueue)
    claim = _waited(Client.claim)
    heartbeat = _waited(Client.heartbeat)
    finish = _waited(Client.finish)
    cancel = _waited(Client.cancel)
    requeue = _waited(Client.requeue)
    reward = _waited(Client.reward)
    feedback = _waited(Client.feedback)
    add_events = _waited(Client.add_events)
    queue = _waited(Client.queue)
    set_queue = _waited(Client.set_queue)
    workers = _waited(Client.workers)

    # Releases
    resources = _waited(Client.resources)
    resource_list = _waited(Client.resource_list)
    resource = _waited(Client.resource)
    needed_versions = _waited(Client.needed_versions)
    add_version = _waited(Client.add_version)
    start_release = _waited(Client.start_release)
    releases = _waited(Client.releases)
    release = _waited(Client.release)
    decide = _waited(Client.decide)
    claim_rehearsals = _waited(Client.claim_rehearsals)
    audit = _waited(Client.audit)
    forecast = _waited(Client.forecast)
    assignments = _waited(Client.assignments)
    pins = _waited(Client.pins)

    # Upstreams
    upstreams = _waited(Client.upstreams)
    upstream_list = _waited(Client.upstream_list)
    pause_upstream = _waited(Client.pause_upstream)
    open_upstream = _waited(Client.open_upstream)

    # Webhooks
    webhooks = _waited(Client.webhooks)
    deliveries = _waited(Client.deliveries)
    test_webhook = _waited(Client.test_webhook)

    # The index
    index = _waited(Client.index)
    sql = _waited(Client.sql)
    sql_views = _waited(Client.sql_views)
    rebuild_index = _waited(Client.rebuild_index)

    # Policies
    waiting = _waited(Client.waiting)
    answer_waiting = _waited(Client.answer_waiting)
    try_policy = _waited(Client.try_policy)

    # Training runs
    start_run = _waited(Client.start_run)
    add_points = _waited(Client.add_points)
    add_run_events = _waited(Client.add_run_events)
    change_run = _waited(Client.change_run)
    finish_run = _waited(Client.finish_run)
    runs = _waited(Client.runs)
    run = _waited(Client.run)
    curves = _waited(Client.curves)
    points = _waited(Client.points)
    run_events = _waited(Client.run_events)
    definitions = _waited(Client.definitions)
    server_definitions = _waited(Client.server_definitions)
    approve_definitions = _waited(Client.approve_definitions)
