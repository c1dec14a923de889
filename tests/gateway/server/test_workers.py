"""Several processes that serve one port: `penstock serve --workers N`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.budgets import CHAT as CHAT_BODY
from fakes.budgets import budget, toml, uses
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy, prompt
from fakes.gateway_workers import served_by, workers
from fakes.odd import Odd, request, send, wait
from fakes.otlp import Made
from fakes.otlp import request as spans
from fakes.process import Gateway, children, limit_files, running, upstream, upstreams
from fakes.provider import Provider, serving
from fakes.raw import Wire, body_of, chunk, connect, events_head, get, post, reply
from fakes.rig import CHAT, odd_on
from fakes.shell import Shell
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.cli.check import examine
from penstock.gateway.client.client import Client
from penstock.gateway.demo.model import Answer
from penstock.gateway.model.audit import Said
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.otlp.signals import PROTOBUF
from penstock.gateway.store import Store

EVENT = chunk(b"data: 1\n\n")
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
STREAM = [request(), send(events_head() + EVENT), wait("go"), send(END)]
TWO = ("--workers", "2")
BODY = json.dumps(CHAT_BODY).encode()


@asynccontextmanager
async def streaming() -> AsyncGenerator[tuple[Odd, str]]:
    """An upstream whose answers end when the test says so, and its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with odd_on(listener, STREAM, STREAM, STREAM) as odd:
            yield odd, upstream("up", f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "openai")


def call(rollout: str) -> bytes:
    return post(f"/rollout/{rollout}/attempt/a1{CHAT}", b'{"model":"m","stream":true}')


async def chat(wire: Wire, path: str, *messages: tuple[str, str]) -> str:
    """A call on a connection; what the model says."""
    said = [{"role": role, "content": content} for role, content in messages]
    wire.send(post(path, json.dumps({"model": "m", "messages": said}).encode(), host="127.0.0.1"))
    answer = await wire.message()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return json.loads(body_of(answer))["choices"][0]["message"]["content"]


async def candidate_is_sent(provider: Provider, traffic: Traffic, wire: Wire, rollout: str) -> bool:
    """A call of a rollout with the text that a release is about; whether the candidate went upstream."""
    await chat(wire, f"/rollout/{rollout}/attempt/a1{CHAT}", ("system", traffic.text), ("user", "hi"))
    return b"careful" in provider.log[-1].body


async def asked(wire: Wire, path: str) -> Any:
    wire.send(get(path, host="127.0.0.1"))
    return json.loads(body_of(await wire.message()))


async def figure(http: aiohttp.ClientSession, gateway: Gateway, line: str) -> float:
    async with http.get(f"{gateway.url}/metrics") as answer:
        (found,) = [it for it in (await answer.text()).splitlines() if it.startswith(line + " ")]
    return float(found.rpartition(" ")[2])


async def is_there_again(gateway: Gateway, number: int, killed: int) -> None:
    """Returns when another worker has been started in the place of one that was killed."""

    async def another() -> bool:
        return workers(gateway.pid).get(number) not in (None, killed)

    await until(another)


