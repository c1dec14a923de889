"""The interface of a screen, without a terminal: questions to the gateway, and their answers as rows and panes.

    load          asks the gateway for what the screen shows             Client -> Data
    table         the rows that can be chosen                            Data -> TableModel
    load_details  asks for what is shown of the chosen row               Client, Data, id -> Closer
    panes         what is shown beside the rows                          Data, id, Closer -> panes
    command       the command line that prints the same
    actions       what the screen can change, each with a question first

The app calls `load` again when a noun in the view's `concerns` has changed, and `load_details` a moment after the
selection has stopped: no key waits for the gateway. `render_plain` calls each once. Rows are identified by their ids,
so a selection stays on its row when others come, go or are sorted.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from pydantic import BaseModel
from rich.console import RenderableType
from rich.text import Text

from penstock.console.views.noun import POSITIONAL, FeedNoun, NounRows, NounView
from penstock.console.views.registry import NOUNS, noun_view
from penstock.console.views.table import Column, Listing, joined, plain
from penstock.gateway.client.connection import ClientError
from penstock.gateway.model.answers import Digest
from penstock.gateway.model.base import ActionRequest

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import Digest

    pass

D = TypeVar("D")
"""The data of a look."""
E = TypeVar("E")
"""The data of a closer look at one row."""
R = TypeVar("R", bound=BaseModel)
Cells = Sequence[Text | str]
Order = Any
"""A value by which rows are sorted; all values of a column have one type."""


@dataclass(frozen=True, slots=True)
class Pane:
    """One titled piece of a screen."""

    title: str
    draw: Callable[[int, int | None], RenderableType]
    """Draws the pane for a number of columns and of lines; None for as many lines as it likes. Charts fill them."""
    whole: Callable[[], bytes] | None = None
    """All of its content for $PAGER, if the pane shows only a part."""


def pane(title: str, shown: RenderableType) -> Pane:
    """A pane that looks the same at any width."""
    return Pane(title, lambda width, height: shown)


@dataclass(frozen=True, slots=True)
class TableModel:
    """Rows that can be chosen."""

    columns: Sequence[Column]
    ids: Sequence[str]
    """The ids of the rows, in order."""
    cells: Callable[[str], Cells]
    """The cells of a row; called when the row is drawn."""
    none: str = ""
    """The text that is shown when there are no rows."""
    order: Mapping[str, Callable[[str], Order]] = field(default_factory=dict[str, Callable[[str], Order]])
    """The columns by which rows can be sorted: column -> id -> value."""
    start: str | None = None
    """The row that is selected at the beginning; None for the first one."""
    bar: Callable[[str, int], Text] | None = None
    """Draws the bar right of the columns, for a row's id and a width in characters; for the empty id, the heading."""
    words: Callable[[str], str] | None = None
    """The text of a row that `/` searches, if the gateway does not filter; None for its cells."""


@dataclass(frozen=True, slots=True)
class ViewAction(Generic[D]):
    """A key that changes something, after a question."""

    id: str
    """Its name in the key map, such as `release.promote`."""
    unavailable: Callable[[D, str | None], str | None]
    """The reason why it cannot be done now, with this data and row; None when it can."""
    question: Callable[[D, str | None], str]
    """The question for the person, which names what will change."""
    act: Callable[[Client, D, str | None, ActionRequest], Awaitable[str]]
    """Makes the change; returns a sentence that says what was done."""
    reason: bool = False
    """True when a reason must be given."""


class Arrangement(NamedTuple):
    """The way in which a person looks at a screen, which a saved view keeps."""

    columns: Sequence[str] = ()
    """Names of the columns that are shown, in their order; empty for all."""
    sort: str = ""
    reverse: bool = False
    since: str = ""
    """The range of time, such as 24h; empty for all."""


