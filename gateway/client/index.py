"""The part of the typed client that speaks of the index, and of SQL."""

from __future__ import annotations

from penstock.gateway.client.connection import Connection
from penstock.gateway.model.audit import UNSAID, Said
from penstock.gateway.model.index import IndexView
from penstock.gateway.model.sql import SqlAnswer, SqlRequest, SqlViews


class IndexClient(Connection):
    """What can be asked about the index and done to it."""

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
