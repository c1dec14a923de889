"""The steps of an attempt, so that attempts can be compared side by side. Pure.

A step is a message or an answer that was new in a call: conversations are sent again with every call, but counted once.
Two steps are the same when role and text are; ids of tool calls, which are random, do not count.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from penstock.gateway.display.rollout_tree import Conversations
from penstock.gateway.display.text import compact
from penstock.gateway.model.transcript import Transcript
from penstock.gateway.model.turn import Message, Part

BRIEF: Final = 400


class Step(NamedTuple):
    """A message of an attempt."""

    who: str
    """Its role; `assistant` for the model's answers."""
    text: str
    """Its text, with tool calls as `name(arguments)`."""
    call: int
    """Sequence of the model call that it was new in."""


class Pair(NamedTuple):
    """Steps of two attempts beside each other; None if one has no such step."""

    left: Step | None
    right: Step | None

    @property
    def sign(self) -> str:
        """`=` the same, `≠` different, `<` only left, `>` only right."""
        if self.left is None:
            return ">"
        if self.right is None:
            return "<"
        return "=" if _same(self.left) == _same(self.right) else "≠"


def steps(transcript: Transcript) -> list[Step]:
    """All steps of an attempt, in order."""
    found: list[Step] = []
    conversations = Conversations()
    for call in transcript.calls:
        turn = call.turn
        if turn is None:
            continue
        new = turn.messages[conversations.known(turn.messages) :]
        answers = [choice.message for choice in turn.choices[:1]]
        found += (Step(message.role, text(message), call.span.sequence) for message in (*new, *answers))
        if turn.error:
            found.append(Step("error", turn.error, call.span.sequence))
        conversations.add(turn)
    return found


def text(message: Message) -> str:
    """A message as one text."""
    return "\n".join(filter(None, map(_part, message.parts)))


def _part(part: Part) -> str:
    if part.type == "tool_call":
        return f"{part.name}({part.arguments or ''})"
    return part.text or compact(part.data)


def _same(step: Step) -> tuple[str, str]:
    return step.who, step.text


def aligned(left: Sequence[Step], right: Sequence[Step]) -> list[Pair]:
    """The steps of two attempts side by side: equal steps share a row."""
    a, b = list(map(_same, left)), list(map(_same, right))
    return list(_pairs(left, right, difflib.SequenceMatcher(None, a, b, autojunk=False)))


def _pairs(
    left: Sequence[Step], right: Sequence[Step], match: difflib.SequenceMatcher[tuple[str, str]]
) -> Iterator[Pair]:
    for does, a0, a1, b0, b1 in match.get_opcodes():
        if does == "equal":
            yield from (Pair(left[a0 + at], right[b0 + at]) for at in range(a1 - a0))
            continue
        # Steps at the same place are shown as two versions of one step.
        both = min(a1 - a0, b1 - b0)
        yield from (Pair(left[a0 + at], right[b0 + at]) for at in range(both))
        yield from (Pair(left[at], None) for at in range(a0 + both, a1))
        yield from (Pair(None, right[at]) for at in range(b0 + both, b1))


def leaves(one: Sequence[Step], others: Sequence[Sequence[Step]]) -> tuple[int, Sequence[Step] | None]:
    """(the index of the step at which `one` differs from all others, the other that agreed for longest)."""
    best: tuple[int, Sequence[Step] | None] = (0, None)
    for other in others:
        shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if _same(a) != _same(b)),
                      min(len(one), len(other)))  # fmt: skip
        if best[1] is None or shared > best[0]:
            best = shared, other
    return best
