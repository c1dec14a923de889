"""Conversations in OpenAI's format, for supervised fine-tuning: one for each leaf of the turn tree.

    made, report = conversations(episode, Options(model="policy"))
    made[0].messages    # [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "weight": 1}]

Agents send the whole conversation with every call, so the last call of a branch holds all of it: a leaf's conversation
is the messages sent with its call, and its answer. Answers that the policy gave on the way carry `"weight": 1`, all
other messages of the assistant `"weight": 0` (the field of OpenAI's fine-tuning files). An answer that branches share
has weight 1 in one of them only, so that nothing is learned twice. No token ids are needed, whatever the dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.adapters.episode import Episode, EpisodeAttempt, EpisodeCall
from penstock.adapters.selection import AttemptRewards, Options, SampleReport, select_attempts, select_calls
from penstock.gateway.model.turn import Message, Part, Tool
from penstock.gateway.reading.diagnosis.rows import TurnChoice, TurnNode, TurnTree, message_digests
from penstock.gateway.wire.dialects.parts import fingerprint

Wire = dict[str, Any]


REWARD_REASONS: Final = frozenset({"no_reward", "untrusted_reward", "nan_reward"})
"""Reasons that do not matter for supervised fine-tuning, which needs no rewards."""


@dataclass(frozen=True, slots=True)
class ChatConversation:
    """One branch of a conversation."""

    rollout: str
    """Rollout id."""
    attempt: str
    """Attempt id."""
    group: str
    """The task that the rollout repeats."""
    agent: str | None
    """The agent whose calls it is made of."""
    model: str
    """The model that the calls request."""
    calls: tuple[int, ...]
    """Sequences of the calls whose answers carry weight 1, in order."""
    messages: list[Wire]
    """Messages in OpenAI's form; `weight` is set on every message of the assistant."""
    tools: list[Wire]
    """Tools offered in its last call."""
    reward: float | None
    """Terminal reward of the rollout; None when there is none."""
    rewards: Mapping[str, float]
    """Dimensions of the reward."""
    tool_errors: int = 0
    """Tool runs of the attempt, on servers behind the gateway, that failed or were stopped by a policy."""


def conversations(episode: Episode, options: Options | None = None) -> tuple[list[ChatConversation], SampleReport]:
    """The conversations of an episode, and a report of every call that is in none. Only the options that choose calls
    and weigh rewards apply; without options, rollouts without a trusted reward are included too.
    """
    chosen = options or Options(allow=REWARD_REASONS)
    report = SampleReport(rollouts=1, calls=sum(len(one.calls) for one in episode.attempts))
    made = [
        it for one in select_attempts(episode, chosen.attempt, report) for it in _attempt(episode, one, chosen, report)
    ]
    report.samples, report.choices = len(made), sum(len(one.calls) for one in made)
    return made, report


def _attempt(
    episode: Episode, one: EpisodeAttempt, options: Options, report: SampleReport
) -> Iterator[ChatConversation]:
    judged, good = select_calls(episode, one, options, _answered, report)
    agents: dict[str | None, TurnTree[EpisodeCall]] = {}
    for call in good:
        _ = agents.setdefault(call.span.agent, TurnTree()).add(call, _choices(call, report))
    for tree in agents.values():
        marked: set[TurnNode[EpisodeCall]] = set()
        for node in tree.nodes:
            if not node.children:
                path = [it for it in _path(node) if it not in marked]
                marked.update(path)
                yield _conversation(episode, one, judged, node, path)


def _answered(call: EpisodeCall) -> bool:
    return bool(call.messages.replies)


def _choices(call: EpisodeCall, report: SampleReport) -> list[TurnChoice]:
    """The choices with content, compared by messages: only role, text, tool calls and results count."""
    found: list[TurnChoice] = []
    before = message_digests(call.messages.story)
    for index, said in call.messages.replies.items():
        if said:
            found.append(TurnChoice(index, before, message_digests([*call.messages.story, said])[-1]))
        else:
            report.drop(call.span, index, "empty", "nothing was said")
    return found


