"""Tables give way as their columns say: ids never, the rest in its turn; a pipe has all of it, a row a line."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from fakes.goldens import check_widths, text_of
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from penstock.console.views import administration, queue, releases, resources, runs, tools
from penstock.console.views.rollouts import ROLLOUTS, SPANS, SUMS, TOOLS
from penstock.console.views.table import ENDLESS, Column, Listing, figure, lay_out, money
from penstock.gateway.model.prices import Prices

EVERY = (
    [*ROLLOUTS.columns], SPANS, SUMS, TOOLS, [*queue.WORKERS.columns], queue.CALLS,
    [*resources.RESOURCES.columns], resources.VERSIONS,
    [*releases.RELEASES.columns], releases.EVIDENCE, [*runs.RUNS.columns], runs.METRICS, tools.RULES,
    tools.STOPPED,
)  # fmt: skip
ID = "0193c6f2-7d1a-7c3e-9f54-2b8a6d0e4c71"
WORD = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40)
PROSE = st.lists(WORD, max_size=12).map(" ".join)


def listed(columns: Sequence[Column], *rows: list[str]) -> Listing:
    made = Listing(*columns)
    for row in rows:
        made.add_row(*row)
    return made


@st.composite
def listings(draw: st.DrawFn) -> Listing:
    columns = tuple(
        Column(
            draw(WORD),
            draw(st.none() | st.integers(1, 9)),
            draw(st.sampled_from(["never", "cut", "fold", "words"])),
            draw(st.integers(1, 20)),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 6)))
    )
    return listed(columns, *draw(st.lists(st.lists(PROSE, min_size=len(columns), max_size=len(columns)), max_size=4)))


@given(listings(), st.integers(1, 200))
def test_what_stays_is_whole_and_the_rest_is_told(table: Listing, room: int) -> None:
    found = lay_out(table.columns, table.rows, room)
    for place, column in enumerate(table.columns):
        empty = not any(row[place] for row in table.rows)
        whole = max(map(cell_len, [column.name, *(row[place].plain for row in table.rows)]))
        if place in found.left_out:
            assert column.goes is not None
            assert not empty
        elif place not in found.widths:
            assert empty
        elif column.narrows == "never":
            assert found.widths[place] == whole
        else:
            assert min(whole, column.least) <= found.widths[place] <= whole


@given(listings(), st.integers(1, 200))
def test_it_fits_or_cannot(table: Listing, room: int) -> None:
    found = lay_out(table.columns, table.rows, room)
    wide = sum(found.widths.values()) + 2 * (len(found.widths) - 1)
    if wide > room:
        # Nothing can go or be narrowed any more, and what can is as narrow as when there is no room at all.
        assert all(table.columns[place].goes is None for place in found.widths)
        assert found == lay_out(table.columns, table.rows, 1)
    lines = text_of(table, room).splitlines() if room >= 40 else []
    assert all(cell_len(line) <= max(wide, room) for line in lines)


@given(listings())
def test_in_a_pipe_a_row_is_a_line_of_all_its_cells(table: Listing) -> None:
    head, *rows = text_of(table, ENDLESS).splitlines()
    assert re.split("  +", head.strip()) == [column.name for column in table.columns]
    wanted = [[cell.plain or "-" for cell in row] for row in table.rows]
    assert [re.split("  +", row.strip()) for row in rows] == wanted


@given(st.lists(st.integers(1, 300), min_size=1, max_size=5), st.integers(10, 200))
def test_the_widest_gives_way_first(lengths: list[int], room: int) -> None:
    columns = [Column(str(place), narrows="cut", least=5) for place in range(len(lengths))]
    widths = lay_out(columns, [[Text("x" * length) for length in lengths]], room).widths
    narrowed = [width for place, width in widths.items() if width < lengths[place]]
    assert max(narrowed, default=0) - min(narrowed, default=0) <= 1
    assert not narrowed or max(widths.values()) <= max(narrowed) + 1


def test_every_table_says_what_goes_in_which_turn() -> None:
    for columns in EVERY:
        turns = [column.goes for column in columns if column.goes is not None]
        assert sorted(turns) == list(range(1, len(turns) + 1)), columns
        assert columns[0].goes is None, columns
        assert columns[0].narrows == "never", columns


def test_ids_are_whole_where_there_is_no_room() -> None:
    for columns in EVERY:
        lines = text_of(listed(columns, [ID + str(place) for place in range(len(columns))]), 20).splitlines()
        assert lines[1].startswith(f"{ID}0"), columns


def test_what_is_not_shown_is_said() -> None:
    columns = (Column("rollout"), Column("mode", 1), figure("tokens", 2), figure("tools", 3))
    table = listed(columns, [ID, "train", "100 → 20", ""])
    assert text_of(table, 60).splitlines()[1:] == [f"{ID}  train  100 → 20"]
    assert text_of(table, 50).splitlines()[1:] == [
        f"{ID}  100 → 20",
        "Not shown: mode. A wider terminal or --json has",
        "all.",
    ]


def test_what_fits_comes_back() -> None:
    columns = (Column("rollout"), Column("mode", 1), Column("group", 2))
    table = listed(columns, [ID, "train", "a group of many words"])
    assert text_of(table, 50).splitlines()[1] == f"{ID}  train"


def test_a_cell_is_one_line() -> None:
    table = listed((Column("model"), Column("why", narrows="fold", least=10)), ["a\nb\tc", "x"])
    assert text_of(table, 80).splitlines() == ["model  why", "a␊b␉c  x"]


def test_a_line_has_no_spaces_at_its_end() -> None:
    assert text_of(listed((Column("a"), Column("b")), ["1", ""], ["2", "long"]), 80) == "a  b\n1\n2  long\n"


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Listing(Column("a"), Column("b")).add_row("1")


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (None, ""), (0.0, "$0.00"), (0.000_225, "$0.00022"), (0.000_225 + 1e-19, "$0.00022"), (3.98e-05, "$0.00004"),
        (0.0123456, "$0.0123"), (0.9949, "$0.995"), (1234.5, "$1,234.50"),
    ],
)  # fmt: skip
def test_money_has_the_digits_that_matter(amount: float | None, shown: str) -> None:
    assert money(amount) == shown


def test_long_ids() -> None:
    """What a day of unmodified agents looks like: ids of coding agents' sessions, long models, long errors."""
    rollouts = listed(
        [*ROLLOUTS.columns],
        [ID, "swe-bench/astropy-12907", "train", "succeeded", "1/3", "0.75", "128", "", "1,204,311 → 48,220",
         "$14.87", "127", "3 h", "2 h ago"],
        ["q-0042.17", "", "online", "running", "2", "", "9", "2", "? → 5", "?", "", "12 m", "4 s ago"],
    )  # fmt: skip
    check_widths("long-rollouts", rollouts)


def test_names_of_priced_models_are_whole() -> None:
    prices = Prices().file.price
    shown = text_of(administration.PRICES.table(prices, 0), 80).splitlines()
    assert {one.model for one in prices} <= {line.split(" ")[0] for line in shown}
    assert max(map(len, shown)) <= 80