async def test_two_workers_are_one_gateway(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway:
        pids = workers(gateway.pid)
        async with (
            served_by(gateway, pids[0]) as first,
            served_by(gateway, pids[1]) as second,
            Client(gateway.url) as client,
            http.get(f"{gateway.url}/api/changes?name=r1") as feed,
        ):
            await client.enqueue([RolloutSpec(id="r1", input=1)])
            (claimed,) = (await client.claim(ClaimRequest(worker="w"))).claims
            for wire in (first, second, first, second, second):
                await chat(wire, f"/rollout/r1/attempt/{claimed.attempt.id}{CHAT}", ("user", "hi"))
            # All calls of an attempt are on the tape when its end is answered, whichever worker has served them.
            await client.finish("r1", claimed.attempt.id, FinishRequest(worker="w", status="succeeded"))
            spans = (await asked(second, f"/api/rollouts/r1/attempts/{claimed.attempt.id}/spans"))["spans"]
            assert [span["status"] for span in spans if span["kind"] == "llm"] == ["ok"] * 5
            assert await figure(http, gateway, 'penstock_calls_total{dialect="chat",status="ok"}') == 5
            told = set[int]()
            async with asyncio.timeout(60):
                while len(told) < 5:
                    line = await feed.content.readline()
                    change: dict[str, Any] = json.loads(line[6:]) if line.startswith(b"data: {") else {}
                    told |= {change["cursor"]} if change.get("kind") == "span" else set()
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


@pytest.mark.parametrize("flags", [(), TWO], ids=["one", "two"])
async def test_what_is_said_of_a_call_may_come_at_once(
    tmp_path: Path, http: aiohttp.ClientSession, flags: tuple[str, ...]
) -> None:
    """Rewards, feedback and spans find it, whichever worker has served it."""
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url), *flags) as gateway:
        pid = workers(gateway.pid)[1] if flags else gateway.pid
        async with served_by(gateway, pid) as wire:
            for number in range(10):
                trace = f"{number + 1:032x}"
                said = json.dumps({"model": "m", "messages": [{"role": "user", "content": trace}]}).encode()
                path = f"/rollout/r{number}/attempt/a1{CHAT}"
                wire.send(post(path, said, [("traceparent", f"00-{trace}-{'cd' * 8}-01")], "127.0.0.1"))
                id = json.loads(body_of(await wire.message()))["id"]
                given: dict[str, Any] = {"json": {"value": 1, "response_id": id}}
                url = "/api/feedback"
                if number % 3 == 1:
                    url, given = f"/api/rollouts/r{number}/attempts/a1/rewards", {"json": {"value": 1, "span": 1}}
                elif number % 3 == 2:
                    url, given = "/v1/traces", {"data": spans(Made(trace=trace)).SerializeToString()}
                    given["headers"] = {"Content-Type": PROTOBUF}
                async with http.post(gateway.url + url, **given) as answer:
                    assert (answer.status, b"rejected" in await answer.read()) == (200, False), url


async def test_a_conversation_goes_on_in_another_worker(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The first one keeps conversations for all; equal ones are told apart by answers, which the others still have."""
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway:
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            begun = [("system", "s"), ("user", "hello")]
            provider.script = [Answer(f"answer {number}") for number in range(6)]
            # Two agents begin alike, and are answered by the same worker.
            answers = [await chat(second, CHAT, *begun), await chat(second, CHAT, *begun)]
            for answer in reversed(answers):
                going = [*begun, ("assistant", answer), ("user", f"on with {answer}")]
                more = await chat(first, CHAT, *going)
                await chat(second, CHAT, *going, ("assistant", more), ("user", "and on"))
        tape = Tape(gateway.url, http)
        await tape.written()
        found = (await tape.get("/api/rollouts"))["rollouts"]
        assert [one["origin"] for one in found] == ["implicit"] * 2
        for rollout in found:
            assert len(await tape.spans(rollout["id"], 3)) == 3
        assert await figure(http, gateway, "penstock_ambiguous_calls_total") == 0


async def test_an_answer_that_has_not_ended_goes_on_in_another_worker(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Its client has had the last event, and waits for nothing more."""
    response: dict[str, Any] = {"id": "resp_1", "output": []}
    last = chunk(b"data: " + json.dumps({"type": "response.completed", "response": response}).encode() + b"\n\n")
    begun = [request(), send(events_head() + last), wait("go"), send(chunk(b""))]
    body = {"model": "m", "input": "hello"}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        up = upstream("up", f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "openai")
        async with (
            odd_on(listener, begun, [request(), send(reply(200, b'{"id":"resp_2"}'))]) as odd,
            running(tmp_path, up, *TWO) as gateway,
        ):
            pids = workers(gateway.pid)
            async with served_by(gateway, pids[1]) as second, served_by(gateway, pids[0]) as first:
                second.send(post("/v1/responses", json.dumps(body | {"stream": True}).encode(), host="127.0.0.1"))
                await second.until(last)
                more = json.dumps(body | {"previous_response_id": "resp_1"}).encode()
                first.send(post("/v1/responses", more, host="127.0.0.1"))
                assert (await first.message()).startswith(b"HTTP/1.1 200")
                odd.go("go")
                await second.until(chunk(b""))
            tape = Tape(gateway.url, http)
            await tape.written()
            (found,) = (await tape.get("/api/rollouts"))["rollouts"]
            assert len(await tape.spans(found["id"], 2)) == 2


async def test_a_release_counts_in_every_worker_at_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway,
        Client(gateway.url) as client,
    ):
        pids = workers(gateway.pid)
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        traffic = Traffic(gateway.url, http, client)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            sent = partial(candidate_is_sent, provider, traffic)
            release = await traffic.start("travel", "v2", policy(0.5))
            names = [f"r{number}" for number in range(30)]
            given = {name: await sent((first, second)[at % 2], name) for at, name in enumerate(names)}
            assert set(given.values()) == {True, False}
            for at, name in enumerate(names):
                assert await sent((second, first)[at % 2], name) == given[name], "a rollout keeps its arm everywhere"
            await client.decide(release.id, "rollback", Said(who="ann"))
            for wire in (second, first):
                assert not any([await sent(wire, name) for name in names])


