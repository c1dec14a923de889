"""Interactions: requests in each form, answers plain and streamed in any order, and what they have used."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.wire_bodies import agreed, body, same, sse
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Message, Part, Tool
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.responses import answer_name, deferred_answer_name
from penstock.gateway.wire.dialects.sse import distinct_events
from penstock.gateway.wire.dialects.unread_content import find_unread

INTERACTIONS = by_name("interactions")
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
USED = {"total_input_tokens": 7, "total_output_tokens": 20, "total_thought_tokens": 22, "total_tokens": 49}
STEPS: list[dict[str, Any]] = [
    {"type": "thought", "signature": "abc", "summary": [{"type": "text", "text": "Let me see."}]},
    {"type": "google_search_call", "id": "s1", "arguments": {"queries": ["q"]}},
    {"type": "google_search_result", "call_id": "s1", "result": [{"url": "u"}, {"url": "v"}]},
    {"type": "model_output", "content": [{"type": "text", "text": "Hello"}, {"type": "image", "data": "AAAA"}]},
    {"type": "function_call", "id": "c1", "name": "look", "arguments": {"a": {"b": [1, "é"]}}},
    {"type": "function_call", "id": "c2", "name": "look", "arguments": {}},
]
ASKED = {"model": "gemini-4", "input": "hi", "system_instruction": "Be brief.", "tools": [LOOK, {"type": "mcp_server"}]}
ENDED = {"id": "v1_a", "status": "requires_action", "model": "gemini-4", "usage": USED}
PLAIN = ENDED | {"steps": STEPS}
PARTS = [
    Part(type="reasoning", text="Let me see."),
    Part(type="unknown", data=STEPS[1]),
    Part(type="unknown", data=STEPS[2]),
    Part(type="text", text="Hello"),
    Part(type="media", data={"type": "image", "data": "AAAA"}),
    Part(type="tool_call", id="c1", name="look", arguments='{"a":{"b":[1,"é"]}}'),
    Part(type="tool_call", id="c2", name="look", arguments="{}"),
]


def deltas(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The start of a step, and its deltas."""
    match step["type"]:
        case "thought":
            texts = [{"type": "thought_summary", "content": {"type": "text", "text": it}} for it in ("Let me", " see.")]
            return [{"type": "thought"}, *texts, {"type": "thought_signature", "signature": "abc"}]
        case "model_output":
            return [
                {"type": "model_output"},
                *({"type": "text", "text": it} for it in ("He", "llo")),
                step["content"][1],
            ]
        case "function_call" if step["arguments"]:
            said = json.dumps(step["arguments"])
            pieces = [{"type": "arguments_delta", "arguments": it} for it in (said[:5], said[5:])]
            return [step | {"arguments": {}}, *pieces]
        case "google_search_result":
            return [step | {"result": []}, *({"type": step["type"], "result": [it]} for it in step["result"])]
        case _:
            return [step]


def streamed(order: list[int], *, listed: bool = False) -> list[dict[str, Any]]:
    """The events of all steps. `order`: the steps that have the next word; `listed`: the last event has them too."""
    created = {"id": "v1_a", "status": "in_progress", "model": "gemini-4"}
    events: list[dict[str, Any]] = [{"event_type": "interaction.created", "interaction": created}]
    left = {at: deltas(step) for at, step in enumerate(STEPS)}
    for at in [*order, *(at for at, pieces in left.items() for _ in pieces)]:
        if pieces := left[at]:
            kind = "step" if len(pieces) == len(deltas(STEPS[at])) else "delta"
            name = "step.start" if kind == "step" else "step.delta"
            events.append({"event_type": name, "index": at, kind: pieces.pop(0)})
            if not pieces:
                events.append({"event_type": "step.stop", "index": at})
    ended = PLAIN if listed else ENDED
    events.append({"event_type": "interaction.completed", "interaction": ended})
    return [event | {"event_id": f"e{number}"} for number, event in enumerate(events)]


