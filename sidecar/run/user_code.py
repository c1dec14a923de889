"""Code of the user that the runner calls: judges and hooks. Each is a function of Python, `module:function`, or a
command of the shell, which gets the same as JSON on stdin and prints its answer as its last line of JSON.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

from penstock.sidecar.run.agent.callables import LoadError, in_thread, load
from penstock.sidecar.run.agent.environment import to_json
from penstock.sidecar.run.agent.process import AgentOutput, ExitStatus, LaunchCommand, Stream, start
from penstock.sidecar.run.settings import UsageError

GRACE_S = 1.0
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""The name of a function; any other text is a command."""


class UserCodeError(Exception):
    """Raised when the user's code failed, or gave no valid answer; its text alone is the reason."""


class UserCode:
    """A function or a command that the user has named."""

    def __init__(self, option: str, text: str) -> None:
        """Raises `UsageError`, which begins with `option`, when there is no such function or command."""
        self.text = text
        self.function = _load(option, text) if _FUNCTION.fullmatch(text) else None
        """The function; None for a command."""
        if self.function is None:
            _look_up(option, text)

    async def call(self, *given: Any) -> Any:
        """Call the function: an async one directly, any other in a thread, so that heartbeats go on."""
        assert self.function is not None, "a command is asked"
        function = self.function
        if inspect.iscoroutinefunction(function):
            return await function(*given)
        result = await in_thread(lambda: _called(function, given), "penstock-user-code")
        return await result if inspect.isawaitable(result) else result

    async def ask(self, given: Any) -> Any:
        """Run the command with `given` as JSON on stdin; return its last line of JSON, None without one. Raises
        `UserCodeError` when it fails.
        """
        outputs = AgentOutput(_unheard)
        asked = LaunchCommand(("/bin/sh", "-c", self.text), dict(os.environ), to_json(given).encode())
        process = await start(asked, GRACE_S, outputs.feed)
        ending = await process.wait()
        if ending != ExitStatus(exit_code=0, duration_ns=ending.duration_ns):
            how = ending.error or ending.signal or f"exit code {ending.exit_code}"
            raise UserCodeError(": ".join(filter(None, (repr(self.text), how, outputs.last_words))))
        return outputs.result


def accepts_arguments(function: Callable[..., Any], count: int) -> bool:
    """True if a function can be called with `count` arguments; True also when its signature is unknown, as for some
    functions that are not written in Python.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        _ = signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _load(option: str, name: str) -> Callable[..., Any]:
    try:
        return load(name)
    except LoadError as e:
        raise UsageError(f"{option}: {e}") from None
    except Exception as e:
        raise UsageError(f"{option}: {name!r} cannot be imported: {type(e).__name__}: {e}") from None


def _look_up(option: str, command: str) -> None:
    """Ask the shell, without running the command, if it can parse it and finds its first word. Raises `UsageError`."""
    tried = subprocess.run(("/bin/sh", "-n", "-c", command), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode != 0:
        said = tried.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"{option}: {command!r}: {said[-1] if said else 'the shell does not understand it'}")
    first = re.match(r"\s*([A-Za-z0-9_./+-]+)(?=\s|$)", command)
    if first is None:
        return  # a variable, a quote, a substitution: only running it tells
    known = ("/bin/sh", "-c", 'command -v "$1" >/dev/null', "sh", first[1])
    if subprocess.run(known, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode != 0:
        raise UsageError(f"{option}: there is no command {first[1]!r}, or it cannot be executed; name its path")


def _called(function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    try:
        return function(*given)
    except StopIteration as e:
        raise RuntimeError(repr(e)) from None
    except Exception:
        raise
    except BaseException as e:
        # Code that exits is handled as code that raises any other error.
        raise RuntimeError(f"it raised {e!r}") from None


def _unheard(stream: Stream, line: str) -> None:
    """Drop a line that the user's code prints."""
