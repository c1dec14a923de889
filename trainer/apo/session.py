"""`penstock train apo`: wires the runs of a configuration together: one, or one for each seed; real ones, or ones with
a placebo.

    run "shop", directory "out"      run      directory
    one                              shop     out
    with two seeds                   shop.s0  out/s0          seeds run.seed, run.seed + 1
                                     shop.s1  out/s1
    with a placebo                   shop.placebo, shop.placebo.s0 ...   out/placebo, out/placebo/s0 ...

Several runs, and those with a placebo, measure a method, and release nothing: choosing the best of them by the test
would make the test a validation, and a release of the first would change the texts that the second begins with.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.budget import SearchBudget
from penstock.trainer.apo.candidate import Candidate
from penstock.trainer.apo.config import ApoConfig, tasks_file
from penstock.trainer.apo.early_warnings import search_warnings
from penstock.trainer.apo.engine_factory import make_engine
from penstock.trainer.apo.finaliser import PAGE, RunFinaliser, publish_winner
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory, seed_versions, text_of
from penstock.trainer.apo.placebo import PlaceboLaboratory
from penstock.trainer.apo.progress import SearchProgress
from penstock.trainer.apo.reflection_client import ReflectionClient
from penstock.trainer.apo.report.files import NAME, read
from penstock.trainer.apo.report.page import page
from penstock.trainer.apo.report.result import RunResult
from penstock.trainer.apo.run_directory import RunDirectory
from penstock.trainer.apo.search import PromptSearch
from penstock.trainer.apo.splits import Splits, agent_tasks, split
from penstock.trainer.apo.wait_reporter import report_waiting
from penstock.trainer.apo.winner_release import check_publish
from penstock.trainer.data.json_lines import json_lines
from penstock.trainer.data.rollout_waiter import RolloutWaiter
from penstock.trainer.runs.display import display
from penstock.trainer.runs.report import NOT_FOUND, RunDisplay, RunReporter
from penstock.trainer.runs.retry_client import RetryClient
from penstock.trainer.runs.run_end import run_blocking, supervise
from penstock.trainer.runs.runner import keep_running, run_alongside


def runs_of(config: ApoConfig) -> list[ApoConfig]:
    """Return the configuration of each run."""
    run = config.run
    if run.placebo:
        run = run.model_copy(update={"name": f"{run.name}.placebo", "directory": run.directory / "placebo"})
    if run.seeds is None:
        runs = [run]
    else:
        runs = [
            run.model_copy(
                update={
                    "name": f"{run.name}.s{at}",
                    "directory": run.directory / f"s{at}",
                    "seed": run.seed + at,
                    "seeds": None,
                }
            )
            for at in range(run.seeds)
        ]
    measures = run.placebo or run.seeds is not None
    publish = config.publish.model_copy(update={"release": "none"}) if measures else config.publish
    return [config.model_copy(update={"run": one, "publish": publish}) for one in runs]


def optimise(config: ApoConfig, gateway: str, key: str | None, agent: str | None) -> list[RunResult]:
    """Do a whole run, or several; return the results. `agent`: the command that a runner beside the run executes on
    each task. Raises `RunError` when a run ended early."""
    runs = runs_of(config)
    for one in runs:
        with display(one.budget.rollouts) as shown:
            run_blocking(_optimise(one, gateway, key, agent, shown))
    found = [read(one.run.directory / NAME) for one in runs]
    if len(found) > 1:
        RunDirectory(runs[0].run.directory.parent).write(PAGE, page(found))
    return found


async def _optimise(config: ApoConfig, gateway: str, key: str | None, agent: str | None, shown: RunDisplay) -> None:
    # An error in the release must show before the search, not after.
    check_publish(config)
    engine = make_engine(config.engine)
    splits = splits_of(config)
    await check_gateway(gateway, key)
    directory = RunDirectory(config.run.directory)
    if (kept := directory.find_result(config)) is not None:
        directory.seal_splits(splits, config)
        await _once_more(config, kept, gateway, key, shown)
        return
    async with RetryClient(gateway, key) as client, reflection_session(client, reflection_rollout(config)) as http:
        found = await seed_versions(client, config)
        directory.seal_splits(splits, config)
        seed = Candidate({name: text_of(version) for name, version in found.items()})
        awaited = RolloutWaiter(client)
        reflecting = ReflectionClient(client, http, gateway, reflection_rollout(config), config.reflection)
        every = [*splits.train, *splits.validation, *splits.test]
        laboratory = GatewayLaboratory(client, awaited, reflecting, config, found, every)
        wanted = config.budget
        budget = SearchBudget(wanted.rollouts, wanted.reflections, wanted.tokens, wanted.money)
        tried = PlaceboLaboratory(laboratory, config.run.seed) if config.run.placebo else laboratory
        search = PromptSearch(tried, engine, seed, splits.train, splits.validation, budget, config.run.seed)
        reporter = RunReporter(client, config.run.name, shown)
        progress = SearchProgress(reporter, search.result)
        search.watch, laboratory.tell = progress.report_changes, progress.tell
        outcome = RunFinaliser(config, laboratory, splits, directory, progress)

        async def work() -> None:
            await reporter.begin("apo", config.model_dump(mode="json"), wanted.rollouts, 0)
            beside = [awaited.run(), report_waiting(client, reporter, awaited, config.run.name)]
            if agent or config.rollouts.run:
                words = [*config.rollouts.run, *(["--", *shlex.split(agent)] if agent else [])]
                log = config.run.directory / "runner.log"
                beside.append(keep_running(["--mode", "train,val,test", *words], gateway, key, log))
            await run_alongside(_run(search, progress, outcome, client, config.run.name), beside)

        await supervise(work(), reporter, lambda: budget.used_rollouts, lambda: search.result.why)


async def check_gateway(gateway: str, key: str | None) -> None:
    """Raise `ConfigError` if there is no gateway. Later a missing gateway is waited for, because it only restarts."""
    async with Client(gateway, key) as client:
        try:
            _ = await client.stats(spans=0)
        except ClientError as error:
            hint = "; `penstock serve` starts one, --gateway says where it is" if error.status is None else ""
            raise ConfigError(f"{error}{hint}") from None


async def _run(
    search: PromptSearch, progress: SearchProgress, outcome: RunFinaliser, client: RetryClient, name: str
) -> None:
    """Do search, race, test and release; report why nothing was learnt, if so."""
    result = await search.run()
    await progress.report_decision()
    _ = await outcome.finish(client, result)
    for text in search_warnings(result, name):
        await progress.tell(text, "warning")


async def _once_more(config: ApoConfig, kept: RunResult, gateway: str, key: str | None, shown: RunDisplay) -> None:
    """Handle a run that is over: the command may now ask for its release. An earlier process that ended right after the
    result was written may have left out the report, and the run's end on the tape."""
    shown.line("info", f"{kept.run} is over: {kept.why}; {config.run.directory / NAME} has its result")
    if not (config.run.directory / PAGE).exists():
        RunDirectory(config.run.directory).write(PAGE, page([kept]))
    async with RetryClient(gateway, key) as client:
        await _told(client, config, kept, shown)
        if config.publish.release == "none":
            return
        for text, level in await publish_winner(client, config, kept):
            shown.line(level, text)


async def _told(client: RetryClient, config: ApoConfig, kept: RunResult, shown: RunDisplay) -> None:
    """End the run on the tape, if it is there and has not succeeded."""
    try:
        run = await client.run(kept.run)
    except ClientError as error:
        if error.status != NOT_FOUND:
            raise
        return
    if run.kind == "apo" and run.status != "succeeded":
        reporter = RunReporter(client, kept.run, shown)
        # From a step after all reported ones: nothing is superseded.
        await reporter.begin("apo", config.model_dump(mode="json"), config.budget.rollouts, (run.step or 0) + 1)
        await reporter.end("succeeded", kept.why)


def splits_of(config: ApoConfig) -> Splits:
    """Return the tasks of a run, in their splits. Raises `ConfigError`."""
    inputs = [line.value for line in json_lines("tasks.file", tasks_file(config))]
    return split(agent_tasks(inputs, config.tasks.key), config.run.seed)


def reflection_rollout(config: ApoConfig) -> str:
    """Return the id of the rollout that all reflections of a run belong to."""
    return f"{config.run.name}.reflections"


@asynccontextmanager
async def reflection_session(client: RetryClient, rollout: str) -> AsyncGenerator[aiohttp.ClientSession]:
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
