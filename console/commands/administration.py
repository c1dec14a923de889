"""Commands of whoever runs a gateway: they change rollouts (`cancel`, `requeue`, `reward`, `forget`, `hold`) and
diagnose them (`doctor`), open and close the queue, and see to the index, webhooks and prices.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from penstock.console.commands.terminal import ACTION_DEFAULTS, ActionOptions, show
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    NO_MATCH,
    CommandError,
    Json,
    Limit,
    RolloutSelection,
    Url,
    ids_or_filter,
    limited_rows,
    note,
    only_attempt,
    pairs,
    target_of,
    validated_model,
    with_asked,
    with_client,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.base import ActionRequest
    from penstock.gateway.model.queue import QueueState, QueueStatus
    from penstock.gateway.model.rollout import Rollout
    from penstock.gateway.model.state import RetentionStatus

Flag = Annotated[bool, Parameter(negative="")]
Value = Annotated[float | None, Parameter(allow_leading_hyphen=True)]
Dimensions = Annotated[list[str] | None, Parameter(name="--dimension", negative="")]
Source = Literal["runner", "judge", "user"]
NONE_ENDED = "No rollout matches that came from the queue and has ended."
POLL_S = 0.2
"""Seconds between two requests for the status."""
T = TypeVar("T")


# -- rollouts ----


def cancel(
    *rollouts: RolloutSelection,
    said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Stop rollouts, whether they wait or run.

    Of those that a filter finds, those are taken that have not ended.
    """
    from penstock.gateway.model.rollout import FINAL

    async def ask(client: Client) -> None:
        rids = found or [r.id async for r in client.rollouts(filter) if r.status not in FINAL]
        await _move(
            rids, lambda rid: client.cancel(rid, reason), "cancelled", json, "No rollout matches that has not ended."
        )

    found, filter = ids_or_filter(rollouts)
    reason = said.request()
    with_client(gateway, ask)


