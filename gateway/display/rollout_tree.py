"""A rollout as a tree for a terminal: attempts, calls, and what was said. Pure, as `gateway.display.rollouts` is.

A conversation is shown once. Agents send it whole with every call, so for each call only those messages are shown that
no earlier call of the attempt began with or was answered by. Spans of an instrumented agent are shown inside their
parents, calls inside the span that they were made in (`gateway.model.nesting`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from penstock.gateway.display.rollouts import BRIEF, counted, gaps, span_line, status, style, total_tokens
from penstock.gateway.display.text import abbreviate, clean, compact, duration, joined, moment, number, plain, size
from penstock.gateway.model import nesting
from penstock.gateway.model.answers import SideView, SpanDetail
from penstock.gateway.model.rollout import Attempt, Outcome, RolloutSummary
from penstock.gateway.model.turn import Choice, Message, Part, Turn

DEEPEST = 20
"""The deepest nesting of spans that is shown."""
MOST = 1_000
"""Messages of a call, parts of a message and answers that are shown: the first and the last ones. Each takes a
fraction of a millisecond and some kilobytes to be laid out."""
LONGEST = 4 << 20
"""Characters of a text that is shown whole; no model reads as many at once."""
T = TypeVar("T")
_NOTHING = Part(type="unknown")

Key = tuple[str, tuple[tuple[str | None, ...], ...]]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the model calls of an attempt asked for; it is shown below them."""

    runs: Mapping[int, int] = field(default_factory=dict[int, int])
    """Runs of tools in the attempt: sequence -> that of the model call."""
    elsewhere: Sequence[tuple[int, SpanDetail]] = ()
    """Runs in other rollouts, whose address named none, each with the sequence of the model call."""


def rollout_tree(
    rollout: RolloutSummary, details: Sequence[SpanDetail], asked: Mapping[str, Asked] | None = None
) -> Tree:
    """Rollout, attempts, calls, and what each call added to the conversation. `asked`: by attempt."""
    t = rollout.totals
    facts = (counted(t.calls, "call"), counted(t.errors, "error") if t.errors else "", total_tokens(t), gaps(t))
    about = (f"group {clean(rollout.group)}" if rollout.group else "", _reward(rollout.reward))
    tree = Tree(joined(Text(clean(rollout.id), style="bold"), rollout.mode, status(rollout.status), *about, *facts))
    if rollout.input is not None:
        tree.add(joined(Text("task", style="dim"), plain(abbreviate(compact(rollout.input), BRIEF))))
    shown = {detail.span.attempt for detail in details}
    for attempt in rollout.attempts:
        branch = tree.add(_attempt_line(attempt, len(rollout.attempts) == 1))
        if attempt.id in shown:
            of_attempt = [detail for detail in details if detail.span.attempt == attempt.id]
            _add_calls(branch, of_attempt, attempt, (asked or {}).get(attempt.id, Asked()))
    return tree


def call_tree(detail: SpanDetail) -> Tree:
    """One call, with all its messages and its whole text."""
    tree = Tree(span_line(detail.span))
    for line in _facts(detail):
        tree.add(line)
    if detail.turn is not None:
        _add_turn(tree, detail.turn, 0, None, None)
    return tree


def added(turn: Turn, earlier: Iterable[Turn]) -> Tree:
    """What a call added to the conversation, with its whole text; `earlier`: calls of the same attempt before it."""
    told = [[*map(key, one.messages), *(key(choice.message) for choice in one.choices[:1])] for one in earlier]
    skip = known(turn.messages, told)
    tree = Tree(joined(plain(turn.model or turn.dialect, "bold"), counted(len(turn.messages) - skip, "new message")))
    _add_turn(tree, turn, skip, None, None)
    return tree


