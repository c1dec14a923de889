"""A rollout as a tree for a terminal: attempts, calls, and what was said. Pure, as `console.views.rollouts` is.

A conversation is shown once. Agents send it whole with every call, so for each call only those messages are shown that
no earlier call of the attempt began with or was answered by. Spans of an instrumented agent are shown inside their
parents, calls inside the span that they were made in (`gateway.model.span`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text
from rich.tree import Tree

from penstock.console.views.rollouts import (
    BRIEF,
    cost,
    gaps,
    pluralized,
    served_versions,
    span_facts,
    status,
    style,
    summary_facts,
    texts,
)
from penstock.console.views.table import Line, abbreviate, clean, compact, duration, joined, moment, number, plain, size
from penstock.gateway.model.answers import SideView, SpanDetail
from penstock.gateway.model.base import CALLS
from penstock.gateway.model.facts import AGENT_ID, SPAN_FACTS, Fact, own_attribute, reader
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Outcome, RolloutSummary
from penstock.gateway.model.span import Span, span_tree
from penstock.gateway.model.tools import SubAgent
from penstock.gateway.model.turn import Choice, Message, Part, Transcript, Turn
from penstock.gateway.reading.diagnosis.sub_agents import NOT_MEASURED, MeasuredTools, measured_tools, told_callers
from penstock.gateway.wire.dialects.parts import stamped

DEEPEST = 20
"""Maximum depth of nested spans that is shown."""
MOST = 1_000
"""Maximum number of messages of a call, parts of a message and answers that are shown: the first and the last ones.
Each takes a fraction of a millisecond and some kilobytes to be laid out."""
LONGEST = 4 << 20
"""Maximum number of characters of a text that is shown whole; no model reads as many at once."""
T = TypeVar("T")
_NOTHING = Part(type="unknown")
INFERRED: Final = Text("sub-agent, inferred", style="dim")
"""Marks a call of a sub-agent that no header names."""

Key = tuple[str, tuple[tuple[str | None, ...], ...]]


@dataclass(frozen=True, slots=True)
class RequestedToolRuns:
    """The tool runs and sub-agents that the model calls of an attempt requested; each is shown below its call."""

    runs: Mapping[int, int] = field(default_factory=dict[int, int])
    """Tool runs in the attempt: sequence of the run -> sequence of the model call."""
    elsewhere: Sequence[tuple[int, SpanDetail]] = ()
    """Tool runs in other rollouts, whose address named none, each with the sequence of the model call."""
    agents: Sequence[SubAgent] = ()

    @property
    def callers(self) -> dict[int, int]:
        """By sequence, the call that requested the tool run, or started the sub-agent that made the call."""
        started = {call: one.asked_by for one in self.agents if one.asked_by is not None for call in one.calls}
        return {**started, **self.runs}

    @property
    def inferred(self) -> frozenset[int]:
        """Sequences of the calls of sub-agents that are inferred."""
        return frozenset(call for one in self.agents if one.inferred for call in one.calls)


class ConversationPrefixes:
    """The beginnings of the earlier calls and answers of an attempt. Each beginning is kept as a hash, so that the cost
    of a thousand calls depends only on their new messages."""

    def __init__(self) -> None:
        self._beginnings = set[int]()

    def known_length(self, messages: Sequence[Message]) -> int:
        """The number of first messages with which an earlier call began, or by which it was answered."""
        hashes = _beginnings(messages)
        return next((at for at, one in enumerate(hashes) if one not in self._beginnings), len(messages))

    def add(self, turn: Turn) -> None:
        """Adds a call whose messages and answer later calls may begin with."""
        answer = (choice.message for choice in turn.choices[:1])
        self._beginnings.update(_beginnings([*turn.messages, *answer]))


class SpanSubtree(NamedTuple):
    """A span that is shown directly below its attempt, with the spans that are shown inside it."""

    attempt: Attempt
    spans: Sequence[tuple[Span, int | None]]
    """Each span with the sequence of the span that it is shown in; None for the first one."""
    left: int
    """Number of the attempt's spans that are not shown, if this is its last place; else 0."""


