"""SQL over the tape: requests and answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.gateway.model.base import Noun


class SqlRequest(Noun):
    """A query."""

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
    """What queries may read."""

    views: list[SqlView]
    """Rollouts first, then what is in them."""
