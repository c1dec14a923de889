"""The part of the typed client for the index, SQL, retention and budgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.model.audit import EMPTY_ACTION, ActionRequest
from penstock.gateway.model.budget import BudgetPage
from penstock.gateway.model.index import IndexView
from penstock.gateway.model.retention import ForgottenPage, RetentionHoldList, RetentionStatus
from penstock.gateway.model.retention_records import ForgottenRollout, RetentionHold
from penstock.gateway.model.sql import SqlAnswer, SqlRequest, SqlViews


class IndexClient(ApiConnection):
    """Reads and rebuilds the index, runs SQL, forgets and keeps rollouts, and reads budgets."""

    async def forget(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> ForgottenRollout:
        """Removes a rollout from the tape for good."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/forget", ForgottenRollout, said)

    async def hold_rollout(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> RetentionHold:
        """Keeps a rollout from being forgotten, until the hold is lifted."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/hold", RetentionHold, said)

    async def lift_hold(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> RetentionHold:
        """Lifts the hold of a rollout."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/lift_hold", RetentionHold, said)

    async def retention(self) -> RetentionStatus:
        """The rules for how long rollouts stay, and what is still to be deleted of forgotten ones."""
        return await self.get("/api/retention", RetentionStatus)

    async def holds(self) -> list[RetentionHold]:
        """The holds: rollouts that somebody keeps from being forgotten."""
        return (await self.get("/api/retention/holds", RetentionHoldList)).holds

    async def forgotten(self, limit: int | None = None) -> AsyncIterator[ForgottenRollout]:
        """The rollouts that were forgotten, by name."""
        async for one in self.rows("/api/retention/forgotten", ForgottenPage, {}, limit, lambda page: page.forgotten):
            yield one

    async def budgets(self, budget: str | None = None, limit: int = 100) -> BudgetPage:
        """The use of budgets, the fullest first."""
        return await self.get("/api/budgets", BudgetPage, {"budget": budget, "limit": limit})

    async def index(self) -> IndexView:
        """The state of the index, and how far it has read."""
        return await self.get("/api/index", IndexView)

    async def rebuild_index(self, said: ActionRequest = EMPTY_ACTION) -> IndexView:
        """Deletes the index; the gateway makes it anew from the tape."""
        return await self.post("/api/index/rebuild", IndexView, said)

    async def sql(self, asked: SqlRequest) -> SqlAnswer:
        """The rows of a query over the views of the tape."""
        return await self.post("/api/sql", SqlAnswer, asked)

    async def sql_views(self) -> SqlViews:
        """The views that a query may read, with their columns."""
        return await self.get("/api/sql", SqlViews)
