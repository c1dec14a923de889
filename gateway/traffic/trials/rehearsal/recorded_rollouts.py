"""Recorded rollouts that can be rehearsed: their input is known, they succeeded, and they ended with words. Runs on
threads; only reads the tape.

The newest rollouts that used the resource are drawn, found as `recorded_calls` finds calls, without those in which the
candidate has answered a call; their order follows from the seed. A rollout cannot be rehearsed if its provider ran
tools by itself, or if it ended with a tool call that nobody answered (some agents hand over their result in a tool
call): the judge compares the last answer, and no agent may see a tool call in a rehearsal.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import islice
from typing import Any, Final

import orjson

from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import Rollout, RolloutStatus
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.reading.turns import decode_exchange, read_exchange
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import unless_damaged
from penstock.gateway.traffic.trials.replay.judges import canonical, next_action
from penstock.gateway.traffic.trials.replay.recorded_calls import DAMAGED, HISTORY, ReplayableCall, ReplaySource
from penstock.gateway.traffic.trials.replay.sender import unrepeatable
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import Json, arr, obj

# Recorded tool results, for an agent that is run again without its tools. Pure.
#
# A `Cassette` answers a tool call with the result of the same call in the recorded rollout: the tool, its arguments
# as canonical JSON, and the number of the call among those of its kind (a second look at a seat may find it taken). A
# call that the recorded agent did not make has no result: that is a *miss*, and from there on the run has *diverged*.
# The real result is unknown, so none is made up; the caller ends the run there and counts it.
#
# Results are taken from the requests: an agent sends with every call the results of its tools so far, or names the
# response that it continues, where the provider keeps conversations. Ids of calls are matched in their order, because
# real agents use one id several times.

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


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A recorded rollout that is rehearsed."""

    rollout: Rollout
    cassette: Cassette
    last: Turn
    """Its last answered exchange, which the judge compares."""

    @property
    def name(self) -> str:
        """The name of the recorded attempt: ROLLOUT/ATTEMPT."""
        return f"{self.rollout.id}/{self.rollout.attempt}"


@dataclass(slots=True)
class RolloutDraw:
    """The recorded rollouts to rehearse."""

    found: list[RecordedRollout] = field(default_factory=list[RecordedRollout])
    """The originals in the order in which they are rehearsed."""
    passed_over: Counter[str] = field(default_factory=Counter[str])
    """Numbers of rollouts that used the resource and cannot be rehearsed, by reason."""


def draw(tape: Store, release: Release, recordings: ReplaySource, stopped: Callable[[], bool]) -> RolloutDraw:
    """Return as many originals as the policy wants, at most. `stopped`: called between rollouts; True when nobody wants
    them any more."""
    drawn = RolloutDraw()
    for _, rollout in islice(tape.rollouts(), HISTORY):
        if stopped() or len(drawn.found) >= release.policy.replay.closed_loop:
            break
        found = unless_damaged(partial(_original, tape, release, recordings, rollout))
        one = DAMAGED if found is None else found
        if isinstance(one, RecordedRollout):
            drawn.found.append(one)
        elif one:
            drawn.passed_over[one] += 1
    random.Random(f"{release.salt}/rehearsal").shuffle(drawn.found)
    return drawn


def _original(tape: Store, release: Release, recordings: ReplaySource, rollout: Rollout) -> RecordedRollout | str:
    """Return the original; else the reason why it cannot be rehearsed, empty when it is not eligible."""
    ended = rollout.ended_ns is not None and rollout.ended_ns <= release.changed_ns
    if rollout.status != RolloutStatus.SUCCEEDED or not ended or not _told(tape, rollout):
        return ""
    spans = [span for span in tape.spans(rollout.id, rollout.attempt) if span.kind == "llm"]
    tried = release.arm_versions("candidate").items()
    if any(is_release_call(span) or not tried.isdisjoint((span.versions or {}).items()) for span in spans):
        return ""
    used = (span for span in spans if recordings.qualifies(span, rollout))
    if not any(isinstance(recordings.open(span), ReplayableCall) for span in used):
        return ""
    if rollout.input is None:
        return "it has no input"
    return _read(tape, rollout, [span for span in spans if is_comparable(span)])


