"""Questions about the whole tape: searches of the contents of calls for a text, and SQL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pagination import (
    SCAN_BODIES,
    IndexLookup,
    Mark,
    TapeSource,
    Walk,
    decode_cursor,
    encode_cursor,
    index_lookup,
    page,
    passage_reader,
    recent_walk,
)
from penstock.gateway.api.rollouts import PageQuery, add_costs
from penstock.gateway.followers.index.sql.runner import SqlQueryError
from penstock.gateway.followers.index.sql.views import VIEWS, given
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.state import (
    Hit,
    SearchPage,
    SearchRow,
    SqlAnswer,
    SqlRequest,
    SqlView,
    SqlViewColumn,
    SqlViews,
)
from penstock.gateway.model.turn import Passage
from penstock.gateway.reading.filters import PassageMatch, TextSearch, search

HITS: Final = 10
"""Most passages of one span that are shown."""


class SearchQuery(PageQuery):
    """The query parameters of a search for a text."""

    text: str = Field(min_length=1, max_length=1024)
    """What is searched for: any part of a message, a tool call, a result or an error, whatever its case."""
    filter: str = Field(default="", max_length=4096)
    """Only spans of which all these terms hold. Two more than elsewhere are about the passage itself: `role:tool` and
    `part:tool_call`."""
    words: bool = False
    """Only where it begins and ends with whole words."""
    context: int = Field(default=100, ge=0, le=500)
    """Characters before and behind it that are given with it."""
    limit: int = Field(default=20, ge=1, le=1000)
    """How many spans at most."""


async def get_search(request: web.Request) -> web.Response:
    """Spans that say a text, newest change first, each with the passages that have it. A call says what its request
    adds to the conversation and its answer: what is only sent once more is found where it was said first."""
    control, asked, now_ns = request.app[CONTROL], query_of(request, SearchQuery), time.time_ns()
    wanted = search(asked.text, asked.filter, asked.words, now_ns)
    find = index_lookup(control.index, "spans", wanted.query, now_ns)
    walk = search_walk(control.tape, wanted, asked.context, control.prices, find)
    found = await page(walk, decode_cursor("recent", asked.cursor), asked.limit, SCAN_BODIES, control.heavy.run)
    add_costs(control.prices, (row.span for row in found.rows))
    next = encode_cursor("recent", found.mark)
    return answer(SearchPage(rows=found.rows, next=next, scanned=found.scanned))


def search_walk(
    tape: TapeSource, wanted: TextSearch, context: int, prices: Prices, find: IndexLookup
) -> Walk[SearchRow]:
    """The spans that contain the text, with their passages."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, SearchRow | None]]:
        read = passage_reader(tape)
        for position, span in recent_walk(tape, wanted.query, prices, find)(mark):
            places = list(_places(read(span), wanted)) if span is not None else []
            hits = [_hit(passage, place, context) for passage, place in places[:HITS]]
            more = max(0, len(places) - HITS)
            yield position, SearchRow(span=span, hits=hits, more=more) if span is not None and hits else None

    return walk


def _places(passages: list[Passage], wanted: TextSearch) -> Iterator[tuple[Passage, PassageMatch]]:
    for passage in passages:
        if (place := wanted.find(passage)) is not None:
            yield passage, place


def _hit(passage: Passage, place: PassageMatch, context: int) -> Hit:
    text = passage.text
    return Hit(
        answer=passage.answer, role=passage.role, part=passage.kind, name=passage.name,
        before=text[max(0, place.begin - context) : place.begin], match=text[place.begin : place.end],
        after=text[place.end : place.end + context], times=place.times,
    )  # fmt: skip


SEARCH_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET", "/api/search", "search", "Search for a text in what calls say", SearchPage, get_search,
        query=SearchQuery,
    ),
)  # fmt: skip
"""This part of the API."""


# SQL (`gateway.followers.index.sql`).

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


SQL_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/sql", "sql_views", "What SQL may read", SqlViews, get_views),
    ApiRoute(
        "POST", "/api/sql", "sql", "Ask by SQL", SqlAnswer, run_sql, body=SqlRequest, reads=True, errors=(400, 409, 503)
    ),
)  # fmt: skip
"""This part of the API."""
