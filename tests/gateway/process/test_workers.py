"""Several processes that serve one port: `penstock serve --workers N`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fakes.budgets import CHAT as CHAT_BODY
from fakes.budgets import budget, toml, uses
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.gateway_workers import served_by, workers
from fakes.handing_over import (
    END,
    STREAM,
    answers_again,
    begin,
    exit_code,
    is_there_again,
    kill_worker,
    logged,
    next_line,
    reload,
    streaming,
    turns_away,
)
from fakes.odd import request, send, wait
from fakes.otlp import Made
from fakes.otlp import request as spans
from fakes.process import Gateway, children, gone, limit_files, running
from fakes.raw import Wire, body_of, chunk, connect, events_head, get, post, reply
from fakes.rig import CHAT, odd_on
from fakes.shell import Shell
from fakes.tape import Tape
from fakes.teams import Team, asked, chat, team
from fakes.waiting import until

from examples.demo.model import DemoAnswer
from penstock.console.commands.check import examine
from penstock.gateway.followers.otlp.signals import PROTOBUF
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.tape.store import Store

TWO = ("--workers", "2")
KEY = "a key that nobody has guessed"
BODY = json.dumps(CHAT_BODY).encode()
SHARED = pytest.mark.asyncio(loop_scope="module")
"""Of tests that share a gateway."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Team]:
    """Workers that tests may kill and wait for. What counts is the model of budgets."""
    counted = {"model": CHAT_BODY["model"]}
    config = toml(budget(limit=40, **counted), budget(name="tokens", unit="tokens", limit=100_000, **counted))
    async with team(tmp_path_factory.mktemp("three"), "--workers", "3", config=config) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def both(three: Team) -> AsyncGenerator[tuple[Wire, Wire]]:
    """Connections of its first two workers."""
    async with served_by(three.gateway, three.pids[0]) as first, served_by(three.gateway, three.pids[1]) as second:
        yield first, second


@SHARED
async def test_workers_are_one_gateway(three: Team, both: tuple[Wire, Wire]) -> None:
    (first, second), calls = both, 'penstock_calls_total{dialect="chat",status="ok"}'
    before = await three.figure(calls)
    async with three.http.get(f"{three.gateway.url}/api/changes?name=r1") as feed:
        await three.client.enqueue([RolloutSpec(id="r1", input=1)])
        (claimed,) = (await three.client.claim(ClaimRequest(worker="w"))).claims
        for wire in (first, second, first, second, second):
            await chat(wire, f"/rollout/r1/attempt/{claimed.attempt.id}{CHAT}", ("user", "hi"))
        # All calls of an attempt are on the tape when its end is answered, whichever worker has served them.
        await three.client.finish("r1", claimed.attempt.id, FinishRequest(worker="w", status="succeeded"))
        spans = (await asked(second, f"/api/rollouts/r1/attempts/{claimed.attempt.id}/spans"))["spans"]
        assert [span["status"] for span in spans if span["kind"] == "llm"] == ["ok"] * 5
        assert await three.figure(calls) == before + 5
        told = set[int]()
        async with asyncio.timeout(60):
            while len(told) < 5:
                line = await feed.content.readline()
                change: dict[str, Any] = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                told |= {change["cursor"]} if change.get("kind") == "span" else set()


async def say_at_once(http: aiohttp.ClientSession, url: str, wire: Wire) -> None:
    """Rewards, feedback and spans find their call as soon as it is answered."""
    for number in range(10):
        trace = f"{number + 1:032x}"
        said = json.dumps({"model": "m", "messages": [{"role": "user", "content": trace}]}).encode()
        traced = [("traceparent", f"00-{trace}-{'cd' * 8}-01")]
        wire.send(post(f"/rollout/said{number}/attempt/a1{CHAT}", said, traced, "127.0.0.1"))
        id = json.loads(body_of(await wire.message()))["id"]
        given: dict[str, Any] = {"json": {"value": 1, "response_id": id}}
        path = "/api/feedback"
        if number % 3 == 1:
            path, given = f"/api/rollouts/said{number}/attempts/a1/rewards", {"json": {"value": 1, "span": 1}}
        elif number % 3 == 2:
            path, given = "/v1/traces", {"data": spans(Made(trace=trace)).SerializeToString()}
            given["headers"] = {"Content-Type": PROTOBUF}
        async with http.post(url + path, **given) as answer:
            assert (answer.status, b"rejected" in await answer.read()) == (200, False), path


