"""Clients of AWS and of Anthropic on AWS, unmodified, in front of a gateway that signs for them. They need boto3, which
only this environment has.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession
from anthropic.lib.aws import AnthropicAWS
from anthropic.lib.bedrock import AnthropicBedrock, AnthropicBedrockMantle
from fakes.cloud_credentials import Clouds, clouds
from fakes.event_stream import frame
from fakes.local import Local, locally
from fakes.process import upstream
from fakes.tape import Tape

from examples.demo import model as demo
from penstock.gateway.model.answers import SpanDetail

boto3: Any = pytest.importorskip("boto3")
MODEL = "us.anthropic.claude-opus-5-5-v1:0"
ASKED: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "What?"}]}
CLAUDE = ASKED | {"anthropic_version": "bedrock-2023-05-31", "system": "Be brief."}
SAID = demo.DemoAnswer("Hello there.")
PLAIN = json.dumps(demo.message(ASKED | {"model": "m"}, SAID)).encode()
EVENTS = b"".join(demo.message_events(ASKED | {"model": "m"}, SAID))
KIND = {":event-type": "chunk", ":content-type": "application/json", ":message-type": "event"}
FRAMES = b"".join(
    frame(KIND, json.dumps({"bytes": b64encode(line[5:].strip()).decode()}).encode())
    for line in EVENTS.splitlines()
    if line.startswith(b"data:")
)
STREAM = {"Content-Type": "application/vnd.amazon.eventstream", "X-Amzn-Bedrock-Content-Type": "application/json"}
CONVERSE = {
    "output": {"message": {"role": "assistant", "content": [{"text": "Hello there."}]}},
    "stopReason": "end_turn",
    "usage": {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5},
    "metrics": {"latencyMs": 1},
}


@pytest_asyncio.fixture
async def cloud(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Clouds]:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDOFTHEGATEWAY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-secret-of-the-gateway-1")
    async with clouds() as made:
        made.secrets["AKIDOFTHEGATEWAY"] = "the-secret-of-the-gateway-1"
        yield made


def client(gateway: Local) -> Any:
    """A client of AWS with keys that nobody knows."""
    options = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "eu-west-1"}
    return boto3.client("bedrock-runtime", endpoint_url=gateway.address("r1"), **options)


async def asked(cloud: Clouds, home: Path, dialect: str, ask: Callable[[Local], Any]) -> tuple[Any, SpanDetail]:
    """(what a client got, its call)."""
    config = upstream("aws", cloud.url, dialect) + 'auth = "aws"\n'
    async with locally(home, config) as gateway, ClientSession() as session:
        got = await asyncio.to_thread(ask, gateway)
        tape = Tape(gateway.url, session)
        (span,) = await tape.spans("r1", 1)
        assert [by.key for by in cloud.signed] == ["AKIDOFTHEGATEWAY"]
        return got, await tape.detail(span)


def said(detail: SpanDetail, dialect: str) -> str | None:
    """The text of a call's answer, of which everything was read."""
    assert detail.turn is not None
    assert (detail.span.dialect, detail.span.status, detail.turn.problems) == (dialect, "ok", [])
    return detail.turn.choices[0].message.parts[0].text if detail.turn.choices else None


async def test_boto3_invokes_a_model(cloud: Clouds, tmp_path: Path) -> None:
    cloud.answer, cloud.headers = PLAIN, {"Content-Type": "application/json"}
    got, detail = await asked(
        cloud, tmp_path, "bedrock",
        lambda gateway: client(gateway).invoke_model(modelId=MODEL, body=json.dumps(CLAUDE))["body"].read(),
    )  # fmt: skip
    assert got == PLAIN
    assert (said(detail, "invoke"), detail.span.model) == ("Hello there.", MODEL)
    assert detail.span.usage is not None


async def test_boto3_streams(cloud: Clouds, tmp_path: Path) -> None:
    cloud.answer, cloud.headers = FRAMES, STREAM

    def ask(gateway: Local) -> list[Any]:
        answer = client(gateway).invoke_model_with_response_stream(modelId=MODEL, body=json.dumps(CLAUDE))
        return [json.loads(event["chunk"]["bytes"]) for event in answer["body"]]

    got, detail = await asked(cloud, tmp_path, "bedrock", ask)
    assert (
        "".join(one["delta"].get("text", "") for one in got if one["type"] == "content_block_delta") == "Hello there."
    )
    assert (said(detail, "invoke"), detail.span.finish) == ("Hello there.", "end_turn")


