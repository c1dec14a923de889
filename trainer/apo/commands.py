"""The commands `penstock train apo`. Nothing heavy is imported before a configuration was found right."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, Failure, Url, control_key

Agent = Annotated[
    str | None,
    Parameter(help="Command that is run on each task, by a runner beside. Default: runners run elsewhere."),
]
Tasks = Annotated[Path | None, Parameter(help="JSONL file of tasks, instead of the configuration's `tasks.file`.")]
Release = Annotated[
    Literal["auto", "canary", "none"] | None,
    Parameter(help="How production sees a winner; `publish.release` of the configuration if not given."),
]


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
    _check_extra()
    from penstock.trainer.apo import session
    from penstock.trainer.runs.ending import RunError

    try:
        session.optimise(loaded, gateway, control_key(), agent)
    except RunError as error:
        raise Failure(str(error)) from None


def _check_extra() -> None:
    missing = [name for name in ("gepa", "numpy") if find_spec(name) is None]
    if missing:
        raise Failure(f"{', '.join(missing)} must be installed for this: pip install 'penstock-gateway[apo]'")
