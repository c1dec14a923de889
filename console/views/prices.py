"""Prices of models, for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import number, plain
from penstock.gateway.model.answers import PriceList
from penstock.gateway.model.price_lists import PriceChange
from penstock.gateway.model.prices import Price, staleness_warning
from penstock.gateway.model.validation_messages import pluralized

_MOST = 40
"""Maximum number of differences of a kind, and of models without a price, that are named."""


def prices(found: PriceList, unpriced: Sequence[str] = ()) -> Group:
    """A row for each price, and the list they are from. `unpriced`: models that were called and have no price."""
    listing = Listing(
        Column("model", narrows="cut", least=8), Column("since"), figure("input"), figure("output"), figure("cached"),
        figure("cache write"), figure("long"), Column("besides", narrows="cut", least=8),
    )  # fmt: skip
    for one in found.prices:
        listing.add_row(
            plain(one.model), str(one.since or ""), number(one.input), number(one.output), number(one.cached),
            number(one.cache_write), number(one.cache_write_long), plain(_besides(one)),
        )  # fmt: skip
    file = "the list that comes with Penstock" if found.builtin else "the file that penstock.toml names"
    said = [Text(f"{found.currency} for a million tokens, as of {found.as_of}: {file}.")]
    if aged := staleness_warning(found.as_of, time.time_ns()):
        said.append(Text(f"Warning: {aged}.", style="yellow"))
    none = [Text(f"Called, and without a price: {_named(unpriced)}.")] if unpriced else []
    return Group(*said, listing, *none)


def _besides(price: Price) -> str:
    """Other properties of a call that change its price: length, tier, tools, factors."""
    lengths = sorted({it.above for it in price.rates if it.above is not None})
    tiers = dict.fromkeys(it.tier for it in price.rates if it.tier is not None)
    return ", ".join([*(f"> {above:,}" for above in lengths), *tiers, *price.tools, *price.factors])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def differences(found: Sequence[PriceChange]) -> Group:
    """The changes of an update: kept prices first, then changed and new ones."""
    listing = Listing(Column("model", narrows="cut", least=8), Column(""), Column("price", narrows="cut", least=8))
    heads: list[Text] = []
    for what in ("kept", "changed", "new"):
        some = [one for one in found if one.what == what]
        heads += [Text(f"{what}: {pluralized(len(some), 'price')}")] if some else []
        for one in some[:_MOST]:
            listing.add_row(plain(one.model), one.what, plain(one.said))
    return Group(*(heads or [Text("Nothing differs.")]), *([listing] if found else []))
