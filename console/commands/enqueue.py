"""`penstock enqueue`: queues tasks from a file. The whole file is checked before anything is sent."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import (
    FLAT,
    LOCAL,
    CommandError,
    Json,
    Url,
    pairs,
    seconds,
    validated_model,
    with_client,
)

if TYPE_CHECKING:
    from penstock.console.commands.task_file import TaskLine
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.queue import EnqueueResult, RolloutSpec

BATCH = 1000
PLACE = re.compile(r"^rollouts\[(?P<place>\d+)\]\.(?P<field>[\w.]+): ")
"""The place in a request at the beginning of the gateway's error messages."""
Ends = Literal["failed", "timeout", "unresponsive", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What all rollouts have in common."""

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
        from penstock.gateway.model.queue import RolloutSpec
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
    from penstock.console.commands.task_file import first_flaws, read

    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as e:
        raise CommandError(f"{file}: {e.strerror}") from None
    found, flaws = read(content.split(b"\n"), id_field, group_by)
    if flaws:
        raise CommandError(f"nothing was queued: {file}: {first_flaws(flaws)}")
    if not found:
        raise CommandError(f"{file} has no tasks")
    return found


async def _send(client: Client, found: list[TaskLine], repeat: int, like: RolloutSpec) -> list[EnqueueResult]:
    from penstock.console.commands.task_file import batches, rollouts
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
