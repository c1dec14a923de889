"""A thousand tool calls that end in every way: each is one span with its true outcome, and nothing of them is left."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from time import monotonic

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_busy import Busy, Player, Told, busy_server
from fakes.mcp_wire import Client, McpServer, call
from fakes.process import Gateway
from fakes.rig import inside
from fakes.tape import Tape
from fakes.waiting import until

from bench.procfs import children, memory
from penstock.gateway import app
from penstock.gateway.model.span import Span
from penstock.gateway.tools.call import McpCall

SESSIONS, CALLS, SIDE_BY_SIDE = 40, 25, 8
OLDER = 5
"""Every so many sessions one is of HTTP with SSE."""
SEED = 20261123
UNTOLD = ("tools/call hang", "tools/call half", "tools/call later")
"""Calls whose clients are not told their end, or in a stream that goes on and waits for no commit."""


def config(server: Busy, more: str = "") -> str:
    return f'{more}\n[mcp.servers.tools]\nurl = "{server.url}/mcp"\n[mcp.servers.old]\nurl = "{server.url}/sse"\n'


async def played(url: str, server: Busy, count: int, calls: int = CALLS) -> list[Player]:
    """All sessions, some of them side by side, each in a rollout of its own and on connections of its own."""
    turn, rng = asyncio.Semaphore(SIDE_BY_SIDE), Random(SEED)

    async def one(number: int, own: Random) -> Player:
        older = number % OLDER == 0
        async with turn, aiohttp.ClientSession() as http:
            address = f"{url}/rollout/load-{number}/attempt/a1/mcp/{'old' if older else 'tools'}"
            player = Player(server, http, address)
            await (player.play_older if older else player.play)(own, calls)
            return player

    return await asyncio.gather(*[one(number, Random(rng.random())) for number in range(count)])


def told(span: Span) -> Told:
    return span.name or "", str(span.status), span.error


async def check(tape: Tape, number: int, player: Player) -> None:
    """Exactly the spans of this session are on the tape."""
    wanted = Counter([*player.told.values(), *player.others])
    spans = await tape.spans(f"load-{number}", wanted.total())
    assert Counter(map(told, spans)) == wanted, f"session {number}"
    calls = {(span.attributes or {})["jsonrpc.request.id"]: told(span) for span in spans if span.kind == "tool"}
    assert calls == {str(id): one for id, one in player.told.items()}, f"session {number}"
    by_id = {span.span_id: span for span in spans}
    asking = [span for span in spans if span.name == "sampling/createMessage"]
    assert all(by_id[span.parent_id or ""].name == "tools/call ask" for span in asking)


def descriptors(pid: int) -> Counter[str]:
    """What is open, by kind."""
    found: Counter[str] = Counter()
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[str(one.readlink()).partition(":")[0]] += 1
        except FileNotFoundError:
            continue
    return found


async def figure(gateway: Gateway, http: aiohttp.ClientSession, name: str) -> float:
    async with http.get(f"{gateway.url}/metrics") as reply:
        lines = (await reply.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_thousand_calls_are_one_span_each_and_leave_nothing(start_gateway: StartGateway) -> None:
    async with busy_server() as server:
        gateway = await start_gateway(config(server))
        async with aiohttp.ClientSession() as http:
            assert await figure(gateway, http, "penstock_inflight_calls") == 0
        before = descriptors(gateway.pid)
        players = await played(gateway.url, server, SESSIONS)
        assert sum(len(player.told) for player in players) == SESSIONS * CALLS
        async with aiohttp.ClientSession() as http:
            tape = Tape(gateway.url, http)
            for number, player in enumerate(players):
                await check(tape, number, player)
            assert await figure(gateway, http, "penstock_inflight_calls") == 0
        assert server.asked == {}
    # Its connections to the server go with the server.

    async def is_as_before() -> bool:
        return descriptors(gateway.pid)["socket"] <= before["socket"]

    await until(is_as_before)
    assert children(gateway.pid) == []
    assert "Traceback" not in gateway.log


async def test_nothing_is_kept_of_sessions_that_are_over(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with busy_server() as server:
        servers = {"tools": {"url": server.url + "/mcp"}, "old": {"url": server.url + "/sse"}}
        async with inside(tmp_path, http, mcp={"servers": servers}) as made:
            players = await played(made.base.url, server, 10, 10)
            for number, player in enumerate(players):
                await check(made.tape, number, player)
            assert len(made.gateway.mcp.sessions) == 0
            assert not made.gateway.proxy.running


async def test_a_gateway_that_is_killed_loses_no_answer_and_doubles_none(start_gateway: StartGateway) -> None:
    """What it had answered is on the tape, since it was to be before it was told; the rest was interrupted. So may be
    calls whose end their clients were not told: they left, or their stream broke."""
    async with busy_server() as server:
        gateway = await start_gateway(config(server, 'tape = { record = "strict" }'))
        url, port = gateway.url, gateway.port
        async with aiohttp.ClientSession() as http:
            players = [Player(server, http, f"{url}/rollout/load-{number}/attempt/a1/mcp/tools") for number in range(8)]
            playing = [
                asyncio.ensure_future(player.play(Random(SEED + number), 1000)) for number, player in enumerate(players)
            ]

            async def is_under_way() -> bool:
                return sum(len(player.told) for player in players) >= 200

            await until(is_under_way)
            await gateway.kill()
            await asyncio.wait(playing)
            assert all(isinstance(one.exception(), aiohttp.ClientError | OSError) for one in playing)
            await gateway.start(port)
            # Their sessions go on where the server still knows them.
            for player in players:
                await player.one("echo", 2000)
            tape = Tape(gateway.url, http)
            for number, player in enumerate(players):
                spans = await tape.when(
                    f"load-{number}", "a1", lambda spans: any("2000" in str(s.attributes) for s in spans)
                )
                calls = [span for span in spans if span.kind == "tool"]
                ids = Counter(int((span.attributes or {})["jsonrpc.request.id"]) for span in calls)
                assert set(ids.values()) == {1}
                assert player.told.keys() <= ids.keys() <= player.began
                for span in calls:
                    wanted = player.told.get(int((span.attributes or {})["jsonrpc.request.id"]))
                    assert span.status != "open"
                    if wanted is not None and not (span.name in UNTOLD and span.status == "interrupted"):
                        assert told(span) == wanted


# Streams that only listen: nothing ends them but their two ends, and very many cost little ----------------------------


DAY, LATE = 86_400.0, 3600.0
"""Seconds; nothing is late by itself while the test runs."""
STREAMS = 400
MOST = 32 << 10
"""Bytes of memory that a stream may cost here. 10,000 of them cost 12 KB each: python -m bench.mcp_streams."""


async def test_no_clock_ends_a_stream_that_listens(
    tmp_path: Path, http: aiohttp.ClientSession, server: McpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the sweep for calls, nor those for sessions, for clients and for connections, a day later."""
    servers = {"tools": {"url": server.url, "first_byte_timeout": LATE}}
    monkeypatch.setattr(app, "CLIENT_S", LATE)
    async with inside(tmp_path, http, mcp={"servers": servers}) as made:
        client = Client(f"{made.base.url}/rollout/r1/attempt/a1/mcp/tools", http, {})
        await client.open()
        async with client.listen() as stream:
            await server.listening.wait()
            hanging = asyncio.ensure_future(client.say(call("hang")))
            _ = await made.tape.open_span("r1", name="tools/call hang")
            (listening, _) = made.gateway.proxy.running
            assert isinstance(listening, McpCall)
            later = monotonic() + DAY
            made.gateway.proxy.sweep(later)
            made.gateway.mcp.sessions.sweep(later)
            made.gateway.mcp.servers.expire(later)
            assert (await hanging)[0] == 504, "any other call is late by then"
            assert list(made.gateway.proxy.running) == [listening]
            assert not listening.client.overdue(later, LATE)
            server.tell({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
            assert b"list_changed" in await stream.content.readuntil(b"\n\n")


async def test_a_stream_that_listens_costs_little(
    start_gateway: StartGateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    gateway = await start_gateway(f'[mcp.servers.tools]\nurl = "{server.url}"\n')
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as many, AsyncExitStack() as open_streams:
        clients = [Client(f"{gateway.address(f'r{number}')}/mcp/tools", many, {}) for number in range(STREAMS)]

        async def listen(some: list[Client]) -> None:
            await asyncio.gather(*[one.open() for one in some])
            for one in some:
                stream = await open_streams.enter_async_context(one.listen())
                assert stream.status == 200

        # The first ones bring along what is needed once.
        await listen(clients[:100])
        before = memory(gateway.pid).anonymous
        await listen(clients[100:])
        each = (memory(gateway.pid).anonymous - before) * (1 << 20) / (STREAMS - 100)
    assert each < MOST, f"{each / 1024:.1f} KB a stream"
