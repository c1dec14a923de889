"""What a screen is, without a terminal: questions to the gateway, and their answers as rows and panes.

    look          asks the gateway for what the screen shows             Client -> Data
    table         the rows that can be chosen                            Data -> Table
    look_closer   asks for what is shown of the chosen row               Client, id -> Closer
    panes         what is shown beside the rows                          Data, id, Closer -> panes
    command       the command line that prints the same
    actions       what the screen can change, each with a question first

The app calls `look` again when something that the view `concerns` itself with has changed, and `look_closer` a moment
after the selection has stopped: no key waits for the gateway. `tui.plain` calls each once and prints the result. Rows
are known by their ids, so a selection stays on its row whatever comes, goes or is sorted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from rich.console import RenderableType
from rich.text import Text

from penstock.gateway.display.table import Column
from penstock.gateway.model.audit import Said

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.change import Digest
    from penstock.tui.traffic import Traffic

D = TypeVar("D")
"""What a look finds."""
E = TypeVar("E")
"""What a closer look at one row finds."""

Kind = Literal["rollouts", "resources", "releases", "runs"]
Cells = Sequence[Text | str]
Order = Any
"""A value by which rows are sorted; of one column all are of one type."""


@dataclass(frozen=True, slots=True)
class Pane:
    """One titled piece of a screen."""

    title: str
    draw: Callable[[int], RenderableType]
    """Draws it for so many columns."""
    whole: Callable[[], bytes] | None = None
    """All of it for $PAGER, where a pane shows a part only."""


def pane(title: str, shown: RenderableType) -> Pane:
    """A pane that looks the same at any width."""
    return Pane(title, lambda _: shown)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that can be chosen."""

    columns: Sequence[Column]
    ids: Sequence[str]
    """The rows by their ids, in order."""
    cells: Callable[[str], Cells]
    """The cells of a row; asked when the row is drawn."""
    none: str = ""
    """What is said when there are no rows."""
    order: Mapping[str, Callable[[str], Order]] = field(default_factory=dict[str, Callable[[str], Order]])
    """By which columns rows can be sorted: column -> id -> value."""
    start: str | None = None
    """The row that is chosen first; None: the first one."""
    bar: Callable[[str, int], Text] | None = None
    """Draws what stands right of the columns, for a row and so many characters; of the row `` it is the heading."""
    words: Callable[[str], str] | None = None
    """The text of a row that `/` searches, where the gateway does not filter."""


@dataclass(frozen=True, slots=True)
class Action(Generic[D]):
    """A key that changes something, after a question."""

    id: str
    """Its name in the key map, such as `release.promote`."""
    unavailable: Callable[[D, str | None], str | None]
    """Why it cannot be done now, with this data and this row; None when it can."""
    question: Callable[[D, str | None], str]
    """Names what it changes, for the person who confirms."""
    act: Callable[[Client, D, str | None, Said], Awaitable[str]]
    """Does it; a sentence that says what was done."""
    reason: bool = False
    """True when a reason must be given."""


class View(Generic[D, E]):
    """A screen. Subclasses say what it asks and draws."""

    name: ClassVar[str]
    """Its name for `:` and `--plain`."""
    title: ClassVar[str]
    """Its name for people."""
    help: ClassVar[str]
    """What it shows, in a sentence."""
    concerns: ClassVar[frozenset[Kind]] = frozenset()
    """After which changes it looks again."""
    every_s: ClassVar[float] = 10.0
    """It looks again after so long, also without a change; s."""
    stacked: ClassVar[bool] = False
    """True: panes are shown below each other. False: one at a time, as tabs."""
    actions: ClassVar[Sequence[Action[Any]]] = ()

    async def look(self, client: Client) -> D:
        """Asks for what the screen shows. Raises `ClientError`."""
        raise NotImplementedError

    def head(self, data: D, now_ns: int) -> Text:
        """The line above the rows."""
        return Text()

    def table(self, data: D, now_ns: int) -> Table | None:
        """The rows; None for a screen of panes alone."""
        return None

    async def look_closer(self, client: Client, data: D, id: str) -> E | None:
        """Asks for what is shown of one row. Raises `ClientError`."""
        return None

    def panes(self, data: D, id: str | None, closer: E | None, now_ns: int) -> Sequence[Pane]:
        """What is shown beside the rows; `closer` is None until it is known, and when nothing is chosen."""
        return ()

    def command(self, id: str | None) -> str:
        """The command line that prints the same."""
        raise NotImplementedError

    def opens(self, data: D, id: str) -> View[Any, Any] | None:
        """The screen that Enter opens on a row; None where its panes are all there is."""
        return None

    def place(self) -> str:
        """Which of its kind it is, for the line that says where one is, such as the id of a rollout."""
        return ""

    pane: str | None = None
    """The title of the pane in sight, empty before it is known; None: all are. A closer look need not ask for what
    other panes show."""

    traffic: Traffic | None = None
    """What the feed told lately; None where nothing follows it."""

    def forget(self) -> None:
        """What it keeps from look to look is of another gateway, or of a tape that is no more."""

    # What lists of more rows than are held do besides.

    def tell(self, digest: Digest) -> bool:
        """Hears of a change; True when it should look again."""
        names = {"resources": digest.resources, "releases": digest.releases, "runs": digest.runs}
        touched = {kind for kind, changed in names.items() if changed}
        if digest.rollouts or digest.more:
            touched.add("rollouts")
        return bool(touched & self.concerns)

    def wants(self, data: D, visible: Sequence[str]) -> bool:
        """Whether `fill` has something to ask, when these rows are seen."""
        return False

    async def fill(self, client: Client, data: D, visible: Sequence[str]) -> None:
        """Asks for what rows in sight, or just beyond them, need. Raises `ClientError`."""

    def filtered(self, terms: str) -> View[D, E] | None:
        """The same screen with another filter of the gateway's language; None where `/` searches the rows at hand."""
        return None

    @property
    def terms(self) -> str:
        """Its filter; empty without one."""
        return ""
