"""`penstock train grpo`: wires a run together. Imports torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.adapters.samples import Options
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import Config as Settings
from penstock.trainer.config import Config
from penstock.trainer.config_checks import check_full
from penstock.trainer.data.collect import Collector
from penstock.trainer.data.tasks import read_tasks
from penstock.trainer.engines.choose import make_engine
from penstock.trainer.engines.machine import described
from penstock.trainer.runs.ending import to_its_end, whole
from penstock.trainer.runs.evaluation import read_suites
from penstock.trainer.runs.grpo import Loop
from penstock.trainer.runs.online import OnlineLoop
from penstock.trainer.runs.pairs import PairLoop
from penstock.trainer.runs.patient_client import Patient
from penstock.trainer.runs.preflight import check
from penstock.trainer.runs.prompting import Prompting, prompting
from penstock.trainer.runs.report import Display, Reporter
from penstock.trainer.runs.runner import after, keep_running, stay_alive, with_others
from penstock.trainer.serving.publish import Publisher, release_policy
from penstock.trainer.serving.replicas import Replicas, replicas_of
from penstock.trainer.serving.restart import Upkeep
from penstock.trainer.serving.vllm import Server, adapters, arguments


def grpo(config: Config, gateway: str, key: str | None, shown: Display, online: bool, prompts: Settings | None) -> None:
    """Do a whole run. Raises `RunError` when it ended early. `online`: learn from production; `prompts`: look for
    prompts too."""
    whole(_grpo(config, gateway, key, shown, online, prompts))


async def _grpo(
    config: Config, gateway: str, key: str | None, shown: Display, online: bool, prompts: Settings | None
) -> None:
    run = config.run
    run.directory.mkdir(parents=True, exist_ok=True)
    tasks = [] if online else read_tasks("rollouts.tasks", _named(config))
    # An error in the policy must show before the training, not after.
    _ = release_policy(config.publish)
    doubts = await check(config, gateway, key)
    suites = read_suites(config)
    engine = await asyncio.to_thread(make_engine, config, config.loss.kl > 0)
    async with (
        Patient(gateway, key) as client,
        prompting(prompts, config, tasks, suites[0].tasks if suites else [], client, gateway) as more,
    ):
        failed = config.rollouts.failed_reward
        options = Options(model=config.model.name)
        collector = Collector(
            client, run.name, options, None if failed == "drop" else failed, config.rollouts.temperature
        )
        publisher = Publisher(client, config.model.name, config.inference.upstream, config.inference.base, run.name)
        reporter = Reporter(client, run.name, shown)
        async with _serving(config, client, reporter, more is not None) as servers:
            if online:
                loop = OnlineLoop(config, engine, client, collector, publisher, reporter, suites, servers)
            elif more is not None:
                loop = PairLoop(config, engine, collector, publisher, reporter, more, suites, servers)
            else:
                loop = Loop(config, engine, collector, publisher, reporter, tasks, suites, servers)
            loop.restore()
            first = loop.place.step + 1 if loop.place.step else 0

            async def work() -> None:
                await reporter.begin("grpo", _told(config, more), run.steps, first)
                await reporter.event(loop.place.step, described(engine.model))
                for doubt in doubts:
                    await reporter.event(loop.place.step, doubt, "warning")
                beside = [collector.run(), stay_alive(reporter), *([] if servers is None else [servers.run()])]
                if config.rollouts.run:
                    words = ["--mode", "train,val", *config.rollouts.run]
                    log = config.run.directory / "runner.log"
                    beside.append(after(loop.served, lambda: keep_running(words, gateway, key, log)))
                beside += [loop.traffic.run()] if isinstance(loop, OnlineLoop) else []
                beside += [] if more is None else [more.awaited.run()]
                await with_others(loop.run(), beside)

            await to_its_end(work(), reporter, lambda: loop.place.step)


def _told(config: Config, more: Prompting | None) -> dict[str, Any]:
    """Return the settings that the run was started with, for the tape."""
    prompts = {} if more is None else {"apo": more.settings.model_dump(mode="json")}
    return config.model_dump(mode="json") | prompts


def _named(config: Config) -> Any:
    if config.rollouts.tasks is None:
        raise ConfigError("rollouts.tasks: name a JSONL file with the tasks that agents are given, one a line")
    check_full(config)
    return config.rollouts.tasks


@asynccontextmanager
async def _serving(
    config: Config, client: Patient, reporter: Reporter, pairs: bool
) -> AsyncGenerator[Upkeep | Replicas | None]:
    """Keep our servers running; yield None if the servers are not ours. `pairs`: the first weights are needed at the
    end."""
    wanted = config.inference
    if wanted.urls:
        yield None
        return
    assert wanted.python is not None, "it was checked before"
    cpu = not torch.cuda.is_available()
    if config.model.weights == "full":
        server = keeping = replicas_of(config, client, reporter.warning, wanted.python, cpu)
    else:
        server = _server(config, wanted.python, cpu, pairs)
        keeping = Upkeep(client, server, wanted.upstream, reporter.warning)
    try:
        yield keeping
    finally:
        await server.stop()


def _server(config: Config, python: Path, cpu: bool, pairs: bool) -> Server:
    """Return a server for adapters of the model."""
    wanted, url = config.inference, f"http://127.0.0.1:{config.inference.port}/v1"
    # The versions that samples may have, the next one, and one for a canary.
    slots = config.rollouts.staleness + 3 + pairs
    more = [*adapters(config.model.rank, slots), *wanted.flags]
    words = arguments(config.model.path.absolute(), wanted.base, url, more)
    return Server(python, words, url, config.run.directory / "vllm.log", cpu)
