"""Routes, the dialects with little in them, messages on WebSockets, errors, and who knows dialects by their names."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from fakes.wire_bodies import Json, agreed, body, same, sse
from openai.types import Completion, CreateEmbeddingResponse

from bench.structure import parsed
from penstock.gateway.model.facts import CACHE_MISS, REASONING_REMOVED
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn
from penstock.gateway.wire.dialects import DIALECTS, FAMILIES, by_name, find
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.family import ANTHROPIC, OPENAI, Family
from penstock.gateway.wire.dialects.unread_content import find_unread
from penstock.gateway.wire.dialects.websocket_messages import (
    ClientMessageKind,
    ServerMessageKind,
    join_messages,
    merge_messages,
)

ROUTES = {
    "chat": "POST /chat/completions",
    "completions": "POST /completions",
    "responses": "POST /responses",
    "embeddings": "POST /embeddings",
    "messages": "POST /messages",
    "count_tokens": "POST /messages/count_tokens",
    "text_completions": "POST /complete",
    "responses_compaction": "POST /responses/compact",
    "responses_count_tokens": "POST /responses/input_tokens",
    "decisions": "POST /decisions",
    "moderations": "POST /moderations",
    "conversations": "POST /conversations, GET /conversations/c, DELETE /conversations/c, POST /conversations/c/items, "
    "GET /conversations/c/items/i",
    "models": "GET /models, GET /models/gpt-x, GET /models/org/name",
    "managed_sessions": "POST /sessions, GET /sessions/sesn_1/events, GET /sessions/sesn_1/threads/sthr_1/stream",
    "agent_sessions": "POST /agents/sessions, GET /agents/sessions/as_1/subagents/sa_1/turns",
    "retrieval": "POST /responses/resp_1/cancel, GET /responses/resp_1",
    "opaque": "GET /models/a/b/c, GET /models/, POST /models, GET /chat/completions, POST /chat/completions/x, "
    "POST /chat/completions/, POST /x/chat/completions, DELETE /responses/resp_1, POST /responses/resp_1, "
    "GET /responses/resp_1/input_items, GET /responses/.., POST /messages/batches, POST /threads/t/messages, HEAD /, "
    "POST /audio/voices, GET /videos/v_1, GET /videos/v_1/content",
    "transcription": "POST /audio/transcriptions, POST /audio/translations",
    "speech": "POST /audio/speech",
    "images": "POST /images/generations, POST /images/edits, POST /images/variations",
    "videos": "POST /videos, POST /videos/v_1/remix, POST /videos/edits, POST /videos/extensions",
}


@pytest.mark.parametrize("base", ["", "/v1"])
@pytest.mark.parametrize("name", ROUTES)
def test_routes(base: str, name: str) -> None:
    calls = [call.split() for call in ROUTES[name].split(", ")]
    assert [find(method, base + path).name for method, path in calls] == [name] * len(calls)


@pytest.mark.parametrize("path", ["/anthropic/v1/ws", "/anthropic/v1/responses", "/openai/deployments/d/ws"])
def test_unknown_calls_of_clouds(path: str) -> None:
    assert [find(method, path).name for method in ("WEBSOCKET", "POST")] == ["websocket", "opaque"]


def test_families_and_names() -> None:
    anthropic = {dialect.name for dialect in DIALECTS if dialect.family is ANTHROPIC}
    assert anthropic == {
        "messages",
        "count_tokens",
        "text_completions",
        "managed_sessions",
        "managed_turn",
        "managed_tool",
    }
    assert all(by_name(dialect.name) is dialect for dialect in DIALECTS)
    assert by_name("from the future").name == "opaque"
    assert find("POST", "").name == "opaque"


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
TEXTS: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "base-1",
    "choices": [
        {"index": 0, "text": " upon a time", "finish_reason": "stop", "logprobs": None},
        {"index": 1, "text": "", "finish_reason": "length", "logprobs": None},
    ],
    "usage": USAGE,
}


def told(plain: dict[str, Any]) -> list[Any]:
    def chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**plain, "choices": list(choices), "usage": None, **more}

    made = [
        chunk({**it, "text": it["text"][at : at + 3], "finish_reason": None})
        for it in plain["choices"]
        for at in range(0, len(it["text"]), 3)
    ]
    return [*made, *[chunk({**it, "text": ""}) for it in plain["choices"]], chunk(usage=USAGE), "[DONE]"]


def test_completions() -> None:
    Completion.model_validate(TEXTS)
    request = body({"model": "base", "prompt": "Once", "n": 2, "max_tokens": 5, "stream": True})
    wire, dialect = sse(*told(TEXTS)), by_name("completions")
    turn = dialect.read(request, body(TEXTS), False)
    same(dialect.read(request, wire, True), turn)
    assert agreed("completions", request, wire, True) == agreed("completions", request, body(TEXTS), False)
    assert turn.messages[0].parts == [Part(type="text", text="Once")]
    assert [(it.finish, it.message.parts) for it in turn.choices] == [
        ("stop", [Part(type="text", text=" upon a time")]),
        ("length", []),
    ]
    assert turn.sampling == {"n": 2, "max_tokens": 5}
    assert turn.usage == Usage(input_tokens=3, output_tokens=4)
    assert dialect.message_fingerprints(request) == []
    assert dialect.reply_fingerprint(body(TEXTS), False) == b""


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("a", [Part(type="text", text="a")]),
        (["a", "b"], [Part(type="text", text="a"), Part(type="text", text="b")]),
        ([1, 2], [Part(type="unknown", data=[1, 2])]),
        ([[1], [2]], [Part(type="unknown", data=[1]), Part(type="unknown", data=[2])]),
        (None, []),
        ([], []),
    ],
)
@pytest.mark.parametrize(("name", "key"), [("completions", "prompt"), ("embeddings", "input")])
def test_prompts_and_inputs(name: str, key: str, prompt: Any, parts: list[Part]) -> None:
    turn = by_name(name).read(body({key: prompt}), b"{}", False)
    assert [part for message in turn.messages for part in message.parts] == parts


def test_embeddings() -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}]
    answer = {"object": "list", "model": "e-1", "data": data, "usage": usage}
    CreateEmbeddingResponse.model_validate(answer)
    request = body({"model": "e", "input": "a", "dimensions": 2})
    assert agreed("embeddings", request, body(answer), False) == Facts(
        model="e", model_served="e-1", usage=Usage(input_tokens=3)
    )
    assert by_name("embeddings").read(request, body(answer), False).sampling == {"dimensions": 2}
    assert by_name("embeddings").message_fingerprints(request) == []


INPUT = [{"role": "user", "content": "hello"}]
COUNTED = {"input_tokens": 30, "output_tokens": 10, "total_tokens": 40}
COUNTS = Usage(input_tokens=30, output_tokens=10)
SECRET = {"type": "compaction", "id": "cmp_1", "encrypted_content": "c2VjcmV0"}


def test_compaction() -> None:
    made = {"id": "resp_1", "object": "response.compaction", "output": [*INPUT, SECRET], "usage": COUNTED}
    turn = by_name("responses_compaction").read(body({"model": "m", "input": INPUT}), body(made), False)
    assert [part.data for part in turn.choices[0].message.parts if part.type == "unknown"] == [SECRET]
    assert agreed("responses_compaction", body({"model": "m", "input": INPUT}), body(made), False).usage == COUNTS
    responses = by_name("responses")
    names = by_name("responses_compaction").continuation_names(body(made), False)
    assert names[0] == "resp_1"
    for items in ([*INPUT, SECRET], [{key: SECRET[key] for key in ("type", "encrypted_content")}, *INPUT]):
        found = responses.items(body({"model": "m", "input": items}))
        assert (found.previous, len(found.raw)) == (names[1], 2)
    # Also where a response itself holds it.
    event = {"type": "response.completed", "response": {"id": "resp_2", "output": [SECRET]}}
    assert responses.continuation_names(sse(event), True) == ["resp_2", names[1]]
    for conversation in ("conv_1", {"id": "conv_1"}):
        assert responses.items(body({"input": "x", "conversation": conversation})).previous == "conv_1"


def test_decisions_and_moderations() -> None:
    asked = {"model": "m", "input": INPUT, "questions": [
        {"type": "predicate", "name": "p", "instructions": "Is it?"},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}]},
    ]}  # fmt: skip
    answers = [{"type": "predicate", "name": "p", "probability": 0.9}, {"type": "refusal", "name": None}]
    made = {"model": "m-1", "answers": answers, "usage": COUNTED}
    facts = agreed("decisions", body(asked), body(made), False)
    assert (facts.usage, facts.model_served) == (COUNTS, "m-1")
    turn = by_name("decisions").read(body(asked), body(made), False)
    assert [part.text for part in turn.messages[-1].parts] == ["Is it?", "Which?", '[{"value":"a"}]']
    assert [part.data for part in turn.choices[0].message.parts] == answers
    judged = {"id": "modr_1", "model": "m-2", "results": [{"flagged": True}, {"flagged": False}]}
    facts = agreed("moderations", body({"model": "m", "input": ["x", "y"]}), body(judged), False)
    assert (facts.usage, facts.choices, by_name("moderations").uses_tokens) == (None, 2, False)
    for given, texts in (("x", ["x"]), (["x", "y"], ["x", "y"]), ([{"type": "text", "text": "x"}], ["x"])):
        turn = by_name("moderations").read(body({"input": given}), b"", False)
        assert [message.parts[0].text for message in turn.messages] == texts
    counted = by_name("responses_count_tokens").read(
        body({"model": "m", "input": INPUT}), body({"input_tokens": 9}), False
    )
    assert (counted.usage, counted.messages[0].parts[0].text) == (None, "hello")


def test_newer_items_of_responses() -> None:
    shell = {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}, "environment": {"type": "local"}}
    ran = {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a.txt", "stderr": ""}]}
    patch = {"type": "apply_patch_call", "call_id": "c2", "operation": {"type": "delete_file", "path": "a.txt"}}
    found: list[Json] = [{"type": "function", "name": "f", "description": "Finds.", "parameters": {}}]
    search: list[Json] = [
        {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {"q": "f"}},
        {"type": "tool_search_output", "call_id": "c3", "execution": "client", "tools": found},
    ]
    settings = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    items: list[Json] = [
        *INPUT,
        shell,
        ran,
        settings,
        patch,
        {"type": "apply_patch_call_output", "call_id": "c2"},
        *search,
    ]
    tools = [
        {"type": "shell", "environment": {"type": "local"}},
        {"type": "shell", "environment": {"type": "container_auto"}},
    ]
    responses, asked = by_name("responses"), body({"model": "m", "input": items, "tools": tools})
    turn = responses.read(asked, b"", False)
    assert [(message.role, message.parts[0].type) for message in turn.messages] == [
        ("user", "text"), ("assistant", "tool_call"), ("tool", "tool_call_response"), ("developer", "unknown"),
        ("assistant", "tool_call"), ("tool", "tool_call_response"), ("assistant", "tool_call"),
        ("tool", "tool_call_response"),
    ]  # fmt: skip
    assert [tool.name for tool in turn.tools] == ["shell", "shell", "f"]
    assert [(it.text, it.name) for it in responses.tool_texts(asked)] == [("Finds.", "f")]
    assert responses.server_tools({"tools": tools}) == ["shell"]
    # What came after the model's last item is new.
    added = responses.passages(asked, b"", False, lambda: False)
    assert [passage.id for passage in added] == ["c3"]


def test_what_a_provider_says_about_a_prompt() -> None:
    """A release that changes the model loses the reasoning of the one before."""
    made = {
        "id": "resp_1", "status": "completed", "output": [], "usage": COUNTED,
        "input_transformations": [{"type": "reasoning", "action": "removed", "reason": "model_mismatch"}] * 2,
        "prompt_cache_diagnostics": {"type": "cache_miss", "reason": "tools_changed", "cache_missed_tokens": 9},
    }  # fmt: skip
    told = {REASONING_REMOVED: ["model_mismatch"], CACHE_MISS: "tools_changed"}
    stream = sse({"type": "response.completed", "response": made})
    for answer, streamed in ((body(made), False), (stream, True)):
        facts = by_name("responses").facts(b"{}", answer, streamed)
        assert facts.attributes == told
        assert find_unread(by_name("responses"), b"{}", answer, streamed, facts, answer) == {}


@pytest.mark.parametrize("name", ["opaque", "models"])
def test_the_rest_is_left_alone(name: str) -> None:
    dialect = by_name(name)
    assert dialect.model(b'{"model":"tts"}') == "tts"
    assert dialect.model(b"--boundary\r\n\x00\xff") is None
    assert dialect.facts(b'{"model":"tts"}', b'{"id":"x"}', False) == Facts(model="tts")
    assert dialect.read(b"", b"\xff", False) == Turn(dialect=name)
    assert dialect.read(b"", b'{"error":{"message":"No."}}', False).error == "No."
    assert dialect.message_fingerprints(b'{"messages":[{"role":"user","content":"a"}]}') == []


# -- what a message on a WebSocket is, however odd its JSON ------------------------------------------------------------


RESPONSES = by_name("responses")
CREATE = b'{"type": "response.create", "stream_id": "a", "input": "%b"}'


@pytest.mark.parametrize(
    ("message", "kind", "lane"),
    [
        (CREATE % b"x", ClientMessageKind.CREATE, "a"),
        (CREATE % rb"half \ud83d", ClientMessageKind.CREATE, "a"),
        (b'{"type": "x", "type": "response.create"}', ClientMessageKind.CREATE, None),
        (b'{"type": "response.create", "temperature": NaN}', ClientMessageKind.CREATE, None),
        (b'{"type": "response.steer", "previous_response_id": "r"}', ClientMessageKind.STEER, None),
        (b'{"type": "response.cancel"}', ClientMessageKind.OTHER, None),
        (b"{}", ClientMessageKind.OTHER, None),
        (b'{"type": "response.create", "stream_id": 5}', ClientMessageKind.UNREADABLE, None),
        (b'[{"type": "response.create"}]', ClientMessageKind.UNREADABLE, None),
        (b'{"type": "response.create"', ClientMessageKind.UNREADABLE, None),
        (b"", ClientMessageKind.UNREADABLE, None),
    ],
)
def test_what_a_client_says(message: bytes, kind: ClientMessageKind, lane: str | None) -> None:
    said = RESPONSES.read_client_message(message)
    assert (said.kind, said.lane) == (kind, lane)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            b'{"type": "response.created", "stream_id": "a", "response": {"id": "r"}}',
            (ServerMessageKind.BEGIN, "a", "r", 101),
        ),
        (
            rb'{"type": "response.output_text.delta", "delta": "\ud83d", "stream_id": "a"}',
            (ServerMessageKind.PART, "a", None, 101),
        ),
        (b'{"type": "response.incomplete", "response": {"id": "r"}}', (ServerMessageKind.END, None, "r", 101)),
        (b'{"type": "error", "status": 429.0, "stream_id": "a"}', (ServerMessageKind.ERROR, "a", None, 500)),
        (b'{"type": "error", "status": 429}', (ServerMessageKind.ERROR, None, None, 429)),
        (
            b'{"type": "response.steer.failed", "steer": {"previous_response_id": "r"}}',
            (ServerMessageKind.FAILED, None, "r", 101),
        ),
        (b'{"type": "codex.rate_limits"}', (ServerMessageKind.OTHER, None, None, 101)),
        (b'{"type": "response.created", "stream_id": ["a"]}', (ServerMessageKind.UNREADABLE, None, None, 101)),
    ],
)
def test_what_a_server_says(message: bytes, expected: tuple[ServerMessageKind, str | None, str | None, int]) -> None:
    said = RESPONSES.read_server_message(message)
    assert (said.kind, said.lane, said.response, said.status) == expected


def test_several_messages_are_one_request() -> None:
    steers = [b'{"type": "response.steer", "input": "one"}', b'{"type": "response.steer", "input": [{"role": "user"}]}']
    own = b'{"type": "response.create", "model": "m", "input": [{"call_id": "c"}]}'
    said = json.loads(merge_messages(join_messages([*steers, own])))
    assert (said["model"], said["type"]) == ("m", "response.create")
    assert said["input"] == [{"type": "message", "role": "user", "content": "one"}, {"role": "user"}, {"call_id": "c"}]
    pretty = json.dumps({"model": "m", "input": []}, indent=1).encode()
    assert merge_messages(pretty) is pretty


@pytest.mark.parametrize("more", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}, {}])
def test_what_only_prepares(more: dict[str, object]) -> None:
    assert RESPONSES.is_prewarm(json.dumps({"type": "response.create", **more}).encode()) is bool(more)


# -- the gateway's errors, as the unmodified official SDKs understand them ---------------------------------------------


def transport(family: Family, status: int) -> httpx2.Client:
    def handle(request: httpx2.Request) -> httpx2.Response:
        body = family.error_body(status, "Not so.", "odd_model", "model")
        return httpx2.Response(status, content=body, headers={"content-type": "application/json"})

    return httpx2.Client(transport=httpx2.MockTransport(handle))


OPENAI_ERRORS: dict[int, tuple[str, type[openai.APIStatusError]]] = {
    400: ("invalid_request_error", openai.BadRequestError),
    401: ("authentication_error", openai.AuthenticationError),
    403: ("permission_error", openai.PermissionDeniedError),
    404: ("not_found_error", openai.NotFoundError),
    413: ("invalid_request_error", openai.APIStatusError),
    429: ("rate_limit_error", openai.RateLimitError),
    503: ("server_error", openai.InternalServerError),
}


@pytest.mark.parametrize("status", OPENAI_ERRORS)
def test_openai(status: int) -> None:
    kind, raised = OPENAI_ERRORS[status]
    with transport(OPENAI, status) as http:
        client = openai.OpenAI(api_key="k", base_url="http://gateway/v1", max_retries=0, http_client=http)
        with pytest.raises(raised) as caught:
            client.chat.completions.create(model="m", messages=[])
    assert (caught.value.type, caught.value.code, caught.value.param) == (kind, "odd_model", "model")
    assert "Not so." in caught.value.message


ANTHROPIC_ERRORS: dict[int, tuple[str, type[anthropic.APIStatusError]]] = {
    400: ("invalid_request_error", anthropic.BadRequestError),
    401: ("authentication_error", anthropic.AuthenticationError),
    403: ("permission_error", anthropic.PermissionDeniedError),
    404: ("not_found_error", anthropic.NotFoundError),
    409: ("invalid_request_error", anthropic.ConflictError),
    413: ("request_too_large", anthropic.APIStatusError),
    429: ("rate_limit_error", anthropic.RateLimitError),
    **dict.fromkeys((500, 502), ("api_error", anthropic.InternalServerError)),
    503: ("api_error", anthropic.APIStatusError),
    504: ("timeout_error", anthropic.APIStatusError),
    529: ("overloaded_error", anthropic.APIStatusError),
}


@pytest.mark.parametrize("status", ANTHROPIC_ERRORS)
def test_anthropic(status: int) -> None:
    kind, raised = ANTHROPIC_ERRORS[status]
    with transport(ANTHROPIC, status) as http:
        client = anthropic.Anthropic(api_key="k", base_url="http://gateway", max_retries=0, http_client=http)
        with pytest.raises(raised) as caught:
            client.messages.create(model="m", messages=[], max_tokens=1)
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "model: Not so."}}


def test_neither_kind_nor_field() -> None:
    said = {"message": "Oh.", "type": "server_error", "param": None, "code": None}
    assert json.loads(OPENAI.error_body(500, "Oh.")) == {"error": said}
    assert json.loads(ANTHROPIC.error_body(500, "Oh."))["error"]["message"] == "Oh."


# -- a new format is a file and a line: no other package knows one by its name -----------------------------------------


ROOT = Path(__file__).parents[4]
FORMATS = {dialect.name for dialect in DIALECTS} | set(FAMILIES)
OTHERS = {
    "gateway/traffic/calls/batches.py": "whose APIs have batches",
    "gateway/wire/capture.py": "which of chat's events are there for token ids alone",
    "gateway/model/price_lists.py": "providers, as LiteLLM's list of prices names them",
    "console/commands/import_litellm.py": "providers, as LiteLLM's configuration names them",
    "gateway/traffic/proxy/exact/exact_filter.py": "engines render chat completions only",
    "gateway/traffic/proxy/plan.py": "templates that take one system message get chat completions",
    "gateway/traffic/proxy/translation/translator.py": "the formats that are translated to chat completions",
}
"""Where names are known, and why: what converts between two formats names them."""


def known_names(source: str) -> Iterator[int]:
    """Lines on which a name of a dialect or a family decides something: a table of several of them, or a comparison of
    something that is called dialect or family with one."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(_names, sides)) and any(map(_is_format, sides)):
                yield node.lineno
        elif isinstance(node, ast.Match) and _is_format(node.subject):
            yield from (case.pattern.lineno for case in node.cases if _names(case.pattern))
        elif isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple) and len(_names(*_entries(node))) > 1:
            yield node.lineno


