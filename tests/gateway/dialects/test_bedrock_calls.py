"""Bedrock's calls through a gateway as its users run it: what the client and Bedrock get is what was sent, byte for
byte, and the tape has it read."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from fakes.event_stream import event, exception
from fakes.in_process import running_here
from fakes.odd import Step, abort, odd, request, send
from fakes.process import upstream
from fakes.raw import body_of, chunk, connect, head, header_fields, post, reply
from fakes.tape import Tape

from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.span import Usage

MODEL = "us.anthropic.claude-3-5-haiku-20241022-v1:0"
PATH = "/model/us.anthropic.claude-3-5-haiku-20241022-v1%3A0"
SIGNED = [
    ("Content-Type", "application/json"),
    ("X-Amz-Date", "20261122T210000Z"),
    ("X-Amz-Security-Token", "session-token-that-nobody-may-read"),
    ("Authorization", "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20261122/us-east-1/bedrock/aws4_request, Signature=f00"),
    ("amz-sdk-invocation-id", "6d1f"),
]
ASKED = b'{"messages": [{"role": "user", "content": [{"text": "h\xc3\xa9"}]}],  "inferenceConfig": {"maxTokens": 9}}'
ANSWER = json.dumps(
    {
        "output": {"message": {"role": "assistant", "content": [{"text": "Hello."}]}},
        "stopReason": "end_turn",
        "usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5},
    },
    indent=1,
).encode()
FRAMES = b"".join(
    [
        event("messageStart", {"role": "assistant", "p": "abcd"}),
        *(event("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": it}}) for it in ("Hel", "lo.")),
        event("contentBlockStop", {"contentBlockIndex": 0}),
        event("messageStop", {"stopReason": "end_turn"}),
        event("metadata", {"usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}}),
    ]
)
EVENTS = [("Content-Type", "application/vnd.amazon.eventstream"), ("Transfer-Encoding", "chunked")]
STREAM = head("HTTP/1.1 200 OK", EVENTS)


def streamed(frames: bytes, size: int) -> bytes:
    """An answer of frames, in chunks that know nothing of them."""
    return STREAM + b"".join(chunk(frames[at : at + size]) for at in range(0, len(frames), size)) + chunk(b"")


async def asked(tmp_path: Path, operation: str, *steps: Step, size: int) -> tuple[bytes, bytes, SpanDetail]:
    """(what Bedrock got, what the client got, the call on the tape). `size`: bytes that the client waits for."""
    async with (
        odd([request(), *steps]) as bedrock,
        running_here(tmp_path, upstream("bedrock", bedrock.url, "bedrock")) as gateway,
        connect(gateway.url) as client,
        aiohttp.ClientSession() as session,
    ):
        client.send(post(f"/rollout/r1/attempt/a1{PATH}/{operation}", ASKED, SIGNED))
        got = await client.exactly(size)
        tape = Tape(gateway.url, session)
        (span,) = await tape.spans("r1", 1)
        return (await bedrock.connection(0)).requests[0], got, await tape.detail(span)


@pytest.mark.parametrize("size", [0, 1, 7, 100_000], ids=["plain", "1", "7", "100000"])
async def test_a_call_is_passed_on_as_it_is_and_read(tmp_path: Path, size: int) -> None:
    """`size`: of the chunks of a stream, if it is one."""
    operation = "converse-stream" if size else "converse"
    plain = reply(200, ANSWER, [("Content-Type", "application/json"), ("x-amzn-RequestId", "q1")])
    answer = streamed(FRAMES, size) if size else plain
    arrived, got, found = await asked(tmp_path, operation, send(answer), size=len(answer))
    assert got == answer
    # Nothing that is signed differs but the host, and the path before which the rollout's address stood.
    assert arrived.startswith(f"POST {PATH}/{operation} HTTP/1.1\r\n".encode())
    assert body_of(arrived) == ASKED
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


EARLY = ["response: the stream ends within a frame", "response: the stream ended early"]
CUT = STREAM + chunk(FRAMES[:150])
FAILED = streamed(event("messageStart", {}) + exception("modelStreamErrorException", "Oh."), 50)
REFUSED = reply(403, b'{"Message":"No."}', [("x-amzn-errortype", "AccessDeniedException")])


@pytest.mark.parametrize(
    ("answer", "error", "told", "problems"),
    [
        (FAILED, "stream_error", "modelStreamErrorException: Oh.", []),
        (CUT, "upstream_closed", None, EARLY),
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
    async with running_here(tmp_path / "none", "") as gateway, connect(gateway.url) as client:
        client.send(post(f"/rollout/r1{PATH}/converse", ASKED, SIGNED))
        refused = await client.message()
    assert refused.startswith(b"HTTP/1.1 404 ")
    said = json.loads(body_of(refused))
    assert said["__type"] == "ResourceNotFoundException"
    assert 'add an [[upstream]] with dialect = "bedrock"' in said["message"]
    answer = reply(200, ANSWER)
    monkeypatch.setenv("BEDROCK_KEY", "ABSK-a-key")
    async with odd([request(), send(answer)]) as bedrock:
        config = upstream("bedrock", bedrock.url, "bedrock", key_env="BEDROCK_KEY")
        async with running_here(tmp_path / "key", config) as gateway, connect(gateway.url) as client:
            client.send(post(f"/rollout/r1{PATH}/converse", ASKED, SIGNED))
            assert await client.exactly(len(answer)) == answer
        fields = header_fields((await bedrock.connection(0)).requests[0])
    assert fields["authorization"] == "Bearer ABSK-a-key"
