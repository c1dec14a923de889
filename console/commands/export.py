"""`penstock export`: writes everything that matches a filter as a table for other tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Terms, Url, joined_terms, note, with_client

if TYPE_CHECKING:
    from pydantic import BaseModel

    from penstock.gateway.client.client import Client
    from penstock.gateway.model.span import Span

What = Literal["rollouts", "spans", "messages", "tools"]
Output = Annotated[Path | None, Parameter(name=("--output", "-o"))]


def export(
    *filter: Terms,
    what: What = "rollouts",
    format: Literal["jsonl", "parquet"] = "jsonl",
    output: Output = None,
    gateway: Url = LOCAL,
) -> None:
    """Write rollouts, spans, conversations or runs of tools to a file.

    The filter is of rollouts for `rollouts` and `tools`, and of spans for the other two.

    Parameters
    ----------
    what
        A row for each rollout, for each span, for each model call with what was said in it, or for each tool that a
        rollout used.
    format
        JSON lines or Parquet, which needs the extra `parquet`.
    output
        File to write, which appears when it is whole; stdout if not given.
    """
    from penstock.gateway.client import tables
    from penstock.gateway.client.console import check_format, whole_file
    from penstock.gateway.model.toml import pluralized

    terms = joined_terms(filter)
    check_format(format, output)

    async def ask(client: Client) -> None:
        with whole_file(output) as file:
            count = await tables.export(_rows(client, what, terms), tables.sink(file, what, format))
        if output is not None:
            note(f"{output}: {pluralized(count, 'row')}")
        elif not count:
            note("Nothing was written: nothing matches.")

    with_client(gateway, ask)


def _rows(client: Client, what: What, filter: str) -> AsyncIterator[BaseModel]:
    if what == "rollouts":
        return client.rollouts(filter)
    if what == "tools":
        return _tools(client, filter)
    return _spans(client, filter) if what == "spans" else _conversations(client, filter)


async def _spans(client: Client, filter: str) -> AsyncIterator[Span]:
    """The spans of agents. Calls that were made to try a release belong in no data set or bill."""
    from penstock.gateway.model.facts import is_release_call

    async for head in client.recent_spans(filter):
        if not is_release_call(head):
            yield head


async def _tools(client: Client, filter: str) -> AsyncIterator[BaseModel]:
    from penstock.gateway.model.facts import is_rehearsal
    from penstock.gateway.model.tools import ToolRow

    async for rollout in client.rollouts(filter):
        for attempt in () if is_rehearsal(rollout.id) else rollout.attempts:
            for use in await client.tools(rollout.id, attempt.id):
                # A run is exported with the rollout that has its span.
                if use.run_in is None:
                    yield ToolRow(**dict(use), rollout=rollout.id, attempt=attempt.id)


async def _conversations(client: Client, filter: str) -> AsyncIterator[BaseModel]:
    """The conversation of each call, read a few calls at a time."""
    from penstock.gateway.client.connection import PARALLEL

    heads: list[Span] = []
    async for head in _spans(client, f"kind:llm {filter}"):
        heads.append(head)
        if len(heads) == PARALLEL:
            for made in await _read(client, heads):
                yield made
            heads = []
    for made in await _read(client, heads):
        yield made


async def _read(client: Client, heads: list[Span]) -> list[BaseModel]:
    from penstock.gateway.client.connection import map_concurrently
    from penstock.gateway.client.tables import ConversationRow

    details = await map_concurrently(lambda head: client.span(head.rollout, head.attempt, head.sequence), heads)
    return [made for made in map(ConversationRow.of, details) if made is not None]
