"""The screen of one rollout: its spans as a tree beside their bars, and the details of the selected one.

It asks for the heads of at most `MOST` spans, for a call's content when the call is selected, and for its bytes when a
pane that shows them is in sight. Ended calls never change, so they are kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import queue, rollout_tree
from penstock.console.views import rollouts as shown
from penstock.console.views.table import Column, clean, compact, duration, figure, joined, number, plain, size
from penstock.gateway.client.connection import map_concurrently
from penstock.gateway.model.answers import Diagnosis, ExchangeBytes, SpanDetail
from penstock.gateway.model.base import CALLS, ActionRequest
from penstock.gateway.model.rollout import FINAL, Attempt, Outcome, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.tools import ToolList, ToolUse
from penstock.gateway.model.turn import Turn
from penstock.gateway.wire.dialects.tokens import read_logprobs
from penstock.tui.screens import span_panes
from penstock.tui.screens.span_panes import timing, tokens
from penstock.tui.view import Pane, ScreenView, TableModel, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.answers import Digest

MOST: Final = 2_000
"""The most spans that are shown."""
EARLIER: Final = 3
"""The calls before the selected one whose messages are compared with its own."""
KEPT: Final = 64
"""The most ended calls that are kept."""
LARGEST: Final = 4 << 20
"""The most bytes of a call that are asked for."""
SPANS = (
    Column("span", narrows="cut", least=24), Column("status"), figure("latency"),
    figure("tokens", 1), figure("cost", 2),
)  # fmt: skip
WITH_BYTES = frozenset({"Tokens", "Request", "Response", "Timing"})
Find = Callable[[Any, str | None], RolloutSummary | None]
"""The rollout of a row."""
UNKNOWN = "no rollout is chosen, or it is not loaded yet"


def rollout_actions(find: Find) -> Sequence[ViewAction[Any]]:
    """The actions that cancel and requeue a rollout."""

    def why_not_cancel(data: Any, id: str | None) -> str | None:
        found = find(data, id)
        if found is None:
            return UNKNOWN
        return f"{found.id} has ended already: it is {found.status}" if found.status in FINAL else None

    def why_not_requeue(data: Any, id: str | None) -> str | None:
        found = find(data, id)
        if found is None:
            return UNKNOWN
        if found.origin != "queued":
            return f"{found.id} did not come from the queue"
        return None if found.status in FINAL else f"{found.id} has not ended: it is {found.status}"

    def ask_cancel(data: Any, id: str | None) -> str:
        found = _found(find, data, id)
        running = "Its agent is told to stop at its next heartbeat" if found.attempt else "Nobody works on it yet"
        return (
            f"Cancel rollout {found.id}, which is {found.status}? {running}. It stays cancelled unless it is requeued."
        )

    def ask_requeue(data: Any, id: str | None) -> str:
        found = _found(find, data, id)
        return f"Queue rollout {found.id} again, which has {found.status}? A worker makes another attempt at it."

    async def cancel(client: Client, data: Any, id: str | None, said: ActionRequest) -> str:
        moved = await client.cancel(_found(find, data, id).id, said)
        return f"{moved.id} is {moved.status}."

    async def requeue(client: Client, data: Any, id: str | None, said: ActionRequest) -> str:
        moved = await client.requeue(_found(find, data, id).id, said)
        return f"{moved.id} is {moved.status}."

    return (
        ViewAction("rollout.cancel", why_not_cancel, ask_cancel, cancel),
        ViewAction("rollout.requeue", why_not_requeue, ask_requeue, requeue),
    )


def _found(find: Find, data: Any, id: str | None) -> RolloutSummary:
    found = find(data, id)
    if found is None:
        raise ValueError(UNKNOWN)
    return found


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A line of the tree: an attempt, or a span of it."""

    attempt: Attempt
    span: Span | None = None
    depth: int = 0
    inferred: bool = False
    """True if it is of a sub-agent that no header names."""


@dataclass(slots=True)
class RolloutData:
    """A rollout and its spans."""

    rollout: RolloutSummary
    rows: dict[str, TreeRow]
    """Lines by `ATTEMPT` or `ATTEMPT#SEQUENCE`, from top to bottom."""
    axes: dict[str, span_panes.TimeAxis]
    """The time axis of each attempt."""
    used: dict[str, list[ToolUse]]
    """Tool uses by attempt."""
    left_out: int
    """Spans that are not shown."""