class RolloutTree:
    """Renders a rollout piece by piece, so that the first lines are there before the last call is read."""

    def __init__(
        self, rollout: RolloutSummary, spans: Sequence[Span], asked: Mapping[str, RequestedToolRuns] | None = None
    ) -> None:
        """`spans`: the spans to show, in order. `asked`: the requested tool runs, by attempt."""
        self._rollout, self._asked = rollout, asked or {}
        self._conversations, self._offered = ConversationPrefixes(), list[str]()
        self._spans = {attempt.id: [it for it in spans if it.attempt == attempt.id] for attempt in rollout.attempts}

    def head(self) -> Line:
        """The line of the rollout."""
        rollout = self._rollout
        group = f"group {clean(rollout.group)}" if rollout.group else ""
        served = clean(served_versions(span for spans in self._spans.values() for span in spans))
        return Line(Text(clean(rollout.id), style="bold"), *summary_facts(rollout), rollout.mode, group, served)

    def task(self) -> RenderableType | None:
        """The line of the rollout's task; None without one."""
        rollout = self._rollout
        if rollout.input is None:
            return None
        task = joined(Text("task", style="dim"), plain(abbreviate(compact(rollout.input), BRIEF)))
        return _TreeNode(task, not rollout.attempts)

    def attempt(self, attempt: Attempt) -> RenderableType:
        """The line of an attempt; the lines of its spans follow."""
        self._conversations, self._offered = ConversationPrefixes(), []
        attempts = self._rollout.attempts
        return _TreeNode(attempt_line(attempt, len(attempts) == 1), attempt is attempts[-1])

    def subtrees(self, attempt: Attempt) -> Iterator[SpanSubtree]:
        """The places below an attempt, from the top."""
        spans = self._spans[attempt.id]
        asked = self._asked.get(attempt.id, RequestedToolRuns())
        left = attempt.spans - len(spans) if spans else 0
        below: list[tuple[Span, int | None]] = []
        for span, parent in nested_spans(spans, asked.callers):
            if parent is None and below:
                yield SpanSubtree(attempt, below, 0)
                below = []
            below.append((span, parent))
        if below:
            yield SpanSubtree(attempt, below, left)

    def render_subtree(
        self, place: SpanSubtree, details: Mapping[int, SpanDetail], last: bool
    ) -> Iterator[RenderableType]:
        """The lines of a place, with the messages that its calls added to the conversation. `details`: its spans in
        full, by sequence; `last`: whether it is the last place of its attempt."""
        nodes: dict[int, Tree] = {}
        asked = self._asked.get(place.attempt.id, RequestedToolRuns())
        inferred = asked.inferred
        for span, parent in place.spans:
            line = Line(*span_facts(span), INFERRED if span.sequence in inferred else "")
            node = nodes[span.sequence] = Tree(line) if parent is None else nodes[parent].add(line)
            self._add_said(node, details[span.sequence])
            for run in (run for sequence, run in asked.elsewhere if sequence == span.sequence):
                where = Text(clean(f"{run.span.rollout}/{run.span.attempt}"), style="dim")
                below = node.add(Line(where, *span_facts(run.span)))
                if run.turn is not None:
                    _add_turn(below, run.turn, 0, [], BRIEF)
        above = place.attempt is self._rollout.attempts[-1]
        yield _TreeNode(_TreeNode(nodes[place.spans[0][0].sequence], last and not place.left), above, inside=True)
        if place.left:
            shown = place.attempt.spans - place.left
            left = Text(f"{shown:,} of {place.attempt.spans:,} spans are shown", style="dim")
            yield _TreeNode(_TreeNode(left, True), above, inside=True)

    def _add_said(self, node: Tree, detail: SpanDetail) -> None:
        turn = detail.turn
        if turn is None:
            return
        names = [tool.name for tool in turn.tools]
        if detail.span.kind != "llm":
            _add_turn(node, turn, 0, names, BRIEF)
            return
        skip, names_ = self._conversations.known_length(turn.messages), names if names != self._offered else []
        _add_turn(node, turn, skip, names_, BRIEF, measured_tools(detail.span.attributes, turn.messages))
        self._conversations.add(turn)
        self._offered = names


