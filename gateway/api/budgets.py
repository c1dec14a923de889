"""The control API of budgets."""

from __future__ import annotations

import asyncio

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import answer, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.model.base import ID_PATTERN, Noun
from penstock.gateway.model.budget import BudgetPage


class BudgetsQuery(Noun):
    """Parameters of the list of budgets."""

    budget: str | None = Field(default=None, pattern=ID_PATTERN)
    """Only of the budget of this name."""
    limit: int = Field(default=100, ge=1, le=10_000)
    """How many at most."""


async def get_budgets(request: web.Request) -> web.Response:
    """What is used and reserved of each budget in the window of this moment, the fullest first. What has a budget of
    its own is there once a call of it was counted."""
    asked, budgets = query_of(request, BudgetsQuery), request.app[CONTROL].budgets
    found = [] if budgets is None else await asyncio.to_thread(budgets.uses, asked.budget)
    names = [] if budgets is None else budgets.names
    return answer(BudgetPage(budgets=found[: asked.limit], total=len(found), configured=names))


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/budgets", "budgets", "What is used of budgets", BudgetPage, get_budgets, query=BudgetsQuery),
)
"""This part of the API."""
