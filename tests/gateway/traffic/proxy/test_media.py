"""Calls with media, made with the official SDK: what passes, what a turn says, what they cost, what budgets allow."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import wave
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from fakes.budgets import budget, toml, uses
from fakes.local import Local, locally
from fakes.media_host import PNG, SAID, SOUND, SRT, MediaHost, media_host
from fakes.process import upstreams
from fakes.tape import Tape

from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Body, ExchangeView
from penstock.gateway.model.facts import HASHED_MEDIA, MASKED
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Turn
from penstock.gateway.traffic.proxy.failover_policy import may_repeat
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.request_body import URLENCODED

KEY = "sk-proj-abcdefghijklmnop1234567890"


@dataclass(slots=True)
class Here:
    gateway: Local
    host: MediaHost
    http: ClientSession

    @property
    def sdk(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.openai("r"), api_key=KEY, max_retries=0)

    async def recorded(self) -> tuple[Span, ExchangeView, Turn]:
        """The newest call, as it is on the tape and as it is read."""
        assert await self.gateway.gateway.recorder.flush()
        async with Client(self.gateway.url) as client:
            found = [span async for span in client.spans("r", "a1")]
            detail = await client.span("r", "a1", found[-1].sequence)
        assert detail.exchange is not None
        assert detail.turn is not None
        return detail.span, detail.exchange, detail.turn


@asynccontextmanager
async def world(home: Path, http: ClientSession, config: str = "") -> AsyncGenerator[Here]:
    async with media_host() as host, locally(home, config + upstreams(openai=host.url)) as gateway:
        yield Here(gateway, host, http)


@pytest.fixture
async def here(tmp_path: Path, http: ClientSession) -> AsyncGenerator[Here]:
    async with world(tmp_path, http) as made:
        yield made


def sound(seconds: float = 2.0) -> bytes:
    """A WAV file of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(8000)
        made.writeframes(bytes(int(16000 * seconds)))
    return file.getvalue()


def raw(body: Body) -> bytes:
    return (body.text or "").encode() if body.base64 is None else base64.b64decode(body.base64)


async def create_video(sdk: openai.AsyncOpenAI, prompt: str) -> Any:
    """OpenAI's own service has ended; other servers speak it on."""
    make: Any = sdk.videos
    with pytest.deprecated_call():
        return await make.create(model="sora-2", prompt=prompt, seconds="8")


def texts(turn: Turn) -> list[str]:
    messages = [*turn.messages, *(choice.message for choice in turn.choices)]
    return [part.text for message in messages for part in message.parts if part.text]


def media(turn: Turn) -> list[Any]:
    messages = [*turn.messages, *(choice.message for choice in turn.choices)]
    return [part.data for message in messages for part in message.parts if part.type == "media"]


@pytest.mark.parametrize(
    ("form", "said", "cost"),
    [
        ("json", SAID, (120 * 2.5 + 7 * 10) / 1e6),
        ("verbose_json", SAID, 2 * 0.0001),
        ("text", SAID + "\n", None),
        ("srt", SRT, None),
    ],
)
async def test_transcripts(here: Here, form: Any, said: str, cost: float | None) -> None:
    async with here.sdk as sdk:
        create: Any = sdk.audio.transcriptions.create
        heard = await create(model="gpt-4o-transcribe", file=("a.wav", sound()), prompt="Foxes.", response_format=form)
    assert (heard if isinstance(heard, str) else heard.text) == said
    span, exchange, turn = await here.recorded()
    assert (span.dialect, span.model, span.status, span.choices) == ("transcription", "gpt-4o-transcribe", "ok", 1)
    assert raw(exchange.request_body) == here.host.bodies[-1]
    assert texts(turn) == ["Foxes.", said]
    (file,) = media(turn)
    start, end = file.pop("at")
    assert raw(exchange.request_body)[start:end] == sound()
    assert file == {"body": "request", "type": "audio/x-wav", "bytes": 32044, "file": "a.wav", "field": "file"}
    assert span.cost == (None if cost is None else pytest.approx(cost))
    assert (span.usage, span.estimate, turn.problems) == (turn.usage, None, [])


async def test_a_streamed_transcript(here: Here) -> None:
    async with here.sdk as sdk:
        events = [
            event
            async for event in await sdk.audio.transcriptions.create(
                model="gpt-4o-mini-transcribe", file=sound(), stream=True
            )
        ]
    assert events[-1].type == "transcript.text.done"
    span, _, turn = await here.recorded()
    assert (span.stream, span.status, texts(turn)) == (True, "ok", [SAID])
    assert span.usage is not None
    assert (span.usage.input_tokens, span.usage.billed) == (120, {"input_audio": 110})


