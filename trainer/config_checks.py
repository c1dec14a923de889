"""Refuses valid configurations that do not fit a command: each check raises a `ConfigError` with a way out.

Free of torch, as `trainer.config` is.
"""

from __future__ import annotations

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig


def check_full(config: TrainConfig) -> None:
    """Raise `ConfigError` if all weights are trained and cannot be served."""
    if config.model.weights != "full":
        return
    if config.inference.urls:
        raise ConfigError(
            "inference.urls: what others have started cannot be given all weights under a name of their own; leave it "
            'out and name inference.python, or set model.weights to "lora"'
        )
    if config.publish.release != "none":
        raise ConfigError(
            "publish.release: all weights need a server of their own, and those of a run end with it; set it to "
            '"none", start a server with the directory of the last version, and release that (docs/training.md)'
        )


def check_prompts(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that cannot be trained together with prompts."""
    if config.model.weights == "full":
        raise ConfigError(
            'model.weights: "full" cannot serve the first weights and the last ones at the same time, which --prompts '
            'compares: use "lora"'
        )


def check_online(config: TrainConfig) -> None:
    """Raise `ConfigError` for settings that cannot learn from production."""
    grouped, batch = config.online.grouped, config.advantage.estimator == "reinforce++"
    wrong = [
        (not grouped and not batch, "advantage.estimator", f"{config.advantage.estimator!r} compares rollouts of one "
         'task, and production has many: set "reinforce++", or online.grouped = true where it is queued in groups'),
        (grouped and batch, "online.grouped", '"reinforce++" compares all rollouts of a step: leave it out'),
        (config.publish.release == "none", "publish.release", '"none" shows production nothing, and rollouts of '
         'weights older than rollouts.staleness are not learnt from: set "auto" or "canary"'),
        (config.rollouts.ahead, "rollouts.ahead", "production's rollouts are not queued: leave it out"),
        (config.rollouts.curriculum, "rollouts.curriculum", "production's tasks are not drawn: leave it out"),
        (config.model.weights == "full", "model.weights", '"full" needs a server for every version that production and '
         'training get: use "lora"'),
    ]  # fmt: skip
    for applies, key, problem in wrong:
        if applies:
            raise ConfigError(f"{key}: {problem}")
