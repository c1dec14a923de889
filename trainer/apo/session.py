"""`penstock train apo`: wires a run together."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.budget import Budget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.choose import make_engine
from penstock.trainer.apo.config import Config, tasks_file
from penstock.trainer.apo.doubts import doubts
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory, seeds, text_of
from penstock.trainer.apo.progress import Progress
from penstock.trainer.apo.reflecting import Reflecting
from penstock.trainer.apo.run_directory import RunDirectory
from penstock.trainer.apo.search import Result, Search
from penstock.trainer.apo.splits import Splits, agent_tasks, split
from penstock.trainer.apo.trials import Trial
from penstock.trainer.apo.waiting import say_who_is_missing
from penstock.trainer.apo.winner import check_publish, show_production
from penstock.trainer.data.awaiting import Awaited
from penstock.trainer.data.json_lines import json_lines
from penstock.trainer.runs.display import display
from penstock.trainer.runs.ending import to_its_end, whole
from penstock.trainer.runs.patient_client import Patient
from penstock.trainer.runs.report import Display, Reporter
from penstock.trainer.runs.runner import keep_running, with_others


def optimise(config: Config, gateway: str, key: str | None, agent: str | None) -> None:
    """A whole run. `agent`: the command that is run on each task, by a runner that is started beside. Raises
    `RunError` when it has not come to its end."""
    with display(config.budget.rollouts) as shown:
        whole(_optimise(config, gateway, key, agent, shown))


async def _optimise(config: Config, gateway: str, key: str | None, agent: str | None, shown: Display) -> None:
    # What is wrong with it shall be known before the search, not after.
    check_publish(config)
    engine = make_engine(config.engine)
    splits = splits_of(config)
    await _there(gateway, key)
    directory = RunDirectory(config.run.directory)
    async with Patient(gateway, key) as client, reflection_session(client, reflections(config)) as http:
        found = await seeds(client, config)
        directory.keep(splits, config)
        seed = Candidate({name: text_of(version) for name, version in found.items()})
        awaited = Awaited(client)
        reflecting = Reflecting(client, http, gateway, reflections(config), config.reflection)
        every = [*splits.train, *splits.validation, *splits.test]
        laboratory = GatewayLaboratory(client, awaited, reflecting, config, found, every)
        wanted = config.budget
        budget = Budget(wanted.rollouts, wanted.reflections, wanted.tokens, wanted.money)
        search = Search(laboratory, engine, seed, splits.train, splits.validation, budget, config.run.seed)
        reporter = Reporter(client, config.run.name, shown)
        progress = Progress(reporter, search.result)
        search.watch, laboratory.tell = progress.look, progress.tell
        await reporter.begin("apo", config.model_dump(mode="json"), wanted.rollouts, 0)
        run = _Run(config, search, laboratory, splits, directory, progress)
        beside = [awaited.run(), say_who_is_missing(client, progress.tell)]
        if agent or config.rollouts.run:
            words = [*config.rollouts.run, *(["--", *shlex.split(agent)] if agent else [])]
            log = config.run.directory / "runner.log"
            beside.append(keep_running(["--mode", "train,val,test", *words], gateway, key, log))
        work = _with_doubts(run.run(client), search.result, config, progress)
        await to_its_end(with_others(work, beside), reporter, lambda: budget.used_rollouts)


async def _there(gateway: str, key: str | None) -> None:
    """Raises `ConfigError` where there is no gateway. Later it is waited for: then it only restarts."""
    async with Client(gateway, key) as client:
        try:
            _ = await client.stats(spans=0)
        except ClientError as error:
            hint = "; `penstock serve` starts one, --gateway says where it is" if error.status is None else ""
            raise ConfigError(f"{error}{hint}") from None


async def _with_doubts(work: Coroutine[Any, Any, None], result: Result, config: Config, progress: Progress) -> None:
    """Does the work, and says why nothing was learnt where nothing was."""
    await work
    for text in doubts(result, config.run.name):
        await progress.tell(text, "warning")


def splits_of(config: Config) -> Splits:
    """The tasks of a run, in their splits. Raises `ConfigError`."""
    inputs = [line.value for line in json_lines("tasks.file", tasks_file(config))]
    return split(agent_tasks(inputs, config.tasks.key), config.run.seed)


def reflections(config: Config) -> str:
    """The rollout that all reflections of a run belong to."""
    return f"{config.run.name}.reflections"


@asynccontextmanager
async def reflection_session(client: Patient, rollout: str) -> AsyncGenerator[aiohttp.ClientSession]:
    """Connections for a model that is asked, with a token of the calls' rollout where the gateway makes some."""
    headers: dict[str, str] = {}
    try:
        token = (await client.make_token(rollout)).token
        headers["Authorization"] = f"Bearer {token}"
    except ClientError as error:
        if error.status is None:
            raise
    async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


class _Run:
    """What is done one after the other."""

    def __init__(
        self,
        config: Config,
        search: Search,
        laboratory: GatewayLaboratory,
        splits: Splits,
        directory: RunDirectory,
        progress: Progress,
    ) -> None:
        self._config, self._search, self._laboratory = config, search, laboratory
        self._splits, self._directory, self._progress = splits, directory, progress

    async def run(self, client: Patient) -> None:
        """Search, race, test, release."""
        result = await self._search.run()
        await self._progress.tell(result.why)
        tested = await self._test(result)
        await self._progress.test(tested, result)
        if result.winner is not None:
            versions = await self._laboratory.versions(result.winner)
            for text, level in await show_production(client, self._config, result.pool.seed, result.winner, versions):
                await self._progress.tell(text, level)

    async def _test(self, result: Result) -> Sequence[Trial]:
        """The trials of the test split, with the seed and with the winner; none without a winner."""
        if result.winner is None or not self._config.test.repeats:
            return []
        self._directory.open_test(self._config, result.winner.id)
        runners = [result.pool.seed, result.winner]
        tasks = [task.id for task in self._splits.test] * self._config.test.repeats
        orders = [result.pool.order(one.id, task) for task in tasks for one in runners]
        return await self._laboratory.run(runners, orders, "test")