@pytest.mark.parametrize("inside", ["invokeModel", "converse"])
async def test_boto3_counts_tokens(cloud: Clouds, tmp_path: Path, inside: str) -> None:
    cloud.answer = b'{"inputTokens": 12}'
    messages = [{"role": "user", "content": [{"text": "What?"}]}]
    counted = {"body": json.dumps(CLAUDE)} if inside == "invokeModel" else {"messages": messages}
    got, detail = await asked(
        cloud, tmp_path, "bedrock",
        lambda gateway: client(gateway).count_tokens(modelId=MODEL, input={inside: counted}),
    )  # fmt: skip
    assert got["inputTokens"] == 12
    assert said(detail, "bedrock_count_tokens") is None
    assert detail.span.usage is None
    assert detail.turn is not None
    assert detail.turn.messages[-1].parts[0].text == "What?"


async def test_boto3_converses(cloud: Clouds, tmp_path: Path) -> None:
    cloud.answer = json.dumps(CONVERSE).encode()
    messages = [{"role": "user", "content": [{"text": "What?"}]}]
    got, detail = await asked(
        cloud, tmp_path, "bedrock", lambda gateway: client(gateway).converse(modelId=MODEL, messages=messages)
    )
    assert got["output"] == CONVERSE["output"]
    assert said(detail, "converse") == "Hello there."


def answer_text(create: Callable[..., Any], model: str) -> str:
    """The first text of an answer of `messages.create`, whose overloads no dictionary of arguments tells apart."""
    return create(model=model, **ASKED).content[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_s_client_of_bedrock(cloud: Clouds, tmp_path: Path, stream: bool) -> None:
    cloud.answer, cloud.headers = (FRAMES, STREAM) if stream else (PLAIN, {"Content-Type": "application/json"})

    def ask(gateway: Local) -> str:
        keys: dict[str, Any] = {"aws_access_key": "none", "aws_secret_key": "none", "aws_region": "eu-west-1"}
        with AnthropicBedrock(base_url=gateway.address("r1"), **keys) as anthropic:
            if not stream:
                return answer_text(anthropic.messages.create, MODEL)
            with anthropic.messages.stream(model=MODEL, **ASKED) as answer:
                return answer.get_final_text()

    got, detail = await asked(cloud, tmp_path, "bedrock", ask)
    assert got == said(detail, "invoke") == "Hello there."


async def test_claude_platform_on_aws(cloud: Clouds, tmp_path: Path) -> None:
    cloud.answer, cloud.headers = PLAIN, {"Content-Type": "application/json"}

    def ask(gateway: Local) -> str:
        keys: dict[str, Any] = {"aws_access_key": "none", "aws_secret_key": "none", "aws_region": "us-west-2"}
        with AnthropicAWS(base_url=gateway.address("r1"), workspace_id="wrkspc_1", **keys) as anthropic:
            return answer_text(anthropic.messages.create, "claude-opus-5-5")

    got, detail = await asked(cloud, tmp_path, "anthropic", ask)
    assert got == said(detail, "messages") == "Hello there."
    assert [by.service for by in cloud.signed] == ["aws-external-anthropic"]
    assert cloud.seen[0].header("anthropic-workspace-id") == "wrkspc_1"


async def test_bedrock_mantle(cloud: Clouds, tmp_path: Path) -> None:
    cloud.answer, cloud.headers = PLAIN, {"Content-Type": "application/json"}

    def ask(gateway: Local) -> str:
        keys: dict[str, Any] = {"aws_access_key": "none", "aws_secret_key": "none", "aws_region": "us-west-2"}
        with AnthropicBedrockMantle(base_url=f"{gateway.address('r1')}/anthropic", **keys) as anthropic:
            return answer_text(anthropic.messages.create, "claude-opus-5-5")

    got, detail = await asked(cloud, tmp_path, "bedrock", ask)
    assert (got, detail.span.status) == ("Hello there.", "ok")
    assert cloud.seen[0].path == "/anthropic/v1/messages"
