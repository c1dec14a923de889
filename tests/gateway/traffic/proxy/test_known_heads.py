"""What was decided for a head that comes again: calls go as they would without that memory."""

from __future__ import annotations

import re
import time
from random import Random

import pytest
from fakes.odd import Connection, odd, request, send, step
from fakes.raw import chunk, events_head, get, post, reply
from fakes.rig import CHAT, GOOD, Inside, Within
from fakes.waiting import until

from penstock.gateway.tools import servers
from penstock.gateway.wire.http.request import KnownHeads

PATHS = (
    "/rollout/r{}/attempt/a1/v1/chat/completions", "/rollout/r{}/v1/messages", "/v1/chat/completions?x={}",
    "/rollout/r{}/agent/one/v1/embeddings", "/rollout/r{}/attempt/.{}/v1/chat/completions", "/rollout/r{}/v1/models",
    "/rollout/r{}/attempt/a1/rewards", "/api/nothing", "/", "/rollout/r{}/v1/x", "/v1/../{}", "/sleep?{}",
)  # fmt: skip
HEADERS = (
    ("Authorization", "Bearer sk-mine"), ("x-api-key", "sk-ant-{}"), ("X-Stainless-Retry-Count", "{}"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b716920333{}-01"), ("x-request-id", "sk-ant-api03-{}"),
    ("baggage", "penstock.agent_id=a{}"), ("x-session-id", "s{}"), ("Accept-Encoding", "gzip"), ("origin", "http://{}"),
    ("x-penstock-token", "pst_{}"), ("Connection", "x-a, keep-alive"), ("X-A", "{}"),
    ("anthropic-version", "2023-06-01"), ("content-encoding", "identity"), ("Expect", "100-continue"),
    ("x-request-id", "abc{}"), ("x-claude-code-prev-tool-durations", "Bash={}"), ("x-claude-code-agent-id", "a{}"),
    ("x-claude-code-prev-tool-durations", "sk-ant-api03-{}"), ("x-codex-turn-metadata", '{{"turn_id":"pst_{}"}}'),
    ("x-codex-turn-metadata", '{{"turn_id":"t {}"}}'),
)  # fmt: skip
BODIES = (b'{"model":"m","messages":[]}', b'{"model":"other"}', b"{}", b"", b'{"model":1}')
N_HEADS, N_CALLS = 60, 240


def drawn(seed: int) -> list[bytes]:
    """Requests of which many have the same head, or nearly."""
    chance, heads, made = Random(seed), list[tuple[str, list[tuple[str, str]], str]](), list[bytes]()
    for _ in range(N_HEADS):
        path = chance.choice(PATHS[:3] if chance.random() < 0.5 else PATHS).format(chance.randrange(3), 1)
        headers = chance.choices(HEADERS, k=chance.randrange(5))
        heads.append((path, headers, chance.choice(["127.0.0.1", "127.0.0.1", "evil.test"])))
    for _ in range(N_CALLS):
        path, headers, host = chance.choice(heads)
        own = [(name, value.format(chance.randrange(3))) for name, value in headers]
        asked = get(path, own, host) if chance.random() < 0.1 else post(path, chance.choice(BODIES), own, host)
        made.append(asked)
    return made


def forget(*_: object) -> None:
    """Stands for `KnownHeads.add`: no head is known."""


async def played(rig: Inside, requests: list[bytes]) -> tuple[list[bytes], list[list[bytes]]]:
    """What clients and the upstream are sent."""
    answers: list[bytes] = []
    scripts = [[step for _ in requests for step in (request(), send(GOOD))] for _ in range(4)]
    async with rig.upstream(*scripts) as upstream:
        for one in requests:
            async with rig.client() as client:
                client.send(one)
                answers.append(re.sub(rb"Date: .*", b"", await client.message()))
        await until(lambda: not rig.gateway.proxy.running)
        return answers, [connection.requests for connection in upstream.connections]


@pytest.mark.parametrize("seed", [1, 2])
async def test_the_same_bytes_go_out_with_and_without(
    within: Within, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    routes = [{"model": "m", "upstream": "up", "alias": "theirs"}, {"model": "*", "upstream": ["up", "anthropic-up"]}]
    async with within(route=routes) as rig:
        requests = drawn(seed)
        with monkeypatch.context() as without:
            without.setattr(KnownHeads, "add", forget)
            expected = await played(rig, requests)
        for _ in range(2):
            answers, sent = await played(rig, requests)
            for asked, answer, wanted in zip(requests, answers, expected[0], strict=True):
                assert answer == wanted, asked
            assert sent == expected[1]
        assert len({answer.split(b" ")[1] for answer in expected[0]}) > 2


async def test_a_token_that_expires_stops_the_very_next_call(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    async with within() as rig:
        now = time.time()
        token = rig.gateway.auth.mint("r1", 60, now)
        call = post(CHAT, b'{"model":"m"}', [("Authorization", f"Bearer {token}")])
        async with rig.upstream([request(), send(GOOD), request(), send(GOOD)]), rig.client() as client:
            for _ in range(2):
                client.send(call)
                assert await client.message() == GOOD
            monkeypatch.setattr("penstock.gateway.traffic.calls.admission.time.time", lambda: now + 61)
            client.send(call)
            assert b"expired" in await client.message()


async def test_too_much_behind_a_request_is_refused_with_a_known_head_too(within: Within) -> None:
    body = b'{"model":"m","p":"%b"}' % (b"x" * 600)
    async with (
        within(limits={"request_bytes": 1000}) as rig,
        rig.upstream([request(), send(GOOD)] * 4),
        rig.client() as client,
    ):
        client.send(rig.call(body))
        assert await client.message() == GOOD
        client.send(rig.call(body) * 3)
        assert await client.message() == GOOD
        assert (await client.message()).startswith(b"HTTP/1.1 413 ")


async def test_of_two_headers_of_one_name_each_keeps_its_value(within: Within) -> None:
    async with within() as rig, rig.upstream([request(), send(GOOD), request(), send(GOOD)]) as upstream:
        sent = [rig.call(headers=[("x-request-id", f"a{n}"), ("x-request-id", f"b{n}")]) for n in (1, 2)]
        async with rig.client() as client:
            for one in sent:
                client.send(one)
                assert await client.message() == GOOD
        seen = (await upstream.connection(0)).requests
        assert [b"a%d" % n in got and b"b%d" % n in got for n, got in zip((1, 2), seen, strict=True)] == [True, True]


async def test_a_path_that_a_server_of_tools_has_not_named_lately_is_refused(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_NAMED", 1)
    listeners: list[int] = []

    def answer(made: Connection) -> None:
        if made.requests[-1].startswith(b"POST"):
            made.send(reply(202, b""))
            return
        listeners.append(len(listeners) + 1)
        made.send(events_head() + chunk(b"event: endpoint\ndata: /messages?s=%d\n\n" % listeners[-1]))

    async with (
        odd([request(), step(answer)] * 9) as server,
        within(mcp={"servers": {"old": {"url": server.url + "/sse"}}}) as rig,
        rig.client() as listening,
        rig.client() as other,
        rig.client() as client,
    ):
        listen = get(rig.path("/mcp/old"), [("Accept", "text/event-stream")], "localhost")
        call = post(rig.path("/mcp/old/@/messages?s=1"), b'{"jsonrpc":"2.0","method":"n/x"}', (), "localhost")
        listening.send(listen)
        _ = await listening.until(b"s=1\n")
        for _ in range(2):
            client.send(call)
            assert (await client.message()).startswith(b"HTTP/1.1 202 ")
        other.send(listen)
        _ = await other.until(b"s=2\n")
        client.send(call)
        assert b"has not named the path" in await client.message()
