"""Conversations: one for each leaf, with no message dropped or doubled and every answer marked once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from fakes.tokens import Made, Talk, message
from fakes.turn_trees import STEPS, Step, played
from hypothesis import given

from penstock.adapters.chat import REWARD_REASONS, ChatConversation, Wire, conversations, openai_messages, openai_tool
from penstock.adapters.samples import Options
from penstock.adapters.selection import SampleReport
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.turn import Message, Part, Tool
from penstock.gateway.wire.dialects import by_name

U, S = message("user", [1]), message("system", [100])


def of(talk: Talk, **about: Any) -> tuple[list[ChatConversation], SampleReport]:
    asked: dict[str, Any] = {"allow": REWARD_REASONS} | about
    return conversations(talk.episode(), Options(**asked))


def plain(messages: list[Wire]) -> list[Wire]:
    return [{key: value for key, value in wire.items() if key != "weight"} for wire in messages]


def weights(one: ChatConversation) -> list[int]:
    return [wire["weight"] for wire in one.messages if wire["role"] == "assistant"]


def test_a_conversation_is_told_once() -> None:
    talk = Talk()
    one = talk.call([100, 1], [(2, 3)], [S, U])
    two = talk.call([9], [(4,)], [*one.said(), message("user", [9])])
    (made,), report = of(talk)
    assert plain(made.messages) == [*two.said()]
    assert (weights(made), made.calls, made.reward, made.group) == ([1, 1], (1, 2), 1.0, "g1")
    assert (report.samples, report.choices, report.dropped) == (1, 2, [])


def test_no_token_ids_and_no_reward_are_needed() -> None:
    talk = Talk(reward=None)
    talk.call([1], [(2,)], ids=False)
    (made,), _ = conversations(talk.episode())
    assert made.reward is None
    made, report = of(talk, allow=frozenset())
    assert (made, report.reasons) == ([], {"no_reward": 1})


def test_tools_that_failed_are_counted() -> None:
    talk = Talk()
    talk.call([1], [(2,)])
    [attempt] = talk.episode().attempts
    runs = tuple(
        Span(rollout="r1", attempt="a1", sequence=at, kind="tool", status=SpanStatus(how))
        for at, how in enumerate(("ok", "error", "cancelled", "error"), 10)
    )
    episode = replace(talk.episode(), attempts=(replace(attempt, spans=(*attempt.spans, *runs)),))
    (made,), _ = conversations(episode)
    assert made.tool_errors == 2
    assert conversations(talk.episode())[0][0].tool_errors == 0


def test_branches_share_their_beginning_and_mark_it_once() -> None:
    talk = Talk()
    one = talk.call([1], [(2,)], [U])
    left = talk.call([3], [(4,)], [*one.said(), message("user", [3])])
    right = talk.call([5], [(6,), (7,)], [*one.said(), message("user", [5])])
    made, _ = of(talk)
    assert [plain(it.messages) for it in made] == [[*left.said()], [*right.said(0)], [*right.said(1)]]
    assert [weights(it) for it in made] == [[1, 1], [0, 1], [0, 1]]
    assert [it.calls for it in made] == [(1, 2), (3,), (3,)]


def test_answers_that_the_policy_did_not_give_are_not_marked() -> None:
    talk = Talk()
    shots = [S, U, message("assistant", [50]), U]
    one = talk.call([1], [(2,)], shots)
    judge = talk.call([1], [(3,)], [*one.said(), U], model="judge")
    talk.call([1], [(4,)], [*judge.said(), U])
    (made,), report = of(talk, model="m")
    assert (weights(made), report.reasons) == ([0, 1, 0, 1], {"other_model": 1})


def test_an_answer_that_says_nothing_is_reported() -> None:
    talk = Talk()
    talk.call([1], [(), (2,)])
    (made,), report = of(talk)
    assert made.calls == (1,)
    assert [(one.choice, one.reason) for one in report.dropped] == [(0, "empty")]


@given(STEPS)
def test_every_answer_is_marked_once_and_conversations_are_as_they_were_sent(steps: list[Step]) -> None:
    talk, calls = played(steps)
    made, report = of(talk)
    whole = {one.sequence for one in report.dropped if one.choice is None}
    left = Counter((one.sequence, one.choice) for one in report.dropped if one.choice is not None)
    there = [c for c in calls if c.span.sequence not in whole]
    marked = Counter(it for one in made for it in one.calls)
    assert marked == Counter(
        c.span.sequence for c in there for at in range(len(c.answers)) if not left[c.span.sequence, at]
    )
    assert all(sum(weights(one)) == len(one.calls) for one in made)
    assert all(plain(one.messages) in _as_sent(calls) for one in made)
    assert len(left) == sum(left.values())


def _as_sent(calls: list[Made]) -> list[list[Wire]]:
    return [[*call.said(choice)] for call in calls for choice in range(len(call.answers))]


# --- the form ---

ANTHROPIC_ASK = {
    "model": "m",
    "system": "Be brief.",
    "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Add.", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "4"},
                {"type": "text", "text": "Well?"},
            ],
        },
    ],
}
ANTHROPIC_SAID = {"content": [{"type": "text", "text": "4."}], "stop_reason": "end_turn", "role": "assistant"}


def test_other_dialects_are_written_as_openai_would() -> None:
    talk = Talk()
    talk.call([1], [(2,)], dialect="messages")
    talk.bodies["a1", 1] = json.dumps(ANTHROPIC_ASK).encode(), json.dumps(ANTHROPIC_SAID).encode()
    (made,), _ = of(talk)
    calls = [{"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":2}'}}]
    assert made.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "reasoning_content": "Add.", "tool_calls": calls, "weight": 0},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "4.", "weight": 1},
    ]
    about = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert made.tools == [{"type": "function", "function": about}]


CALL: Wire = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
WIRE: list[Wire] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hi", "name": "ann"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "u"}}]},
    {"role": "assistant", "content": "", "refusal": "No."},
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": ""},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
]  # fmt: skip


def test_chat_messages_come_back_as_they_were() -> None:
    turn = by_name("chat").read(json.dumps({"messages": WIRE}).encode(), b"{}", False)
    assert [wire for one in turn.messages for wire in openai_messages(one)] == WIRE


def test_odd_messages_are_written_too() -> None:
    assert openai_messages(Message(role="tool", parts=[])) == [{"role": "tool", "content": ""}]
    assert openai_messages(Message(role="user", parts=[Part(type="unknown", data={"x": 1})])) == [
        {"role": "user", "content": [{"x": 1}]}
    ]
    assert openai_tool(Tool(name="web_search")) == {"type": "function", "function": {"name": "web_search"}}
