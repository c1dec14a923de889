"""Chooses the engine that a configuration names, and imports only the modules that this engine needs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.config import TrainConfig
from penstock.trainer.engines.local import TrainingEngine
from penstock.trainer.engines.policy import check_paths
from penstock.trainer.engines.remote import RemoteEngine


def make_engine(config: TrainConfig, reference: bool = False, updates: int | None = None) -> TrainingEngine:
    """Return the engine that `engine.kind` names; the arguments are those of `TrainingEngine`.

    Raises `ConfigError`, also if it is not installed, and `EngineError` if its ranks cannot start.
    """
    if config.engine.kind == "local":
        return TrainingEngine(config, reference, updates)
    missing = ", ".join(name for name in ("verl", "ray", "tensordict") if not _installed(name))
    if missing:
        raise ConfigError(
            f"engine.kind: \"verl\" needs {missing} here: pip install 'penstock-gateway[verl]' into an environment "
            'of its own (docs/scale-out.md), or set it to "local"'
        )
    if reference and config.model.weights == "full":
        raise ConfigError('model.weights: with engine.kind = "verl" only adapters have a reference; use "lora"')
    config = _absolute(config)
    check_paths(config)
    from penstock.trainer.engines.verl_backend import RayRankGroup

    return RemoteEngine(config, RayRankGroup(config), updates)


def _absolute(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths: ranks have another working directory."""
    model = config.model
    paths = {"path": model.path.absolute(), "adapter": model.adapter and model.adapter.absolute()}
    return config.model_copy(update={"model": model.model_copy(update=paths)})


def _installed(name: str) -> bool:
    # By its distribution: an import could find a directory that happens to have the name.
    try:
        _ = distribution(name)
    except PackageNotFoundError:
        return False
    return True