def requeue(
    *rollouts: RolloutSelection,
    said: Annotated[ActionOptions, FLAT] = ACTION_DEFAULTS,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Queue rollouts again that have ended.

    Of those that a filter finds, those are taken that came from the queue and have ended.
    """
    from penstock.gateway.model.rollout import FINAL

    async def ask(client: Client) -> None:
        ended = (r async for r in client.rollouts(filter) if r.status in FINAL and r.origin == "queued")
        rids = found or [r.id async for r in ended]
        await _move(rids, lambda rid: client.requeue(rid, reason), "queued again", json, NONE_ENDED)

    found, filter = ids_or_filter(rollouts)
    reason = said.request()
    with_client(gateway, ask)


async def _move(
    rids: Sequence[str], act: Callable[[str], Awaitable[Rollout]], done: str, json: bool, none: str
) -> None:
    """Applies `act` to all rollouts, as far as possible; raises `CommandError` at the end if some were refused."""
    from penstock.console.views import queue

    moved, refused = await apply_to_each(rids, act)
    if moved or not refused:
        show(moved, json, lambda: queue.status_list(moved), none)
    fail_if_refused(refused, rids, done)


def reward(
    target: str,
    value: Value = None,
    /,
    *,
    reason: str | None = None,
    dimension: Dimensions = None,
    key: str | None = None,
    source: Source = "user",
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Say how well an attempt, or one call of it, went.

    Parameters
    ----------
    target
        RID, RID/ATTEMPT, or RID/ATTEMPT#SEQUENCE for one call. The attempt may be left out when there is one.
    value
        The reward. May be left out when dimensions are given.
    reason
        Why, for a person.
    dimension
        A named score, as NAME=VALUE; may be given several times.
    key
        Makes it safe to send again: of one attempt's rewards with the same key only the first is kept.
    source
        Who says so.
    """
    from penstock.console.views import queue
    from penstock.gateway.model.rollout import Judgement

    rid, attempt, sequence = target_of(target)
    scores = pairs(dimension or [], "--dimension")
    if value is None and not scores:
        raise CommandError(f"say what it is worth: penstock reward {target} 1, or --dimension NAME=VALUE", 2)
    given = {"value": value, "dimensions": scores, "source": source, "reason": reason, "span": sequence, "key": key}
    judgement = validated_model(Judgement, **{name: one for name, one in given.items() if one is not None})

    async def ask(client: Client) -> None:
        aid = attempt or await only_attempt(client, rid, "" if sequence is None else f"#{sequence}")
        kept = await client.reward(rid, aid, judgement)
        show([kept], json, lambda: queue.rewarded(f"{rid}/{aid}", kept))

    with_client(gateway, ask)


def doctor(
    *rollouts: RolloutSelection, model: str | None = None, limit: Limit = 100, json: Json = False, gateway: Url = LOCAL
) -> None:
    """Say of each call if it can be trained on, else why.

    One rollout is told call by call, several in a line each.

    Parameters
    ----------
    model
        The model that is trained; the one that most calls of a rollout asked for if not given.
    limit
        How many rollouts of a filter at most, the newest.
    """
    from penstock.console.views import queue
    from penstock.gateway.client.connection import map_concurrently

    async def ask(client: Client) -> None:
        rids = found or [r.id for r in await limited_rows(limit, lambda most: client.rollouts(filter, most))]
        told = await map_concurrently(lambda rid: client.diagnosis(rid, model), rids)
        show(told, json, lambda: queue.diagnoses(told), NO_MATCH)

    found, filter = ids_or_filter(rollouts)
    with_client(gateway, ask)


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
            raise CommandError(with_asked("No rollout matches that has ended."), 1)
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
    import asyncio

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
        from penstock.console.commands.nouns import list_rows
        from penstock.console.views.noun import NounSelection

        list_rows("holds", NounSelection(), json, gateway)
        return
    found, filter = ids_or_filter(rollouts)
    reason = said.request()
    with_client(gateway, ask)


def fail_if_refused(refused: Sequence[str], rids: Sequence[str], done: str) -> None:
    """Raises `CommandError` if some rollouts were refused; `done`: the participle for the message, such as
    `cancelled`."""
    if refused and len(rids) == 1:
        raise CommandError(refused[0])
    if refused:
        raise CommandError(f"{len(refused):,} of {len(rids):,} rollouts could not be {done}: {refused[0]}")


async def apply_to_each(rids: Sequence[str], act: Callable[[str], Awaitable[T]]) -> tuple[list[T], list[str]]:
    """(the result of each rollout, the message of each refusal)."""
    from penstock.gateway.client.client import ClientError
    from penstock.gateway.client.connection import map_concurrently

    refused: list[str] = []

    async def attempt(rid: str) -> list[T]:
        try:
            return [await act(rid)]
        except ClientError as e:
            if e.temporary:
                raise
            refused.append(str(e))
            return []

    return [one for some in await map_concurrently(attempt, rids) for one in some], refused


# -- the queue ----


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


# -- the index and webhooks ----


Name = Annotated[str, Parameter(help="Name of a webhook of penstock.toml.")]


def rebuild(*, json: Json = False, gateway: Url = LOCAL) -> None:
    """Make the index anew from the tape.

    The old one is deleted; until the new one has caught up filters scan the tape.
    """
    from penstock.console.views import administration

    async def ask(client: Client) -> None:
        view = await client.rebuild_index()
        show([view], json, lambda: administration.index(view))

    with_client(gateway, ask)


def send_test(webhook: Name, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """Send a webhook a signed test, once, and say what it answers."""
    from penstock.console.views import administration

    async def ask(client: Client) -> None:
        tried = await client.test_webhook(webhook)
        show([tried], json, lambda: administration.tried(tried))
        if tried.error:
            raise CommandError(f"webhook {webhook} does not take it: {tried.error}")

    with_client(gateway, ask)


# -- prices ----


def prices(*, builtin: Flag = False, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show the prices that costs are computed with.

    Below them it says which models were called that have none.

    Parameters
    ----------
    builtin
        Print the file of prices that comes with Penstock, to be edited and named in penstock.toml.
    """
    from penstock.console.commands.nouns import list_rows
    from penstock.console.views.noun import NounSelection
    from penstock.gateway.model.prices import BUILTIN

    if builtin:
        sys.stdout.write(BUILTIN.read_text())
        return
    list_rows("prices", NounSelection(), json, gateway)


def update_prices(
    file: Path, /, *, to: Path | None = None, config: Path | None = None, as_of: str | None = None,
    dry_run: Flag = False, json: Json = False,
) -> None:  # fmt: skip
    """Take prices from a newer list.

    It says what they change. Prices that have changed keep their old row, which prices older calls. Rows without a
    source are yours and stay as they are. The gateway reads the list when it starts.

    Parameters
    ----------
    file
        A list in Penstock's format, or LiteLLM's public JSON (model_prices_and_context_window.json).
    to
        The list to change. The one that penstock.toml names if not given; it begins with what comes with Penstock.
    config
        The settings, where they are not in penstock.toml.
    as_of
        The day by which LiteLLM's list was right, such as 2026-11-29. That of the file if not given.
    dry_run
        Only say what it would change.
    """
    from penstock.console.commands.serve import config_file
    from penstock.console.views.administration import differences
    from penstock.gateway.config import ConfigError, load
    from penstock.gateway.model import price_lists
    from penstock.gateway.model.prices import Prices

    try:
        target = to or load(config_file(config)).prices
        if target is None:
            raise CommandError(
                'prices is not in penstock.toml: add prices = "prices.toml", or say by --to which list', 2
            )
        new = price_lists.load(file, None if as_of is None else date.fromisoformat(as_of))
        found = price_lists.merge_price_lists(Prices(target if target.exists() else None).file, new)
    except ConfigError as error:
        raise CommandError(str(error), 2) from None
    except ValueError:
        raise CommandError(f"--as-of: {as_of!r} is no day: write it as 2026-11-29", 2) from None
    if not dry_run:
        _write(target, price_lists.render_toml(found.file))
    show(found.differences, json, lambda: differences(found.differences))
    note(f"{'This would change' if dry_run else 'Written to'} {target}, which is as of {found.file.as_of}.")


def _write(target: Path, text: str) -> None:
    new = target.with_name(f".{target.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(target)
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}") from None
