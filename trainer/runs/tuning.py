"""`penstock train sft` and `penstock train dpo`: a run on conversations of the tape, or of a file. Imports torch.

Conversations are read once (`load_tuning_data`); lessons are made of them (`data.training_examples`), and updates of
the lessons (`TuningMethod`). The weights of the last step become a version of the model, RUN.STEP, and
`publish.release` says how they are released to production.

A restarted run continues exactly where it was. Order and batches follow from the conversations and the configuration;
the checkpoint has weights, optimiser, random numbers and the digest of the conversations.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, Protocol

import orjson
import torch
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from transformers import AutoTokenizer

from penstock.adapters.chat import ChatConversation
from penstock.adapters.export import Row, of_conversations, rows
from penstock.adapters.samples import Options
from penstock.adapters.selection import SampleReport
from penstock.adapters.source import load
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import brief
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import DataSettings, TrainConfig, check_full
from penstock.trainer.data.tasks import json_lines
from penstock.trainer.data.training_examples import ExampleBuilder, TrainingExample, TrainingSet, group_by_attempt
from penstock.trainer.engines import CheckpointError
from penstock.trainer.engines.checkpoint import Checkpoints, State, write_directory
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.policy import describe_machine
from penstock.trainer.engines.remote import make_engine
from penstock.trainer.mathematics.batch import TokenExample
from penstock.trainer.mathematics.update import (
    NOT_FINITE,
    Metrics,
    PairSides,
    dpo_reference,
    dpo_updates,
    evaluate_dpo,
    evaluate_sft,
    sft_updates,
    train_dpo,
    train_sft,
)
from penstock.trainer.runs.supervision import (
    RetryClient,
    RunReporter,
    display,
    run_alongside,
    run_blocking,
    send_heartbeats,
    supervise,
)
from penstock.trainer.serving.publisher import Publisher, PublishError, release_policy

# The two methods of tuning on lessons, `sft` and `dpo`, with the state that a run needs to go on.


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
    """Supervised fine-tuning without a state; see `trainer.mathematics.update`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _rollouts(lessons.training), _rollouts(lessons.held_out)
        self.updates, self.epochs = sft_updates(self._taught, config), config.data.epochs

    def begin(self, engine: TrainingEngine) -> None: ...

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return train_sft(engine, self._taught)

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return evaluate_sft(engine, self._held_out) if self._held_out else {}

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class PreferenceMethod:
    """Direct preference optimisation; its state is the reference. See `trainer.mathematics.update`."""

    def __init__(self, config: TrainConfig, lessons: TrainingSet) -> None:
        self._taught, self._held_out = _pairs(lessons.training), _pairs(lessons.held_out)
        self.updates, self.epochs = dpo_updates(self._taught, config), config.data.epochs
        self._before = (torch.zeros(0, 2), torch.zeros(0, 2))

    def begin(self, engine: TrainingEngine) -> None:
        self._before = (dpo_reference(engine, self._taught), dpo_reference(engine, self._held_out))

    def train(self, engine: TrainingEngine) -> Iterator[Metrics]:
        return train_dpo(engine, self._taught, self._before[0])

    def evaluate(self, engine: TrainingEngine) -> Metrics:
        return evaluate_dpo(engine, self._held_out, self._before[1]) if self._held_out else {}

    def state(self) -> Any:
        return self._before

    def restore(self, state: Any) -> None:
        self._before = state


def _rollouts(lessons: Sequence[TrainingExample]) -> list[TokenExample]:
    return [example for lesson in lessons for side in lesson.sides for example in side]


def _pairs(lessons: Sequence[TrainingExample]) -> list[PairSides]:
    return [(chosen, rejected) for chosen, rejected in (lesson.sides for lesson in lessons)]


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


# The conversations that `train sft` and `train dpo` learn from: of the tape, or of a file.
#
# A run reads them when it begins and keeps them in its directory; when it goes on from a checkpoint it reads that
# copy. So late rewards, new rollouts and retention change nothing for it, and people can look at the training data:
# `data/chats.jsonl` has the columns of `penstock samples --form chat`.

Tuning = Literal["sft", "dpo"]
FILTERS: dict[Tuning, str] = {"sft": "mode:train status:succeeded,ended", "dpo": "mode:train status:over"}
"""Default filters for rollouts. A preference needs rollouts that went wrong too."""
REFUSED = 400


@dataclass(frozen=True, slots=True)
class TuningData:
    """All that a run may learn from."""

    chats: list[ChatConversation]
    """Conversations in the order of reading, rollout by rollout."""
    read: dict[str, float]
    """Metrics: how much was read, and how much was already left out."""
    digest: str
    """Digest of the file with the chats: a run that goes on must have the same."""


