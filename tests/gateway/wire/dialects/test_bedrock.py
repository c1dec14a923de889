"""Bedrock's Converse: requests, plain answers and streams read alike, conversations followed, streams that fail."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.event_stream import event, exception, frame
from fakes.local import locally
from fakes.odd import Step, abort, odd, request, send
from fakes.process import upstream
from fakes.raw import body_of, chunk, connect, head, header_fields, post, reply
from fakes.tape import Tape
from fakes.wire_bodies import agreed, body, same
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.model.turn import Exchange, Part, Sampling, Tool
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.wire.dialects import by_name, family, find
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.request_body import spliced

CONVERSE = by_name("converse")

ASKED: dict[str, Any] = json.loads("""{
  "system": [{"text": "Be \\u00e9 brief."}, {"cachePoint": {"type": "default"}}],
  "messages": [
    {"role": "user", "content": [
        {"text": "What is 19 * 23?"}, {"image": {"format": "png", "source": {"bytes": "iVBORw0K"}}}]},
    {"role": "assistant", "content": [
        {"reasoningContent": {"reasoningText": {"text": "A sum.", "signature": "sig"}}}, {"text": "I look."},
        {"toolUse": {"toolUseId": "t0", "name": "add", "input": {"b": 2, "a": 1}}},
        {"toolUse": {"toolUseId": "s0", "name": "nova_grounding", "input": {}, "type": "server_tool_use"}}]},
    {"role": "user", "content": [
        {"toolResult": {"toolUseId": "t0", "content": [{"text": "3"}], "status": "success"}},
        {"toolResult": {"toolUseId": "t1", "content": [{"json": {"a": 1}}]}},
        {"toolResult": {"toolUseId": "t2", "content": [{"text": "No."}], "status": "error"}},
        {"guardContent": {"text": {"text": "guarded", "qualifiers": ["query"]}}},
        {"cachePoint": {"type": "default"}}]},
    {"role": "system", "content": [{"text": "Now in German."}]}],
  "toolConfig": {"toolChoice": {"any": {}}, "tools": [
    {"toolSpec": {"name": "add", "description": "Adds.", "inputSchema": {"json": {"type": "object"}}}},
    {"cachePoint": {"type": "default"}}, {"systemTool": {"name": "nova_grounding"}}]},
  "inferenceConfig": {"maxTokens": 100, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]},
  "additionalModelRequestFields": {"top_k": 5}, "serviceTier": {"type": "flex"}}""")
PLAIN: dict[str, Any] = json.loads("""{
  "output": {"message": {"role": "assistant", "content": [
    {"reasoningContent": {"reasoningText": {"text": "Let me see.", "signature": "c2ln"}}},
    {"reasoningContent": {"redactedContent": "aGlkZGVu"}},
    {"text": "Hello."},
    {"toolUse": {"toolUseId": "t9", "name": "add", "input": {"a": [1, {"b": "\\u6f22"}]}}},
    {"citationsContent": {"content": [{"text": "As A says."}], "citations": [
        {"title": "A", "location": {"web": {"url": "https://a.example"}}}]}},
    {"toolUse": {"toolUseId": "t10", "name": "now", "input": {}}}]}},
  "stopReason": "tool_use", "metrics": {"latencyMs": 7}, "usage": {"inputTokens": 18, "outputTokens": 40,
    "totalTokens": 158, "cacheReadInputTokens": 90, "cacheWriteInputTokens": 10}}""")


def delta(index: int, **said: Any) -> bytes:
    return event("contentBlockDelta", {"contentBlockIndex": index, "delta": said, "p": "abcdef"})


def stop(index: int) -> bytes:
    return event("contentBlockStop", {"contentBlockIndex": index, "p": "ab"})


def start(index: int, call: Any) -> bytes:
    named = {key: call[key] for key in ("toolUseId", "name")}
    return event("contentBlockStart", {"contentBlockIndex": index, "start": {"toolUse": named}})


def told(plain: dict[str, Any]) -> list[bytes]:
    """An answer as frames."""
    found = [event("messageStart", {"role": "assistant", "p": "abc"})]
    for index, block in enumerate(plain["output"]["message"]["content"]):
        if call := block.get("toolUse"):
            written = json.dumps(call["input"]) if call["input"] else ""
            found += [start(index, call)]
            found += [delta(index, toolUse={"input": written[at : at + 5]}) for at in range(0, len(written), 5)]
        elif thought := block.get("reasoningContent"):
            said = thought.get("reasoningText", {"text": ""})
            found += [delta(index, reasoningContent={"text": it}) for it in said["text"].partition(" ") if it]
            rest = {"signature": said["signature"]} if said["text"] else thought
            found += [delta(index, reasoningContent=rest)]
        elif cited := block.get("citationsContent"):
            found += [delta(index, text=cited["content"][0]["text"])]
            found += [delta(index, citation=it) for it in cited["citations"]]
        else:
            found += [delta(index, text=it) for it in block["text"]]
        found += [stop(index)]
    found += [event("messageStop", {"stopReason": plain["stopReason"]})]
    return [*found, event("metadata", {"usage": plain["usage"], "metrics": plain["metrics"]})]


FRAMES = told(PLAIN)
STREAM = b"".join(FRAMES)
USED = Usage(input_tokens=118, output_tokens=40, cached_tokens=90, cache_write_tokens=10)
FACTS = Facts(finish="tool_use", usage=USED, tool_calls=2, choices=1)
ROUTES = {
    "converse": "POST /model/anthropic.claude-3-haiku-20240307-v1%3A0/converse, POST /model/m/converse-stream, "
    "POST /model/arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Ainference-profile%2Fus.x/converse",
    "opaque": "GET /model/m/converse, POST /model/m/converse/x, POST /model//converse, "
    "POST /model/m/invoke-with-bidirectional-stream, POST /async-invoke",
}


@pytest.mark.parametrize("name", ROUTES)
def test_routes(name: str) -> None:
    calls = [call.split() for call in ROUTES[name].split(", ")]
    assert [find(method, path).name for method, path in calls] == [name] * len(calls)


def test_the_model_stands_in_the_path() -> None:
    arn = "arn:aws:bedrock:us-east-1:1:inference-profile/us.amazon.nova-pro-v1:0"
    path = "/model/arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Ainference-profile%2Fus.amazon.nova-pro-v1%3A0/converse?a=/b"
    assert CONVERSE.model(body(ASKED), path) == arn
    assert CONVERSE.model(body({"model": "other"})) is None
    assert CONVERSE.model(b"", "/model/" + "m" * 300 + "/converse") is None


def test_whose_a_call_to_another_path_is() -> None:
    signed = (b"authorization", b"Authorization", b"AWS4-HMAC-SHA256 Credential=AKIA/20261122/us-east-1/bedrock")
    sdk = (b"amz-sdk-invocation-id", b"amz-sdk-invocation-id", b"1")
    proxy = (b"x-amz-cf-id", b"X-Amz-Cf-Id", b"1")
    for path, last in (("/any", "openai"), ("/model/m/invoke", "bedrock")):
        found = [family(find("POST", path), path, [one]).name for one in (signed, sdk, proxy)]
        assert found == ["bedrock", "bedrock", last]


def test_a_request() -> None:
    turn = CONVERSE.read(body(ASKED), body(PLAIN), False)
    assert turn.problems == []
    add = Tool(name="add", description="Adds.", parameters={"type": "object"})
    assert turn.tools == [add, Tool(name="nova_grounding")]
    (_, image), (*_, server), (_, _, failed, *_), _ = (message["content"] for message in ASKED["messages"])
    assert [(message.role, message.parts) for message in turn.messages] == [
        ("system", [Part(type="text", text="Be é brief.")]),
        ("user", [Part(type="text", text="What is 19 * 23?"), Part(type="media", data=image)]),
        (
            "assistant",
            [
                Part(type="reasoning", text="A sum."),
                Part(type="text", text="I look."),
                Part(type="tool_call", id="t0", name="add", arguments='{"b":2,"a":1}'),
                Part(type="unknown", data=server),
            ],
        ),
        (
            "user",
            [
                Part(type="tool_call_response", id="t0", text="3"),
                Part(type="tool_call_response", id="t1", text='{"a":1}', data=[{"json": {"a": 1}}]),
                Part(type="tool_call_response", id="t2", text="No.", data=failed["toolResult"]),
                Part(type="text", text="guarded"),
            ],
        ),
        ("system", [Part(type="text", text="Now in German.")]),
    ]
    assert turn.sampling == ASKED["inferenceConfig"] | {
        "top_k": 5, "serviceTier": {"type": "flex"}, "toolChoice": {"any": {}}
    }  # fmt: skip
    assert turn.effective == Sampling(temperature=0.5, top_p=0.9, top_k=5, max_tokens=100, stop=["END"])
    assert turn.forced == "toolChoice any"


@pytest.mark.parametrize(
    ("asked", "forced"),
    [
        ({}, None),
        ({"toolConfig": {"tools": [], "toolChoice": {"auto": {}}}}, None),
        ({"toolConfig": {"toolChoice": {"tool": {"name": "add"}}}}, "toolChoice tool"),
        ({"outputConfig": {"textFormat": {"type": "json_schema", "structure": {}}}}, "textFormat json_schema"),
        ({"outputConfig": {"textFormat": {"type": 1}}}, "textFormat of a kind that is not known"),
        ({"toolConfig": {"tools": [{"toolSpec": {"name": "add", "strict": True}}]}}, "a strict tool"),
    ],
)
def test_what_forces_tokens(asked: Any, forced: str | None) -> None:
    assert CONVERSE.read(body(asked), b"", False).forced == forced


def test_an_answer_plain_and_as_a_stream() -> None:
    plain, streamed = (CONVERSE.read(body(ASKED), it, stream) for it, stream in ((body(PLAIN), False), (STREAM, True)))
    assert plain.problems == streamed.problems == []
    same(plain, streamed)
    assert agreed("converse", body(ASKED), body(PLAIN), False) == agreed("converse", body(ASKED), STREAM, True) == FACTS
    (choice,) = streamed.choices
    assert (choice.finish, choice.message.role) == ("tool_use", "assistant")
    assert choice.message.parts == [
        Part(type="reasoning", text="Let me see."),
        Part(type="reasoning", data={"reasoningContent": {"redactedContent": "aGlkZGVu"}}),
        Part(type="text", text="Hello."),
        Part(type="tool_call", id="t9", name="add", arguments='{"a":[1,{"b":"漢"}]}'),
        Part(type="text", text="As A says."),
        Part(type="tool_call", id="t10", name="now", arguments="{}"),
    ]
    assert CONVERSE.reply_fingerprints(STREAM, True) == CONVERSE.reply_fingerprints(body(PLAIN), False) != []


def test_blocks_that_only_streams_bring_in_pieces() -> None:
    blob = [b64encode(it).decode() for it in (b"a", b"bc")]
    frames = [
        event("messageStart", {"role": "assistant"}),
        *(delta(0, reasoningContent={"redactedContent": it}) for it in blob),
        event("contentBlockStart", {"contentBlockIndex": 1, "start": {"image": {"format": "png"}}}),
        delta(1, image={"source": {"bytes": "iVBO"}}),
        event("contentBlockStart", {"contentBlockIndex": 2, "start": {"toolResult": {"toolUseId": "s"}}}),
        *(delta(2, toolResult=[{"text": it}]) for it in "ab"),
        delta(3, toolUse={"input": "{broken"}),
        start(4, {"toolUseId": "t", "name": "f"}),
        delta(4, toolUse={"input": "{broken"}),
        event("messageStop", {"stopReason": "malformed_tool_use"}),
    ]
    parts = CONVERSE.read(b"{}", b"".join(frames), True).choices[0].message.parts
    assert [part.data for part in parts[:2]] == [
        {"reasoningContent": {"redactedContent": b64encode(b"abc").decode()}},
        {"image": {"format": "png", "source": {"bytes": "iVBO"}}},
    ]
    assert parts[2] == Part(type="tool_call_response", id="s", text="ab")
    assert parts[-1] == Part(type="tool_call", id="t", name="f", arguments="{broken")


SLOW = exception("throttlingException", "Too many.")
LOST = frame({":message-type": "error", ":error-code": "InternalError", ":error-message": "Oh."}, b"")
EARLY = ["response: the stream ended early"]


@pytest.mark.parametrize(
    ("stream", "failed", "error", "problems"),
    [
        (STREAM, None, None, []),
        (b"".join(FRAMES[:-1]), None, None, []),
        (STREAM[:-1], None, None, ["response: the stream ends within a frame"]),
        (b"".join(FRAMES[:-2]), "ended_early", None, EARLY),
        (b"".join(FRAMES[:3])[:-1], "ended_early", None, ["response: the stream ends within a frame", *EARLY]),
        (b"", "ended_early", None, EARLY),
        (b"".join(FRAMES[:9]) + SLOW, "stream_error", "throttlingException: Too many.", []),
        (SLOW, "stream_error", "throttlingException: Too many.", []),
        (FRAMES[0] + LOST, "stream_error", "InternalError: Oh.", []),
        (b'{"message":"no stream"}', "ended_early", None, [
            "response: what stands at byte 0 is no frame of an event stream", *EARLY]),
    ],
    ids=["whole", "no-metadata", "cut-last", "no-end", "cut-frame", "empty", "throttled", "at-once", "lost", "json"],
)  # fmt: skip
def test_how_streams_end(stream: bytes, failed: str | None, error: str | None, problems: list[str]) -> None:
    turn = CONVERSE.read(body(ASKED), stream, True)
    assert (turn.error, turn.problems) == (error, problems)
    assert agreed("converse", body(ASKED), stream, True).failed == failed


@given(st.integers(0, len(STREAM)))
def test_a_stream_that_is_cut_anywhere(at: int) -> None:
    facts, turn = CONVERSE.facts(b"{}", STREAM[:at], True), CONVERSE.read(b"{}", STREAM[:at], True)
    ended = at >= len(STREAM) - len(FRAMES[-1])
    assert (facts.failed is None) == ended == ("response: the stream ended early" not in turn.problems)
    assert CONVERSE.is_complete(STREAM[:at]) == (at == len(STREAM))
    assert (facts.choices, facts.usage) == (len(turn.choices), turn.usage)


def test_a_client_may_leave_after_an_exception_and_a_masked_secret_is_read_over() -> None:
    """The tape keeps a stream's lengths and not its checksums."""
    assert CONVERSE.is_complete(FRAMES[0] + SLOW)
    assert not CONVERSE.is_complete(b"".join(FRAMES[:-1]))
    masked = STREAM.replace(b'"text":"H"', b'"text":"*"')
    turn = CONVERSE.read(b"{}", masked, True)
    assert turn.choices[0].message.parts[2].text == "*ello."
    assert [problem.partition(" at ")[0] for problem in turn.problems] == ["response: the frame"]
    assert CONVERSE.facts(b"{}", masked, True) == FACTS


