"""OpenAI's realtime API by the official SDK: each response is a span, also one that nobody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.budgets import budget, uses
from fakes.rig import Within
from fakes.sessions import Json, Peer, Rig, session_rig
from fakes.tape import Tape
from fakes.waiting import until
from openai import AsyncAzureOpenAI, AsyncOpenAI
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from penstock.gateway.model.facts import SOCKET_SESSION, UNATTRIBUTED, UNRELEASED
from penstock.gateway.traffic.proxy.websocket.connection import MOST_OPEN

USAGE: Json = {
    "total_tokens": 60, "input_tokens": 40, "output_tokens": 20,
    "input_token_details": {
        "text_tokens": 10, "audio_tokens": 30, "image_tokens": 0, "cached_tokens": 8,
        "cached_tokens_details": {"text_tokens": 0, "audio_tokens": 8, "image_tokens": 0},
    },
    "output_token_details": {"text_tokens": 5, "audio_tokens": 15},
}  # fmt: skip
STARTED: Json = {
    "type": "session.created", "event_id": "e0",
    "session": {
        "type": "realtime", "id": "sess_1", "model": "gpt-realtime-2026", "instructions": "Be kind.",
        "audio": {"input": {"transcription": {"model": "gpt-4o-transcribe"}}},
    },
}  # fmt: skip
SOUND = "UklG" * 400


def message(words: str, id: str = "item_a") -> Json:
    content: list[Json] = [{"type": "output_audio", "transcript": words}]
    return {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def calling(name: str, arguments: str) -> Json:
    return {"id": "item_f", "type": "function_call", "call_id": "call_1", "name": name, "arguments": arguments}


def begun(id: str) -> Json:
    return {"type": "response.created", "event_id": f"e_{id}", "response": {"id": id, "status": "in_progress"}}


def done(id: str, *output: Json, status: str = "completed", **more: Any) -> Json:
    head: Json = {"id": id, "status": status, "output": list(output), "usage": USAGE, **more}
    return {"type": "response.done", "event_id": f"d_{id}", "response": head}


def heard(item: str, words: str, **usage: Any) -> list[Json]:
    kind = "conversation.item.input_audio_transcription"
    about: Json = {"item_id": item, "content_index": 0, "event_id": "t"}
    return [
        {"type": f"{kind}.delta", "delta": words, **about},
        {"type": f"{kind}.completed", "transcript": words, "usage": usage, **about},
    ]


@asynccontextmanager
async def session(rig: Rig, azure: bool = False) -> AsyncGenerator[tuple[Any, Peer]]:
    """The SDK's connection, and the host's end of it."""
    if azure:
        url = rig.base.replace("http", "ws") + "/openai"
        made = AsyncAzureOpenAI(
            azure_endpoint=rig.base, websocket_base_url=url, api_version="2025-04-01", api_key="not-real"
        )
    else:
        made = AsyncOpenAI(base_url=rig.base + "/v1", api_key="sk-not-real")
    async with made as client, client.realtime.connect(model="gpt-realtime") as connection:
        yield connection, await rig.accepted.get()


async def until_type(connection: Any, kind: str) -> Any:
    while (event := await connection.recv()).type != kind:
        pass
    return event


@pytest.fixture
async def rig(within: Within, request: pytest.FixtureRequest) -> AsyncGenerator[Rig]:
    async with session_rig(within, "openai", getattr(request, "param", {})) as made:
        yield made


async def test_each_response_is_a_span_with_what_was_said_before_it(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await host.say(STARTED)
        tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
        await client.session.update(session={"type": "realtime", "instructions": "Be brief.", "tools": [tool]})
        item: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]}
        await client.conversation.item.create(item=item)
        await client.response.create()
        _ = [await host.hear() for _ in range(3)]
        await host.say(begun("r1"), done("r1", calling("weather", '{"at":"Bern"}')))
        _ = await until_type(client, "response.done")
        result: Any = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
        await client.conversation.item.create(item=result)
        await client.response.create(response={"max_output_tokens": 50})
        _ = [await host.hear() for _ in range(2)]
        delta = {"item_id": "item_a", "output_index": 0, "content_index": 0, "response_id": "r2", "event_id": "x"}
        await host.say(begun("r2"), {"type": "response.output_audio.delta", "delta": SOUND, **delta})
        await host.say({"type": "response.output_audio_transcript.delta", "delta": "It rains.", **delta})
        await host.say(done("r2", message("It rains.")))
        _ = await until_type(client, "response.done")
    one, two = await rig.spans(2)
    assert [(it.kind, it.dialect, it.model, it.upstream, it.status, it.http_status) for it in (one, two)] == [
        ("llm", "realtime", "gpt-realtime", "host", "ok", 101)
    ] * 2
    assert (one.model_served, one.response_id, one.finish, one.tool_calls) == (
        "gpt-realtime-2026",
        "r1",
        "completed",
        1,
    )
    assert (one.attributes or {})[SOCKET_SESSION] == (two.attributes or {})[SOCKET_SESSION]
    assert two.usage is not None
    assert (two.usage.input_tokens, two.usage.output_tokens, two.usage.cached_tokens) == (40, 20, 8)
    assert two.usage.billed == {"input_audio": 30, "output_audio": 15, "cached_audio": 8}
    assert await rig.said(one) == (["system: Be brief.", "user: Weather?"], 'weather({"at":"Bern"})')
    assert await rig.said(two) == (["tool: rain"], "It rains.")
    ((path, headers),) = rig.opened
    assert (path, headers["authorization"]) == ("/v1/realtime?model=gpt-realtime", "Bearer sk-not-real")
    sent = [event(it) for it in host.heard]
    assert await rig.tape.raw(one, "request") == b"".join(sent[:3])
    assert await rig.tape.raw(two, "request") == b"".join(sent[3:])
    came = [event(it) for it in host.said]
    assert await rig.tape.raw(one, "response") + await rig.tape.raw(two, "response") == b"".join(came)
    detail = (await rig.tape.detail(one)).turn
    assert detail is not None
    assert [tool.name for tool in detail.tools] == ["weather"]


def event(message: str | bytes) -> bytes:
    assert isinstance(message, str)
    return b"data: %b\n\n" % message.encode()


async def test_voice_detection_makes_responses_and_a_transcription_is_a_call_of_its_model(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await host.say(STARTED)
        for _ in range(3):
            await client.input_audio_buffer.append(audio=SOUND)
            _ = await host.hear()
        await host.say({"type": "input_audio_buffer.committed", "item_id": "item_u", "event_id": "c"}, begun("r1"))
        await host.say(*heard("item_u", "Hello there", type="tokens", input_tokens=30, output_tokens=4))
        await host.say({"type": "input_audio_buffer.speech_started", "item_id": "item_v", "event_id": "s"})
        cut = {"status_details": {"type": "cancelled", "reason": "turn_detected"}}
        await host.say(done("r1", message("Hel"), status="cancelled", **cut))
        _ = await until_type(client, "response.done")
    one, two = sorted(await rig.spans(2), key=lambda span: span.model or "", reverse=True)
    assert (one.model, one.status, one.finish, UNATTRIBUTED in (one.attributes or {})) == (
        "gpt-realtime", "ok", "turn_detected", False,
    )  # fmt: skip
    assert min(one.first_byte_ns or 0, two.first_byte_ns or 0) >= 0
    assert await rig.said(one) == (["system: Be kind.", "user: media"], "Hel")
    assert (two.model, two.status) == ("gpt-4o-transcribe", "ok")
    assert two.usage is not None
    assert (two.usage.input_tokens, two.usage.output_tokens) == (30, 4)
    assert await rig.said(two) == ([], "Hello there")
    (attempt,) = (await rig.tape.get("/api/rollouts/r1/diagnosis"))["attempts"]
    assert [[it["code"] for it in call["findings"]] for call in attempt["calls"]] == [["session"]] * 2


async def test_responses_beside_each_other_and_errors_find_their_calls(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await client.response.create(event_id="mine")
        await client.response.create(event_id="yours", response={"conversation": "none"})
        _ = [await host.hear() for _ in range(2)]
        await host.say(begun("r1"), begun("r2"), done("r2", message("two")), done("r1", message("one")))
        await client.response.create(event_id="late")
        _ = await host.hear()
        error = {"type": "invalid_request_error", "code": "bad", "message": "no", "event_id": "late"}
        await host.say({"type": "error", "event_id": "e", "error": error})
        _ = await until_type(client, "error")
    spans = await rig.spans(3)
    found = {(span.response_id, span.status, span.http_status) for span in spans}
    assert found == {("r1", "ok", 101), ("r2", "ok", 101), (None, "error", 400)}
    texts = {span.response_id: (await rig.said(span))[1] for span in spans if span.response_id}
    assert texts == {"r1": "one", "r2": "two"}


async def test_a_request_whose_place_a_response_of_the_server_took_is_marked(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await client.response.create(event_id="mine")
        _ = await host.hear()
        error = {"type": "invalid_request_error", "message": "Conversation already has an active response: r1"}
        await host.say(begun("r1"), {"type": "error", "event_id": "e", "error": error | {"event_id": "mine"}})
        await host.say(done("r1", message("Hello")))
        _ = await until_type(client, "response.done")
    span = (await rig.spans(2))[0]
    assert (span.attributes or {})[UNATTRIBUTED] is True


async def test_after_an_error_without_an_id_answers_still_find_their_requests(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await client.response.create(response={"instructions": "refused"})
        _ = await host.hear()
        error = {"type": "invalid_request_error", "message": "no", "event_id": None}
        await host.say({"type": "error", "event_id": "e", "error": error})
        _ = await until_type(client, "error")
        for id in ("r1", "r2"):
            await client.response.create(response={"instructions": id})
            _ = await host.hear()
            await host.say(begun(id), done(id, message(id)))
            _ = await until_type(client, "response.done")
    spans = await rig.spans(3)
    asked = [((await rig.said(span))[0], span.response_id, span.status) for span in spans]
    assert asked == [
        (["system: refused"], None, "error"), (["system: r1"], "r1", "ok"), (["system: r2"], "r2", "ok")
    ]  # fmt: skip
    assert [UNATTRIBUTED in (span.attributes or {}) for span in spans] == [True, True, False]


async def test_what_no_response_takes_is_a_span_that_uses_nothing(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await host.say(STARTED)
        await client.input_audio_buffer.append(audio=SOUND)
        _ = await host.hear()
        _ = await client.recv()
    (span,) = await rig.spans(1)
    assert (span.status, span.response_id, span.tool_calls) == ("ok", None, 0)
    assert span.usage is not None
    assert (span.usage.input_tokens, span.usage.output_tokens) == (0, 0)
    assert await rig.said(span) == (["system: Be kind.", "user: media"], "")


async def test_a_long_session_is_kept_in_parts(rig: Rig) -> None:
    sound = "A" * (1 << 18)
    async with session(rig) as (client, host):
        for _ in range(9):
            await client.input_audio_buffer.append(audio=sound)
            _ = await host.hear()
        assert len(await rig.spans(2)) == 2, "before the session ends"
    spans = await rig.spans(3)
    assert b"".join([await rig.tape.raw(span, "request") for span in spans]) == b"".join(map(event, host.heard))


async def test_requests_wait_while_very_many_are_unanswered(rig: Rig) -> None:
    async with session(rig) as (client, host):
        for _ in range(MOST_OPEN + 2):
            await client.response.create()
        _ = [await host.hear() for _ in range(MOST_OPEN)]
        for id in ("r1", "r2"):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(host.hear(), 0.3)
            await host.say(begun(id), done(id, message("one")))
            assert (await host.hear())["type"] == "response.create"


@pytest.mark.parametrize("rig", [{"budget": [budget(limit=1)]}], indirect=True)
async def test_a_used_up_budget_refuses_requests_and_openings(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await client.response.create()
        _ = await host.hear()
        await host.say(begun("r1"), done("r1", message("one")))
        _ = await until_type(client, "response.done")
        await client.response.create(event_id="second")
        error = (await until_type(client, "error")).error
        assert (error.code, error.event_id) == ("budget", "second")
        assert len(host.heard) == 1
    with pytest.raises(Exception, match="429"):
        async with session(rig):
            pass


@pytest.mark.parametrize("rig", [{"budget": [budget(limit=1)]}], indirect=True)
async def test_a_response_that_nobody_asked_for_ends_a_session_without_a_budget(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await host.say(begun("r1"), done("r1", message("one")), begun("r2"))
        assert (await until_type(client, "error")).error.code == "budget"
        with pytest.raises(ConnectionClosed):
            _ = await client.recv()
    await until(lambda: _async(host.connection.close_code is not None))
    one, two = await rig.spans(2)
    assert ((one.status, one.response_id), (two.status, two.error)) == (("ok", "r1"), ("error", "budget"))


async def _async(value: bool) -> bool:
    return value


async def test_azures_addresses_name_a_deployment(within: Within) -> None:
    async with session_rig(within, "azure") as rig, session(rig, azure=True) as (client, host):
        await client.response.create()
        _ = await host.hear()
        await host.say(begun("r1"), done("r1", message("one")))
        _ = await until_type(client, "response.done")
        await client.close()
        (span,) = await rig.spans(1)
    ((path, headers),) = rig.opened
    assert path.startswith("/openai/realtime?")
    assert "deployment=gpt-realtime" in path
    assert headers["api-key"] == "not-real"
    assert (span.model, span.dialect) == ("gpt-realtime", "realtime")


async def test_a_release_does_not_reach_a_session_and_says_so(rig: Rig) -> None:
    prompt = {"kind": "prompt", "content": {"text": "You are a helpful assistant."}}
    async with rig.tape.http.post(f"{rig.url}/api/resources/greeting", json=prompt) as made:
        assert made.status in (200, 201)
    async with session(rig) as (client, host):
        await client.response.create()
        _ = await host.hear()
        await host.say(begun("r1"), done("r1", message("one")))
        _ = await until_type(client, "response.done")
    (span,) = await rig.spans(1)
    assert (span.attributes or {})[UNRELEASED] is True
    assert (span.versions, span.arm) == (None, None)


@pytest.mark.parametrize("rig", [{"masking": [{"name": "tickets", "pattern": "T-[0-9]+"}]}], indirect=True)
async def test_secrets_are_masked_in_what_both_sides_say(rig: Rig) -> None:
    async with session(rig) as (client, host):
        await client.response.create(response={"instructions": "about T-1234"})
        assert "T-1234" in str(await host.hear())
        about = {"item_id": "i", "output_index": 0, "content_index": 0, "response_id": "r1", "event_id": "x"}
        kind = "response.output_audio_transcript.delta"
        await host.say(begun("r1"), *({"type": kind, "delta": part, **about} for part in ("on T-", "1234 ")))
        await host.say(done("r1", message("on T-1234")))
        _ = await until_type(client, "response.done")
    (span,) = await rig.spans(1)
    sent, came = await rig.tape.raw(span, "request"), await rig.tape.raw(span, "response")
    assert b"1234" not in sent + came
    assert (await rig.said(span)) == (["system: about ******"], "on ******")


async def test_usage_by_modality_has_its_price_and_counts_in_budgets(within: Within, tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'as_of = 2026-01-01\n[[price]]\nmodel = "gpt-realtime"\ninput = 4\ninput_audio = 32\ncached = 0.4\n'
        "cached_audio = 0.4\noutput = 16\noutput_audio = 64\n"
    )
    money = [budget(unit="usd", limit=100)]
    async with session_rig(within, "openai", {"prices": str(prices), "budget": money}) as rig:
        async with session(rig) as (client, host):
            await client.response.create()
            _ = await host.hear()
            await host.say(begun("r1"), done("r1", message("one")))
            _ = await until_type(client, "response.done")
        (span,) = await rig.spans(1)
        ((_, _, used, reserved),) = await uses(rig.tape.http, rig.url)
    cost = (10 * 4 + 22 * 32 + 8 * 0.4 + 5 * 16 + 15 * 64) / 1e6
    assert span.cost == pytest.approx(cost)
    assert (used, reserved) == (pytest.approx(cost), 0)


@pytest.mark.slow
async def test_a_killed_gateway_leaves_the_answers_that_had_ended_and_an_interrupted_one(
    start_gateway: StartGateway, http: aiohttp.ClientSession
) -> None:
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def talk(connection: ServerConnection) -> None:
        peers.put_nowait(Peer(connection))
        await connection.wait_closed()

    async with serve(talk, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        gateway = await start_gateway(f'[[upstream]]\nname = "host"\nbase_url = "{url}/v1"\n')
        rig = Rig(gateway.url, Tape(gateway.url, http), peers)
        async with session(rig) as (client, host):
            for id in ("r1", "r2"):
                await client.response.create(response={"instructions": id})
                _ = await host.hear()
                await host.say(begun(id))
                if id == "r1":
                    await host.say(done(id, message(id)))
                    _ = await rig.spans(1)
            _ = await rig.tape.open_span("r1")
            await gateway.kill()
            with suppress(ConnectionClosed):
                while True:
                    _ = await client.recv()
        await gateway.start()
        one, two = await Rig(gateway.url, Tape(gateway.url, http)).spans(2)
    assert [(span.status, span.response_id) for span in (one, two)] == [("ok", "r1"), ("interrupted", None)]
    assert b'"r2"' in await Tape(gateway.url, http).raw(two, "request")


@pytest.mark.parametrize("own", [True, False])
async def test_keys_of_browsers_stand_in_a_subprotocol(
    within: Within, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`own`: the upstream has a key of its own, and agents need a token."""
    monkeypatch.setenv("HOST_KEY", "sk-of-the-gateway")
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "boss")
    secret = {"require_token": True} if own else {}
    known = {"key_env": "HOST_KEY"} if own else {}
    realtime = Subprotocol("realtime")
    async with session_rig(within, "openai", secret, known, subprotocols=[realtime]) as rig:
        boss = {"Authorization": "Bearer boss"}
        async with rig.tape.http.post(f"{rig.url}/api/tokens", json={"rollout": "r1"}, headers=boss) as made:
            token = (await made.json())["token"]
        key = token if own else "sk-not-real"
        offered = [realtime, Subprotocol(f"openai-insecure-api-key.{key}"), Subprotocol("openai-beta.realtime-v1")]
        url = rig.base.replace("http", "ws") + "/v1/realtime?model=m"
        async with connect(url, subprotocols=offered, proxy=None) as client:
            assert client.subprotocol == "realtime"
            _ = await rig.accepted.get()
        ((_, headers),) = rig.opened
        if own:
            assert headers["sec-websocket-protocol"] == "realtime, openai-beta.realtime-v1"
            assert headers["authorization"] == "Bearer sk-of-the-gateway"
        else:
            assert headers["sec-websocket-protocol"] == ", ".join(offered)


async def test_a_live_session_is_one_span_with_the_transcripts_of_both_sides(rig: Rig) -> None:
    client = AsyncOpenAI(base_url=rig.base + "/v1", api_key="sk-not-real")
    async with client, client.live.connect() as connection:
        host = await rig.accepted.get()
        await connection.send({"type": "session.start", "session": {"model": "gpt-live", "instructions": "Be kind."}})
        _ = await host.hear()
        for kind, words in (("input", "Hel"), ("output", "Hi "), ("input", "lo"), ("output", "there")):
            await host.say({"type": f"session.{kind}_transcript.delta", "delta": words, "start_ms": 0, "end_ms": 1})
            _ = await connection.recv()
    (span,) = await rig.spans(1)
    assert (span.dialect, span.model, span.status, span.usage) == ("live", "gpt-live", "ok", None)
    assert await rig.said(span) == (["system: Be kind.", "user: Hello"], "Hi there")