class _TreeNode:
    """A node of a tree, printed by itself: with its guides, as `rich.tree` draws them."""

    def __init__(self, shown: RenderableType, last: bool, inside: bool = False) -> None:
        """`inside`: the node is a descendant, so its first line gets the guides of a later line."""
        rest = "    " if last else "│   "
        self._shown, self._first, self._rest = shown, rest if inside else "└── " if last else "├── ", rest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrower = options.update_width(max(1, options.max_width - len(self._rest)))
        for at, line in enumerate(console.render_lines(self._shown, narrower, pad=False)):
            yield Segment(self._rest if at else self._first)
            yield from line
            yield Segment.line()


def rollout_tree(
    rollout: RolloutSummary, details: Sequence[SpanDetail], asked: Mapping[str, RequestedToolRuns] | None = None
) -> Group:
    """Rollout, attempts, calls, and the messages that each call added to the conversation. `asked`: the requested tool
    runs, by attempt."""
    tree = RolloutTree(rollout, [detail.span for detail in details], asked)
    parts: list[RenderableType] = [tree.head(), *filter(None, (tree.task(),))]
    for attempt in rollout.attempts:
        read = {detail.span.sequence: detail for detail in details if detail.span.attempt == attempt.id}
        places = list(tree.subtrees(attempt))
        parts.append(tree.attempt(attempt))
        for place in places:
            parts += tree.render_subtree(place, read, place is places[-1])
    return Group(*parts)


def call_tree(detail: SpanDetail) -> Tree:
    """A span with its whole texts: a call with all its messages."""
    span = detail.span
    whole = {} if span.kind in CALLS else texts(span)
    tree = Tree(Line(*span_facts(span, brief=not whole)))
    for line in _facts(detail):
        tree.add(line)
    for name, text in whole.items():
        tree.add(joined(Text(clean(name), style="dim"), plain(_cut(text, None))))
    if detail.turn is not None:
        _add_turn(tree, detail.turn, 0, None, None, measured_tools(span.attributes, detail.turn.messages))
    return tree


def added_messages(span: Span, turn: Turn, earlier: Iterable[Turn]) -> Tree:
    """The messages that a call added to the conversation, with their whole text; `earlier`: calls of the same attempt
    before it."""
    conversations = ConversationPrefixes()
    for one in earlier:
        conversations.add(one)
    skip = conversations.known_length(turn.messages)
    tree = Tree(joined(plain(turn.model or turn.dialect, "bold"), pluralized(len(turn.messages) - skip, "new message")))
    _add_turn(tree, turn, skip, None, None, measured_tools(span.attributes, turn.messages))
    return tree


def nested_spans(spans: Sequence[Span], asked: Mapping[int, int] | None = None) -> Iterator[tuple[Span, int | None]]:
    """The spans of one attempt from the top, each with the sequence of the span it is shown in; None for the attempt.
    The calls of a sub-agent stand together, below the call that started it. `asked`: the call that requested a tool run
    or started the sub-agent that made a call, by sequence; of sub-agents that headers name it need not say so."""
    inside = span_tree(spans, {**told_callers(spans), **(asked or {})})
    for parent, below in inside.items():
        if parent is not None and any(AGENT_ID in (span.attributes or {}) for span in below):
            agents = [own_attribute(span, AGENT_ID) for span in below]
            first = {agent: at for at, agent in reversed(list(enumerate(agents)))}
            below.sort(key=lambda span: first[own_attribute(span, AGENT_ID)])
    waiting = [(span, None, 0) for span in reversed(inside.get(None, []))]
    while waiting:
        span, parent, depth = waiting.pop()
        yield span, parent
        # Spans that are nested deeper than a terminal is wide are shown side by side.
        under = span.sequence if depth < DEEPEST else parent
        waiting += [(inner, under, depth + 1) for inner in reversed(inside.get(span.sequence, []))]


