"""Reads a release or a run whenever it may have changed, until it ends: the common part of `release watch` and
`runs watch`.

The change feed reports changes. The watcher then waits for a moment, so that many changes need one look. It waits for a
gateway that restarts, because its user wants to know the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.live import Live

from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.answers import ChangeKind
from penstock.gateway.model.foreign_text import terminal_safe_json

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

SETTLE_S: Final = 0.3
"""Seconds between a change and the look that it causes."""
AWAY_S: Final = 1.0
"""Seconds between two looks while the gateway is away."""
T = TypeVar("T")


async def poll_on_change(
    client: Client,
    look: Callable[[], Awaitable[T]],
    patience: Callable[[T], float | None],
    kinds: Sequence[ChangeKind] = (),
    names: Sequence[str] = (),
) -> AsyncGenerator[T]:
    """The result of `look`, at once and after each change of these kinds and names. `patience`: seconds until the
    next look without a change; None when it is the last. Raises `ClientError` when the first look fails, or one is
    refused."""
    cursor, changed, seen = (await client.stats(spans=0)).cursor, asyncio.Event(), False

    async def listen() -> None:
        async for _ in client.changes(cursor, kinds, names):
            changed.set()

    listening = asyncio.ensure_future(listen())
    try:
        while True:
            changed.clear()
            try:
                found = await look()
            except ClientError as error:
                if not seen or not error.temporary:
                    raise
                await _until(listening, changed, AWAY_S)
                continue
            seen = True
            yield found
            seconds = patience(found)
            if seconds is None:
                return
            await _until(listening, changed, seconds)
    finally:
        listening.cancel()


async def show(
    found: AsyncGenerator[T],
    screen: Console,
    noun: Callable[[T], BaseModel] | None,
    picture: Callable[[T], RenderableType],
    tell: Callable[[T, T | None], None],
) -> T | None:
    """Shows the results of looks until the last: a `noun` of each as JSON, else drawn in place or passed to `tell`,
    which prints lines. `tell` also gets the result before. Returns the last one."""
    before: T | None = None
    live = screen.is_terminal and noun is None
    # It is drawn anew every second, so that ages advance; this sends the gateway no request.
    drawn = Live(console=screen, get_renderable=lambda: "" if before is None else picture(before), refresh_per_second=1)
    with drawn if live else nullcontext():
        async for one in found:
            if noun is not None:
                print(terminal_safe_json(noun(one).model_dump_json(exclude_none=True)), flush=True)
            elif not live:
                tell(one, before)
            before = one
            if live:
                drawn.refresh()
    return before


async def _until(listening: asyncio.Task[None], changed: asyncio.Event, seconds: float) -> None:
    """Waits for a change and those that follow closely, at most `seconds`; raises the error that ended the
    listening."""
    waiting = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait([listening, waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if listening.done():
        listening.result()
    await asyncio.sleep(SETTLE_S)
