"""Gemini Live: each turn is a span. `tests/clients/test_live.py` does the same by Google's own SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from fakes.budgets import budget
from fakes.rig import Within
from fakes.sessions import Json, Peer, Rig, session_rig
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

PATH = "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent"
SOUND = {"data": "UklG" * 100, "mimeType": "audio/pcm"}
SETUP: Json = {
    "setup": {
        "model": "models/gemini-live", "generationConfig": {"responseModalities": ["AUDIO"], "temperature": 0.5},
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "weather"}]}],
    }
}  # fmt: skip


def usage(asked: int, said: int) -> Json:
    details = [{"modality": "AUDIO", "tokenCount": said}]
    return {
        "promptTokenCount": asked, "responseTokenCount": said, "totalTokenCount": asked + said,
        "responseTokensDetails": details,
    }  # fmt: skip


def content(**said: Any) -> Json:
    return {"serverContent": said}


@asynccontextmanager
async def session(rig: Rig, path: str = PATH) -> AsyncGenerator[tuple[ClientConnection, Peer]]:
    key = {"x-goog-api-key": "AIza-not-real"}
    async with connect(rig.base.replace("http", "ws") + path, additional_headers=key, proxy=None) as client:
        yield client, await rig.accepted.get()


async def ask(client: ClientConnection, host: Peer, *messages: Json) -> None:
    for message in messages:
        await client.send(json.dumps(message))
        assert await host.hear() == message


async def answer(client: ClientConnection, host: Peer, *messages: Json) -> None:
    """Google's server sends its JSON in binary frames."""
    await host.say(*messages, binary=True)
    for message in messages:
        assert await client.recv() == json.dumps(message).encode()


@pytest.fixture
async def rig(within: Within, request: pytest.FixtureRequest) -> AsyncGenerator[Rig]:
    async with session_rig(within, "gemini", getattr(request, "param", {})) as made:
        yield made


async def test_each_turn_is_a_span(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await ask(client, host, SETUP)
        await answer(client, host, {"setupComplete": {}})
        said = {"turns": [{"role": "user", "parts": [{"text": "Weather?"}]}], "turnComplete": True}
        await ask(client, host, {"clientContent": said})
        call = {"id": "f1", "name": "weather", "args": {"at": "Bern"}}
        await answer(client, host, {"toolCall": {"functionCalls": [call]}, "usageMetadata": usage(10, 3)})
        result = {"id": "f1", "name": "weather", "response": {"sky": "rain"}}
        await ask(client, host, {"toolResponse": {"functionResponses": [result]}})
        await answer(
            client, host,
            content(modelTurn={"parts": [{"inlineData": SOUND}]}), content(outputTranscription={"text": "It "}),
            content(outputTranscription={"text": "rains."}), content(generationComplete=True),
            content(turnComplete=True) | {"usageMetadata": usage(20, 7)},
        )  # fmt: skip
        await answer(client, host, {"sessionResumptionUpdate": {"newHandle": "h", "resumable": True}})
        await ask(client, host, {"realtimeInput": {"audio": SOUND}}, {"realtimeInput": {"audio": SOUND}})
        await answer(client, host, content(inputTranscription={"text": "And tomorrow?"}))
        await answer(client, host, content(modelTurn={"parts": [{"text": "It will be"}]}), content(interrupted=True))
        await answer(client, host, content(turnComplete=True), {"goAway": {"timeLeft": "50s"}})
    one, two, rest = await rig.spans(3)
    assert [(it.dialect, it.model, it.status, it.upstream) for it in (one, two)] == [
        ("gemini_live", "gemini-live", "ok", "host")
    ] * 2
    assert (one.finish, one.tool_calls, two.finish) == ("turnComplete", 1, "interrupted")
    assert one.usage is not None
    assert (one.usage.input_tokens, one.usage.output_tokens, one.usage.billed) == (30, 10, {"output_audio": 10})
    assert await rig.said(one) == (
        ["system: Be brief.", "user: Weather?"],
        'It rains. weather({"at":"Bern"}) media',
    )
    asked, answered = await rig.said(two)
    assert asked == ['user: {"sky":"rain"}', "user: media", "user: And tomorrow?"]
    assert answered == "It will be"
    assert rest.usage is not None
    assert (rest.usage.output_tokens, rest.choices) == (0, 0)
    ((path, headers),) = rig.opened
    assert (path, headers["x-goog-api-key"]) == (PATH, "AIza-not-real")
    raw = b"".join([await rig.tape.raw(span, "response") for span in (one, two, rest)])
    assert raw == b"".join(b"event: binary\ndata: %b\n\n" % it for it in host.said if isinstance(it, bytes))


@pytest.mark.parametrize("rig", [{"budget": [budget(limit=1)]}], indirect=True)
async def test_a_used_up_budget_ends_a_session_and_refuses_the_next(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await ask(client, host, SETUP)
        turn = content(modelTurn={"parts": [{"text": "Hello"}]}), content(turnComplete=True)
        await answer(client, host, *turn)
        await host.say(*turn)
        with suppress(ConnectionClosed):
            while True:
                _ = await client.recv()
        assert client.close_code == 1011
        assert "budget 'b'" in (client.close_reason or "")
    with pytest.raises(InvalidStatus, match="429"):
        async with session(rig):
            pass


async def test_vertex_and_ephemeral_tokens(within: Within) -> None:
    async with session_rig(within, "vertex") as rig:
        async with session(rig, "/ws/google.cloud.aiplatform.v1.LlmBidiService/BidiGenerateContent") as (client, host):
            await ask(client, host, {"setup": {"model": "projects/p/locations/l/publishers/google/models/m1"}})
            await answer(client, host, content(modelTurn={"parts": [{"text": "Hello"}]}, turnComplete=True))
        (span,) = await rig.spans(1)
        assert (span.dialect, span.model, span.status) == ("gemini_live", "m1", "ok")
        assert await rig.said(span) == ([], "Hello")
