"""The commands `penstock train apo`. Nothing heavy is imported before a configuration was found right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.gateway.client.console import LOCAL, Failure, Json, Url, control_key

Agent = Annotated[
    str | None,
    Parameter(help="Command that is run on each task, by a runner beside. Default: runners run elsewhere."),
]
Tasks = Annotated[Path | None, Parameter(help="JSONL file of tasks, instead of the configuration's `tasks.file`.")]
Release = Annotated[
    Literal["auto", "canary", "none"] | None,
    Parameter(help="How production sees a winner; `publish.release` of the configuration if not given."),
]

LEAST_PROBE = 24
Rollouts = Annotated[int, Parameter(validator=Number(gte=LEAST_PROBE), help="Rollouts of the probe, at most.")]


def advise(
    config: Path,
    /,
    *,
    agent: Agent = None,
    tasks: Tasks = None,
    rollouts: Rollouts = 60,
    json: Json = False,
    gateway: Url = LOCAL,
) -> None:
    """Say what is worth doing before anything is spent: prompts, weights, tool texts, a better grader, or nothing.

    A small probe runs the texts as they are, and a handful of other ones, on a few tasks of the train split. Asked
    again, it finds its rollouts on the tape and runs nothing twice.

    Parameters
    ----------
    config
        Configuration of the run that is thought of, such as apo.toml.
    """
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.apo.config import load, overridden

    try:
        loaded = overridden(load(config), tasks, None)
    except ConfigError as error:
        raise Failure(str(error), 2) from None
    from penstock.trainer.apo.advice import session
    from penstock.trainer.runs.ending import RunError

    try:
        session.show(session.advise(loaded, gateway, control_key(), agent, rollouts), json)
    except RunError as error:
        raise Failure(str(error)) from None


def optimise(
    config: Path, /, *, agent: Agent = None, tasks: Tasks = None, release: Release = None, gateway: Url = LOCAL
) -> None:
    """Search for better prompts, and prove on tasks that nobody has seen that one is better.

    A run that was killed goes on where it was, when the same command is given again: it finds its rollouts and
    reflections on the tape. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as apo.toml.
    """
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.apo.config import load, overridden

    try:
        loaded = overridden(load(config), tasks, release)
    except ConfigError as error:
        raise Failure(str(error), 2) from None
    from penstock.trainer.apo import session
    from penstock.trainer.runs.ending import RunError

    try:
        session.optimise(loaded, gateway, control_key(), agent)
    except RunError as error:
        raise Failure(str(error)) from None
