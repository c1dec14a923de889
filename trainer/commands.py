"""The commands `penstock train`. Heavy imports come after the check of the configuration; only `grpo`, `sft`, `dpo` and
`merge` need torch.
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
from penstock.gateway.model.codes import Extra, install_hint
from penstock.trainer.apo import MOST_SEEDS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.trainer.apo.config import ApoConfig
    from penstock.trainer.config import TrainConfig

Release = Annotated[
    Literal["auto", "canary", "none"] | None,
    Parameter(help="How production sees the weights; `publish.release` of the configuration if not given."),
]


def grpo(
    config: Path,
    /,
    *,
    online: bool = False,
    prompts: Path | None = None,
    release: Release = None,
    gateway: Url = LOCAL,
) -> None:
    """Train a model on rollouts of agents, and publish its weights as it learns.

    The run goes on from its newest checkpoint, if it has one. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as train.toml.
    online
        Learn from production, as rewards come, and go on until something is wrong.
    prompts
        Look for prompts too, in between: configuration of what is optimised, such as apo.toml.
    """
    loaded = _loaded(config, release)
    if online:
        from penstock.trainer.config import check_online

        with _ends(wrong=2):
            check_online(loaded)
    found = None if prompts is None else _prompts(prompts, loaded, online)
    from penstock.trainer.runs.supervision import display

    with _ends(), display(loaded.run.steps) as shown:
        # It imports torch, which takes seconds: the display is shown first.
        from penstock.trainer.runs import session

        session.grpo(loaded, gateway, control_key(), shown, online, found)


def sft(config: Path, /, *, release: Release = None, gateway: Url = LOCAL) -> None:
    """Fine-tune a model on answers of the tape: those of good rollouts, or the best of each group.

    The run goes on from its newest checkpoint, if it has one. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as train.toml.
    """
    _tune("sft", config, release, gateway)


def dpo(config: Path, /, *, release: Release = None, gateway: Url = LOCAL) -> None:
    """Train a model to prefer the better of two rollouts of one group.

    The run goes on from its newest checkpoint, if it has one. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as train.toml.
    """
    _tune("dpo", config, release, gateway)


def merge(
    adapter: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    model: Path | None = None,
) -> None:
    """Merge an adapter into the weights of its model, as the Hugging Face hub lays models out.

    Parameters
    ----------
    adapter
        Directory of the adapter, such as penstock-run/adapters/policy.8.
    output
        Directory to make.
    model
        Directory of the model; the one that the adapter names if not given.
    """
    _check_extra("train", "torch", "transformers", "peft")
    from penstock.trainer.engines import CheckpointError
    from penstock.trainer.engines.policy import MergeError, merge_adapter

    try:
        base = merge_adapter(adapter, model, output)
    except (MergeError, CheckpointError) as error:
        raise CommandError(str(error)) from None
    print(f"{output} is {base} with {adapter} merged into its weights")


def _tune(kind: Literal["sft", "dpo"], config: Path, release: Release, gateway: str) -> None:
    loaded = _loaded(config, release)
    from penstock.trainer.runs import tuning

    with _ends():
        tuning.tune(kind, loaded, gateway, control_key())


def _loaded(path: Path, release: Release) -> TrainConfig:
    from penstock.trainer.config import load

    with _ends(wrong=2):
        found = load(path)
    _check_directory(found.run.directory)
    _check_extra("train", "torch", "transformers", "peft")
    if release is None:
        return found
    return found.model_copy(update={"publish": found.publish.model_copy(update={"release": release})})


def _check_directory(path: Path) -> None:
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if not os.access(there, os.W_OK | os.X_OK):
        raise CommandError(
            f"run.directory: {path} cannot be used, {there} may not be written; name another or allow it", 2
        )


def _prompts(path: Path, config: TrainConfig, online: bool) -> ApoConfig:
    from penstock.trainer.apo.config import load
    from penstock.trainer.config import check_prompts

    if online:
        raise CommandError(
            "--prompts and --online do not go together: production's rollouts are not given other prompts", 2
        )
    with _ends(wrong=2):
        check_prompts(config)
        found = load(path)
    return found


# -- apo and custom ----


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
WinnerRelease = Annotated[Literal["auto", "canary", "none"] | None, Parameter(help=RELEASE)]
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
    loaded = _loaded_search(config, tasks, None)
    from penstock.trainer.apo.advice import session

    with _ends():
        found = session.advise(loaded, gateway, control_key(), agent, rollouts)
    if json:
        print(found.model_dump_json(exclude_none=True))
    else:
        _print(session.page(found))


def optimise(
    config: Path, /, *, agent: Agent = None, tasks: Tasks = None, release: WinnerRelease = None, seeds: Seeds = None,
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
    loaded = _loaded_search(config, tasks, release)
    from penstock.trainer.apo import session
    from penstock.trainer.apo.report import terminal_page

    with _ends():
        found = session.optimise(loaded, gateway, control_key(), agent, seeds, placebo)
    _print(terminal_page(found))


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
    from penstock.trainer.apo.report import html_page, terminal_page
    from penstock.trainer.apo.result import results

    with _ends():
        found = results(directories)
    if html is not None:
        from penstock.gateway.client.console import whole_file

        with whole_file(html) as file:
            file.write(html_page(found).encode())
    if json:
        for one in found:
            print(one.model_dump_json())
    else:
        _print(terminal_page(found))


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
    _check_extra("apo", "gepa", "numpy")
    from penstock.trainer.apo import custom as custom_run

    with _ends(wrong=2):
        custom_run.train(custom_run.parse_arguments(name, function, config, tasks, agent), gateway, control_key())


def _loaded_search(path: Path, tasks: Path | None, release: Literal["auto", "canary", "none"] | None) -> ApoConfig:
    """Return the configuration with the options of the command line; then check what is installed."""
    from penstock.trainer.apo.config import load, with_overrides

    with _ends(wrong=2):
        found = with_overrides(load(path), tasks, release)
    _check_extra("apo", "gepa", "numpy")
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
        from penstock.trainer.runs.supervision import RunError

        if not isinstance(error, RunError):
            raise
        raise CommandError(str(error)) from None


def _check_extra(extra: Extra, *packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for this: {install_hint(extra)}")


def _print(page: RenderableType) -> None:
    from rich.console import Console

    from penstock.console.views.table import ENDLESS

    endless = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(width=ENDLESS if endless else None, highlight=False, emoji=False, markup=False)
    console.print(page, crop=False)