def test_an_answer_and_the_forms_of_a_request() -> None:
    turn = INTERACTIONS.read(body(ASKED), body(PLAIN), False)
    assert turn.choices[0].message.parts == PARTS
    assert turn.choices[0].finish == "requires_action"
    assert turn.tools == [
        Tool(name="look", description="Looks.", parameters={"type": "object"}), Tool(name="mcp_server"),
    ]  # fmt: skip
    said = Message(role="user", parts=[Part(type="text", text="hi")])
    assert turn.messages == [Message(role="system", parts=[Part(type="text", text="Be brief.")]), said]
    text = {"type": "text", "text": "hi"}
    for form in ("hi", text, [text], [{"type": "user_input", "content": [text]}], [{"role": "user", "content": "hi"}]):
        request = body(ASKED | {"input": form})
        assert INTERACTIONS.read(request, b"", False).messages[1:] == [said]
        # It is one item, whatever its form.
        sources = [INTERACTIONS.item_fingerprint(bytes(it)) for it in INTERACTIONS.items(request).raw]
        assert sources == INTERACTIONS.message_fingerprints(body(ASKED))
    assert agreed("interactions", body(ASKED), body(PLAIN), False).usage == Usage(
        input_tokens=7, output_tokens=42, reasoning_tokens=22
    )


def test_a_conversation_goes_on_with_the_steps_of_the_answer_and_the_results() -> None:
    results = [
        {"type": "function_result", "call_id": "c1", "name": "look", "result": {"seen": 1}},
        {"type": "function_result", "call_id": "c2", "name": "look", "is_error": True, "result": "no"},
    ]
    request = body(ASKED | {"input": [{"type": "user_input", "content": "hi"}, *STEPS, *results]})
    turn = INTERACTIONS.read(request, b"", False)
    assert turn.messages[2] == Message(role="assistant", parts=PARTS)
    assert [message.parts for message in turn.messages[3:]] == [
        [Part(type="tool_call_response", id="c1", name="look", text='{"seen":1}')],
        [Part(type="tool_call_response", id="c2", name="look", text="no", data=results[1])],
    ]
    items = INTERACTIONS.items(request).raw
    own = [INTERACTIONS.item_fingerprint(bytes(it)) for it in items[2 : 2 + len(STEPS)]]
    assert [it for it in own if it] == INTERACTIONS.reply_fingerprints(body(PLAIN), False)
    parts = [part for message in turn.messages[3:] for part in message.parts]
    assert INTERACTIONS.continuation(body(PLAIN), False, parts) == [
        *STEPS,
        results[0] | {"result": '{"seen":1}'},
        results[1],
    ]
    # Only the results are new.
    added = INTERACTIONS.passages(request, b"", False, lambda: False)
    assert [passage.text for passage in added] == ['{"seen":1}', "no"]


@given(st.lists(st.integers(0, len(STEPS) - 1), max_size=20), st.booleans())
def test_steps_may_come_in_any_order(order: list[int], listed: bool) -> None:
    stream = sse(*streamed(order, listed=listed), "[DONE]")
    same(INTERACTIONS.read(body(ASKED), stream, True), INTERACTIONS.read(body(ASKED), body(PLAIN), False))
    facts = agreed("interactions", body(ASKED), stream, True)
    assert facts == INTERACTIONS.facts(body(ASKED), distinct_events(stream).body, True)
    assert INTERACTIONS.is_complete(stream)
    assert INTERACTIONS.continuation_names(stream, True) == ["v1_a"]
    assert find_unread(INTERACTIONS, body(ASKED), stream, True, facts, stream) == {}


@given(st.lists(st.integers(0, len(STEPS) - 1), max_size=20), st.data())
def test_a_stream_may_break_off_anywhere(order: list[int], data: st.DataObject) -> None:
    stream = sse(*streamed(order))
    cut = stream[: data.draw(st.integers(0, len(stream) - 3))]
    facts = agreed("interactions", body(ASKED), cut, True)
    assert (facts.failed, facts.finish) == ("ended_early", None)
    assert not INTERACTIONS.is_complete(cut)


