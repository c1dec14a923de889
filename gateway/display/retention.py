"""How long rollouts stay, for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.gateway.display.table import Column, Listing
from penstock.gateway.display.text import moment, plain, size
from penstock.gateway.model.forgotten import Forgotten, Holding
from penstock.gateway.model.retention import RetentionStatus

HOLDS = (
    Column("rollout"), Column("since"), Column("who"), Column("why", 1, narrows="fold", least=16),
)  # fmt: skip
FORGOTTEN = (Column("rollout"), Column("when"), Column("why", 1, narrows="fold", least=16))


def status(view: RetentionStatus) -> str:
    """How it goes, in a few lines."""
    lines = [f"forget    {rule}" for rule in view.rules]
    if view.keep_bytes is not None:
        lines.append(f"forget    the oldest, while the tape uses more than {size(view.keep_bytes)}")
    if not lines:
        lines.append("forget    nothing by itself: penstock.toml has neither [[retention]] nor tape.keep_bytes")
    lines.append(f"tape      {size(view.used_bytes)} in use of a file of {size(view.file_bytes)}")
    by_rule = f", {view.retired:,} of them by rules since the gateway started" if view.retired else ""
    lines.append(f"forgotten {view.forgotten:,} rollouts{by_rule}")
    lines.append(f"left      {_left(view)}")
    lines += [f"stuck     {why}" for why in (view.stuck, view.full) if why]
    return "\n".join(lines)


def _left(view: RetentionStatus) -> str:
    if view.done:
        return "nothing of them"
    left: list[str] = []
    if view.wiping:
        left.append(f"calls of {view.wiping:,} rollouts")
    if view.overwriting:
        left.append("bytes in free parts of the file, until they are overwritten")
    if view.in_index is None:
        left.append("perhaps something in the index, which has not caught up")
    elif view.in_index:
        left.append(f"{view.in_index:,} rollouts in files of the index")
    return "; ".join(left)


def forgotten(gone: Sequence[Forgotten]) -> str:
    """What was taken off the tape."""
    return f"forgotten: {', '.join(one.rollout for one in gone)}" if len(gone) <= 3 else f"forgotten: {len(gone):,}"


def wiped(view: RetentionStatus) -> str:
    """What is left once it was waited for."""
    return f"left of what was forgotten: {_left(view)}" if not view.stuck else f"not done yet: {view.stuck}"


def holds(found: Sequence[Holding]) -> Listing:
    """A line for each."""
    made = Listing(*HOLDS)
    for one in found:
        made.add_row(one.rollout, moment(one.at_ns), plain(one.who), plain(one.why))
    return made


def forgotten_list(found: Sequence[Forgotten]) -> Listing:
    """A line for each."""
    made = Listing(*FORGOTTEN)
    for one in found:
        made.add_row(one.rollout, moment(one.at_ns), plain(one.why))
    return made
