"""`penstock train grpo`: wires a run together, and sees to its end. Imports torch.

Whatever ends a run is said on the tape as well: it has `succeeded`, was `stopped` by a signal, or has `failed` with a
sentence. A run that was stopped or has failed goes on from its newest checkpoint when the same command is given again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from adapters.samples import Options
from gateway.client import ClientError
from gateway.strict import ConfigError
from trainer.checkpoint import CheckpointError
from trainer.children import spawn
from trainer.collect import CollectError, Collector
from trainer.config import Config
from trainer.display import display
from trainer.engine import Engine
from trainer.inference import InferenceError, Server, arguments
from trainer.loop import Loop
from trainer.patience import Patient
from trainer.publish import Publisher, PublishError, release_policy
from trainer.report import Display, Reporter
from trainer.tasks import TaskError, read_tasks


class RunError(Exception):
    """A run has ended before its time; the message says why."""


EXPECTED = (CheckpointError, ClientError, CollectError, ConfigError, InferenceError, PublishError, RunError, TaskError)
"""What ends a run with a sentence and not with a traceback."""


def grpo(config: Config, gateway: str, key: str | None) -> None:
    """A whole run. Raises `RunError` when it has not come to its end."""
    with display(config.run.steps) as shown:
        try:
            asyncio.run(_grpo(config, gateway, key, shown))
        except EXPECTED as error:
            raise RunError(str(error)) from None


async def _grpo(config: Config, gateway: str, key: str | None, shown: Display) -> None:
    run = config.run
    run.directory.mkdir(parents=True, exist_ok=True)
    tasks = read_tasks(_named(config))
    # What is wrong with it shall be known before the training, not after.
    _ = release_policy(config.publish)
    held_out = [] if config.evaluate.tasks is None else read_tasks(config.evaluate.tasks)
    engine = await asyncio.to_thread(Engine, config, config.loss.kl > 0)
    async with Patient(gateway, key) as client, _serving(config) as serving:
        collector = Collector(client, run.name, Options(model=config.model.name))
        publisher = Publisher(client, config.model.name, config.inference.upstream, config.inference.base, run.name)
        reporter = Reporter(client, run.name, shown)
        loop = Loop(config, engine, collector, publisher, reporter, tasks, held_out, serving)
        loop.restore()
        first = loop.place.step + 1 if loop.place.step else 0
        await reporter.begin("grpo", config.model_dump(mode="json"), run.steps, first)
        beside = [collector.run(), *([_running(config, gateway, key)] if config.rollouts.run else [])]
        await _to_its_end(loop, reporter, _beside(loop.run(), beside))


def _named(config: Config) -> Any:
    if config.rollouts.tasks is None:
        raise ConfigError("rollouts.tasks: name a JSONL file with the tasks that agents are given, one a line")
    if config.model.weights == "full":
        raise ConfigError(
            'model.weights: "full" cannot be served while it is trained here: use "lora", whose versions stand side by '
            "side on one server"
        )
    return config.rollouts.tasks


async def _to_its_end(loop: Loop, reporter: Reporter, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        await reporter.end("stopped", f"stopped after step {loop.place.step}; the same command goes on")
        raise RunError("stopped") from None
    except Exception as error:
        await reporter.end("failed", str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}")
        raise
    await reporter.end("succeeded", f"all {loop.config.run.steps} steps are done")


async def _beside(work: Coroutine[Any, Any, None], others: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Does the work while the others run; what ends one of them early ends the work."""
    tasks = [asyncio.ensure_future(one) for one in (work, *others)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _serving(config: Config) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    """What comes back when there is a server."""
    wanted = config.inference
    if wanted.urls:
        yield _nothing
        return
    if wanted.python is None:
        raise ConfigError(
            "inference.python: name the Python of an environment with vLLM in it, so that a server can be started, or "
            "in inference.urls one that runs"
        )
    url = f"http://127.0.0.1:{wanted.port}/v1"
    # Versions that samples may be of, the next one, and one for a canary.
    slots = config.rollouts.staleness + 3
    words = arguments(config.model.path.absolute(), wanted.base, url, config.model.rank, slots, wanted.flags)
    log = config.run.directory / "vllm.log"
    server = Server(wanted.python, words, url, log, cpu=not torch.cuda.is_available())
    try:
        yield server.start
    finally:
        await server.stop()


async def _nothing() -> None:
    """Somebody else's servers are somebody else's business."""


async def _running(config: Config, gateway: str, key: str | None) -> None:
    """A runner, until it ends, which it should not."""
    words = ["--watch", "--gateway", gateway, "--mode", "train,val", *config.rollouts.run]
    env = dict(os.environ) | ({"PENSTOCK_KEY": key} if key else {})
    child = await spawn([sys.executable, "-m", "gateway", "run", *words], env, config.run.directory / "runner.log")
    try:
        code = await child.ended()
        raise RunError(f"the runner (rollouts.run) ended with {code}; {child.tail()}")
    finally:
        await child.stop()
