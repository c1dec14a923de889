"""Bedrock's InvokeModel: bodies of each vendor's format, plain, streamed and counted, read as that format is read."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.event_stream import exception, frame
from fakes.local import locally
from fakes.odd import abort, odd, request, send
from fakes.process import upstream
from fakes.raw import body_of, chunk, connect, head, post, reply
from fakes.tape import Tape
from fakes.wire_bodies import agreed, body, same
from hypothesis import given
from hypothesis import strategies as st

from examples.demo import model as demo
from examples.demo.model import DemoAnswer, DemoToolCall
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.request_body import spliced
from penstock.gateway.wire.dialects.unread_content import find_unread

Json = dict[str, Any]
INVOKE, COUNT = by_name("invoke"), by_name("bedrock_count_tokens")
METRICS = {
    "inputTokenCount": 11, "outputTokenCount": 8, "invocationLatency": 9, "firstByteLatency": 3,
    "cacheReadInputTokenCount": 5, "cacheWriteInputTokenCount": 0,
}  # fmt: skip
CALL = DemoToolCall("toolu_1", "get", '{"city":"Orléans"}')
SAID = DemoAnswer("Let me look: 19 * 23.", calls=(CALL,))


def framed(*events: Json, metrics: bool = True) -> bytes:
    """Events as Bedrock streams them; the last one with its counts."""
    found = [*events[:-1], events[-1] | ({"amazon-bedrock-invocationMetrics": METRICS} if metrics else {})]
    kind = {":event-type": "chunk", ":content-type": "application/json", ":message-type": "event"}
    payloads = [{"bytes": b64encode(body(one)).decode(), "p": "abcdefgh"[: at % 8]} for at, one in enumerate(found)]
    return b"".join(frame(kind, body(one)) for one in payloads)


def datas(events: Any) -> list[Json]:
    """The objects in server-sent events."""
    lines = b"".join(events).splitlines()
    return [json.loads(line[5:]) for line in lines if line.startswith(b"data:") and not line.endswith(b"[DONE]")]


CLAUDE: Json = {
    "anthropic_version": "bedrock-2023-05-31", "max_tokens": 90, "system": "Be é brief.",
    "messages": [{"role": "user", "content": "What is it?"}],
    "tools": [{"name": "get", "description": "Looks up.", "input_schema": {"type": "object"}}],
}  # fmt: skip
NOVA: Json = {
    "schemaVersion": "messages-v1", "system": [{"text": "Be é brief."}], "inferenceConfig": {"max_new_tokens": 90},
    "messages": [{"role": "user", "content": [{"text": "What is it?"}]}],
    "toolConfig": {"tools": [{"toolSpec": {"name": "get", "description": "Looks up.", "inputSchema": {"json": {}}}}]},
}  # fmt: skip
CHAT: Json = {
    "max_tokens": 90,
    "messages": [{"role": "system", "content": "Be é brief."}, {"role": "user", "content": "What is it?"}],
    "tools": [{"type": "function", "function": {"name": "get", "description": "Looks up.", "parameters": {}}}],
}
LLAMA: Json = {"prompt": "<|user|>What is it?", "max_gen_len": 90, "temperature": 0.5}
NOVA_PLAIN: Json = {
    "output": {"message": {"role": "assistant", "content": [
        {"text": "Let me look: 19 * 23."},
        {"toolUse": {"toolUseId": "toolu_1", "name": "get", "input": {"city": "Orléans"}}}]}},
    "stopReason": "tool_use", "usage": {"inputTokens": 11, "outputTokens": 7, "cacheReadInputTokenCount": 5},
}  # fmt: skip
NOVA_EVENTS: list[Json] = [
    {"messageStart": {"role": "assistant"}},
    *({"contentBlockDelta": {"delta": {"text": it}, "contentBlockIndex": 0}} for it in ("Let me look:", " 19 * 23.")),
    {"contentBlockStop": {"contentBlockIndex": 0}},
    {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "toolu_1", "name": "get"}}, "contentBlockIndex": 1}},
    {"contentBlockDelta": {"delta": {"toolUse": {"input": CALL.arguments}}, "contentBlockIndex": 1}},
    {"messageStop": {"stopReason": "tool_use"}},
    {"metadata": {"usage": NOVA_PLAIN["usage"], "metrics": {}, "trace": {}}},
]
LLAMA_PLAIN: Json = {
    "generation": "Let me look: 19 * 23.", "prompt_token_count": 11, "generation_token_count": 7, "stop_reason": "stop"
}  # fmt: skip
LLAMA_EVENTS: list[Json] = [
    {"generation": "Let me", "prompt_token_count": 11, "generation_token_count": 1, "stop_reason": None},
    {"generation": " look: 19 * 23.", "prompt_token_count": None, "generation_token_count": 7, "stop_reason": None},
    {"generation": "", "prompt_token_count": None, "generation_token_count": 7, "stop_reason": "stop"},
]
CLAUDE_ASKED = CLAUDE | {"model": "m"}
FORMATS: dict[str, tuple[Json, Json, list[Json]]] = {
    "messages": (CLAUDE, demo.message(CLAUDE_ASKED, SAID), datas(demo.message_events(CLAUDE_ASKED, SAID))),
    "converse": (NOVA, NOVA_PLAIN, NOVA_EVENTS),
    "chat": (
        CHAT,
        demo.chat(CHAT | {"model": "m"}, SAID),
        datas(demo.chat_events(CHAT | {"model": "m", "stream_options": {"include_usage": True}}, SAID)),
    ),
    "prompt": (LLAMA, LLAMA_PLAIN, LLAMA_EVENTS),
}


def test_routes() -> None:
    arn = "arn%3Aaws%3Abedrock%3Aus-east-1%3A1%3Aapplication-inference-profile%2Fp1"
    for path in (f"/model/{arn}/invoke", f"/model/{arn}/invoke-with-response-stream?a=/b"):
        assert find("POST", path.partition("?")[0]) is INVOKE
        assert (
            INVOKE.model(body(CLAUDE | {"model": "other"}), path)
            == "arn:aws:bedrock:us-east-1:1:application-inference-profile/p1"
        )
    assert find("POST", "/model/m/count-tokens") is COUNT
    assert [INVOKE.asks_stream(b"", f"/model/m/invoke{end}") for end in ("", "-with-response-stream")] == [False, True]


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_plain_and_streamed(name: str) -> None:
    asked, plain, events = FORMATS[name]
    own, streamed = by_name(name), framed(*events)
    turns = [INVOKE.read(body(asked), it, stream) for it, stream in ((body(plain), False), (streamed, True))]
    assert [turn.problems for turn in turns] == [[], []]
    assert [turn.choices[0].message for turn in turns] == [turns[0].choices[0].message] * 2
    said, *calls = turns[0].choices[0].message.parts
    assert said == Part(type="text", text="Let me look: 19 * 23.")
    assert [(it.id, it.name, json.loads(it.arguments or "")) for it in calls] == (
        [] if name == "prompt" else [("toolu_1", "get", {"city": "Orléans"})]
    )
    facts = [agreed("invoke", body(asked), it, stream) for it, stream in ((body(plain), False), (streamed, True))]
    assert [(it.model, it.failed, it.tool_calls, it.choices) for it in facts] == [(None, None, len(calls), 1)] * 2
    for it, stream in ((body(plain), False), (streamed, True)):
        assert find_unread(INVOKE, body(asked), it, stream, INVOKE.facts(body(asked), it, stream), it) == {}
    assert INVOKE.is_complete(streamed)
    assert not INVOKE.is_complete(framed(*events[:-1], metrics=False))
    if name != "prompt":
        # It is read as its own API's answer is.
        assert turns[0].messages == own.read(body(asked), body(plain), False).messages
        assert turns[0].tools[0].description == "Looks up."
        assert INVOKE.reply_fingerprints(body(plain), False) == INVOKE.reply_fingerprints(streamed, True)
        assert INVOKE.reply_fingerprints(body(plain), False) == own.reply_fingerprints(body(plain), False) != []


@pytest.mark.parametrize("name", ["messages", "converse", "chat"])
def test_a_conversation_goes_on(name: str) -> None:
    asked, plain, events = FORMATS[name]
    result = Part(type="tool_call_response", id="toolu_1", text="17", data=None)
    more = INVOKE.continuation(framed(*events), True, [result])
    assert more is not None
    assert len(more) == 2
    later = body(asked | {"messages": [*asked["messages"], *more]})
    before, after = ([INVOKE.item_fingerprint(bytes(it)) for it in INVOKE.items(it).raw] for it in (body(asked), later))
    assert (before, after) == (INVOKE.message_fingerprints(body(asked)), INVOKE.message_fingerprints(later))
    assert after[: len(before)] == before
    assert [after[len(before)]] == INVOKE.reply_fingerprints(body(plain), False)
    passages = [one.text for one in INVOKE.passages(later, body(plain), False, lambda: False)]
    assert "17" in passages
    assert "Let me look: 19 * 23." in passages


@pytest.mark.parametrize("name", ["messages", "converse", "chat"])
def test_a_released_text_is_written_in_its_place(name: str) -> None:
    request = json.dumps(FORMATS[name][0], indent=1, ensure_ascii=False).encode()
    places = [*INVOKE.system_texts(request).places, *INVOKE.tool_texts(request)]
    assert [place.text for place in places] == ["Be é brief.", "Looks up."]
    turn = INVOKE.read(spliced(request, [(place, b'"X"') for place in places]), b"{}", False)
    assert (turn.messages[0].parts[0].text, turn.tools[0].description) == ("X", "X")


def test_counts_that_only_bedrock_tells() -> None:
    """In the last chunk; in headers, with the tier that served the call."""
    whole = Usage(input_tokens=16, output_tokens=8, cached_tokens=5, cache_write_tokens=0)
    texts = framed(
        {"outputs": [{"text": "Hi.", "stop_reason": None}]}, {"outputs": [{"text": "", "stop_reason": "stop"}]}
    )
    assert agreed("invoke", body({"prompt": "Hello"}), texts, True).usage == whole
    own = FORMATS["messages"][1]["usage"]
    assert own["output_tokens"] != 8
    counted = agreed("invoke", body(CLAUDE), framed(*FORMATS["messages"][2]), True).usage
    assert counted is not None
    assert counted.output_tokens == own["output_tokens"]
    headers = [(b"X-Amzn-Bedrock-Input-Token-Count", b"4"), (b"x-amzn-bedrock-output-token-count", b"2"),
               (b"X-Amzn-Bedrock-Service-Tier", b"flex")]  # fmt: skip
    facts = INVOKE.facts(body({"texts": ["a"]}), body({"embeddings": [[0.5]]}), False)
    assert facts.usage is None
    told = Usage(input_tokens=4, output_tokens=2, billed={"tier": "flex"})
    assert INVOKE.with_headers(facts, headers).usage == told
    usual = INVOKE.with_headers(INVOKE.facts(body(LLAMA), body(LLAMA_PLAIN), False), [(headers[2][0], b"default")])
    assert usual.usage == Usage(input_tokens=11, output_tokens=7)


SLOW = exception("throttlingException", "Too many.")
UNKNOWN: Json = {"texts": ["a"], "input_type": "search_document"}
EARLY = "response: the stream ended early"


@pytest.mark.parametrize("asked", [*(FORMATS[name][0] for name in FORMATS), UNKNOWN], ids=[*FORMATS, "unknown"])
def test_what_fails(asked: Json) -> None:
    error = INVOKE.read(body(asked), body({"message": "Not so."}), False)
    assert (error.error, error.choices) == ("Not so.", [])
    assert INVOKE.facts(body(asked), body({"message": "Not so."}), False).failed == "error_body"
    events = next((events for known, _, events in FORMATS.values() if known is asked), [{"text": "a"}, {"text": "b"}])
    for stream, said in ((framed(*events[:2], metrics=False) + SLOW, 1), (SLOW, 0)):
        turn = INVOKE.read(body(asked), stream, True)
        assert turn.error == "throttlingException: Too many."
        assert INVOKE.facts(body(asked), stream, True).failed == "stream_error"
        assert bool(turn.choices) == bool(said and asked is not UNKNOWN)
        assert INVOKE.is_complete(stream)
    assert INVOKE.facts(body(asked), framed(*events[:2], metrics=False), True).failed == "ended_early"
    masked = framed(*events).replace(b64encode(body(events[0])), b"*" * len(b64encode(body(events[0]))))
    assert "response: a frame (chunk) holds no event" in INVOKE.read(body(asked), masked, True).problems


def test_a_body_of_no_known_format() -> None:
    turn = INVOKE.read(body(UNKNOWN), framed({"event_type": "text-generation", "text": "Hi."}), True)
    assert turn.problems == ["request: a body of no known format, of which only counts and errors are read"]
    assert (turn.usage, turn.choices, turn.error) == (
        Usage(input_tokens=16, output_tokens=8, cached_tokens=5, cache_write_tokens=0),
        [],
        None,
    )
    assert INVOKE.unwrap(body(UNKNOWN), b"", False) is None
    assert [one.text for one in INVOKE.passages(body(UNKNOWN), b'{"text":"Hi."}', False, lambda: False)] != []


def test_a_new_key_in_an_answer_is_told() -> None:
    asked, plain, events = FORMATS["messages"]
    block = {"type": "text", "text": "", "novel_words": "a text that nobody reads"}
    new = [{"type": "content_block_start", "index": 5, "content_block": block}]
    for it, stream in (
        (body(plain | {"content": [*plain["content"], block]}), False),
        (framed(*events[:-1], *new, events[-1]), True),
    ):
        found = find_unread(INVOKE, body(asked), it, stream, INVOKE.facts(body(asked), it, stream), it)
        assert list(found.values()) == ["text"]


@pytest.mark.parametrize("name", ["messages", "converse"])
def test_a_count_of_tokens(name: str) -> None:
    asked = FORMATS[name][0]
    inside = {"converse": asked} if name == "converse" else {"invokeModel": {"body": b64encode(body(asked)).decode()}}
    turn = COUNT.read(body({"input": inside}), b'{"inputTokens": 12}', False)
    assert (turn.problems, turn.usage, turn.choices) == ([], None, [])
    assert turn.messages == INVOKE.read(body(asked), b"{}", False).messages
    assert COUNT.facts(body({"input": inside}), b'{"inputTokens": 12}', False).usage is None
    assert COUNT.facts(b"", b'{"message": "No."}', False).failed == "error_body"
    assert COUNT.read(b'{"input": {"invokeModel": {"body": "*"}}}', b'{"message": "No."}', False).error == "No."


# -- calls through a gateway -------------------------------------------------------------------------------------------

MODEL = "us.anthropic.claude-3-5-haiku-20241022-v1:0"
PATH = "/model/us.anthropic.claude-3-5-haiku-20241022-v1%3A0"
STREAM = head("HTTP/1.1 200 OK", [
    ("Content-Type", "application/vnd.amazon.eventstream"), ("X-Amzn-Bedrock-Content-Type", "application/json"),
    ("X-Amzn-Bedrock-Service-Tier", "priority"), ("Transfer-Encoding", "chunked"),
])  # fmt: skip


@pytest.mark.parametrize("size", [0, 7, 100_000], ids=["plain", "7", "100000"])
@pytest.mark.parametrize("name", FORMATS)
async def test_a_call_is_passed_on_as_it_is_and_read(tmp_path: Path, name: str, size: int) -> None:
    """`size`: of the chunks of a stream, if it is one."""
    asked, plain, events = FORMATS[name]
    tier = [("X-Amzn-Bedrock-Service-Tier", "priority"), ("X-Amzn-Bedrock-Input-Token-Count", "99")]
    frames = framed(*events)
    answer = reply(200, body(plain), tier)
    if size:
        answer = STREAM + b"".join(chunk(frames[at : at + size]) for at in range(0, len(frames), size)) + chunk(b"")
    operation = "invoke-with-response-stream" if size else "invoke"
    async with (
        odd([request(), send(answer)]) as bedrock,
        locally(tmp_path, upstream("bedrock", bedrock.url, "bedrock")) as gateway,
        connect(gateway.url) as client,
        aiohttp.ClientSession() as session,
    ):
        client.send(post(f"/rollout/r1/attempt/a1{PATH}/{operation}", body(asked)))
        assert await client.exactly(len(answer)) == answer
        assert body_of((await bedrock.connection(0)).requests[0]) == body(asked)
        tape = Tape(gateway.url, session)
        (span,) = await tape.spans("r1", 1)
        found = await tape.detail(span)
    span, turn = found.span, found.turn
    assert (span.dialect, span.model, span.status, span.stream) == ("invoke", MODEL, "ok", size > 0)
    assert span.usage is not None
    assert span.usage.input_tokens not in (None, 99)
    assert span.usage.output_tokens is not None
    assert (span.usage.billed or {}).get("tier") == "priority"
    assert turn is not None
    assert (turn.model, turn.problems) == (MODEL, [])
    assert turn.choices[0].message.parts[0].text == "Let me look: 19 * 23."


@pytest.mark.parametrize("name", FORMATS)
async def test_a_stream_is_masked_on_the_tape_and_counted_by_budgets(tmp_path: Path, name: str) -> None:
    """`19 * 23` comes in several events, each of them in base64."""
    asked, _, events = FORMATS[name]
    answer = STREAM + chunk(framed(*events)) + chunk(b"")
    rules = (
        '[[masking]]\nname = "sums"\npattern = "look: 19 . 23"\n'
        '[[budget]]\nname = "t"\nunit = "tokens"\nlimit = 100000\n'
    )
    async with (
        odd([request(), send(answer)]) as bedrock,
        locally(tmp_path, upstream("bedrock", bedrock.url, "bedrock") + rules) as gateway,
        connect(gateway.url) as client,
        aiohttp.ClientSession() as session,
    ):
        client.send(post(f"/rollout/r1/attempt/a1{PATH}/invoke-with-response-stream", body(asked)))
        assert await client.exactly(len(answer)) == answer
        tape = Tape(gateway.url, session)
        (span,) = await tape.spans("r1", 1)
        turn = (await tape.detail(span)).turn
        async with session.get(f"{gateway.url}/api/budgets") as budgets:
            (use,) = (await budgets.json())["budgets"]
    assert turn is not None
    assert turn.choices[0].message.parts[0].text == "Let me *************."
    assert (span.status, span.finish) == ("ok", "stop" if name == "prompt" else span.finish)
    assert span.usage is not None
    assert use["used"] == (span.usage.input_tokens or 0) + (span.usage.output_tokens or 0) > 0


async def test_the_tokens_of_a_stream_that_breaks_off_are_estimated_by_its_text(tmp_path: Path) -> None:
    asked, _, events = FORMATS["messages"]
    begun = [one for one in events if one["type"] not in ("message_delta", "message_stop")]
    answer = STREAM + chunk(framed(*begun, metrics=False))
    async with (
        odd([request(), send(answer), abort()]) as bedrock,
        locally(tmp_path, upstream("bedrock", bedrock.url, "bedrock")) as gateway,
        connect(gateway.url) as client,
        aiohttp.ClientSession() as session,
    ):
        client.send(post(f"/rollout/r1/attempt/a1{PATH}/invoke-with-response-stream", body(asked)))
        assert await client.exactly(len(answer)) == answer
        (span,) = await Tape(gateway.url, session).spans("r1", 1)
    assert (span.status, span.error, span.tool_calls) == ("error", "upstream_closed", 1)
    assert span.estimate is not None
    assert 5 <= (span.estimate.output_tokens or 0) <= 20


def test_two_readings_of_one_answer_agree() -> None:
    asked, plain, _ = FORMATS["converse"]
    guarded = body(plain | {"amazon-bedrock-guardrailAction": "NONE"})
    same(INVOKE.read(body(asked), body(plain), False), INVOKE.read(body(asked), guarded, False))


STREAMS = {name: framed(*events) for name, (_, _, events) in FORMATS.items()}


@given(st.sampled_from(sorted(FORMATS)), st.floats(0, 1))
def test_a_stream_that_is_cut_anywhere(name: str, part: float) -> None:
    asked, stream = body(FORMATS[name][0]), STREAMS[name]
    came = stream[: round(len(stream) * part)]
    facts, turn = INVOKE.facts(asked, came, True), INVOKE.read(asked, came, True)
    assert (facts.failed is None) == (EARLY not in turn.problems)
    assert (facts.choices, facts.usage) == (len(turn.choices), turn.usage)
    assert INVOKE.is_complete(came) == (len(came) == len(stream))


def test_the_first_api_of_anthropic_s_is_read_as_such_a_prompt() -> None:
    asked = {"model": "claude-2", "prompt": "\n\nHuman: Why?\n\nAssistant:", "max_tokens_to_sample": 9}
    about = {"type": "completion", "id": "compl_1", "model": "claude-2.1", "stop": None, "log_id": "l"}
    pieces = [about | {"completion": it, "stop_reason": None} for it in (" So", " that.")]
    last = about | {"completion": "", "stop_reason": "stop_sequence", "stop": "\n\nHuman:"}
    told = [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in (*pieces, {"type": "ping"}, last)]
    for said, stream in (("".join(told), True), (json.dumps(last | {"completion": " So that."}), False)):
        dialect, response = by_name("text_completions"), said.encode()
        turn, facts = dialect.read(body(asked), response, stream), dialect.facts(body(asked), response, stream)
        assert (facts.model, facts.model_served, facts.response_id) == ("claude-2", "claude-2.1", "compl_1")
        assert (facts.finish, facts.failed, turn.problems) == ("stop_sequence", None, [])
        assert [part.text for part in turn.choices[0].message.parts] == [" So that."]
        assert turn.messages[0].parts[0].text == asked["prompt"]
        assert b"".join(dialect.answer_text_pattern(stream).findall(response)) == b" So that."
