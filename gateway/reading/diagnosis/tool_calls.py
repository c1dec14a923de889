"""The tool calls in the answers of a rollout's models, and the results of them that later requests carried. Pure.

A `ToolRequest` is one tool call of one answer. Its results are in later requests, under its id; `read_tool_requests`
finds them. Each request repeats its whole conversation, so only its end is read: from its last message back to where an
earlier request ended, which is recognised by the number of messages, the last one and the first one (`place_of`). A
request that is not recognised (its history was compacted or edited) is read whole, and results that were seen before
are left out.

Ids alone do not tell which answer a result belongs to: some models count their calls anew in every conversation, some
give no ids, several agents work in one rollout, a client sends a call again. Where an id names several calls, the
conversation decides (`_narrowed`): the answer's place in the request, the messages before it, name and arguments, the
call's place among parallel calls, the agent's name, and which call was given up. If several remain, the result counts
for all of them, and nothing that follows from it can be certain.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from penstock.gateway.model.turn import Message, Part, Turn
from penstock.gateway.reading.diagnosis.tool_results import ShownResult, canonical, parse_arguments

# Messages of requests that repeat their conversation: which are new, and which request continues which. Pure.
#
# Places are counted without the system messages at the beginning, which hosts rewrite, split and join.

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


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model call of the rollout, read."""

    sequence: int
    """Its place in the attempt; calls are given in this order."""
    start_ns: int
    """Time at which its request came; ns."""
    end_ns: int | None
    """Time at which its answer was passed on; ns; None while it runs."""
    turn: Turn
    """Its messages and its answer."""
    agent: str | None = None
    """The agent's name, where its address gives one."""
    retry_of: int | None = None
    """Sequence of the call that this one repeats, if the client said so."""
    whole: bool = True
    """False when the answer did not reach the client to its end."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The attributes of its span."""


@dataclass(frozen=True, slots=True)
class ResultDelivery:
    """A request that carried the result of a tool call."""

    shown: ShownResult
    """The result in the form in which the model was shown it."""
    sequence: int
    """Sequence of the call that carried it."""
    start_ns: int
    """Time at which that call began; ns. The tool had ended by then."""
    asks: tuple[ToolRequest, ...]
    """The tool calls whose result it may be; several where the conversation does not decide."""


@dataclass(slots=True, eq=False)
class ToolRequest:
    """A tool call that an answer asked for."""

    call: ModelCall
    """The model call whose answer it is in."""
    choice: int
    """Index of the choice, of n answers."""
    place: int
    """Its place among the tool calls of the answer, from 0."""
    id: str | None
    """The tool-call id."""
    name: str
    """The tool, as the host named it to the model."""
    arguments: str
    """The arguments as the model generated them."""
    value: Any = None
    """The arguments as JSON."""
    canonical: str = ""
    """The arguments in the form in which they are compared."""
    given_up: bool = False
    """True when the client sent the model call again, or its conversation went on from another answer."""
    rivals: int = 0
    """Number of other answers to the same request: choices, or answers to a repeated request."""
    deliveries: list[ResultDelivery] = field(default_factory=list[ResultDelivery])
    """The results, oldest first; more than one where the conversation forked or the host changed the result."""

    def __post_init__(self) -> None:
        self.value = parse_arguments(self.arguments)
        self.canonical = canonical(self.value)

    @property
    def signature(self) -> tuple[str, str]:
        """Name and arguments, independent of the id."""
        return self.name, self.canonical


def share_messages(call: ModelCall, before: Sequence[ModelCall]) -> ModelCall:
    """The call, with the message objects of the call before it where the messages are equal: agents send the whole
    conversation with every call, and memory would hold it each time."""
    for earlier in before:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(earlier.turn.messages, call.turn.messages, strict=False))
        known = [message for message, _ in same]
        call.turn.messages[: len(known)] = known
    return call


