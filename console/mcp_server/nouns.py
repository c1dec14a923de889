"""Tools that list the nouns of `console.views.registry`, made from their views."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import GenericAlias
from typing import Any

from pydantic import BaseModel, Field, create_model

from penstock.console.mcp_server.text_format import plain
from penstock.console.mcp_server.tool import (
    MOST_TEXT,
    AnyTool,
    ToolAnswer,
    ToolContext,
    ToolDefinition,
    ToolError,
    ToolResult,
)
from penstock.console.views.noun import NounError, NounSelection
from penstock.console.views.registry import NOUNS, noun_view


class NounRowsAnswer(ToolAnswer):
    """Rows of a noun. The type of each row is that of the noun."""

    rows: Sequence[Any]
    left_out: int = 0
    """Rows that are not shown, because the answer would be too long."""
    more: bool = False
    """True if there are more than `limit`."""


def noun_tool(name: str) -> AnyTool:
    """The tool that lists a noun."""
    view, entry = noun_view(name), NOUNS[name]
    rows_of: Any = GenericAlias(list, (view.row,))
    answer: type[NounRowsAnswer] = create_model(f"{name}_answer", __base__=NounRowsAnswer, rows=(rows_of, Field()))

    async def act(context: ToolContext, asked: NounSelection) -> ToolResult:
        try:
            found = await view.fetch(context.client, asked)
        except NounError as e:
            raise ToolError(str(e)) from None
        rows = _first(found.rows)
        left_out = len(found.rows) - len(rows)
        shown = plain(view.picture(replace(found, rows=rows), time.time_ns())) if rows else found.none
        more = f"{left_out:,} more are left out: ask for fewer." if left_out else ""
        more = more or ("There are more: a larger limit shows them." if found.more else "")
        text = "\n".join(filter(None, (shown, more)))
        return ToolResult(answer.model_construct(rows=rows, left_out=left_out, more=found.more), text)

    title = entry.help.partition(":")[0].rstrip(".")
    return ToolDefinition(
        f"list_{name}", title, " ".join((entry.help, entry.more)).strip(), view.selection, answer, act
    )


def _first(rows: Sequence[BaseModel]) -> Sequence[BaseModel]:
    """The first rows, at least one, as far as an answer may hold them."""
    sizes = accumulate(len(row.model_dump_json(exclude_none=True)) for row in rows)
    return rows[: max(1, sum(size <= MOST_TEXT for size in sizes))]


TOOLS = tuple(noun_tool(name) for name in NOUNS if noun_view(name).tool)
