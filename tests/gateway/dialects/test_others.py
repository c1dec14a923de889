"""Routes, and the dialects with little in them: completions, embeddings, models and all the rest."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.wire_bodies import agreed, body, same, sse
from openai.types import Completion, CreateEmbeddingResponse

from penstock.gateway.dialects import DIALECTS, by_name, find
from penstock.gateway.dialects.base import Facts
from penstock.gateway.dialects.family import ANTHROPIC
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn

ROUTES = {
    "chat": "POST /chat/completions",
    "completions": "POST /completions",
    "responses": "POST /responses",
    "embeddings": "POST /embeddings",
    "messages": "POST /messages",
    "count_tokens": "POST /messages/count_tokens",
    "models": "GET /models, GET /models/gpt-x, GET /models/org/name",
    "retrieval": "POST /responses/resp_1/cancel, GET /responses/resp_1",
    "opaque": "GET /models/a/b/c, GET /models/, POST /models, GET /chat/completions, POST /chat/completions/x, "
    "POST /chat/completions/, POST /x/chat/completions, DELETE /responses/resp_1, POST /responses/resp_1, "
    "GET /responses/resp_1/input_items, GET /responses/.., POST /messages/batches, POST /threads/t/messages, HEAD /, "
    "POST /audio/speech",
}


@pytest.mark.parametrize("base", ["", "/v1"])
@pytest.mark.parametrize("name", ROUTES)
def test_routes(base: str, name: str) -> None:
    calls = [call.split() for call in ROUTES[name].split(", ")]
    assert [find(method, base + path).name for method, path in calls] == [name] * len(calls)


def test_families_and_names() -> None:
    anthropic = {dialect.name for dialect in DIALECTS if dialect.family is ANTHROPIC}
    assert anthropic == {"messages", "count_tokens"}
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
    assert dialect.conversation(request) == []
    assert dialect.reply(body(TEXTS), False) == b""


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
    assert by_name("embeddings").conversation(request) == []


@pytest.mark.parametrize("name", ["opaque", "models"])
def test_the_rest_is_left_alone(name: str) -> None:
    dialect = by_name(name)
    assert dialect.model(b'{"model":"tts"}') == "tts"
    assert dialect.model(b"--boundary\r\n\x00\xff") is None
    assert dialect.facts(b'{"model":"tts"}', b'{"id":"x"}', False) == Facts(model="tts")
    assert dialect.read(b"", b"\xff", False) == Turn(dialect=name)
    assert dialect.read(b"", b'{"error":{"message":"No."}}', False).error == "No."
    assert dialect.conversation(b'{"messages":[{"role":"user","content":"a"}]}') == []