@pytest.mark.parametrize("said", [{"message": "Not so."}, {"Message": "Not so."}], ids=str)
def test_errors(said: dict[str, str]) -> None:
    assert agreed("converse", body(ASKED), body(said), False).failed == "error_body"
    kind = [("x-amzn-errortype", "AccessDeniedException")]
    asked = Exchange(url="", request_headers=[], request_body=body(ASKED), response_headers=kind, response_body=b"")
    exchange = asked.model_copy(update={"response_body": body(said)})
    span = Span(rollout="r", attempt="a", sequence=1, dialect="converse", http_status=403, model="m")
    turn = read_exchange("converse", exchange, span)
    assert (turn.error, turn.model, turn.choices) == ("Not so.", "m", [])


KINDS = {
    **{400: "ValidationException", 401: "UnrecognizedClientException", 403: "AccessDeniedException"},
    **{404: "ResourceNotFoundException", 413: "ValidationException", 429: "ThrottlingException"},
    **{500: "InternalServerException", 502: "ServiceUnavailableException", 504: "ModelTimeoutException"},
}


def test_own_errors_have_the_shape_of_aws() -> None:
    found = {status: json.loads(CONVERSE.family.error_body(status, "Not so.", "odd", "model")) for status in KINDS}
    assert found == {status: {"__type": kind, "message": "model: Not so."} for status, kind in KINDS.items()}