async def test_speech_passes_as_it_comes_and_is_billed_by_its_characters(here: Here) -> None:
    async with here.sdk as sdk:
        spoken = sdk.audio.speech.with_streaming_response
        async with spoken.create(model="tts-1", voice="alloy", input="Grüß Gott!", instructions="Slowly.") as answer:
            assert b"".join([piece async for piece in answer.iter_bytes()]) == SOUND
    span, exchange, turn = await here.recorded()
    assert (span.dialect, span.status, raw(exchange.response_body)) == ("speech", "ok", SOUND)
    assert texts(turn) == ["Slowly.", "Grüß Gott!"]
    assert media(turn) == [{"body": "response", "bytes": len(SOUND), "type": "audio/mpeg"}]
    assert turn.sampling == {"voice": "alloy"}
    assert span.cost == pytest.approx(10 * 1.5e-5)


async def test_speech_in_events_is_billed_by_its_tokens(here: Here) -> None:
    async with here.sdk as sdk:
        await sdk.audio.speech.create(model="gpt-4o-mini-tts", voice="ash", input="Hello", stream_format="sse")
    span, _, turn = await here.recorded()
    assert span.stream
    assert media(turn) == [{"body": "response", "bytes": len(SOUND), "type": "audio/mpeg"}]
    assert span.cost == pytest.approx((9 * 0.6 + 80 * 12) / 1e6)


async def test_images(here: Here) -> None:
    async with here.sdk as sdk:
        made = await sdk.images.generate(model="gpt-image-1", prompt="A fox", n=2)
        assert made.data is not None
        assert base64.b64decode(made.data[0].b64_json or "") == PNG
        span, _, turn = await here.recorded()
        assert (span.dialect, span.choices, texts(turn)) == ("images", 2, ["A fox", "a red fox", "a red fox"])
        one = {"body": "response", "bytes": len(PNG), "type": "image/png", "path": "data[0].b64_json"}
        assert media(turn) == [one, one | {"path": "data[1].b64_json"}]
        assert span.cost == pytest.approx((10 * 5 + 50 * 10 + 200 * 40) / 1e6)
        _ = await sdk.images.edit(model="gpt-image-1", image=[("a.png", PNG), ("b.png", PNG)], prompt="Two foxes")
        span, exchange, turn = await here.recorded()
        assert [it.get("file") for it in media(turn)] == ["a.png", "b.png", None]
        assert all(raw(exchange.request_body)[slice(*it["at"])] == PNG for it in media(turn)[:2])
        assert span.usage is not None
        events = [it async for it in await sdk.images.edit(model="gpt-image-1", image=PNG, prompt="A", stream=True)]
        assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    span, _, turn = await here.recorded()
    assert (span.stream, span.choices, span.usage) == (True, 1, turn.usage)


async def test_videos_and_embeddings(here: Here) -> None:
    async with here.sdk as sdk:
        video = await create_video(sdk, "A fox runs")
        span, _, turn = await here.recorded()
        assert (span.dialect, span.response_id, texts(turn)) == ("videos", video.id, ["A fox runs"])
        assert span.cost == pytest.approx(0.8)
        vectors = await sdk.embeddings.create(model="text-embedding-3-small", input=["a fox", "a hen"])
    assert vectors.data[0].embedding == [0.0] * 8
    span, exchange, turn = await here.recorded()
    assert (span.dialect, texts(turn), json.loads(raw(exchange.request_body))["encoding_format"]) == (
        ("embeddings", ["a fox", "a hen"], "base64")
    )
    assert span.usage is not None
    assert span.usage.input_tokens == 5


async def test_an_error_costs_nothing(here: Here) -> None:
    here.host.failing = 502, b"<html>bad gateway</html>", "text/html"
    async with here.sdk as sdk:
        with pytest.raises(openai.InternalServerError):
            _ = await sdk.audio.speech.create(model="tts-1", voice="alloy", input="Hello")
    span, _, turn = await here.recorded()
    assert (span.status, span.error, span.usage, span.cost) == ("error", "http_502", None, None)
    assert turn.error


async def test_prompts_and_transcripts_are_found(here: Here) -> None:
    async with here.sdk as sdk:
        _ = await sdk.audio.transcriptions.create(model="whisper-1", file=sound(), prompt="Zebras")
        _ = await sdk.audio.speech.create(model="tts-1", voice="alloy", input="Hello")
    assert await here.gateway.gateway.recorder.flush()
    tape = Tape(here.gateway.url, here.http)
    for text, found in (("quick brown", ["transcription"]), ("zebras", ["transcription"]), ("hello", ["speech"])):
        page = await tape.get(f"/api/spans?filter=text~%22{text.replace(' ', '%20')}%22")
        assert [span["dialect"] for span in page["spans"]] == found, text


Ask = Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]
RESERVED: list[tuple[str, Ask, float]] = [
    (
        "transcription",
        lambda sdk: sdk.audio.transcriptions.create(model="whisper-1", file=sound(10), response_format="verbose_json"),
        10 * 0.0001,
    ),
    ("speech", lambda sdk: sdk.audio.speech.create(model="tts-1", voice="ash", input="x" * 1000), 1000 * 1.5e-5),
    ("images", lambda sdk: sdk.images.generate(model="gpt-image-1", prompt="x", n=2), 2 * 8192 * 40 / 1e6),
    ("videos", lambda sdk: create_video(sdk, "x"), 0.8),
]


