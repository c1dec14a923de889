"""`penstock enqueue`: queues tasks from a file. The whole file is checked before anything is sent."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

from cyclopts import Parameter
from pydantic_core import from_json

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    Json,
    Url,
    pairs,
    seconds,
    unreadable,
    validated_model,
    with_client,
)
from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.queue import RolloutSpec, finite
from penstock.gateway.model.toml import pluralized

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.queue import EnqueueResult

# Reads tasks from JSON lines. Pure: takes the lines of a file, and returns the tasks and all errors in them.
#
# Each line is a task's input, any JSON. Its id comes from the id field of an object, or is the hash of its content.
# Each repetition is a rollout of its own, ID.0, ID.1 ..., so queuing the same file again queues nothing twice, and
# with more repetitions only the new ones. Lines are parsed as the gateway parses them.

T = TypeVar("T")

LONGEST_ID = 120
"""Maximum length of a task's id, which leaves room for the repetition."""
LONGEST_GROUP = 256
SHOWN = 60
"""Characters of a line that is not JSON which its flaw shows."""
NO_VALUE = "no value, or a text without double quotes"
JSON_FLAWS = {
    "expected ident": NO_VALUE,
    "expected value": NO_VALUE,
    "key must be a string": "a name without double quotes",
    "EOF while parsing": "the line ends too early (each task is one line)",
    "trailing characters": "more stands behind the task (each task is one line)",
}
"""What the parser says at the beginning of its message -> the same in plain words."""


@dataclass(frozen=True, slots=True)
class TaskLine:
    """A task from a valid line."""

    id: str
    group: str | None
    input: Any


@dataclass(frozen=True, slots=True)
class Flaw:
    """A problem of an invalid line."""

    line: int
    """Number of the line, from 1."""
    field: str | None
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {f'{self.field}: ' if self.field else ''}{self.problem}"


def read(lines: Iterable[bytes], id_field: str | None, group_field: str | None) -> tuple[list[TaskLine], list[Flaw]]:
    """The tasks of a file and its flaws; empty lines are neither. Without an `id_field` it is `id`, if the task has
    one."""
    tasks: list[TaskLine] = []
    flaws: list[Flaw] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                task = _task(line, id_field, group_field)
                _unseen(task.id, seen, number)
                tasks.append(task)
            except _TaskLineError as e:
                flaws.append(Flaw(number, e.field, str(e)))
    return tasks, flaws