@given(st.integers(1, 12), st.integers(0, 12))
def test_events_that_come_twice_count_once(at: int, back: int) -> None:
    events = streamed([])
    resumed = sse(*events[:at], *events[max(0, at - back) :])
    same(INTERACTIONS.read(body(ASKED), resumed, True), INTERACTIONS.read(body(ASKED), body(PLAIN), False))


@pytest.mark.parametrize(
    ("lost", "left"), [("step.start", PARTS[3:4]), ("step.stop", PARTS), ("interaction.created", PARTS)]
)
def test_servers_leave_events_out(lost: str, left: list[Part]) -> None:
    stream = sse(*(event for event in streamed([]) if event["event_type"] != lost))
    turn = INTERACTIONS.read(body(ASKED), stream, True)
    assert [part for part in turn.choices[0].message.parts if part in left] == left
    problems = ["response: the stream begins in the middle"] if lost == "interaction.created" else []
    assert turn.problems == problems
    assert agreed("interactions", body(ASKED), stream, True).tool_calls == (1 if lost == "step.start" else 2)


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_thought_tokens": 3}, (9, 8)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_thought_tokens": 3, "total_tokens": 17}, (9, 8)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_thought_tokens": 3, "total_tokens": 14}, (9, 5)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_tool_use_tokens": 2, "total_tokens": 16}, (11, 5)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_tool_use_tokens": 2, "total_tokens": 14}, (9, 5)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_cached_tokens": 4, "total_tokens": 14}, (9, 5)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_cached_tokens": 4, "total_tokens": 18}, (13, 5)),
        ({"total_input_tokens": 9, "total_output_tokens": 5, "total_thought_tokens": 3, "total_tokens": 99}, (9, 8)),
    ],
)  # fmt: skip
def test_the_total_tells_what_is_counted_within(usage: dict[str, int], counts: tuple[int, int]) -> None:
    found = agreed("interactions", body(ASKED), body(PLAIN | {"usage": usage}), False).usage
    assert found is not None
    assert (found.input_tokens, found.output_tokens) == counts


def test_the_price_depends_on_tier_media_and_searches() -> None:
    usage = USED | {
        "input_tokens_by_modality": [{"modality": "audio", "tokens": 4}, {"modality": "text", "tokens": 3}],
        "grounding_tool_count": [{"type": "google_search", "count": 2}, {"type": "google_maps", "count": 1}],
    }
    found = agreed("interactions", body(ASKED), body(PLAIN | {"usage": usage, "service_tier": "priority"}), False)
    assert found.usage is not None
    calls = {"google_maps": 1, "grounding": 1, "web_search": 2}
    assert found.usage.billed == {"tier": "priority", "input_audio": 4, "calls": calls}
    # Where the last event has no usage, the newest sum counts.
    event = {"event_type": "step.stop", "index": 5, "usage": USED, "step_usage": {"total_input_tokens": 1}}
    ended = {"event_type": "interaction.completed", "interaction": {"id": "v1_a", "status": "completed"}}
    assert agreed("interactions", body(ASKED), sse(event, ended), True).usage == Usage(
        input_tokens=7, output_tokens=42, reasoning_tokens=22
    )


@pytest.mark.parametrize(
    ("answer", "failed", "message"),
    [
        (b'{"error":{"code":400,"message":"bad","status":"INVALID_ARGUMENT"}}', "error_body", "bad"),
        (body({"id": "a", "status": "failed", "errors": [{"code": "x", "message": "out"}]}), "error_body", "out"),
        (body({"id": "a", "status": "cancelled"}), "error_body", "the interaction is cancelled"),
        (sse({"event_type": "error", "error": {"code": "x", "message": "out"}}), "stream_error", "out"),
        (body(PLAIN | {"status": "budget_exceeded"}), None, None),
        (body(PLAIN | {"status": "incomplete"}), None, None),
    ],
)  # fmt: skip
def test_errors(answer: bytes, failed: str | None, message: str | None) -> None:
    stream = answer.startswith(b"data")
    assert INTERACTIONS.read(body(ASKED), answer, stream).error == message
    assert INTERACTIONS.facts(body(ASKED), answer, stream).failed == failed


