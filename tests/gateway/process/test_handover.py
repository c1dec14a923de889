"""One process hands over to the next: SIGHUP, `serve --take-over`, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from fakes.budgets import budget, toml, uses
from fakes.handing_over import END, begin, exit_code, is_parent, logged, next_line, reload, streaming, successors
from fakes.mistakes import tells
from fakes.preloaded import penstock
from fakes.process import ROOT, Gateway, beside_an_agent, limit_files, running, upstreams, write_config
from fakes.provider import Provider, serving
from fakes.raw import connect, get, post
from fakes.tape import Tape
from fakes.waiting import until

from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.process import parent
from penstock.gateway.tape.store import Store

FULL = 16_384
"""The first pages of a tape: what is written comes after them."""


async def answered(http: aiohttp.ClientSession, gateway: Gateway, rollout: str, model: str = "m") -> int:
    """The status of a call on a new connection."""
    async with http.post(f"{gateway.openai(rollout)}/chat/completions", json={"model": model}) as answer:
        return answer.status


@pytest.mark.smoke
@pytest.mark.slow
async def test_a_reload_changes_the_settings_and_breaks_no_stream(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving() as provider, streaming() as (odd, config), running(tmp_path, config) as gateway:
        async with connect(gateway.url) as client, connect(gateway.url) as idle:
            idle.send(get("/healthz", host="127.0.0.1"))
            await idle.message()
            await begin(client, "old")
            gateway.config.write_text("[limits]\ndrain_seconds = 2\n" + upstreams(openai=provider.openai_url))
            await reload(gateway)
            tape = Tape(gateway.url, http)
            assert (await tape.open_span("old")).status == "open", "the new process knows that it runs elsewhere"

            # The old process serves the clients that it has, and tells them to come again on another connection.
            idle.send(get("/readyz", host="127.0.0.1"))
            assert b"Connection: close\r\n" in await idle.message()
            assert await idle.gone() == "eof"
            assert await answered(http, gateway, "new") == 200, "the new settings are for new connections"
            async with http.get(f"{gateway.url}/api/changes?name=old") as feed:
                odd.go("go")
                # As soon as the client has the last byte, the tape has the call, whichever process is asked.
                assert await client.message() == END
                rewards = {"value": 1.0, "source": "judge"}
                async with http.post(f"{gateway.url}/api/rollouts/old/attempts/a1/rewards", json=rewards) as answer:
                    assert answer.status < 300, await answer.text()
                spans = (await tape.get("/api/rollouts/old/attempts/a1/spans"))["spans"]
                assert [span["status"] for span in spans if span["kind"] == "llm"] == ["ok"]
                told = b""
                async with asyncio.timeout(60):
                    while b'"status":"ok"' not in told:
                        told += await feed.content.readline()
        await is_parent(gateway)
        for rollout, upstream in (("old", "up"), ("new", "fake-openai")):
            spans = [span for span in await tape.spans(rollout, 1 + (rollout == "old")) if span.kind == "llm"]
            assert [(span.status, span.upstream) for span in spans] == [("ok", upstream)]
        assert "another process has taken over" in gateway.log

        # The process that was started goes on as the parent: signals and the exit code are as before.
        await gateway.reload()
        await until(lambda: len(successors(gateway.pid)) == 1)
        assert await gateway.terminate() == 0
    assert examine(gateway.data)[1] == []


@pytest.mark.slow
async def test_what_the_old_process_has_and_is_given_counts_in_the_new_one(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """What its calls have reserved of budgets is in its memory, while one process writes the tape alone."""
    async with streaming() as (odd, config), running(tmp_path, config + toml(budget(limit=1))) as gateway:
        async with connect(gateway.url) as client, connect(gateway.url) as old:
            old.send(get("/healthz", host="127.0.0.1"))
            await old.message()
            await begin(client, "old")
            await reload(gateway)
            assert await answered(http, gateway, "new") == 429
            async with Client(gateway.url) as worker:
                claiming = asyncio.ensure_future(worker.claim(ClaimRequest(worker="w", wait_s=60)))
                await asyncio.sleep(0)
                old.send(post("/api/rollouts", b'{"rollouts":[{"id":"r1","input":1}]}', host="127.0.0.1"))
                assert (await old.message()).startswith(b"HTTP/1.1 20")
                assert [one.rollout.id for one in (await claiming).claims] == ["r1"]
            odd.go("go")
            assert await client.message() == END
        assert await uses(http, gateway.url) == [("b", "", 1, 0)]


@pytest.mark.slow
async def test_a_reload_needs_nobody_who_reads_what_it_prints(tmp_path: Path) -> None:
    until_its_first_line = ("bash", "-c", 'exec "$@" > >(head -n 1)', "bash")
    async with running(tmp_path, "", under=until_its_first_line) as gateway:
        os.kill(gateway.pid, signal.SIGHUP)
        await logged(gateway, f"stdout cannot be written (Broken pipe): penstock listening on {gateway.url}")
        await is_parent(gateway)
        async with connect(gateway.url) as client:
            client.send(get("/healthz", host="127.0.0.1"))
            assert (await client.message()).startswith(b"HTTP/1.1 200 ")
        assert await gateway.terminate() == 0


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


@pytest.mark.slow
async def test_a_signal_to_a_process_that_becomes_a_parent_is_passed_on(tmp_path: Path) -> None:
    """It would end this one alone, and nobody could stop the next one any more."""
    (tmp_path / "sitecustomize.py").write_text(WHILE_IT_CHANGES)
    serves = tmp_path / "serves"
    env = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "SERVES": str(serves)}
    async with running(tmp_path / "home", "", env=env, under=("env",)) as gateway:
        next_one = await reload(gateway)
        serves.touch()
        assert await exit_code(gateway) == 0
        assert str(next_one) not in os.listdir("/proc")


@asynccontextmanager
async def running_by_file(home: Path, config: str, *flags: str) -> AsyncGenerator[Gateway]:
    """One whose configuration says where its tape is."""
    path = write_config(home, f'data = "{home / "data"}"\n{config}')
    gateway = Gateway(path, home / "data", home / "stderr", flags, says_data=False)
    await gateway.start()
    try:
        yield gateway
    finally:
        _ = await gateway.terminate()
        print(gateway.log)


async def refuses(gateway: Gateway, config: str, why: str, times: int) -> None:
    """Another configuration is refused, for this reason so many times until now."""
    before = gateway.log.count("goes on")
    gateway.config.write_text(config)
    os.kill(gateway.pid, signal.SIGHUP)
    await until(lambda: gateway.log.count("goes on") > before)
    assert gateway.log.count(why) == times


@pytest.mark.slow
async def test_wrong_settings_are_refused_and_the_old_ones_stay(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    """By the process that was started and, when that is the parent of the next one, in the same words. So is another
    tape, of which nothing is made; a tape by another name is the same."""
    up, elsewhere = upstreams(openai=provider.openai_url), tmp_path / "elsewhere"
    async with running_by_file(tmp_path, up) as gateway:
        wrong = "[limits]\nclient_timout = 3\n", f"{gateway.config}: limits.client_timout"
        await refuses(gateway, *wrong, 1)
        assert await answered(http, gateway, "r") == 200
        (tmp_path / "link").symlink_to(gateway.data)
        gateway.config.write_text(f'data = "{tmp_path / "link"}"\n{up}')
        await gateway.reload()
        await is_parent(gateway)
        await refuses(gateway, *wrong, 2)
        why = f"data: {elsewhere} is another tape than {gateway.data}, which is served"
        await refuses(gateway, f'data = "{elsewhere}"\n', why, 1)
        assert not elsewhere.exists()
        assert gateway.log.count(parent.GOES_ON % 1) == 3
        assert await answered(http, gateway, "r") == 200


@pytest.mark.slow
async def test_another_tape_is_refused_by_workers_too(tmp_path: Path) -> None:
    async with running_by_file(tmp_path, "", "--workers", "2") as gateway:
        elsewhere = tmp_path / "elsewhere"
        await refuses(gateway, f'data = "{elsewhere}"\n', f"data: {elsewhere} is another tape than {gateway.data}", 1)
        assert not elsewhere.exists()


@pytest.mark.slow
async def test_a_reload_while_the_disk_is_full_leaves_a_gateway(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    """What the next process has to write of work that was handed out waits until there is room."""
    async with (
        running(tmp_path, upstreams(openai=provider.openai_url)) as gateway,
        Client(gateway.url) as client,
    ):
        _ = await client.enqueue([RolloutSpec(id="r1")])
        assert len((await client.claim(ClaimRequest(worker="w1", lease_s=600))).claims) == 1
        limit_files(gateway.pid, FULL)
        successor = await reload(gateway)
        assert await answered(http, gateway, "r") == 200
        await is_parent(gateway)
        assert await answered(http, gateway, "r") == 200
        limit_files(successor, None)
        await logged(gateway, "all that only one process may do has begun")
        limit_files(gateway.pid, None)


@pytest.mark.slow
async def test_what_lies_in_its_folder_is_not_run_in_its_place(tmp_path: Path) -> None:
    """An agent's own code, mostly: `python -m` looks there first."""
    async with beside_an_agent(tmp_path) as gateway:
        _ = await reload(gateway)


