"""The limits of a server through a gateway: who waits, in which order, and who is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
from fakes.mcp_wire import Client, McpServer, answer, call, mcp_server
from fakes.mistakes import tells
from fakes.process import PATIENCE
from fakes.rig import Inside, inside
from fakes.waiting import until
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.model.answers import Stats
from penstock.gateway.model.settings import McpServer as Configured
from penstock.gateway.tools.call import McpCall
from penstock.gateway.tools.servers import BreakerState, Permit, ServerLimits
from penstock.gateway.traffic.proxy.call_lifecycle import CallState
from penstock.gateway.wire.http.request import UpstreamFault

LONG = 600.0
"""Seconds that do not pass while a test runs: that they are over is said with `Rig.late`."""


class Clock:
    """The breaker's clock, which the test drives."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A gateway in this process in front of a server with limits."""

    def __init__(self, made: Inside, server: McpServer, http: aiohttp.ClientSession) -> None:
        self.made, self.server = made, server
        self.client = Client(f"{made.base.url}{made.path('/mcp/tools')}", http, {})
        self.clock = self.limits.clock = Clock()

    @property
    def limits(self) -> ServerLimits:
        return self.made.gateway.mcp.servers.pools["tools"].limits

    def late(self, state: CallState, now: float | None = None) -> None:
        """Looks whether the calls in that state are late, at a moment when what has begun by now is."""
        now = monotonic() + LONG + 1 if now is None else now
        for one in list(self.made.gateway.proxy.running):
            if isinstance(one, McpCall) and one.state is state:
                one.check(now, now)

    async def say(self, tool: str, id: Any = 1) -> tuple[int, str]:
        """(HTTP status, the message of the error, or the text of the result)."""
        status, body = await self.client.say(call(tool, {"n": id}, id))
        if not body:
            return status, ""
        told = json.loads(body.rpartition(b"data: ")[2])
        assert told["id"] == id
        return status, told["error"]["message"] if "error" in told else told["result"]["content"][0]["text"]

    def begin(self, *tools: str) -> list[asyncio.Task[tuple[int, str]]]:
        return [asyncio.ensure_future(self.say(tool, number)) for number, tool in enumerate(tools, 1)]


@asynccontextmanager
async def limited(
    home: Path, http: aiohttp.ClientSession, record: str = "batched", **settings: Any
) -> AsyncGenerator[Rig]:
    async with mcp_server(sessions=False) as server:
        mcp = {"servers": {"tools": {"url": server.url, **settings}}}
        async with inside(home, http, mcp=mcp, tape={"record": record}) as made:
            yield Rig(made, server, http)


# Places --------------------------------------------------------------------------------------------------------------


async def test_calls_wait_in_their_order(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=2) as rig:
        first = rig.begin("hang", "hang")
        await until(lambda: len(rig.server.asked) == 2)
        waiting = list[asyncio.Task[tuple[int, str]]]()
        for number in range(20):
            waiting.append(asyncio.ensure_future(rig.say("echo", f"n{number}")))
            await until(lambda: rig.limits.waiting == len(waiting))
        assert len(rig.server.asked) == 2
        rig.server.let_go.set()
        assert {(await one)[0] for one in (*first, *waiting)} == {200}
        assert [json.loads(body)["id"] for *_, body in rig.server.asked[2:]] == [f"n{n}" for n in range(20)]
        assert (rig.limits.running, rig.limits.waiting) == (0, 0)
        spans = await rig.made.tape.spans("inside", 22)
        assert {span.status for span in spans} == {"ok"}


async def test_what_must_not_wait_does_not(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1) as rig:
        rig.server.sessions = True
        rig.server.open["s"] = asyncio.Queue()
        rig.client.headers["Mcp-Session-Id"] = "s"
        async with rig.client.post(call("ask")) as stream, rig.client.listen():
            asking = json.loads((await stream.content.readuntil(b"\n\n"))[6:])
            await asyncio.wait_for(rig.server.listening.wait(), PATIENCE)
            assert (rig.limits.running, rig.limits.waiting) == (1, 0)
            cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
            assert (await rig.client.say(cancelled))[0] == 202
            told = answer(asking, {"role": "assistant", "content": {"type": "text", "text": "yes"}})
            assert (await rig.client.say(told))[0] == 202
            assert b"yes" in await stream.read()
        assert rig.limits.running == 0


async def test_a_client_that_leaves_gives_up_its_place_in_the_row(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1) as rig:
        (first,) = rig.begin("hang")
        await until(lambda: rig.limits.running == 1)
        leaving, staying = rig.begin("echo", "echo")
        await until(lambda: rig.limits.waiting == 2)
        leaving.cancel()
        await until(lambda: rig.limits.waiting == 1)
        # One that has its place and leaves frees it.
        first.cancel()
        assert (await staying)[0] == 200
        assert [json.loads(body)["params"]["name"] for *_, body in rig.server.asked] == ["hang", "echo"]
        spans = await rig.made.tape.spans("inside", 3)
        assert sorted((span.status, span.error) for span in spans if span.error) == [("cancelled", "client_gone")] * 2


