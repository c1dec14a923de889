"""Commands that read the tape through a gateway: they show what is on it, ask it by SQL, or write it to a file."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.terminal import console, show, show_json, text_of
from penstock.gateway.client.console import (
    LOCAL,
    CommandError,
    Json,
    Limit,
    Terms,
    Url,
    joined_terms,
    limited_rows,
    note,
    only_attempt,
    seconds,
    target_of,
    utf8,
    validated_model,
    with_asked,
    with_client,
)
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.foreign_text import terminal_safe_json

if TYPE_CHECKING:
    from pydantic import BaseModel

    from penstock.console.views.rollout_tree import RequestedToolRuns
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import ExchangeBytes, SpanDetail
    from penstock.gateway.model.span import Span
    from penstock.gateway.model.state import SqlAnswer
    from penstock.gateway.model.tools import ToolUse

NOT_SAID = (
    "No call says that; a filter with raw~ looks at all bytes of calls instead, slowly: penstock rollouts raw~TEXT"
)
SearchTerms = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        help="Terms about spans, such as agent:planner since:7d; role:tool and part:tool_call are about the passage.",
    ),
]
Words = Annotated[bool, Parameter(name=["--words", "-w"], negative="", help="Only whole words.")]
What = Literal["rollouts", "spans", "messages", "tools"]
Output = Annotated[Path | None, Parameter(name=("--output", "-o"))]
Query = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
"""A hyphen alone is standard input."""


def spans(rollout: str, /, *filter: Terms, limit: Limit = 1000, json: Json = False, gateway: Url = LOCAL) -> None:
    """List the spans of a rollout, in order: its calls, rewards and events.

    Parameters
    ----------
    rollout
        RID or RID/ATTEMPT.
    """
    from penstock.console.views import rollouts

    async def ask(client: Client) -> None:
        rows = await limited_rows(limit, lambda most: client.spans(rid, attempt, terms, most))
        show(rows, json, lambda: rollouts.spans(rows), "No span matches." if terms else f"{rollout} has no spans yet.")

    (rid, attempt, _), terms = target_of(rollout), joined_terms(filter)
    with_client(gateway, ask)


def search(
    text: str,
    /,
    *filter: SearchTerms,
    words: Words = False,
    limit: Limit = 20,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Find a text in what calls say: messages, tool calls and results, errors.

    The newest come first. What agents send once more with every call is found where it was said first.

    Parameters
    ----------
    text
        Any part of it, whatever its case. Several words are a phrase.
    """
    import time

    from penstock.console.views import rollouts

    async def ask(client: Client) -> None:
        rows = await limited_rows(limit, lambda most: client.search(text, terms, words, most))
        show(rows, json, lambda: rollouts.findings(rows, time.time_ns()), NOT_SAID)

    terms, text = joined_terms(filter), utf8(text)
    with_client(gateway, ask)