def rollouts(tasks: Iterable[TaskLine], repeat: int, like: RolloutSpec) -> Iterator[RolloutSpec]:
    """A rollout for each repetition of each task, in order. A task without a group is its own group, even without
    repetitions: they may follow later."""
    for task in tasks:
        for number in range(repeat):
            about = {"id": f"{task.id}.{number}", "group": task.group or task.id}
            yield like.model_copy(update=about if task.input is None else about | {"input": task.input})


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of up to `size`."""
    left = iter(items)
    while batch := list(islice(left, size)):
        yield batch


class _TaskLineError(Exception):
    def __init__(self, problem: str, field: str | None = None) -> None:
        super().__init__(problem)
        self.field = field


def _task(line: bytes, id_field: str | None, group_field: str | None) -> TaskLine:
    value = _json(line)
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    named = id_field or ("id" if "id" in fields else None)
    group = None if group_field is None else _name(fields, group_field)
    if group is not None and not 0 < len(group) <= LONGEST_GROUP:
        raise _TaskLineError(f"a group has 1 to {LONGEST_GROUP} characters", group_field)
    return TaskLine(_hash(value) if named is None else _id(fields, named), group, value)


def _json(line: bytes) -> Any:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as e:
        said, _, column = str(e).partition(" at line 1 column ")
        plain = next((plain for found, plain in JSON_FLAWS.items() if said.startswith(found)), said)
        text = line.decode(errors="replace").strip()
        begins = text if len(text) <= SHOWN else f"{text[:SHOWN]} ..."
        raise _TaskLineError(f"is not JSON at column {column}: {plain}: {begins}") from None
    try:
        return finite(value)
    except ValueError as e:
        raise _TaskLineError(str(e)) from None


def _id(fields: dict[str, Any], field: str) -> str:
    value = _name(fields, field)
    if len(value) > LONGEST_ID or not re.fullmatch(ID_PATTERN, value):
        raise _TaskLineError(f"{value[:40]!r} is not an id: up to {LONGEST_ID} letters, digits and . _ - only", field)
    return value


def _name(fields: dict[str, Any], field: str) -> str:
    """A field that names something: text or a whole number."""
    if field not in fields:
        raise _TaskLineError(f"is missing; there are: {' '.join(fields)[:200] or 'no fields'}", field)
    value = fields[field]
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _TaskLineError(f"is neither text nor a whole number: {json.dumps(value)[:40]}", field)
    return str(value)


def _hash(value: Any) -> str:
    content = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return sha256(content.encode()).hexdigest()[:16]


def _unseen(id: str, seen: dict[str, int], line: int) -> None:
    if (before := seen.setdefault(id, line)) != line:
        raise _TaskLineError(
            f"its id {id!r} is that of line {before} already; --repeat makes several rollouts of a task"
        )


def first_flaws(flaws: Sequence[Flaw]) -> str:
    """The first flaw, and the number of others, in one line."""
    rest = len(flaws) - 1
    more = f" (and {pluralized(rest, 'more line')})" if rest else ""
    return f"{flaws[0]}{more}"


BATCH = 1000
PLACE = re.compile(r"^rollouts\[(?P<place>\d+)\]\.(?P<field>[\w.]+): ")
"""The place in a request at the beginning of the gateway's error messages."""
Ends = Literal["failed", "timeout", "unresponsive", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The options that hold for all rollouts of one `penstock enqueue`."""

    priority: Annotated[int, Parameter(allow_leading_hyphen=True)] = 0
    """The highest is handed out first; -1000 to 1000."""
    timeout: str | None = None
    """Longest run of an attempt, such as 90s, 10m or 1.5h, from its claim; a runner's own `--timeout` counts too."""
    unresponsive: str | None = None
    """How long an attempt may be silent, such as 90s, 2m or 1.5h."""
    max_attempts: int = 3
    """How many attempts may be made."""
    retry_on: str = "unresponsive"
    """Ends after which another attempt is made, such as failed,timeout,unresponsive; or none."""
    reward_on_failure: Annotated[float | None, Parameter(allow_leading_hyphen=True)] = None
    """Reward of the attempt after which a rollout has failed and that has none, such as 0; none if not given."""
    metadata: Annotated[list[str] | None, Parameter(negative="")] = None
    """Anything to find the rollouts again by, as NAME=VALUE; may be given several times."""

    def spec(self, mode: str) -> RolloutSpec:
        """A rollout that has no task yet."""
        from penstock.gateway.model.rollout import RolloutConfig

        config: dict[str, Any] = {"max_attempts": self.max_attempts}
        config |= {} if self.reward_on_failure is None else {"reward_on_failure": self.reward_on_failure}
        config["retry_on"] = [] if self.retry_on == "none" else [end.strip() for end in self.retry_on.split(",")]
        config |= {} if self.timeout is None else {"timeout_s": seconds("--timeout", self.timeout)}
        config |= {} if self.unresponsive is None else {"unresponsive_s": seconds("--unresponsive", self.unresponsive)}
        about = {"metadata": pairs(self.metadata, "--metadata")} if self.metadata else {}
        return validated_model(
            RolloutSpec, mode=mode, priority=self.priority, config=validated_model(RolloutConfig, **config), **about
        )


DEFAULT = RolloutOptions()


def enqueue(
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    mode: Literal["train", "val", "test", "online"] = "train",
    repeat: int = 1,
    group_by: str | None = None,
    id_field: str | None = None,
    rollouts: Annotated[RolloutOptions, FLAT] = DEFAULT,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Queue the tasks of a file of JSON lines.

    Parameters
    ----------
    file
        Each line is a task's input, any JSON; - is stdin. Nothing is queued unless all of it is right.
    mode
        What the rollouts are for.
    repeat
        Rollouts of each task: ID.0, ID.1 ... Those that are queued already are not queued again.
    group_by
        Field whose value is the group; each task is a group of its own if not given.
    id_field
        Field whose value is the task's id; `id` if not given, and a hash of the content where there is none.
    """
    from penstock.console.views import queue

    like = rollouts.spec(mode)
    if repeat < 1:
        raise CommandError(f"--repeat: {repeat} is not 1 or more", 2)
    tasks = _tasks(file, id_field, group_by)

    async def ask(client: Client) -> None:
        answers = await _send(client, tasks, repeat, like)
        show(answers, json, lambda: queue.enqueued(answers))

    with_client(gateway, ask)


def _tasks(file: str, id_field: str | None, group_by: str | None) -> list[TaskLine]:

    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as e:
        raise CommandError(unreadable(file, e)) from None
    found, flaws = read(content.split(b"\n"), id_field, group_by)
    if flaws:
        raise CommandError(f"nothing was queued: {file}: {first_flaws(flaws)}")
    if not found:
        raise CommandError(f"{file} has no tasks")
    return found


async def _send(client: Client, found: list[TaskLine], repeat: int, like: RolloutSpec) -> list[EnqueueResult]:
    from penstock.gateway.client.client import ClientError

    answers: list[EnqueueResult] = []
    for batch in batches(rollouts(found, repeat, like), BATCH):
        try:
            answers += await client.enqueue(batch)
        except ClientError as e:
            queued = f"only {len(answers):,} rollouts were queued" if answers else "nothing was queued"
            raise CommandError(f"{queued}: {_said(str(e), batch)}") from None
    return answers


def _said(message: str, batch: Sequence[RolloutSpec]) -> str:
    """The gateway's error message with the rollout's id in place of its index in the request."""

    def name(match: re.Match[str]) -> str:
        return "" if match["field"] == "id" else f"{batch[int(match['place'])].id}: {match['field']}: "

    return PLACE.sub(name, message, count=1)
