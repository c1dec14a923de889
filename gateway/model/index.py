"""Requests and answers about the index (`followers.index`): its state, searches, SQL."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import Noun
from penstock.gateway.model.span import Span

IndexStatus = Literal["ready", "reading", "starting", "busy", "small", "off", "missing", "broken"]


class IndexView(Noun):
    """The state of the tape's index, and how far it has read."""

    status: IndexStatus
    """`ready`: filters answer from it. Else they scan the tape: it is still `reading` or `starting`; it is `busy` with
    an earlier question; the tape is too `small` to need one; the configuration has turned it `off`; its extra is
    `missing`; or it is `broken` and made anew in a moment."""
    reason: str
    """The same for a person, with the way out where there is one."""
    cursor: int = 0
    """The last change of the tape that it has."""
    newest: int
    """The last change of the tape."""
    files: int = 0
    """How many files it has."""
    bytes: int = 0
    """The size of its files."""
    forgotten: int = 0
    """Forgotten rollouts that are still in its files; they are in no answer."""
    unsealed: int = 0
    """Spans that are in memory only; they are read from the tape again when the gateway starts."""


# Results of a search for a text.


class Hit(Noun):
    """A passage that has the text, around the first place where it stands."""

    answer: bool
    """True in the answer, false in the request."""
    role: str
    """Who says it: system, developer, user, assistant, tool ...; empty where nobody is known to."""
    part: str
    """What it is: text, reasoning, tool_call, tool_call_response, refusal, error, unknown, body or attribute."""
    name: str | None = None
    """Of a tool call the tool, of an attribute its name."""
    before: str
    """What stands before it, up to the length of context that was asked for."""
    match: str
    """The text as it stands there."""
    after: str
    """What stands behind it, up to the same length."""
    times: int = 1
    """How often it stands in the passage."""


class SearchRow(Noun):
    """A span that says it."""

    span: Span
    """Its head."""
    hits: list[Hit]
    """A hit for each passage that has the text, in the order in which they are said; the first ten."""
    more: int = 0
    """How many more passages have it."""


class SearchPage(Page):
    """Spans that say a text, newest first."""

    rows: list[SearchRow]
    """Each with the passages that have it."""


# SQL over the tape: requests and answers.


class SqlRequest(Noun):
    """A query in SQL, with the form and the limits of its answer."""

    query: str = Field(min_length=1, max_length=100_000)
    """One SELECT, DESCRIBE or SUMMARIZE of DuckDB's SQL, over the views."""
    format: Literal["rows", "csv", "parquet"] = "rows"
    """How the answer has its rows."""
    limit: int = Field(default=1000, ge=1, le=1_000_000)
    """How many rows at most."""
    timeout_s: float = Field(default=10.0, gt=0, le=60)
    """How long it may take; s."""


class SqlColumn(Noun):
    """A column of an answer."""

    name: str
    """As the query names it."""
    type: str
    """DuckDB's type."""


class SqlAnswer(Noun):
    """The rows of a query."""

    columns: list[SqlColumn]
    """In their order."""
    count: int
    """How many rows there are here."""
    more: bool
    """There are more than were asked for, or than fit into 8 MiB."""
    rows: list[list[Any]]
    """With `rows`: a list for each. Times are ISO texts in UTC, bytes base64; integers beyond 2^53, NaN and infinity
    are texts."""
    file: str = ""
    """With `csv` the text, with `parquet` the file in base64."""


class SqlViewColumn(SqlColumn):
    """A column of a view."""

    help: str
    """What it is."""


class SqlView(Noun):
    """A view that queries may read."""

    name: str
    """Its name."""
    help: str
    """What a row is."""
    columns: list[SqlViewColumn]
    """Its columns."""


class SqlViews(Noun):
    """The views that a query in SQL may read, with their columns."""

    views: list[SqlView]
    """Rollouts first, then what is in them."""