def _beginnings(messages: Sequence[Message]) -> Iterator[int]:
    """The hashes of the first message, of the first two, and so on."""
    one = 0
    for message in messages:
        one = hash((one, _key(message)))
        yield one


def _key(message: Message) -> Key:
    """A key that is equal for equal messages, however they were sent. Reasoning does not count, because agents often do
    not send it back, nor does Claude Code's stamp, which may change with each call."""
    parts = (p for p in message.parts[stamped(message.parts) :] if p.type != "reasoning")
    return message.role, tuple((p.type, p.text, p.id, p.name, p.arguments, compact(p.data)) for p in parts)


def _add_turn(
    node: Tree,
    turn: Turn,
    skip: int,
    tools: list[str] | None,
    limit: int | None,
    measured: MeasuredTools = NOT_MEASURED,
) -> None:
    names = [tool.name for tool in turn.tools] if tools is None else tools
    if names:
        rest = f" … {len(names) - MOST:,} more" if len(names) > MOST else ""
        node.add(joined(Text("tools", style="dim"), clean(", ".join(names[:MOST]) + rest)))
    if skip:
        node.add(Text(f"… {pluralized(skip, 'message')} as before", style="dim"))
    # A message of MCP without parameters adds nothing to the name of its span.
    told = [one for one in turn.messages[skip:] if not one.parts or any(part != _NOTHING for part in one.parts)]
    for message in _some(told, "messages"):
        node.add(message if isinstance(message, Text) else _message(message, limit, measured))
    if measured.left:
        said = f"times of tools that fit no result, or several, by the agent (ms): {', '.join(measured.left)}"
        node.add(Text(clean(said), style="dim"))
    for choice in _some(turn.choices, "answers"):
        node.add(choice if isinstance(choice, Text) else _choice(choice, len(turn.choices), limit))
    for text in filter(None, (turn.error, *turn.problems)):
        node.add(plain(_cut(text, limit), "red"))


