"""How a run of `penstock train custom` lives and ends, whatever it does: on the tape, and without waiting in vain."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.run import NewRun, Run
from penstock.trainer.apo.custom import CustomArguments, CustomRun, _train
from penstock.trainer.runs import supervision
from penstock.trainer.runs.supervision import LogDisplay

MODULE = """
import asyncio

async def at_once(run):
    pass

async def forever(run):
    await asyncio.Event().wait()
"""
SETTINGS = 400
"""So many that it takes a while to say that each of them has changed."""


@pytest.fixture
def shell(gateway: Gateway, tmp_path: Path) -> Shell:
    """A folder with algorithms."""
    (tmp_path / "mine.py").write_text(MODULE)
    return Shell(gateway.url, tmp_path)


async def run_of(gateway: Gateway, name: str = "custom") -> Run:
    """A run on the tape."""
    async with Client(gateway.url) as client:
        return await client.run(name)


async def test_a_signal_before_the_function_is_called_stops_the_run_too(shell: Shell, gateway: Gateway) -> None:
    for life in range(2):
        (shell.folder / "custom.toml").write_text("".join(f"a{at} = {life}\n" for at in range(SETTINGS)))
        if life == 0:
            done = await shell.run("train", "custom", "mine:at_once", "custom.toml")
            assert done.code == 0, done.err
    async with Client(gateway.url) as client, asyncio.timeout(60):
        cursor = (await client.stats(spans=0)).cursor
        process = await shell.start("train", "custom", "mine:forever", "custom.toml")
        async with aclosing(client.changes(cursor, ["run"])) as changes:
            _ = await anext(changes)
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
    run = await run_of(gateway)
    assert (process.returncode, run.status, run.resumed) == (1, "stopped", 1), err
    assert tells(run.message, "stopped after step 0", "same command")


async def test_a_run_of_another_kind_goes_on_when_its_name_is_taken(shell: Shell, gateway: Gateway) -> None:
    async with Client(gateway.url) as client:
        await client.start_run(NewRun(id="custom", kind="sft"))
    done = await shell.run("train", "custom", "mine:at_once")
    assert (done.code, tells(done.err, "'custom'", "run of sft")) == (1, True), done.err
    assert (await run_of(gateway)).status == "running"


async def test_what_goes_wrong_before_the_function_is_called_ends_the_run(shell: Shell, gateway: Gateway) -> None:
    (shell.folder / "penstock-custom").write_text("not a folder")
    done = await shell.run("train", "custom", "mine:forever", "--agent", "python agent.py")
    run = await run_of(gateway)
    assert (done.code, run.status) == (1, "failed"), done.err
    assert "penstock-custom" in done.err


async def test_a_signal_stops_a_run_that_waits_to_say_that_it_has_succeeded(shell: Shell, gateway: Gateway) -> None:
    (shell.folder / "waits.py").write_text(
        "import asyncio, sys\n\nasync def waits(run):\n    print('begun', file=sys.stderr, flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
    )
    process = await shell.start("train", "custom", "waits:waits", stdin=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE):
            assert await process.stderr.readline() == b"begun\n"
            _ = await gateway.kill()
            process.stdin.write(b"\n")
            assert await process.stderr.readline() == b"all 0 steps are done\n"
            process.send_signal(signal.SIGTERM)
            _, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, "the gateway was not told" in err.decode()) == (1, True), err


async def test_a_function_that_waits_for_long_is_not_taken_for_silent(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "ALIVE_S", 0.05)
    begun, waits = asyncio.Event(), asyncio.Event()

    async def waiting(run: CustomRun) -> None:
        begun.set()
        await waits.wait()

    wanted = CustomArguments("custom", waiting, {}, [], None)
    training = asyncio.ensure_future(_train(wanted, gateway.url, None, LogDisplay(None)))
    await begun.wait()
    before = (await run_of(gateway)).last_seen_ns

    async def heard() -> bool:
        return (await run_of(gateway)).last_seen_ns > before

    await until(heard)
    waits.set()
    await training


async def test_a_run_that_goes_on_does_not_say_how_it_ended_before(shell: Shell, gateway: Gateway) -> None:
    (shell.folder / "again.py").write_text(
        "async def again(run):\n    now = await run.client.run(run.name)\n"
        "    await run.tell(f'message: {now.message}')\n"
        "    assert now.resumed, 'a bug'\n"
    )
    first = await shell.run("train", "custom", "again:again")
    assert (first.code, (await run_of(gateway)).message) == (1, "AssertionError: a bug")
    second = await shell.run("train", "custom", "again:again")
    assert (second.code, "message: None\n" in second.err) == (0, True), second.err


async def test_without_a_gateway_it_says_so_at_once(shell: Shell, gateway: Gateway) -> None:
    _ = await gateway.kill()
    done = await shell.run("train", "custom", "mine:at_once")
    assert (done.code, tells(done.err, "`penstock serve`", "--gateway")) == (1, True), done.err


async def test_a_function_that_exits_has_failed(shell: Shell, gateway: Gateway) -> None:
    (shell.folder / "exits.py").write_text("import sys\n\nasync def exits(run):\n    sys.exit('no more tasks')\n")
    done = await shell.run("train", "custom", "exits:exits")
    run = await run_of(gateway)
    said = "the function has left by sys.exit: no more tasks"
    assert (done.code, run.status, run.message) == (1, "failed", said), done.err
    assert "Traceback" not in done.err