class ScreenView(Generic[D, E]):
    """A screen. Subclasses define its questions and drawings."""

    name: ClassVar[str]
    """Its name for `:` and `--plain`."""
    title: ClassVar[str]
    """Its name for people."""
    help: ClassVar[str]
    """A sentence about what it shows."""
    concerns: ClassVar[frozenset[FeedNoun]] = frozenset()
    """The nouns after whose changes it looks again."""
    every_s: float = 10.0
    """Interval of looks without a change; s."""
    stacked: ClassVar[bool] = False
    """True: panes are shown below each other. False: one at a time, as tabs."""
    ranged: bool = False
    """True if it can be limited to a range of time."""
    actions: ClassVar[Sequence[ViewAction[Any]]] = ()

    async def load(self, client: Client) -> D:
        """Ask for the data of the screen. Raises `ClientError`."""
        raise NotImplementedError

    def head(self, data: D, now_ns: int) -> Text:
        return Text()

    def table(self, data: D, now_ns: int) -> TableModel | None:
        """The rows; None for a screen of panes alone."""
        return None

    async def load_details(self, client: Client, data: D, id: str) -> E | None:
        """Ask for more data of one row. Raises `ClientError`."""
        return None

    def panes(self, data: D, id: str | None, closer: E | None, now_ns: int) -> Sequence[Pane]:
        """The panes beside the rows. `closer` is None until it has come, and when no row is selected."""
        return ()

    def command(self, id: str | None) -> str:
        """The command line that prints the same."""
        raise NotImplementedError

    def opens(self, data: D, id: str) -> ScreenView[Any, Any] | None:
        """The screen that Enter opens on a row; None if the row has only panes."""
        return None

    def place(self) -> str:
        """The name of the object that is shown, such as a rollout's id, for the line on top."""
        return ""

    pane: str | None = None
    """The title of the pane in sight, empty before it is known; None when all are. A closer look need not ask for the
    data of other panes.
    """

    since: str = ""
    """The range of time that it shows, such as 24h; empty for all. Set before `load`, if it is `ranged`."""

    address: str = ""
    """The address of the gateway for agents, such as http://127.0.0.1:4747; empty if it is unknown."""

    arrangement: Arrangement | None = None
    """What a saved view says of it; None for the usual one."""

    traffic: DigestHistory | None = None
    """The recent digests of the feed; None when it is not followed."""

    def forget(self) -> None:
        """Drop all data kept between looks: it is of another gateway, or of an older tape."""

    # For lists that hold only a part of their rows.

    def observe(self, digest: Digest) -> bool:
        """Handle a digest of changes; return True if the view should look again."""
        names: dict[FeedNoun, list[str]] = {
            "resources": digest.resources,
            "releases": digest.releases,
            "runs": digest.runs,
        }
        touched = {kind for kind, changed in names.items() if changed}
        if digest.rollouts or digest.more:
            touched.add("rollouts")
        return bool(touched & self.concerns)

    def needs_fill(self, data: D, visible: Sequence[str]) -> bool:
        """True if `fill` has something to ask for when these rows are in sight."""
        return False

    async def fill(self, client: Client, data: D, visible: Sequence[str]) -> None:
        """Ask for data that rows in sight, or just beyond, need. Raises `ClientError`."""

    def filtered(self, terms: str) -> ScreenView[D, E] | None:
        """The same screen with another filter of the gateway's language; None if `/` searches the loaded rows."""
        return None

    @property
    def terms(self) -> str:
        """Its filter; empty without one."""
        return ""

    @property
    def words(self) -> Sequence[str]:
        """The words behind `:` that lead to it."""
        return [self.name, *([self.terms] if self.terms else [])]


def limited_to(since: str, terms: str) -> str:
    """A filter of the gateway's language with a range of time."""
    return " ".join(filter(None, (f"since:{since}" if since else "", terms)))


