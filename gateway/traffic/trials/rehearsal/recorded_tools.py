"""Recorded tool results, for an agent that is run again without its tools. Pure.

A `Cassette` answers a tool call with the result of the same call in the recorded rollout: the tool, its arguments as
canonical JSON, and the number of the call among those of its kind (a second look at a seat may find it taken). A call
that the recorded agent did not make has no result: that is a *miss*, and from there on the run has *diverged*. The real
result is unknown, so none is made up; the caller ends the run there and counts it.

Results are taken from the requests: an agent sends with every call the results of its tools so far, or names the
response that it continues, where the provider keeps conversations. Ids of calls are matched in their order, because
real agents use one id several times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.traffic.trials.replay.agreement import canonical

ToolCallKey = tuple[str, str]
"""A tool and its canonical arguments."""


@dataclass(frozen=True, slots=True)
class CassetteMiss:
    """A tool call that was not recorded."""

    tool: str
    arguments: str
    """The arguments as canonical JSON."""
    occurrence: int
    """Number of the call among those with these arguments, from 1."""


@dataclass(slots=True)
class Cassette:
    """The tool results of one rollout; plays once, from its beginning."""

    results: Mapping[ToolCallKey, Sequence[Part]]
    """The results of each call, in the order of its occurrences."""
    misses: list[CassetteMiss] = field(default_factory=list[CassetteMiss])
    """Calls without a recorded result; at the first of them the run diverged."""
    _left: dict[ToolCallKey, list[int]] = field(default_factory=dict[ToolCallKey, list[int]])
    """Indices of the results of each call that were not played, as a heap: requests of an agent may run at once."""

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> Cassette:
        """Return the results in a rollout's exchanges, in their order. Each request repeats its agent's conversation,
        so a call counts once: by its id, or, where a dialect has no ids, by its place."""
        conversations: list[list[Message]] = []
        kept: dict[str, list[Message]] = {}
        for turn in turns:
            messages = [message for message in turn.messages if message.role not in ("system", "developer")]
            messages = kept.get(str(turn.sampling.get("previous_response_id")), []) + messages
            _follow(conversations, messages)
            if turn.response_id is not None and turn.choices:
                kept[turn.response_id] = [*messages, turn.choices[0].message]
        results: dict[ToolCallKey, list[Part]] = defaultdict(list)
        for key, result in (call for conversation in conversations for call in _answered(conversation)):
            if result is not None:
                results[key].append(result)
        return cls(dict(results))

    def answer(self, tool: str, arguments: str) -> Part | None:
        """Return the recorded result of this call: text, and in `data` what is more than text; None for a miss.
        `arguments`: JSON text."""
        key = tool, canonical(arguments)
        recorded = self.results.get(key, ())
        left = self._left.setdefault(key, list(range(len(recorded))))
        if left:
            return recorded[heappop(left)]
        missed = sum((miss.tool, miss.arguments) == key for miss in self.misses)
        self.misses.append(CassetteMiss(*key, len(recorded) + missed + 1))
        return None

    def take_back(self, calls: Iterable[tuple[str, str, Part]]) -> None:
        """Return the results of calls to the cassette; their request has failed and will be sent again."""
        for tool, arguments, result in calls:
            key = tool, canonical(arguments)
            place = next(at for at, one in enumerate(self.results[key]) if one is result)
            heappush(self._left[key], place)

    def fresh_copy(self) -> Cassette:
        """Return the same cassette at its beginning."""
        return Cassette(self.results)


def _follow(conversations: list[list[Message]], messages: list[Message]) -> None:
    """Replace the conversation that a request's messages continue, or add them beside the others."""
    for at, known in enumerate(conversations):
        if messages[: len(known)] == known:
            conversations[at] = messages
            return
        if known[: len(messages)] == messages:
            # The same request was sent again.
            return
    conversations.append(messages)


def _answered(messages: list[Message]) -> list[tuple[ToolCallKey, Part | None]]:
    """Return the calls of a conversation, each with its result."""
    waiting: list[tuple[str | None, ToolCallKey, int]] = []
    found: list[tuple[ToolCallKey, Part | None]] = []
    for message in messages:
        for part in message.parts:
            if part.type == "tool_call":
                key = part.name or "", canonical(part.arguments or "")
                waiting.append((part.id, key, len(found)))
                found.append((key, None))
            elif part.type == "tool_call_response" and waiting:
                # Without an id it answers the first call of that name that still waits.
                mine = next((it for it in waiting if _answers(part, it[0], it[1])), None)
                if mine is not None:
                    waiting.remove(mine)
                    found[mine[2]] = mine[1], part
    return found


def _answers(result: Part, call_id: str | None, key: ToolCallKey) -> bool:
    if result.id is not None or call_id is not None:
        return result.id == call_id
    return result.name in (None, key[0])