def show_rollout(
    target: str,
    /,
    *,
    raw: Literal["request", "response"] | None = None,
    side: Literal["agent", "engine", "receipt"] | None = None,
    html: Path | None = None,
    compare: str | None = None,
    calls: Limit = 50,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Show a rollout as a tree: attempts, calls, and what each call added to the conversation.

    Parameters
    ----------
    target
        RID, RID/ATTEMPT, or RID/ATTEMPT#SEQUENCE for one call with its whole text.
    raw
        Print the exact bytes of one call's body instead.
    side
        With --raw, those of a party that was spoken with in another wire format.
    html
        Write one page for a browser to this file instead: when each call ran, what was said, tools, costs.
    compare
        With --html, another rollout: the page shows where the conversations differ.
    calls
        How many spans at most.
    """
    from penstock.console.views import rollout_tree
    from penstock.gateway.model.base import CALLS

    async def ask(client: Client) -> None:
        rid, attempt, sequence = target_of(target)
        if html is not None:
            spans = [head async for head in client.spans(rid, attempt, limit=calls)]
            await _write_page(client, (rid, attempt), spans, compare, html)
        elif sequence is not None:
            attempt = attempt or await only_attempt(client, rid)
            if raw is not None:
                await _print_body(client, (rid, attempt, sequence), raw, side)
            else:
                detail = await client.span(rid, attempt, sequence)
                show([detail], json, lambda: rollout_tree.call_tree(detail))
        elif raw is not None:
            found = [head async for head in client.spans(rid, attempt, f"kind:{','.join(CALLS)}", 1)]
            such = "".join(f", such as '{rid}/{head.attempt}#{head.sequence}'" for head in found)
            raise CommandError(f"--raw shows one call: say which{such or f'; {target} has none yet'}", 2)
        else:
            await _show_rollout(client, rid, [head async for head in client.spans(rid, attempt, limit=calls)], json)

    if compare is not None and html is None:
        raise CommandError(
            f"--compare goes with --html; in a terminal: penstock tui --plain compare {target} {compare}", 2
        )
    if html is not None and (json or raw is not None or target_of(target)[2] is not None):
        raise CommandError("--html writes a page of a rollout or an attempt: leave out --json, --raw and #SEQUENCE", 2)
    with_client(gateway, ask)


async def _write_page(
    client: Client, target: tuple[str, str | None], spans: list[Span], compare: str | None, html: Path
) -> None:
    import time

    from penstock.console.views.rollout_page import ComparedRollout, RolloutRecord, rollout_page
    from penstock.console.views.rollout_tree import steps
    from penstock.gateway.client.console import whole_file
    from penstock.gateway.model.toml import pluralized

    rid, attempt = target
    rollout = await client.rollout(rid)
    if attempt is not None:
        (chosen,) = (one for one in rollout.attempts if one.id == attempt)
        mine = {"attempts": [chosen], "totals": chosen.totals, "reward": chosen.reward}
        rollout = rollout.model_copy(update=mine)
    details = [detail async for detail in _details(client, spans, "none")]
    using = sorted({span.attempt for span in spans if span.kind == "tool" or span.tool_calls})
    used = [use for name in using for use in await client.tools(rid, name)]
    record = RolloutRecord(rollout, details, await _asked(client, rid, spans), used)
    other = None
    if compare is not None:
        theirs = await client.rollout(compare)
        both = (theirs.attempts, compare, None), (rollout.attempts, rid, attempt)
        found = [steps(await client.transcript(one, of)) if tried else [] for tried, one, of in both]
        other = ComparedRollout(theirs, *found)
    with whole_file(html) as file:
        file.write(rollout_page(record, time.time_ns(), other).encode())
    note(f"{html}: {pluralized(len(spans), 'span')}")


async def _print_body(client: Client, call: tuple[str, str, int], raw: str, side: str | None) -> None:
    ask = client.request_body if raw == "request" else client.response_body
    sys.stdout.buffer.write(await ask(*call, side))
    sys.stdout.buffer.flush()


async def _show_rollout(client: Client, rid: str, spans: list[Span], json: bool) -> None:
    """Shows a rollout while its calls are read: of a long one only the heads of its spans are held in memory."""
    from penstock.console.views.rollout_tree import RolloutTree

    rollout = await client.rollout(rid)
    if json:
        show_json(rollout)
        async for detail in _details(client, spans, "exact"):
            show_json(detail)
        return
    tree, out = RolloutTree(rollout, spans, await _asked(client, rid, spans)), console()
    out.print(tree.head(), crop=False)
    if (task := tree.task()) is not None:
        out.print(task, crop=False, end="")
    for attempt in rollout.attempts:
        out.print(tree.attempt(attempt), crop=False, end="")
        places = list(tree.subtrees(attempt))
        below = [span for place in places for span, _ in place.spans]
        details = _details(client, below, "none")
        for place in places:
            read = {span.sequence: await anext(details) for span, _ in place.spans}
            for piece in tree.render_subtree(place, read, place is places[-1]):
                out.print(piece, crop=False, end="")


async def _details(client: Client, spans: list[Span], exchange: ExchangeBytes) -> AsyncIterator[SpanDetail]:
    """The spans in full, read a few requests at a time."""
    from penstock.gateway.client.connection import PARALLEL, concurrency_for, map_concurrently

    while spans:
        some, spans = spans[:PARALLEL], spans[PARALLEL:]
        size = concurrency_for(head.request_bytes + head.response_bytes for head in some)
        for detail in await map_concurrently(
            lambda head: client.span(head.rollout, head.attempt, head.sequence, exchange), some, size
        ):
            yield detail


async def _asked(client: Client, rid: str, spans: list[Span]) -> dict[str, RequestedToolRuns]:
    """The tool runs and the sub-agents that model calls asked for, by attempt, also runs in other rollouts."""
    from penstock.console.views.rollout_tree import RequestedToolRuns
    from penstock.gateway.client.connection import map_concurrently

    async def run(use: ToolUse) -> SpanDetail:
        rollout, _, aid = (use.run_in or "").partition("/")
        return await client.span(rollout, aid, use.span or 0, "none")

    last = {span.attempt: span.sequence for span in spans}
    found: dict[str, RequestedToolRuns] = {}
    for attempt in sorted({span.attempt for span in spans if span.kind == "tool" or span.tool_calls}):
        told = await client.tool_list(rid, attempt, last[attempt], inside=False)
        used = [use for use in told.tools if use.asked_by is not None and use.asked_in is None]
        own = {use.span: use.asked_by or 0 for use in used if use.span is not None and use.run_in is None}
        strays = [use for use in used if use.run_in is not None]
        runs = await map_concurrently(run, strays)
        elsewhere = [(use.asked_by or 0, one) for use, one in zip(strays, runs, strict=True)]
        found[attempt] = RequestedToolRuns(own, elsewhere, told.agents)
    return found


def tools(target: str, /, *, json: Json = False, gateway: Url = LOCAL) -> None:
    """List the tools that a rollout used, and what asked for each.

    Parameters
    ----------
    target
        RID or RID/ATTEMPT.
    """
    from penstock.console.views import rollouts

    async def ask(client: Client) -> None:
        rid, attempt, _ = target_of(target)
        attempt = attempt or await only_attempt(client, rid, "")
        used = await client.tools(rid, attempt)
        show(used, json, lambda: rollouts.tools(used), f"{rid}/{attempt} has used no tools.")

    with_client(gateway, ask)


def token(rollout: str, /, *, expires: str | None = None, gateway: Url = LOCAL) -> None:
    """Make an agent token: the API key of an agent that may speak for one rollout and nothing else.

    Parameters
    ----------
    rollout
        The only rollout that it opens.
    expires
        How long it is valid, such as 30m, 1h or 7d; for ever if not given.
    """
    lasting = None if expires is None else math.ceil(seconds("--expires", expires))

    async def ask(client: Client) -> None:
        made = await client.make_token(rollout, lasting)
        print(made.token)

    with_client(gateway, ask)


def stats(
    *filter: Terms, by: BreakdownDimension | None = None, since: str | None = None, spans: int | None = None,
    json: Json = False, gateway: Url = LOCAL,
) -> None:  # fmt: skip
    """Show figures: calls, tokens and latencies by model, tools, rewards, the queue, and the tape.

    With --by they are figures of all calls that a filter takes, a row for each value.

    Parameters
    ----------
    by
        Put calls together by this: `agent`, `version`, `day` ...
    since
        With --by: only calls that began then or later, such as 7d or 2026-11-01.
    spans
        Without --by: how many of the newest spans to sum over. All if not given, where there is an index, else 10,000.
    """
    import asyncio
    import time

    from rich.console import Group
    from rich.text import Text

    from penstock.console.views import breakdown, queue, rollouts
    from penstock.gateway.model.prices import staleness_warning

    terms = joined_terms(filter) + (f' since:"{since}"' if since else "")
    if by is None and terms:
        raise CommandError("a filter and --since go with --by, such as `penstock stats --by agent --since 7d`", 2)

    async def ask(client: Client) -> None:
        if by is not None:
            found = await client.breakdown(by, terms.strip())
            show([found], json, lambda: breakdown.breakdown(found))
            return
        figures, status, prices = await asyncio.gather(client.stats(spans), client.queue(), client.prices())
        aged, now_ns = staleness_warning(prices.as_of, time.time_ns()), time.time_ns()
        said = [Text(f"Warning: {aged}.", style="yellow")] if aged else []
        show([figures, status], json, lambda: Group(rollouts.stats(figures), queue.queue(status, now_ns), *said))

    with_client(gateway, ask)


def changes(*, since: int | None = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Follow what happens, until interrupted.

    Parameters
    ----------
    since
        Cursor to begin after; 0 is the beginning of the tape, and what is new if not given.
    """
    from penstock.console.views import rollouts

    async def ask(client: Client) -> None:
        # This fails at once when there is no gateway: the feed itself would wait for one.
        now = (await client.stats(spans=0)).cursor
        terminal = console()
        if terminal.is_terminal:
            note("Waiting for changes; Ctrl-C ends it.")
        async for entry in client.changes(now if since is None else since):
            line = terminal_safe_json(entry.model_dump_json(exclude_none=True)) if json else rollouts.change(entry)
            terminal.print(line, soft_wrap=True)

    with_client(gateway, ask)


# -- `penstock export` ----


def export(
    *filter: Terms,
    what: What = "rollouts",
    format: Literal["jsonl", "parquet", "atif"] = "jsonl",
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
        JSON lines, Parquet, which needs the extra `parquet`, or a trajectory for each attempt of `rollouts` as Harbor
        has it (ATIF), as lines or below a folder.
    output
        File to write, which appears when it is whole; stdout if not given. With `atif` a name that does not end in
        .jsonl is a folder.
    """
    from penstock.gateway.client import tables
    from penstock.gateway.client.console import check_format, whole_file
    from penstock.gateway.model.toml import pluralized

    terms = joined_terms(filter)
    if format == "atif":
        from penstock.console.commands.atif import write_atif

        if what != "rollouts":
            raise CommandError(f"--format atif writes whole rollouts: --what {what} cannot be", 2)
        if output is None:
            check_format("jsonl", output)
        with_client(gateway, lambda client: write_atif(client, terms, output))
        return
    check_format(format, output)

    async def ask(client: Client) -> None:
        with whole_file(output) as file:
            count = await tables.export(_rows(client, what, terms), tables.sink(file, what, format))
        if output is not None:
            note(f"{output}: {pluralized(count, 'row')}")
        elif not count:
            note(with_asked("Nothing was written: nothing matches."))

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


# -- `penstock sql` ----


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
    from penstock.console.views import breakdown
    from penstock.gateway.model.state import SqlRequest
    from penstock.gateway.model.toml import pluralized

    async def ask(client: Client) -> None:
        if query is None:
            views = await client.sql_views()
            show(views.views, json, lambda: breakdown.sql_views(views))
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
            console().print(breakdown.sql_answer(found), crop=False)
        else:
            note(with_asked("No rows."))

    if output is not None and format is None:
        raise CommandError("--output needs --format csv or --format parquet", 2)
    if output is None and format == "parquet" and sys.stdout.isatty():
        raise CommandError("Parquet is not for a terminal: write it with --output FILE", 2)
    with_client(gateway, ask)


def _write(found: SqlAnswer, format: Literal["csv", "parquet"], output: Path | None) -> None:
    content = base64.b64decode(found.file) if format == "parquet" else found.file.encode()
    if output is None:
        sys.stdout.buffer.write(content)
        return
    from penstock.gateway.client.console import whole_file
    from penstock.gateway.model.toml import pluralized

    with whole_file(output) as file:
        file.write(content)
    note(f"{pluralized(found.count, 'row')} {'is' if found.count == 1 else 'are'} in {output}.")


def _print_rows(found: SqlAnswer) -> None:
    import orjson

    for row in found.rows:
        line = orjson.dumps(dict(zip([it.name for it in found.columns], row, strict=True))).decode()
        sys.stdout.buffer.write(terminal_safe_json(line).encode() + b"\n")
