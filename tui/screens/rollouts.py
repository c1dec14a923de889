"""The screens of rollouts and of their groups: live lists.

The gateway lists rollouts newest first, page by page. A list of any length keeps the ids of those it has received, and
the `HELD` rows that were in sight last; others are asked for by their ids when they come into sight. A digest of
changes names rollouts: those in sight are asked for again; new ones are asked for with the filter and go on top if they
match it. Rows that no longer match the filter are removed. So the memory and the questions of a list depend on the
screen, not on the tape. Groups put the tries at each task together, so that a task that fails half of the time stands
out.
"""

from __future__ import annotations

import asyncio
import shlex
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from rich.text import Text

from penstock.console.views import rollouts
from penstock.console.views.table import Column, age, compact, figure, joined, number, plain
from penstock.gateway.model import times
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import SearchRow
from penstock.tui.screens.rollout import RolloutView, rollout_actions
from penstock.tui.view import Pane, ScreenView, TableModel, ViewAction, begin_text, limited_to, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import Digest, RolloutPage

HELD: Final = 5_000
"""The most rows that are held; only these can be sorted."""
FIRST_PAGE, NEXT_PAGE, LONGEST_PAGE = 60, 250, 1000
"""Rows of the first page, which the screen waits for, of the second, and the most of later ones."""
MOST_IDS: Final = 200
"""The most ids of one question."""
MOST_FRESH: Final = 2_000
"""The most new rollouts that are asked for one by one; with more the list is asked for anew."""
SPANS: Final = 50
"""The most spans that are shown of the selected rollout."""
NONE = "The tape has no rollouts yet. `penstock enqueue` makes them of tasks."


class RolloutDetails(NamedTuple):
    """The selected rollout and its first spans."""

    rollout: RolloutSummary
    spans: list[Span]


@dataclass(slots=True)
class RolloutList:
    """The list: ids, held rows, and changes that are not asked for yet."""

    order: list[str] = field(default_factory=list[str])
    """Ids, newest first."""
    rows: OrderedDict[str, RolloutSummary] = field(default_factory=OrderedDict[str, RolloutSummary])
    """The rows that are held, in the order in which they were last kept."""
    stale: set[str] = field(default_factory=set[str])
    """Ids of rows that have changed since they were asked for."""
    fresh: dict[str, None] = field(default_factory=dict[str, None])
    """Ids of changed rollouts that are not in the list."""
    missed: bool = False
    """True when there were changes that the feed did not name."""
    cursor: str | None = None
    """The cursor of the next page."""
    complete: bool = False
    """True when there is no next page."""
    pages: int = 0
    total: int = 0
    """Rollouts on the tape, without the filter."""
    known: set[str] = field(default_factory=set[str])
    """The ids of `order`."""

    def add_page(self, page: RolloutPage) -> None:
        """Add rows at the end of the list."""
        self.pages += 1
        self.cursor, self.complete = page.next, page.next is None
        self.order += [row.id for row in page.rollouts if row.id not in self.known]
        self.known.update(row.id for row in page.rollouts)
        self.keep(page.rollouts)

    def add_new(self, rows: Sequence[RolloutSummary]) -> None:
        """Add rows that are new to the list, given newest first: most at the top, and one that the filter finds only
        now at its place. A row that is older than all in the list comes with its page.
        """
        for row in reversed(rows):
            place = self._place(row.created_ns)
            if row.id in self.known:
                self.keep([row])
            elif place < len(self.order) or self.complete:
                self.order.insert(place, row.id)
                self.known.add(row.id)
                self.keep([row])

    def _place(self, created_ns: int) -> int:
        """The place before the first held row that is not newer."""
        held = ((at, self.rows.get(id)) for at, id in enumerate(self.order))
        return next((at for at, row in held if row is not None and row.created_ns <= created_ns), len(self.order))

    def goes_on(self, newer: RolloutList) -> bool:
        """Merge the first page of a new list into this one; False when rows are missing between the two."""
        if not newer.order or newer.order[-1] not in self.known:
            return False
        self.missed, self.total = False, newer.total
        self.fresh = newer.fresh
        self.stale = (self.known - newer.known) | newer.stale
        self.add_new([newer.rows[id] for id in newer.order])
        return True

    def keep(self, rows: Iterable[RolloutSummary]) -> None:
        """Hold rows, and drop those that were not kept for longest."""
        for row in rows:
            self.rows[row.id] = row
            self.rows.move_to_end(row.id)
        while len(self.rows) > HELD:
            self.stale.discard(self.rows.popitem(last=False)[0])

    def drop(self, ids: Iterable[str]) -> None:
        """Remove rollouts that are gone, or that no longer match the filter."""
        gone = {id for id in ids if id in self.known}
        if gone:
            self.order = [id for id in self.order if id not in gone]
            self.known -= gone
        for id in gone:
            self.rows.pop(id, None)
            self.stale.discard(id)

    def lacking(self, visible: Sequence[str]) -> list[str]:
        """Ids of rows in sight that are not held, or have changed."""
        return [id for id in visible if id in self.known and (id not in self.rows or id in self.stale)][:MOST_IDS]

    def near_end(self, visible: Sequence[str]) -> bool:
        """True if the next page will soon be in sight."""
        return not self.complete and (not self.order or self.order[-1] in visible)


