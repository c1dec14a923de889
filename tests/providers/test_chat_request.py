"""Requests: what the engine is asked, field by field, and what is refused rather than left out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.traffic.proxy.translation import messages, responses
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.translator import Translator
from penstock.gateway.wire.dialects.loose_json import Json, arr, obj
from penstock.gateway.wire.http.request import ClientFault

LONG = "mcp__" + "a" * 80
SAY: Json = {"role": "user", "content": "hi"}
ASK: Json = {"model": "claude-policy", "max_tokens": 100, "messages": [SAY]}
GET: Json = {"name": "get", "input_schema": {"type": "object"}}
SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": ["a"]}
USE: Json = {"type": "tool_use", "id": "functions.get:0", "name": "get", "input": {"x": "é", "y": 1.0}}
RESULT: Json = {"type": "tool_result", "tool_use_id": "functions.get:0", "content": "17"}
PICTURE: Json = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEEN: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def of_messages(litellm: LiteLlmApi, more: Json) -> Json:
    """What is asked, and that the agent's request is not written into."""
    asked = ASK | more
    before = json.dumps(asked)
    chat = messages.chat_request(litellm, asked)
    assert json.dumps(asked) == before
    assert chat["model"] == "claude-policy"
    return chat


def of_responses(litellm: LiteLlmApi, more: Json) -> Json:
    asked: Json = {"model": "claude-policy", "input": "hi"} | more
    before = json.dumps(asked)
    chat = responses.chat_request(litellm, asked)
    assert json.dumps(asked) == before
    assert chat["model"] == "claude-policy"
    return chat


MESSAGES: list[tuple[Json, Json]] = [
    ({}, {"max_tokens": 100, "messages": [SAY]}),
    ({"system": "Be."}, {"messages": [{"role": "system", "content": "Be."}, SAY]}),
    (
        {"system": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]},
        {"messages": [{"role": "system", "content": [{"type": "text", "text": "A"}]}, SAY]},
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, PICTURE]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, SEEN]}]},
    ),
    (
        {"stream": True, "temperature": 0.3, "top_p": 0.9, "top_k": 5, "stop_sequences": ["END"]},
        {"stream": True, "temperature": 0.3, "top_p": 0.9, "top_k": 5, "stop": ["END"]}
        | {"stream_options": {"include_usage": True}},
    ),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto"}, {"user": "u"}),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
    ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"reasoning_effort": "low"}),
    ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
    ({"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}}, {"reasoning_effort": "none"}),
]


@pytest.mark.parametrize(("given", "made"), MESSAGES, ids=str)
def test_a_request_of_messages(litellm: LiteLlmApi, given: Json, made: Json) -> None:
    chat = of_messages(litellm, given)
    assert {name: chat.get(name) for name in made} == made
    assert chat.keys() <= {"model", "messages", "max_tokens"} | made.keys()


def test_tools_keep_their_names_however_long_and_their_schemas(litellm: LiteLlmApi) -> None:
    tools = [GET | {"cache_control": {"type": "ephemeral"}}, {"name": LONG, "description": "d", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": LONG, "disable_parallel_tool_use": True}
    chat = of_messages(litellm, {"tools": tools, "tool_choice": choice})
    assert chat["tools"] == [
        {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": LONG, "description": "d", "parameters": SCHEMA}},
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": LONG}}
    assert chat["parallel_tool_calls"] is False


@pytest.mark.parametrize(("kind", "made"), [("any", "required"), ("auto", "auto"), ("none", "none")])
def test_choices_of_tools(litellm: LiteLlmApi, kind: str, made: str) -> None:
    chat = of_messages(litellm, {"tools": [GET], "tool_choice": {"type": kind}})
    assert chat["tool_choice"] == made
    assert "parallel_tool_calls" not in chat


def test_calls_their_results_and_reasoning_go_back_to_the_engine(litellm: LiteLlmApi) -> None:
    said = [{"type": "thinking", "thinking": " hm ", "signature": ""}, {"type": "text", "text": "Let me."}]
    long = USE | {"id": "c2", "name": LONG}
    results = [RESULT, RESULT | {"tool_use_id": "c2", "content": [{"type": "text", "text": "no"}], "is_error": True}]
    messages = [SAY, {"role": "assistant", "content": [*said, USE, long]}, {"role": "user", "content": results}]
    _, made, one, two = of_messages(litellm, {"messages": messages})["messages"]
    calls = made.pop("tool_calls")
    assert made == {"role": "assistant", "content": "Let me.", "reasoning": " hm "}
    assert [(call["id"], call["type"], call["function"]["name"]) for call in calls] == [
        ("functions.get:0", "function", "get"),
        ("c2", "function", LONG),
    ]
    assert json.loads(calls[0]["function"]["arguments"]) == USE["input"]
    assert one == {"role": "tool", "tool_call_id": "functions.get:0", "content": "17"}
    assert two["tool_call_id"] == "c2"
    assert [part["text"] for part in two["content"]] == ["Error: ", "no"]


@pytest.mark.parametrize(
    ("content", "made"), [("boom", "Error: boom"), ("Error: boom", "Error: boom"), (None, "Error: ")]
)
def test_a_failed_tool_says_so(litellm: LiteLlmApi, content: str | None, made: str) -> None:
    failed = {"role": "user", "content": [RESULT | {"content": content, "is_error": True}]}
    messages = [SAY, {"role": "assistant", "content": [USE]}, failed]
    assert of_messages(litellm, {"messages": messages})["messages"][-1]["content"] == made


@pytest.mark.parametrize("new", [True, False])
def test_a_schema_for_the_answer_stays_as_it_was_given(litellm: LiteLlmApi, new: bool) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    chat = of_messages(litellm, {"output_config": {"format": form}} if new else {"output_format": form})
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA


REFUSED_MESSAGES: list[tuple[str, Json]] = [
    ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools[0].type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "web_search"}]}),
    ("tools[0].input_examples", {"tools": [GET | {"input_examples": [{}]}]}),
    ("tool_choice.type", {"tools": [GET], "tool_choice": {"type": "every"}}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": [{"type": "url"}]}),
    ("context_management.edits[0]", {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0]", {"messages": ["hi"]}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (
        "messages[0].content[0].type",
        {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
    ),
    ("messages[0].content[0].tool_use_id", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}),
    (
        "messages[0].content[0].source.type",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]},
    ),
    ("messages[1].content", {"messages": [SAY, {"role": "assistant", "content": [USE]}]}),
    ("messages[1].content", {"messages": [SAY, {"role": "assistant", "content": ""}]}),
    ("messages[1].content", {"messages": [SAY, {"role": "assistant", "content": []}]}),
    (
        "messages[0].content[0].content[0].tool_name",
        {
            "messages": [
                {"role": "user", "content": [RESULT | {"content": [{"type": "tool_reference", "tool_name": "x"}]}]}
            ]
        },
    ),
    ("system[0].type", {"system": [PICTURE]}),
    ("thinking.type", {"thinking": {"type": "deep"}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "regex"}}}),
]


