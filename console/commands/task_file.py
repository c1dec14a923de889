"""Reads tasks from JSON lines. Pure: takes the lines of a file, and returns the tasks and all errors in them.

Each line is a task's input, any JSON. Its id comes from the id field of an object, or is the hash of its content. Each
repetition is a rollout of its own, ID.0, ID.1 ..., so queuing the same file again queues nothing twice, and with more
repetitions only the new ones. Lines are parsed as the gateway parses them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from typing import Any, TypeVar, cast

from pydantic_core import from_json

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.queue import RolloutSpec, finite
from penstock.gateway.model.validation_messages import pluralized

T = TypeVar("T")

LONGEST_ID = 120
"""Maximum length of a task's id, which leaves room for the repetition."""
LONGEST_GROUP = 256


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
        raise _TaskLineError(f"is not JSON: {str(e).replace(' at line 1 column', ' at column')}") from None
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
