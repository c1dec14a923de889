"""`penstock sql`: runs one SELECT over the tape."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.resources import text_of
from penstock.console.commands.terminal import console, show
from penstock.gateway.client.console import (
    LOCAL,
    CommandError,
    Json,
    Limit,
    Url,
    note,
    seconds,
    utf8,
    validated_model,
    whole_file,
    with_client,
)
from penstock.gateway.model.foreign_text import terminal_safe_json
from penstock.gateway.model.toml import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.state import SqlAnswer

Query = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
"""A hyphen alone is standard input."""
Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]


def sql(
    query: Query = None,
    /,
    *,
    format: Literal["csv", "parquet"] | None = None,
    output: Output = None,
    limit: Limit = 1000,
    timeout: str = "10s",
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Ask the tape by SQL: one SELECT, in DuckDB's SQL.

    Without a query it lists the views and their columns. It needs the index, and nothing can be changed by it.

    Parameters
    ----------
    query
        Such as "select model, count(*) from spans group by model"; - reads it from standard input.
    format
        Write the rows as CSV or Parquet, to --output or to standard output.
    output
        The file that is written.
    limit
        How many rows at most.
    timeout
        How long it may take, 60s at most.
    """
    from penstock.console.views import sql
    from penstock.gateway.model.state import SqlRequest

    async def ask(client: Client) -> None:
        if query is None:
            views = await client.sql_views()
            show(views.views, json, lambda: sql.views(views))
            return
        text = text_of(query) if query == "-" else utf8(query)
        wait = seconds("--timeout", timeout)
        asked = validated_model(SqlRequest, "query", query=text, format=format or "rows", limit=limit, timeout_s=wait)
        found = await client.sql(asked)
        if found.more:
            note(f"There are more than {pluralized(found.count, 'row')}: --limit {limit * 10} asks for more of them.")
        if format is not None:
            _write(found, format, output)
        elif json:
            _print_rows(found)
        elif found.count:
            console().print(sql.answer(found), crop=False)
        else:
            note("No rows.")

    if output is not None and format is None:
        raise CommandError("--output needs --format csv or --format parquet", 2)
    with_client(gateway, ask)


def _write(found: SqlAnswer, format: Literal["csv", "parquet"], output: Path | None) -> None:
    content = base64.b64decode(found.file) if format == "parquet" else found.file.encode()
    if output is None:
        sys.stdout.buffer.write(content)
        return
    with whole_file(output) as file:
        file.write(content)
    note(f"{pluralized(found.count, 'row')} {'is' if found.count == 1 else 'are'} in {output}.")


def _print_rows(found: SqlAnswer) -> None:
    import orjson

    for row in found.rows:
        line = orjson.dumps(dict(zip([it.name for it in found.columns], row, strict=True))).decode()
        sys.stdout.buffer.write(terminal_safe_json(line).encode() + b"\n")