@SHARED
async def test_what_is_said_of_a_call_of_any_worker_may_come_at_once(three: Team, both: tuple[Wire, Wire]) -> None:
    await say_at_once(three.http, three.gateway.url, both[1])


async def test_what_is_said_of_a_call_may_come_at_once(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with connect(gateway.url) as wire:
        await say_at_once(http, gateway.url, wire)


@SHARED
async def test_a_conversation_goes_on_in_another_worker(three: Team, both: tuple[Wire, Wire]) -> None:
    """The first one keeps conversations for all; equal ones are told apart by answers, which the others still have."""
    (first, second), before = both, await three.rollouts()
    begun = [("system", "s"), ("user", "hello")]
    decide = three.provider.script
    three.provider.script = [DemoAnswer(f"answer {number}") for number in range(6)]
    # Two agents begin alike, and are answered by the same worker.
    answers = [await chat(second, CHAT, *begun), await chat(second, CHAT, *begun)]
    for answer in reversed(answers):
        going = [*begun, ("assistant", answer), ("user", f"on with {answer}")]
        more = await chat(first, CHAT, *going)
        await chat(second, CHAT, *going, ("assistant", more), ("user", "and on"))
    three.provider.script = decide
    found = {id: one for id, one in (await three.rollouts()).items() if id not in before}
    assert [one["origin"] for one in found.values()] == ["implicit"] * 2
    for id in found:
        assert len(await three.tape.spans(id, 3)) == 3
    assert await three.figure("penstock_ambiguous_calls_total") == 0


@SHARED
async def test_an_answer_that_has_not_ended_goes_on_in_another_worker(three: Team, both: tuple[Wire, Wire]) -> None:
    """Its client has had the last event, and waits for nothing more."""
    (first, second), before = both, await three.rollouts()
    response: dict[str, Any] = {"id": "resp_1", "output": []}
    last = chunk(b"data: " + json.dumps({"type": "response.completed", "response": response}).encode() + b"\n\n")
    begun = [request(), send(events_head() + last), wait("go"), send(chunk(b""))]
    body = {"model": "odd", "input": "hello"}
    async with odd_on(three.odd, begun, [request(), send(reply(200, b'{"id":"resp_2"}'))]) as odd:
        second.send(post("/v1/responses", json.dumps(body | {"stream": True}).encode(), host="127.0.0.1"))
        await second.until(last)
        more = json.dumps(body | {"previous_response_id": "resp_1"}).encode()
        first.send(post("/v1/responses", more, host="127.0.0.1"))
        assert (await first.message()).startswith(b"HTTP/1.1 200")
        odd.go("go")
        await second.until(chunk(b""))
    (found,) = set(await three.rollouts()) - set(before)
    assert len(await three.tape.spans(found, 2)) == 2


async def sends_the_candidate(three: Team, traffic: Traffic, wire: Wire, rollout: str) -> bool:
    """A call of a rollout with the text that a release is about; whether the candidate went upstream."""
    await chat(wire, f"/rollout/{rollout}/attempt/a1{CHAT}", ("system", traffic.text), ("user", "hi"))
    return b"careful" in three.provider.log[-1].body


@SHARED
async def test_a_release_counts_in_every_worker_at_once(three: Team, both: tuple[Wire, Wire]) -> None:
    """So does what a rollout is given while the disk is full: the stable version, as the tape takes no pin."""
    await three.client.add_version("travel", prompt(STABLE, sent=True))
    await three.client.add_version("travel", prompt(CANDIDATE))
    traffic = Traffic(three.gateway.url, three.http, three.client)
    sent = partial(sends_the_candidate, three, traffic)
    release = await traffic.start("travel", "v2", policy(0.5))
    names = [f"r{number}" for number in range(30)]
    given = {name: await sent(both[at % 2], name) for at, name in enumerate(names)}
    assert set(given.values()) == {True, False}
    for at, name in enumerate(names):
        assert await sent(both[1 - at % 2], name) == given[name], "a rollout keeps its arm everywhere"
    for turn, (one, other) in enumerate((both[::-1], both)):
        unlucky = [f"full{number}-{turn}" for number in range(12)]
        for pid in three.pids.values():
            limit_files(pid, 8192)
        given_unpinned = [await sent(one, name) for name in unlucky]
        for pid in three.pids.values():
            limit_files(pid, None)
        assert given_unpinned == [False] * len(unlucky)
        # What workers say to each other keeps its order.
        await three.figure("penstock_inflight_calls")
        assert [await sent(other, name) for name in unlucky] == given_unpinned
    await three.client.decide(release.id, "rollback", ActionRequest(who="ann"))
    for wire in reversed(both):
        assert not any([await sent(wire, name) for name in names])


@SHARED
async def test_a_pause_counts_in_every_worker(three: Team, both: tuple[Wire, Wire]) -> None:
    provider, client = three.provider, three.client
    provider.log.clear()
    await client.pause_upstream("fake-openai", 3600)
    waiting = [asyncio.ensure_future(chat(it, f"/rollout/w{CHAT}", ("user", "x"))) for it in both]

    async def two_wait() -> bool:
        (view,) = [it for it in await client.upstreams() if it.name == "fake-openai"]
        return view.waiting == 2

    await until(two_wait)
    await kill_worker(three.gateway, 1, both[1])
    async with served_by(three.gateway, three.pids[1]) as third:
        waiting[1].cancel()
        again = asyncio.ensure_future(chat(third, f"/rollout/w{CHAT}", ("user", "x")))
        await until(two_wait)
        assert not [seen for seen in provider.log if seen.path.endswith("/chat/completions")]
        await client.open_upstream("fake-openai")
        await asyncio.gather(waiting[0], again)


@SHARED
async def test_workers_share_a_budget(three: Team) -> None:
    """The first one reserves for all, and nothing is refused that fits: also when one of them has died."""

    async def statuses(wires: list[Wire], calls: int) -> list[int]:
        async def some(wire: Wire, at: int) -> list[int]:
            found: list[int] = []
            for number in range(calls):
                wire.send(post(f"/rollout/b{at}-{number}/attempt/a1{CHAT}", BODY, host="127.0.0.1"))
                found.append(int((await wire.message()).split()[1]))
            return found

        return list(chain.from_iterable(await asyncio.gather(*(some(*it) for it in zip(wires, count())))))

    async def used() -> tuple[str, str, float, float]:
        return (await uses(three.http, three.gateway.url))[0]

    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(served_by(three.gateway, three.pids[at % 2])) for at in range(4)]
        assert await statuses(wires, 5) == [200] * 20
        assert await used() == ("b", "", 20, 0)
        killed = three.pids[0]
        os.kill(killed, signal.SIGKILL)
        await wires[0].gone()
        # What is reserved meanwhile is on the tape.
        assert await statuses(wires[1::2], 5) == [200] * 10
        await is_there_again(three.gateway, 0, killed)
        new = [await stack.enter_async_context(served_by(three.gateway, three.pids[0])) for _ in range(2)]
        assert sorted(await statuses([*new, *wires[1::2]], 5)) == [200] * 10 + [429] * 10
        assert await used() == ("b", "", 40, 0)