async def test_who_waits_in_vain_is_told_the_settings(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1, first_byte_timeout=LONG, breaker_failures=1) as rig:
        async with rig.client.post(call("ask")):
            late = asyncio.ensure_future(rig.say("echo", "late"))
            await until(lambda: rig.limits.waiting == 1)
            rig.late(CallState.WAITING)
            status, message = await late
        assert status == 503
        assert tells(message, "(mcp.servers.tools.max_concurrent = 1)", "600 s (mcp.servers.tools.first_byte_timeout)")
        assert rig.limits.breaker is not None
        assert rig.limits.breaker.state is BreakerState.CLOSED, "the server has done nothing wrong"
        await until(lambda: rig.made.gateway.measured().mcp_refused == {("tools", "busy"): 1})
        assert "busy" in {span.error for span in await rig.made.tape.spans("inside", 3)}


async def test_the_time_of_waiting_is_not_the_servers(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1, first_byte_timeout=LONG) as rig:
        async with rig.client.post(call("ask")):
            begun = monotonic()
            (second,) = rig.begin("hang")
            await until(lambda: rig.limits.waiting == 1 and monotonic() > begun + 0.5)
        await until(lambda: len(rig.server.asked) == 2)
        rig.late(CallState.SENT, begun + LONG + 0.4)
        assert rig.limits.running == 1, "it has waited for 0.5 s"
        rig.late(CallState.SENT)
        assert (await second)[0] == 504


async def test_a_gateway_that_stops_leaves_nobody_waiting(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1) as rig:
        calls = rig.begin("hang", "echo")
        await until(lambda: rig.limits.waiting == 1)
        for one in list(rig.made.gateway.proxy.running):
            one.give_up()
        assert (rig.limits.running, rig.limits.waiting) == (0, 0)
        assert all(isinstance(one, Exception) for one in await asyncio.gather(*calls, return_exceptions=True))


async def test_a_strict_gateway_keeps_the_limits(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, "strict", max_concurrent=1, breaker_failures=1) as rig:
        first, *rest = rig.begin("hang", "echo", "echo")
        await until(lambda: rig.limits.waiting == 2)
        rig.server.let_go.set()
        assert {(await one)[0] for one in (first, *rest)} == {200}
        assert [(await rig.say(tool))[0] for tool in ("busy", "echo")] == [503, 503]
        spans = await rig.made.tape.spans("inside", 5)
        assert sorted(span.error or "" for span in spans) == ["", "", "", "breaker", "http_503"]


# The breaker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tool", "why"), [("busy", "http_503"), ("breaks", "upstream_closed"), ("hang", "timeout")])
async def test_it_opens_and_one_probe_closes_it(
    http: aiohttp.ClientSession, tmp_path: Path, tool: str, why: str
) -> None:
    settings: dict[str, Any] = {"breaker_failures": 2, "first_byte_timeout": LONG}
    async with limited(tmp_path, http, **settings) as rig:
        for asked in (1, 2):
            (failing,) = rig.begin(tool)
            await until(lambda asked=asked: len(rig.server.asked) == asked)
            if tool == "hang":
                rig.late(CallState.SENT)
            assert (await failing)[0] >= 500
        asked = len(rig.server.asked)
        rig.clock.now += 20
        # At once: neither of the clocks goes on.
        status, message = await rig.say("echo", "x")
        assert (status, "server 'tools' is not asked" in message) == (503, True), message
        assert tells(message, "mcp.servers.tools.breaker_failures = 2")
        assert tells(message, f"failed 20.0 s ago: {why}", "the next one", "10.0 s")
        assert len(rig.server.asked) == asked
        # What is said without asking is refused, too: nothing goes to this server.
        async with rig.client.post({"jsonrpc": "2.0", "method": "notifications/initialized"}) as told:
            assert told.status == 503
        rig.clock.now += 10
        async with rig.client.listen() as listening:
            assert listening.status == 503, "a stream that listens is no probe"
        rig.server.let_go.set()
        assert [(await rig.say("echo"))[0] for _ in range(3)] == [200] * 3
        await until(lambda: rig.made.gateway.measured().mcp_refused == {("tools", "breaker"): 3})
        refused = [span for span in await rig.made.tape.spans("inside", 8) if span.error == "breaker"]
        assert [span.name for span in refused] == ["tools/call echo", "notifications/initialized", "listen"]


async def test_others_are_refused_while_one_tries(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, breaker_failures=1) as rig:
        assert (await rig.say("busy"))[0] == 503
        rig.clock.now += 30
        (probe,) = rig.begin("hang")
        await until(lambda: rig.limits.running == 1)
        await until(lambda: rig.made.gateway.measured().mcp_breaker[("tools",)] == BreakerState.PROBING)
        assert "one call tries it now" in (await rig.say("echo"))[1]
        # A probe whose client leaves tells nothing: the next one tries.
        probe.cancel()
        await until(lambda: rig.limits.running == 0)
        assert (await rig.say("busy"))[0] == 503
        assert "in 30.0 s" in (await rig.say("echo"))[1]
        await until(lambda: rig.made.gateway.measured().mcp_breaker[("tools",)] == BreakerState.OPEN)
        stats = Stats.model_validate(await rig.made.tape.get("/api/stats"))
        assert stats.servers["tools"].breaker == "open"