def test_a_conversation_is_followed() -> None:
    """The client sends the answer back with results: item by item the same, whatever the formatting and the markers."""
    request, more = body(ASKED), {"role": "user", "content": [{"text": "More."}, ASKED["system"][-1]]}
    after = [*ASKED["messages"], PLAIN["output"]["message"], more]
    goes_on = json.dumps({**ASKED, "messages": after}, indent=1).encode()
    before, later = (
        [CONVERSE.item_fingerprint(bytes(it)) for it in CONVERSE.items(it).raw] for it in (request, goes_on)
    )
    assert before == CONVERSE.message_fingerprints(request)
    assert later == CONVERSE.message_fingerprints(goes_on)
    assert later[: len(before)] == before
    assert [later[len(before)]] == CONVERSE.reply_fingerprints(STREAM, True)
    assert len(later) == len(before) + 2
    assert CONVERSE.reply_fingerprint(STREAM, True) == CONVERSE.reply_fingerprint(body(PLAIN), False) == later[-2]


def test_an_answer_and_its_results_go_on() -> None:
    failed = {"toolUseId": "old", "content": [{"text": "No."}], "status": "error"}
    results = [
        Part(type="tool_call_response", id="old", text="7"),
        Part(type="tool_call_response", id="old", text="No.", data=failed),
    ]
    made = CONVERSE.continuation(STREAM, True, results)
    good = {"toolResult": {"toolUseId": "t9", "content": [{"text": "7"}], "status": "success"}}
    told = {"role": "user", "content": [good, {"toolResult": failed | {"toolUseId": "t10"}}]}
    assert made == [PLAIN["output"]["message"], told]
    assert CONVERSE.continuation(STREAM, True, results[:1]) is None
    json_result = Part(type="tool_call_response", text='{"a":1}', data=[{"json": {"a": 1}}])
    again = CONVERSE.continuation(body(PLAIN), False, [json_result, json_result])
    assert again is not None
    assert again[1]["content"][0]["toolResult"]["content"] == [{"json": {"a": 1}}]
    assert CONVERSE.server_tools(ASKED) == ["systemTool"]