def _entries(table: ast.Dict | ast.Set | ast.List | ast.Tuple) -> list[ast.expr]:
    """The keys, or the items."""
    return [key for key in table.keys if key is not None] if isinstance(table, ast.Dict) else table.elts


def _is_format(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return "dialect" in text or "family" in text


def _names(*nodes: ast.AST) -> set[str]:
    inner = (one for node in nodes for one in ast.walk(node))
    return {one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)} & FORMATS


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ('TABLE = {"chat": 1, "messages": 2}', True),
        ('TABLE = frozenset({"chat", "gemini"})', True),
        ('Family = Literal["openai", "anthropic"]', True),
        ('if call.dialect.name == "responses": ...', True),
        ('if upstream.dialect != "openai": ...', True),
        ('if span.dialect not in ("opaque", "chat"): ...', True),
        ('match dialect:\n    case "chat": ...', True),
        ('body = {"model": "m", "messages": []}', False),
        ('if form == "chat": ...', False),
        ("if dialect.generates: ...", False),
    ],
)
def test_what_is_found(source: str, known: bool) -> None:
    assert bool(list(known_names(source))) == known


def test_no_other_package_knows_a_dialect_by_its_name() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for package in ("gateway", "console", "adapters", "sidecar", "trainer")
        for path in sorted((ROOT / package).rglob("*.py"))
        if ROOT / "gateway" / "wire" / "dialects" not in path.parents
        and any(f'"{name}"' in (source := path.read_text()) for name in FORMATS)
        and (lines := list(known_names(source)))
    }
    assert set(found) == set(OTHERS), {path: lines for path, lines in found.items() if path not in OTHERS}
