"""The steps of an attempt, so that attempts can be compared side by side. Pure.

A step is a message or an answer that was new in a call: conversations are sent again with every call, but counted once.
Two steps are the same when role and text are; ids of tool calls, which are random, do not count.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from rich.text import Text

from penstock.console.views.rollout_tree import ConversationPrefixes
from penstock.console.views.table import clean, compact
from penstock.gateway.model.turn import Message, Part, Transcript

BRIEF: Final = 400


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
        found += (TranscriptStep(message.role, text(message), call.span.sequence) for message in (*new, *answers))
        if turn.error:
            found.append(TranscriptStep("error", turn.error, call.span.sequence))
        conversations.add(turn)
    return found


def text(message: Message) -> str:
    """A message as one text."""
    return "\n".join(filter(None, map(_part, message.parts)))


def _part(part: Part) -> str:
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


# Two texts with the words that differ marked: `[-only left-]` and `{+only right+}`. Colours only repeat it. Pure.

MOST: Final = 4_000
"""The most words that are compared; the rest of longer texts is left out."""
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


def mark_differences(left: str, right: str) -> tuple[Text, Text]:
    """Both texts; the words that the other lacks are marked."""
    a, b = ([found[0] for found in islice(_WORD.finditer(text), MOST)] for text in (left, right))
    made = Text(), Text()
    for does, a0, a1, b0, b1 in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        only_left, only_right = "".join(a[a0:a1]), "".join(b[b0:b1])
        if does == "equal":
            made[0].append(clean(only_left))
            made[1].append(clean(only_right))
            continue
        if only_left:
            made[0].append(f"[-{clean(only_left)}-]", "red")
        if only_right:
            made[1].append(f"{{+{clean(only_right)}+}}", "green")
    return made
