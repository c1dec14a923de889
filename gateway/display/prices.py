"""Prices of models, for people."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from penstock.gateway.display.table import Column, Listing, figure
from penstock.gateway.display.text import number, plain
from penstock.gateway.model.answers import PriceList


def prices(found: PriceList) -> Group:
    """A row for each, and where they are from."""
    listing = Listing(
        Column("model", narrows="cut", least=8), Column("since"), figure("input"), figure("output"), figure("cached"),
        figure("cache write"),
    )  # fmt: skip
    for one in found.prices:
        listing.add_row(
            plain(one.model), str(one.since), number(one.input), number(one.output), number(one.cached),
            number(one.cache_write),
        )  # fmt: skip
    file = "the list that comes with Penstock" if found.builtin else "the file that penstock.toml names"
    return Group(Text(f"{found.currency} for a million tokens, as of {found.as_of}: {file}."), listing)