def _told(tape: Store, rollout: Rollout) -> bool:
    """True if the end of a rollout was reported, not guessed from its silence."""
    return rollout.origin == "queued" or any(one.outcome is not None for one in tape.attempts(rollout.id))


def is_comparable(span: Span) -> bool:
    """True if the span is a call whose answer can be compared."""
    good = span.kind == "llm" and span.status == SpanStatus.OK and bool(span.choices)
    return good and by_name(span.dialect).generates


def _read(tape: Store, rollout: Rollout, spans: list[Span]) -> RecordedRollout | str:
    turns: list[Turn] = []
    for span in spans:
        exchange = tape.exchange(span)
        if exchange is None or span.truncated:
            return "its bytes were not kept"
        problem = unrepeatable(by_name(span.dialect), decode_exchange(exchange).request_body)
        if problem is not None:
            return problem
        turns.append(read_exchange(span.dialect, exchange, span))
    last = turns[spans.index(last_answered(spans))]
    did = next_action(last)
    if did is None:
        return "its last answer cannot be read"
    if did.calls:
        return f"it ended with a call of {did.calls[0][0]}, which nobody answered"
    return RecordedRollout(rollout, Cassette.of(turns), last)


def last_answered(spans: list[Span]) -> Span:
    """Return the answered call whose answer came last."""
    return max(spans, key=lambda span: span.end_ns or 0)


# Continues a conversation without its agent: appends an answer and the results of its tools to the request. Pure.
#
# An agent that has called its tools sends the conversation again with the model's answer and a result for each call.
# The gateway does that for the agent, in the wire form of its API (`Dialect.continuation`): the answer's own objects
# unchanged, as the official SDKs send them back, and the recorded results under the ids of the new calls. Read again,
# such a request is the old conversation, the answer and the results.
#
# The agent never saw these messages, so its later requests lack them. `restore` puts them back in their place:
# without them the model would not know the results of its own tools.

_ASKING: Final = ("user", "system", "developer", "tool", "function")
"""Roles of messages that are not the model's."""


class ContinuationError(Exception):
    """A tool call of the answer has no result that could be written; the message says why."""


@dataclass(frozen=True, slots=True)
class HiddenMessages:
    """Tool calls and results that an agent has not seen."""

    before: list[Any]
    """The messages before them, as `plain` returns them."""
    messages: Sequence[Any]
    """The hidden messages."""


def conversation(dialect: Dialect, asked: Json) -> list[Any]:
    """Return the messages of a request, unchanged."""
    found = asked.get(dialect.conversation_field)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return list(arr(found)) if isinstance(found, list) else [] if found is None else [found]


def with_conversation(dialect: Dialect, asked: Json, messages: Sequence[Any]) -> bytes:
    """Return the request with these messages."""
    return orjson.dumps(asked | {dialect.conversation_field: list(messages)})


def exchange(dialect: Dialect, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json]:
    """Return an answer and the results of its calls, in their order, as messages of a request. Raises
    `ContinuationError`."""
    made = dialect.continuation(response, stream, results)
    if made is None:
        raise ContinuationError("a call of it has no result that could be written")
    return made


def restore(messages: Sequence[Any], told: Sequence[HiddenMessages]) -> list[Any]:
    """Return a conversation with its hidden messages. Of several for one place the last counts."""
    whole = list(messages)
    compared: list[Any] = plain(whole)
    at = {len(one.before): one for one in told if _goes_on(compared, one)}
    for place in sorted(at, reverse=True):
        whole[place:place] = at[place].messages
    return whole


def _goes_on(messages: list[Any], hidden: HiddenMessages) -> bool:
    """True if the messages are those in `hidden.before`, followed by an answer of the model."""
    end = len(hidden.before)
    if end >= len(messages) or obj(messages[end]).get("role") in _ASKING:
        return False
    return messages[:end] == hidden.before


def plain(value: Any) -> Any:
    """Return a value without cache markers: agents move them from message to message."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in obj(value).items() if key != "cache_control"}
    return [plain(inner) for inner in arr(value)] if isinstance(value, list) else value
