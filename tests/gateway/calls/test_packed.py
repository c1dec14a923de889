"""Requests that come with a content encoding: large ones are unpacked where nobody else waits for that."""

from __future__ import annotations

import gzip
import json
import random
import threading
from pathlib import Path

import aiohttp
import pytest
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.odd import request, send
from fakes.raw import header_fields, post, reply
from fakes.rig import CHAT, inside
from fakes.waiting import until

from penstock.gateway.calls import joining
from penstock.gateway.calls.admission import PACKED
from penstock.gateway.client.client import Client
from penstock.gateway.model.audit import Said

ANSWER = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'
NOISE = random.Random(1).randbytes(2 * PACKED).hex()


def body(said: str) -> bytes:
    """A request, packed."""
    asked = {"model": "m", "messages": [{"role": "user", "content": said}]}
    return gzip.compress(json.dumps(asked).encode())


async def test_large_ones_are_unpacked_on_the_thread(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[tuple[bool, bool]] = []
    real = joining.decode_body

    def noting(packed: bytes, names: str | None) -> tuple[bytes, str | None]:
        on_loop = threading.current_thread() is threading.main_thread()
        unpacked.append((len(packed) > PACKED, on_loop))
        return real(packed, names)

    monkeypatch.setattr(joining, "decode_body", noting)
    large = body(NOISE)
    calls = [
        ("/rollout/r1/attempt/a1" + CHAT, body("few")),
        ("/rollout/r1/attempt/a1" + CHAT, large),
        (CHAT + "?r2", large),
        (CHAT + "?r3", large[:-9]),
    ]
    script = [step for _ in calls for step in (request(), send(reply(200, ANSWER)))]
    async with inside(tmp_path, http) as rig, rig.upstream(script) as upstream, rig.client() as client:
        for path, sent in calls:
            client.send(post(path, sent, [("Content-Encoding", "gzip")]))
            assert (await client.message()) == reply(200, ANSWER)
        arrived = (await upstream.connection(0)).requests
        assert [one.endswith(sent) for one, (_, sent) in zip(arrived, calls, strict=True)] == [True] * 4
        few, many = await rig.tape.spans("r1", 2)
        assert (few.model, many.model) == ("m", "m")
        others: list[str | None] = []
        while len(others) < 2:
            page = await rig.tape.get("/api/spans")
            others = [span.get("model") for span in page["spans"] if span["path"][-2:] in ("r2", "r3")]
        assert sorted(others, key=str) == [None, "m"], "what is cut off passes unread"
    assert unpacked == [(False, True), (True, False), (True, False), (True, False)]


async def test_one_whose_version_is_taken_away_while_it_waits_goes_as_it_came(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """It was unpacked for the version that it is not given after all."""
    async with inside(tmp_path, http) as rig, Client(rig.base.url) as operator, rig.client() as client:
        traffic = Traffic(rig.base.url, http, operator)
        await operator.add_version("travel", prompt(STABLE, sent=True))
        await operator.add_version("travel", prompt(CANDIDATE))
        release = await traffic.start("travel", "v2", policy(0.999999))
        gate = rig.gateway.proxy.pools["up"].gate
        gate.pause(30)
        said = [{"role": "system", "content": traffic.text}, {"role": "user", "content": "Hello"}]
        asked = {"model": "m", "messages": said}
        packed = gzip.compress(json.dumps(asked).encode())
        client.send(rig.call(packed, [("Content-Encoding", "gzip")]))

        async def waits() -> bool:
            return gate.waiting == 1

        await until(waits)
        await operator.decide(release.id, "rollback", Said(who="ann"))
        async with rig.upstream([request(), send(reply(200, ANSWER))]) as upstream:
            gate.open()
            assert await client.message() == reply(200, ANSWER)
        (arrived,) = upstream.connections[0].requests
        assert arrived.endswith(packed)
        assert header_fields(arrived.partition(b"\r\n\r\n")[0])["content-encoding"] == "gzip"
        assert await rig.tape.raw(await rig.span(), "request") == packed
