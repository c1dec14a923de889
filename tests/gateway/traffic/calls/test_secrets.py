"""Planted secrets turn up nowhere: not in the tape's files, not in what is read of it, not in logs or errors."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.odd import Script, close, request, send, wait
from fakes.raw import body_of, chunk, connect, get, head, post, reply
from fakes.rig import CHAT, MESSAGES, Base, Rig, based
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.model.turn import Side
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.traffic.calls.call_record import BufferUsage, CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.wire.dialects import OPAQUE
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import HttpRequest

# Where a key is found by its value, nothing in it tells that it is one.
KEYS = {
    "Authorization": "Bearer PLANTED-authorization-1f6c",
    "x-api-key": "sk-ant-PLANTED-x-api-key-1f6c",
    "api-key": "PLANTED-api-key-1f6c",
    "X-Goog-Api-Key": "AIza-PLANTED-goog-1f6c",
    "Cookie": "session=PLANTED-cookie-1f6c",
    "Proxy-Authorization": "Basic PLANTED-proxy-1f6c",
    "X-Amz-Security-Token": "PLANTED-amz-1f6c",
    "Referer": "https://x/?api_key=PLANTED-referer-1f6c",
}
QUERY = "?key=PLANTED-query-key-1f6c&api_key=PLANTED-query-api-key-1f6c&pin=PLANTED-1&model=kept"
"""The last is too short to be looked for by its value."""
ANSWERED = [("Set-Cookie", "id=PLANTED-set-cookie-1f6c; Path=/"), ("Location", "https://x/?sig=PLANTED-sig-1f6c")]
MARK = b"PLANTED-"
LOG = '[log]\nformat = "{}"\nlevel = "debug"\ncalls = true\n'
UPSTREAM_KEY, ADMIN_KEY = "PLANTED-upstream-1f6c", "PLANTED-admin-1f6c"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


ENV = {"UP": UPSTREAM_KEY, "PENSTOCK_ADMIN_KEY": ADMIN_KEY}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    with based(tmp_path_factory.mktemp("keyed"), LOG.format("json"), upstream_config='key_env = "UP"', env=ENV) as made:
        yield made


async def logged(rig: Rig, spans: int) -> bytes:
    """The log, once it has the lines of so many calls of the rollout; more fail the test."""
    own = rig.rollout.encode()

    async def told() -> bool:
        lines = rig.base.log_path.read_bytes().splitlines()
        return sum(b"penstock.calls" in line and own in line for line in lines) >= spans

    await until(told)
    log = rig.base.log_path.read_bytes()
    assert sum(b"penstock.calls" in line and own in line for line in log.splitlines()) == spans
    return log


def tape_of(base: Base) -> bytes:
    return b"".join(path.read_bytes() for path in (base.data / "tape").iterdir())


@pytest.mark.slow
async def test_nothing_planted_is_found(rig: Rig, http: aiohttp.ClientSession, tmp_path: Path) -> None:
    with based(tmp_path, LOG.format("text"), upstream_config="", env=ENV) as plain:
        for one in (Rig(plain, Tape(plain.url, http), "secret"), rig):
            async with http.post(one.base.url + "/api/tokens", json={"rollout": one.rollout}, headers=ADMIN) as made:
                token = (await made.json())["token"]
            assert MARK not in await provoke(one, token) + await read_everything(one)
            with Store(one.base.data, readonly=True) as store:
                spans = list(store.spans(one.rollout))
                read = b"".join(repr((span, store.exchange(span))).encode() for span in spans)
            assert len(spans) >= 6
            for found in (await logged(one, len(spans)), tape_of(one.base), read):
                assert MARK not in found
                assert token.encode() not in found
            # Masked, not dropped: one sees that they were there.
            assert b"('Cookie', '***')" in read
            assert b"model=kept" in read


async def test_what_providers_and_agents_repeat(rig: Rig) -> None:
    """The gateway's key does not reach the agent in an error or a redirection, and nobody's reaches the tape."""
    for status in (200, 401, 302):
        for answer, wanted in zip(answers(status), answers(status, GONE.decode()), strict=True):
            async with rig.upstream([request(), *map(send, answer)]) as upstream, rig.client() as client:
                client.send(post(rig.path(), SAID, [("Authorization", f"Bearer {AGENT_KEY}")]))
                got, sent = await client.message(), b"".join(answer)
                assert (await upstream.connection(0)).requests[0].endswith(SAID)
            if status == 200:
                assert got == sent
            elif b"gzip" in sent:
                assert body_of(got) == gzip.decompress(wanted[-1])
            else:
                assert got == b"".join(wanted)
                assert len(got) == len(sent)
    printed = json.dumps({"events": [{"name": "stdout", "attributes": {"text": PRINTED}}]}).encode()
    async with rig.client() as client:
        client.send(post(rig.path("/events"), printed))
        assert b" 200 " in await client.message()
    outcome = {"reason": PRINTED, "output": {"env": [PRINTED]}}
    finished = {"status": "failed", "outcome": outcome, "rewards": [{"value": 0.0, "reason": PRINTED}]}
    url = f"{rig.base.url}/api/rollouts/{rig.rollout}/attempts/a1/finish"
    async with rig.tape.http.post(url, json=finished, headers=ADMIN) as done:
        assert done.status == 200, await done.text()
    told = await read_everything(rig, 14)
    assert UPSTREAM_KEY.encode() not in told
    assert AGENT_KEY.encode() not in told
    calls = f"/api/rollouts/{rig.rollout}/attempts/a1/spans"
    asked, answered, packed = [await read(rig, f"{calls}/{it}") for it in ("1/request", "1/response", "4/response")]
    assert asked == SAID.replace(AGENT_KEY.encode(), b"*" * len(AGENT_KEY)).replace(UPSTREAM_KEY.encode(), GONE)
    assert len(answered) == len(ECHOED)
    assert json.loads(packed)["error"]["message"].startswith("Incorrect API key: ****")
    with Store(rig.base.data, readonly=True) as store:
        kept = [(span, store.exchange(span)) for span in store.spans(rig.rollout)]
    for found in (await logged(rig, 12), tape_of(rig.base), repr(kept).encode()):
        assert MARK not in found
    for span, exchange in kept[:12]:
        assert exchange is not None
        assert sum(chunk.size for chunk in exchange.chunks) == len(exchange.response_body)
        if span.sequence in (4, 8, 12):
            assert ("Content-Encoding", "identity") in exchange.response_headers


async def test_a_call_that_still_runs_shows_none(rig: Rig) -> None:
    """What the tape says of it before it has ended."""
    async with rig.upstream([request(), wait("end"), send(reply(200, b"{}"))]) as upstream, rig.client() as client:
        client.send(post(rig.path(CHAT + QUERY), SAID, KEYS.items()))
        while not (spans := await spans_of(rig)):
            pass
        place = f"/api/rollouts/{rig.rollout}/attempts/a1/spans/{spans[0]['sequence']}"
        told = b"".join([await read(rig, path) for path in ("/api/spans", place, place + "/request")])
        assert (spans[0]["status"], spans[0]["path"]) == ("open", f"{CHAT}?key=***&api_key=***&pin=***&model=kept")
        assert b"keys ***" in told
        for found in (told, tape_of(rig.base), rig.base.log.encode()):
            assert MARK not in found
        upstream.go("end")
        assert b" 200 " in await client.message()


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/realtime/client_secrets", '{"session":{"type":"realtime"},"value":"%s"}'),
        ("/v1/realtime/sessions?a=1", '{"object": "realtime.session", "client_secret": {"value": "%s"}}'),
        ("/v1/chatkit/sessions", '{"client_secret": "%s", "cut'),
    ],
)
async def test_a_key_that_an_answer_gives(rig: Rig, path: str, form: str) -> None:
    """The client gets it; the tape does not."""
    given = (form % "ek_PLANTED-68af296e8e408191a1120ab6").encode()
    packed = gzip.compress(given)
    script = [request(), send(reply(200, given)), request(), send(reply(200, packed, [("Content-Encoding", "gzip")]))]
    async with rig.upstream(script), rig.client() as client:
        for body in (given, packed):
            client.send(post(rig.path(path), b"{}", KEYS.items()))
            assert body_of(await client.message()) == body
    assert b"ek_PLANTED" not in await read_everything(rig, 2)
    with Store(rig.base.data, readonly=True) as store:
        kept = [store.exchange(span) for span in store.spans(rig.rollout)]
    hidden = given.replace(b"ek_PLANTED-68af296e8e408191a1120ab6", b"*" * 35)
    assert [one and one.response_body for one in kept] == [hidden, hidden]


async def test_what_a_provider_repeats_before_its_answer(rig: Rig) -> None:
    hints = head("HTTP/1.1 103 Early Hints", [("Link", f"</a>; key={UPSTREAM_KEY}")])
    async with rig.upstream([request(), send(hints), send(reply(200, b"{}"))]), rig.client() as client:
        client.send(rig.call())
        assert await client.exactly(len(hints)) == hints.replace(UPSTREAM_KEY.encode(), GONE)


AGENT_KEY = KEYS["Authorization"].removeprefix("Bearer ")
GONE = b"*" * len(UPSTREAM_KEY)
ASKED = [{"role": "user", "content": f"keys {AGENT_KEY} {UPSTREAM_KEY}"}]
SAID = json.dumps({"model": f"m-{AGENT_KEY}", "messages": ASKED}).encode()
ECHOED = json.dumps({"error": {"message": f"Incorrect API key: {UPSTREAM_KEY} / {AGENT_KEY}", "code": "k"}}).encode()
PRINTED = f"OPENAI_API_KEY={UPSTREAM_KEY}"


def answers(status: int, own: str = UPSTREAM_KEY) -> list[list[bytes]]:
    """An answer with both keys, in reads: with its length, in chunks that cut the keys apart, of an API that names the
    model after the key, and compressed. `own`: what stands in the place of the gateway's key."""
    line, seen = f"HTTP/1.1 {status} X", [("X-Seen", f"with {own}"), ("X-Agent", AGENT_KEY)]
    at = [ECHOED.index(UPSTREAM_KEY.encode()) + 9, ECHOED.index(AGENT_KEY.encode()) + 5]
    echoed = ECHOED.replace(UPSTREAM_KEY.encode(), own.encode())
    pieces = [echoed[: at[0]], echoed[at[0] : at[1]], echoed[at[1] :]]
    plain = head(line, [*seen, ("Content-Length", str(len(echoed)))])
    chunked = head(line, [*seen, ("Transfer-Encoding", "chunked"), ("Trailer", "X-Key")])
    named = json.dumps({"id": own, "model": f"m-{AGENT_KEY}", "choices": []}).encode()
    packed = gzip.compress(echoed, mtime=0)
    return [
        [plain + pieces[0], pieces[1], pieces[2]],
        [chunked, *map(chunk, pieces), b"0\r\n" + f"X-Key: {own}\r\n\r\n".encode()],
        [head(line, [("Content-Type", "application/json"), ("Content-Length", str(len(named)))]) + named],
        [head(line, [*seen, ("Content-Encoding", "gzip"), ("Content-Length", str(len(packed)))]), packed],
    ]