@SHARED
async def test_a_worker_that_is_killed_takes_no_other_along(three: Team, both: tuple[Wire, Wire]) -> None:
    (first, second), gateway = both, three.gateway
    async with odd_on(three.odd, STREAM) as odd:
        for wire, name in ((first, "first"), (second, "second")):
            await begin(wire, name, "odd")
            await three.tape.open_span(name)
        await kill_worker(gateway, 1, second)
        assert [span.status for span in await three.tape.spans("second", 1)] == ["interrupted"]
        # Those that are started side by side inherit nothing of each other, or this death would not be seen.
        await kill_worker(gateway, 2)
        # Now the one that has what only one may do; the others get it back from the next.
        async with served_by(gateway, three.pids[1]) as third:
            await asked(third, "/api/rollouts/first")
            os.kill(three.pids[0], signal.SIGKILL)
            await first.gone()
            third.send(get("/api/rollouts/first", host="127.0.0.1"))
            # It waits for the next one.
            await third.when(lambda: third.received.endswith(b"}") and third.received.count(b'"id":"first"') == 2, 60)
        assert [span.status for span in await three.tape.spans("first", 1)] == ["interrupted"]
        await three.client.enqueue([RolloutSpec(id="q", input=1)])
        (claimed,) = (await three.client.claim(ClaimRequest(worker="w", wait_s=60))).claims
        assert claimed.rollout.id == "q"
        odd.go("go")
    assert "worker 1 was killed by signal 9" in gateway.log