def test_texts_of_a_request_and_where_they_stand() -> None:
    request = json.dumps(ASKED, indent=1, ensure_ascii=False).encode()
    places = [*CONVERSE.system_texts(request).places, *CONVERSE.tool_texts(request)]
    assert [(place.text, place.role, place.name) for place in places] == [
        ("Be é brief.", "system", None),
        ("Now in German.", "system", None),
        ("Adds.", "tool", "add"),
    ]
    changed = spliced(request, [(place, b'"X"') for place in places])
    turn = CONVERSE.read(changed, b"", False)
    assert [turn.messages[0].parts[0].text, turn.messages[-1].parts[0].text] == ["X", "X"]
    assert turn.tools[0].description == "X"
    assert CONVERSE.system_texts(b'{"system":[{"text":1}],"messages":[{"role":"system","content":"x"}]}').places == []


# -- calls through a gateway: the client and Bedrock get what was sent, byte for byte ----------------------------------


MODEL = "us.anthropic.claude-3-5-haiku-20241022-v1:0"
PATH = "/model/us.anthropic.claude-3-5-haiku-20241022-v1%3A0"
SIGNED = [
    ("Content-Type", "application/json"),
    ("X-Amz-Date", "20261122T210000Z"),
    ("X-Amz-Security-Token", "session-token-that-nobody-may-read"),
    ("Authorization", "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261122/us-east-1/bedrock/aws4_request, Signature=f00"),
    ("amz-sdk-invocation-id", "6d1f"),
]
REQUEST = b'{"messages": [{"role": "user", "content": [{"text": "h\xc3\xa9"}]}],  "inferenceConfig": {"maxTokens": 9}}'
ANSWER = json.dumps(
    {
        "output": {"message": {"role": "assistant", "content": [{"text": "Hello."}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5},
    },
    indent=1,
).encode()
WIRE = b"".join(
    [
        event("messageStart", {"role": "assistant", "p": "abcd"}),
        *(event("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": it}}) for it in ("Hel", "lo.")),
        event("contentBlockStop", {"contentBlockIndex": 0}),
        event("messageStop", {"stopReason": "end_turn"}),
        event("metadata", {"usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}}),
    ]
)
EVENTS = [("Content-Type", "application/vnd.amazon.eventstream"), ("Transfer-Encoding", "chunked")]
HEAD = head("HTTP/1.1 200 OK", EVENTS)


def streamed(frames: bytes, size: int) -> bytes:
    """An answer of frames, in chunks that know nothing of them."""
    return HEAD + b"".join(chunk(frames[at : at + size]) for at in range(0, len(frames), size)) + chunk(b"")


async def asked(tmp_path: Path, operation: str, *steps: Step, size: int) -> tuple[bytes, bytes, SpanDetail]:
    """(what Bedrock got, what the client got, the call on the tape). `size`: bytes that the client waits for."""
    async with (
        odd([request(), *steps]) as bedrock,
        locally(tmp_path, upstream("bedrock", bedrock.url, "bedrock")) as gateway,
        connect(gateway.url) as client,
        aiohttp.ClientSession() as session,
    ):
        client.send(post(f"/rollout/r1/attempt/a1{PATH}/{operation}", REQUEST, SIGNED))
        got = await client.exactly(size)
        tape = Tape(gateway.url, session)
        (span,) = await tape.spans("r1", 1)
        return (await bedrock.connection(0)).requests[0], got, await tape.detail(span)


@pytest.mark.parametrize("size", [0, 1, 7, 100_000], ids=["plain", "1", "7", "100000"])
async def test_a_call_is_passed_on_as_it_is_and_read(tmp_path: Path, size: int) -> None:
    """`size`: of the chunks of a stream, if it is one."""
    operation = "converse-stream" if size else "converse"
    plain = reply(200, ANSWER, [("Content-Type", "application/json"), ("x-amzn-RequestId", "q1")])
    answer = streamed(WIRE, size) if size else plain
    arrived, got, found = await asked(tmp_path, operation, send(answer), size=len(answer))
    assert got == answer
    # Nothing that is signed differs but the host, and the path before which the rollout's address stood.
    assert arrived.startswith(f"POST {PATH}/{operation} HTTP/1.1\r\n".encode())
    assert body_of(arrived) == REQUEST
    fields = header_fields(arrived)
    assert {name: fields[name.lower()] for name, _ in SIGNED} == dict(SIGNED)
    assert fields["host"].startswith("127.0.0.1:")
    span, turn, exchange = found.span, found.turn, found.exchange
    assert (span.dialect, span.model, span.status, span.finish) == ("converse", MODEL, "ok", "end_turn")
    assert (span.upstream, span.usage, span.stream) == ("bedrock", Usage(input_tokens=3, output_tokens=2), size > 0)
    assert turn is not None
    assert (turn.model, turn.problems, turn.messages[0].parts[0].text) == (MODEL, [], "hé")
    assert [part.text for part in turn.choices[0].message.parts] == ["Hello."]
    assert exchange is not None
    kept = dict(exchange.request_headers)
    assert (kept["Authorization"], kept["X-Amz-Security-Token"]) == ("***", "***")


CUT_SHORT = ["response: the stream ends within a frame", "response: the stream ended early"]
CUT = HEAD + chunk(WIRE[:150])
FAILED = streamed(event("messageStart", {}) + exception("modelStreamErrorException", "Oh."), 50)
REFUSED = reply(403, b'{"Message":"No."}', [("x-amzn-errortype", "AccessDeniedException")])


@pytest.mark.parametrize(
    ("answer", "error", "told", "problems"),
    [
        (FAILED, "stream_error", "modelStreamErrorException: Oh.", []),
        (CUT, "upstream_closed", None, CUT_SHORT),
        (REFUSED, "http_403", "No.", []),
    ],
    ids=["exception", "breaks off", "refused"],
)
async def test_what_fails(tmp_path: Path, answer: bytes, error: str, told: str | None, problems: list[str]) -> None:
    ends = [abort()] if answer is CUT else []
    operation = "converse" if answer is REFUSED else "converse-stream"
    _, got, found = await asked(tmp_path, operation, send(answer), *ends, size=len(answer))
    assert got == answer
    assert (found.span.status, found.span.error, found.span.stream) == ("error", error, answer is not REFUSED)
    assert found.turn is not None
    assert (found.turn.error, found.turn.problems) == (told, problems)


async def test_nobody_is_asked_by_default_and_a_key_of_the_gateway_takes_the_place_of_a_signature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with locally(tmp_path / "none", "") as gateway, connect(gateway.url) as client:
        client.send(post(f"/rollout/r1{PATH}/converse", REQUEST, SIGNED))
        refused = await client.message()
    assert refused.startswith(b"HTTP/1.1 404 ")
    said = json.loads(body_of(refused))
    assert said["__type"] == "ResourceNotFoundException"
    assert 'add an [[upstream]] with dialect = "bedrock"' in said["message"]
    answer = reply(200, ANSWER)
    monkeypatch.setenv("BEDROCK_KEY", "ABSK-a-key")
    async with odd([request(), send(answer)]) as bedrock:
        config = upstream("bedrock", bedrock.url, "bedrock", key_env="BEDROCK_KEY")
        async with locally(tmp_path / "key", config) as gateway, connect(gateway.url) as client:
            client.send(post(f"/rollout/r1{PATH}/converse", REQUEST, SIGNED))
            assert await client.exactly(len(answer)) == answer
        fields = header_fields((await bedrock.connection(0)).requests[0])
    assert fields["authorization"] == "Bearer ABSK-a-key"
