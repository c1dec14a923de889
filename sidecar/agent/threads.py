"""Runs functions that are not async in threads that may never end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


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
