"""Retention for readers: rules, holds and forgotten rollouts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.console.views.noun import LimitedSelection, NounRows, NounSelection, NounView, all_rows, limited, only_row
from penstock.console.views.table import Column
from penstock.console.views.text import moment, plain, size
from penstock.gateway.model.retention import RetentionStatus
from penstock.gateway.model.retention_records import ForgottenRollout, RetentionHold
from penstock.gateway.model.validation_messages import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

_NAMED: Final = 3
"""Maximum number of rollouts that are named; more are counted."""


def _status(view: RetentionStatus, now_ns: int) -> str:
    """The rules and the progress of retention, in a few lines."""
    lines = [f"forget    {rule}" for rule in view.rules]
    if view.keep_bytes is not None:
        lines.append(f"forget    the oldest, while the tape uses more than {size(view.keep_bytes)}")
    if not lines:
        lines.append("forget    nothing by itself: penstock.toml has neither [[retention]] nor tape.keep_bytes")
    lines.append(f"tape      {size(view.used_bytes)} in use of a file of {size(view.file_bytes)}")
    by_rule = f", {view.retired:,} of them by rules since the gateway started" if view.retired else ""
    lines.append(f"forgotten {pluralized(view.forgotten, 'rollout')}{by_rule}")
    lines.append(f"left      {_left(view)}")
    lines += [f"stuck     {why}" for why in (view.stuck, view.full) if why]
    return "\n".join(lines)


def _left(view: RetentionStatus) -> str:
    if view.done:
        return "nothing of what was forgotten"
    left: list[str] = []
    if view.wiping:
        left.append(f"calls of {pluralized(view.wiping, 'rollout')}")
    if view.overwriting:
        left.append("bytes in free parts of the file, until they are overwritten")
    if view.in_index is None:
        left.append("perhaps something in the index, which has not caught up")
    elif view.in_index:
        left.append(f"{pluralized(view.in_index, 'rollout')} in files of the index")
    return "; ".join(left)


def forgotten(gone: Sequence[ForgottenRollout]) -> str:
    """A sentence naming the rollouts that were removed from the tape."""
    names = ", ".join(one.rollout for one in gone) if len(gone) <= _NAMED else pluralized(len(gone), "rollout")
    return f"forgotten: {names}"


def wiped(view: RetentionStatus) -> str:
    """A sentence with the data of forgotten rollouts that is still left after waiting for its deletion."""
    return f"left: {_left(view)}" if not view.stuck else f"not done yet: {view.stuck}"


def held(changed: Sequence[RetentionHold], lifted: bool) -> str:
    """A sentence naming the rollouts that are kept from now on, or not any more."""
    names = ", ".join(one.rollout for one in changed) if len(changed) <= _NAMED else pluralized(len(changed), "rollout")
    verb = "is" if len(changed) == 1 else "are"
    lift = f"`penstock hold --lift {changed[0].rollout if len(changed) == 1 else 'ROLLOUT'}`"
    return f"{names} {verb} not kept any more" if lifted else f"{names} {verb} kept until {lift}"


async def _fetch_forgotten(client: Client, selection: LimitedSelection) -> NounRows[ForgottenRollout]:
    return await limited(selection.limit, client.forgotten, "Nothing was forgotten yet.")


RETENTION = NounView[NounSelection, RetentionStatus](
    "retention", RetentionStatus, only_row(lambda client: client.retention()), lambda _: "retention", whole=_status
)
HOLDS = NounView[NounSelection, RetentionHold](
    "holds",
    RetentionHold,
    all_rows(lambda client: client.holds(), "Nobody keeps a rollout."),
    key=lambda one: one.rollout,
    columns={
        Column("rollout"): lambda one, _: one.rollout,
        Column("since"): lambda one, _: moment(one.at_ns),
        Column("who"): lambda one, _: plain(one.who),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)
FORGOTTEN = NounView[LimitedSelection, ForgottenRollout](
    "forgotten",
    ForgottenRollout,
    _fetch_forgotten,
    selection=LimitedSelection,
    key=lambda one: one.rollout,
    columns={
        Column("rollout"): lambda one, _: one.rollout,
        Column("when"): lambda one, _: moment(one.at_ns),
        Column("why", 1, narrows="fold", least=16): lambda one, _: plain(one.why),
    },
)
