"""`penstock train custom module:function`: runs the user's training algorithm, which is one function.

The function is called once, with a `CustomRun`: the client of the gateway, tasks, rollouts that run with the versions
it names, texts and their versions, a model to ask, and the reports of the run. When it returns, the run has succeeded.

No process remembers anything of an earlier one. After a crash the function is called again from its beginning; it
should come to the same names of rollouts and the same questions, and then finds them on the tape instead of running
them twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakValueDictionary

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import brief, map_concurrently
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.run import EventLevel
from penstock.gateway.model.toml import ConfigError, read
from penstock.trainer.apo.config import ReflectionSettings, RunName
from penstock.trainer.apo.engines import import_object
from penstock.trainer.apo.gateway_laboratory import (
    ReflectionClient,
    reflection_session,
    run_rollouts,
    slot_problem,
    stable_version,
    text_of,
    version_with,
)
from penstock.trainer.apo.protocol import Reflection, without_surrogates
from penstock.trainer.apo.session import check_gateway, runner_beside
from penstock.trainer.data.collector import RolloutWaiter
from penstock.trainer.data.tasks import json_lines
from penstock.trainer.runs import supervision
from penstock.trainer.runs.supervision import (
    RetryClient,
    RunDisplay,
    RunReporter,
    display,
    run_alongside,
    send_heartbeats,
)

TIMEOUT_S: Final = 3600.0
Algorithm = Callable[["CustomRun"], Awaitable[None]]
ReflectionClientFactory = Callable[[str], ReflectionClient]


@dataclass(frozen=True, slots=True)
class CustomArguments:
    name: str
    function: Algorithm
    config: Mapping[str, Any]
    """The tables of the configuration; only the function interprets them."""
    tasks: Sequence[Any]
    agent: str | None
    """Command of an agent, which a runner beside the run executes."""


class CustomRun:
    """The argument of a user's algorithm: gateway, tasks, configuration, texts, models and reports."""

    def __init__(
        self, wanted: CustomArguments, client: Client, reporter: RunReporter, awaited: RolloutWaiter,
        model: ReflectionClientFactory,
    ) -> None:  # fmt: skip
        self.name = wanted.name
        """The name of the run; the names of its rollouts and versions should begin with it."""
        self.client = client
        """The client of the gateway, for any other request."""
        self.tasks = wanted.tasks
        """Inputs of rollouts, from `--tasks`; empty without."""
        self.config = wanted.config
        """The tables of the configuration; empty without one."""
        self.step = 0
        """The highest step with a reported point."""
        self._reporter, self._awaited, self._model = reporter, awaited, model
        self._asking = WeakValueDictionary[tuple[str, str, int], asyncio.Lock]()
        """Locks by (model, prompt, number), held while the question is asked."""

    async def run(self, rollouts: Sequence[RolloutSpec], timeout_s: float = TIMEOUT_S) -> list[RolloutSummary]:
        """Queue rollouts, wait for them, and return them in their order; `reward` is None where none was given. Each
        needs a name (`id`): one that has run under it already is not run again. Their versions are in
        `config.versions`, and no other rollout gets them. Those that have not ended after `timeout_s` are cancelled.
        Raises `ConfigError` when no rollout has ended."""
        if not all(spec.id for spec in rollouts):
            raise ConfigError("run: each rollout needs a name (id), so that it is found again after a crash")
        if not rollouts:
            return []
        return await map_concurrently(
            self.client.rollout, await run_rollouts(self._awaited, rollouts, timeout_s, rollouts[0].mode)
        )

    async def text(self, resource: str) -> str:
        """Return production's text of a prompt or a tool. Raises `ClientError`."""
        return text_of(await self._stable(resource))

    async def add(self, resource: str, text: str, note: str = "") -> str:
        """Register a text as a version of a prompt or a tool, and return the version's name; the same text is the same
        version. No call gets it before a rollout names it or a release shows it. Raises `ConfigError` when its slots
        differ from those of production's text, or it has half a character."""
        if text != without_surrogates(text):
            raise ConfigError(f"{resource}: the text has half a character, which cannot be sent")
        stable = await self._stable(resource)
        if text == text_of(stable):
            return stable.version
        if problem := slot_problem(stable, text):
            raise ConfigError(problem)
        version = f"{self.name}.{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        with _plainly("add"):
            new = version_with(stable, text, version, self.name, without_surrogates(note))
        return (await self.client.add_version(resource, new)).version

    async def _stable(self, resource: str) -> Resource:
        view = await self.client.resource(resource)
        if view.kind == "model":
            raise ConfigError(f"{resource}: it is a model, which has no text; name a prompt or a tool")
        return stable_version(view)

    async def ask(self, model: str, prompt: str, number: int = 0) -> Reflection:
        """Ask a model through the gateway, recorded on the tape, and return its answer. The same question has the same
        answer, also after a crash; another `number` asks anew. Raises `RunError`."""
        prompt = without_surrogates(prompt)
        # A second caller with the same question waits, and finds the answer on the tape.
        asking = self._asking.setdefault((model, prompt, number), asyncio.Lock())
        async with asking:
            with _plainly("ask"):
                reflecting = self._model(model)
            return await reflecting.ask(prompt, number)

    async def point(self, step: int, values: Mapping[str, float]) -> None:
        """Report metrics of a step, from 0."""
        self.step = max(self.step, step)
        with _plainly("point"):
            await self._reporter.point(step, values)

    async def tell(self, text: str, level: EventLevel = "info") -> None:
        """Report an event; a long text is cut off."""
        with _plainly("tell"):
            await self._reporter.event(self.step, without_surrogates(text), level)

    async def made(self, resource: str, version: str) -> None:
        """Report a version that the run has made."""
        with _plainly("made"):
            await self._reporter.new_version(resource, version)