def begin_text(address: str) -> str:
    """The lines that let an agent call through a gateway."""
    if not address:
        return "Give an agent the gateway's address as its base URL (OpenAI's SDKs: with /v1 behind it)."
    return (
        "Start an agent with one of these lines before its command, or export it:\n\n"
        f"  OPENAI_BASE_URL={address}/v1\n  ANTHROPIC_BASE_URL={address}\n\n"
        "Its calls appear here as they are made."
    )


# -- the screen of a noun of `console.views.registry` ----


class NounScreen(ScreenView[NounRows[R], E], Generic[R, E]):
    """Shows a noun as its view says. Subclasses add what only a screen has: actions, and panes that ask for more."""

    noun: ClassVar[NounView[Any, Any]]

    def __init_subclass__(cls) -> None:
        noun = cls.noun
        cls.name, cls.concerns, cls.every_s = noun.name, noun.concerns, noun.every_s
        cls.stacked = noun.whole is not None
        cls.title = vars(cls).get("title", noun.name.capitalize())
        cls.help = vars(cls).get("help", NOUNS[noun.name].help)
        cls.ranged = "filter" in noun.selection.model_fields

    def __init__(self, terms: str = "", of: Sequence[str] = ()) -> None:
        """`terms`: a filter. `of`: the words that say of what it is a list."""
        self._terms, self._of = terms, of
        self.selection = self.noun.selection(
            **({"filter": terms} if terms else {}), **dict(zip(positional_words(self.noun), of, strict=True))
        )

    async def load(self, client: Client) -> NounRows[R]:
        asked = self.selection
        if self.since:
            asked = asked.model_copy(update={"filter": limited_to(self.since, self._terms)})
        return await self.noun.fetch(client, asked)

    def head(self, data: NounRows[R], now_ns: int) -> Text:
        if self.noun.whole is not None:
            return Text()
        count = f"the first {len(data.rows):,}" if data.more else f"{len(data.rows):,}"
        return joined(
            f"{self.title}: {count}", *data.above, *data.below, Text(data.part if data.rows else "", style="dim")
        )

    def table(self, data: NounRows[R], now_ns: int) -> TableModel | None:
        if self.noun.whole is not None:
            return None
        rows = {self.noun.key(row): row for row in data.rows}

        def order(value: Callable[[R], Any]) -> Callable[[str], Any]:
            return lambda id: value(rows[id])

        def cells(id: str) -> list[Text | str]:
            return self.noun.cells(rows[id], now_ns)

        orders = {name: order(value) for name, value in self.noun.orders.items()}
        return TableModel([*self.noun.columns], list(rows), cells, data.none, orders)

    def panes(self, data: NounRows[R], id: str | None, closer: E | None, now_ns: int) -> Sequence[Pane]:
        if self.noun.whole is not None:
            return [pane("", self.noun.whole(row, now_ns)) for row in data.rows] or [pane("", Text(data.none))]
        row = self.noun.find(data, id)
        return () if row is None else [pane(title, it) for title, it in self.noun.detail(row, now_ns).items()]

    def command(self, id: str | None) -> str:
        entry = NOUNS[self.name]
        if id is not None and entry.shows:
            return f"penstock {entry.shows} {id}"
        terms = limited_to(self.since, self._terms)
        return shlex.join(["penstock", *entry.command.split(), *self._of, *([terms] if terms else [])])

    def opens(self, data: NounRows[R], id: str) -> ScreenView[Any, Any] | None:
        """The list that the command of one row prints, if it prints one."""
        inner = next((name for name, entry in NOUNS.items() if entry.command == NOUNS[self.name].shows), None)
        return None if inner is None else noun_screen(inner)(of=[id])

    def place(self) -> str:
        return " ".join(self._of)

    @property
    def words(self) -> Sequence[str]:
        return [self.name, *self._of, *([self._terms] if self._terms else [])]

    def filtered(self, terms: str) -> ScreenView[Any, Any] | None:
        return type(self)(terms) if "filter" in self.noun.selection.model_fields else None

    @property
    def terms(self) -> str:
        return self._terms


