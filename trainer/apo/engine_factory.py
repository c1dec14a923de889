"""Makes the engine that a configuration names."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.protocol import PromptEngine


def make_engine(name: str) -> PromptEngine:
    """Return the engine of a run: one of ours, or a function or class of the user's `module:name`. Raises
    `ConfigError`."""
    if name == "ours":
        from penstock.trainer.apo.engines.pooled_edits import PooledEditEngine

        return PooledEditEngine()
    if name == "beam":
        from penstock.trainer.apo.engines.beam import BeamEngine

        return BeamEngine()
    if name == "gepa":
        return _gepa()
    if name == "edits":
        from penstock.trainer.apo.engines.edits import EditEngine

        return EditEngine()
    found = import_object("engine", name)
    if isinstance(found, type):
        found = _made(name, cast(Callable[[], Any], found))
    if hasattr(found, "propose"):
        return cast(PromptEngine, found)
    if not callable(found):
        raise ConfigError(f"engine: {name} is a {type(found).__name__}: neither a function, nor has it `propose`")
    return cast(PromptEngine, SimpleNamespace(propose=found))


def _made(name: str, engine: Callable[[], Any]) -> Any:
    try:
        _ = inspect.signature(engine).bind()
    except TypeError as error:
        raise ConfigError(f"engine: {name} cannot be made without arguments: {error}") from None
    return engine()


def _gepa() -> PromptEngine:
    try:
        from penstock.trainer.apo.engines.gepa import GepaEngine
    except ModuleNotFoundError as error:
        if error.name != "gepa":
            raise
        raise ConfigError("engine: gepa must be installed for it: pip install 'penstock-gateway[apo]'") from None
    return GepaEngine()


def import_object(key: str, name: str) -> Any:
    """Import and return `module:name`; modules of the working directory are found. Raises `ConfigError`."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not all(map(str.isidentifier, module.split("."))):
        raise ConfigError(f"{key}: {module!r} is not the name of a module, as in module:name")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # An import inside the module may be what is missing.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{key}: there is no module {module!r} here or on the Python path") from None
    try:
        return getattr(found, attribute)
    except AttributeError:
        raise ConfigError(f"{key}: {module!r} has no {attribute!r}") from None
