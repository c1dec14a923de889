"""A whole run: a gateway, its clients, what goes wrong, and what the tape says of it in the end."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from collections import Counter
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import fakes.engine
from e2e.chaos.provider import serving
from e2e.histories import checker, clients, history, hosted_tools, tape, tool_server, weights
from e2e.histories.clock import Clock, compiler
from e2e.histories.nemesis import CLOCK, FAULTS, SPACE, Nemesis
from e2e.histories.operating import operator
from e2e.histories.release_rules import RESOURCES
from e2e.histories.served import Served
from e2e.histories.world import World
from fakes.disks import Disk, disk_or_none
from fakes.mcp_hosted import until_left
from fakes.ports import steady_ports
from fakes.process import Gateway, upstream, upstreams, write_config
from fakes.waiting import until

from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client

MCP = """[mcp.servers.tools]
url = "{url}"

[mcp.servers.hosted]
command = {command}
processes = 1000
"""
DISK = 64 << 20
"""Bytes of the disk of a tape, where one can be mounted."""
CONFIG = '[tape]\nrecord = "{record}"\n\n[limits]\ndrain_seconds = 3\n\n'


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run. The seed says what clients and faults do; how that falls together is the machine's."""

    seed: int = 1
    seconds: float = 60.0
    faults: tuple[str, ...] = tuple(FAULTS)
    pause_s: tuple[float, float] = (1.0, 5.0)
    """Between two faults."""
    callers: int = 3
    workers: int = 4
    followers: int = 2
    operators: int = 2
    lease_s: float = 2.0
    strict: bool = True
    processes: int = 1
    """Workers of the gateway (`penstock serve --workers`)."""


@dataclass(slots=True)
class Report:
    """How it went."""

    plan: Plan
    problems: list[str]
    operations: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    figures: dict[str, int] = field(default_factory=dict[str, int])
    left_out: list[str] = field(default_factory=list[str])
    """What could not be done here."""

    def __str__(self) -> str:
        lines = [
            f"seed {self.plan.seed}, {'strict' if self.plan.strict else 'batched'}, {self.plan.processes} processes"
        ]
        lines += [f"  operations: {_counts(self.operations)}", f"  faults: {_counts(self.faults)}"]
        lines += [f"  on the tape: {_counts(Counter(self.figures))}"]
        lines += [f"  {one}" for one in self.left_out]
        lines += [f"  {len(self.problems)} problems", *(f"    {one}" for one in self.problems[:50])]
        return "\n".join(lines)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "none"


async def run(plan: Plan, home: Path) -> Report:
    """All of it; everything is left below `home`, the history in `history.jsonl`."""
    written = history.History(home / "history.jsonl")
    clock = Clock(home) if compiler() and CLOCK & set(plan.faults) else None
    with disk_or_none(home / "disk", DISK) if SPACE & set(plan.faults) else nullcontext() as disk:
        data = (home / "gateway" if disk is None else disk.path) / "data"
        try:
            found, nemesis = await _recorded(plan, home, data, written, clock, disk)
        finally:
            if disk is not None:
                shutil.copytree(data, home / "gateway" / "data")
        figures, wrong = examine(home / "gateway" / "data")
        wrong += await _left(_mark(home))
    return _judged(plan, history.read(written.path), found, figures, wrong, nemesis)


async def _recorded(
    plan: Plan, home: Path, data: Path, written: history.History, clock: Clock | None, disk: Disk | None
) -> tuple[tape.Tape, Nemesis]:
    """What the tape says in the end, and what has struck."""
    config, under = CONFIG.format(record="strict" if plan.strict else "batched"), ("/usr/bin/env",) if clock else ()
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(serving())
        tools = await stack.enter_async_context(tool_server.serving())
        engine = await stack.enter_async_context(fakes.engine.serving(weights.Weights()))
        config += upstreams(openai=provider.url) + upstream(weights.UPSTREAM, engine.openai_url, "openai")
        config += MCP.format(url=tools.url, command=json.dumps([sys.executable, hosted_tools.__file__, _mark(home)]))
        written_config, log = write_config(home / "gateway", config), home / "gateway" / "stderr"
        flags = ("--workers", str(plan.processes)) if plan.processes > 1 else ()
        gateway = Gateway(written_config, data, log, flags, env=clock.env if clock else {}, under=under)
        # The port is known before: a process that finds none that it could take it over from opens it anew.
        await gateway.start(steady_ports(1)[0])
        served = Served(gateway)
        client = await stack.enter_async_context(Client(gateway.url))
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        chance = random.Random(plan.seed)
        stop_s = plan.lease_s + chance.uniform(0.5, 2)
        nemesis = Nemesis(written, served, provider, tools, engine, clock, disk, chance, stop_s)
        world = World(plan.seed, gateway.url, written, http, client, plan.lease_s)
        try:
            await _meanwhile(plan, world, nemesis)
            await until(lambda: _is_quiet(client))
            seen = provider.seen | tools.seen | engine.seen
            return await tape.read(client, seen, engine.served, RESOURCES), nemesis
        finally:
            written.close()
            await served.stop()


async def _meanwhile(plan: Plan, world: World, nemesis: Nemesis) -> None:
    """Clients and faults; then clients come to an end, and followers when they have seen it."""
    actors = [clients.caller(world, f"caller-{number}") for number in range(plan.callers)]
    actors += [clients.worker(world, f"worker-{number}") for number in range(plan.workers)]
    actors += [clients.producer(world, "producer")]
    actors += [clients.releaser(world, f"releaser of {resource}", resource) for resource in RESOURCES]
    actors += [operator(world, f"operator-{number}") for number in range(plan.operators)]
    actors += [clients.follower(world, f"follower-{number}") for number in range(plan.followers)]
    faults = nemesis.possible(plan.faults, plan.processes)
    async with asyncio.TaskGroup() as group:
        for actor in actors:
            _ = group.create_task(actor)
        await nemesis.run(faults, plan.seconds, plan.pause_s)
        world.over.set()


def _mark(home: Path) -> str:
    """In the command of every server of tools that the gateway hosts."""
    return f"tools-of-{home.resolve()}"


async def _left(mark: str) -> list[str]:
    """Servers of tools that have not ended with their gateways."""
    try:
        await until_left(mark, 0)
    except AssertionError as error:
        return [str(error)]
    return []


async def _is_quiet(client: Client) -> bool:
    """No call runs any more."""
    return not [span async for span in client.recent_spans("status:open", 1)]


def _judged(
    plan: Plan,
    done: list[history.Operation],
    found: tape.Tape,
    figures: dict[str, int],
    wrong: list[str],
    nemesis: Nemesis,
) -> Report:
    report = Report(plan, checker.problems(done, found, plan.strict) + wrong, figures=figures)
    report.operations.update(f"{one.kind} {one.result}" for one in done if one.kind not in ("fault", "follow"))
    report.faults.update(one.asked["what"] for one in done if one.kind == "fault")
    if nemesis.clock is None and CLOCK & set(plan.faults):
        report.left_out.append("the clock was not set: there is no C compiler")
    if nemesis.disk is None and SPACE & set(plan.faults):
        report.left_out.append("no disk was full: none can be mounted here; the file of the tape may not grow instead")
    return report