def _row(data: RolloutList, id: str | None) -> RolloutSummary | None:
    return None if id is None else data.rows.get(id)


class RolloutsView(ScreenView[RolloutList, RolloutDetails]):
    """All rollouts that match a filter."""

    name = "rollouts"
    title = "Rollouts"
    help = "what agents did, newest first; Enter opens one"
    concerns = frozenset({"rollouts"})
    every_s = 60.0
    ranged = True
    actions: ClassVar[Sequence[ViewAction[Any]]] = rollout_actions(_row)

    def __init__(self, terms: str = "") -> None:
        self._terms = terms.strip()
        self._list = RolloutList()

    def forget(self) -> None:
        self._list = RolloutList()

    @property
    def _asked(self) -> str:
        """The filter with the range of time."""
        return limited_to(self.since, self._terms)

    # Asking -----------------------------------------------------------------------------------------------------------

    async def load(self, client: Client) -> RolloutList:
        """Ask for the first page; later for new rollouts only."""
        known = self._list
        # Changes while it asks are noted, and asked for by the next look.
        if not known.pages or known.missed:
            found = self._list = RolloutList()
            try:
                page, figures = await asyncio.gather(
                    client.rollout_page(self._asked, FIRST_PAGE, None), client.stats(spans=0)
                )
            except BaseException:
                if self._list is found:
                    self._list = known
                raise
            found.add_page(page)
            found.total = figures.tape.get("rollouts", 0)
            if self._list is found and not self._asked and known.goes_on(found):
                self._list = known
        elif known.fresh:
            asked = list(known.fresh)[-MOST_IDS:]
            known.fresh = {id: None for id in known.fresh if id not in set(asked)}
            try:
                rows, figures = await asyncio.gather(client.rollouts_by_id(asked, self._asked), client.stats(spans=0))
            except BaseException:
                known.fresh = {**dict.fromkeys(asked), **known.fresh}
                raise
            known.add_new(rows)
            known.total = figures.tape.get("rollouts", 0)
        return self._list

    def observe(self, digest: Digest) -> bool:
        """Note the changed rollouts; return True if there may be new rows."""
        known = self._list
        for id in digest.rollouts:
            if id in known.known:
                known.stale.add(id)
            else:
                known.fresh[id] = None
        if digest.more or len(known.fresh) > MOST_FRESH:
            known.missed = True
            known.fresh.clear()
        return bool(known.fresh) or known.missed

    def needs_fill(self, data: RolloutList, visible: Sequence[str]) -> bool:
        return bool(data.lacking(visible)) or data.near_end(visible)

    async def fill(self, client: Client, data: RolloutList, visible: Sequence[str]) -> None:
        """Ask for rows that are lacking, and for the next page when the end is near."""
        if ids := data.lacking(visible):
            again = data.stale.intersection(ids)
            data.stale -= again
            try:
                rows = await client.rollouts_by_id(ids, self._asked)
            except BaseException:
                data.stale |= again
                raise
            data.keep(rows)
            data.drop(set(ids) - {row.id for row in rows})
        if data.near_end(visible):
            size = min(NEXT_PAGE * data.pages, LONGEST_PAGE)
            data.add_page(await client.rollout_page(self._asked, size, data.cursor))

    async def load_details(self, client: Client, data: RolloutList, id: str) -> RolloutDetails:
        async def spans() -> list[Span]:
            return [span async for span in client.spans(id, limit=SPANS)]

        return RolloutDetails(*await asyncio.gather(client.rollout(id), spans()))

    # Showing ----------------------------------------------------------------------------------------------------------

    def head(self, data: RolloutList, now_ns: int) -> Text:
        more = "" if data.complete else "+"
        found = f"{len(data.order):,}{more} found" if self._asked else f"{data.total:,} on the tape"
        return joined(found, plain(self._terms, "bold"), f"the newest {len(data.order):,}" if more else "")

    def table(self, data: RolloutList, now_ns: int) -> TableModel:
        def cells(id: str) -> Sequence[Text | str]:
            row = data.rows.get(id)
            return (
                [id, *[""] * (len(rollouts.ROLLOUTS.columns) - 1)]
                if row is None
                else rollouts.ROLLOUTS.cells(row, now_ns)
            )

        none = f"No rollout matches {self._asked}." if self._asked else f"{NONE}\n\n{begin_text(self.address)}"
        return TableModel(
            [*rollouts.ROLLOUTS.columns], self._in_range(data, now_ns), cells, none, orders(data.rows.get)
        )

    def _in_range(self, data: RolloutList, now_ns: int) -> Sequence[str]:
        """The ids without those that have become too old for the range since they were asked for."""
        end = len(data.order)
        if self.since:
            oldest = now_ns - (times.nanoseconds(self.since) or 0)
            while end and (row := data.rows.get(data.order[end - 1])) is not None and row.created_ns < oldest:
                end -= 1
        return data.order if end == len(data.order) else data.order[:end]

    def panes(self, data: RolloutList, id: str | None, closer: RolloutDetails | None, now_ns: int) -> Sequence[Pane]:
        if closer is None:
            return ()
        task = compact(closer.rollout.input) or "It has no task: it was not queued."
        about = [plain(task)]
        if closer.rollout.metadata:
            about.append(joined(Text("metadata", style="dim"), plain(compact(closer.rollout.metadata))))
        spans = rollouts.spans(closer.spans) if closer.spans else Text("It has no spans yet.")
        return [pane("Spans", spans), pane("Task", Text("\n").join(about))]

    def command(self, id: str | None) -> str:
        return f"penstock rollouts {shlex.quote(self._asked)}" if self._asked else "penstock rollouts"

    def opens(self, data: RolloutList, id: str) -> ScreenView[Any, Any]:
        return RolloutView(id)

    def filtered(self, terms: str) -> RolloutsView:
        return RolloutsView(terms)

    @property
    def terms(self) -> str:
        return self._terms


