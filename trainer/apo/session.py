"""`penstock train apo`: wires the runs of a configuration together: one, or one for each seed; real ones, or ones with
a placebo.

    run "shop", directory "out"      run      directory
    one                              shop     out
    with two seeds                   shop.s0  out/s0          seeds run.seed, run.seed + 1
                                     shop.s1  out/s1
    with a placebo                   shop.placebo, shop.placebo.s0 ...   out/placebo, out/placebo/s0 ...

Several runs, and those with a placebo, measure a method, and release nothing: choosing the best of them by the test
would make the test a validation, and a release of the first would change the texts that the second begins with.

A directory has the split of each task, whether the test was opened, the result and the report. Everything else is on
the tape. The splits are sealed: a run goes on only with the tasks that it began with. Once the test was opened, the
run's settings are fixed too, because a new search would know the test's result. A run with a result is over: the same
command does not search again, not even after its winner was promoted and a search would begin from other texts.

A winner goes to production by one release by canary of all texts that have changed. They were tested together, so a
rollout gets all of them or none, and they are promoted or rolled back together. If the leak test has found something,
`publish.release = "auto"` counts as "canary": the release waits for a person.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from penstock.console.views.table import abbreviate
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import NotFound
from penstock.gateway.model.queue import QueueState
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.run import EventLevel, RunChange, VersionReference
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig, digest, tasks_file
from penstock.trainer.apo.engines import make_engine
from penstock.trainer.apo.gateway_laboratory import (
    GatewayLaboratory,
    ReflectionClient,
    reflection_rollout,
    reflection_session,
    seed_versions,
)
from penstock.trainer.apo.protocol import AgentTask, Candidate, SearchBudget, Trial, means
from penstock.trainer.apo.report import RunFigures, figures, html_page, leak
from penstock.trainer.apo.result import NAME, RunResult, build_result, candidate_tree, read_result
from penstock.trainer.apo.search import PlaceboLaboratory, PromptSearch, SearchResult, Splits, agent_tasks, best, split
from penstock.trainer.data.collector import RolloutWaiter
from penstock.trainer.data.tasks import json_lines
from penstock.trainer.runs.supervision import (
    RetryClient,
    RunDisplay,
    RunReporter,
    display,
    keep_running,
    run_alongside,
    run_blocking,
    supervise,
)
from penstock.trainer.serving.publisher import PRODUCTION, release_command, release_policy, release_status

PAGE: Final = "report.html"
CLAIM: Final = 160
LOOK_S: Final = 10.0
"""Seconds between two looks; each is a sign of life too, so that a waiting run is not taken for a silent one."""
QUIET: Final = 2
"""Looks without the end of a rollout after which the run reports what it waits for."""
SEEN_NS: Final = 15_000_000_000


def runs_of(config: ApoConfig, seeds: int | None = None, placebo: bool = False) -> list[ApoConfig]:
    run = config.run
    if placebo:
        run = run.model_copy(update={"name": f"{run.name}.placebo", "directory": run.directory / "placebo"})
    runs = [run]
    if seeds is not None:
        updates = [
            {"name": f"{run.name}.s{at}", "directory": run.directory / f"s{at}", "seed": run.seed + at}
            for at in range(seeds)
        ]
        runs = [run.model_copy(update=update) for update in updates]
    measures = placebo or seeds is not None
    publish = config.publish.model_copy(update={"release": "none"}) if measures else config.publish
    return [config.model_copy(update={"run": one, "publish": publish}) for one in runs]


def optimise(
    config: ApoConfig, gateway: str, key: str | None, agent: str | None, seeds: int | None, placebo: bool
) -> list[RunResult]:
    """Do a whole run, or several. `agent`: command of a runner beside. Raises `RunError` when a run ended early."""
    runs = runs_of(config, seeds, placebo)
    for one in runs:
        with display(one.budget.rollouts) as shown:
            run_blocking(_optimise(one, gateway, key, agent, shown, placebo))
    found = [read_result(one.run.directory / NAME) for one in runs]
    if len(found) > 1:
        RunDirectory(runs[0].run.directory.parent).write(PAGE, html_page(found))
    return found


@asynccontextmanager
async def open_laboratory(
    config: ApoConfig, gateway: str, key: str | None, tasks: Sequence[AgentTask]
) -> AsyncGenerator[GatewayLaboratory]:
    rollout = reflection_rollout(config)
    async with RetryClient(gateway, key) as client, reflection_session(client, rollout) as http:
        seeds, awaited = await seed_versions(client, config), RolloutWaiter(client)
        reflecting = ReflectionClient(client, http, gateway, rollout, config.reflection)
        yield GatewayLaboratory(client, awaited, reflecting, config, seeds, tasks)


def search_budget(config: ApoConfig, rollouts: int) -> SearchBudget:
    return SearchBudget(rollouts, config.budget.reflections, config.budget.tokens, config.budget.money)


def runner_beside(
    words: Sequence[str], agent: str | None, modes: str, log: Path, gateway: str, key: str | None
) -> list[Coroutine[Any, Any, None]]:
    """Return the runner that runs beside a run; none if neither arguments for it nor an agent's command are given."""
    if not agent and not words:
        return []
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run.directory: {log.parent} cannot be made: {error.strerror or error}") from None
    given = ["--mode", modes, *words, *(["--", *shlex.split(agent)] if agent else [])]
    return [keep_running(given, gateway, key, log)]


