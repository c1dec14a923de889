"""The commands `penstock train`. They import torch when they run, after the check of their configuration."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.gateway.client.console import LOCAL, CommandError, Url, control_key

if TYPE_CHECKING:
    from penstock.trainer.apo.config import ApoConfig as Prompts
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
        _check_online(loaded)
    found = None if prompts is None else _prompts(prompts, loaded, online)
    from penstock.trainer.runs.report import RunError, display

    try:
        with display(loaded.run.steps) as shown:
            # It imports torch, which takes seconds: the display is shown first.
            from penstock.trainer.runs import session

            session.grpo(loaded, gateway, control_key(), shown, online, found)
    except RunError as error:
        raise CommandError(str(error)) from None


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
    _check_extra()
    from penstock.trainer.engines import CheckpointError
    from penstock.trainer.serving.merge import MergeError
    from penstock.trainer.serving.merge import merge as merged

    try:
        base = merged(adapter, model, output)
    except (MergeError, CheckpointError) as error:
        raise CommandError(str(error)) from None
    print(f"{output} is {base} with {adapter} merged into its weights")


def _tune(kind: Literal["sft", "dpo"], config: Path, release: Release, gateway: str) -> None:
    loaded = _loaded(config, release)
    from penstock.trainer.runs import tuning
    from penstock.trainer.runs.report import RunError

    try:
        tuning.tune(kind, loaded, gateway, control_key())
    except RunError as error:
        raise CommandError(str(error)) from None


def _loaded(path: Path, release: Release) -> TrainConfig:
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.config import load

    try:
        found = load(path)
    except ConfigError as error:
        raise CommandError(str(error), 2) from None
    _check_directory(found.run.directory)
    _check_extra()
    if release is None:
        return found
    return found.model_copy(update={"publish": found.publish.model_copy(update={"release": release})})


def _check_directory(path: Path) -> None:
    there = next(place for place in (path, *path.absolute().parents) if os.path.exists(place))
    if not os.access(there, os.W_OK | os.X_OK):
        raise CommandError(
            f"run.directory: {path} cannot be used, {there} may not be written; name another or allow it", 2
        )


def _check_online(config: TrainConfig) -> None:
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.config import check_online

    try:
        check_online(config)
    except ConfigError as error:
        raise CommandError(str(error), 2) from None


def _prompts(path: Path, config: TrainConfig, online: bool) -> Prompts:
    from penstock.gateway.model.toml import ConfigError
    from penstock.trainer.apo.config import load
    from penstock.trainer.config import check_prompts

    if online:
        raise CommandError(
            "--prompts and --online do not go together: production's rollouts are not given other prompts", 2
        )
    try:
        check_prompts(config)
        return load(path)
    except ConfigError as error:
        raise CommandError(str(error), 2) from None


def _check_extra() -> None:
    missing = [name for name in ("torch", "transformers", "peft") if find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for this: pip install 'penstock-gateway[train]'")
