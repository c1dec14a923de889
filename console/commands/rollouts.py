"""Commands about single rollouts: cancel, requeue, reward, and diagnose them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from cyclopts import Parameter

from penstock.console.commands.audit import ACTION_DEFAULTS, ActionOptions
from penstock.console.commands.terminal import show
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
    only_attempt,
    pairs,
    target_of,
    validated_model,
    with_client,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.rollout import Rollout

Value = Annotated[float | None, Parameter(allow_leading_hyphen=True)]
Dimensions = Annotated[list[str] | None, Parameter(name="--dimension", negative="")]
NONE_ENDED = "No rollout matches that came from the queue and has ended."
Source = Literal["runner", "judge", "user"]
T = TypeVar("T")


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


async def _move(
    rids: Sequence[str], act: Callable[[str], Awaitable[Rollout]], done: str, json: bool, none: str
) -> None:
    """Applies `act` to all rollouts, as far as possible; raises `CommandError` at the end if some were refused."""
    from penstock.console.views import queue

    moved, refused = await apply_to_each(rids, act)
    if moved or not refused:
        show(moved, json, lambda: queue.status_list(moved), none)
    fail_if_refused(refused, rids, done)


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
