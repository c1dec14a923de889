"""GRPO and related methods, step by step. Read `TrainingLoop.run` and what it calls from top to bottom.

A step takes groups of rollouts, gives each rollout credit against its group, updates the weights, and publishes them;
training gets the new version at once. With `rollouts.ahead` the next step's rollouts are queued before the update, so
that agents work while the trainer computes; `rollouts.staleness` limits how old a sample may be.

The held-out tasks of a step are queued behind the next step's rollouts and are awaited before the next weights are
published: agents work on them while the next update is computed, and all of them get the weights of their step. The
held-out tasks of the last step are awaited at once.

A restarted run continues exactly where it was. Rollout ids contain the step, so ended rollouts are found on the tape;
the checkpoint has weights, optimiser, random numbers and place among the tasks. A step that is repeated, because the
checkpoint is older, finds the same rollouts and computes the same weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from time import monotonic
from typing import Final, NamedTuple

from penstock.trainer.config import TrainConfig
from penstock.trainer.data.collector import (
    DEFAULT_VARIANT,
    ExampleRollout,
    RolloutBatch,
    RolloutCollector,
    RolloutOrder,
    Variant,
    group_name,
)
from penstock.trainer.data.tasks import Curriculum, RolloutTask, draw_tasks
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import Checkpoints, State
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.mathematics.update import NOT_FINITE, Metrics, learn
from penstock.trainer.runs.evaluation import (
    EvaluationSuite,
    PendingEvaluation,
    TrainingProgress,
    choose_release,
    link_best,
    suite_metrics,
)
from penstock.trainer.runs.supervision import RunError, RunReporter
from penstock.trainer.serving.publisher import Publisher, step_of
from penstock.trainer.serving.vllm import Replicas, ServerSupervisor


class TrainingLoop:
    """One training run, from the start or a checkpoint to the last step."""

    def __init__(
        self,
        config: TrainConfig,
        engine: TrainingEngine,
        collector: RolloutCollector,
        publisher: Publisher,
        reporter: RunReporter,
        tasks: Sequence[RolloutTask],
        suites: Sequence[EvaluationSuite],
        servers: ServerSupervisor | Replicas | None,
    ) -> None:
        """`servers`: keeps our servers running, `Replicas` where all weights are trained; None if the servers are not
        ours."""
        self.config = config
        self.engine = engine
        self.progress = TrainingProgress()
        self.served = asyncio.Event()
        """Set when the newest weights are served: before that no agent should begin."""
        self._collector, self._publisher, self._reporter = collector, publisher, reporter
        self._tasks, self._suites, self._servers = tasks, suites, servers
        self._checkpoints = Checkpoints(config.run.directory / "checkpoints")
        self._idle = IdleStepCounter(config, collector.reward_error)
        self._told_of_sampling = False
        self._curriculum = Curriculum(tasks, config.run.seed) if config.rollouts.curriculum and tasks else None
        self._ordered: RolloutOrder | None = None
        """Rollouts of the next step that are queued already."""
        self._asked: PendingEvaluation | None = None
        """Held-out tasks that are queued and not yet reported."""

    def restore(self) -> None:
        """Go to the newest checkpoint, if there is one. Raises `CheckpointError`."""
        found = self._checkpoints.latest()
        if found is not None:
            state = found[1]
            self.engine.restore(state["engine"])
            self.progress = TrainingProgress(**state["place"])
            # The suites may have been removed from the configuration since.
            self.progress.owed = self.progress.owed and bool(self._suites)
            self._restored(state)

    async def run(self) -> None:
        """Run until the last step is done."""
        await self._started()
        await self._publisher.begin()
        await self._publisher.refuse_lost(self.progress.version, self.config.versions_directory)
        await self._publish(self.progress.version)
        self.served.set()
        if self.progress.step == 0 or (self.progress.owed and self._at_once(self.progress.step)):
            # For a restored run: no step is left that the held-out tasks could run beside.
            await self._point(self.progress.step, await self._evaluation(self.progress.step))
        while self.progress.step < self.config.run.steps:
            await self._served()
            await self._step(self.progress.step + 1)
        await self._release()

    async def _started(self) -> None:
        """Wait for the first server, which takes from half a minute to many, and report it."""
        if self._servers is not None:
            log, began = self.config.run.directory / "vllm.log", monotonic()
            await self._reporter.event(self.progress.step, f"vLLM is started; it writes to {log}")
            await self._served()
            await self._reporter.event(self.progress.step, f"vLLM is ready after {monotonic() - began:.0f} s")

    async def _served(self) -> None:
        """Wait until there is a server."""
        if self._servers is not None:
            self._reporter.phase(self.progress.step, "waits for vLLM")
            await self._servers.ready()

    async def _step(self, step: int) -> None:
        began = monotonic()
        collected, taken = await self._collect(step)
        tasks = self.progress.tasks + taken
        gathered = monotonic()
        await self._warn_of_sampling(step, collected)
        if self._curriculum is not None:
            # Before the next step's tasks are drawn, which `_order` below may do.
            self._curriculum.record_rewards(collected.rewards)
            collected.figures |= self._curriculum.figures()
        if self._ahead(step + 1):
            self._ordered = await self._order(step + 1, tasks)
        learnt, updated = await self._update_beside(step, collected)
        # Only now may weights be published: the held-out tasks of the step before have ended, with that step's weights.
        place = replace(self.progress, step=step, tasks=tasks)
        evaluated, last = monotonic(), step == self.config.run.steps
        place.trained = step if learnt["updates"] else place.trained
        if place.publish_due(last, self.config.publish.every):
            await self._publish(step)
            place.version = step
        published = monotonic()
        self.progress = place
        seconds = {"collect": gathered - began, "update": updated - gathered, "publish": published - evaluated}
        speed = learnt["tokens"] / sum(seconds.values())
        seconds["evaluate"] = evaluated - updated
        found = await self._evaluation(step)
        timing = {f"seconds/{name}": value for name, value in seconds.items()} | {"tokens_per_second": speed}
        await self._point(step, _summary(collected) | self._figures(collected) | learnt | found | timing)
        # Reports come before the checkpoint: a step that is repeated after a crash is reported again, and none is left
        # out.
        await self._checkpoint(step)
        said = await self._idle.record(collected, learnt, self.progress.version > 0)
        if said is not None:
            await self._reporter.event(step, said, "warning")

    async def _update_beside(self, step: int, collected: RolloutBatch) -> tuple[Metrics, float]:
        """Update the weights while waiting for the held-out tasks of the step before; return as `_update`."""
        both = asyncio.ensure_future(self._update(step, collected)), asyncio.ensure_future(self._evaluated_before())
        try:
            return (await asyncio.gather(*both))[0]
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _update(self, step: int, collected: RolloutBatch) -> tuple[Metrics, float]:
        """Return (metrics of the update, the time when it was done)."""
        self._reporter.phase(step, "updates the weights")
        stale = self._staleness(self.progress)
        learnt = await asyncio.to_thread(
            learn, self.engine, collected.samples, stale, self.config, collected.failed_rewards
        )
        if self.progress.owed:
            self._reporter.phase(step, "waits for held-out tasks")
        return learnt, monotonic()

    # -- overridden by other kinds of runs ---------------------------------------------------------------------------

    def _restored(self, state: State) -> None:
        """Restore the rest of a checkpoint. Raises `CheckpointError`."""
        if "front" in state:
            raise CheckpointError(
                "the checkpoint is of a run with --prompts; give the same command, or another run.directory"
            )
        self._restored_curriculum(state)

    def _state(self) -> State:
        """Return the state for a checkpoint."""
        state: State = {"engine": self.engine.state(), "place": asdict(self.progress)}
        return state if self._curriculum is None else state | {"curriculum": self._curriculum.state()}

    def _restored_curriculum(self, state: State) -> None:
        """Restore the curriculum; one that was switched on after the checkpoint begins empty."""
        if self._curriculum is None or "curriculum" not in state:
            return
        try:
            self._curriculum.restore(state["curriculum"])
        except ValueError as error:
            raise CheckpointError(f"the checkpoint's curriculum: {error}; give this run another directory") from None

    def _ahead(self, step: int) -> bool:
        """True if the rollouts of a step are queued before the update of the step before."""
        return self.config.rollouts.ahead and step <= self.config.run.steps

    def _variants(self) -> Sequence[Variant]:
        """Return the variants that the rollouts of a group are spread over."""
        return [DEFAULT_VARIANT]

    def _evaluated(self) -> Variant:
        """Return the variant of the held-out tasks."""
        return DEFAULT_VARIANT

    def _figures(self, collected: RolloutBatch) -> Metrics:
        """Return further metrics of a step's rollouts."""
        return {}

    def _kept(self) -> frozenset[int]:
        """Return the steps whose weights are needed besides the newest: the best ones, the ones under evaluation, which
        may be the best, and after a crash those of steps that are repeated: their versions are registered and not made
        again."""
        known = {self.progress.version} if self.progress.best is None else {self.progress.version, self.progress.best}
        return frozenset({*known, *range(self.progress.step + 1, self.config.run.steps + 1)})

    # -- rollouts ----------------------------------------------------------------------------------------------------

    async def _order(self, step: int, start: int, extra: int = 0) -> RolloutOrder:
        """Queue a step's groups, with the tasks from the place `start` on. `extra`: number of a further helping of
        groups, from 1; 0 for the first."""
        rollouts = self.config.rollouts
        tasks = self._drawn(step, start, extra)
        name = f"{step}.{extra}" if extra else str(step)
        if self._curriculum is not None:
            run = self.config.run.name
            self._curriculum.register_groups(
                {group_name(run, "train", name, place): task for place, task in enumerate(tasks)}
            )
        return await self._collector.order(
            "train", name, step, tasks, rollouts.group_size, rollouts.timeout, self._variants()
        )

    def _drawn(self, step: int, start: int, extra: int) -> list[RolloutTask]:
        """Return the tasks of one helping of a step."""
        count = self.config.rollouts.groups
        if self._curriculum is not None:
            return self._curriculum.draw(step, extra * count, count)
        return draw_tasks(self._tasks, start, count, self.config.run.seed)

    async def _collect(self, step: int) -> tuple[RolloutBatch, int]:
        """Return (what the step learns from, number of tasks that it took). With `dynamic` above 1, more groups are
        taken until enough of them have something to teach (DAPO's dynamic sampling, Yu et al. 2025, arXiv:2503.14476).
        """
        rollouts, collected, taken = self.config.rollouts, RolloutBatch(), 0
        order, self._ordered = self._ordered, None
        while True:
            self._reporter.phase(step, "collects rollouts")
            order = order or await self._order(step, self.progress.tasks + taken, taken // rollouts.groups)
            taken += rollouts.groups
            last = taken + rollouts.groups > rollouts.groups * rollouts.dynamic
            if last:
                await self._queue_evaluation()
            collected.add(await self._collector.gather(order, self._patience))
            if last or collected.informative >= rollouts.groups:
                await self._queue_evaluation()
                return collected, taken
            order = None

    async def _warn_of_sampling(self, step: int, collected: RolloutBatch) -> None:
        """Report once that agents sample with settings that training does not assume."""
        said = collected.sampling.warning(self.config.rollouts.temperature)
        if said is not None and not self._told_of_sampling:
            self._told_of_sampling = True
            await self._reporter.event(step, said, "warning")

    async def _evaluation(self, step: int) -> Metrics:
        """Return the metrics of the held-out tasks after a step; none where they run beside the next step."""
        due = self.progress.owed or step in {0, self.config.run.steps} or step % self.config.evaluate.every == 0
        if not (due and self._suites):
            return {}
        self.progress.owed = not self._at_once(step)
        if self.progress.owed:
            return {}
        self._reporter.phase(step, "evaluates")
        return await self._results(await self._held_out(step))

    def _at_once(self, step: int) -> bool:
        """True if the next step begins only after the held-out tasks of this step have ended."""
        return step == self.config.run.steps

    async def _queue_evaluation(self) -> None:
        """Queue the held-out tasks of the step before, if they are owed and not queued."""
        if self.progress.owed and self._asked is None:
            self._asked = await self._held_out(self.progress.step)

    async def _evaluated_before(self) -> None:
        """Wait for the held-out tasks of the step before, and report them as that step's."""
        if self._asked is not None:
            await self._point(self._asked.step, await self._results(self._asked))
            self._asked, self.progress.owed = None, False

    async def _held_out(self, step: int) -> PendingEvaluation:
        return PendingEvaluation(step, [await self._suite(step, suite) for suite in self._suites])

    async def _suite(self, step: int, suite: EvaluationSuite) -> RolloutOrder:
        name, samples = f"{step}.{suite.settings.name}", suite.settings.samples
        timeout = self.config.rollouts.timeout
        return await self._collector.order("val", name, step, suite.tasks, samples, timeout, [self._evaluated()])

    async def _results(self, asked: PendingEvaluation) -> Metrics:
        """Wait for held-out tasks, which were queued with the newest weights; return their metrics. The first suite
        decides if the weights are the best."""
        found: Metrics = {}
        for suite, order in zip(self._suites, asked.orders, strict=True):
            found |= suite_metrics(suite, await self._collector.gather(order, self._patience))
        reward = found.get(self._suites[0].reward)
        if reward is not None and self.progress.record_evaluation(reward):
            await self._best(reward)
        return found

    async def _best(self, reward: float) -> None:
        """Link and report the newest weights as the best so far."""
        version = f"{self.config.run.name}.{self.progress.version}"
        try:
            link_best(self.config.run.directory.absolute(), self.config.versions_directory / version)
        except OSError as error:
            await self._reporter.warning(f"no link leads to the best weights: {error}")
        if self.progress.version:
            metric = self._suites[0].reward
            await self._reporter.event(self.progress.step, f"the best so far is {version}: {metric} {reward:.4g}")

    @property
    def _patience(self) -> float:
        """Seconds that a step waits for its rollouts: the gateway ends their attempts earlier."""
        return 1.1 * self.config.rollouts.timeout

    def _staleness(self, place: TrainingProgress) -> Callable[[str | None], int]:
        """Return a function: the number of versions that a version is behind the newest."""
        return lambda version: versions_behind(self.config.run.name, version, place.version, self.config.publish.every)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _publish(self, step: int) -> None:
        """Publish the weights of a step as a version, which training gets at once."""
        self._reporter.phase(step, "publishes the weights")
        version, model = f"{self.config.run.name}.{step}", self.config.model.name
        # When a step is repeated, training keeps a later version.
        if not await self._publisher.is_published(step):
            await self._register(version, f"step {step} of run {self.config.run.name}")
            await self._publisher.train_on(version)
        await self._reporter.new_version(model, version)
        await self._prune()

    async def _register(self, version: str, note: str) -> None:
        directory = self.config.versions_directory / version
        replicas = self._servers if isinstance(self._servers, Replicas) else None
        if not directory.exists():
            save = self.engine.save_adapter if replicas is None else self.engine.save_model
            await asyncio.to_thread(save, directory)
        if replicas is not None:
            upstream = await replicas.serve(version, directory)
            await self._publisher.register_replica(version, upstream, None, note)
        else:
            if isinstance(self._servers, ServerSupervisor):
                await self._servers.ensure_running()
            await self._publisher.register(version, directory, None, note)

    async def _prune(self) -> None:
        try:
            _ = await self._publisher.prune(self.config.versions_directory, self.config.publish.keep, self._kept())
        except OSError as error:
            await self._reporter.warning(f"directories of old versions cannot be removed: {error}")

    async def _release(self) -> None:
        """Release the best weights, or the last ones, to production, as `publish` says."""
        step, why = choose_release(self.progress)
        wanted, version = self.config.publish, f"{self.config.run.name}.{step}"
        if wanted.release == "none" and self.progress.best is not None:
            await self._reporter.event(self.progress.step, f"{version} are {why}" if step else why)
        elif wanted.release != "none" and step:
            await self._reporter.event(self.progress.step, f"{version} are {why}")
            await self._reporter.event(
                self.progress.step, *await self._publisher.release_as_configured(version, wanted)
            )
        elif wanted.release != "none" and self.progress.version:
            last = f"{self.config.run.name}.{self.progress.version}"
            other = f"penstock release start {self.config.model.name} --candidate {last} releases the last weights"
            await self._reporter.event(self.progress.step, f"{why}: nothing is released; {other}", "warning")

    async def _checkpoint(self, step: int) -> None:
        if step % self.config.run.checkpoint_every == 0 or step == self.config.run.steps:
            state = self._state()
            _ = await asyncio.to_thread(self._checkpoints.save, step, state)

    async def _point(self, step: int, values: Metrics) -> None:
        if values:
            await self._reporter.point(step, values)


def versions_behind(run: str, version: str | None, newest: int, every: int) -> int:
    """Return how many versions a version is behind that of the step `newest`, where a version is published every
    `every` steps; 0 for versions of other runs."""
    step = step_of(run, version or "")
    return 0 if step is None else max(0, -(-(newest - step) // every))


def _summary(collected: RolloutBatch) -> Metrics:
    """Return the metrics of a step's rollouts before the update."""
    found: Metrics = {
        "rollouts": float(collected.ended.total()),
        "rollouts/late": float(collected.late),
        "groups/informative": float(collected.informative),
        "groups/differ": collected.informative / max(1, len(collected.rewards)),
        "failed": collected.failed,
        "sampled_otherwise": collected.sampling.share,
    }
    found |= {f"rollouts/{status}": float(count) for status, count in collected.ended.items()}
    found |= {f"calls/{reason}": float(count) for reason, count in collected.report.reasons.items()}
    found |= collected.figures
    return found if collected.mean is None else found | {"reward": collected.mean}


# Steps that teach nothing: their dominant reason, what to change, and the end of the run after too many.
#
# After the first such step the run reports the reason. After `MOST_IDLE` in a row it fails, because a run that learns
# nothing and succeeds looks like one that has learnt. There is one exception: once a run has learnt something, groups
# whose rewards are all equal may mean that the tasks are solved, and the run goes on.

MOST_IDLE: Final = 3
"""Steps in a row that teach nothing after which a run fails: one may be bad luck, three are a mistake."""
LEFT_OUT: Final[Mapping[str, str]] = {
    "rollouts_stale": "stale",
    "rollouts_reward": "nan_reward",
    "rollouts_single": "single",
    "rollouts_equal": "equal",
    "rollouts_truncated": "truncated",
    "rollouts_not_finite": "not_finite",
    "samples_long": "long",
    "samples_empty": "empty",
    "samples_prompt": "no_prompt",
}
"""Reasons by the names that `learn` counts below `dropped/`."""


class ReasonAdvice(NamedTuple):
    """A reason in words for a person."""

    what: str
    """What happened, as the predicate of "N of M rollouts"."""
    fix: str
    """What to change."""


ADVICE: Final[Mapping[str, ReasonAdvice]] = {
    "failed": ReasonAdvice("failed", "penstock show {rollout} shows what the agent said; mend the agent or its task"),
    "cancelled": ReasonAdvice(
        "had not ended in time and were cancelled", "raise rollouts.timeout ({timeout:g} s), or start more workers"
    ),
    "no_calls": ReasonAdvice(
        "asked no model through the gateway",
        "let the agent use the base URL and key that it is given (OPENAI_BASE_URL, OPENAI_API_KEY)",
    ),
    "no_reward": ReasonAdvice(
        "succeeded and have no reward",
        "name a reward function in rollouts.run (--reward=module:function), or mend the one that is there",
    ),
    "untrusted_reward": ReasonAdvice(
        "have only the reward that the agent gives itself", "name a judge in rollouts.run: --reward=module:function"
    ),
    "nan_reward": ReasonAdvice("have a reward that is no finite number", "mend the reward function"),
    "other_model": ReasonAdvice(
        "asked for another model",
        "let the agent ask for {model!r}, or set model.name to what it asks for and route that",
    ),
    "no_token_ids": ReasonAdvice(
        "have no token ids",
        "set train = true on the [[route]] of {model!r} in penstock.toml, whose upstream must be a vLLM",
    ),
    "no_logprobs": ReasonAdvice(
        "have no log-probabilities",
        'set train = true on the [[route]] of {model!r} in penstock.toml, and let the agent leave "logprobs" out',
    ),
    "token_counts": ReasonAdvice(
        "have token ids of other numbers of tokens than their engine counted",
        "update the engine, or serve without the parser of tools that loses ids: penstock doctor {rollout}",
    ),
    "error": ReasonAdvice("failed in their calls to the model", "penstock doctor {rollout} shows the calls"),
    "cut": ReasonAdvice(
        "were cut off at the limit of tokens, and the rewards of each group are equal",
        "raise the max_tokens that the agent asks for, or vLLM's --max-model-len",
    ),
    "truncated": ReasonAdvice(
        'were cut off at the limit of tokens and have no loss (advantage.overlong = "mask")',
        "raise the max_tokens that the agent asks for, or vLLM's --max-model-len",
    ),
    "equal": ReasonAdvice(
        "are in groups whose rewards are all equal{mean}",
        "give partial credit, take tasks that are sometimes solved, or raise rollouts.group_size ({size})",
    ),
    "single": ReasonAdvice(
        "are alone in their group", "see why the others of their groups have no sample: penstock doctor {rollout}"
    ),
    "stale": ReasonAdvice(
        "are of weights more than {staleness} versions old",
        "raise rollouts.staleness, or let fewer rollouts wait: smaller groups, or no rollouts.ahead",
    ),
    "not_finite": ReasonAdvice("gave a gradient that is not finite, and the weights were left as they are", NOT_FINITE),
    "long": ReasonAdvice(
        "have only samples longer than engine.batch_tokens ({tokens})", "raise it; the longest has {longest} tokens"
    ),
}
"""Words for each reason; other reasons get `DOCTOR`."""
DOCTOR: Final = ReasonAdvice("cannot be trained on ({reason})", "penstock doctor {rollout} says what repairs it")


class DominantReason(NamedTuple):
    """The reason that most rollouts of a step share."""

    reason: str
    rollouts: int
    """Number of rollouts with this reason."""
    example: ExampleRollout | None
    """A rollout with this reason."""


def dominant_reason(collected: RolloutBatch, learnt: Metrics) -> DominantReason:
    """Return why most rollouts of a step taught nothing. Of two reasons with as many rollouts the one that happened
    first counts."""
    fates = collected.outcomes
    lost: Counter[str] = Counter(fates.lost)
    for name, reason in LEFT_OUT.items():
        lost[reason] += int(learnt.get(f"dropped/{name}", 0.0))
    if 0 < lost["equal"] <= 2 * fates.truncated:
        lost["cut"] = lost.pop("equal")
    if collected.late:
        lost["cancelled"] = max(lost["cancelled"], collected.late)
    reason, count = max(lost.items(), key=lambda one: one[1])
    return DominantReason(reason, count, fates.examples.get(reason))


def describe_reason(why: DominantReason, collected: RolloutBatch, config: TrainConfig) -> str:
    """Return the reason and the advice, for a person."""
    about = why.example.rollout if why.example else next(iter(collected.names), "ROLLOUT")
    longest = max((len(one.prompt) + len(one.response) for one in collected.samples), default=0)
    values = {
        "reason": why.reason,
        "rollout": about,
        "model": config.model.name,
        "timeout": config.rollouts.timeout,
        "size": config.rollouts.group_size,
        "staleness": config.rollouts.staleness,
        "tokens": config.engine.batch_tokens,
        "longest": longest,
        "mean": "" if collected.mean is None else f" (mean {collected.mean:.3g})",
    }
    words = ADVICE.get(why.reason, DOCTOR)
    detail = f" ({about}: {why.example.detail})" if why.example and why.example.detail else ""
    what, fix = words.what.format(**values), words.fix.format(**values)
    return f"{why.rollouts} of {collected.ended.total()} rollouts {what}{detail}; {fix}"


class IdleStepCounter:
    """Counts the steps in a row that taught nothing."""

    def __init__(self, config: TrainConfig, reward_error: Callable[[str], Awaitable[str | None]]) -> None:
        """`reward_error`: returns the runner's error about a rollout's missing reward, by rollout id."""
        self._config, self._reward_error = config, reward_error
        self._most = min(MOST_IDLE, config.run.steps)
        self._steps, self._has_learnt = 0, False

    async def record(self, collected: RolloutBatch, learnt: Metrics, has_learnt: bool) -> str | None:
        """Note a step; return a message for a person, or None. `has_learnt`: an earlier process of the run has learnt
        something. Raises `RunError` after too many such steps."""
        if learnt["updates"]:
            self._steps, self._has_learnt = 0, True
            return None
        self._steps += 1
        why = await self._with_words(dominant_reason(collected, learnt))
        said = describe_reason(why, collected, self._config)
        solved = why.reason == "equal" and (self._has_learnt or has_learnt)
        if self._steps >= self._most and not solved:
            raise RunError(f"{self._steps} steps in a row have taught nothing: {said}")
        return None if solved and self._steps > 1 else f"nothing was learnt: {said}"

    async def _with_words(self, why: DominantReason) -> DominantReason:
        """Add the runner's error about a missing reward, if there is one."""
        if why.reason != "no_reward" or why.example is None:
            return why
        found = await self._reward_error(why.example.rollout)
        return why if found is None else why._replace(example=ExampleRollout(why.example.rollout, found))
