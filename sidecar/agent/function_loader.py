"""Loads functions by name, `module:function`, from the working directory or the installed modules. Standard library
only.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


class LoadError(Exception):
    """Raised when the function does not exist."""


def load(name: str) -> Callable[..., Any]:
    """The function named `module:function`; the working directory is searched first. Raises `LoadError`."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise LoadError(f"{name!r} is not module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise LoadError(f"{name!r}: there is no module {e.name!r} in {os.getcwd()} or among the installed ones") from e
    for part in path.split("."):
        if not hasattr(found, part):
            raise LoadError(f"{name!r}: {module} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise LoadError(f"{name!r} is not a function but {type(found).__name__}")
    return found