async def provoke(rig: Rig, token: str) -> bytes:
    """Calls that succeed, fail and are refused, all full of secrets; returns what the gateway itself answered."""
    script: Script = [request(), send(reply(200, b"{}", ANSWERED)), request(), send(reply(401, b"{}", ANSWERED))]
    script = [*script, request(), close()]
    broken: Script = [request(), close()]
    plain = [*KEYS.items(), ("X-Penstock-Token", token)]
    agents = [("Authorization", f"Bearer {token}"), ("Cookie", KEYS["Cookie"]), ("X-Odd", token)]
    said = b""
    for below in (CHAT, MESSAGES):
        async with rig.upstream(script, broken), rig.client() as client:
            for _ in range(2):
                client.send(post(rig.path(below + QUERY), b"{}", plain))
                assert token.encode() not in await client.message()
            async with rig.client() as other:
                other.send(post(rig.path(below + QUERY), b"{}", agents))
                said += await other.message()
    bad = "/rollout/a%20b/attempt/a1"
    forged = [("x-api-key", token[:-3] + "PLANTED-x")]
    for refused in (
        post(bad + CHAT + QUERY, b"{}", plain),
        post(f"/rollout/other/attempt/a1{CHAT}{QUERY}", b"{}", plain),
        post(rig.path(CHAT + QUERY), b"{}", forged),
        head(f"GET https://u:PLANTED-user@x/{QUERY} HTTP/1.1", [("Host", "h"), *KEYS.items()]),
        head(f"GET /x{QUERY} HTTP/3.9", [("Host", "h"), *KEYS.items()]),
        head(f"POST {rig.path(CHAT + QUERY)} HTTP/1.1", [*KEYS.items(), ("Bad Name", "PLANTED-bad")]),
        get("/api/nothing" + QUERY, KEYS.items(), host="127.0.0.1"),
        get("/api/rollouts" + QUERY, [("Authorization", "Bearer PLANTED-wrong")], host="127.0.0.1"),
    ):
        async with connect(rig.base.url) as client:
            client.send(refused)
            said += await client.message()
    return said


