"""`penstock train grpo`: checks a run, and wires it together. Imports torch."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import torch

from penstock.adapters.samples import Options
from penstock.gateway.client.child_process import ChildProcess
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.state import RouteView, UpstreamList
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.config import InferenceSettings, TrainConfig, check_full
from penstock.trainer.data.collector import RolloutCollector
from penstock.trainer.data.tasks import read_tasks
from penstock.trainer.engines.policy import describe_machine
from penstock.trainer.engines.remote import make_engine
from penstock.trainer.runs.evaluation import read_suites
from penstock.trainer.runs.grpo import TrainingLoop
from penstock.trainer.runs.online import OnlineLoop
from penstock.trainer.runs.pairs import PairLoop, PromptSetup, prepare_prompts
from penstock.trainer.runs.supervision import (
    RetryClient,
    RunDisplay,
    RunReporter,
    keep_running,
    run_after,
    run_alongside,
    run_blocking,
    send_heartbeats,
    supervise,
)
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
    doubts = await check_run(config, gateway, key)
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


# Checks a run before it loads or starts anything: the gateway, its route for the model, the inference server, the
# agents' command and their judge.
#
# Each check raises a `ConfigError` that names the field, the value and the way out. Errors that only rollouts can
# show are left to `IdleStepCounter`.

ANSWER_S: Final = 10.0
"""Seconds that a running server may take to answer."""
CHECK_S: Final = 300.0
"""Seconds that the check of the agents' command and their judge may take."""
REFUSED: Final = 2
"""The runner's exit code when agents or judge cannot work."""


async def check_run(config: TrainConfig, gateway: str, key: str | None) -> list[str]:
    """Return warnings for a person. Raises `ConfigError`, and `ClientError` if the gateway refuses the key."""
    check_python(config.inference)
    async with Client(gateway, key) as client:
        check_routes(config, await _calls_of(client, gateway))
    await check_servers(config.inference)
    return await check_runner(config, gateway, key)


async def _calls_of(client: Client, gateway: str) -> UpstreamList:
    try:
        async with asyncio.timeout(ANSWER_S):
            return await client.upstream_list()
    except TimeoutError:
        why = f"it has said nothing for {ANSWER_S:g} s"
    except ClientError as error:
        if not error.temporary:
            raise
        why = str(error)
    raise ConfigError(f"--gateway: no gateway answers at {gateway}: {why}; start it (penstock serve), or name another")


# -- the gateway -------------------------------------------------------------------------------------------------------


def check_routes(config: TrainConfig, calls: UpstreamList) -> None:
    """Raise `ConfigError` unless calls to the model are recorded for training, and its server is one of the
    gateway's."""
    wanted, model = config.inference.upstream, config.model.name
    names = [one.name for one in calls.upstreams]
    for name in [wanted, f"{wanted}-2"][: 2 if config.model.weights == "full" else 1]:
        if name not in names:
            raise ConfigError(
                f"inference.upstream: there is no upstream {name!r}; it is the name of an [[upstream]] of the gateway, "
                f"which has {', '.join(map(repr, names))}"
            )
    route = next((one for one in calls.routes if one.matches(model)), None)
    if route is None or not route.train:
        raise ConfigError(f"model.name: {_untrained(model, wanted, route, calls.routes)}")


def _untrained(model: str, upstream: str, route: RouteView | None, routes: Sequence[RouteView]) -> str:
    if route is not None:
        return (
            f"the gateway's [[route]] {route.model!r}, which serves {model!r}, says train = false: its calls are "
            "recorded without token ids; set train = true in penstock.toml and restart the gateway"
        )
    others = f"it has {', '.join(repr(one.model) for one in routes)}" if routes else "it has none at all"
    return (
        f"no [[route]] of the gateway is for {model!r} ({others}): "
        f'add one with model = "{model}", upstream = "{upstream}" and train = true to penstock.toml and restart the '
        "gateway, or set model.name to what is routed"
    )


# -- the inference server ----------------------------------------------------------------------------------------------


def check_python(wanted: InferenceSettings) -> None:
    """Raise `ConfigError` unless a server that the run must start has a Python."""
    if wanted.urls:
        return
    if wanted.python is None:
        raise ConfigError(
            "inference.python: name the Python of an environment with vLLM in it, so that a server can be started, or "
            "in inference.urls one that runs"
        )
    if not (wanted.python.is_file() and os.access(wanted.python, os.X_OK)):
        what = "cannot be executed" if wanted.python.exists() else "is not there"
        raise ConfigError(
            f"inference.python: {wanted.python} {what}; name the Python of an environment with vLLM in it, such as "
            "vllm/bin/python"
        )


async def check_servers(wanted: InferenceSettings) -> None:
    """Raise `ConfigError` unless running servers answer."""
    timeout = aiohttp.ClientTimeout(ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for url in wanted.urls:
            try:
                async with http.get(f"{url}/models") as answer:
                    _ = await answer.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                why = f"it does not answer within {ANSWER_S:g} s" if isinstance(error, TimeoutError) else str(error)
                raise ConfigError(
                    f"inference.urls: {url} cannot be reached: {why}; start that server, or leave inference.urls out "
                    "and name inference.python"
                ) from None


# -- agents and their judge --------------------------------------------------------------------------------------------


async def check_runner(config: TrainConfig, gateway: str, key: str | None) -> list[str]:
    """Check the agents that the run starts itself, and try their judge on a task. Return the warnings of `penstock run
    --check`. Raises `ConfigError`."""
    words, tasks = config.rollouts.run, config.rollouts.tasks
    if not words:
        return []
    start = [sys.executable, "-P", "-m", "penstock", "run", "--gateway", gateway]
    command = [*start, f"--check={tasks or os.devnull}", *words]
    code, said = await _ran(command, dict(os.environ) | ({"PENSTOCK_ADMIN_KEY": key} if key else {}))
    if code != 0:
        raise ConfigError(f"rollouts.run: {said or f'penstock run --check ended with {code}'}")
    return [f"rollouts.run: {line}" for line in said.splitlines()]


async def _ran(command: Sequence[str], env: dict[str, str]) -> tuple[int | None, str]:
    """Return (exit code, stderr); None as the code when it took too long."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        env=env, cwd=Path.cwd(),
    )  # fmt: skip
    try:
        _, said = await ChildProcess(process).output(CHECK_S)
    except TimeoutError:
        return None, f"penstock run --check did not end within {CHECK_S:g} s"
    return process.returncode, said.decode(errors="replace").removeprefix("penstock: ").strip()
