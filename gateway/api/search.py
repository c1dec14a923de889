"""Searches the contents of calls for a text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.contents import passage_reader
from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import answer, query_of
from penstock.gateway.api.index_lookup import index_lookup
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import (
    SCAN_BODIES,
    IndexLookup,
    Mark,
    TapeSource,
    Walk,
    decode_cursor,
    encode_cursor,
    page,
    recent_walk,
)
from penstock.gateway.api.rollouts import PageQuery
from penstock.gateway.model.index import Hit, SearchPage, SearchRow
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
    walk = search_walk(control.tape, wanted, asked.context, index_lookup(control, "spans", wanted.query, now_ns))
    found = await page(walk, decode_cursor("recent", asked.cursor), asked.limit, SCAN_BODIES, control.heavy.run)
    next = encode_cursor("recent", found.mark)
    return answer(SearchPage(rows=found.rows, next=next, scanned=found.scanned))


def search_walk(tape: TapeSource, wanted: TextSearch, context: int, find: IndexLookup) -> Walk[SearchRow]:
    """The spans that contain the text, with their passages."""

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, SearchRow | None]]:
        read = passage_reader(tape)
        for position, span in recent_walk(tape, wanted.query, find)(mark):
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


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "GET", "/api/search", "search", "Search for a text in what calls say", SearchPage, get_search,
        query=SearchQuery,
    ),
)  # fmt: skip
"""This part of the API."""