async def load_tuning_data(
    directory: Path, kind: Tuning, data: DataSettings, client: Client, goes_on: bool
) -> TuningData:
    """Return the material of a run. `goes_on`: read the copy made when the run began. Raises `ConfigError` when the
    source cannot be read, `CheckpointError` when the copy cannot, and `ClientError`."""
    place = directory / "data"
    if not goes_on:
        made, read = await _of_tape(kind, data, client) if data.file is None else _of_file(kind, data.file)
        shutil.rmtree(place, ignore_errors=True)
        write_directory(place, lambda beside: _write(beside, made, read))
    try:
        text, told = (place / "chats.jsonl").read_bytes(), (place / "read.json").read_bytes()
        chats = [_conversation(json.loads(line)) for line in text.splitlines()]
        return TuningData(chats, json.loads(told), sha256(text).hexdigest())
    except OSError as error:
        raise CheckpointError(f"what the run has learnt from cannot be read: {error}") from None
    except (ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{place} is not as the run has written it, and it cannot go on: {error!r}") from None


def _write(directory: Path, made: Iterable[Row], read: dict[str, float]) -> None:
    (directory / "chats.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in made))
    (directory / "read.json").write_bytes(orjson.dumps(read))


def _conversation(row: Row) -> ChatConversation:
    fields: dict[str, Any] = row | {"calls": tuple(row["calls"])}
    return ChatConversation(**fields)


# -- from the tape -----------------------------------------------------------------------------------------------------


async def _of_tape(kind: Tuning, data: DataSettings, client: Client) -> tuple[list[Row], dict[str, float]]:
    report, weights, gone = SampleReport(), data.rewards or None, list[str]()
    options = Options(data.model, data.agent, weights=weights, allow=frozenset(data.allow))
    wanted = client.rollouts(FILTERS[kind] if data.rollouts is None else data.rollouts)
    try:
        async with aclosing(load(client, wanted, gone.append)) as episodes:
            made = [row async for row in rows(episodes, "chat", options, 0.0, report)]
    except ClientError as error:
        if error.status == REFUSED:
            raise ConfigError(f"data.rollouts: {error}") from None
        raise
    read = {"rollouts": float(report.rollouts)} | ({"rollouts/forgotten": float(len(gone))} if gone else {})
    return made, read | {f"calls/{reason}": float(count) for reason, count in report.reasons.items()}


# -- from a file -------------------------------------------------------------------------------------------------------


def _said(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError("a message needs a role")
    return message


Message = Annotated[dict[str, Any], AfterValidator(_said)]
Messages = Annotated[list[Message], Field(min_length=1)]


class ChatLine(BaseModel):
    """A line of a file of chats. Only its messages must be there, as OpenAI's files for fine-tuning have them."""

    messages: Messages
    rollout: str | None = None
    attempt: str = ""
    group: str | None = None
    agent: str | None = None
    model: str = ""
    calls: list[int] = []
    tools: list[dict[str, Any]] = []
    reward: float | None = Field(default=None, allow_inf_nan=False)
    rewards: dict[str, float] = {}


class PreferenceLine(BaseModel):
    """A line of a file of preferences, as TRL has them too. Answers in the prompt are not trained on."""

    prompt: list[Message] = []
    chosen: Messages
    rejected: Messages
    tools: list[dict[str, Any]] = []
    chosen_reward: float = 1.0
    rejected_reward: float = 0.0


def _of_file(kind: Tuning, path: Path) -> tuple[list[Row], dict[str, float]]:
    made: list[ChatConversation] = []
    for number, value in json_lines("data.file", path):
        try:
            made += _of_line(kind, value, f"line-{number}")
        except ValueError as error:
            said = brief(error) if isinstance(error, ValidationError) else str(error)
            raise ConfigError(f"data.file: {path}, line {number}: {said}") from None
    return list(of_conversations(made)), {"rollouts": float(len({(one.rollout, one.attempt) for one in made}))}


def _of_line(kind: Tuning, value: Any, name: str) -> Iterator[ChatConversation]:
    """Yield the conversations of a line. Raises `ValueError`."""
    if isinstance(value, dict) and "chosen" in value:
        pair = PreferenceLine.model_validate(value)
        if kind == "sft":
            raise ValueError("it is a preference, and sft learns from chats; dpo learns from these")
        yield from _of_pair(pair, name)
    else:
        chat = ChatLine.model_validate(value)
        rollout = chat.rollout or name
        yield _conversation(chat.model_dump() | {"rollout": rollout, "group": chat.group or rollout})


def _of_pair(pair: PreferenceLine, name: str) -> Iterator[ChatConversation]:
    told = [one | ({"weight": 0} if one["role"] == "assistant" else {}) for one in pair.prompt]
    sides = (("chosen", pair.chosen, pair.chosen_reward), ("rejected", pair.rejected, pair.rejected_reward))
    for side, said, reward in sides:
        chat = ChatLine(messages=[*told, *said], tools=pair.tools, reward=reward)
        yield _conversation(chat.model_dump() | {"rollout": f"{name}-{side}", "group": name})