@SHARED
async def test_a_worker_knows_what_is_released_before_it_serves(three: Team) -> None:
    text = "You know all trains of this country, and are kind."
    await three.client.add_version("trains", prompt(text, sent=True))
    traffic = Traffic(three.gateway.url, three.http, three.client, text)
    killed = three.pids[1]
    os.kill(killed, signal.SIGKILL)
    # Some of them come to the worker that is gone, and wait for the next one.
    names = [f"train{number}" for number in range(36)]
    await asyncio.gather(*map(traffic.call, names))
    await is_there_again(three.gateway, 1, killed)
    spans = [span for name in names for span in await three.tape.spans(name, 1)]
    assert [span.versions for span in spans] == [{"trains": "v1"}] * len(names)


@SHARED
async def test_a_worker_that_cannot_be_started_again_keeps_nobody_waiting(three: Team) -> None:
    gateway = three.gateway
    good = gateway.config.read_text()
    gateway.config.write_text("[limits]\nclient_timout = 3\n" + good)
    os.kill(three.pids[1], signal.SIGKILL)
    await logged(gateway, "worker 1 has ended with status 1")
    assert "limits.client_timout" in gateway.log
    for number in range(20):
        async with aiohttp.ClientSession() as fresh, fresh.get(f"{gateway.url}/healthz") as answer:
            assert answer.status == 200, number
    gateway.config.write_text(good)
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    await answers_again(gateway, 1, post(f"/rollout/again/attempt/a1{CHAT}", body, host="127.0.0.1"))


# -- a gateway with a key, a name, a socket, and attempts that end when they are quiet ---------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def named(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Team, Path]]:
    """It, and its socket."""
    home = tmp_path_factory.mktemp("named")
    config, flags = f'quiet_seconds = 1\nsocket = "{home}/gateway.sock"\n', (*TWO, "--host", "localhost")
    async with team(home, *flags, config=config, env={"PENSTOCK_ADMIN_KEY": KEY}) as made:
        yield made, home / "gateway.sock"
    assert "gateway.sock" not in os.listdir(home)


@SHARED
async def test_an_attempt_that_begins_in_any_worker_ends_when_it_is_quiet(named: tuple[Team, Path]) -> None:
    made, _ = named
    for number, pid in made.pids.items():
        async with served_by(made.gateway, pid) as wire:
            await chat(wire, f"/rollout/q{number}/attempt/a1{CHAT}", ("user", "hi"))

    async def have_ended() -> bool:
        return [one["status"] for one in (await made.rollouts()).values()] == ["ended"] * 2

    await until(have_ended)


@SHARED
async def test_no_client_can_speak_as_a_worker_does(named: tuple[Team, Path]) -> None:
    """What one worker passes on to the first is trusted there; what a client says of that is not."""
    made, _ = named
    told = {
        "address": {"rollout": "other"}, "dialect": "chat", "path": "/v1/chat/completions", "host": None,
        "token": True, "key": None,
    }  # fmt: skip
    forged = [("Penstock-Told", json.dumps(told))]
    made.provider.log.clear()
    for pid in made.pids.values():
        async with served_by(made.gateway, pid) as wire:
            wire.send(post("/api/rollouts", b'{"model":"m","messages":[]}', forged, host="127.0.0.1"))
            assert (await wire.message()).startswith(b"HTTP/1.1 401")
            wire.send(get("/agent/token/other/a1/rewards", forged, host="127.0.0.1"))
            assert (await wire.message()).startswith(b"HTTP/1.1 4")
    assert not [seen for seen in made.provider.log if seen.path.endswith("/chat/completions")]
    for name in ("relay.sock", "links.sock"):
        assert stat.S_IMODE(os.stat(made.gateway.data / "writers" / name).st_mode) == 0o600