def _add_calls(branch: Tree, details: Sequence[SpanDetail], attempt: Attempt, asked: Asked) -> None:
    nodes: dict[int, Tree] = {}
    for detail, parent in in_place(details, asked.runs):
        nodes[detail.span.sequence] = nodes.get(parent or 0, branch).add(span_line(detail.span))
    for sequence, run in asked.elsewhere:
        if (node := nodes.get(sequence)) is not None:
            where = Text(clean(f"{run.span.rollout}/{run.span.attempt}"), style="dim")
            below = node.add(joined(where, span_line(run.span)))
            if run.turn is not None:
                _add_turn(below, run.turn, 0, [], BRIEF)
    told: list[list[Key]] = []
    offered: list[str] = []
    for detail in details:
        node, turn = nodes[detail.span.sequence], detail.turn
        if turn is None:
            continue
        names = [tool.name for tool in turn.tools]
        if detail.span.kind != "llm":
            _add_turn(node, turn, 0, names, BRIEF)
            continue
        _add_turn(node, turn, known(turn.messages, told), names if names != offered else [], BRIEF)
        told.append([*map(key, turn.messages), *(key(choice.message) for choice in turn.choices[:1])])
        offered = names
    if attempt.spans > len(details):
        branch.add(Text(f"{len(details):,} of {attempt.spans:,} spans are shown", style="dim"))


def in_place(
    details: Sequence[SpanDetail], asked: Mapping[int, int] | None = None
) -> Iterator[tuple[SpanDetail, int | None]]:
    """The spans of one attempt from the top, each with the sequence of the one it is shown in; None for the attempt."""
    by_sequence = {detail.span.sequence: detail for detail in details}
    inside = nesting.tree([detail.span for detail in details], asked)
    waiting = [(span, None, 0) for span in reversed(inside.get(None, []))]
    while waiting:
        span, parent, depth = waiting.pop()
        yield by_sequence[span.sequence], parent
        # Spans that are nested deeper than a terminal is wide are shown side by side.
        under = span.sequence if depth < DEEPEST else parent
        waiting += [(inner, under, depth + 1) for inner in reversed(inside.get(span.sequence, []))]


def known(messages: Sequence[Message], told: Iterable[Sequence[Key]]) -> int:
    """How many messages an earlier call began with or was answered by."""
    keys = [key(message) for message in messages]
    return max((_shared(keys, earlier) for earlier in told), default=0)