def _path(node: TurnNode[EpisodeCall] | None) -> list[TurnNode[EpisodeCall]]:
    """The nodes from the first call of a conversation to this one."""
    found: list[TurnNode[EpisodeCall]] = []
    while node is not None:
        found.append(node)
        node = node.parent
    return found[::-1]


def _conversation(
    episode: Episode,
    one: EpisodeAttempt,
    judged: AttemptRewards,
    leaf: TurnNode[EpisodeCall],
    produced: Sequence[TurnNode[EpisodeCall]],
) -> ChatConversation:
    call, turn = leaf.call, leaf.call.turn
    assert turn is not None
    said = next(one.message for one in turn.choices if one.index == leaf.choice)
    places = _places(turn.messages, produced)
    messages = [wire for at, it in enumerate([*turn.messages, said]) for wire in openai_messages(it, int(at in places))]
    return ChatConversation(
        rollout=call.span.rollout,
        attempt=call.span.attempt,
        group=episode.group,
        agent=call.span.agent,
        model=call.span.model or "",
        calls=tuple(node.call.span.sequence for node in produced),
        messages=messages,
        tools=[openai_tool(tool) for tool in turn.tools],
        reward=judged.reward,
        rewards=judged.dimensions,
        tool_errors=sum(span.kind == "tool" and span.status == "error" for span in one.spans),
    )


def _places(sent: Sequence[Message], produced: Iterable[TurnNode[EpisodeCall]]) -> set[int]:
    """The places of these calls' answers among the messages that the leaf sent; its own answer comes after all of
    them.
    """
    # Messages without content have no fingerprint and are not compared.
    told = [*(at for at, message in enumerate(sent) if fingerprint(message)), len(sent)]
    return {told[len(node.call.messages.story)] for node in produced}


def openai_messages(message: Message, weight: int | None = None) -> list[Wire]:
    """A message in OpenAI's form. Tool results become messages of their own, and come first."""
    results = [part for part in message.parts if part.type == "tool_call_response"]
    others = [part for part in message.parts if part.type != "tool_call_response"]
    found = [_result(part) for part in results]
    return [*found, _message(message, others, weight)] if others or not results else found


def _result(part: Part) -> Wire:
    named = {} if part.name is None else {"name": part.name}
    content = part.text if part.data is None else part.data
    return {"role": "tool", "tool_call_id": part.id, **named, "content": content or ""}


def _message(message: Message, parts: Sequence[Part], weight: int | None) -> Wire:
    calls = [_call(part) for part in parts if part.type == "tool_call"]
    thought = [part.text for part in parts if part.type == "reasoning" and part.text]
    refusal = [part.text for part in parts if part.type == "refusal" and part.text]
    found: Wire = {"role": message.role, "content": _content(parts, bool(calls))}
    found |= {"name": message.name} if message.name is not None else {}
    found |= {"reasoning_content": "".join(thought)} if thought else {}
    found |= {"refusal": "".join(refusal)} if refusal else {}
    found |= {"tool_calls": calls} if calls else {}
    return found | ({"weight": weight or 0} if message.role == "assistant" and weight is not None else {})


def _content(parts: Sequence[Part], calls: bool) -> Any:
    """A string for a single text, a list of parts for several or with media; None with tool calls alone."""
    shown = [part for part in parts if part.type in ("text", "media", "unknown")]
    if not shown:
        return None if calls else ""
    if len(shown) == 1 and shown[0].type == "text":
        return shown[0].text or ""
    return [{"type": "text", "text": part.text} if part.type == "text" else part.data for part in shown]


def _call(part: Part) -> Wire:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.arguments or ""}}


def openai_tool(tool: Tool) -> Wire:
    """A tool in OpenAI's form."""
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in about.items() if value is not None}}
