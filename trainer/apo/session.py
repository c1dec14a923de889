"""`penstock train apo`: wires a run together."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.budget import Budget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.choose import make_engine
from penstock.trainer.apo.config import Config, tasks_file
from penstock.trainer.apo.doubts import doubts
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory, seeds, text_of
from penstock.trainer.apo.outcome import PAGE, Outcome, published
from penstock.trainer.apo.placebo import Placebo
from penstock.trainer.apo.progress import Progress
from penstock.trainer.apo.reflecting import Reflecting
from penstock.trainer.apo.report.files import NAME, read
from penstock.trainer.apo.report.page import page
from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.run_directory import RunDirectory
from penstock.trainer.apo.search import Search
from penstock.trainer.apo.several import runs_of
from penstock.trainer.apo.splits import Splits, agent_tasks, split
from penstock.trainer.apo.waiting import keep_saying
from penstock.trainer.apo.winner import check_publish
from penstock.trainer.data.awaiting import Awaited
from penstock.trainer.data.json_lines import json_lines
from penstock.trainer.runs.display import display
from penstock.trainer.runs.ending import to_its_end, whole
from penstock.trainer.runs.patient_client import Patient
from penstock.trainer.runs.report import NOT_FOUND, Display, Reporter
from penstock.trainer.runs.runner import keep_running, with_others


def optimise(config: Config, gateway: str, key: str | None, agent: str | None) -> list[RunResult]:
    """Do a whole run, or several; return the results. `agent`: the command that a runner beside the run executes on
    each task. Raises `RunError` when a run ended early."""
    runs = runs_of(config)
    for one in runs:
        with display(one.budget.rollouts) as shown:
            whole(_optimise(one, gateway, key, agent, shown))
    found = [read(one.run.directory / NAME) for one in runs]
    if len(found) > 1:
        RunDirectory(runs[0].run.directory.parent).write(PAGE, page(found))
    return found


async def _optimise(config: Config, gateway: str, key: str | None, agent: str | None, shown: Display) -> None:
    # An error in the release must show before the search, not after.
    check_publish(config)
    engine = make_engine(config.engine)
    splits = splits_of(config)
    await check_gateway(gateway, key)
    directory = RunDirectory(config.run.directory)
    if (kept := directory.ended(config)) is not None:
        directory.keep(splits, config)
        await _once_more(config, kept, gateway, key, shown)
        return
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
        tried = Placebo(laboratory, config.run.seed) if config.run.placebo else laboratory
        search = Search(tried, engine, seed, splits.train, splits.validation, budget, config.run.seed)
        reporter = Reporter(client, config.run.name, shown)
        progress = Progress(reporter, search.result)
        search.watch, laboratory.tell = progress.look, progress.tell
        outcome = Outcome(config, laboratory, splits, directory, progress)

        async def work() -> None:
            await reporter.begin("apo", config.model_dump(mode="json"), wanted.rollouts, 0)
            beside = [awaited.run(), keep_saying(client, reporter, awaited, config.run.name)]
            if agent or config.rollouts.run:
                words = [*config.rollouts.run, *(["--", *shlex.split(agent)] if agent else [])]
                log = config.run.directory / "runner.log"
                beside.append(keep_running(["--mode", "train,val,test", *words], gateway, key, log))
            await with_others(_run(search, progress, outcome, client, config.run.name), beside)

        await to_its_end(work(), reporter, lambda: budget.used_rollouts, lambda: search.result.why)


async def check_gateway(gateway: str, key: str | None) -> None:
    """Raise `ConfigError` if there is no gateway. Later a missing gateway is waited for, because it only restarts."""
    async with Client(gateway, key) as client:
        try:
            _ = await client.stats(spans=0)
        except ClientError as error:
            hint = "; `penstock serve` starts one, --gateway says where it is" if error.status is None else ""
            raise ConfigError(f"{error}{hint}") from None


async def _run(search: Search, progress: Progress, outcome: Outcome, client: Patient, name: str) -> None:
    """Do search, race, test and release; report why nothing was learnt, if so."""
    result = await search.run()
    await progress.decided()
    _ = await outcome.of(client, result)
    for text in doubts(result, name):
        await progress.tell(text, "warning")


async def _once_more(config: Config, kept: RunResult, gateway: str, key: str | None, shown: Display) -> None:
    """Handle a run that is over: the command may now ask for its release. An earlier process that ended right after the
    result was written may have left out the report, and the run's end on the tape."""
    shown.line("info", f"{kept.run} is over: {kept.why}; {config.run.directory / NAME} has its result")
    if not (config.run.directory / PAGE).exists():
        RunDirectory(config.run.directory).write(PAGE, page([kept]))
    async with Patient(gateway, key) as client:
        await _told(client, config, kept, shown)
        if config.publish.release == "none":
            return
        for text, level in await published(client, config, kept):
            shown.line(level, text)


async def _told(client: Patient, config: Config, kept: RunResult, shown: Display) -> None:
    """End the run on the tape, if it is there and has not succeeded."""
    try:
        run = await client.run(kept.run)
    except ClientError as error:
        if error.status != NOT_FOUND:
            raise
        return
    if run.kind == "apo" and run.status != "succeeded":
        reporter = Reporter(client, kept.run, shown)
        # From a step after all reported ones: nothing is superseded.
        await reporter.begin("apo", config.model_dump(mode="json"), config.budget.rollouts, (run.step or 0) + 1)
        await reporter.end("succeeded", kept.why)


def splits_of(config: Config) -> Splits:
    """Return the tasks of a run, in their splits. Raises `ConfigError`."""
    inputs = [line.value for line in json_lines("tasks.file", tasks_file(config))]
    return split(agent_tasks(inputs, config.tasks.key), config.run.seed)


def reflections(config: Config) -> str:
    """Return the id of the rollout that all reflections of a run belong to."""
    return f"{config.run.name}.reflections"


@asynccontextmanager
async def reflection_session(client: Patient, rollout: str) -> AsyncGenerator[aiohttp.ClientSession]:
    """Yield an HTTP session for questions to a model, with a token for their rollout if the gateway issues tokens."""
    headers: dict[str, str] = {}
    try:
        token = (await client.make_token(rollout)).token
        headers["Authorization"] = f"Bearer {token}"
    except ClientError as error:
        if error.status is None:
            raise
    async with aiohttp.ClientSession(headers=headers, connector=client.connector()) as http:
        yield http
