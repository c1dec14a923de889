"""What forgetting costs: `python -m bench.retention`.

A gateway serves a made tape (`bench.question_tape`). One rollout is forgotten by a person, then a rule takes all of one
mode; each time until nothing is left of them in the file and the index.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path

from bench import procfs, question_tape
from bench.rollouts import process, said
from bench.store import HERE, Figure, report
from penstock.gateway.client.client import Client

OUT = HERE / "out" / "retention.json"
RULE = '[[retention]]\nfilter = "mode:train"\nafter = "1d"\n'


async def nothing_left(url: str) -> int:
    """Wait until nothing is left; return the number of forgotten rollouts."""
    async with Client(url) as client:
        while True:
            view = await client.retention()
            if view.done and (not view.rules or view.looked_ns):
                return view.forgotten
            await asyncio.sleep(0.02)


async def indexed(url: str) -> None:
    async with Client(url) as client:
        while True:
            if (await client.index()).status == "ready":
                return
            await asyncio.sleep(0.02)


async def forgotten(url: str) -> float:
    """Forget one rollout; return the seconds until nothing is left of it."""
    await indexed(url)
    async with Client(url) as client:
        rollout = [one.id async for one in client.rollouts("mode:train", 50)][-1]
        began = time.perf_counter()
        await client.forget(rollout)
    await nothing_left(url)
    return time.perf_counter() - began


def measured(data: Path) -> list[Figure]:
    """Measure the forgetting of one rollout, then of many."""
    config = data / "penstock.toml"
    usual = f'port = 0\ndata = "{data}"\n[index]\nwhen = "always"\n'
    config.write_text(usual)
    with process(["-m", "penstock", "serve", "--config", str(config)], data / "gateway.log") as gateway:
        one = asyncio.run(forgotten(said(gateway).rpartition(" ")[2]))
    config.write_text(usual + RULE)
    began = time.perf_counter()
    with process(["-m", "penstock", "serve", "--config", str(config)], data / "gateway.log") as gateway:
        gone = asyncio.run(nothing_left(said(gateway).rpartition(" ")[2])) - 1
        seconds, cpu = time.perf_counter() - began, procfs.cpu_seconds(gateway.pid)
    return [
        Figure("one rollout, until nothing is left", one, "s"),
        Figure("taken by a rule", gone, "rollouts"),
        Figure("the same, until nothing is left", seconds, "s"),
        Figure("the same, CPU of the gateway a rollout", 1e3 * cpu / gone, "ms"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000, help="calls on the tape (default: 10,000)")
    given = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        calls, rollouts = question_tape.make(data, given.calls)
        print(f"{calls:,} calls in {rollouts:,} rollouts")
        report(measured(data), OUT)
    finally:
        shutil.rmtree(data)


if __name__ == "__main__":
    main()