@dataclass(frozen=True, slots=True)
class TreeRowDetails:
    """The details of a row."""

    detail: SpanDetail | None = None
    earlier: Sequence[Turn] = ()
    """The nearest calls of the attempt before it."""
    diagnosis: Diagnosis | None = None
    printed: Sequence[Span] = field(default_factory=list[Span])
    """Spans of the output that an attempt's agent printed."""


def _shown(data: RolloutData, id: str | None) -> RolloutSummary:
    return data.rollout


class RolloutView(ScreenView[RolloutData, TreeRowDetails]):
    name = "rollout"
    title = "Rollout"
    help = "what one rollout did, call by call"
    concerns = frozenset({"rollouts"})
    every_s = 30.0
    actions: ClassVar[Sequence[ViewAction[Any]]] = rollout_actions(_shown)

    def __init__(self, rollout: str, start: str | None = None) -> None:
        """`start`: the span that is chosen at first."""
        self._rollout, self._start = rollout, start
        self._kept: OrderedDict[tuple[str, ExchangeBytes], SpanDetail] = OrderedDict()

    def forget(self) -> None:
        self._kept.clear()

    # Asking -----------------------------------------------------------------------------------------------------------

    async def load(self, client: Client) -> RolloutData:
        """Ask for the rollout, the heads of its spans, and its tool uses."""

        async def heads() -> list[Span]:
            return [span async for span in client.spans(self._rollout, limit=MOST)]

        rollout, spans = await asyncio.gather(client.rollout(self._rollout), heads())
        names = sorted({span.attempt for span in spans if span.kind == "tool" or span.tool_calls})
        used = await map_concurrently(lambda name: client.tool_list(self._rollout, name), names)
        return build_tree(rollout, spans, dict(zip(names, used, strict=True)))

    def observe(self, digest: Digest) -> bool:
        return self._rollout in digest.rollouts or digest.more > 0

    async def load_details(self, client: Client, data: RolloutData, id: str) -> TreeRowDetails | None:
        """Ask for the selected call with those before it, or for the selected attempt."""
        row = data.rows.get(id)
        if row is None:
            return None
        diagnosing = self.pane is None or self.pane == "Doctor"
        asked = client.diagnosis(self._rollout) if diagnosing else _nothing()
        if row.span is None:
            return TreeRowDetails(diagnosis=await asked, printed=_printed(data, row.attempt))
        before = _before(data, row.span) if row.span.kind == "llm" else []
        detail, diagnosis, earlier = await asyncio.gather(
            self._detail(client, row.span, self._bytes(row.span)),
            asked,
            asyncio.gather(*(self._detail(client, span, "none") for span in before)),
        )
        return TreeRowDetails(detail, [one.turn for one in earlier if one.turn is not None], diagnosis)

    def _bytes(self, span: Span) -> ExchangeBytes:
        """The form of a call's bytes that the panes in sight need."""
        wanted = self.pane is None or self.pane in WITH_BYTES
        return "plain" if wanted and span.request_bytes + span.response_bytes <= LARGEST else "none"

    async def _detail(self, client: Client, span: Span, wanted: ExchangeBytes) -> SpanDetail:
        """A span; an ended one is asked for once."""
        for form in ("plain", wanted):
            if (known := self._kept.get((_id(span), form))) is not None:
                return known
        found = await client.span(span.rollout, span.attempt, span.sequence, wanted)
        if found.span.status != SpanStatus.OPEN:
            self._kept[_id(span), wanted] = found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return found

    # Showing ----------------------------------------------------------------------------------------------------------

    @property
    def words(self) -> Sequence[str]:
        return [self.name, self._rollout]

    def head(self, data: RolloutData, now_ns: int) -> Text:
        r = data.rollout
        versions = dict.fromkeys(
            f"{name}@{version}"
            for row in data.rows.values()
            if row.span
            for name, version in (row.span.versions or {}).items()
        )
        arms = dict.fromkeys(row.span.arm for row in data.rows.values() if row.span and row.span.arm)
        return joined(
            *shown.summary_facts(r), r.mode, f"group {clean(r.group)}" if r.group else "",
            *(clean(name) for name in versions), *(clean(arm) for arm in arms),
            f"{data.left_out:,} more spans are not shown" if data.left_out else "",
        )  # fmt: skip

    def table(self, data: RolloutData, now_ns: int) -> TableModel:
        def bar(id: str, width: int) -> Text:
            if not id:
                return span_panes.heading(next(iter(data.axes.values()), span_panes.TimeAxis(0, 1)), width)
            row = data.rows[id]
            axis = data.axes[row.attempt.id]
            return span_panes.bar(row.span, axis, width, now_ns) if row.span else span_panes.heading(axis, width)

        none = f"{self._rollout} has no attempts yet: it waits for a worker, or for its first call."
        return TableModel(
            SPANS, list(data.rows), lambda id: cells(data.rows[id]), none, start=self._start, bar=bar,
            words=lambda id: _words(data, id),
        )  # fmt: skip

    def panes(self, data: RolloutData, id: str | None, closer: TreeRowDetails | None, now_ns: int) -> Sequence[Pane]:
        row = data.rows.get(id or "")
        if row is None or closer is None:
            return ()
        doctor = pane("Doctor", _doctor(closer.diagnosis))
        if closer.detail is None:
            return [*_of_attempt(data, row.attempt, closer), doctor]
        detail = closer.detail
        if detail.turn is None and detail.exchange is None:
            return [
                pane("Content", shown.span_line(detail.span) if row.span is None else _content(detail.span)),
                doctor,
            ]
        said = _messages(detail, closer.earlier)
        if detail.exchange is None:
            why = (
                _too_large(detail.span)
                if self._bytes(detail.span) == "none" and self.pane in WITH_BYTES
                else "asking ..."
            )
            rest = [pane(title, Text(why)) for title in ("Tokens", "Request", "Response", "Timing")]
            return [said, *rest, doctor]
        return [
            said,
            pane("Tokens", _tokens(detail)),
            *span_panes.exchange_panes(detail),
            Pane("Timing", lambda width, height: timing(detail, width)),
            doctor,
        ]

    def command(self, id: str | None) -> str:
        if id is None:
            return f"penstock show {self._rollout}"
        return f"penstock show {self._rollout}/{id}"

    def place(self) -> str:
        return self._rollout