def test_an_agent_works_in_the_background() -> None:
    request = body({"agent": "deep-research-pro", "input": "x", "background": True})
    begun = body({"id": "v1_b", "status": "in_progress", "agent": "deep-research-pro"})
    facts = agreed("interactions", request, begun, False)
    assert (facts.model, facts.model_served, facts.finish) == ("deep-research-pro", "deep-research-pro", None)
    assert deferred_answer_name(INTERACTIONS, request, facts) == "interactions/v1_b"
    fetch = find("GET", "/v1beta/interactions/v1_b")
    assert find("POST", "/v1beta/interactions/v1_b/cancel") is fetch
    assert find("GET", "/v1beta1/projects/p/locations/l/interactions/v1_b:stream") is fetch
    assert fetch.facts(b"", begun, False).answers is None
    ended = fetch.facts(b"", body(PLAIN | {"id": "v1_b"}), False).answers
    assert ended is not None
    assert ended[0] == answer_name(INTERACTIONS, "v1_b")
    assert ended[1].usage == Usage(input_tokens=7, output_tokens=42, reasoning_tokens=22)


@pytest.mark.parametrize(
    ("asked", "previous"),
    [
        ({"previous_interaction_id": "v1_a"}, "v1_a"), ({"continuation_token": "t"}, "t"), ({}, None),
        ({"previous_interaction_id": None}, None), ({"previous_interaction_id": 7}, None),
    ],
)  # fmt: skip
def test_the_earlier_interaction(asked: dict[str, Any], previous: str | None) -> None:
    assert INTERACTIONS.items(body(ASKED | asked)).previous == previous
    longer = body(PLAIN | {"status": "requires_continuation", "continuation_token": "t"})
    assert INTERACTIONS.continuation_names(longer, False) == ["v1_a", "t"]


def test_texts_that_a_release_may_change() -> None:
    assert [(it.text, it.path) for it in INTERACTIONS.system_texts(body(ASKED)).places] == [
        ("Be brief.", ("system_instruction",))
    ]
    assert [(it.text, it.name) for it in INTERACTIONS.tool_texts(body(ASKED))] == [("Looks.", "look")]


@pytest.mark.parametrize(
    ("asked", "forced"),
    [
        ({"generation_config": {"tool_choice": "any"}}, "tool_choice any"),
        ({"generation_config": {"tool_choice": {"allowed_tools": {"mode": "any"}}}}, "tool_choice any"),
        ({"response_format": {"type": "text", "mime_type": "application/json", "schema": {}}}, None),
        ({"response_format": [{"type": "text", "schema": {"type": "object"}}]}, "response_format"),
        ({"generation_config": {"tool_choice": "auto", "temperature": 0.5}}, None),
    ],
)  # fmt: skip
def test_what_forces_tokens(asked: dict[str, Any], forced: str | None) -> None:
    turn = INTERACTIONS.read(body(ASKED | asked), b"", False)
    assert turn.forced == forced
    assert turn.sampling == asked.get("generation_config", {}) | {
        key: value for key, value in asked.items() if key != "generation_config"
    }


@pytest.mark.parametrize("form", ["hi", {"type": "text", "text": "hi"}, [{"type": "text", "text": "hi"}]])
def test_steps_are_added_to_any_form_of_input(form: Any) -> None:
    """As rehearsals do, which answer calls themselves."""
    asked = ASKED | {"input": form}
    said = INTERACTIONS.conversation(asked)
    assert said == [{"type": "user_input", "content": [{"type": "text", "text": "hi"}]}]
    longer = INTERACTIONS.with_conversation(asked, [*said, STEPS[4]])
    assert INTERACTIONS.conversation(longer) == longer["input"] == [*said, STEPS[4]]
