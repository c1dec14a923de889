"""A gateway with an index, as people use it: filters, the commands, and kills of either process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from conftest import StartGateway
from fakes.local import Local, locally
from fakes.process import Gateway, alive, child
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import Judgement

ALWAYS, NEVER = '[index]\nwhen = "always"\n', '[index]\nwhen = "never"\n'
FILTERS = ("status:failed", "reward>0.5", "metadata.tenant:t3", "worker:w1 -status:failed", "mode:train group:g1")


async def fill(gateway: Gateway, first: int, count: int) -> None:
    """Rollouts, half of which have ended."""
    async with Client(gateway.url) as client:
        for number in range(first, first + count):
            about = {"tenant": f"t{number % 5}"}
            spec = RolloutSpec(id=f"r{number}", input=number, group=f"g{number % 3}", metadata=about)
            await client.enqueue([spec])
        for one in (await client.claim(ClaimRequest(worker="w1", limit=count // 2))).claims:
            failed = int(one.rollout.id[1:]) % 2
            said = [Judgement(value=1.0 - failed, source="runner")]
            finish = FinishRequest(worker="w1", status="failed" if failed else "succeeded", rewards=said)
            await client.finish(one.rollout.id, one.attempt.id, finish)


async def listed(gateway: Gateway) -> list[list[str]]:
    async with Client(gateway.url) as client:
        return [[row.id async for row in client.rollouts(filter)] for filter in FILTERS]


async def status(gateway: Gateway) -> str:
    async with Client(gateway.url) as client:
        return (await client.index()).status


async def is_ready(gateway: Gateway) -> bool:
    return await status(gateway) == "ready"


async def test_filters_answer_by_it_and_without_it(tmp_path: Path) -> None:
    async with locally(tmp_path, ALWAYS) as gateway:
        await answers_by_it_and_without_it(gateway, Shell(gateway.url, tmp_path))


def loads_pandas(process: int) -> bool:
    """pyarrow would import it where it is installed."""
    return "/pandas/" in Path(f"/proc/{process}/maps").read_text()


async def answers_by_it_and_without_it(gateway: Local, shell: Shell) -> None:
    await fill(gateway, 0, 40)
    await until(lambda: is_ready(gateway))
    by_index = await listed(gateway)
    assert all(by_index)
    async with Client(gateway.url) as client:
        assert await client.stats() == await client.stats(spans=100_000)
    assert "Sums over all spans. " in (await shell.run("stats")).text
    shown = await shell.run("index")
    assert shown.code == 0, shown.err
    assert shown.text.startswith("ready: filters answer from it\nchanges   ")

    process = child(os.getpid(), b"index.process")
    assert not loads_pandas(process)
    os.kill(process, signal.SIGKILL)
    assert await listed(gateway) == by_index  # by a scan
    await fill(gateway, 40, 10)
    by_scan = await listed(gateway)
    await until(lambda: is_ready(gateway))
    assert await listed(gateway) == by_scan

    shown = await shell.run("index", "rebuild")
    assert shown.code == 0, shown.err
    assert await listed(gateway) == by_scan
    assert '"action":"rebuild_index"' in (await shell.run("audit", "--json")).text


async def test_it_is_there_again_after_its_gateway_was_killed_and_ends_with_it(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(ALWAYS)
    await fill(gateway, 0, 20)
    await until(lambda: is_ready(gateway))
    before, process = await listed(gateway), child(gateway.pid, b"index.process")
    await gateway.kill()
    await gateway.start()
    await until(lambda: is_ready(gateway))
    assert await listed(gateway) == before

    async def gone() -> bool:
        return not alive(process)

    await until(gone)
    process = child(gateway.pid, b"index.process")
    await gateway.terminate()
    await until(gone)


async def test_without_one_it_says_why(tmp_path: Path) -> None:
    for name, config, said in (
        ("small", "", "small: the tape has fewer than 20,000 changes: a scan is as fast"),
        ("off", NEVER, 'off: it is turned off ([index] when = "never"): filters scan the tape'),
    ):
        async with locally(tmp_path / name, config) as gateway:
            shell = Shell(gateway.url, tmp_path)
            shown = await shell.run("index", "status")
            assert (shown.code, shown.text.startswith(said)) == (0, True), shown.text
            refused = await shell.run("index", "rebuild")
        why = f"there is no index to make anew: {said.partition(': ')[2]}"
        assert (refused.code, why in " ".join(refused.err.split())) == (1, True)