def positional_words(noun: NounView[Any, Any]) -> list[str]:
    """The fields of a noun's selection that must be given as words."""
    fields = noun.selection.model_fields.items()
    return [name for name, field in fields if POSITIONAL in field.metadata and field.is_required()]


@cache
def noun_screen(name: str) -> type[NounScreen[Any, Any]]:
    """The screen of a noun that needs nothing of its own."""
    return type(f"{name.capitalize()}Screen", (NounScreen,), {"noun": noun_view(name)})


# -- the rows of a table: filtered, sorted, and the place of the selection ----


FAILED = ("failed", "error", "timeout", "unresponsive", "interrupted", "rolled back", "silent")
"""Words in the text of a row that went wrong."""


def arrange_rows(table: TableModel, sort: str, reverse: bool, search: str) -> Sequence[str]:
    """The ids of the rows that match the search, sorted."""
    ids = table.ids
    if search:
        wanted = [word.casefold() for word in search.split()]
        ids = [id for id in ids if matches(row_text(table, id).casefold(), wanted)]
    value = table.order.get(sort)
    if value is None:
        return list(reversed(ids)) if reverse else ids
    known = [id for id in ids if value(id) is not None]
    rest = [id for id in ids if value(id) is None]
    return [*sorted(known, key=value, reverse=reverse), *rest]


def matches(text: str, wanted: Sequence[str]) -> bool:
    """True if a text has all words, and none of those that begin with `!`."""
    return all((word[1:] not in text) if word.startswith("!") and word != "!" else word in text for word in wanted)


def row_text(table: TableModel, id: str) -> str:
    """The text of a row, for searches."""
    if table.words is not None:
        return table.words(id)
    return " ".join([id, *(cell.plain if isinstance(cell, Text) else cell for cell in table.cells(id))])