@contextmanager
def _plainly(method: str) -> Generator[None]:
    """Turn a ValidationError of a method's arguments into a `ConfigError` with one sentence."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{method}: {brief(error)}") from None


def parse_arguments(
    name: str, function: str, config: Path | None, tasks: Path | None, agent: str | None
) -> CustomArguments:
    """Return the checked arguments of a command. Raises `ConfigError`."""
    try:
        _ = TypeAdapter(RunName).validate_python(name)
    except ValidationError as error:
        raise ConfigError(f"--name: {name!r} is not the name of a run: {error.errors()[0]['msg']}") from None
    inputs = [] if tasks is None else [line.value for line in json_lines("--tasks", tasks)]
    if ":" not in function:
        raise ConfigError(f"function: {function!r} is not module:function")
    found = import_object("function", function)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"function: {function} is not a function that is defined with `async def`")
    tables = {} if config is None else read(config)
    return CustomArguments(name, cast(Algorithm, found), tables, inputs, agent)


def train(asked: CustomArguments, gateway: str, key: str | None) -> None:
    """Do a whole run. Raises `RunError` when it ended early."""
    with display(None) as shown:
        supervision.run_blocking(_train(asked, gateway, key, shown))


async def _train(asked: CustomArguments, gateway: str, key: str | None, shown: RunDisplay) -> None:
    rollout = f"{asked.name}.asked"
    await check_gateway(gateway, key)
    async with RetryClient(gateway, key) as client, reflection_session(client, rollout) as http:
        awaited, reporter = RolloutWaiter(client), RunReporter(client, asked.name, shown)

        def model(name: str) -> ReflectionClient:
            return ReflectionClient(client, http, gateway, rollout, ReflectionSettings(model=name))

        custom = CustomRun(asked, client, reporter, awaited, model)

        async def work() -> None:
            # In the tape's form: there dates are text, and numbers that are not finite are null.
            config = from_json(to_json(dict(asked.config), inf_nan_mode="null"))
            await reporter.begin("custom", config, None, 0)
            log = Path(f"penstock-{asked.name}") / "runner.log"
            runner = runner_beside([], asked.agent, "train,val,test", log, gateway, key)
            beside = [awaited.run(), send_heartbeats(reporter), *runner]
            await run_alongside(_called(asked.function, custom), beside)

        await supervision.supervise(work(), reporter, lambda: custom.step)


async def _called(function: Algorithm, custom: CustomRun) -> None:
    try:
        await function(custom)
    except SystemExit as error:
        # SystemExit would leave the event loop without an event on the tape.
        raise supervision.RunError(f"the function has left by sys.exit: {error.code}") from None