async def check_gateway(gateway: str, key: str | None) -> None:
    """Raise `ConfigError` if there is no gateway. Later a missing gateway is waited for, because it only restarts."""
    async with Client(gateway, key) as client:
        try:
            _ = await client.stats(spans=0)
        except ClientError as error:
            hint = "; `penstock serve` starts one, --gateway says where it is" if error.status is None else ""
            raise ConfigError(f"{error}{hint}") from None


def splits_of(config: ApoConfig) -> Splits:
    inputs = [line.value for line in json_lines("tasks.file", tasks_file(config))]
    return split(agent_tasks(inputs, config.tasks.key), config.run.seed)


async def _optimise(
    config: ApoConfig, gateway: str, key: str | None, agent: str | None, shown: RunDisplay, placebo: bool
) -> None:
    # An error in the release must show before the search, not after.
    check_publish(config)
    engine, splits, run = make_engine(config.engine), splits_of(config), config.run
    await check_gateway(gateway, key)
    directory = RunDirectory(run.directory)
    if (kept := directory.find_result(config)) is not None:
        directory.seal_splits(splits, config)
        await _once_more(config, kept, gateway, key, shown)
        return
    every = [*splits.train, *splits.validation, *splits.test]
    async with open_laboratory(config, gateway, key, every) as laboratory:
        client = laboratory.client
        directory.seal_splits(splits, config)
        budget = search_budget(config, config.budget.rollouts)
        tried = PlaceboLaboratory(laboratory, run.seed) if placebo else laboratory
        search = PromptSearch(tried, engine, laboratory.seed, splits.train, splits.validation, budget, run.seed)
        reporter = RunReporter(client, run.name, shown)
        progress = SearchProgress(reporter, search.result)
        search.watch, laboratory.tell = progress.report_changes, progress.tell

        async def search_and_finish() -> None:
            result = await search.run()
            await progress.report_decision()
            await _finish(config, result, laboratory, splits, directory, progress, placebo)
            for text in search_warnings(result, run.name):
                await progress.tell(text, "warning")

        async def work() -> None:
            await reporter.begin("apo", config.model_dump(mode="json"), config.budget.rollouts, 0)
            beside = [laboratory.awaited.run(), report_waiting(client, reporter, laboratory.awaited, run.name)]
            log = run.directory / "runner.log"
            beside += runner_beside(config.rollouts.run, agent, "train,val,test", log, gateway, key)
            await run_alongside(search_and_finish(), beside)

        await supervise(work(), reporter, lambda: budget.used_rollouts, lambda: search.result.why)


async def _finish(
    config: ApoConfig, result: SearchResult, laboratory: GatewayLaboratory, splits: Splits, directory: RunDirectory,
    progress: SearchProgress, placebo: bool,
) -> None:  # fmt: skip
    """Do test, leak test and release; write the result. It is written after the release, because a run with a result is
    over. The test is run with the seed and with the winner; without a winner it stays sealed."""
    runners, tests = [result.pool.seed, *([result.winner] if result.winner else [])], list[Trial]()
    if result.winner is not None and config.test.repeats:
        directory.open_test(config, result.winner.id)
        tasks = [task.id for task in splits.test] * config.test.repeats
        orders = [result.pool.next_trial(one.id, task) for task in tasks for one in runners]
        tests = await laboratory.run(runners, orders, "test")
    versions = {one.id: await laboratory.versions(one) for one in runners}
    kept = build_result(config, result, tests, splits, versions, placebo)
    await progress.report_test(figures(kept))
    for one in kept.leaks:
        await progress.tell(f"leak test: {one.resource}: {leak(one)}, in {one.line!r}", "warning")
    for text, level in await publish_winner(laboratory.client, config, kept):
        await progress.tell(text, level)
        kept.published.append(text)
    directory.write(NAME, kept.model_dump_json(indent=1) + "\n")
    directory.write(PAGE, html_page([kept]))