def with_columns(table: TableModel, names: Sequence[str]) -> TableModel:
    """A table with these columns alone, in this order. Raises `ValueError` for an unknown one."""
    known = {column_word(column): place for place, column in enumerate(table.columns)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no column {unknown[0]!r}; there are {', '.join(known)}")
    places = [known[name] for name in names]

    def cells(id: str) -> Cells:
        whole = table.cells(id)
        return [whole[place] for place in places]

    # What was asked for by name is narrowed at most.
    columns = [replace(table.columns[place], goes=None, optional=False) for place in places]
    return replace(table, columns=columns, cells=cells)


def column_word(column: Column) -> str:
    """The name of a column as one word."""
    return column.name.replace(" ", "_")


def next_sort(table: TableModel, sort: str) -> str:
    """The column after `sort` by which rows can be sorted; empty for the original order."""
    names = ["", *table.order]
    return names[(names.index(sort) + 1) % len(names)] if sort in names else ""


def selection_index(ids: Sequence[str], chosen: str | None, before: int | None, following: bool) -> int | None:
    """The selection's place: that of its row; the first one while it follows; the place before if its row is gone. None
    without rows.
    """
    if not ids:
        return None
    if following or chosen is None:
        return 0
    try:
        return ids.index(chosen)
    except ValueError:
        return min(before or 0, len(ids) - 1)


def find_failed_row(table: TableModel, ids: Sequence[str], at: int, step: int) -> int | None:
    """The place of the next row that went wrong, in steps of `step` from `at`; None when there is none."""
    place = at + step
    while 0 <= place < len(ids):
        text = row_text(table, ids[place]).casefold()
        if any(word in text for word in FAILED):
            return place
        place += step
    return None


# -- a screen as text, once: for pipes, agents and screen readers ----
#
# Titles are lines of their own that begin with `==`. A row of a table is one line. All panes are printed below each
# other, among them those of one row: the first, unless another is named.


MOST_ROWS = 100
"""The most rows of a table."""
BAR = 30
"""Width of the bar right of the columns; characters."""


async def render_plain(
    view: ScreenView[Any, Any], client: Client, now_ns: int, width: int, id: str | None = None
) -> list[RenderableType]:
    """The pieces of a screen, with the panes of the row `id` or of its first row. Raises `ClientError`."""
    view.address = "" if client.url.startswith("unix:") else client.url
    data = await view.load(client)
    table = view.table(data, now_ns)
    if table is not None:
        await view.fill(client, data, table.ids[:MOST_ROWS])
        # `fill` may have changed the rows.
        table = view.table(data, now_ns) or table
    found: list[RenderableType] = [plain_title(view), *_some(view.head(data, now_ns))]
    if table is not None:
        found += plain_rows(table)
        if id is not None and id not in table.ids:
            raise ClientError(f"{view.name} has no row {id!r}", 404)
        id = id or table.start or next(iter(table.ids), None)
    closer = None if id is None else await view.load_details(client, data, id)
    for one in view.panes(data, id, closer, now_ns):
        head = [Text(), _titled(one, None if table is None else id)] if one.title else []
        found += [*head, one.draw(width, None)]
    return found


def plain_title(view: ScreenView[Any, Any]) -> Text:
    """The first line: the name of the screen, and the command that prints the same."""
    return plain(f"== {' '.join(filter(None, (view.title, view.place())))}  ({view.command(None)})", "bold")


def _titled(one: Pane, id: str | None) -> Text:
    return plain(f"== {one.title}" + (f": {id}" if id else ""), "bold")


def _some(head: Text) -> list[Text]:
    return [head] if head.plain else []


def plain_rows(table: TableModel) -> Iterator[RenderableType]:
    """The rows in the format of `penstock ...`."""
    bar = table.bar
    made = Listing(*table.columns) if bar is None else Listing(*table.columns, Column(bar("", BAR).plain))
    for id in table.ids[:MOST_ROWS]:
        made.add_row(*table.cells(id), *([] if bar is None else [bar(id, BAR)]))
    if made.rows:
        yield made
    elif table.none:
        yield Text(table.none)
    if len(table.ids) > MOST_ROWS:
        yield Text(f"{len(table.ids) - MOST_ROWS:,} more rows are not shown.")


# -- the recent digests of the feed, for sparklines ----


SECONDS: Final = 120
"""The time for which digests are kept; s."""
BUCKETS: Final = 24


class RateSeries(NamedTuple):
    """The course of one rate, such as calls a second."""

    rates: list[float | None]
    """Rates a second in `BUCKETS` intervals, oldest first; None for intervals before the feed was followed."""

    @property
    def now(self) -> float:
        """Mean rate of the last two intervals."""
        last = [rate for rate in self.rates[-2:] if rate is not None]
        return sum(last) / len(last) if last else 0.0

    @property
    def peak(self) -> float:
        """The highest rate of an interval; 0 when none is known."""
        return max((rate for rate in self.rates if rate is not None), default=0.0)


class DigestHistory:
    """A bounded history of digests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds, from any origin."""
        self._clock, self._since = clock, clock()
        self._told: deque[tuple[float, Digest]] = deque()

    def add(self, digest: Digest) -> None:
        """Add a digest that has just come."""
        now = self._clock()
        self._told.append((now, digest))
        while self._told and self._told[0][0] < now - SECONDS:
            self._told.popleft()

    def rate_series(self, of: Callable[[Digest], int]) -> RateSeries:
        """A figure of the digests over time."""
        now, size = self._clock(), SECONDS / BUCKETS
        sums: list[float | None] = [
            0.0 if now - (BUCKETS - at - 1) * size >= self._since else None for at in range(BUCKETS)
        ]
        for at, digest in self._told:
            place = BUCKETS - 1 - int((now - at) / size)
            if 0 <= place < BUCKETS:
                sums[place] = (sums[place] or 0.0) + of(digest) / size
        return RateSeries(sums)
