"""`penstock train sft` and `penstock train dpo`: a run on conversations of the tape. Imports torch.

Conversations are read once (`conversations`); lessons are made of them (`lessons`), and updates of the lessons
(`TuningMethod`). The weights of the last step become a version of the model, RUN.STEP, and `publish.release` says how
they are released to production.

A restarted run continues exactly where it was. Order and batches follow from the conversations and the configuration;
the checkpoint has weights, optimiser, random numbers and the digest of the conversations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig, check_full
from penstock.trainer.data.conversations import Tuning, TuningData, load_tuning_data
from penstock.trainer.data.training_examples import ExampleBuilder, TrainingExample, TrainingSet, group_by_attempt
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import Checkpoints, State
from penstock.trainer.engines.engine_factory import make_engine
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.machine import describe_machine
from penstock.trainer.mathematics import dpo, sft
from penstock.trainer.mathematics.batch import TokenExample
from penstock.trainer.mathematics.update import NOT_FINITE
from penstock.trainer.runs.companions import RetryClient, run_alongside, send_heartbeats
from penstock.trainer.runs.report import RunError, RunReporter, display, run_blocking, supervise
from penstock.trainer.serving.publisher import Publisher, PublishError, release_policy

# The two methods of tuning on lessons, `sft` and `dpo`, with the state that a run needs to go on.

Metrics = dict[str, float]


class TuningMethod(Protocol):
    """A method that turns lessons into updates."""

    updates: int
    """Optimiser updates of the whole run."""
    epochs: int
    """Times that every lesson is seen in them."""

    def begin(self, engine: TrainingEngine) -> None:
        """Compute what `state` holds from the engine as it is before the first update."""
        ...

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        """Do the remaining updates; yield the metrics of each."""
        ...

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        """Return the metrics of the held-out lessons; empty without any."""
        ...

    def state(self) -> Any:
        """Return the result of `begin`, for a checkpoint."""
        ...

    def restore(self, state: Any) -> None:
        """Restore a `state()` instead of `begin`, for a run that goes on."""
        ...


class SupervisedMethod:
    """Supervised fine-tuning without a state; see `trainer.mathematics.sft`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _rollouts(lessons.training), _rollouts(lessons.held_out)
        self.updates, self.epochs = sft.updates(self._taught, config), config.data.epochs

    def begin(self, engine: TrainingEngine) -> None: ...

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return sft.train(engine, self._taught)

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return sft.evaluate(engine, self._held_out) if self._held_out else {}

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class PreferenceMethod:
    """Direct preference optimisation; its state is the reference. See `trainer.mathematics.dpo`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _pairs(lessons.training), _pairs(lessons.held_out)
        self.updates, self.epochs = dpo.updates(self._taught, config), config.data.epochs
        self._before = (torch.zeros(0, 2), torch.zeros(0, 2))

    def begin(self, engine: TrainingEngine) -> None:
        self._before = (dpo.reference(engine, self._taught), dpo.reference(engine, self._held_out))

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return dpo.train(engine, self._taught, self._before[0])

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return dpo.evaluate(engine, self._held_out, self._before[1]) if self._held_out else {}

    def state(self) -> Any:
        return self._before

    def restore(self, state: Any) -> None:
        self._before = state


def _rollouts(lessons: Sequence[TrainingExample]) -> list[TokenExample]:
    return [example for lesson in lessons for side in lesson.sides for example in side]


def _pairs(lessons: Sequence[TrainingExample]) -> list[dpo.PairSides]:
    return [(chosen, rejected) for chosen, rejected in (lesson.sides for lesson in lessons)]


__all__ = ["RunError", "tune"]


def tune(kind: Tuning, config: TrainConfig, gateway: str, key: str | None) -> None:
    """Do a whole run. Raises `RunError` when it ended early."""
    run_blocking(_tune(kind, config, gateway, key))


async def _tune(kind: Tuning, config: TrainConfig, gateway: str, key: str | None) -> None:
    config = _checked(config)
    tokenizer = _tokenizer(config.model.path)
    checkpoints = Checkpoints(config.run.directory / "checkpoints", kind=kind)
    last = checkpoints.latest()
    async with RetryClient(gateway, key) as client:
        found = await load_tuning_data(config.run.directory, kind, config.data, client, last is not None)
        lessons, method = _method(kind, config, tokenizer, found)
        engine = await asyncio.to_thread(make_engine, config, updates=method.updates)
        names = config.inference
        publisher = Publisher(client, config.model.name, names.upstream, names.base, config.run.name)
        with display(method.updates) as shown:
            reporter = RunReporter(client, config.run.name, shown)
            run = TuningRun(kind, config, found, lessons, method, engine, checkpoints, publisher, reporter)

            async def work() -> None:
                await run.begin(None if last is None else last[1])
                await run_alongside(run.run(), [send_heartbeats(reporter)])

            await supervise(work(), reporter, lambda: engine.done)


def _method(kind: Tuning, config: TrainConfig, tokenizer: Any, found: TuningData) -> tuple[TrainingSet, TuningMethod]:
    maker, attempts = ExampleBuilder(config, tokenizer), group_by_attempt(found.chats)
    if kind == "sft":
        lessons = maker.from_rollouts(attempts)
        return lessons, SupervisedMethod(config, lessons)
    lessons = maker.from_pairs(attempts)
    return lessons, PreferenceMethod(config, lessons)


def _checked(config: TrainConfig) -> TrainConfig:
    """Return the configuration for a run; raise `ConfigError` for errors in it before anything is read."""
    check_full(config)
    _ = release_policy(config.publish)
    # `temperature` describes rollouts of this policy, and conversations of the tape were not sampled from it.
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"temperature": 1.0})})


def _tokenizer(path: Path) -> Any:
    try:
        found: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    # transformers raises many kinds of errors when there is no tokenizer.
    except Exception as error:
        raise ConfigError(f"model.path: {path} holds no tokenizer that can be read: {error}") from None
    if not found.chat_template:
        raise ConfigError(f"model.path: the tokenizer in {path} has no chat template, which conversations need")
    return found


@dataclass(slots=True)
class TuningRun:
    """One run with all its parts."""

    kind: Tuning
    config: TrainConfig
    data: TuningData
    lessons: TrainingSet
    method: TuningMethod
    engine: TrainingEngine
    checkpoints: Checkpoints
    publisher: Publisher
    reporter: RunReporter
    told: bool = False
    """True once it was reported that an update has changed nothing."""

    async def begin(self, state: State | None) -> None:
        """Report that the run begins, or continue from a checkpoint. Raises `CheckpointError` and `ConfigError` if the
        checkpoint does not fit, and `PublishError` if the configured release could not be made."""
        if state is not None:
            self._restore(state)
        if self.config.publish.release != "none":
            await self.publisher.begin()
        step = self.engine.done + 1 if self.engine.done else 0
        await self.reporter.begin(self.kind, self.config.model_dump(mode="json"), self.method.updates, step)

    def _restore(self, state: State) -> None:
        if state["material"] != self.data.digest:
            raise CheckpointError(f"{self.checkpoints.directory} was made from other chats than {self._directory}/data")
        self.method.restore(state["method"])
        self.engine.restore(state["engine"])

    async def run(self) -> None:
        """Run until the last update is done and its weights are published. Raises `PublishError` if another run of this
        name has published some."""
        await self.publisher.refuse_lost(self.engine.done, self.config.versions_directory)
        await self.reporter.event(self.engine.done, describe_machine(self.engine.model))
        if self.engine.done == 0:
            await self._look()
        updates = self.method.train(self.engine)
        while self.engine.done < self.method.updates:
            began = monotonic()
            self.reporter.phase(self.engine.done + 1, "updates the weights")
            learnt = await asyncio.to_thread(next, updates)
            await self._done(self.engine.done, learnt, monotonic() - began)
        await self._publish(f"{self.config.run.name}.{self.engine.done}")

    async def _look(self) -> None:
        self.reporter.phase(0, "looks at the lessons")
        await asyncio.to_thread(self.method.begin, self.engine)
        lessons = self.lessons
        counts = {"lessons": len(lessons.training), "lessons/held_out": len(lessons.held_out)}
        counts |= {f"dropped/{name}": count for name, count in lessons.dropped.items()}
        if lessons.trouble is not None:
            await self.reporter.event(0, f"not every conversation can be used: {lessons.trouble}", "warning")
        for hint in lessons.hints:
            await self.reporter.event(0, hint)
        values = self.data.read | {name: float(count) for name, count in counts.items()}
        await self.reporter.point(0, values | await self._evaluated())

    async def _done(self, step: int, learnt: Metrics, seconds: float) -> None:
        last = step == self.method.updates
        timing = {"seconds/update": seconds, "tokens_per_second": learnt["tokens"] / seconds}
        timing["epoch"] = step * self.method.epochs / self.method.updates
        evaluated = await self._evaluated() if last or step % self.config.evaluate.every == 0 else {}
        await self.reporter.point(step, learnt | evaluated | timing)
        if learnt["skipped"] and not self.told:
            self.told = True
            said = (
                f"nothing was learnt: the gradient is not finite, and the weights were left as they are; {NOT_FINITE}"
            )
            await self.reporter.event(step, said, "warning")
        if last or step % self.config.run.checkpoint_every == 0:
            await asyncio.to_thread(self.checkpoints.save, step, self._state())

    async def _evaluated(self) -> Metrics:
        found = await asyncio.to_thread(self.method.evaluate, self.engine)
        return {f"evaluation/{name}": value for name, value in found.items()}

    def _state(self) -> State:
        return {"engine": self.engine.state(), "method": self.method.state(), "material": self.data.digest}

    @property
    def _directory(self) -> Path:
        return self.config.run.directory

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _publish(self, version: str) -> None:
        """Save the weights in a directory and register it as a version of the model. The directory stays even if the
        version fails."""
        full = self.config.model.weights == "full"
        target = self.config.versions_directory / version
        save = self.engine.save_model if full else self.engine.save_adapter
        if not target.exists():
            await asyncio.to_thread(save, target)
        await self.reporter.event(self.engine.done, f"the weights are in {target}")
        if not full:
            await self._register(version, target)

    async def _register(self, version: str, adapter: Path) -> None:
        note = f"{self.kind}, step {self.engine.done} of run {self.config.run.name}"
        try:
            await self.publisher.begin()
            await self.publisher.register(version, adapter, None, note)
        except PublishError as error:
            await self.reporter.event(self.engine.done, f"not registered: {error}", "warning")
            return
        await self.reporter.new_version(self.config.model.name, version)
        if self.config.publish.release != "none":
            await self.reporter.event(
                self.engine.done, *await self.publisher.release_as_configured(version, self.config.publish)
            )
