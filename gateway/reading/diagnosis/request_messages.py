"""Messages of requests that repeat their conversation: which are new, and which request continues which. Pure.

Places are counted without the system messages at the beginning, which hosts rewrite, split and join.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.gateway.model.turn import Message, Part

EDGE: Final = 64
"""Number of characters at either end of a text by which messages are told apart when a known beginning is searched
for."""

MessagePlace = tuple[int, tuple[object, ...], tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class WrittenToolCall:
    """A tool call in the messages of a request."""

    part: Part
    at: int
    """The index of its message."""
    block: int
    """The index of the first assistant message of the run of assistant messages that it is in."""
    place: int
    """Its index among the tool calls of these messages."""


def results_with_calls(messages: Sequence[Message], begin: int) -> list[tuple[Part, WrittenToolCall | None]]:
    """The tool results from message `begin` on, each with the call in the request that it answers; None without one."""
    begin = _with_its_calls(messages, begin)
    waiting: list[WrittenToolCall] = []
    found: list[tuple[Part, WrittenToolCall | None]] = []
    block, place = begin, 0
    for at in range(begin, len(messages)):
        if messages[at].role == "assistant" and (at == begin or messages[at - 1].role != "assistant"):
            block, place = at, 0
        for part in messages[at].parts:
            if part.type == "tool_call":
                # An id that occurs again means the newer call.
                waiting = [it for it in waiting if it.block == block or part.id is None or it.part.id != part.id]
                waiting.append(WrittenToolCall(part, at, block, place))
                place += 1
            elif part.type == "tool_call_response":
                mine = next((it for it in waiting if _answers(part, it.part)), None)
                if mine is not None:
                    waiting.remove(mine)
                found.append((part, mine))
    return found


def _with_its_calls(messages: Sequence[Message], begin: int) -> int:
    """The same index, or an earlier one if a result would otherwise be separated from its call."""
    for at in range(begin, len(messages)):
        kinds = {part.type for part in messages[at].parts}
        if "tool_call" in kinds:
            return begin
        if "tool_call_response" in kinds:
            break
    else:
        return begin
    while begin > 0 and not any(part.type == "tool_call" for part in messages[begin - 1].parts):
        begin -= 1
    while begin > 0 and messages[begin - 1].role == "assistant":
        begin -= 1
    return begin


def _answers(result: Part, call: Part) -> bool:
    if result.id is not None:
        return result.id == call.id
    return result.name in (None, call.name)


def lead_of(messages: Sequence[Message]) -> int:
    """The number of system messages at the beginning: hosts rewrite, split and join them."""
    return next((at for at, it in enumerate(messages) if it.role not in ("system", "developer")), len(messages))


def place_of(messages: Sequence[Message], at: int, lead: int) -> MessagePlace:
    return at - lead, _brief(messages[at]), _brief(messages[lead])


def _brief(message: Message) -> tuple[object, ...]:
    """The features by which a message is told from others, without its middle. Messages with tool results are compared
    by these alone, because hosts change what is beside them."""
    results = [part for part in message.parts if part.type == "tool_call_response"]
    parts = results or [part for part in message.parts if part.type in ("text", "tool_call")]
    return (message.role, *((part.type, part.id, part.name, *_ends(part.text or "")) for part in parts))


def _ends(text: str) -> tuple[int, str, str]:
    return len(text), text[:EDGE], text[-EDGE:]


def may_continue(earlier: Sequence[Message], later: Sequence[Message], lead: int) -> bool:
    """True if a request may continue `earlier`: that one's first and last message are at the same places in it."""
    skip = lead_of(earlier)
    length = len(earlier) - skip
    if length == 0 or len(later) - lead < length:
        return length == 0
    pairs = ((earlier[skip], later[lead]), (earlier[-1], later[lead + length - 1]))
    return all(_brief(one) == _brief(other) for one, other in pairs)


def continues(earlier: Sequence[Message], later: Sequence[Message]) -> bool:
    """True if the later request repeats the earlier one whole, system messages aside."""
    one, other = earlier[lead_of(earlier) :], later[lead_of(later) :]
    return len(one) <= len(other) and all(_said(a) == _said(b) for a, b in zip(one, other, strict=False))


def _said(message: Message) -> tuple[object, ...]:
    parts = (part for part in message.parts if part.type != "reasoning")
    return message.role, *((part.type, part.id, part.name, part.text) for part in parts)
