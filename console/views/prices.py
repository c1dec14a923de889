"""Prices of models, for readers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from penstock.console.views.noun import NounRows, NounSelection, NounView
from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import number, plain
from penstock.gateway.model.price_lists import PriceChange
from penstock.gateway.model.prices import Price, staleness_warning
from penstock.gateway.model.validation_messages import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

_MOST = 40
"""Maximum number of differences of a kind, and of models without a price, that are named."""


async def _fetch(client: Client, selection: NounSelection) -> NounRows[Price]:
    found, called = await client.prices(), await client.breakdown("model", "")
    file = "the list that comes with Penstock" if found.builtin else "the file that penstock.toml names"
    above = [Text(f"{found.currency} for a million tokens, as of {found.as_of}: {file}.")]
    if aged := staleness_warning(found.as_of, time.time_ns()):
        above.append(Text(f"Warning: {aged}.", style="yellow"))
    unpriced = [row.value for row in called.rows if row.unpriced]
    below = [Text(f"Called, and without a price: {_named(unpriced)}.")] if unpriced else []
    return NounRows(found.prices, above=above, below=below)


def _besides(price: Price) -> str:
    """Other properties of a call that change its price: length, tier, tools, factors."""
    lengths = sorted({it.above for it in price.rates if it.above is not None})
    tiers = dict.fromkeys(it.tier for it in price.rates if it.tier is not None)
    return ", ".join([*(f"> {above:,}" for above in lengths), *tiers, *price.tools, *price.factors])


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


PRICES = NounView[NounSelection, Price](
    "prices",
    Price,
    _fetch,
    key=lambda one: f"{one.model} {one.since or ''}".strip(),
    columns={
        Column("model", narrows="cut", least=8): lambda one, _: plain(one.model),
        Column("since"): lambda one, _: str(one.since or ""),
        figure("input"): lambda one, _: number(one.input),
        figure("output"): lambda one, _: number(one.output),
        figure("cached"): lambda one, _: number(one.cached),
        figure("cache write"): lambda one, _: number(one.cache_write),
        figure("long"): lambda one, _: number(one.cache_write_long),
        Column("besides", narrows="cut", least=8): lambda one, _: plain(_besides(one)),
    },
    every_s=60.0,
)


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
