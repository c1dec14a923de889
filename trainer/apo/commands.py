"""The commands `penstock train apo` and `penstock train custom`.

Nothing heavy is imported before a configuration was found right.
"""

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
Inputs = Annotated[Path | None, Parameter(help="JSONL file of tasks that the function is given, one a line.")]
Name = Annotated[str, Parameter(help="What the run is called on the tape.")]
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


def custom(
    function: str,
    config: Path | None = None,
    /,
    *,
    name: Name = "custom",
    agent: Agent = None,
    tasks: Inputs = None,
    gateway: Url = LOCAL,
) -> None:
    """Run a training algorithm of your own: a function that is given the gateway, tasks and a runner.

    A run that was killed is called again from its beginning, when the same command is given again; rollouts that have
    the same names are not run twice. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    function
        What is run, as `module:function`; modules of the working directory are found.
    config
        TOML file that the function is given.
    """
    _check_extra()
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.apo import custom as custom_run
    from penstock.trainer.runs.ending import RunError

    try:
        custom_run.train(custom_run.wanted(name, function, config, tasks, agent), gateway, control_key())
    except ConfigError as error:
        raise Failure(str(error), 2) from None
    except RunError as error:
        raise Failure(str(error)) from None


def _check_extra() -> None:
    missing = [name for name in ("gepa", "numpy") if find_spec(name) is None]
    if missing:
        raise Failure(f"{', '.join(missing)} must be installed for this: pip install 'penstock-gateway[apo]'")