def orders(row: Callable[[str], RolloutSummary | None]) -> dict[str, Callable[[str], Any]]:
    """The columns by which rollouts can be sorted; rows that are not held come last."""

    def by(value: Callable[[RolloutSummary], Any]) -> Callable[[str], Any]:
        def key(id: str) -> Any:
            found = row(id)
            return None if found is None else value(found)

        return key

    def tokens(r: RolloutSummary) -> int:
        return (r.totals.input_tokens or 0) + (r.totals.output_tokens or 0)

    return {
        "rollout": by(lambda r: r.id),
        "group": by(lambda r: r.group),
        "status": by(lambda r: str(r.status)),
        "reward": by(lambda r: r.reward),
        "model calls": by(lambda r: r.totals.calls),
        "errors": by(lambda r: r.totals.errors),
        "tokens": by(tokens),
        "cost": by(lambda r: r.totals.cost),
        "tool calls": by(rollouts.tool_calls),
        "age": by(lambda r: r.created_ns),
        "last call": by(lambda r: r.last_seen_ns),
    }


# -- groups ----


NEWEST_ROLLOUTS: Final = 1_000
"""The newest rollouts, of which groups are made."""
NO_GROUPS = "None of the newest rollouts has a group: `penstock enqueue tasks.jsonl --repeat 8` makes one of each task."
GROUPS = (
    Column("group"), figure("rollouts"), figure("succeeded"), figure("failed"), figure("others", 4),
    figure("mean reward"), figure("lowest", 2), figure("highest", 3), figure("model calls", 5), figure("age", 1),
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
    ranged = True

    async def load(self, client: Client) -> GroupsData:
        page = await client.rollout_page(limited_to(self.since, ""), NEWEST_ROLLOUTS, None)
        return GroupsData(group_rollouts(page.rollouts), len(page.rollouts), page.next is None)

    def head(self, data: GroupsData, now_ns: int) -> Text:
        of = f"rollouts of the last {self.since}" if self.since else "all rollouts"
        of = of if data.complete else f"the newest {data.looked_at:,} rollouts"
        return Text(f"{len(data.groups):,} groups in {of}")

    def table(self, data: GroupsData, now_ns: int) -> TableModel:
        def cells(id: str) -> Sequence[Text | str]:
            return _cells(data.groups[id], now_ns)

        none = f"No rollout of the last {self.since} has a group." if self.since else NO_GROUPS
        return TableModel(GROUPS, list(data.groups), cells, none, _orders(data.groups))

    def panes(self, data: GroupsData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        group = data.groups.get(id or "")
        return () if group is None else [pane("Rollouts", rollouts.ROLLOUTS.table(group.rows, now_ns))]

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


# -- search ----


MOST_FOUND: Final = 100
"""The most calls of a search that are listed."""
FOUND = (Column("call"), figure("ago"), Column("who says what", narrows="cut", least=30), figure("places", 1))


@dataclass(frozen=True, slots=True)
class SearchData:
    """The calls that have the text, by their names, newest first."""

    rows: dict[str, SearchRow]
    more: bool
    """True when there are more than `MOST_FOUND`."""


class SearchView(ScreenView[SearchData, None]):
    """The calls that have a text. It is searched for once, and again by the key that refreshes."""

    name = "search"
    title = "Search"
    help = "what calls say: messages, tool calls and results, errors; Enter opens the call in its rollout"
    every_s = 3600.0
    ranged = True

    def __init__(self, text: str, terms: str = "") -> None:
        self._text, self._terms = text, terms

    async def load(self, client: Client) -> SearchData:
        asked = client.search(self._text, limited_to(self.since, self._terms), limit=MOST_FOUND + 1)
        found = [row async for row in asked]
        return SearchData(
            {f"{row.span.rollout}/{row.span.attempt}#{row.span.sequence}": row for row in found[:MOST_FOUND]},
            len(found) > MOST_FOUND,
        )

    def head(self, data: SearchData, now_ns: int) -> Text:
        count = f"the newest {len(data.rows):,}" if data.more else f"{len(data.rows):,}"
        return joined(f"{count} found", plain(self._text, "bold"), plain(self._terms), Text("r searches again", "dim"))

    def table(self, data: SearchData, now_ns: int) -> TableModel:
        def cells(id: str) -> Sequence[Text | str]:
            row = data.rows[id]
            first = rollouts.passage(row.hits[0])
            return [plain(id), age(row.span.start_ns, now_ns), first[2:], f"{len(row.hits) + row.more:,}"]

        return TableModel(FOUND, list(data.rows), cells, "No call says it.")

    def panes(self, data: SearchData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        row = data.rows.get(id or "")
        return [] if row is None else [pane("Places", rollouts.findings([row], now_ns))]

    def command(self, id: str | None) -> str:
        if id is not None:
            return f"penstock show {shlex.quote(id)}"
        terms = limited_to(self.since, self._terms)
        return shlex.join(["penstock", "search", self._text, *([terms] if terms else [])])

    def opens(self, data: SearchData, id: str) -> ScreenView[Any, Any]:
        span = data.rows[id].span
        return RolloutView(span.rollout, start=f"{span.attempt}#{span.sequence}")

    def filtered(self, terms: str) -> SearchView:
        return SearchView(self._text, terms)

    def place(self) -> str:
        return self._text

    @property
    def terms(self) -> str:
        return self._terms

    @property
    def words(self) -> Sequence[str]:
        return [self.name, self._text, *(["--", self._terms] if self._terms else [])]
