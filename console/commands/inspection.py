"""Commands that show what is on the tape."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.terminal import console, show, show_json
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
    with_client,
)
from penstock.gateway.model.codes import BreakdownDimension
from penstock.gateway.model.foreign_text import terminal_safe_json

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from penstock.console.views.rollout_tree import RequestedToolRuns
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import ExchangeBytes, SpanDetail
    from penstock.gateway.model.span import Span
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
    calls
        How many spans at most.
    """
    from penstock.console.views import rollout_tree

    async def ask(client: Client) -> None:
        rid, attempt, sequence = target_of(target)
        if sequence is not None:
            attempt = attempt or await only_attempt(client, rid)
            if raw is not None:
                await _print_body(client, (rid, attempt, sequence), raw, side)
            else:
                detail = await client.span(rid, attempt, sequence)
                show([detail], json, lambda: rollout_tree.call_tree(detail))
        elif raw is not None:
            raise CommandError(f"--raw shows one call: say which, such as {rid}/{attempt or 'ATTEMPT'}#1", 2)
        else:
            await _show_rollout(client, rid, [head async for head in client.spans(rid, attempt, limit=calls)], json)

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
    """The tool runs that model calls asked for, by attempt, also those in other rollouts."""
    from penstock.console.views.rollout_tree import RequestedToolRuns
    from penstock.gateway.client.connection import map_concurrently

    async def run(use: ToolUse) -> SpanDetail:
        rollout, _, aid = (use.run_in or "").partition("/")
        return await client.span(rollout, aid, use.span or 0, "none")

    last = {span.attempt: span.sequence for span in spans}
    found: dict[str, RequestedToolRuns] = {}
    for attempt in sorted({span.attempt for span in spans if span.kind == "tool" or span.tool_calls}):
        told = await client.tools(rid, attempt, last[attempt], inside=False)
        used = [use for use in told if use.asked_by is not None and use.asked_in is None]
        own = {use.span: use.asked_by or 0 for use in used if use.span is not None and use.run_in is None}
        strays = [use for use in used if use.run_in is not None]
        runs = await map_concurrently(run, strays)
        found[attempt] = RequestedToolRuns(
            own, [(use.asked_by or 0, one) for use, one in zip(strays, runs, strict=True)]
        )
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