def _some(rows: Sequence[T], what: str) -> Iterator[T | Text]:
    """The rows, or the first and the last ones with a line that counts the rows between them."""
    if len(rows) <= MOST:
        yield from rows
        return
    yield from rows[: MOST // 2]
    left = len(rows) - 2 * (MOST // 2)
    yield Text(f"… {left:,} {what} are not shown; `penstock show` has all with --json or --raw", style="dim")
    yield from rows[-(MOST // 2) :]


def _cut(text: str, limit: int | None) -> str:
    """A text as it is shown: abbreviated to `limit`; without one, cut at `LONGEST`."""
    if limit is not None or len(text) <= LONGEST:
        return abbreviate(text, limit)
    left = len(text) - LONGEST
    return f"{text[:LONGEST]} … {left:,} characters are not shown; `penstock show` has all with --json or --raw"


def _message(message: Message, limit: int | None, measured: MeasuredTools) -> RenderableType:
    role = plain(message.role if message.name is None else f"{message.role} {message.name}", style(message.role))
    return _with_parts(role, message.parts, limit, measured)


def _choice(choice: Choice, of: int, limit: int | None) -> RenderableType:
    label = "answer" if of == 1 else f"answer {choice.index + 1} of {of}"
    ended = plain(f" ({choice.finish})" if choice.finish else "", "dim")
    return _with_parts(Text(f"→ {label}", style="bold green").append_text(ended), choice.message.parts, limit)


def _with_parts(
    label: Text, parts: Sequence[Part], limit: int | None, measured: MeasuredTools = NOT_MEASURED
) -> RenderableType:
    """A label with its only part beside it, or several parts below it."""
    if len(parts) == 1:
        return joined(label, _part(parts[0], limit, measured))
    tree = Tree(label)
    for part in _some(parts, "parts"):
        tree.add(part if isinstance(part, Text) else _part(part, limit, measured))
    return tree


def _part(part: Part, limit: int | None, measured: MeasuredTools) -> Text:
    text = _cut(part.text or "", limit)
    match part.type:
        case "text":
            return plain(text)
        case "tool_call":
            call = f"{part.name}({_cut(part.arguments or '', limit)})"
            return plain(call, "cyan")
        case "tool_call_response":
            took = measured.took_ns.get(id(part))
            shown = plain(text or _cut(compact(part.data), limit), "yellow")
            return shown if took is None else joined(Text(f"{duration(took)} by the agent", style="dim"), shown)
        case "reasoning" | "refusal":
            return joined(Text(part.type, style="dim"), plain(text, "italic"))
        case _:
            return joined(Text(part.type, style="dim"), plain(_cut(text or compact(part.data), limit or BRIEF)))


def _sides(detail: SpanDetail) -> list[SideView]:
    return detail.exchange.sides if detail.exchange else []


def _facts(detail: SpanDetail) -> Iterator[Text]:
    """The facts that only the view of a single call shows."""
    span, turn = detail.span, detail.turn
    shown = {
        "started": f"{moment(span.start_ns)} UTC",
        "called": detail.exchange.url if detail.exchange else None,
        "also spoken": ", ".join(f"{side.who}: {side.dialect} {side.path}" for side in _sides(detail)),
        "served": span.model_served if span.model_served != span.model else None,
        "bytes": f"{size(span.request_bytes)} → {size(span.response_bytes)}" if span.kind in CALLS else None,
        "sampling": compact(turn.sampling) if turn and turn.sampling else None,
        "forced": turn.forced if turn else None,
        "trace": span.trace_id,
        **{fact.label: _shown(fact, reader(fact)(span)) for fact in SPAN_FACTS if fact.label is not None},
    }
    for name, value in shown.items():
        if value:
            yield joined(Text(name, style="dim"), clean(value))


def _shown(fact: Fact, value: Any) -> str | None:
    """The value of a fact of `model.facts`; None if it has none."""
    if value is None or isinstance(value, str):
        return value
    if fact.unit == "ms":
        return duration(round(value * 1e6))
    return ", ".join(map(str, cast("list[object]", value))) if isinstance(value, list) else str(value)


QUIET: Final = {
    AttemptStatus.ENDED: "went quiet, nobody said how it ended",
    AttemptStatus.FAILED: "went quiet after a call that failed",
}
"""Ends that nobody has reported."""


def attempt_line(attempt: Attempt, only: bool) -> Text:
    """A line for an attempt; if it is the only one, the rollout's own line has the figures."""
    t, outcome = attempt.totals, attempt.outcome or Outcome()
    reason = clean(abbreviate(outcome.reason or "", BRIEF))
    if attempt.outcome is None and attempt.status in QUIET:
        reason = QUIET[attempt.status]
    code = f"exit code {outcome.exit_code}" if outcome.exit_code is not None else ""
    ended = (
        # A runner's reason already contains the code or the signal.
        *(piece for piece in (code, clean(outcome.signal or "")) if piece not in reason),
        duration(outcome.duration_ns),
        f"by {clean(attempt.worker)}" if attempt.worker else "",
        reason,
    )
    name, figures = (
        Text(clean(attempt.id), style="bold"),
        (pluralized(t.calls, "model call"), cost(t), _reward(attempt.reward), gaps(t)),
    )
    return joined(name, status(attempt.status), *(() if only else figures), *ended)


def _reward(value: float | None) -> str:
    return "" if value is None else f"reward {number(value)}"


# -- the steps of attempts, aligned ----
#
# A step is a message or an answer that was new in a call: conversations are sent again with every call, but counted
# once. Two steps are the same when role and text are; ids of tool calls, which are random, do not count.


class TranscriptStep(NamedTuple):
    """A message of an attempt."""

    who: str
    """Its role; `assistant` for the model's answers."""
    text: str
    """Its text, with tool calls as `name(arguments)`."""
    call: int
    """Sequence of the model call that it was new in."""


class StepPair(NamedTuple):
    """Steps of two attempts beside each other; None if one has no such step."""

    left: TranscriptStep | None
    right: TranscriptStep | None

    @property
    def sign(self) -> str:
        """`=` the same, `≠` different, `<` only left, `>` only right."""
        if self.left is None:
            return ">"
        if self.right is None:
            return "<"
        return "=" if _same(self.left) == _same(self.right) else "≠"


def steps(transcript: Transcript) -> list[TranscriptStep]:
    """All steps of an attempt, in order."""
    found: list[TranscriptStep] = []
    conversations = ConversationPrefixes()
    for call in transcript.calls:
        turn = call.turn
        if turn is None:
            continue
        new = turn.messages[conversations.known_length(turn.messages) :]
        answers = [choice.message for choice in turn.choices[:1]]
        found += (
            TranscriptStep(message.role, message_text(message), call.span.sequence) for message in (*new, *answers)
        )
        if turn.error:
            found.append(TranscriptStep("error", turn.error, call.span.sequence))
        conversations.add(turn)
    return found


def message_text(message: Message) -> str:
    """A message as one text."""
    return "\n".join(filter(None, map(_part_text, message.parts)))


def _part_text(part: Part) -> str:
    if part.type == "tool_call":
        return f"{part.name}({part.arguments or ''})"
    return part.text or compact(part.data)


def _same(step: TranscriptStep) -> tuple[str, str]:
    return step.who, step.text


def align_steps(left: Sequence[TranscriptStep], right: Sequence[TranscriptStep]) -> list[StepPair]:
    """The steps of two attempts side by side: equal steps share a row."""
    a, b = list(map(_same, left)), list(map(_same, right))
    return list(_pairs(left, right, difflib.SequenceMatcher(None, a, b, autojunk=False)))


def _pairs(
    left: Sequence[TranscriptStep], right: Sequence[TranscriptStep], match: difflib.SequenceMatcher[tuple[str, str]]
) -> Iterator[StepPair]:
    for does, a0, a1, b0, b1 in match.get_opcodes():
        if does == "equal":
            yield from (StepPair(left[a0 + at], right[b0 + at]) for at in range(a1 - a0))
            continue
        # Steps at the same place are shown as two versions of one step.
        both = min(a1 - a0, b1 - b0)
        yield from (StepPair(left[a0 + at], right[b0 + at]) for at in range(both))
        yield from (StepPair(left[at], None) for at in range(a0 + both, a1))
        yield from (StepPair(None, right[at]) for at in range(b0 + both, b1))


def find_divergence(
    one: Sequence[TranscriptStep], others: Sequence[Sequence[TranscriptStep]]
) -> tuple[int, Sequence[TranscriptStep] | None]:
    """(the index of the step at which `one` differs from all others, the other that agreed for longest)."""
    best: tuple[int, Sequence[TranscriptStep] | None] = (0, None)
    for other in others:
        shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if _same(a) != _same(b)),
                      min(len(one), len(other)))  # fmt: skip
        if best[1] is None or shared > best[0]:
            best = shared, other
    return best


MOST_WORDS: Final = 4_000
"""The most words that are compared; the rest of longer texts is left out."""
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


def differing_words(left: str, right: str) -> Iterator[tuple[str, str, str]]:
    """The texts in pieces: (text of both, "", ""), or ("", text of the left alone, text of the right alone)."""
    a, b = ([found[0] for found in islice(_WORD.finditer(text), MOST_WORDS)] for text in (left, right))
    for does, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        only_left, only_right = "".join(a[a0:a1]), "".join(b[b0:b1])
        yield (only_left, "", "") if does == "equal" else ("", only_left, only_right)
