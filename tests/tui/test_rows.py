"""Rows as they are drawn."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult

from penstock.gateway.display.table import Column
from penstock.tui.view import Table
from penstock.tui.widgets.rows import Rows

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
            rows.show(Table(FILLING, ids, lambda id: (id, "1", "now")), ids, (), "")
            await pilot.pause()
        heading = rows.render_line(0).text[: rows.scrollable_content_region.width]
        assert heading.rstrip().endswith("here"), heading
        assert rows.left_out == ["a" * 10]


async def test_where_all_rows_are_in_sight_columns_have_the_whole_width() -> None:
    app = Screen()
    async with app.run_test(size=(WIDTH, 12)) as pilot:
        rows = app.query_one(Rows)
        rows.show(Table(FILLING, ["r000001"], lambda id: (id, "1", "now")), ["r000001"], (), "")
        await pilot.pause()
        assert (rows.left_out, len(rows.render_line(0).text.rstrip())) == ([], WIDTH)