async def test_what_a_rollout_is_given_while_the_disk_is_full_counts_in_every_worker(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway,
        Client(gateway.url) as client,
    ):
        pids = workers(gateway.pid)
        await client.add_version("travel", prompt(STABLE, sent=True))
        await client.add_version("travel", prompt(CANDIDATE))
        traffic = Traffic(gateway.url, http, client)
        await traffic.start("travel", "v2", policy(0.99))
        names = [f"r{number}" for number in range(5)]
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            sent = partial(candidate_is_sent, provider, traffic)
            for turn, (one, other) in enumerate(((second, first), (first, second))):
                for pid in pids.values():
                    limit_files(pid, 8192)
                given = [await sent(one, f"{name}-{turn}") for name in names]
                for pid in pids.values():
                    limit_files(pid, None)
                assert given == [False] * len(names), "the stable version, as the tape takes no pin"
                # What workers say to each other keeps its order.
                await figure(http, gateway, "penstock_inflight_calls")
                assert [await sent(other, f"{name}-{turn}") for name in names] == given


async def test_a_pause_counts_in_every_worker(tmp_path: Path) -> None:
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway,
        Client(gateway.url) as client,
    ):
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            await client.pause_upstream("fake-openai", 3600)
            waiting = [asyncio.ensure_future(chat(it, f"/rollout/w{CHAT}", ("user", "x"))) for it in (first, second)]

            async def wait_for_it() -> bool:
                (view,) = [it for it in await client.upstreams() if it.name == "fake-openai"]
                return view.waiting == 2

            await until(wait_for_it)
            os.kill(pids[1], signal.SIGKILL)
            await second.gone()
            await is_there_again(gateway, 1, pids[1])
            async with served_by(gateway, workers(gateway.pid)[1]) as third:
                waiting[1].cancel()
                again = asyncio.ensure_future(chat(third, f"/rollout/w{CHAT}", ("user", "x")))
                await until(wait_for_it)
                assert not [seen for seen in provider.log if seen.path.endswith("/chat/completions")]
                await client.open_upstream("fake-openai")
                await asyncio.gather(waiting[0], again)