def test_deferred_tools_are_told_where_they_are_loaded_and_not_at_the_beginning(litellm: LiteLlmApi) -> None:
    late = {"name": "put", "description": "Puts.", "input_schema": SCHEMA, "defer_loading": True}
    search = USE | {"name": "ToolSearch"}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("put", LONG)]
    story = [
        SAY,
        {"role": "assistant", "content": [search]},
        {"role": "user", "content": [RESULT | {"content": found}]},
    ]
    tools = [GET, late, late | {"name": LONG}, {"name": "never", "input_schema": SCHEMA, "defer_loading": True}]
    chat = of_messages(litellm, {"tools": tools, "messages": story})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["get"]
    told = chat["messages"][-1]["content"]
    lines = told.splitlines()
    assert (lines[0], lines[-1]) == ("<functions>", "</functions>")
    shown = [json.loads(line.removeprefix("<function>").removesuffix("</function>")) for line in lines[1:-1]]
    assert shown == [{"description": "Puts.", "name": name, "parameters": SCHEMA} for name in ("put", LONG)]
    before = of_messages(litellm, {"tools": tools[:2], "messages": story[:1]})
    assert (before["tools"], before["messages"]) == (chat["tools"], chat["messages"][:1])


def test_a_deferred_tool_that_must_be_called_is_shown(litellm: LiteLlmApi) -> None:
    late = GET | {"defer_loading": True}
    chat = of_messages(litellm, {"tools": [late], "tool_choice": {"type": "tool", "name": "get"}})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["get"]
    assert not of_messages(litellm, {"tools": [late], "tool_choice": {"type": "auto"}}).keys() & {
        "tools",
        "tool_choice",
    }


BEGUN: list[tuple[str | list[Json], str]] = [
    ("The answer is {", "The answer is {"),
    ([{"type": "text", "text": "The answer"}, {"type": "text", "text": " is {"}], "The answer is {"),
]


@pytest.mark.parametrize(("begun", "said"), BEGUN, ids=["text", "blocks"])
def test_a_begun_answer_is_continued_and_not_answered(litellm: LiteLlmApi, begun: str | list[Json], said: str) -> None:
    chat = of_messages(litellm, {"messages": [SAY, {"role": "assistant", "content": begun}]})
    assert chat["messages"][-1] == {"role": "assistant", "content": said}
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    asked = of_messages(litellm, {"messages": [SAY, {"role": "assistant", "content": begun}, SAY]})
    assert "continue_final_message" not in asked


