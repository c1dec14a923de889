"""One process hands over to the next: SIGHUP, `serve --take-over`, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fakes.budgets import budget, toml, uses
from fakes.odd import Odd, request, send, wait
from fakes.preloaded import penstock
from fakes.process import (
    ROOT,
    Gateway,
    beside_an_agent,
    children,
    command,
    limit_files,
    running,
    upstream,
    upstreams,
    write_config,
)
from fakes.provider import serving
from fakes.raw import chunk, connect, events_head, get, post
from fakes.rig import CHAT, odd_on
from fakes.tape import Tape
from fakes.waiting import until

from penstock.gateway.cli.check import examine
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.server import parent
from penstock.gateway.store import Store

EVENT = chunk(b"data: 1\n\n")
FULL = 16_384
"""The first pages of a tape: what is written comes after them."""
END = chunk(b"data: [DONE]\n\n") + chunk(b"")
STREAM = [request(), send(events_head() + EVENT), wait("go"), send(END)]


@asynccontextmanager
async def streaming() -> AsyncGenerator[tuple[Odd, str]]:
    """An upstream whose answers end when the test says so, and its configuration."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with odd_on(listener, STREAM) as odd:
            yield odd, upstream("up", f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "openai")


def successors(pid: int) -> list[int]:
    """Processes that this one has started to take over, and that have not ended."""
    return [one for one in children(pid) if b"--take-over" in command(one)]


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def next_line(gateway: Gateway) -> str:
    """What it, or the process that has taken over, prints next."""
    assert gateway.process is not None
    assert gateway.process.stdout is not None
    async with asyncio.timeout(60):
        return (await gateway.process.stdout.readline()).decode().strip()


async def reload(gateway: Gateway) -> int:
    """Has it start another process; the id of that one, once it serves."""
    await gateway.reload()
    return successors(gateway.pid)[-1]


async def is_parent(gateway: Gateway) -> bool:
    """Whether it has served its last call, and is no more than the parent of the next process."""
    return b"penstock.gateway.server.parent" in command(gateway.pid)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def call(rollout: str) -> bytes:
    return post(f"/rollout/{rollout}/attempt/a1{CHAT}", b'{"model":"m","stream":true}')


