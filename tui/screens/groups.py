"""The screen of groups: the tries at each task together, so that a task that fails half of the time stands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from penstock.console.views import rollouts as shown
from penstock.console.views.table import Column, age, figure, joined, number, plain
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary
from penstock.tui.screens.rollouts import RolloutsView
from penstock.tui.view import Pane, ScreenView, TableModel, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

NEWEST: Final = 1_000
"""The newest rollouts, of which groups are made."""
NONE = "None of the newest rollouts has a group: `penstock enqueue tasks.jsonl --repeat 8` makes one of each task."
GROUPS = (
    Column("group"), figure("rollouts"), figure("succeeded"), figure("failed"), figure("others", 4),
    figure("mean reward"), figure("lowest", 2), figure("highest", 3), figure("calls", 5), figure("age", 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The tries at one task."""

    name: str
    rows: Sequence[RolloutSummary]

    def having(self, status: RolloutStatus) -> int:
        """Number of rollouts with a status."""
        return sum(row.status == status for row in self.rows)

    @property
    def rewards(self) -> list[float]:
        """Rewards of the rollouts that have one."""
        return [row.reward for row in self.rows if row.reward is not None]

    @property
    def mean(self) -> float | None:
        """Mean reward; None while there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class GroupsData:
    """All groups of the newest rollouts."""

    groups: dict[str, RolloutGroup]
    looked_at: int
    complete: bool
    """True when these are all rollouts of the tape."""


def group_rollouts(rows: Sequence[RolloutSummary]) -> dict[str, RolloutGroup]:
    """Rollouts by the task that they repeat, newest first; rollouts without a group are left out."""
    found: dict[str, list[RolloutSummary]] = {}
    for row in rows:
        if row.group is not None:
            found.setdefault(row.group, []).append(row)
    return {name: RolloutGroup(name, members) for name, members in found.items()}


class GroupsView(ScreenView[GroupsData, None]):
    name = "groups"
    title = "Groups"
    help = "the tries at each task together; Enter lists them, c shows where the failed ones leave the others"
    every_s = 5.0

    async def load(self, client: Client) -> GroupsData:
        page = await client.rollout_page("", NEWEST, None)
        return GroupsData(group_rollouts(page.rollouts), len(page.rollouts), page.next is None)

    def head(self, data: GroupsData, now_ns: int) -> Text:
        of = "all rollouts" if data.complete else f"the newest {data.looked_at:,} rollouts"
        return Text(f"{len(data.groups):,} groups in {of}")

    def table(self, data: GroupsData, now_ns: int) -> TableModel:
        def cells(id: str) -> Sequence[Text | str]:
            return _cells(data.groups[id], now_ns)

        return TableModel(GROUPS, list(data.groups), cells, NONE, _orders(data.groups))

    def panes(self, data: GroupsData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        group = data.groups.get(id or "")
        return () if group is None else [pane("Rollouts", shown.ROLLOUTS.table(group.rows, now_ns))]

    def command(self, id: str | None) -> str:
        return "penstock rollouts" if id is None else RolloutsView(_only(id)).command(None)

    def opens(self, data: GroupsData, id: str) -> ScreenView[Any, Any]:
        return RolloutsView(_only(id))


def _only(group: str) -> str:
    """The filter that finds a group."""
    quoted = group.replace("\\", "\\\\").replace('"', '\\"')
    return f'group="{quoted}"'


def _cells(group: RolloutGroup, now_ns: int) -> list[Text | str]:
    good, bad = group.having(RolloutStatus.SUCCEEDED), group.having(RolloutStatus.FAILED)
    calls = sum(row.totals.calls for row in group.rows)
    rewards = (group.mean, min(group.rewards, default=None), max(group.rewards, default=None))
    return [
        plain(group.name),
        f"{len(group.rows):,}",
        f"{good:,}",
        joined(Text(f"{bad:,}", style="red" if bad else "")),
        f"{len(group.rows) - good - bad:,}",
        *(number(None if value is None else round(value, 3)) for value in rewards),
        f"{calls:,}",
        age(max(row.created_ns for row in group.rows), now_ns),
    ]


def _orders(groups: dict[str, RolloutGroup]) -> dict[str, Callable[[str], Any]]:
    return {
        "group": lambda id: id,
        "failed": lambda id: groups[id].having(RolloutStatus.FAILED),
        "mean reward": lambda id: groups[id].mean,
    }
