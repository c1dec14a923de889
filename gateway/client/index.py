"""The part of the typed client that speaks of the index, of SQL, and of what stays and may be used."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from penstock.gateway.client.connection import Connection
from penstock.gateway.model.audit import UNSAID, Said
from penstock.gateway.model.budget import BudgetPage
from penstock.gateway.model.forgotten import Forgotten, Holding
from penstock.gateway.model.index import IndexView
from penstock.gateway.model.retention import ForgottenPage, HoldingList, RetentionStatus
from penstock.gateway.model.sql import SqlAnswer, SqlRequest, SqlViews


class IndexClient(Connection):
    """What can be asked about the index and done to it, about what was forgotten, and about budgets."""

    async def forget(self, rollout: str, said: Said = UNSAID) -> Forgotten:
        """Takes a rollout off the tape for good."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/forget", Forgotten, said)

    async def hold_rollout(self, rollout: str, said: Said = UNSAID) -> Holding:
        """Keeps a rollout."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/hold", Holding, said)

    async def lift_hold(self, rollout: str, said: Said = UNSAID) -> Holding:
        """Lifts the hold of a rollout."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/lift_hold", Holding, said)

    async def retention(self) -> RetentionStatus:
        """How long rollouts stay, and what is still to be deleted of those that were forgotten."""
        return await self.get("/api/retention", RetentionStatus)

    async def holds(self) -> list[Holding]:
        """Rollouts that somebody keeps."""
        return (await self.get("/api/retention/holds", HoldingList)).holds

    async def forgotten(self, limit: int | None = None) -> AsyncIterator[Forgotten]:
        """Rollouts that were forgotten, by name."""
        async for one in self.rows("/api/retention/forgotten", ForgottenPage, {}, limit, lambda page: page.forgotten):
            yield one

    async def budgets(self, budget: str | None = None, limit: int = 100) -> BudgetPage:
        """What is used of budgets, the fullest first."""
        return await self.get("/api/budgets", BudgetPage, {"budget": budget, "limit": limit})

    async def index(self) -> IndexView:
        """How the index is, and how far it has read."""
        return await self.get("/api/index", IndexView)

    async def rebuild_index(self, said: Said = UNSAID) -> IndexView:
        """Deletes the index; it is made anew from the tape."""
        return await self.post("/api/index/rebuild", IndexView, said)

    async def sql(self, asked: SqlRequest) -> SqlAnswer:
        """The rows of a query over the views of the tape."""
        return await self.post("/api/sql", SqlAnswer, asked)

    async def sql_views(self) -> SqlViews:
        """The views that a query may read, with their columns."""
        return await self.get("/api/sql", SqlViews)
