"""The laboratory of `trainer.apo` in a run that trains weights too."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import Resource
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig, ApoRolloutSettings, ApoRunSettings
from penstock.trainer.apo.gateway_laboratory import GatewayLaboratory
from penstock.trainer.apo.protocol import TrialSpec
from penstock.trainer.config import TrainConfig

# The laboratory of `trainer.apo` in a run that trains weights too: its rollouts are pinned to weights as well.
#
# Each set of trials has a label, such as `round-3`, which is in its rollout ids: the same prompt is tried again with
# other weights, and trials that are repeated after a crash find their rollouts on the tape.


class PinnedLaboratory(GatewayLaboratory):
    """The laboratory of one run. Call `with_pins` before use."""

    _label = ""
    _pins: Mapping[str, str] = {}
    _step = 0

    def with_pins(self, label: str, step: int, pins: Mapping[str, str]) -> Self:
        """Return a copy for rollouts of this label and step, which get these versions besides those of the texts."""
        made = copy.copy(self)
        made._label, made._step, made._pins = label, step, pins
        return made

    def _spec(self, order: TrialSpec, versions: Mapping[str, str], mode: Mode) -> RolloutSpec:
        spec = super()._spec(order, {**versions, **self._pins}, mode)
        run = self._config.run.name
        names = {
            "id": f"{run}.{self._label}.{order.candidate}.{order.task}.{order.number}",
            "group": f"{run}.{self._label}.{order.task}",
            "metadata": {**(spec.metadata or {}), "penstock.step": self._step},
        }
        return spec.model_copy(update=names)


def settings_of(prompts: ApoConfig, config: TrainConfig) -> ApoConfig:
    """Return the settings of `--prompts` for a run: name, seed and time limit of rollouts are those of the run. Raises
    `ConfigError`."""
    if config.model.name in (*prompts.texts.prompts, *prompts.texts.tools):
        raise ConfigError(f"model.name: {config.model.name!r} is the name of a text too; give one of them another name")
    run = ApoRunSettings(name=config.run.name, directory=config.run.directory, seed=config.run.seed)
    rollouts = ApoRolloutSettings(attempt_timeout=config.rollouts.timeout)
    return prompts.model_copy(update={"run": run, "rollouts": rollouts})


async def versions_of(client: Client, names: Mapping[str, str]) -> dict[str, Resource]:
    """Return these versions of resources. Raises `ConfigError` if one does not exist."""
    found: dict[str, Resource] = {}
    for name, version in names.items():
        try:
            versions = (await client.resource(name)).versions
        except ClientError as error:
            raise ConfigError(f"{name!r}, which the checkpoint names: {error}") from None
        one = next((one for one in versions if one.version == version), None)
        if one is None:
            raise ConfigError(f"the checkpoint names {name}@{version}, which the gateway does not have")
        found[name] = one
    return found
