"""Commands about single rollouts: stopping and repeating them, judging them, and asking what they are good for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gateway.commands.common import (
    LOCAL,
    PARALLEL,
    Failure,
    Filter,
    Json,
    Url,
    made,
    only_attempt,
    pairs,
    show,
    target_of,
    with_client,
)

if TYPE_CHECKING:
    from gateway.client import Client
    from gateway.model import Rollout, RolloutSummary

Value = Annotated[float | None, Parameter(allow_leading_hyphen=True)]
Dimensions = Annotated[list[str] | None, Parameter(name="--dimension", negative="")]
Source = Literal["runner", "judge", "user"]


def cancel(*rollouts: str, filter: Filter = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Stop rollouts, whether they wait or run.

    Parameters
    ----------
    rollouts
        Their names. Those that a filter finds are taken if they have not ended.
    """
    from gateway.lifecycle import FINAL

    async def ask(client: Client) -> None:
        rids = await _named(client, rollouts, filter, lambda rollout: rollout.status not in FINAL)
        await _move(rids, client.cancel, "cancelled", json)

    with_client(gateway, ask)


def requeue(*rollouts: str, filter: Filter = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Queue rollouts again that have ended.

    Parameters
    ----------
    rollouts
        Their names. Those that a filter finds are taken if they came from the queue and have ended.
    """
    from gateway.lifecycle import FINAL

    async def ask(client: Client) -> None:
        ended = await _named(client, rollouts, filter, lambda r: r.status in FINAL and r.origin == "queued")
        await _move(ended, client.requeue, "queued again", json)

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
    from gateway.commands import pictures
    from gateway.model import Judgement

    rid, attempt, sequence = target_of(target)
    scores = pairs(dimension or [], "--dimension")
    said = {"value": value, "dimensions": scores, "source": source, "reason": reason, "span": sequence, "key": key}
    judgement = made(Judgement, **{name: given for name, given in said.items() if given is not None})

    async def ask(client: Client) -> None:
        aid = attempt or await only_attempt(client, rid, "" if sequence is None else f"#{sequence}")
        kept = await client.reward(rid, aid, judgement)
        show([kept], json, lambda: pictures.rewarded(f"{rid}/{aid}", kept))

    with_client(gateway, ask)


def doctor(rollout: str, /, *, model: str | None = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Say of each call whether it can be trained on and, if not, why.

    Parameters
    ----------
    rollout
        Its name.
    model
        The model that is trained; the one that most calls asked for if not given.
    """
    from gateway.commands import pictures

    async def ask(client: Client) -> None:
        found = await client.diagnosis(rollout, model)
        show([found], json, lambda: pictures.diagnosis(found))

    with_client(gateway, ask)


async def _named(
    client: Client, rids: Sequence[str], filter: str | None, wanted: Callable[[RolloutSummary], bool]
) -> list[str]:
    """The rollouts that were named, and those of a filter that are wanted."""
    if not rids and filter is None:
        raise Failure("say which rollouts, by their names or by --filter", 2)
    found = [r.id async for r in client.rollouts(filter) if wanted(r)] if filter is not None else []
    return list(dict.fromkeys([*rids, *found]))


async def _move(rids: Sequence[str], act: Callable[[str], Awaitable[Rollout]], done: str, json: bool) -> None:
    """Do the same to all of them, as far as they can be; says at the end if some could not."""
    from gateway.commands import pictures

    moved, refused = await _each(rids, act)
    show(moved, json, lambda: pictures.moved(moved))
    if refused:
        raise Failure(f"{len(refused):,} of {len(rids):,} rollouts could not be {done}: {refused[0]}")


async def _each(rids: Sequence[str], act: Callable[[str], Awaitable[Rollout]]) -> tuple[list[Rollout], list[str]]:
    import asyncio

    from gateway.client import ClientError

    async def attempt(rid: str) -> Rollout | str:
        try:
            return await act(rid)
        except ClientError as e:
            if e.passing:
                raise
            return str(e)

    ends: list[Rollout | str] = []
    for at in range(0, len(rids), PARALLEL):
        ends += await asyncio.gather(*map(attempt, rids[at : at + PARALLEL]))
    return [end for end in ends if not isinstance(end, str)], [end for end in ends if isinstance(end, str)]
