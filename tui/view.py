"""The interface of a screen, without a terminal: questions to the gateway, and their answers as rows and panes.

    look          asks the gateway for what the screen shows             Client -> Data
    table         the rows that can be chosen                            Data -> Table
    look_closer   asks for what is shown of the chosen row               Client, id -> Closer
    panes         what is shown beside the rows                          Data, id, Closer -> panes
    command       the command line that prints the same
    actions       what the screen can change, each with a question first

The app calls `load` again when a noun in the view's `concerns` has changed, and `load_details` a moment after the
selection has stopped: no key waits for the gateway. `tui.plain` calls each once and prints the result. Rows are
identified by their ids, so a selection stays on its row when others come, go or are sorted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.console import RenderableType
from rich.text import Text

from penstock.console.views.noun import FeedNoun
from penstock.console.views.table import Column
from penstock.gateway.model.base import ActionRequest

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import Digest
    from penstock.tui.traffic import DigestHistory

D = TypeVar("D")
"""The data of a look."""
E = TypeVar("E")
"""The data of a closer look at one row."""

Cells = Sequence[Text | str]
Order = Any
"""A value by which rows are sorted; all values of a column have one type."""


@dataclass(frozen=True, slots=True)
class Pane:
    """One titled piece of a screen."""

    title: str
    draw: Callable[[int], RenderableType]
    """Draws the pane for a number of columns."""
    whole: Callable[[], bytes] | None = None
    """All of its content for $PAGER, if the pane shows only a part."""


def pane(title: str, shown: RenderableType) -> Pane:
    """A pane that looks the same at any width."""
    return Pane(title, lambda _: shown)


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
    every_s: ClassVar[float] = 10.0
    """Interval of looks without a change; s."""
    stacked: ClassVar[bool] = False
    """True: panes are shown below each other. False: one at a time, as tabs."""
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
