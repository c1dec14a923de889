"""The control API of the prices that costs are computed with."""

from __future__ import annotations

from aiohttp import web

from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import answer
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.model.answers import PriceList
from penstock.gateway.model.prices import BUILTIN


async def get_prices(request: web.Request) -> web.Response:
    """The prices of models that costs are computed with, in the order of the file. The index computes them when it
    reads a call: after a change of the file it is made anew."""
    prices = request.app[CONTROL].prices
    file = prices.file
    return answer(
        PriceList(as_of=file.as_of, currency=file.currency, builtin=prices.path == BUILTIN, prices=file.price)
    )


ROUTES: tuple[ApiRoute, ...] = (ApiRoute("GET", "/api/prices", "prices", "What models cost", PriceList, get_prices),)
"""This part of the API."""
