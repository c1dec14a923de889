"""A provider of media: speaks OpenAI's calls for sound, images, videos and embeddings on the wire."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from fakes.web_site import event_stream, everywhere, site

SOUND = b"ID3\x04" + bytes(range(256)) * 40
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
SAID = "The quick brown fox."
HEARD = {
    "type": "tokens", "input_tokens": 120, "input_token_details": {"audio_tokens": 110, "text_tokens": 10},
    "output_tokens": 7, "total_tokens": 127,
}  # fmt: skip
DRAWN = {
    "input_tokens": 60, "input_tokens_details": {"image_tokens": 50, "text_tokens": 10}, "output_tokens": 200,
    "total_tokens": 260,
}  # fmt: skip
SPOKEN = {"input_tokens": 9, "output_tokens": 80, "total_tokens": 89}
SRT = "1\n00:00:00,000 --> 00:00:01,500\nThe quick brown fox.\n"
VECTOR = base64.b64encode(bytes(32)).decode()


@dataclass(slots=True)
class MediaHost:
    """What came, and what it answers next instead of its own."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list[bytes])
    failing: tuple[int, bytes, str] | None = None
    """Status, body and content type."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(body)
        if self.failing is not None:
            status, said, kind = self.failing
            return web.Response(status=status, body=said, content_type=kind)
        operation = request.path.removeprefix("/v1/")
        asked: dict[str, Any] = {}
        if request.content_type == "multipart/form-data":
            found = re.findall(rb'name="(\w+)"\r\n\r\n([^\r\n]*)\r\n', body)
            asked = {name.decode(): value.decode() for name, value in found}
        elif body:
            asked = json.loads(body)
        if str(asked.get("stream", "")).lower() == "true" or asked.get("stream_format") == "sse":
            return await self._stream(request, list(_events(operation, asked)))
        made = _answer(operation, asked)
        return made if isinstance(made, web.Response) else web.json_response(made)

    async def _stream(self, request: web.Request, events: Iterable[dict[str, Any]]) -> web.StreamResponse:
        answer = await event_stream(request)
        for event in events:
            await answer.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await answer.write_eof()
        return answer


def _answer(operation: str, asked: dict[str, Any]) -> Any:
    match operation:
        case "audio/speech":
            return web.Response(body=SOUND, content_type="audio/mpeg")
        case "audio/transcriptions" | "audio/translations":
            return _transcript(asked)
        case "embeddings":
            coded = asked.get("encoding_format") == "base64"
            vector = {"object": "embedding", "index": 0, "embedding": VECTOR if coded else [0.0] * 8}
            usage = {"prompt_tokens": 5, "total_tokens": 5}
            return {"object": "list", "model": asked["model"], "data": [vector], "usage": usage}
        case "videos":
            known = {"id": "video_1", "object": "video", "status": "queued", "progress": 0, "created_at": 1}
            return known | {"model": asked["model"], "seconds": asked.get("seconds", "4"), "size": "720x1280"}
        case _:
            made = {"b64_json": base64.b64encode(PNG).decode(), "revised_prompt": "a red fox"}
            many = int(asked.get("n", 1))
            return {"created": 1, "data": [made] * many, "output_format": "png", "usage": DRAWN}


def _transcript(asked: dict[str, Any]) -> Any:
    match asked.get("response_format"):
        case "text":
            return web.Response(text=SAID + "\n", content_type="text/plain")
        case "srt":
            return web.Response(text=SRT, content_type="text/plain")
        case "verbose_json":
            return {"text": SAID, "language": "en", "duration": 1.5, "usage": {"type": "duration", "seconds": 2}}
        case _:
            return {"text": SAID, "usage": HEARD}


def _events(operation: str, asked: dict[str, Any]) -> Iterable[dict[str, Any]]:
    match operation:
        case "audio/speech":
            for at in range(0, len(SOUND), 3000):
                yield {"type": "speech.audio.delta", "audio": base64.b64encode(SOUND[at : at + 3000]).decode()}
            yield {"type": "speech.audio.done", "usage": SPOKEN}
        case "audio/transcriptions":
            for piece in SAID.split(" "):
                yield {"type": "transcript.text.delta", "delta": piece + " "}
            yield {"type": "transcript.text.done", "text": SAID, "usage": HEARD}
        case _:
            kind = "image_generation" if operation == "images/generations" else "image_edit"
            made = {"b64_json": base64.b64encode(PNG).decode(), "created_at": 1, "size": "1024x1024"}
            made |= {"quality": "low", "background": "auto", "output_format": "png"}
            yield {"type": f"{kind}.partial_image", "partial_image_index": 0} | made
            yield {"type": f"{kind}.completed", "usage": DRAWN} | made


@asynccontextmanager
async def media_host() -> AsyncGenerator[MediaHost]:
    """Serves until it ends."""
    host = MediaHost()
    async with site(everywhere(host.handle)) as url:
        host.url = url + "/v1"
        yield host