@pytest.mark.parametrize("tool", ["fails", "refused"])
async def test_what_a_tool_answers_does_not_open_it(http: aiohttp.ClientSession, tmp_path: Path, tool: str) -> None:
    async with limited(tmp_path, http, breaker_failures=1) as rig:
        assert [(await rig.say(tool))[0] for _ in range(3)] == [200] * 3


async def test_a_server_that_is_gone_opens_it_for_those_who_wait(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http, max_concurrent=1, breaker_failures=1, first_byte_timeout=LONG) as rig:
        (first,) = rig.begin("hang")
        await until(lambda: len(rig.server.asked) == 1)
        rest = rig.begin(*["echo"] * 50)
        await until(lambda: rig.limits.waiting == 50)
        rig.late(CallState.SENT)
        assert (await first)[0] == 504
        said = await asyncio.gather(*rest)
        assert {status for status, _ in said} == {503}
        assert len(rig.server.asked) == 1
        assert (rig.limits.running, rig.limits.waiting) == (0, 0)


async def test_without_settings_nothing_is_limited(http: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with limited(tmp_path, http) as rig:
        calls = rig.begin(*["hang"] * 50)
        await until(lambda: len(rig.server.asked) == 50)
        rig.server.let_go.set()
        assert {(await one)[0] for one in calls} == {200}
        assert [(await rig.say("busy"))[0] for _ in range(20)] == [503] * 20
        assert (await rig.say("echo"))[0] == 200


# Alone ---------------------------------------------------------------------------------------------------------------


class Waiting:
    """A call that goes as soon as it may."""

    def __init__(self, visit: Permit, then: Callable[[Permit], None]) -> None:
        self.visit, self.then = visit, then
        self.on_turn: Callable[[Waiting], None] = lambda one: None

    def on_open(self) -> None:
        self.on_turn(self)
        self.visit.acquire()
        self.then(self.visit)


@example(1, [("come", 0), ("come", 0), ("end", 0), ("come", 0)])
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["come", "end", "leave", "turn"]), st.integers(0, 9)), max_size=60),
)
def test_places_are_never_too_many_and_go_in_order(most: int, steps: list[tuple[str, int]]) -> None:
    async def live() -> None:
        limits = ServerLimits("s", Configured(url="http://x", max_concurrent=most))
        inside, row, gone = list[Permit](), list[Waiting](), list[Waiting]()
        for step, number in steps:
            if step == "come":
                visit = Permit(limits, True)
                if visit.must_wait():
                    one = Waiting(visit, lambda visit: inside.append(visit))
                    one.on_turn = gone.append
                    row.append(one)
                    limits.wait(one.on_open)
                else:
                    assert limits.waiting == 0, "nobody overtakes"
                    visit.acquire()
                    inside.append(visit)
            elif step == "end" and inside:
                inside.pop(number % len(inside)).release("ok", None)
            elif step == "leave" and (waiting := [one for one in row if one not in gone]):
                limits.leave(waiting[number % len(waiting)].on_open)
                row.remove(waiting[number % len(waiting)])
            elif step == "turn":
                await asyncio.sleep(0)
            assert limits.running == len(inside) <= most
            assert gone == row[: len(gone)]
        for _ in range(len(row) + 1):
            while inside:
                inside.pop().release("ok", None)
            await asyncio.sleep(0)
        assert (gone, limits.running, limits.waiting) == (row, 0, 0)

    asyncio.run(live())


async def test_a_call_that_fails_when_its_turn_comes_does_not_keep_others(caplog: pytest.LogCaptureFixture) -> None:
    limits = ServerLimits("s", Configured(url="http://x", max_concurrent=1))
    first, gone = Permit(limits, True), list[int]()
    assert not first.must_wait()
    first.acquire()

    def broken(visit: Permit) -> None:
        visit.release("error", "internal")
        raise RuntimeError("planted")

    for number in range(3):
        visit = Permit(limits, True)
        assert visit.must_wait()
        limits.wait(
            Waiting(visit, broken if number == 0 else lambda visit, number=number: _over(visit, gone, number)).on_open
        )
    first.release("ok", None)
    late = Permit(limits, True)
    assert late.must_wait(), "nobody overtakes"
    await until(lambda: gone == [1, 2])
    assert (limits.running, limits.full) == (0, False)
    assert "could not go on" in caplog.text


def _over(visit: Permit, gone: list[int], number: int) -> None:
    gone.append(number)
    visit.release("ok", None)


def test_a_refusal_names_the_server_and_its_settings() -> None:
    limits = ServerLimits("s", Configured(url="http://x", breaker_failures=1), Clock())
    visit = Permit(limits, True)
    visit.acquire()
    visit.release("error", "connect_timeout")
    with pytest.raises(UpstreamFault, match=r"mcp\.servers\.s\.breaker_failures = 1 calls") as caught:
        _ = Permit(limits, True).must_wait()
    assert (caught.value.status, caught.value.kind) == (503, "breaker")