async def _once_more(config: ApoConfig, kept: RunResult, gateway: str, key: str | None, shown: RunDisplay) -> None:
    """Handle a run that is over: the command may now ask for its release. An earlier process that ended right after the
    result was written may have left out the report, and the run's end on the tape."""
    shown.line("info", f"{kept.run} is over: {kept.why}; {config.run.directory / NAME} has its result")
    if not (config.run.directory / PAGE).exists():
        RunDirectory(config.run.directory).write(PAGE, html_page([kept]))
    async with RetryClient(gateway, key) as client:
        try:
            run = await client.run(kept.run)
        except NotFound:
            run = None
        if run is not None and run.kind == "apo" and run.status != "succeeded":
            reporter = RunReporter(client, kept.run, shown)
            # From a step after all reported ones: nothing is superseded.
            await reporter.begin("apo", config.model_dump(mode="json"), config.budget.rollouts, (run.step or 0) + 1)
            await reporter.end("succeeded", kept.why)
        if config.publish.release != "none":
            for text, level in await publish_winner(client, config, kept):
                shown.line(level, text)


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self._path = path

    def seal_splits(self, splits: Splits, config: ApoConfig) -> None:
        """Write the splits, or compare them with those of an earlier process. Raises `ConfigError` if they differ."""
        known, opened = self._read("splits.json", "seal"), self._read("test.json", "settings")
        if known is None:
            names = {"train": splits.train, "validation": splits.validation, "test": splits.test}
            places = {name: [task.id for task in tasks] for name, tasks in names.items()}
            self._write("splits.json", {"seal": splits.seal, "seed": config.run.seed, "tasks": places})
        elif known != splits.seal:
            raise ConfigError(
                f"tasks: they, their key or the seed are not what the run {config.run.name!r} began with, see "
                f"{self._path / 'splits.json'}; take those again, or another run.name and run.directory"
            )
        if opened is not None and opened != digest(config):
            raise ConfigError(
                f"run.name: the test of {config.run.name!r} was opened with other settings, see "
                f"{self._path / 'test.json'}; a search with new ones would know its result: take another run.name, "
                "run.directory and other tasks"
            )

    def open_test(self, config: ApoConfig, winner: str) -> None:
        if self._read("test.json", "settings") is None:
            self._write("test.json", {"settings": digest(config), "winner": winner})

    def find_result(self, config: ApoConfig) -> RunResult | None:
        """Return the result of a run with these settings; None while it has none. Raises `ConfigError`."""
        path = self._path / NAME
        found = read_result(path) if path.exists() else None
        return found if found is not None and found.settings == digest(config) else None

    def write(self, name: str, text: str) -> Path:
        """Write a file, complete or not at all. Raises `ConfigError`."""
        path, beside = self._path / name, self._path / f".{name}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            with beside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError as error:
            raise ConfigError(
                f"run.directory: {path} cannot be written: {error.strerror}; the same command goes on once it can"
            ) from None
        return path

    def _write(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value, indent=2) + "\n")

    def _read(self, name: str, key: str) -> str | None:
        try:
            return str(json.loads((self._path / name).read_bytes())[key])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"run.directory: {self._path / name} cannot be read: {error.strerror}") from None
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"run.directory: {self._path / name} cannot be read: it is not what a run has written; take another "
                "run.name and run.directory"
            ) from None