@pytest.mark.slow
@SHARED
async def test_the_port_of_a_name_and_a_socket_are_served_by_all(named: tuple[Team, Path], tmp_path: Path) -> None:
    made, path = named
    assert made.gateway.url.startswith("http://127.0.0.1:")
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as inside,
        inside.get("http://localhost/readyz") as answer,
    ):
        assert answer.status == 200
    flags = ("--workers", "2", "--port", str(made.gateway.port), "--data", str(tmp_path / "other"))
    other = await Shell(made.gateway.url, tmp_path).run("serve", *flags)
    assert (other.code, f"port {made.gateway.port} of 127.0.0.1 is taken" in other.err) == (1, True)


# -- gateways that end -------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_reload_hands_over_every_worker(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also where the tape lies deeper than the address of a socket is long. Who dies during a handover is not started
    again: it would serve for good beside the next gateway, by the old configuration."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    async with streaming() as (odd, config), running(deep, config, *TWO) as gateway:
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            # Only the first one answers that: the second has asked it.
            assert "rollouts" in await asked(second, "/api/rollouts")
            for wire, name in ((first, "first"), (second, "second")):
                await begin(wire, name)
            successor = await reload(gateway)
            odd.go("go")
            for wire in (first, second):
                assert await wire.message() == END
        await until(lambda: not workers(gateway.pid))
        tape = Tape(gateway.url, http)
        assert [(await tape.spans(name, 1))[0].status for name in ("first", "second")] == ["ok", "ok"]

        pids = workers(successor)
        os.kill(pids[1], signal.SIGSTOP)
        try:
            os.kill(gateway.pid, signal.SIGHUP)
            await logged(gateway, f"the worker with process id {pids[1]} has not answered 'share'")
            os.kill(pids[0], signal.SIGKILL)
            await until(lambda: pids[0] not in children(successor))
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert await next_line(gateway) == f"penstock listening on {gateway.url}"
        await until(lambda: not workers(successor))
        assert await gateway.terminate() == 0
        assert "is started" not in gateway.log
        assert "never awaited" not in gateway.log
    assert examine(gateway.data)[1] == []


@pytest.mark.slow
async def test_workers_end_with_their_parent_and_the_next_gateway_starts_at_once(tmp_path: Path) -> None:
    """Though a stream runs in one of them, which a stop would wait for. One that stands still is named by a gateway
    that cannot start. A signal to all processes at once, as systemd sends it, lets calls end."""
    async with streaming() as (odd, config), running(tmp_path, config, *TWO) as gateway:
        stands = workers(gateway.pid)[1]
        os.kill(stands, signal.SIGSTOP)
        os.kill(gateway.pid, signal.SIGKILL)
        try:
            done = await Shell(gateway.url, tmp_path).run("serve", "--data", str(gateway.data), "--port", "0")
            assert f"another gateway (process {stands}) writes the tape" in done.err
        finally:
            os.kill(stands, signal.SIGKILL)
        await gateway.kill()
        await gateway.start()

        left = list(workers(gateway.pid).values())
        async with connect(gateway.url) as wire:
            await begin(wire, "r1")
            await gateway.kill()
            await gateway.start()
            for pid in left:
                await gone(pid)
        assert "the parent of this worker has died" in gateway.log

        pids = workers(gateway.pid)
        async with served_by(gateway, pids[1]) as wire:
            await begin(wire, "r2")
            for pid in (*pids.values(), gateway.pid):
                os.kill(pid, signal.SIGTERM)
            await turns_away(gateway)
            odd.go("go")
            assert await wire.message() == END
        assert await exit_code(gateway) == 0
    with Store(gateway.data, readonly=True) as store:
        assert [[span.status for span in store.spans(name)] for name in ("r1", "r2")] == [["interrupted"], ["ok"]]


@pytest.mark.slow
async def test_what_workers_cannot_share_is_refused(tmp_path: Path) -> None:
    shell = Shell("http://127.0.0.1:1", tmp_path)
    (tmp_path / "penstock.toml").write_text(
        '[[upstream]]\nname = "one"\nbase_url = "http://127.0.0.1:1"\ndialect = "openai"\nmax_concurrent = 1\n'
    )
    done = await shell.run("serve", "--workers", "2", "--data", str(tmp_path / "d"))
    assert (done.code, "upstream 'one' takes 1 call at a time (max_concurrent)" in done.err) == (1, True), done.err
    done = await shell.run("serve", "--workers", "0")
    assert (done.code, "--workers" in done.err) == (2, True)