async def read_everything(rig: Rig, least: int = 6) -> bytes:
    """Every answer of the control API about the rollout, once it has so many spans."""
    spans: list[dict[str, Any]] = []
    while len(spans) < least or any(span["status"] == "open" for span in spans):
        spans = await spans_of(rig)
    own = f"/api/rollouts/{rig.rollout}"
    paths = ["/api/rollouts", own, f"{own}/attempts", f"{own}/spans", "/api/spans", "/api/stats", "/metrics"]
    paths += ["/api/changes?follow=false", "/api/openapi.json", "/api/docs"]
    for span in spans:
        place = f"{own}/attempts/{span['attempt']}/spans/{span['sequence']}"
        paths += [place, *([place + "/request", place + "/response"] if span["kind"] == "llm" else [])]
    return b"".join([await read(rig, path) for path in paths])


async def spans_of(rig: Rig) -> list[dict[str, Any]]:
    return json.loads(await read(rig, f"/api/spans?filter=rollout%3D{rig.rollout}"))["spans"]


async def read(rig: Rig, path: str) -> bytes:
    async with rig.tape.http.get(rig.base.url + path, headers=ADMIN) as response:
        assert response.status == 200, await response.text()
        return await response.read()


def test_what_another_party_was_told_has_none() -> None:
    """An agent whose call was translated, or an engine: its key is the one of the headers that came."""
    request = HttpRequest()
    request.method, request.headers = "POST", [(b"x-api-key", b"x-api-key", b"Bearer " + AGENT_KEY.encode())]
    redactor, held = Redactor(own_secrets([UPSTREAM_KEY])), BufferUsage(1 << 20)
    record = CallRecord(CallRequest(CallAddress("r"), OPAQUE, "/", b"{}"), request, redactor, 1 << 20, held)
    request.headers = [(b"authorization", b"Authorization", b"Bearer " + request.headers[0][2])]
    path = f"/v1/messages?of={AGENT_KEY}"
    record.sides = (Side(who="agent", dialect="messages", path=path, request_body=SAID, response_body=ECHOED),)
    record.set_own_answer(200, b"{}")
    record.status, record.end_ns = "ok", 1
    entry = record.entry(final=True)
    assert entry is not None
    assert isinstance(entry.body, StoredBody)
    (kept,) = entry.body.sides
    assert [len(it) for it in (kept.path, kept.request_body, kept.response_body)] == [len(path), len(SAID), len(ECHOED)]
    assert MARK not in repr(kept).encode()


def test_the_mark_is_in_every_secret() -> None:
    """The search above would find each of them."""
    assert all("PLANTED-" in value for value in [*KEYS.values(), UPSTREAM_KEY, ADMIN_KEY])