class SearchProgress:
    """The reports of one run, on the tape and for a person who watches. Steps are rollouts that were used.

    A round is one point, which is one line in a log. Events are news for a person: another best candidate, a finalist
    that is better or out, the test. All candidates are in the tree.
    """

    def __init__(self, reporter: RunReporter, result: SearchResult) -> None:
        self._reporter, self._result = reporter, result
        self._best = result.pool.seed.id
        self._states: dict[str, str] = {}

    async def report_changes(self) -> None:
        """Report news since the last look, and the present figures."""
        result, pool = self._result, self._result.pool
        leading = [*best(pool)[:1], pool.seed][0]
        if leading is not pool.seed and leading.id != self._best:
            self._best = leading.id
            mean, seed = pool.mean(leading.id) or 0.0, pool.mean(pool.seed.id) or 0.0
            figures = f"{mean:.3f} on {len(pool.of(leading.id))} rollouts, the seed {seed:.3f}"
            claim = abbreviate(leading.claim, CLAIM) or "no claim"
            await self.tell(f"best so far: {leading.id} ({figures}): {claim}")
        for one in result.racers:
            if self._states.get(one.candidate) != one.state:
                self._states[one.candidate] = one.state
                figures = f"{one.gain:+.3f} on {one.pairs} tasks, e-value {one.e_value:.3g} of {one.needed:.3g}"
                await self.tell(f"finalist {one.candidate} is {one.state}: {figures}")
        await self._reporter.point(result.budget.used_rollouts, self._figures(leading))
        await self._reporter.change(RunChange(tree=candidate_tree(result)))

    async def report_decision(self) -> None:
        await self._reporter.change(RunChange(tree=candidate_tree(self._result)))
        await self.tell(self._result.why)

    def _figures(self, leading: Candidate) -> dict[str, float]:
        result, pool = self._result, self._result.pool
        found = {
            "candidates": float(len(pool.candidates)),
            "reflections": float(result.budget.used_reflections),
            "reflection_tokens": float(result.budget.used_tokens),
        }
        rewards = {"seed/reward": pool.mean(pool.seed.id), "best/reward": pool.mean(leading.id)}
        found |= {name: mean for name, mean in rewards.items() if mean is not None}
        found |= means(("reward", trial.reward) for trial in pool.trials[-32:])
        for place, racer in enumerate(result.racers, 1):
            found[f"race/{place}/gain"] = racer.gain
            found[f"race/{place}/e_value"] = racer.e_value
        return found

    async def tell(self, text: str, level: EventLevel = "info") -> None:
        await self._reporter.event(self._result.budget.used_rollouts, text, level)

    async def report_test(self, found: RunFigures) -> None:
        winner, before, after, gain = found.result.winner, found.before, found.after, found.gain
        if winner is None:
            await self.tell("the texts stay as they are; the test stays sealed")
            return
        if before is None or after is None or gain is None:
            tests = found.result.tests
            await self.tell("the test was left out" if not tests else "no task of the test has both rewards", "warning")
            return
        values = {"test/seed": before.mean, "test/winner": after.mean, "test/gain": gain.mean}
        values["test/tasks"] = float(len(found.pairs))
        if gain.low is not None and gain.high is not None:
            values |= {"test/gain_low": gain.low, "test/gain_high": gain.high}
        await self._reporter.point(self._result.budget.used_rollouts, values)
        await self.tell(
            f"test, on tasks that nobody has seen: {before.mean:.3f} before, {after.mean:.3f} with {winner.id}"
        )


def search_warnings(result: SearchResult, run: str) -> list[str]:
    """Return why a search has found nothing, for a person; empty if nothing was wrong with it."""
    pool, found = result.pool, list[str]()
    rewards = [trial.reward for trial in pool.trials if trial.reward is not None]
    without = len(pool.trials) - len(rewards)
    if without:
        found.append(f"{without:,} of {len(pool.trials):,} rollouts of the search had no reward and were left out")
    if result.winner is not None:
        return found
    if len(rewards) > 1 and len(set(rewards)) == 1:
        said = "they do not tell a better prompt from a worse one"
        found.append(f"all {len(rewards):,} rewards were {rewards[0]:g}: {said}")
    if result.budget.used_reflections and len(pool.candidates) == 1:
        found.append(
            f"none of {result.budget.used_reflections:,} reflections has led to another text; `penstock show "
            f"{run}.reflections` has what the model said"
        )
    return found


async def report_waiting(
    client: Client, reporter: RunReporter, awaited: RolloutWaiter, run: str, every_s: float = LOOK_S
) -> None:
    """Report on the tape what the run waits for, for ever: a run whose rollouts no runner takes would look like one
    that works. A run without a runner is warned of once, until a rollout ends."""
    before, quiet, said = 0, 0, ""
    while True:
        await asyncio.sleep(every_s)
        waiting = awaited.pending()
        quiet = quiet + 1 if waiting == before else 0
        before, text = waiting, ""
        if waiting and quiet >= QUIET:
            workers, state = await client.workers(), (await client.queue()).state
            # The gateway's clock, which also dates `last_seen_ns` of workers; ours may differ.
            now_ns = (await client.change_run(run, RunChange())).last_seen_ns
            text = describe_wait(waiting, run, workers, state, now_ns)
        if text == said:
            await reporter.heartbeat()
            continue
        await reporter.change(RunChange(message=text))
        if "?" in text:
            await reporter.warning(text)
        said = text