async def _nothing() -> None:
    return None


def _id(span: Span) -> str:
    return f"{span.attempt}#{span.sequence}"


def build_tree(rollout: RolloutSummary, spans: Sequence[Span], used: Mapping[str, ToolList]) -> RolloutData:
    """The tree: spans inside their parents, tools and sub-agents below the call that requested them."""
    rows: dict[str, TreeRow] = {}
    axes: dict[str, span_panes.TimeAxis] = {}
    by_attempt: dict[str, list[Span]] = {}
    for span in spans:
        by_attempt.setdefault(span.attempt, []).append(span)
    for attempt in rollout.attempts:
        own = by_attempt.get(attempt.id, [])
        rows[attempt.id] = TreeRow(attempt)
        axes[attempt.id] = _axis(attempt, own)
        found = used.get(attempt.id) or ToolList(tools=[], skipped=0)
        runs = {use.span: use.asked_by for use in found.tools if use.span and use.asked_by and not use.run_in}
        asked = rollout_tree.RequestedToolRuns(runs, agents=found.agents)
        depths: dict[int | None, int] = {None: 0}
        for span, parent in rollout_tree.nested_spans(own, asked.callers):
            depths[span.sequence] = depths[parent] + 1
            rows[_id(span)] = TreeRow(attempt, span, depths[parent] + 1, span.sequence in asked.inferred)
    tools, shown = {name: one.tools for name, one in used.items()}, len(spans)
    return RolloutData(rollout, rows, axes, tools, max(0, sum(one.spans for one in rollout.attempts) - shown))


def _axis(attempt: Attempt, spans: Sequence[Span]) -> span_panes.TimeAxis:
    """The time of an attempt's spans; its own time where none of them takes any."""
    if any(span.kind in CALLS or span.end_ns not in (None, span.start_ns) for span in spans):
        return span_panes.TimeAxis.of(spans, attempt.last_seen_ns)
    end = max(attempt.ended_ns or 0, attempt.last_seen_ns, attempt.created_ns + 1)
    return span_panes.TimeAxis(attempt.created_ns, end)