def _shared(a: Sequence[Key], b: Sequence[Key]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def key(message: Message) -> Key:
    """Equal for equal messages, however they were sent. Reasoning does not count, because agents often do not send it
    back.
    """
    parts = (p for p in message.parts if p.type != "reasoning")
    return message.role, tuple((p.type, p.text, p.id, p.name, p.arguments, compact(p.data)) for p in parts)


def _add_turn(node: Tree, turn: Turn, skip: int, tools: list[str] | None, limit: int | None) -> None:
    names = [tool.name for tool in turn.tools] if tools is None else tools
    if names:
        rest = f" … {len(names) - MOST:,} more" if len(names) > MOST else ""
        node.add(joined(Text("tools", style="dim"), clean(", ".join(names[:MOST]) + rest)))
    if skip:
        node.add(Text(f"… {counted(skip, 'message')} as before", style="dim"))
    # A message of MCP without parameters says no more than the name of its span.
    told = [one for one in turn.messages[skip:] if not one.parts or any(part != _NOTHING for part in one.parts)]
    for message in _some(told, "messages"):
        node.add(message if isinstance(message, Text) else _message(message, limit))
    for choice in _some(turn.choices, "answers"):
        node.add(choice if isinstance(choice, Text) else _choice(choice, len(turn.choices), limit))
    for text in filter(None, (turn.error, *turn.problems)):
        node.add(plain(_cut(text, limit), "red"))


def _some(rows: Sequence[T], what: str) -> Iterator[T | Text]:
    """The rows, or the first and the last ones with a line of how many are between them."""
    if len(rows) <= MOST:
        yield from rows
        return
    yield from rows[: MOST // 2]
    left = len(rows) - 2 * (MOST // 2)
    yield Text(f"… {left:,} {what} are not shown; `penstock show` has all with --json or --raw", style="dim")
    yield from rows[-(MOST // 2) :]


def _cut(text: str, limit: int | None) -> str:
    """A text as far as it is shown; `limit`: briefly."""
    if limit is not None or len(text) <= LONGEST:
        return abbreviate(text, limit)
    left = len(text) - LONGEST
    return f"{text[:LONGEST]} … {left:,} characters are not shown; `penstock show` has all with --json or --raw"


def _message(message: Message, limit: int | None) -> RenderableType:
    role = plain(message.role if message.name is None else f"{message.role} {message.name}", style(message.role))
    return _with_parts(role, message.parts, limit)


def _choice(choice: Choice, of: int, limit: int | None) -> RenderableType:
    label = "answer" if of == 1 else f"answer {choice.index + 1} of {of}"
    ended = plain(f" ({choice.finish})" if choice.finish else "", "dim")
    return _with_parts(Text(f"→ {label}", style="bold green").append_text(ended), choice.message.parts, limit)


def _with_parts(label: Text, parts: Sequence[Part], limit: int | None) -> RenderableType:
    """Text beside its label; several parts below it."""
    if len(parts) == 1:
        return joined(label, _part(parts[0], limit))
    tree = Tree(label)
    for part in _some(parts, "parts"):
        tree.add(part if isinstance(part, Text) else _part(part, limit))
    return tree


def _part(part: Part, limit: int | None) -> Text:
    text = _cut(part.text or "", limit)
    match part.type:
        case "text":
            return plain(text)
        case "tool_call":
            call = f"{part.name}({_cut(part.arguments or '', limit)})"
            return plain(call, "cyan")
        case "tool_call_response":
            return plain(text or _cut(compact(part.data), limit), "yellow")
        case "reasoning" | "refusal":
            return joined(Text(part.type, style="dim"), plain(text, "italic"))
        case _:
            return joined(Text(part.type, style="dim"), plain(_cut(text or compact(part.data), limit or BRIEF)))


def _sides(detail: SpanDetail) -> list[SideView]:
    return detail.exchange.sides if detail.exchange else []


def _facts(detail: SpanDetail) -> Iterator[Text]:
    """What only a single call's view shows."""
    span, turn = detail.span, detail.turn
    shown = {
        "started": f"{moment(span.start_ns)} UTC",
        "called": detail.exchange.url if detail.exchange else None,
        "also spoken": ", ".join(f"{side.who}: {side.dialect} {side.path}" for side in _sides(detail)),
        "served": span.model_served if span.model_served != span.model else None,
        "bytes": f"{size(span.request_bytes)} → {size(span.response_bytes)}",
        "sampling": compact(turn.sampling) if turn and turn.sampling else None,
        "forced": turn.forced if turn else None,
        "trace": span.trace_id,
    }
    for name, value in shown.items():
        if value:
            yield joined(Text(name, style="dim"), clean(value))


def _attempt_line(attempt: Attempt, only: bool) -> Text:
    """A line for an attempt; the rollout's own line has the figures of an only one."""
    t, outcome = attempt.totals, attempt.outcome or Outcome()
    reason = clean(abbreviate(outcome.reason or "", BRIEF))
    code = f"exit code {outcome.exit_code}" if outcome.exit_code is not None else ""
    ended = (
        # A reason of a runner begins with them.
        *(piece for piece in (code, clean(outcome.signal or "")) if piece not in reason),
        duration(outcome.duration_ns),
        f"by {clean(attempt.worker)}" if attempt.worker else "",
        reason,
    )
    name, figures = Text(clean(attempt.id), style="bold"), (counted(t.calls, "call"), _reward(attempt.reward), gaps(t))
    return joined(name, status(attempt.status), *(() if only else figures), *ended)


def _reward(value: float | None) -> str:
    return "" if value is None else f"reward {number(value)}"
