"""Commands that open, pause and drain the queue."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from penstock.console.commands.audit import ACTION_DEFAULTS, ActionOptions
from penstock.console.commands.terminal import show
from penstock.gateway.client.console import FLAT, LOCAL, Json, Url, note, with_client

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.audit import ActionRequest
    from penstock.gateway.model.queue import QueueState, QueueStatus


def pause(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out no work until `penstock resume`; what runs goes on."""
    _set("paused", said.request(), json, gateway)


def resume(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out work again."""
    _set("open", said.request(), json, gateway)


def drain(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out no work, send workers home, and wait until nothing runs."""
    from penstock.gateway.model.validation_messages import pluralized

    reason = said.request()

    async def ask(client: Client) -> None:
        cursor = (await client.stats(spans=0)).cursor
        before = await client.set_queue("draining", reason)
        if before.claimed and not json:
            note(f"Waiting for {pluralized(before.claimed, 'attempt')} to end; `penstock workers` lists them.")
        _show(await _until_idle(client, cursor), json)

    with_client(gateway, ask)


async def _until_idle(client: Client, cursor: int) -> QueueStatus:
    """Waits until no worker holds an attempt: requests the status again whenever one has ended since `cursor`."""
    from contextlib import aclosing

    from penstock.gateway.model.lifecycle import LIVE

    status = await client.queue()
    async with aclosing(client.changes(cursor, ["attempt"])) as changes:
        while status.claimed:
            change = await anext(changes)
            if change.attempt is not None and change.attempt.status not in LIVE:
                status = await client.queue()
    return status


def _set(state: QueueState, said: ActionRequest, json: bool, url: str) -> None:
    async def ask(client: Client) -> None:
        _show(await client.set_queue(state, said), json)

    with_client(url, ask)


def _show(status: QueueStatus, json: bool) -> None:
    from penstock.console.views import queue

    show([status], json, lambda: queue.queue(status, time.time_ns()))