def cells(row: TreeRow) -> list[Text | str]:
    """The cells of a line of the tree."""
    span = row.span
    if span is None:
        it = row.attempt
        took = duration(it.ended_ns - it.created_ns) if it.ended_ns else ""
        return [
            Text(clean(it.id), style="bold"),
            shown.status(it.status),
            took,
            shown.sums(it.totals) if it.totals.calls or it.totals.told else "",
            shown.cost(it.totals),
        ]
    number, *what = shown.label(span)
    line = Text("  " * row.depth).append(f"{number} ", "dim").append(" ".join(filter(None, what)))
    line.append(" (inferred)" if row.inferred else "", "dim")
    line.append(f"  {said}" if (said := shown.compaction(span)) else "", "yellow")
    if span.kind not in CALLS and (said := shown.content(span)):
        line.append(f"  {clean(said)}", "dim")
    standing = joined(shown.status(span.status), shown.error_text(span)) if span.kind in CALLS or span.error else ""
    return [line, standing, shown.length(span), shown.tokens(span), shown.call_cost(span)]


def _words(data: RolloutData, id: str) -> str:
    return " ".join(str(cell) for cell in cells(data.rows[id]))


def _before(data: RolloutData, span: Span) -> list[Span]:
    """The nearest model calls of its attempt before it."""
    calls = [r.span for r in data.rows.values() if r.span and r.span.kind == "llm" and r.span.attempt == span.attempt]
    return sorted((one for one in calls if one.sequence < span.sequence), key=lambda one: one.sequence)[-EARLIER:]


def _messages(detail: SpanDetail, earlier: Sequence[Turn]) -> Pane:
    turn = detail.turn
    if turn is None:
        return pane("Messages", Text("Nothing could be read of it."))
    return pane("Messages", rollout_tree.added_messages(detail.span, turn, earlier))


def _tokens(detail: SpanDetail) -> RenderableType:
    if detail.span.kind != "llm":
        return Text("It is no call of a model.")
    seen = detail.exchange
    answers = [] if seen is None else [seen.response_body, *(side.response_body for side in seen.sides)]
    found = (read_logprobs(span_panes.body(one), detail.span.stream) for one in answers)
    return tokens(next((one for one in found if one), ()))


def _too_large(span: Span) -> str:
    total = size(span.request_bytes + span.response_bytes)
    place = f"{span.rollout}/{span.attempt}#{span.sequence}"
    return f"Its {total} are not asked for here: penstock show {place} --raw response"


def _content(span: Span) -> RenderableType:
    """All content of a span that is no call."""
    facts = [joined(Text(name, style="dim"), plain(value if isinstance(value, str) else compact(value)))
             for name, value in (span.attributes or {}).items()]  # fmt: skip
    return Group(shown.span_line(span), *facts)


def _doctor(found: Diagnosis | None) -> RenderableType:
    return Text("asking ...", style="dim") if found is None else queue.diagnosis(found)


def _printed(data: RolloutData, attempt: Attempt) -> list[Span]:
    own = (row.span for row in data.rows.values() if row.span is not None and row.attempt.id == attempt.id)
    return [span for span in own if span.name in shown.PRINTED]


def _of_attempt(data: RolloutData, attempt: Attempt, closer: TreeRowDetails) -> Iterator[Pane]:
    yield pane("Attempt", Group(*_facts(data.rollout, attempt)))
    used = data.used.get(attempt.id, [])
    yield pane("Tools", shown.tools(used) if used else Text("It has used no tools."))
    text = "".join(str((span.attributes or {}).get("text", "")) for span in closer.printed)
    none = (
        "Its worker has sent nothing that the agent printed."
        if attempt.worker
        else "What agents print is kept where `penstock run` runs them."
    )
    yield pane("Output", plain(text or none))


def _facts(rollout: RolloutSummary, attempt: Attempt) -> Iterable[Text]:
    outcome = attempt.outcome or Outcome()
    given = {
        "status": attempt.status,
        "reward": number(attempt.reward) or "none yet: `penstock reward` gives one",
        "worker": attempt.worker,
        "ran for": duration(outcome.duration_ns),
        "exit code": outcome.exit_code,
        "signal": outcome.signal,
        "reason": outcome.reason,
        "returned": compact(outcome.output) or None,
        "task": compact(rollout.input) or None,
        "metadata": compact(rollout.metadata) or None,
    }
    for name, value in given.items():
        if value not in (None, ""):
            yield joined(Text(name, style="dim"), plain(value))
