"""SQL over the tape (`gateway.followers.index.sql`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from aiohttp import web

from penstock.gateway.api.context import Control
from penstock.gateway.api.guard import ApiError, answer
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.followers.index.sql.runner import SqlQueryError
from penstock.gateway.followers.index.sql.views import VIEWS, given
from penstock.gateway.model.index import SqlAnswer, SqlRequest, SqlView, SqlViewColumn, SqlViews

MOST_RUNS: Final = 10_000


class _EncodedSqlAnswer(SqlAnswer):
    """An answer whose JSON exists already: parsing and writing megabytes of it anew would delay calls."""

    def model_dump_json(self, **_: Any) -> str:
        return self.file


async def get_views(request: web.Request) -> web.Response:
    """The views that SQL may read, with their columns."""
    return answer(
        SqlViews(
            views=[
                SqlView(
                    name=name,
                    help=view.help,
                    columns=[
                        SqlViewColumn(name=column, type=one.type, help=one.help) for column, one in view.columns.items()
                    ],
                )
                for name, view in VIEWS.items()
            ]
        )
    )


async def run_sql(control: Control, ids: Ids, asked: SqlRequest) -> SqlAnswer:
    """Answer one SELECT over the views of the tape, in DuckDB's SQL. It runs in a process of its own that can read the
    files of the index and nothing else, with bounded memory and time; nothing can be changed. Needs the index, and
    starts it where the tape is too small to have one."""
    assert control.queries is not None
    rows = await asyncio.to_thread(_given, control)
    try:
        found = await control.queries.run(asked.query, asked.format, asked.limit, asked.timeout_s, rows)
    except SqlQueryError as error:
        raise ApiError(error.status, error.message, error.field) from None
    return _EncodedSqlAnswer(columns=[], count=0, more=False, rows=[], file=found.decode())


def _given(control: Control) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """The rows of tables that are in no file of the index."""
    named = {"releases": {"release": "id"}, "runs": {"run": "id"}}
    found = {
        "releases": control.releases.reader.releases(),
        "runs": [run for _, run in islice(control.runs.reader.run_heads(None), MOST_RUNS)],
    }
    return {
        table: [{name: getattr(one, named[table].get(name, name)) for name in given(table)} for one in some]
        for table, some in found.items()
    }


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/sql", "sql_views", "What SQL may read", SqlViews, get_views),
    ApiRoute(
        "POST", "/api/sql", "sql", "Ask by SQL", SqlAnswer, run_sql, body=SqlRequest, reads=True, errors=(400, 409, 503)
    ),
)  # fmt: skip
"""This part of the API."""
