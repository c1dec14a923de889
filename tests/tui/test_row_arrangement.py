"""The order of rows, what is searched for, and where the selection stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult

from penstock.console.views.table import Column
from penstock.tui.view import TableModel, arrange_rows, find_failed_row, matches, next_sort, selection_index
from penstock.tui.widgets import Rows

IDS = st.lists(st.text("abcdef", min_size=1, max_size=3), unique=True, max_size=12)


def table(ids: list[str], values: dict[str, int | None] | None = None) -> TableModel:
    """Rows that have a value or none."""
    found = values or {}
    return TableModel(
        (Column("id"), Column("value")),
        ids,
        lambda id: (id, str(found.get(id))),
        order={"value": lambda id: found.get(id)},
    )


@given(IDS, st.data())
def test_sorting_keeps_every_row_and_puts_those_without_a_value_last(ids: list[str], data: st.DataObject) -> None:
    values = {id: data.draw(st.none() | st.integers(0, 3)) for id in ids}
    reverse = data.draw(st.booleans())
    found = arrange_rows(table(ids, values), "value", reverse, "")
    assert sorted(found) == sorted(ids)
    known = [value for id in found if (value := values[id]) is not None]
    assert known == sorted(known, reverse=reverse)
    assert all(values[id] is None for id in found[len(known) :])


@given(IDS)
def test_without_a_column_rows_come_as_they_are_or_the_other_way_round(ids: list[str]) -> None:
    assert list(arrange_rows(table(ids), "", False, "")) == ids
    assert list(arrange_rows(table(ids), "", True, "")) == ids[::-1]


def test_a_search_finds_rows_that_have_all_words_and_none_of_those_with_a_mark() -> None:
    rows = table(["alpha", "beta", "gamma"], {"alpha": 1, "beta": 2, "gamma": 1})
    assert list(arrange_rows(rows, "", False, "1")) == ["alpha", "gamma"]
    assert list(arrange_rows(rows, "", False, "1 !GAM")) == ["alpha"]
    assert list(arrange_rows(rows, "", False, "nothing")) == []
    assert matches("a ! b", ["!"])


@given(IDS, st.text("abcdef", min_size=1, max_size=3), st.integers(0, 20))
def test_the_selection_stands_on_its_row_whatever_comes_and_goes(ids: list[str], chosen: str, before: int) -> None:
    at = selection_index(ids, chosen, before, following=False)
    if not ids:
        assert at is None
    elif chosen in ids:
        assert at is not None
        assert ids[at] == chosen
    else:
        assert at == min(before, len(ids) - 1)
    assert selection_index(ids, chosen, before, following=True) == (0 if ids else None)


def test_columns_to_sort_by_come_round() -> None:
    assert next_sort(table([]), "") == "value"
    assert next_sort(table([]), "value") == ""
    assert next_sort(table([]), "of another table") == ""


def test_the_next_row_that_went_wrong() -> None:
    rows = TableModel((Column("x"),), ["a", "b", "c", "d"], lambda id: ["failed" if id in "bd" else "ok"])
    assert find_failed_row(rows, rows.ids, 0, 1) == 1
    assert find_failed_row(rows, rows.ids, 1, 1) == 3
    assert find_failed_row(rows, rows.ids, 3, 1) is None
    assert find_failed_row(rows, rows.ids, 3, -1) == 1


# -- rows as they are drawn --------------------------------------------------------------------------------------------


WIDTH = 37
FILLING = (Column("rollout"), Column("a" * 10, goes=1), Column("last call here"))
"""With the gutter and what is between them as wide as the screen."""


class Screen(App[None]):
    """Rows and nothing else."""

    def compose(self) -> ComposeResult:
        yield Rows()


@pytest.mark.parametrize("counts", [(60,), (3, 60)])
async def test_the_scrollbar_covers_no_column(counts: tuple[int, ...]) -> None:
    app = Screen()
    async with app.run_test(size=(WIDTH, 12)) as pilot:
        rows = app.query_one(Rows)
        for count in counts:
            ids = [f"r{number:06}" for number in range(count)]
            rows.show(TableModel(FILLING, ids, lambda id: (id, "1", "now")), ids, (), "")
            await pilot.pause()
        heading = rows.render_line(0).text[: rows.scrollable_content_region.width]
        assert heading.rstrip().endswith("here"), heading
        assert rows.left_out == ["a" * 10]


async def test_where_all_rows_are_in_sight_columns_have_the_whole_width() -> None:
    app = Screen()
    async with app.run_test(size=(WIDTH, 12)) as pilot:
        rows = app.query_one(Rows)
        rows.show(TableModel(FILLING, ["r000001"], lambda id: (id, "1", "now")), ["r000001"], (), "")
        await pilot.pause()
        assert (rows.left_out, len(rows.render_line(0).text.rstrip())) == ([], WIDTH)
