"""The sub-agents of an attempt, the tool call that started each, and how long tools took by the agent's clock. Pure.

A coding agent names the sub-agent that makes a call, and the agent that started it, in headers (`model.facts`). Of an
agent that names none, sub-agents are inferred from its conversations: one that begins while another waits for the
result of a tool call, and ends before the result is carried, was begun by that tool. So is one, however long, whose
first message holds a text of the tool call's arguments. A conversation that fits several calls stays without one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

from penstock.gateway.model.facts import AGENT_ID, PARENT_AGENT, TOOL_DURATIONS, own_attribute
from penstock.gateway.model.span import Span
from penstock.gateway.model.tools import SubAgent
from penstock.gateway.model.turn import Message
from penstock.gateway.reading.diagnosis.tool_calls import ModelCall, ToolRequest, lead_of, results_with_calls

TELLING: Final = 16
"""Least characters of a text in a tool call's arguments that tell whose prompt it became."""


def told_callers(spans: Iterable[Span]) -> dict[int, int]:
    """By sequence, the model call that started the sub-agent which made each call, as far as headers and times tell:
    the last call of the agent above, if it has ended with tool calls when the sub-agent begins."""
    agents: defaultdict[str | None, list[Span]] = defaultdict(list)
    for span in sorted((span for span in spans if span.kind == "llm"), key=lambda span: (span.start_ns, span.sequence)):
        agents[own_attribute(span, AGENT_ID)].append(span)
    found: dict[int, int] = {}
    for agent in agents.keys() - {None}:
        own, parents = agents[agent], [own_attribute(span, PARENT_AGENT) for span in agents[agent]]
        above: list[Span] = _above(agents, next((parent for parent in parents if parent), None), agent)
        before = [span for span in above if span.start_ns < own[0].start_ns][-1:]
        for last in before:
            if last.tool_calls and last.end_ns is not None and last.end_ns <= own[0].start_ns:
                found.update({span.sequence: last.sequence for span in own})
    return found


def may_have_sub_agents(spans: Iterable[Span]) -> bool:
    """True unless all model calls of an attempt can be of one conversation, whose requests only grow."""
    longest = 0
    for span in spans:
        if span.kind == "llm" and span.request_bytes:
            if span.request_bytes < longest or own_attribute(span, AGENT_ID):
                return True
            longest = span.request_bytes
    return False


def _above(agents: Mapping[str | None, list[Any]], parent: str | None, agent: str | None) -> list[Any]:
    """The calls of the agent above. One that is not known is the main agent, whose calls have no id."""
    return agents[parent] if parent in agents and parent != agent else agents.get(None, [])


@dataclass(slots=True, eq=False)
class _Conversation:
    agent: str | None
    """Id of its sub-agent; None for the main agent's, and those of agents that name none."""
    calls: list[ModelCall] = field(default_factory=list[ModelCall])
    asked: Sequence[ToolRequest] = ()
    """The tool calls that may have begun it, all of one answer."""

    @property
    def parent(self) -> str | None:
        """The id of the agent that started it, where that is told."""
        return next(filter(None, (call.attributes.get(PARENT_AGENT) for call in self.calls)), None)

    @property
    def start_ns(self) -> int:
        return self.calls[0].start_ns

    @property
    def end_ns(self) -> int:
        return max(call.start_ns if call.end_ns is None else call.end_ns for call in self.calls)

    @property
    def prompt(self) -> list[str]:
        """The user's texts before the first answer in it."""
        messages = self.calls[0].turn.messages
        texts: list[str] = []
        for message in messages[lead_of(messages) :]:
            if message.role == "assistant":
                break
            texts += [part.text for part in message.parts if part.type == "text" and part.text]
        return texts


def sub_agents(calls: Sequence[ModelCall], asks: Sequence[ToolRequest]) -> list[SubAgent]:
    """The sub-agents that made some of these calls, in the order in which they began. `asks`: the tool calls that the
    calls' answers asked for."""
    of = _conversations(calls, asks)
    conversations = sorted(set(of.values()), key=lambda one: (one.start_ns, one.calls[0].sequence))
    told = any(one.agent is not None for one in conversations)
    for one in conversations:
        if one.agent is not None:
            one.asked = _told(one, asks, of)
        elif not told:
            one.asked = _inferred(one, asks, of)
    return [_sub_agent(one) for one in conversations if one.agent is not None or one.asked]


def _sub_agent(one: _Conversation) -> SubAgent:
    return SubAgent(
        agent=one.calls[0].agent,
        agent_id=one.agent,
        parent_agent=one.parent,
        calls=[call.sequence for call in one.calls],
        asked_by=one.asked[0].call.sequence if one.asked else None,
        call_id=one.asked[0].id if len(one.asked) == 1 else None,
        inferred=one.agent is None,
    )


def _conversations(calls: Sequence[ModelCall], asks: Sequence[ToolRequest]) -> dict[int, _Conversation]:
    """The conversation of each call, by sequence. A named sub-agent has one. Any other call goes on with the
    conversation whose tool results it carries, or with whose messages it begins."""
    carried: dict[int, int] = {}
    for ask in asks:
        for delivery in ask.deliveries:
            if len(delivery.asks) == 1:
                carried[delivery.sequence] = max(ask.call.sequence, carried.get(delivery.sequence, 0))
    of: dict[int, _Conversation] = {}
    named: dict[str, _Conversation] = {}
    begun: dict[int, _Conversation] = {}
    for call in calls:
        agent = call.attributes.get(AGENT_ID)
        digests = [] if agent else [*_beginnings(call.turn.messages)]
        if agent:
            one = named.setdefault(agent, _Conversation(agent))
        elif call.sequence in carried and of[carried[call.sequence]].agent is None:
            one = of[carried[call.sequence]]
        else:
            known = (begun[digest] for digest in reversed(digests) if digest in begun)
            one = next(known, None) or _Conversation(None)
        one.calls.append(call)
        of[call.sequence] = one
        if digests:
            begun[digests[-1]] = one
    return of


