"""An agent that is a Python function: `python -m penstock.sidecar.run.agent.callables module:function`.

With `--check` it only checks that the function exists: exit code 1 and one line when it certainly does not.

The function gets the task, and its address if it has a parameter `address`. It runs in a process of its own, so its
clients read the rollout's variables when they are made, its output is kept apart, and it can be killed. Its return
value becomes the output, as the last line of stdout; an exception becomes a traceback on stderr and exit code 1, as for
any script.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from penstock.sidecar.run.agent import helper
from penstock.sidecar.run.agent.functions import LoadError, load


def task() -> Any:
    """The task of this process, from the variable `PENSTOCK_INPUT` or the file that `PENSTOCK_INPUT_FILE` names."""
    if path := os.environ.get("PENSTOCK_INPUT_FILE"):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    return json.loads(os.environ["PENSTOCK_INPUT"])


def call(name: str) -> Any:
    """Call the function with the task; return its result."""
    function = load(name)
    return await_result(function(task(), **extra_arguments(function)))


def extra_arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword arguments besides the task: the address of the models, if the function has a parameter `address`."""
    try:
        wanted = "address" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        # Some functions that are not written in Python have no signature.
        wanted = False
    return {"address": helper.address()} if wanted else {}


def await_result(result: Any) -> Any:
    """The result of a function, awaited if it is an awaitable. No event loop may run in this thread."""
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def check(name: str) -> None:
    """End the process: with exit code 1 and the reason on stderr when the function certainly does not exist."""
    problem = None
    try:
        _ = load(name)
    except LoadError as e:
        problem = str(e)
    except (ImportError, SyntaxError) as e:
        problem = f"{name!r} cannot be imported: {type(e).__name__}: {e}"
    except BaseException:
        # The import may fail only because it needs an attempt.
        pass
    if problem is not None:
        print(f"\n{problem}", file=sys.stderr, flush=True)
    os._exit(problem is not None)  # threads that the module has started are not waited for


def main() -> None:
    if sys.argv[1] == "--check":
        check(sys.argv[2])
    try:
        line = json.dumps(call(sys.argv[1]), allow_nan=False)
    except LoadError as e:
        sys.exit(str(e))
    # The function may have left a line without its end.
    print(f"\n{line}", flush=True)


if __name__ == "__main__":
    main()
