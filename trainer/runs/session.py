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
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.config import TrainConfig, check_full
from penstock.trainer.data.collector import RolloutCollector
from penstock.trainer.data.tasks import read_tasks
from penstock.trainer.engines.engine_factory import make_engine
from penstock.trainer.engines.machine import describe_machine
from penstock.trainer.runs.companions import RetryClient, keep_running, run_after, run_alongside, send_heartbeats
from penstock.trainer.runs.evaluation import read_suites
from penstock.trainer.runs.grpo import TrainingLoop
from penstock.trainer.runs.online import OnlineLoop
from penstock.trainer.runs.pairs import PairLoop
from penstock.trainer.runs.preflight import check
from penstock.trainer.runs.prompt_setup import PromptSetup, prepare_prompts
from penstock.trainer.runs.report import RunDisplay, RunReporter, run_blocking, supervise
from penstock.trainer.serving.publisher import Publisher, release_policy
from penstock.trainer.serving.vllm import (
    Replicas,
    ServerSupervisor,
    VllmServer,
    adapter_arguments,
    replicas_of,
    server_arguments,
)


def grpo(
    config: TrainConfig, gateway: str, key: str | None, shown: RunDisplay, online: bool, prompts: ApoConfig | None
) -> None:
    """Do a whole run. Raises `RunError` when it ended early. `online`: learn from production; `prompts`: look for
    prompts too."""
    run_blocking(_grpo(config, gateway, key, shown, online, prompts))


async def _grpo(
    config: TrainConfig, gateway: str, key: str | None, shown: RunDisplay, online: bool, prompts: ApoConfig | None
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
        RetryClient(gateway, key) as client,
        prepare_prompts(prompts, config, tasks, suites[0].tasks if suites else [], client, gateway) as more,
    ):
        failed = config.rollouts.failed_reward
        options = Options(model=config.model.name)
        collector = RolloutCollector(
            client, run.name, options, None if failed == "drop" else failed, config.rollouts.temperature
        )
        publisher = Publisher(client, config.model.name, config.inference.upstream, config.inference.base, run.name)
        reporter = RunReporter(client, run.name, shown)
        async with _serving(config, client, reporter, more is not None) as servers:
            if online:
                loop = OnlineLoop(config, engine, client, collector, publisher, reporter, suites, servers)
            elif more is not None:
                loop = PairLoop(config, engine, collector, publisher, reporter, more, suites, servers)
            else:
                loop = TrainingLoop(config, engine, collector, publisher, reporter, tasks, suites, servers)
            loop.restore()
            first = loop.progress.step + 1 if loop.progress.step else 0

            async def work() -> None:
                await reporter.begin("grpo", _told(config, more), run.steps, first)
                await reporter.event(loop.progress.step, describe_machine(engine.model))
                for doubt in doubts:
                    await reporter.event(loop.progress.step, doubt, "warning")
                beside = [collector.run(), send_heartbeats(reporter), *([] if servers is None else [servers.run()])]
                if config.rollouts.run:
                    words = ["--mode", "train,val", *config.rollouts.run]
                    log = config.run.directory / "runner.log"
                    beside.append(run_after(loop.served, lambda: keep_running(words, gateway, key, log)))
                beside += [loop.production.run()] if isinstance(loop, OnlineLoop) else []
                beside += [] if more is None else [more.waiter.run()]
                await run_alongside(loop.run(), beside)

            await supervise(work(), reporter, lambda: loop.progress.step)


def _told(config: TrainConfig, more: PromptSetup | None) -> dict[str, Any]:
    """Return the settings that the run was started with, for the tape."""
    prompts = {} if more is None else {"apo": more.settings.model_dump(mode="json")}
    return config.model_dump(mode="json") | prompts


def _named(config: TrainConfig) -> Any:
    if config.rollouts.tasks is None:
        raise ConfigError("rollouts.tasks: name a JSONL file with the tasks that agents are given, one a line")
    check_full(config)
    return config.rollouts.tasks


@asynccontextmanager
async def _serving(
    config: TrainConfig, client: RetryClient, reporter: RunReporter, pairs: bool
) -> AsyncGenerator[ServerSupervisor | Replicas | None]:
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
        keeping = ServerSupervisor(client, server, wanted.upstream, reporter.warning)
    try:
        yield keeping
    finally:
        await server.stop()


def _server(config: TrainConfig, python: Path, cpu: bool, pairs: bool) -> VllmServer:
    """Return a server for adapters of the model."""
    wanted, url = config.inference, f"http://127.0.0.1:{config.inference.port}/v1"
    # The versions that samples may have, the next one, and one for a canary.
    slots = config.rollouts.staleness + 3 + pairs
    more = [*adapter_arguments(config.model.rank, slots), *wanted.flags]
    words = server_arguments(config.model.path.absolute(), wanted.base, url, more)
    return VllmServer(python, words, url, config.run.directory / "vllm.log", cpu)
