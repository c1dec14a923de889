"""Commands of whoever runs a gateway: `forget` and `hold`, `pause`, `drain` and `resume`, `index rebuild`, `webhook
test`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.console.commands.audit import ACTION_DEFAULTS, ActionOptions
from penstock.console.commands.nouns import list_rows
from penstock.console.commands.rollouts import apply_to_each, fail_if_refused
from penstock.console.commands.terminal import show
from penstock.console.views.noun import NounSelection
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    Json,
    RolloutSelection,
    Url,
    ids_or_filter,
    note,
    with_client,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.base import ActionRequest
    from penstock.gateway.model.queue import QueueState, QueueStatus
    from penstock.gateway.model.state import RetentionStatus

POLL_S = 0.2
"""Seconds between two requests for the status."""
Flag = Annotated[bool, Parameter(negative="")]


def forget(
    *rollouts: RolloutSelection,
    yes: Flag = False,
    wait: bool = True,
    said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Take rollouts off the tape for good: what they were given, their calls, rewards and outcomes.

    Of those that a filter finds, those are taken that have ended; that needs --yes. They are out of sight at once. Then
    their bytes are deleted, from the tape and from the index, and the command waits until nothing is left of them.

    Parameters
    ----------
    yes
        Forget what a filter finds.
    wait
        Whether to wait until nothing is left.
    """
    from penstock.console.views import administration
    from penstock.gateway.model.rollout import FINAL

    async def ask(client: Client) -> None:
        rids = found or [one.id async for one in client.rollouts(filter) if one.status in FINAL]
        if not rids:
            raise CommandError("No rollout matches that has ended.", 1)
        if not found and not yes:
            raise CommandError(
                f"{len(rids):,} rollouts that have ended match, such as {rids[0]}: add --yes to forget them for good", 2
            )
        gone, refused = await apply_to_each(rids, lambda rid: client.forget(rid, reason))
        if gone:
            show(gone, json, lambda: administration.forgotten(gone))
        if gone and wait:
            status = await _done(client)
            if not json:
                print(administration.wiped(status))
        fail_if_refused(refused, rids, "forgotten")

    found, filter = ids_or_filter(rollouts)
    reason = said.request()
    with_client(gateway, ask)


async def _done(client: Client) -> RetentionStatus:
    """Waits until nothing is left of forgotten rollouts, or the deletion is stuck; returns the status."""
    while True:
        status = await client.retention()
        if status.done or status.stuck:
            return status
        await asyncio.sleep(POLL_S)


def hold(
    *rollouts: RolloutSelection,
    lift: Flag = False,
    said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Keep rollouts, whatever the rules of retention say, until that is lifted.

    Nobody can forget them meanwhile. Without a rollout or a filter it lists those that are kept.

    Parameters
    ----------
    lift
        Lift the hold.
    """
    from penstock.console.views import administration

    async def ask(client: Client) -> None:
        rids: Sequence[str] = found or [one.id async for one in client.rollouts(filter)]
        if lift and not found:
            held = {one.rollout for one in await client.holds()}
            rids = [rid for rid in rids if rid in held]
        if not rids:
            raise CommandError("No rollout matches that is kept." if lift else "No rollout matches.", 1)
        change = client.lift_hold if lift else client.hold_rollout
        changed, refused = await apply_to_each(rids, lambda rid: change(rid, reason))
        if changed:
            show(changed, json, lambda: administration.held(changed, lift))
        fail_if_refused(refused, rids, "kept" if not lift else "let go")

    if not rollouts and lift:
        raise CommandError("say which: penstock hold --lift ROLLOUT, or a filter", 2)
    if not rollouts:
        list_rows("holds", NounSelection(), json, gateway)
        return
    found, filter = ids_or_filter(rollouts)
    reason = said.request()
    with_client(gateway, ask)


# Commands that open, pause and drain the queue.


def pause(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out no work until `penstock resume`; what runs goes on."""
    _set("paused", said.request(), json, gateway)


def resume(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out work again."""
    _set("open", said.request(), json, gateway)


def drain(*, said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS, json: Json = False, gateway: Url = LOCAL) -> None:
    """Hand out no work, send workers home, and wait until nothing runs."""
    from penstock.gateway.model.toml import pluralized

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

    from penstock.gateway.model.rollout import LIVE

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


# `penstock index rebuild` makes the index anew.


def rebuild(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """Make the index anew from the tape.

    The old one is deleted; until the new one has caught up filters scan the tape.
    """
    from penstock.console.views import administration

    async def ask(client: Client) -> None:
        view = await client.rebuild_index()
        show([view], json, lambda: administration.index(view))

    with_client(gateway, ask)


# `penstock webhook test`: sends a test to a webhook.

Name = Annotated[str, Parameter(help="Name of a webhook of penstock.toml.")]


def send_test(webhook: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Send a webhook a signed test, once, and say what it answers."""
    from penstock.console.views import administration

    async def ask(client: Client) -> None:
        tried = await client.test_webhook(webhook)
        show([tried], json, lambda: administration.tried(tried))
        if tried.error:
            raise CommandError(f"webhook {webhook} does not take it: {tried.error}")

    with_client(gateway, ask)
