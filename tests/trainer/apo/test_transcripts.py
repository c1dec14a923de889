"""Rollouts as text: the task, what each call added, whose it was, and what went wrong; no system text."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.rollout import Attempt, Outcome, Rollout
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Choice, Message, Part, Transcript, TranscriptCall, Turn
from penstock.trainer.apo.gateway_laboratory import render_transcript


def text(role: str, said: str) -> Message:
    return Message(role=role, parts=[Part(type="text", text=said)])


def turn(*messages: Message, answer: Message | None = None, error: str | None = None) -> Turn:
    return Turn(
        dialect="chat", messages=list(messages), choices=[] if answer is None else [Choice(message=answer)], error=error
    )


def span(sequence: int = 1, **more: Any) -> Span:
    return Span.model_validate(
        {
            "trace_id": "0" * 32,
            "span_id": "0" * 16,
            "rollout": "r",
            "attempt": "a1",
            "sequence": sequence,
            "kind": "llm",
            "start_ns": 1,
        }
        | more
    )


def transcript(*turns: Turn | None, agents: list[str | None] | None = None, **more: Any) -> Transcript:
    named = agents or [None] * len(turns)
    calls = [
        TranscriptCall(span=span(at, agent=agent), turn=one)
        for at, (one, agent) in enumerate(zip(turns, named, strict=True), 1)
    ]
    given: dict[str, Any] = {"outcome": Outcome(), "violations": []} | more
    return Transcript(
        rollout=Rollout(id="r", origin="queued", mode="train", input={"q": "größer?"}),
        attempt=Attempt(id="a1", rollout="r"),
        calls=calls,
        **given,
    )


SYSTEM, ASKS, CALLS = (
    text("system", "SECRET RULES"),
    text("user", "How much?"),
    Message(role="assistant", parts=[Part(type="tool_call", id="1", name="price", arguments='{"of": "tea"}')]),
)
RESULT = Message(role="tool", parts=[Part(type="tool_call_response", id="1", text="3 EUR")])
SAYS = text("assistant", "Three euros.")


def test_a_conversation_is_told_once_although_agents_send_it_with_every_call() -> None:
    first = turn(SYSTEM, ASKS, answer=CALLS)
    second = turn(SYSTEM, ASKS, CALLS, RESULT, answer=SAYS)
    assert render_transcript(transcript(first, second)).split("\n") == [
        'Task: {"q": "größer?"}',
        "[user] How much?",
        '[assistant] calls price({"of": "tea"})',
        "[tool] result: 3 EUR",
        "[assistant] Three euros.",
    ]


def test_system_texts_are_not_shown_wherever_they_stand() -> None:
    messages = [SYSTEM, ASKS, text("developer", "SECRET RULES"), SAYS, SYSTEM]
    assert "SECRET" not in render_transcript(transcript(turn(*messages, answer=SAYS)))


def test_each_of_several_agents_is_named() -> None:
    found = render_transcript(transcript(turn(ASKS, answer=SAYS), turn(ASKS, answer=SAYS), agents=["planner", None]))
    assert found.split("\n")[1:] == [
        "[planner, user] How much?",
        "[planner, assistant] Three euros.",
        "[assistant] Three euros.",
    ]


def test_errors_rules_and_ends_are_told() -> None:
    refused = span(2, kind="tool", name="rm")
    found = render_transcript(
        transcript(
            turn(ASKS, error="overloaded"), None, violations=[refused], outcome=Outcome(reason="it took too long")
        )
    )
    assert found.split("\n")[1:] == [
        "[user] How much?",
        "[error] overloaded",
        "[refused by a rule] rm",
        "[ended] it took too long",
    ]


def test_a_result_that_is_no_text_is_told_as_json_and_one_that_failed_is_called_so() -> None:
    results = [
        Part(type="tool_call_response", id="1", data={"rows": [1]}),
        Part(type="tool_call_response", id="2", text="no such tea", data={"is_error": True}),
        Part(type="reasoning", text="hidden"),
        Part(type="media", data={"type": "image"}),
        Part(type="refusal", text="I will not."),
    ]
    found = render_transcript(transcript(turn(Message(role="user", parts=results))))
    assert found.split("\n")[1:] == ['[user] result: {"rows": [1]}', "[user] failed: no such tea", "[user] I will not."]


def test_a_rollout_without_calls_is_its_task() -> None:
    assert render_transcript(transcript()) == 'Task: {"q": "größer?"}'


parts = st.builds(
    Part,
    type=st.sampled_from(["text", "reasoning", "tool_call", "tool_call_response", "media", "refusal", "unknown"]),
    text=st.none() | st.text(max_size=5),
    name=st.none() | st.text(max_size=5),
    arguments=st.none() | st.text(max_size=5),
    data=st.none() | st.text(max_size=3) | st.dictionaries(st.text(max_size=3), st.integers() | st.booleans()),
)
messages = st.builds(
    Message, role=st.sampled_from(["system", "user", "assistant", "tool", "odd"]), parts=st.lists(parts, max_size=3)
)
turns = st.builds(
    Turn,
    dialect=st.just("chat"),
    messages=st.lists(messages, max_size=4),
    choices=st.lists(st.builds(Choice, message=messages), max_size=2),
    error=st.none() | st.text(max_size=5),
)


@given(st.lists(st.none() | turns, max_size=4))
def test_any_calls_can_be_told(turns: list[Turn | None]) -> None:
    assert render_transcript(transcript(*turns)).startswith("Task: ")
