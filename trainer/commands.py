"""The commands `penstock train`. Torch is imported when one of them runs, and not before its configuration is right."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from gateway.commands.common import LOCAL, Failure, Url


def grpo(config: Path, /, *, gateway: Url = LOCAL) -> None:
    """Train a model on rollouts of agents, and publish its weights as it learns.

    The run goes on from its newest checkpoint, if it has one. The first SIGINT or SIGTERM stops it.

    Parameters
    ----------
    config
        Configuration of the run, such as train.toml.
    """
    from gateway.strict import ConfigError
    from trainer.config import load

    try:
        loaded = load(config)
    except ConfigError as error:
        raise Failure(str(error), 2) from None
    _check_extra()
    from trainer import session

    try:
        session.grpo(loaded, gateway, os.environ.get("PENSTOCK_KEY"))
    except session.RunError as error:
        raise Failure(str(error)) from None


def _check_extra() -> None:
    missing = [name for name in ("torch", "transformers", "peft") if find_spec(name) is None]
    if missing:
        raise Failure(f"{', '.join(missing)} must be installed for this: pip install 'penstock[train]'")