def _beginnings(messages: Sequence[Message]) -> Iterator[int]:
    """Hashes of the conversation up to each of its messages, the system's aside."""
    digest = 0
    for message in messages[lead_of(messages) :]:
        parts = (part for part in message.parts if part.type != "reasoning")
        digest = hash((digest, message.role, *((part.type, part.id, part.name, part.text) for part in parts)))
        yield digest


def _told(one: _Conversation, asks: Iterable[ToolRequest], of: Mapping[int, _Conversation]) -> Sequence[ToolRequest]:
    agents: defaultdict[str | None, list[ToolRequest]] = defaultdict(list)
    for ask in asks:
        agents[of[ask.call.sequence].agent].append(ask)
    before = [ask for ask in _above(agents, one.parent, one.agent) if ask.call.start_ns <= one.start_ns]
    return _only(_telling(one, before)) or _only([ask for ask in before if _waits(ask, one.start_ns)])


def _inferred(
    one: _Conversation, asks: Iterable[ToolRequest], of: Mapping[int, _Conversation]
) -> Sequence[ToolRequest]:
    others = [ask for ask in asks if of[ask.call.sequence] is not one and ask.deliveries]
    during = [ask for ask in others if _answered_ns(ask) <= one.start_ns and _waits(ask, one.start_ns)]
    if telling := _telling(one, during):
        return _only(telling)
    within = [ask for ask in during if one.end_ns <= ask.deliveries[0].start_ns]
    inner = [ask for ask in within if not any(_began(ask, it, of) for it in within)]
    outer = [ask.call.sequence for ask in within if ask not in inner]
    # An answer that asked for several tools may have begun this one beside the one that it seems to be inside.
    return _only(inner) if len(set(outer)) == len(outer) else ()


def _began(outer: ToolRequest, inner: ToolRequest, of: Mapping[int, _Conversation]) -> bool:
    """True if the tool call began the conversation, or one around it, in which the other was asked."""
    seen, above = set[int](), of[inner.call.sequence]
    while above.asked and id(above) not in seen:
        if outer in above.asked:
            return True
        seen.add(id(above))
        above = of[above.asked[0].call.sequence]
    return False


def _only(asks: Sequence[ToolRequest]) -> Sequence[ToolRequest]:
    """The tool calls if one answer asked for them; else none."""
    return asks if len({ask.call.sequence for ask in asks}) == 1 else ()


def _answered_ns(ask: ToolRequest) -> int:
    return ask.call.start_ns if ask.call.end_ns is None else ask.call.end_ns


def _waits(ask: ToolRequest, now_ns: int) -> bool:
    """True if no request has carried the result yet."""
    return not ask.deliveries or now_ns <= ask.deliveries[0].start_ns


def _telling(one: _Conversation, asks: Sequence[ToolRequest]) -> list[ToolRequest]:
    """The tool calls with a text that the conversation begins with: the whole of a message, else a part of one."""
    prompt = [text.strip() for text in one.prompt]
    given = [(ask, {text.strip() for text in _texts(ask.value)} - {""}) for ask in asks]
    whole = [ask for ask, texts in given if not texts.isdisjoint(prompt)]
    return whole or [
        ask for ask, texts in given if any(len(text) >= TELLING and text in said for text in texts for said in prompt)
    ]


def _texts(value: Any) -> Iterator[str]:
    """The texts in the arguments of a tool call."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict | list):
            waiting += cast("dict[str, Any]", one).values() if isinstance(one, dict) else cast("list[Any]", one)


# -- the durations that an agent has measured --------------------------------------------------------------------------
#
# They have names and no ids. They are in the order of the results that the request carries, where all were measured:
# a tool that was refused was not.


class MeasuredTools(NamedTuple):
    """The tool results of a request with the durations that its agent gives."""

    took_ns: dict[int, int]
    """By `id` of the result's part: how long its tool ran; ns."""
    left: list[str]
    """`NAME=MILLISECONDS` of those that fit no result, or several."""


DIGITS: Final = 12
"""Most digits of a time in milliseconds."""
NOT_MEASURED: Final = MeasuredTools({}, [])


def measured_tools(attributes: Mapping[str, Any] | None, messages: Sequence[Message]) -> MeasuredTools:
    """Pair the durations among a call's attributes with the results that its request carries first."""
    given: list[str] = (attributes or {}).get(TOOL_DURATIONS) or []
    durations = [
        (name, int(took))
        for name, _, took in (one.rpartition("=") for one in given)
        if took.isdecimal() and len(took) <= DIGITS
    ]
    if not given or len(durations) < len(given):
        return MeasuredTools({}, given)
    last = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "assistant"), -1)
    results = [
        (None if written is None else written.part.name, result)
        for result, written in results_with_calls(messages, last + 1)
        if any(result is part for message in messages[last + 1 :] for part in message.parts)
    ]
    took: dict[int, int] = {}
    left: list[str] = []
    for name in dict.fromkeys(name for name, _ in durations):
        own = [ms for other, ms in durations if other == name]
        fits = [result for other, result in results if other == name]
        if len(own) == len(fits):
            took |= {id(result): ms * 10**6 for result, ms in zip(fits, own, strict=True)}
        else:
            left += [f"{name}={ms}" for ms in own]
    return MeasuredTools(took, left)