def describe_wait(rollouts: int, run: str, workers: Sequence[Worker], state: QueueState, now_ns: int) -> str:
    """Return what a run waits for, for a person; it has a question mark if no worker runs its rollouts."""
    waits = f"waits for {rollouts:,} rollouts, and"
    busy = sum(any(attempt.startswith(f"{run}.") for attempt in worker.attempts) for worker in workers)
    if busy:
        return f"{waits} {busy:,} workers run some"
    if state != "open":
        return f"{waits} the queue is {state}: is that meant? `penstock resume` opens it"
    if any(now_ns - worker.last_seen_ns < SEEN_NS for worker in workers):
        return f"{waits} the runners that are there take none: have they --mode train,val,test?"
    return (
        f"{waits} nobody runs one: is there a runner? `penstock run --watch --mode train,val,test -- COMMAND` here or "
        "elsewhere is one, and so is --agent COMMAND of this command"
    )


def check_publish(config: ApoConfig) -> None:
    """Raise `ConfigError` for a policy that cannot be read, or one that promotes tool texts without any rollout: a
    canary that waits for no rollout shows nothing."""
    policy = release_policy(config.publish)
    unseen = [stage.name for stage in policy.stages if not stage.rollouts]
    if config.texts.tools and config.publish.release == "auto" and unseen:
        raise ConfigError(
            f"publish.policy: the stage {unseen[0]} waits for 0 rollouts; tool texts are released by a canary that "
            'somebody has seen: set its rollouts, or publish.release = "canary"'
        )


async def publish_winner(client: Client, config: ApoConfig, kept: RunResult) -> list[tuple[str, EventLevel]]:
    """Release the winner of a run to production, as `publish.release` says; return the results for a person. The winner
    of a placebo is never released; one that leaks is not promoted by itself."""
    if kept.winner is None or kept.placebo:
        return []
    warned: list[tuple[str, EventLevel]] = []
    if kept.leaks and config.publish.release == "auto":
        config = config.model_copy(update={"publish": config.publish.model_copy(update={"release": "canary"})})
        count = f"the leak test has found {len(kept.leaks):,}"
        warned = [(f"{count}: publish.release = auto counts as canary, and waits for a person", "warning")]
    return [*warned, *await release_texts(client, config, kept.seed.texts, kept.winner.texts, kept.winner.versions)]


async def release_texts(
    client: Client, config: ApoConfig, before: Mapping[str, str], after: Mapping[str, str], versions: Mapping[str, str]
) -> list[tuple[str, EventLevel]]:
    """Release the changed texts, as `publish.release` says; return the results for a person. An error here fails
    nothing: the versions are there, and a person can release them."""
    changed = {name: version for name, version in versions.items() if after[name] != before[name]}
    made = [VersionReference(name=name, version=version) for name, version in changed.items()]
    await client.change_run(config.run.name, RunChange(made=made))
    if not changed:
        return []
    names, command = " and ".join(f"{name}@{version}" for name, version in changed.items()), release_command(changed)
    are, them = ("is", "it") if len(changed) == 1 else ("are", "them")
    if config.publish.release == "none":
        return [(f"{names} {are} better; {command} shows {them} to production", "info")]
    try:
        release = await _start(client, config, changed)
    except (ClientError, ConfigError) as error:
        return [(f"{names} {are} not released: {error}; {command} does it", "warning")]
    return [release_status(release, names, command)]


async def _start(client: Client, config: ApoConfig, changed: Mapping[str, str]) -> Release:
    """Start the release of these versions, or return the one that an earlier process of this run started."""
    (name, version), *others = changed.items()
    for release in await client.releases(name):
        if (release.author, release.only, release.arm_versions("candidate")) == (config.run.name, PRODUCTION, changed):
            return release
    new = NewRelease(
        candidate=version, companions=dict(others), only=PRODUCTION, policy=release_policy(config.publish),
        author=config.run.name, why=f"made by {config.run.name}",
    )  # fmt: skip
    return await client.start_release(name, new)