async def test_a_call_of_the_old_process_keeps_what_it_has_reserved(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """While one process writes the tape alone that is in its memory."""
    async with streaming() as (odd, config), running(tmp_path, config + toml(budget(limit=1))) as gateway:
        async with connect(gateway.url) as client:
            client.send(call("old"))
            await client.until(EVENT)
            await reload(gateway)
            chat = f"{gateway.openai('new')}/chat/completions"
            async with http.post(chat, json={"model": "m"}) as answer:
                assert answer.status == 429, await answer.text()
            odd.go("go")
            assert await client.message() == END
        assert await uses(http, gateway.url) == [("b", "", 1, 0)]


async def test_a_reload_changes_the_settings_and_breaks_no_stream(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving() as provider, streaming() as (odd, config), running(tmp_path, config) as gateway:
        async with connect(gateway.url) as client, connect(gateway.url) as idle:
            idle.send(get("/healthz", host="127.0.0.1"))
            await idle.message()
            client.send(call("old"))
            await client.until(EVENT)
            gateway.config.write_text("[limits]\ndrain_seconds = 2\n" + upstreams(openai=provider.openai_url))
            await reload(gateway)

            # The old process serves the clients that it has, and tells them to come again on another connection.
            idle.send(get("/readyz", host="127.0.0.1"))
            assert b"Connection: close\r\n" in await idle.message()
            assert await idle.gone() == "eof"
            async with http.post(f"{gateway.openai('new')}/chat/completions", json={"model": "m"}) as answer:
                assert answer.status == 200, "the new settings are for new connections"
            odd.go("go")
            assert await client.message() == END
        await until(lambda: is_parent(gateway))
        tape = Tape(gateway.url, http)
        assert [(span.status, span.upstream) for span in await tape.spans("old", 1)] == [("ok", "up")]
        assert [(span.status, span.upstream) for span in await tape.spans("new", 1)] == [("ok", "fake-openai")]
        assert "another process has taken over" in gateway.log

        # The process that was started goes on as the parent: signals and the exit code are as before.
        await gateway.reload()
        await until(lambda: _one_is_left(gateway))
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


async def test_a_reload_needs_nobody_who_reads_what_it_prints(tmp_path: Path) -> None:
    until_its_first_line = ("bash", "-c", 'exec "$@" > >(head -n 1)', "bash")
    async with running(tmp_path, "", under=until_its_first_line) as gateway:
        os.kill(gateway.pid, signal.SIGHUP)
        said = f"stdout cannot be written (Broken pipe): penstock listening on {gateway.url}"

        async def is_said() -> bool:
            return said in gateway.log

        await until(is_said)
        await until(lambda: is_parent(gateway))
        async with connect(gateway.url) as client:
            client.send(get("/healthz", host="127.0.0.1"))
            assert (await client.message()).startswith(b"HTTP/1.1 200 ")
        assert await gateway.terminate() == 0


async def _one_is_left(gateway: Gateway) -> bool:
    return len(successors(gateway.pid)) == 1


WHILE_IT_CHANGES = """
import os, signal, time, uvloop
from pathlib import Path

run, execv = uvloop.run, os.execv


def stop():
    # Only the process that is to be the parent of another one.
    if any(task.read_text() for task in Path("/proc/self/task").glob("*/children")):
        while not os.path.exists(os.environ["SERVES"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


def run_and_stop(*given, **named):
    found = run(*given, **named)
    stop()
    return found


def stop_and_execute(*given):
    stop()
    execv(*given)


uvloop.run, os.execv = run_and_stop, stop_and_execute
"""
"""Has SIGTERM come to a process that has handed over, just when it becomes the parent of the next one, and not before
that serves: it would end as one that still starts."""


async def test_a_signal_to_a_process_that_becomes_a_parent_is_passed_on(tmp_path: Path) -> None:
    """It would end this one alone, and nobody could stop the next one any more."""
    (tmp_path / "sitecustomize.py").write_text(WHILE_IT_CHANGES)
    serves = tmp_path / "serves"
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "SERVES": str(serves)}
    async with running(tmp_path / "home", "", env=env, under=("env",)) as gateway:
        next_one = await reload(gateway)
        serves.touch()
        assert gateway.process is not None
        async with asyncio.timeout(60):
            assert await gateway.process.wait() == 0
        assert not runs(next_one)


@pytest.mark.parametrize("as_parent", [False, True])
async def test_wrong_settings_are_refused_and_the_old_ones_stay(
    tmp_path: Path, http: aiohttp.ClientSession, as_parent: bool
) -> None:
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url)) as gateway:
        if as_parent:
            await reload(gateway)
            await until(lambda: is_parent(gateway))
        gateway.config.write_text("[limits]\nclient_timout = 3\n")
        os.kill(gateway.pid, signal.SIGHUP)

        async def is_refused() -> bool:
            return "goes on" in gateway.log

        await until(is_refused)
        assert f"{gateway.config}: limits.client_timout" in gateway.log
        assert parent.GOES_ON % 1 in gateway.log, "in the same words, whoever says it"
        async with http.post(f"{gateway.openai('r')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200


@asynccontextmanager
async def running_by_file(home: Path, *flags: str) -> AsyncGenerator[Gateway]:
    """One whose configuration says where its tape is."""
    config = write_config(home, f'data = "{home / "data"}"\n')
    gateway = Gateway(config, home / "data", home / "stderr", flags, says_data=False)
    await gateway.start()
    try:
        yield gateway
    finally:
        _ = await gateway.terminate()
        print(gateway.log)


@pytest.mark.parametrize(("as_parent", "flags"), [(True, ()), (False, ("--workers", "2"))])
async def test_another_tape_is_refused_and_nothing_is_left_there(
    tmp_path: Path, as_parent: bool, flags: tuple[str, ...]
) -> None:
    async with running_by_file(tmp_path, *flags) as gateway:
        if as_parent:
            await reload(gateway)
            await until(lambda: is_parent(gateway))
        gateway.config.write_text(f'data = "{tmp_path / "elsewhere"}"\n')
        os.kill(gateway.pid, signal.SIGHUP)

        async def is_refused() -> bool:
            return "goes on" in gateway.log

        await until(is_refused)
        said = f"data: {tmp_path / 'elsewhere'} is another tape than {gateway.data}, which is served"
        assert said in gateway.log
        assert not (tmp_path / "elsewhere").exists()


async def test_a_tape_by_another_name_is_the_same(tmp_path: Path) -> None:
    async with running_by_file(tmp_path) as gateway:
        (tmp_path / "link").symlink_to(gateway.data)
        gateway.config.write_text(f'data = "{tmp_path / "link"}"\n')
        await gateway.reload()


async def test_a_reload_while_the_disk_is_full_leaves_a_gateway(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """What the next process has to write of work that was handed out waits until there is room."""
    async with (
        serving() as provider,
        running(tmp_path, upstreams(openai=provider.openai_url)) as gateway,
        Client(gateway.url) as client,
    ):
        _ = await client.enqueue([RolloutSpec(id="r1")])
        assert len((await client.claim(ClaimRequest(worker="w1", lease_s=600))).claims) == 1
        limit_files(gateway.pid, FULL)
        successor = await reload(gateway)
        async with http.post(f"{gateway.openai('r')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200
        await until(lambda: is_parent(gateway))
        async with http.post(f"{gateway.openai('r')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200
        limit_files(successor, None)

        async def has_begun() -> bool:
            return "all that only one process may do has begun" in gateway.log

        await until(has_begun)
        limit_files(gateway.pid, None)


async def test_what_lies_in_its_folder_is_not_run_in_its_place(tmp_path: Path) -> None:
    """An agent's own code, mostly: `python -m` looks there first."""
    async with beside_an_agent(tmp_path) as gateway:
        _ = await reload(gateway)


async def test_a_port_that_is_taken_is_found_before_anything_is_given_away(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url)) as gateway:
        flags = ["--config", gateway.config, "--data", gateway.data, "--port", str(_port(provider.url))]
        other = await penstock(
            "serve", "--take-over", *flags, env=os.environ, stderr=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        assert f"port {_port(provider.url)} of 127.0.0.1 is taken" in (await other.communicate())[1].decode()
        assert other.returncode == 1
        async with http.get(f"{gateway.url}/readyz") as answer:
            assert answer.status == 200
        assert "has not started: this one goes on as it is" in gateway.log


async def test_many_streams_over_restarts_are_whole(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The full measure, 500 streams and 20 restarts, is `python -m bench.handover`."""
    restarts, at_once = 3, 20
    config = "[limits]\ndrain_seconds = 20\n"
    async with serving() as provider, running(tmp_path, config + upstreams(openai=provider.openai_url)) as gateway:
        done, over = list[int](), asyncio.Event()

        async def client(number: int) -> None:
            while not over.is_set():
                rollout = f"s{number}-{len(done)}"
                body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}]}
                async with http.post(f"{gateway.openai(rollout)}/chat/completions", json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
                done.append(number)

        clients = [asyncio.ensure_future(client(number)) for number in range(at_once)]
        for _ in range(restarts):
            await reload(gateway)
        over.set()
        await asyncio.gather(*clients)
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []
    with Store(gateway.data, readonly=True) as store:
        ends = [span.status for _, rollout in store.rollouts() for span in store.spans(rollout.id)]
    assert ends == ["ok"] * len(done), "every answer that a client has got is on the tape, once"
    assert len(done) > at_once


async def test_an_attempt_that_the_new_process_ends_has_every_call_of_the_old_one(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with streaming() as (odd, config), running(tmp_path, config) as gateway, connect(gateway.url) as client:
        client.send(call("r"))
        await client.until(EVENT)
        await reload(gateway)
        tape = Tape(gateway.url, http)
        assert (await tape.open_span("r")).status == "open", "the new process knows that it runs elsewhere"
        async with http.get(f"{gateway.url}/api/changes?name=r") as feed:
            odd.go("go")
            # As soon as the client has the last byte, the tape has the call, whichever process is asked.
            assert await client.message() == END
            rewards = {"value": 1.0, "source": "judge"}
            async with http.post(f"{gateway.url}/api/rollouts/r/attempts/a1/rewards", json=rewards) as answer:
                assert answer.status < 300, await answer.text()
            spans = (await tape.get("/api/rollouts/r/attempts/a1/spans"))["spans"]
            assert [span["status"] for span in spans if span["kind"] == "llm"] == ["ok"]
            told = b""
            async with asyncio.timeout(60):
                while b'"status":"ok"' not in told:
                    told += await feed.content.readline()


async def test_work_that_the_old_process_is_given_reaches_a_worker_of_the_new_one(tmp_path: Path) -> None:
    async with running(tmp_path, "") as gateway, connect(gateway.url) as old:
        old.send(get("/healthz", host="127.0.0.1"))
        await old.message()
        await reload(gateway)
        async with Client(gateway.url) as client:
            claiming = asyncio.ensure_future(client.claim(ClaimRequest(worker="w", wait_s=60)))
            await asyncio.sleep(0)
            old.send(post("/api/rollouts", b'{"rollouts":[{"id":"r1","input":1}]}', host="127.0.0.1"))
            assert (await old.message()).startswith(b"HTTP/1.1 20")
            assert [one.rollout.id for one in (await claiming).claims] == ["r1"]


@pytest.mark.parametrize("full", [False, True], ids=["", "and the disk was full meanwhile"])
async def test_calls_of_a_process_that_is_killed_while_it_drains_are_interrupted(
    tmp_path: Path, http: aiohttp.ClientSession, full: bool
) -> None:
    async with streaming() as (_, config), running(tmp_path, config) as gateway, connect(gateway.url) as client:
        client.send(call("r"))
        await client.until(EVENT)
        tape = Tape(gateway.url, http)
        await tape.open_span("r")
        new = await reload(gateway)

        async def is_refused() -> bool:
            return "what another process has written is not noticed" in gateway.log

        try:
            limit_files(new, 8192 if full else None)
            os.kill(gateway.pid, signal.SIGKILL)
            if full:
                await until(is_refused)
                limit_files(new, None)
            (span,) = await tape.spans("r", 1)
            assert span.status == "interrupted"
        finally:
            os.kill(new, signal.SIGTERM)


async def test_a_socket_is_handed_over_too(tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    async with running(tmp_path, f'socket = "{path}"\n') as gateway:
        inode = path.stat().st_ino
        await reload(gateway)
        await until(lambda: is_parent(gateway))
        assert path.stat().st_ino == inode
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as inside,
            inside.get("http://localhost/readyz") as answer,
        ):
            assert answer.status == 200
        assert await gateway.terminate() == 0
    assert not path.exists()


async def test_a_process_that_nobody_has_started_takes_over_and_the_old_one_ends(tmp_path: Path) -> None:
    async with running(tmp_path, "") as gateway:
        other = Gateway(gateway.config, gateway.data, tmp_path / "stderr-2", ("--take-over",))
        await other.start(gateway.port)
        assert other.url == gateway.url
        assert gateway.process is not None
        async with asyncio.timeout(60):
            assert await gateway.process.wait() == 0
        assert await other.terminate() == 0


async def test_take_over_starts_a_gateway_where_there_is_none(tmp_path: Path) -> None:
    async with running(tmp_path, "", "--take-over") as gateway:
        assert f"no gateway writes the tape in {gateway.data}, so there is none to take over from" in gateway.log
        assert await gateway.terminate() == 0


async def test_connections_are_taken_for_a_while_after_sigterm(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    config = "[limits]\ndrain_delay = 60\n"
    async with serving() as provider, running(tmp_path, config + upstreams(openai=provider.openai_url)) as gateway:
        os.kill(gateway.pid, signal.SIGTERM)

        async def is_not_ready() -> bool:
            async with http.get(f"{gateway.url}/readyz") as answer:
                return answer.status == 503

        await until(is_not_ready)
        async with http.post(f"{gateway.openai('late')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200
            assert answer.headers["Connection"] == "close"
        assert await gateway.terminate() == 0, "a second signal ends the wait"


async def test_what_is_cut_off_is_said(tmp_path: Path) -> None:
    config = "[limits]\ndrain_seconds = 0.1\n"
    async with streaming() as (_, up), running(tmp_path, config + up) as gateway, connect(gateway.url) as client:
        client.send(call("long"))
        await client.until(EVENT)
        assert await gateway.terminate() == 0
        assert "cut off 1 call that had not ended (limits.drain_seconds): of rollout long" in gateway.log


async def test_a_changed_file_reloads_where_it_may(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    may = "reload_on_change = true\n"
    async with serving() as provider, running(tmp_path, may) as gateway:
        gateway.config.write_text("reload_on_chance = true\n")

        async def is_refused() -> bool:
            return "goes on" in gateway.log

        await until(is_refused)
        assert f"{gateway.config}: reload_on_chance" in gateway.log
        gateway.config.write_text(may + upstreams(openai=provider.openai_url))
        assert await next_line(gateway) == f"penstock listening on {gateway.url}"
        async with http.post(f"{gateway.openai('r')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200
        assert await gateway.terminate() == 0
