"""Loads functions by name, `module:function`, from the working directory or the installed modules; runs those that are
not async in threads. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
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


# Runs functions that are not async in threads that may never end.


def in_thread(work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """Run a function in a thread called `name`, as `asyncio.to_thread` does; but one that never ends delays neither the
    end of the process nor other functions.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            done.set_result(result) if error is None else done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except (StopIteration, asyncio.CancelledError) as e:
            # These would mean something else to the awaiting code.
            error = RuntimeError(f"the function raised {e!r}")
        except BaseException as e:
            error = e
        with suppress(RuntimeError):  # the loop has ended meanwhile
            _ = loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