@pytest.mark.parametrize(("name", "ask", "most"), RESERVED)
async def test_a_budget_reserves_what_a_call_may_cost(
    tmp_path: Path, http: ClientSession, name: str, ask: Ask, most: float
) -> None:
    small, large = budget(name="cap", unit="usd", limit=most * 0.9), budget(name="cap", unit="usd", limit=most * 1.1)
    async with world(tmp_path / "small", http, toml(small)) as here, here.sdk as sdk:
        with pytest.raises(openai.RateLimitError, match="cap"):
            _ = await ask(sdk)
        assert not here.host.bodies
    async with world(tmp_path / "large", http, toml(large)) as here, here.sdk as sdk:
        _ = await ask(sdk)
        span, _, _ = await here.recorded()
        assert span.cost is not None
        (used,) = await uses(http, here.gateway.url)
        assert used[2] == pytest.approx(span.cost, rel=1e-6)


async def test_a_form_without_a_certain_model_passes_no_budget(tmp_path: Path, http: ClientSession) -> None:
    async with world(tmp_path, http, toml(budget(name="cap", unit="tokens", limit=10**9))) as here:
        url = here.gateway.openai("r") + "/audio/transcriptions"
        kind = {"content-type": "multipart/form-data; boundary=b"}
        form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n--b--\r\n'
        for body in (b"--b\r\n\r\n", form.replace(b"model", b"file")):
            async with http.post(url, data=body, headers=kind) as answer:
                assert answer.status == 403, await answer.text()
        two = {"content-type": "multipart/form-data; boundary=b; boundary=c"}
        async with http.post(url, data=form, headers=two) as answer:
            assert answer.status == 403, await answer.text()
        for other in ("application/json", "multipart/form-data; boundary=c"):
            types = [("content-type", other), *kind.items()]
            for headers in (types, types[::-1]):
                async with http.post(url, data=form, headers=headers) as answer:
                    assert answer.status == 403, await answer.text()
        url, kind = here.gateway.openai("r") + "/images/generations", {"content-type": URLENCODED}
        async with http.post(url, data=b'{"a": "&model=dall-e-2&n=1&", "n": 9}', headers=kind) as answer:
            assert answer.status == 403, await answer.text()
        assert not here.host.bodies


async def test_hashes_in_place_of_media(tmp_path: Path, http: ClientSession) -> None:
    async with world(tmp_path, http, '[tape]\nmedia = "hash"\n') as here, here.sdk as sdk:
        heard = await sdk.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound()))
        assert heard.text == SAID
        assert sound() in here.host.bodies[-1]
        span, exchange, turn = await here.recorded()
        assert (span.attributes or {}).get(HASHED_MEDIA) == 1
        assert (span.request_bytes, span.cost) == (len(here.host.bodies[-1]), pytest.approx(0.0))
        assert len(raw(exchange.request_body)) < 600
        (file,) = media(turn)
        assert file["sha256"] == hashlib.sha256(sound()).hexdigest()
        assert (file["bytes"], file["type"], texts(turn)) == (32044, "audio/x-wav", [SAID])
        answer = await sdk.audio.speech.create(model="tts-1", voice="ash", input="Hello")
        assert answer.content == SOUND
        span, exchange, turn = await here.recorded()
        assert len(raw(exchange.response_body)) == sum(chunk.size for chunk in exchange.chunks) < 200
        assert media(turn)[0]["sha256"] == hashlib.sha256(SOUND).hexdigest()
        _ = await sdk.images.generate(model="gpt-image-1", prompt="A fox")
        span, exchange, turn = await here.recorded()
        assert (media(turn)[0]["sha256"], span.response_bytes > 1000 > len(raw(exchange.response_body))) == (
            (hashlib.sha256(PNG).hexdigest(), True)
        )


async def test_texts_of_forms_are_masked(tmp_path: Path, http: ClientSession) -> None:
    rules = '[[masking]]\nname = "card"\npattern = "4[0-9]{15}"\n[[masking]]\nname = "who"\npaths = ["user"]\n'
    async with world(tmp_path, http, rules) as here, here.sdk as sdk:
        _ = await sdk.audio.transcriptions.create(
            model="whisper-1",
            file=("a.wav", sound()),
            prompt=f"Card 4111111111111111 and {KEY}",
            extra_body={"user": "Ada"},
        )
        span, exchange, turn = await here.recorded()
    assert b"4111111111111111" in here.host.bodies[-1]
    assert texts(turn)[0] == f"Card {'*' * 16} and {'*' * len(KEY)}"
    assert turn.sampling["user"] == "***"
    assert sound() in raw(exchange.request_body)
    assert (span.attributes or {}).get(MASKED) == {"card": 1, "who": 1}


def test_a_call_that_orders_a_video_is_not_sent_twice() -> None:
    assert [may_repeat("POST", by_name(name)) for name in ("speech", "images", "videos")] == [True, True, False]