class _Reader:
    """Reads calls in their order and collects the asks."""

    def __init__(self) -> None:
        self.asks: list[ToolRequest] = []
        self._by_id: defaultdict[str, list[ToolRequest]] = defaultdict(list)
        self._by_signature: defaultdict[tuple[str, str], list[ToolRequest]] = defaultdict(list)
        self._by_response: dict[str, list[ToolRequest]] = {}
        self._by_call: defaultdict[int, list[ToolRequest]] = defaultdict(list)
        self._placed: defaultdict[tuple[object, int], list[ToolRequest]] = defaultdict(list)
        self._known: set[MessagePlace] = set()
        self._asked_at: defaultdict[MessagePlace, list[ToolRequest]] = defaultdict(list)
        self._answers_at: Counter[MessagePlace] = Counter()
        self._went_on: set[MessagePlace] = set()

    def read(self, call: ModelCall) -> None:
        for ask in self._by_call.get(call.retry_of or -1, ()):
            ask.given_up = True
        messages, lead = call.turn.messages, lead_of(call.turn.messages)
        end = self._known_until(messages, lead)
        for result, written in results_with_calls(messages, end):
            asks = self._orphan(call, result) if written is None else self._asked(call, written, lead, result)
            _deliver(call, result, asks)
        own = self._answer(call, len(messages) - lead)
        if len(messages) > lead:
            place = place_of(messages, len(messages) - 1, lead)
            self._known.add(place)
            self._asked_at[place] += own
            self._answers_at[place] += len(call.turn.choices)

    def end(self) -> list[ToolRequest]:
        """All asks. Asks whose conversation continued from another answer are marked as given up."""
        followed = {(ask.call.sequence, ask.choice) for ask in self.asks if ask.deliveries}
        for place, asks in self._asked_at.items():
            for ask in asks:
                ask.rivals = self._answers_at[place] - 1
            if place in self._went_on or any(ask.deliveries for ask in asks):
                for ask in asks:
                    ask.given_up |= (ask.call.sequence, ask.choice) not in followed
        return self.asks

    def _known_until(self, messages: Sequence[Message], lead: int) -> int:
        """The index of the first message that no earlier request contained. A request that repeats another is read like
        that one."""
        for at in range(len(messages) - 2, lead - 1, -1):
            place = place_of(messages, at, lead)
            if place in self._known:
                self._went_on.add(place)
                return at + 1
        return lead

    def _answer(self, call: ModelCall, before: int) -> list[ToolRequest]:
        """Adds the tool calls of the answer. `before`: number of the request's messages, without those of the
        system."""
        own: list[ToolRequest] = []
        for choice in call.turn.choices:
            parts = [part for part in choice.message.parts if part.type == "tool_call"]
            for place, part in enumerate(parts):
                own.append(ToolRequest(call, choice.index, place, part.id, part.name or "", part.arguments or ""))
        for ask in own:
            if ask.id is not None:
                self._by_id[ask.id].append(ask)
                self._placed[ask.id, before].append(ask)
            self._placed[ask.signature, before].append(ask)
            self._by_signature[ask.signature].append(ask)
        self.asks += own
        self._by_call[call.sequence] = own
        if call.turn.response_id is not None:
            self._by_response[call.turn.response_id] = own
        return own

    def _asked(self, call: ModelCall, written: WrittenToolCall, lead: int, result: Part) -> list[ToolRequest]:
        """The asks that a tool call in a request may be."""
        signature = written.part.name or "", canonical(parse_arguments(written.part.arguments or ""))
        here = range(written.block - lead, written.at - lead + 1)
        found: list[ToolRequest] = []
        for key in (written.part.id, signature):
            found = found or [ask for at in here for ask in self._placed.get((key, at), ())]
        found = [ask for ask in found if may_continue(ask.call.turn.messages, call.turn.messages, lead)]
        # In a compacted conversation the places differ, but an id that was given once still names its call.
        found = found or self._by_id.get(written.part.id or "", []) or self._waiting(signature, result)
        return _narrowed(found, call, written, signature)

    def _waiting(self, signature: tuple[str, str], result: Part) -> list[ToolRequest]:
        """The asks that wait for a result whose id no answer has; none if an ask of their kind has this result
        already."""
        asks = self._by_signature.get(signature, [])
        if any(_is(delivery, result) for ask in asks for delivery in ask.deliveries):
            return []
        return [ask for ask in asks if not ask.deliveries and not ask.given_up]

    def _orphan(self, call: ModelCall, result: Part) -> list[ToolRequest]:
        """The asks of a result whose call is not in the request: the provider keeps the conversation."""
        found = self._by_id.get(result.id or "", [])
        previous = self._by_response.get(call.turn.previous_response or "", [])
        return [ask for ask in found if ask in previous] or found


def read_tool_requests(calls: Iterable[ModelCall]) -> list[ToolRequest]:
    """The tool calls that the answers asked for, with their results. `calls`: of one rollout, in their order."""
    reader = _Reader()
    for call in calls:
        reader.read(call)
    return reader.end()


def _deliver(call: ModelCall, result: Part, asks: Sequence[ToolRequest]) -> None:
    delivery = ResultDelivery(ShownResult(result), call.sequence, call.start_ns, tuple(asks))
    for ask in asks:
        if len(asks) > 1 or not any(_is(it, result) for it in ask.deliveries):
            ask.deliveries.append(delivery)


def _is(delivery: ResultDelivery, result: Part) -> bool:
    part = delivery.shown.part
    return part.text == result.text and part.data == result.data


def _narrowed(
    found: list[ToolRequest], call: ModelCall, written: WrittenToolCall, signature: tuple[str, str]
) -> list[ToolRequest]:
    """The asks that remain: each test removes those that fail it, unless all fail."""
    tests: list[Callable[[ToolRequest], bool]] = [
        lambda ask: ask.signature == signature,
        lambda ask: ask.place == written.place,
        lambda ask: ask.call.agent == call.agent,
        lambda ask: continues(ask.call.turn.messages, call.turn.messages),
        lambda ask: not ask.given_up,
        lambda ask: ask.call.whole,
    ]
    for passes in tests:
        if len(found) < 2:
            break
        found = [ask for ask in found if passes(ask)] or found
    if len(found) < 2:
        return found
    # To the tool one id in several choices of an answer is one call.
    same = {(ask.call.sequence, ask.id, ask.signature) for ask in found}
    return found[:1] if len(same) == 1 and found[0].id is not None else found
