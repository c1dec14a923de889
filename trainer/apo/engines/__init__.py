"""Engines, one module each, for `trainer.apo.protocol`. Begin with `beam`, the simplest; `ours` is the default."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any, Final, cast

from penstock.gateway.model.codes import install_hint
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.protocol import PromptEngine

OURS: Final = {
    "ours": "pooled_edits:PooledEditEngine",
    "beam": "beam:BeamEngine",
    "gepa": "gepa:GepaEngine",
    "edits": "edits:EditEngine",
}


def make_engine(name: str) -> PromptEngine:
    """Return one of our engines, or that of the user's function or class `module:name`. Raises `ConfigError`."""
    try:
        if name in OURS:
            module, _, attribute = OURS[name].partition(":")
            found = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        else:
            found = import_object("engine", name)
    except ModuleNotFoundError as error:
        if name != "gepa" or error.name != "gepa":
            raise
        raise ConfigError(f"engine: gepa must be installed for it: {install_hint('apo')}") from None
    if isinstance(found, type):
        try:
            _ = inspect.signature(found).bind()
        except TypeError as error:
            raise ConfigError(f"engine: {name} cannot be made without arguments: {error}") from None
        found = found()
    if hasattr(found, "propose"):
        return cast(PromptEngine, found)
    if not callable(found):
        raise ConfigError(f"engine: {name} is a {type(found).__name__}: neither a function, nor has it `propose`")
    return cast(PromptEngine, SimpleNamespace(propose=found))


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
