"""The commands `penstock train apo` and `penstock train custom`.

Heavy imports come after the check of the configuration.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, control_key
from penstock.trainer.apo import MOST_SEEDS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.trainer.apo.config import ApoConfig


def _words(_: object, agent: str | None) -> None:
    """Raise `ValueError` unless `agent` is a valid command line."""
    try:
        _ = shlex.split(agent or "")
    except ValueError as error:
        raise ValueError(f"{agent!r} is no command line: {error}") from None


AGENT = "Command that is run on each task, by a runner beside. Default: runners run elsewhere."
RELEASE = "How production sees a winner; `publish.release` of the configuration if not given."
SEEDS = "Runs with a seed and a directory of their own, one after the other; they release nothing."
Agent = Annotated[str | None, Parameter(validator=_words, help=AGENT)]
Tasks = Annotated[Path | None, Parameter(help="JSONL file of tasks, instead of the configuration's `tasks.file`.")]
Inputs = Annotated[Path | None, Parameter(help="JSONL file of tasks that the function is given, one a line.")]
Name = Annotated[str, Parameter(help="What the run is called on the tape.")]
Release = Annotated[Literal["auto", "canary", "none"] | None, Parameter(help=RELEASE)]
Seeds = Annotated[int | None, Parameter(validator=Number(gte=1, lte=MOST_SEEDS), help=SEEDS)]
LEAST_PROBE = 24
Rollouts = Annotated[int, Parameter(validator=Number(gte=LEAST_PROBE), help="Rollouts of the probe, at most.")]


def advise(
    config: Path, /, *, agent: Agent = None, tasks: Tasks = None, rollouts: Rollouts = 60, json: Json = False,
    gateway: Url = LOCAL,
) -> None:  # fmt: skip
    """Say what is worth doing before anything is spent: prompts, weights, tool texts, a better grader, or nothing.

    A small probe runs the texts as they are, and a handful of other ones, on a few tasks of the train split. Asked
    again, it finds its rollouts on the tape and runs nothing twice.

    Parameters
    ----------
    config
        Configuration of the run that is thought of, such as apo.toml.
    """
    loaded = _loaded(config, tasks, None)
    from penstock.trainer.apo.advice import session

    with _ends():
        found = session.advise(loaded, gateway, control_key(), agent, rollouts)
    if json:
        print(found.model_dump_json(exclude_none=True))
    else:
        _print(session.page(found))


def optimise(
    config: Path, /, *, agent: Agent = None, tasks: Tasks = None, release: Release = None, seeds: Seeds = None,
    placebo: Annotated[bool, Parameter(negative="")] = False, gateway: Url = LOCAL,
) -> None:  # fmt: skip
    """Search for better prompts, and prove on tasks that nobody has seen that one is better.

    A run that was killed goes on where it was, when the same command is given again: it finds its rollouts and
    reflections on the tape. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as apo.toml.
    placebo
        Show the search feedback that says nothing: how much comes of searching alone? Releases nothing.
    """
    loaded = _loaded(config, tasks, release)
    from penstock.trainer.apo import session
    from penstock.trainer.apo.report import pages

    with _ends():
        found = session.optimise(loaded, gateway, control_key(), agent, seeds, placebo)
    _print(pages.report(found))


def report(
    directories: Annotated[list[Path], Parameter(negative="")], /, *, html: Path | None = None, json: Json = False
) -> None:
    """Show what runs have come to: the test, what the texts have learnt and from what, the cost.

    The test comes with its interval, each line with the rollouts that led to it, and with what may leak.

    Parameters
    ----------
    directories
        Directories of runs, or of several seeds of one; runs with a placebo are shown apart.
    html
        Write a page that stands by itself to this file, too.
    """
    from penstock.trainer.apo.report import pages
    from penstock.trainer.apo.report.result import results

    with _ends():
        found = results(directories)
    if html is not None:
        from penstock.gateway.client.console import whole_file

        with whole_file(html) as file:
            file.write(pages.page(found).encode())
    if json:
        for one in found:
            print(one.model_dump_json())
    else:
        _print(pages.report(found))


def custom(
    function: str, config: Path | None = None, /, *, name: Name = "custom", agent: Agent = None, tasks: Inputs = None,
    gateway: Url = LOCAL,
) -> None:  # fmt: skip
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
    from penstock.trainer.apo import custom as custom_run

    with _ends(wrong=2):
        custom_run.train(custom_run.parse_arguments(name, function, config, tasks, agent), gateway, control_key())


def _loaded(path: Path, tasks: Path | None, release: Literal["auto", "canary", "none"] | None) -> ApoConfig:
    """Return the configuration with the options of the command line; then check what is installed."""
    from penstock.trainer.apo.config import load, with_overrides

    with _ends(wrong=2):
        found = with_overrides(load(path), tasks, release)
    _check_extra()
    return found


@contextmanager
def _ends(wrong: int = 1) -> Generator[None]:
    """Turn the end of a run into that of the command; `wrong`: exit status for a wrong configuration."""
    from penstock.gateway.model.toml import ConfigError

    try:
        yield
    except ConfigError as error:
        raise CommandError(str(error), wrong) from None
    except Exception as error:
        from penstock.trainer.runs.report import RunError

        if not isinstance(error, RunError):
            raise
        raise CommandError(str(error)) from None


def _check_extra() -> None:
    missing = [name for name in ("gepa", "numpy") if find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for this: pip install 'penstock-gateway[apo]'")


def _print(page: RenderableType) -> None:
    from rich.console import Console

    from penstock.console.views.table import ENDLESS

    endless = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=ENDLESS if endless else None, highlight=False, emoji=False, markup=False)
    console.print(page, crop=False)