@pytest.mark.parametrize(("field", "more"), REFUSED_MESSAGES, ids=str)
def test_what_messages_cannot_say_in_chat_is_refused(litellm: LiteLlmApi, field: str, more: Json) -> None:
    with pytest.raises(ClientFault) as refused:
        messages.chat_request(litellm, ASK | more)
    assert (refused.value.status, refused.value.field) == (400, field)


# --- responses ---

FUNCTION: Json = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}}
THOUGHT: Json = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": " hm\n"}],
}
SAID: Json = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me "}]}
CALLED: Json = {"type": "function_call", "call_id": "functions.get:0", "name": "get", "arguments": '{"x" :1}'}
CAME: Json = {"type": "function_call_output", "call_id": "functions.get:0", "output": "17"}

RESPONSES: list[tuple[Json, Json]] = [
    ({}, {"messages": [SAY]}),
    ({"instructions": "Be."}, {"messages": [{"role": "system", "content": "Be."}, SAY]}),
    ({"input": [{"role": "developer", "content": "Be."}]}, {"messages": [{"role": "system", "content": "Be."}]}),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {"messages": [SAY]},
    ),
    (
        {"stream": True, "temperature": 0.3, "top_p": 0.9, "max_output_tokens": 7, "user": "u"},
        {"stream": True, "temperature": 0.3, "top_p": 0.9, "max_tokens": 7, "user": "u"}
        | {"stream_options": {"include_usage": True}},
    ),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
    ({"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "truncation": "auto"}, {}),
    ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
    ({"input": [SAY, {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None}]}, {"messages": [SAY]}),
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
    ),
]


@pytest.mark.parametrize(("given", "made"), RESPONSES, ids=str)
def test_a_request_of_responses(litellm: LiteLlmApi, given: Json, made: Json) -> None:
    chat = of_responses(litellm, given)
    assert {name: chat.get(name) for name in made} == made
    assert chat.keys() <= {"model", "messages"} | made.keys()


def test_functions_get_nothing_that_the_agent_did_not_give(litellm: LiteLlmApi) -> None:
    given: list[Json] = [FUNCTION | {"strict": None}, FUNCTION | {"name": "put", "description": "d", "strict": True}]
    more: Json = {"tools": given, "tool_choice": {"type": "function", "name": "get"}, "parallel_tool_calls": False}
    chat = of_responses(litellm, more)
    assert [tool["function"] for tool in chat["tools"]] == [
        {"name": "get", "parameters": FUNCTION["parameters"]},
        {"name": "put", "parameters": FUNCTION["parameters"], "description": "d", "strict": True},
    ]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "get"}}
    assert chat["parallel_tool_calls"] is False


def test_what_the_model_made_in_one_go_is_one_message_again(litellm: LiteLlmApi) -> None:
    other = CALLED | {"call_id": "c2", "arguments": "{}"}
    given: list[Json] = [SAY, THOUGHT, SAID, CALLED, other, CAME, CAME | {"call_id": "c2"}, CALLED | {"call_id": "c3"}]
    _, made, one, two, last = of_responses(litellm, {"input": given})["messages"]
    assert (made["role"], made["content"], made["reasoning"]) == ("assistant", "Let me ", " hm\n")
    assert [(call["id"], call["function"]["arguments"]) for call in made["tool_calls"]] == [
        ("functions.get:0", '{"x" :1}'),
        ("c2", "{}"),
    ]
    assert (one["tool_call_id"], two["tool_call_id"], one["content"]) == ("functions.get:0", "c2", "17")
    assert [call["id"] for call in last["tool_calls"]] == ["c3"]


def test_calls_before_the_text_are_the_same_message(litellm: LiteLlmApi) -> None:
    _, made = of_responses(litellm, {"input": [SAY, CALLED, SAID]})["messages"]
    assert (made["content"], len(made["tool_calls"])) == ("Let me ", 1)


SEARCH: Json = {"type": "web_search", "external_web_access": True}
SPACE: Json = {"type": "namespace", "name": "agents", "description": "Of agents.", "tools": [FUNCTION]}
MCP: Json = {"type": "namespace", "name": "mcp__files__", "tools": [FUNCTION | {"strict": False}]}