async def test_a_port_that_is_taken_is_found_before_anything_is_given_away(
    tmp_path: Path, http: aiohttp.ClientSession, gateway: Gateway, provider: Provider
) -> None:
    port = provider.url.rpartition(":")[2]
    flags = ["--config", gateway.config, "--data", gateway.data, "--port", port]
    other = await penstock("serve", "--take-over", *flags, env=os.environ, stderr=asyncio.subprocess.PIPE, cwd=tmp_path)
    assert f"port {port} of 127.0.0.1 is taken" in (await other.communicate())[1].decode()
    assert other.returncode == 1
    async with http.get(f"{gateway.url}/readyz") as answer:
        assert answer.status == 200
    assert "has not started: this one goes on" in gateway.log


@pytest.mark.slow
async def test_many_streams_over_restarts_are_whole(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The full measure, 500 streams and 20 restarts, is `python -m bench.handover`."""
    restarts, at_once = 2, 3
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


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True], ids=["", "and the disk was full meanwhile"])
async def test_calls_of_a_process_that_is_killed_while_it_drains_are_interrupted(
    tmp_path: Path, http: aiohttp.ClientSession, full: bool
) -> None:
    async with streaming() as (_, config), running(tmp_path, config) as gateway, connect(gateway.url) as client:
        await begin(client, "r")
        tape = Tape(gateway.url, http)
        await tape.open_span("r")
        new = await reload(gateway)
        try:
            limit_files(new, 8192 if full else None)
            os.kill(gateway.pid, signal.SIGKILL)
            if full:
                await logged(gateway, "what another process has written is not noticed")
                limit_files(new, None)
            assert [span.status for span in await tape.spans("r", 1)] == ["interrupted"]
        finally:
            os.kill(new, signal.SIGTERM)


@pytest.mark.slow
async def test_a_changed_file_reloads_where_it_may_and_the_socket_is_handed_over(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    path = tmp_path / "gateway.sock"
    may = f'reload_on_change = true\nsocket = "{path}"\n'
    async with running(tmp_path, may) as gateway:
        inode = path.stat().st_ino
        gateway.config.write_text("reload_on_chance = true\n")
        await logged(gateway, "goes on")
        assert f"{gateway.config}: reload_on_chance" in gateway.log
        gateway.config.write_text(may + upstreams(openai=provider.openai_url))
        assert await next_line(gateway) == f"penstock listening on {gateway.url}"
        assert await answered(http, gateway, "r") == 200
        await is_parent(gateway)
        assert path.stat().st_ino == inode
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as inside,
            inside.get("http://localhost/readyz") as answer,
        ):
            assert answer.status == 200
        assert await gateway.terminate() == 0
    assert not path.exists()


@pytest.mark.slow
async def test_a_process_that_nobody_has_started_takes_over_and_the_old_one_ends(tmp_path: Path) -> None:
    """Where there is none, `--take-over` starts one."""
    async with running(tmp_path, "", "--take-over") as gateway:
        assert f"no gateway writes the tape in {gateway.data}" in gateway.log
        other = Gateway(gateway.config, gateway.data, tmp_path / "stderr-2", ("--take-over",))
        await other.start(gateway.port)
        assert other.url == gateway.url
        assert await exit_code(gateway) == 0
        assert await other.terminate() == 0


@pytest.mark.slow
async def test_connections_are_taken_for_a_while_after_sigterm(
    tmp_path: Path, http: aiohttp.ClientSession, provider: Provider
) -> None:
    config = "[limits]\ndrain_delay = 60\n"
    async with running(tmp_path, config + upstreams(openai=provider.openai_url)) as gateway:
        os.kill(gateway.pid, signal.SIGTERM)

        async def is_not_ready() -> bool:
            async with http.get(f"{gateway.url}/readyz") as answer:
                return answer.status == 503

        await until(is_not_ready)
        async with http.post(f"{gateway.openai('late')}/chat/completions", json={"model": "m"}) as answer:
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        assert await gateway.terminate() == 0, "a second signal ends the wait"


@pytest.mark.slow
async def test_what_is_cut_off_is_said(tmp_path: Path) -> None:
    config = "[limits]\ndrain_seconds = 0.1\n"
    async with streaming() as (_, up), running(tmp_path, config + up) as gateway, connect(gateway.url) as client:
        await begin(client, "long")
        assert await gateway.terminate() == 0
        assert tells(gateway.log, "cut off 1 call", "(limits.drain_seconds)", "rollout long")