async def test_workers_share_a_budget(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The first one reserves for all, and nothing is refused that fits: also when one of them has died."""
    config = toml(budget(limit=40), budget(name="tokens", unit="tokens", limit=100_000))
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url) + config, *TWO) as gateway,
    ):
        pids = workers(gateway.pid)

        async def statuses(wires: list[Wire], calls: int) -> list[int]:
            async def some(wire: Wire, at: int) -> list[int]:
                found: list[int] = []
                for number in range(calls):
                    wire.send(post(f"/rollout/b{at}-{number}/attempt/a1{CHAT}", BODY, host="127.0.0.1"))
                    found.append(int((await wire.message()).split()[1]))
                return found

            return list(chain.from_iterable(await asyncio.gather(*(some(*it) for it in zip(wires, count())))))

        async with AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(served_by(gateway, pids[at % 2])) for at in range(4)]
            assert await statuses(wires, 5) == [200] * 20
            assert (await uses(http, gateway.url))[0] == ("b", "", 20, 0)
            os.kill(pids[0], signal.SIGKILL)
            await wires[0].gone()
            # What is reserved meanwhile is on the tape.
            assert await statuses(wires[1::2], 5) == [200] * 10
            await is_there_again(gateway, 0, pids[0])
            new = [await stack.enter_async_context(served_by(gateway, workers(gateway.pid)[0])) for _ in range(2)]
            found = await statuses([*new, *wires[1::2]], 5)
            assert sorted(found) == [200] * 10 + [429] * 10
            assert (await uses(http, gateway.url))[0] == ("b", "", 40, 0)
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


async def test_an_attempt_that_begins_in_any_worker_ends_when_it_is_quiet(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with serving() as provider:
        config = "quiet_seconds = 1\n" + upstreams(openai=provider.openai_url)
        async with running(tmp_path, config, *TWO) as gateway:
            for number, pid in workers(gateway.pid).items():
                async with served_by(gateway, pid) as wire:
                    await chat(wire, f"/rollout/q{number}/attempt/a1{CHAT}", ("user", "hi"))
            tape = Tape(gateway.url, http)

            async def have_ended() -> bool:
                return {one["status"] for one in (await tape.get("/api/rollouts"))["rollouts"]} == {"succeeded"}

            await until(have_ended)


async def test_a_worker_that_is_killed_takes_no_other_along(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with streaming() as (odd, config), running(tmp_path, config, *TWO) as gateway:
        pids, tape = workers(gateway.pid), Tape(gateway.url, http)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            for wire, name in ((first, "first"), (second, "second")):
                wire.send(call(name))
                await wire.until(EVENT)
                await tape.open_span(name)
            os.kill(pids[1], signal.SIGKILL)
            assert await second.gone() in ("eof", "reset")
            (span,) = await tape.spans("second", 1)
            assert span.status == "interrupted"
            await is_there_again(gateway, 1, pids[1])
            # Now the one that has what only one may do; the others get it back from the next.
            async with served_by(gateway, workers(gateway.pid)[1]) as third:
                await asked(third, "/api/rollouts/first")
                os.kill(pids[0], signal.SIGKILL)
                await first.gone()
                third.send(get("/api/rollouts/first", host="127.0.0.1"))
                # It waits for the next one.
                await third.when(
                    lambda: third.received.endswith(b"}") and third.received.count(b'"id":"first"') == 2, 60
                )
            (span,) = await tape.spans("first", 1)
            assert span.status == "interrupted"
            async with Client(gateway.url) as client:
                await client.enqueue([RolloutSpec(id="q", input=1)])
                (claimed,) = (await client.claim(ClaimRequest(worker="w", wait_s=60))).claims
                assert claimed.rollout.id == "q"
        assert "worker 1 was killed by signal 9" in gateway.log
        odd.go("go")
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


async def test_a_worker_knows_what_is_released_before_it_serves(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway,
        Client(gateway.url) as client,
    ):
        await client.add_version("travel", prompt(STABLE, sent=True))
        traffic, tape = Traffic(gateway.url, http, client), Tape(gateway.url, http)
        killed = workers(gateway.pid)[1]
        os.kill(killed, signal.SIGKILL)
        # Some of them come to the worker that is gone, and wait for the next one.
        names = [f"r{number}" for number in range(24)]
        await asyncio.gather(*map(traffic.call, names))
        await is_there_again(gateway, 1, killed)
        spans = [span for name in names for span in await tape.spans(name, 1)]
        assert [span.versions for span in spans] == [{"travel": "v1"}] * len(names)


async def test_each_of_several_workers_is_started_again(tmp_path: Path) -> None:
    """Those that are started side by side inherit nothing of each other, or the death of one would not be seen."""
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), "--workers", "4") as gateway,
    ):
        before = workers(gateway.pid)
        for number in (1, 2, 3):
            os.kill(before[number], signal.SIGKILL)
            await is_there_again(gateway, number, before[number])


async def test_a_reload_hands_over_every_worker(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with streaming() as (odd, config), running(tmp_path, config, *TWO) as gateway:
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[0]) as first, served_by(gateway, pids[1]) as second:
            for wire, name in ((first, "first"), (second, "second")):
                wire.send(call(name))
                await wire.until(EVENT)
            await gateway.reload()
            odd.go("go")
            for wire in (first, second):
                assert await wire.message() == END

        async def has_ended() -> bool:
            return not workers(gateway.pid)

        await until(has_ended)
        tape = Tape(gateway.url, http)
        assert [(await tape.spans(name, 1))[0].status for name in ("first", "second")] == ["ok", "ok"]
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


async def test_who_dies_during_a_handover_is_not_started_again(tmp_path: Path) -> None:
    """It would serve for good beside the next gateway, by the old configuration."""
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url), *TWO) as gateway:
        pids = workers(gateway.pid)
        os.kill(pids[1], signal.SIGSTOP)
        try:
            os.kill(gateway.pid, signal.SIGHUP)

            async def leaves() -> bool:
                return f"the worker with process id {pids[1]} has not answered 'share'" in gateway.log

            async def is_gone() -> bool:
                return pids[0] not in children(gateway.pid)

            await until(leaves)
            os.kill(pids[0], signal.SIGKILL)
            await until(is_gone)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert gateway.process is not None
        assert gateway.process.stdout is not None
        async with asyncio.timeout(60):
            assert await gateway.process.stdout.readline() == f"penstock listening on {gateway.url}\n".encode()

        async def have_ended() -> bool:
            return not workers(gateway.pid)

        await until(have_ended)
        assert await gateway.terminate() == 0
    assert "is started" not in gateway.log
    assert "never awaited" not in gateway.log


async def test_a_signal_to_all_processes_at_once_lets_calls_end(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """As whoever stops a service sends it (systemd): a second one would end every wait."""
    async with streaming() as (odd, config), running(tmp_path, config, *TWO) as gateway:
        pids = workers(gateway.pid)
        async with served_by(gateway, pids[1]) as wire:
            wire.send(call("r"))
            await wire.until(EVENT)
            for pid in (*pids.values(), gateway.pid):
                os.kill(pid, signal.SIGTERM)

            async def turns_away() -> bool:
                try:
                    async with http.get(f"{gateway.url}/readyz"):
                        return False
                except aiohttp.ClientConnectionError:
                    return True

            await until(turns_away)
            odd.go("go")
            assert await wire.message() == END
        assert gateway.process is not None
        assert await gateway.process.wait() == 0
    with Store(gateway.data, readonly=True) as store:
        assert [span.status for span in store.spans("r")] == ["ok"]


async def test_a_worker_that_cannot_be_started_again_keeps_nobody_waiting(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with serving() as provider:
        good = upstreams(openai=provider.openai_url)
        async with running(tmp_path, good, *TWO) as gateway:
            pids = workers(gateway.pid)
            gateway.config.write_text("[limits]\nclient_timout = 3\n" + good)
            os.kill(pids[1], signal.SIGKILL)

            async def has_failed() -> bool:
                return "worker 1 has ended with status 1" in gateway.log

            await until(has_failed)
            assert "limits.client_timout" in gateway.log
            for number in range(20):
                async with aiohttp.ClientSession() as fresh, fresh.get(f"{gateway.url}/healthz") as answer:
                    assert answer.status == 200, number
            gateway.config.write_text(good)

            async def serves_again() -> bool:
                try:
                    async with served_by(gateway, workers(gateway.pid).get(1, 0), tries=5) as wire:
                        await chat(wire, f"/rollout/r/attempt/a1{CHAT}", ("user", "hi"))
                except AssertionError:
                    return False
                return True

            await until(serves_again)
            assert await gateway.terminate() == 0


async def test_no_client_can_speak_as_a_worker_does(tmp_path: Path) -> None:
    """What one worker passes on to the first is trusted there; what a client says of that is not."""
    told = {
        "address": {"rollout": "other"}, "dialect": "chat", "path": "/v1/chat/completions", "host": None,
        "token": True, "key": None,
    }  # fmt: skip
    forged, key = [("Penstock-Told", json.dumps(told))], {"PENSTOCK_ADMIN_KEY": "a key that nobody has guessed"}
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url), *TWO, env=key) as gateway,
    ):
        for pid in workers(gateway.pid).values():
            async with served_by(gateway, pid) as wire:
                wire.send(post("/api/rollouts", b'{"model":"m","messages":[]}', forged, host="127.0.0.1"))
                assert (await wire.message()).startswith(b"HTTP/1.1 401")
                wire.send(get("/agent/token/other/a1/rewards", forged, host="127.0.0.1"))
                assert (await wire.message()).startswith(b"HTTP/1.1 4")
        assert not [seen for seen in provider.log if seen.path.endswith("/chat/completions")]
        for name in ("relay.sock", "links.sock"):
            assert stat.S_IMODE(os.stat(gateway.data / "writers" / name).st_mode) == 0o600


async def test_workers_end_with_their_parent_and_the_next_gateway_starts_at_once(tmp_path: Path) -> None:
    """Though a stream runs in one of them, which a stop would wait for."""
    async with streaming() as (odd, config), running(tmp_path, config, *TWO) as gateway:
        left = set(map(str, workers(gateway.pid).values()))
        async with connect(gateway.url) as wire:
            wire.send(call("r1"))
            await wire.until(EVENT)
            await gateway.kill()
            await gateway.start()
            assert not left & set(os.listdir("/proc"))
            odd.go("go")
        assert "the parent of this worker has died" in gateway.log


async def test_a_worker_that_stands_still_is_named_by_the_gateway_that_cannot_start(tmp_path: Path) -> None:
    async with running(tmp_path, "", *TWO) as gateway:
        pid = workers(gateway.pid)[1]
        os.kill(pid, signal.SIGSTOP)
        os.kill(gateway.pid, signal.SIGKILL)
        try:
            done = await Shell(gateway.url, tmp_path).run("serve", "--data", str(gateway.data), "--port", "0")
            assert f"another gateway (process {pid}) writes the tape" in done.err
        finally:
            os.kill(pid, signal.SIGKILL)
        await gateway.kill()
        await gateway.start()


async def test_the_port_of_a_name_and_a_socket_are_served_by_all(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    async with running(tmp_path, f'socket = "{path}"\n', *TWO, "--host", "localhost") as gateway:
        assert gateway.url.startswith("http://127.0.0.1:")
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as inside:
            async with inside.get("http://localhost/readyz") as answer:
                assert answer.status == 200
            other = await Shell(gateway.url, tmp_path).run(
                "serve", "--workers", "2", "--port", str(gateway.port), "--data", str(tmp_path / "other")
            )
            assert (other.code, f"port {gateway.port} of 127.0.0.1 is taken" in other.err) == (1, True)
        assert await gateway.terminate() == 0
        assert "gateway.sock" not in os.listdir(tmp_path)


async def test_the_tape_may_lie_deeper_than_the_address_of_a_socket_is_long(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    async with running(deep, "", *TWO) as gateway:
        async with served_by(gateway, workers(gateway.pid)[1]) as second:
            # Only the first one answers that: the second has asked it.
            assert "rollouts" in await asked(second, "/api/rollouts")
        await gateway.reload()
        async with connect(gateway.url) as wire:
            assert "rollouts" in await asked(wire, "/api/rollouts")
        assert await gateway.terminate() == 0
        assert "another one is started" not in gateway.log


async def test_what_workers_cannot_share_is_refused(tmp_path: Path) -> None:
    shell = Shell("http://127.0.0.1:1", tmp_path)
    (tmp_path / "penstock.toml").write_text(
        '[[upstream]]\nname = "one"\nbase_url = "http://127.0.0.1:1"\ndialect = "openai"\nmax_concurrent = 1\n'
    )
    done = await shell.run("serve", "--workers", "2", "--data", str(tmp_path / "d"))
    assert done.code == 1
    assert "upstream 'one' takes 1 call at a time (max_concurrent), which 2 workers cannot share" in done.err
    done = await shell.run("serve", "--workers", "0")
    assert done.code == 2
    assert "--workers" in done.err