def test_functions_of_namespaces_are_functions_with_their_names(litellm: LiteLlmApi) -> None:
    called: Json = {"type": "function_call", "call_id": "c1", "namespace": "agents", "name": "get", "arguments": "{}"}
    answered: Json = {"type": "function_call_output", "call_id": "c1", "output": "17"}
    chosen: Json = {"type": "function", "namespace": "agents", "name": "get"}
    asked: Json = {"tools": [FUNCTION, SPACE, MCP], "tool_choice": chosen, "input": [SAY, called, answered]}
    chat = of_responses(litellm, asked)
    names = ["get", "agents__get", "mcp__files__get"]
    assert [tool["function"]["name"] for tool in chat["tools"]] == names
    assert all(tool["function"].keys() <= {"name", "parameters", "strict"} for tool in chat["tools"])
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "agents__get", "arguments": "{}"}
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "agents__get"}}


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
def test_a_search_beside_other_tools_is_left_out(litellm: LiteLlmApi, choice: str | None) -> None:
    chat = of_responses(litellm, {"tools": [SEARCH, FUNCTION], "tool_choice": choice})
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["get"]


@pytest.mark.parametrize(
    "more", [{"tools": [SEARCH]}, {"tools": [SEARCH, FUNCTION], "tool_choice": {"type": "web_search"}}], ids=str
)
def test_a_search_that_is_the_question_is_refused_with_the_way_to_turn_it_off(litellm: LiteLlmApi, more: Json) -> None:
    with pytest.raises(ClientFault, match=r"Codex: web_search = .disabled. in its config\.toml"):
        of_responses(litellm, more)


def test_a_search_of_messages_is_refused_with_the_way_to_turn_it_off(litellm: LiteLlmApi) -> None:
    with pytest.raises(ClientFault, match=r"Claude Code: --disallowedTools WebSearch"):
        of_messages(litellm, {"tools": [GET, {"type": "web_search_20250305", "name": "web_search"}]})


REFUSED_RESPONSES: list[tuple[str, Any]] = [
    ("previous_response_id", {"previous_response_id": "r"}),
    ("conversation", {"conversation": "c"}),
    ("prompt", {"prompt": {"id": "p"}}),
    ("background", {"background": True}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("include[0]", {"include": ["message.output_text.logprobs"]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].type", {"tools": [{"type": "custom", "name": "c"}]}),
    ("tools[0].tools[0].type", {"tools": [SPACE | {"tools": [{"type": "custom", "name": "c"}]}]}),
    ("tools[1].tools[0].name", {"tools": [FUNCTION | {"name": "agents__get"}, SPACE]}),
    ("tools[0].name", {"tools": [{"type": "namespace", "tools": []}]}),
    ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice", {"tool_choice": "all"}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("input[0].call_id", {"input": [CAME]}),
    ("input[0]", {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}]}),
    ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
    (
        "input[0].content[0].image_url",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
    ),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
]


@pytest.mark.parametrize(("field", "more"), REFUSED_RESPONSES, ids=str)
def test_what_responses_cannot_say_in_chat_is_refused(litellm: LiteLlmApi, field: str, more: Json) -> None:
    with pytest.raises(ClientFault) as refused:
        responses.chat_request(litellm, {"model": "policy", "input": "hi"} | more)
    assert (refused.value.status, refused.value.field) == (400, field)


# --- whatever is asked ---

ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.text(max_size=3)
    | st.sampled_from(["text", "tool_use", "function"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "content", "id", "x"]), inner),
    max_leaves=4,
)
BASES: list[Json] = [
    ASK
    | {"system": [{"type": "text", "text": "A"}], "tools": [GET], "tool_choice": {"type": "auto"}}
    | {"messages": [SAY, {"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]},
    {
        "model": "policy",
        "instructions": "Be.",
        "tools": [FUNCTION],
        "tool_choice": "auto",
        "input": [SAY, SAID, CALLED, CAME],
    }
    | {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "reasoning": {"effort": "low"}},
]


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Json]:
    """A request, with something odd somewhere in it."""
    at = draw(st.sampled_from([0, 1]))
    made: Any = json.loads(json.dumps(BASES[at]))
    spot: Any = made
    while True:
        places: list[Any] = sorted(obj(spot)) or [*range(len(arr(spot)))]
        key = draw(st.sampled_from(places))
        if not (obj(spot[key]) or arr(spot[key])) or draw(st.booleans()):
            spot[key] = draw(ODD)
            return ("messages", "responses")[at], made
        spot = spot[key]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(mutated())
def test_an_odd_request_is_translated_or_refused(litellm: LiteLlmApi, asked: tuple[str, Json]) -> None:
    kind, body = asked
    try:
        chat = json.loads(Translator(litellm).chat(kind, body))
    except ClientFault:
        return
    assert chat["model"] == body["model"]
    assert all(isinstance(message["role"], str) for message in chat["messages"])
