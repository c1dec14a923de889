"""The plan of a call is a value, and a feature plugs in without the plan or the call knowing of it."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
from fakes.odd import gone, request, send
from fakes.raw import body_of, reply
from fakes.rig import inside

from penstock.gateway.calls.address import Address
from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.calls.record import Record
from penstock.gateway.dialects import find
from penstock.gateway.http.request import Request
from penstock.gateway.proxy.parts import Part, Send
from penstock.gateway.proxy.plan import plan
from penstock.gateway.upstream_settings import Route

ROUTES = [{"model": "small", "upstream": "up", "alias": "qwen", "train": True}]
BODY = b'{"model":"small","messages":[{"role":"user","content":"hi"}]}'
CHAT = "/v1/chat/completions"


def asked(body: bytes) -> tuple[Admitted, Request]:
    """A call that has just come."""
    made = Request()
    made.method, made.target = "POST", CHAT.encode()
    made.headers = [(b"accept-encoding", b"Accept-Encoding", b"gzip")]
    return Admitted(Address("r"), find("POST", CHAT), CHAT, body), made


async def test_a_plan_says_where_a_call_goes_and_leaves_the_request_alone(
    http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with inside(tmp_path, http, route=ROUTES) as made:
        shared = made.gateway.proxy
        call, came = asked(BODY)
        headers = list(came.headers)
        decided = plan(shared, call, came)
        assert isinstance(decided, Send)
        assert [pool.name for pool in decided.pools] == ["up"]
        assert json.loads(decided.body)["model"] == "qwen"
        assert decided.captured == ("return_token_ids", "logprobs")
        assert decided.headers == [(b"accept-encoding", b"Accept-Encoding", b"identity")]
        assert (call.body, came.headers) == (BODY, headers)
        other, came = asked(BODY.replace(b"small", b"large"))
        decided = plan(shared, other, came)
        assert isinstance(decided, Send)
        assert (decided.body, decided.parts, decided.headers) == (other.body, [], came.headers)


class Counting(Part):
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def ending(self, record: Record, status: str) -> None:
        self.seen.append(f"ending {status}")
        record.attributes = {**record.attributes, "planted": "yes"}

    def completed(self, record: Record, token_ids: bool) -> None:
        self.seen.append("completed")

    def handed_over(self, record: Record) -> None:
        self.seen.append("handed over")


class Planted:
    """A feature of calls with a route."""

    def __init__(self) -> None:
        self.part = Counting()

    def plan(self, send: Send, route: Route | None) -> None:
        if route is not None:
            send.body = send.body.replace(b"hi", b"HI")
            send.parts.append(self.part)


async def test_a_feature_plugs_in_at_one_place(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    planted = Planted()
    async with inside(tmp_path, http, route=[{"model": "small", "upstream": "up"}]) as made:
        made.gateway.proxy.features = (planted,)
        async with made.upstream([request(), send(reply(200, b"{}")), gone()]) as upstream, made.client() as client:
            client.send(made.call(BODY))
            await client.message()
            assert b'"content":"HI"' in body_of((await upstream.connection(0)).requests[0])
        span = await made.span()
        assert span.attributes == {"planted": "yes"}
    assert planted.part.seen == ["ending ok", "completed", "handed over"]
