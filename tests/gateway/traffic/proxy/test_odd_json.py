"""Bodies that strict decoders refuse: they go where their model says, count, are captured and joined as any other; what
names no model for sure is refused where that matters, and reaches nobody."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from fakes.rig import CHAT, Within
from fakes.tape import Tape
from fakes.web_site import everywhere, site

SAID: dict[str, Any] = {
    "id": "c1",
    "object": "chat.completion",
    "model": "served",
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "input_tokens": 14, "output_tokens": 45},
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
}
ROUTES: dict[str, Any] = {
    "route": [
        {"model": "policy*", "upstream": "engine", "alias": "real", "train": True},
        {"model": "whisper*", "upstream": "engine", "alias": "large v3"},
        {"model": "claude*", "upstream": "engine"},
    ],
    "budget": [{"name": "cap", "unit": "calls", "limit": 1, "per": "rollout", "model": "policy*", "window": "total"}],
}


@dataclass
class Upstream:
    """Keeps what it was sent."""

    url: str = ""
    log: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])
    answer: bytes = json.dumps(SAID).encode()

    async def handle(self, request: web.Request) -> web.Response:
        self.log.append((request.path, await request.read()))
        return web.Response(body=self.answer, content_type="application/json")


@asynccontextmanager
async def upstream() -> AsyncGenerator[Upstream]:
    made = Upstream()
    async with site(everywhere(made.handle)) as made.url:
        yield made


@dataclass
class Rig:
    url: str
    first: Upstream
    engine: Upstream
    tape: Tape

    async def post(self, path: str, body: bytes, *types: str) -> tuple[int, Any]:
        headers = [("content-type", one) for one in types or ("application/json",)]
        async with self.tape.http.post(self.url + path, data=body, headers=headers) as answer:
            return answer.status, json.loads(await answer.read())


@asynccontextmanager
async def rigged(within: Within, **routes: Any) -> AsyncGenerator[Rig]:
    async with upstream() as first, upstream() as engine:
        upstreams = [
            {"name": "first", "base_url": f"{first.url}/v1"},
            {"name": "engine", "base_url": f"{engine.url}/v1"},
            {"name": "claude", "base_url": first.url, "dialect": "anthropic"},
        ]
        async with within(upstream=upstreams, **routes) as made:
            yield Rig(made.base.url, first, engine, made.tape)


@pytest.fixture
async def rig(within: Within) -> AsyncGenerator[Rig]:
    async with rigged(within, **ROUTES) as made:
        yield made


ODD: dict[str, bytes] = {
    "half": b'{"model":"policy-1","messages":[{"role":"user","content":"cut \\ud83d"}]}',
    "half-as-bytes": b'{"model":"policy-1","messages":[{"role":"user","content":"cut \xed\xa0\xbd"}]}',
    "no-utf8": b'{"messages":[{"role":"user","content":"caf\xe9"}],"model":"policy-1"}',
    "mark": b'\xef\xbb\xbf{"model":"policy-1","messages":[{"role":"user","content":"x"}]}',
    "twice": b'{"model":"other","messages":[{"role":"user","content":"x"}],"mod\\u0065l":"policy-1"}',
    "nan": b'{"temperature":NaN,"model":"policy-1","top_p":-Infinity,"messages":[{"role":"user","content":"x"}]}',
    "deep": b'{"x":%b%b,"model":"policy-1","messages":[{"role":"user","content":"x"}]}'
    % (b"[" * 10_000, b"]" * 10_000),
    "long": b'{"seed":%b,"model":"policy-1","messages":[{"role":"user","content":"x"}]}' % (b"1" * 5000),
}


async def test_odd_json_is_read_as_any_other(rig: Rig) -> None:
    for name, body in ODD.items():
        status, _ = await rig.post(f"/rollout/{name}/attempt/a1{CHAT}", body)
        assert (name, status, rig.first.log) == (name, 200, [])
        at = body.index(b"{") + 1
        wanted = b'%b"return_token_ids":true,"logprobs":true,%b' % (body[:at], body[at:])
        assert rig.engine.log[-1][1] == wanted.replace(b'"policy-1"', b'"real"')
        assert (await rig.post(f"/rollout/{name}/attempt/a1{CHAT}", body))[0] == 429
        span = (await rig.tape.spans(name, 2))[0]
        assert (span.model, span.model_served, span.upstream) == ("policy-1", "served", "engine")
        turn = (await rig.tape.detail(span)).turn
        assert turn is not None
        assert [message.role for message in turn.messages] == ["user"]
        assert bool(turn.problems) == (name == "deep")


async def test_odd_answers_are_read_and_cleaned(rig: Rig) -> None:
    for name, odd in (
        ("half", rb'"cut \ud83d"'),
        ("bytes", b'"\xed\xa0\xbd caf\xe9"'),
        ("deep", b"[" * 5000 + b"]" * 5000),
    ):
        kept = b'{"x":%b,"y":-Infinity,' % odd + json.dumps(SAID).encode()[1:]
        rig.engine.answer = kept.replace(b'"finish_reason"', b'"token_ids": [1, 2], "finish_reason"')
        url = f"{rig.url}/rollout/answer-{name}/attempt/a1{CHAT}"
        async with rig.tape.http.post(url, data=b'{"model":"policy-1","messages":[]}') as answer:
            assert await answer.read() == rig.engine.answer.replace(b"[1, 2]", b"null")
        (span,) = await rig.tape.spans(f"answer-{name}", 1)
        assert (span.status, span.finish, span.model_served) == ("ok", "stop", "served")
        assert span.usage is not None
        turn = (await rig.tape.detail(span)).turn
        assert turn is not None
        assert [part.text for part in turn.choices[0].message.parts] == ["hi"]


async def test_conversations_are_followed(rig: Rig) -> None:
    for start in ("cut \ud83d", "plain"):
        said = [{"role": "user", "content": start}]
        for step in range(3):
            body = json.dumps({"model": "m", "messages": said}).encode() + b" " * step
            assert (await rig.post(CHAT, body))[0] == 200
            said += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": str(step)}]
    await rig.tape.written()
    found = (await rig.tape.get("/api/rollouts"))["rollouts"]
    assert [one["totals"]["calls"] for one in found] == [3, 3]


async def test_what_names_no_model_for_sure_is_refused_where_that_matters(rig: Rig) -> None:
    for body, at in (
        (b'{"model":"policy-1","messages":[', "body"),
        (b"", "body"),
        (b"model=policy-1", "body"),
        ('{"model":"policy-1"}'.encode("utf-16"), "body"),
        (b'{"model":["policy-1"]}', "model"),
        (b'{"model":"policy-%b"}' % (b"x" * 300), "model"),
    ):
        status, said = await rig.post(f"/rollout/no/attempt/a1{CHAT}", body)
        assert (body, status, said["error"]["param"], said["error"]["code"]) == (body, 400, at, "unreadable")
        assert "`model`" in said["error"]["message"]
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, said = await rig.post(path, b'{"model":"claude-1')
        assert (status, said["type"], said["error"]["message"][:5]) == (400, "error", "body:")
    assert (rig.first.log, rig.engine.log) == ([], [])
    # It may be optional, and is not said at all.
    assert (await rig.post(CHAT, b'{"messages":[]}'))[0] == 200
    assert len(rig.first.log) == 1


async def test_nothing_is_refused_where_no_model_matters(within: Within) -> None:
    async with rigged(within) as rig:
        for body in (b'{"model":"policy-1","messages":[', b"model=x", b'{"model":7}'):
            assert (await rig.post(CHAT, body))[0] == 200
            assert rig.first.log[-1][1] == body


FILE = (
    b'\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + bytes(range(256)) * 50 + b"\r\n--XY"
)
MODEL = b'\r\nContent-Disposition: form-data; name="model"\r\n\r\n'
X, URLENCODED = "multipart/form-data; boundary=X", "application/x-www-form-urlencoded"
FORMS: dict[str, tuple[bytes, str, bytes]] = {
    "first": (b"--X" + FILE + b"\r\n--X" + MODEL + b"whisper-1\r\n--X--\r\n", X.replace("X", '"X"'), b"large v3"),
    "last": (b"preamble\r\n--X" + MODEL + b"whisper-1\r\n--X" + FILE + b"\r\n--X--", X.title(), b"large v3"),
    "urlencoded": (b"prompt=a%26model&mod%65l=whisper-1&n=1", URLENCODED, b"large+v3"),
}


async def test_the_model_of_a_form_counts(rig: Rig) -> None:
    rig.engine.answer = b'{"text": "hi", "usage": {"type": "tokens", "input_tokens": 14, "output_tokens": 45}}'
    for name, (body, kind, alias) in FORMS.items():
        assert (await rig.post(f"/rollout/{name}/attempt/a1/v1/audio/transcriptions", body, kind))[0] == 200
        assert (name, rig.engine.log[-1][1]) == (name, body.replace(b"whisper-1", alias))
        (span,) = await rig.tape.spans(name, 1)
        assert (span.model, span.upstream) == ("whisper-1", "engine")
        assert span.usage is not None
        assert (span.usage.input_tokens, span.usage.output_tokens) == (14, 45)
    twice = b"--X" + MODEL + b"whisper-1\r\n--X" + MODEL + b"other\r\n--X--\r\n"
    cut = b"--X" + MODEL + b"whisper-1"
    for body, kind in ((twice, X), (cut, X), (twice, "multipart/form-data"), (b"model=a&model=b", URLENCODED)):
        status, said = await rig.post("/v1/images/edits", body, kind)
        assert (status, said["error"]["param"]) == (400, "model")
    for types in ((X, "application/json"), ("application/json", X), (X, "multipart/form-data; boundary=Y")):
        status, said = await rig.post("/v1/images/edits", FORMS["first"][0], *types)
        assert (status, said["error"]["param"]) == (400, "model")
    assert rig.first.log == []
    assert (await rig.post("/v1/files", b"--X" + FILE + b"\r\n--X--", "multipart/form-data; boundary=X"))[0] == 200
    assert len(rig.first.log) == 1
