"""Runs many attempts of one function in one process.

    python -m penstock.sidecar.run.agent.host SOCKET module:function

The runner (`sidecar.run.agent.function_clients`) listens on the socket. Both sides send lines of JSON:

    from the runner   {"run": 1, "task": ..., "variables": {...}}    {"stop": 1}
    to the runner     {"of": 1, "stream": "stdout", "text": ...}     {"of": 1, "exit_code": 0}

An async function runs as a task of the one event loop, any other function in a thread. Variables belong to a process,
so here they lead nowhere; each attempt has its own address in a context variable (`helper.address`), which its tasks
and `asyncio.to_thread` inherit. In the same way each attempt has its own output. `stop` cancels a task; a thread cannot
be stopped, and the runner then replaces this process when its other attempts have ended.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
import json
import sys
import threading
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TextIO

from penstock.sidecar.run.agent import callables, helper
from penstock.sidecar.run.agent.functions import LoadError, in_thread, load
from penstock.sidecar.run.agent.helper_sender import PATIENCE_S, SENDER
from penstock.sidecar.run.agent.output import Stream

LONGEST_LINE = 1 << 30
"""The most bytes of one order: a task may be large."""
HINT = (
    "penstock: with --concurrency the variables of the process lead nowhere; the function gets its address as its "
    "parameter `address`, or by penstock.address()"
)
_printed: ContextVar[Callable[[Stream, str], None] | None] = ContextVar("penstock_printed", default=None)


class OutputRouter(io.TextIOBase):
    """stdout or stderr of the process: text that an attempt prints goes to the output of that attempt."""

    def __init__(self, name: Stream, real: TextIO) -> None:
        self._stream: Stream = name
        self._real = real

    def write(self, text: str) -> int:
        printed = _printed.get()
        if printed is None:
            return self._real.write(text)
        printed(self._stream, text)
        return len(text)

    def flush(self) -> None:
        self._real.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._real.fileno()


class AttemptHost:
    """The process: runs attempts of the function as the runner orders them."""

    def __init__(self, function: Callable[..., Any] | str, writer: asyncio.StreamWriter) -> None:
        """`function`: the function, or the reason why it cannot be loaded."""
        self._function, self._writer = function, writer
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Follow the runner's orders until it is gone."""
        while line := await reader.readline():
            order = json.loads(line)
            if "run" in order:
                self._begin(order["run"], order["task"], order["variables"])
            elif order["stop"] in self._tasks:
                _ = self._tasks[order["stop"]].cancel()

    def _begin(self, number: int, task: Any, variables: dict[str, str]) -> None:
        context = contextvars.copy_context()
        context.run(helper.pin, variables)
        context.run(_printed.set, lambda stream, text: self._say({"of": number, "stream": stream, "text": text}))
        made = self._loop.create_task(self._attempt(number, task), context=context)
        self._tasks[number] = made
        made.add_done_callback(lambda _: self._tasks.pop(number))

    async def _attempt(self, number: int, task: Any) -> None:
        code, said = 0, ""
        try:
            if isinstance(self._function, str):
                raise LoadError(self._function)
            said = json.dumps(await self._call(self._function, task), allow_nan=False)
        except LoadError as e:
            code = 1
            print(e, file=sys.stderr)
        except (Exception, SystemExit, asyncio.CancelledError) as e:
            code = 1
            hint = "" if helper.address_used() else HINT + "\n"
            # The traceback comes last: its last line is the reason.
            print(hint + "".join(traceback.format_exception(e)), end="", file=sys.stderr)
        address = helper.report_endpoint()
        if address is not None:
            _ = await asyncio.to_thread(SENDER.wait_for, address, PATIENCE_S)
        if not code:
            # The function may have left a line without its end.
            print(f"\n{said}")
        self._say({"of": number, "exit_code": code})

    async def _call(self, function: Callable[..., Any], task: Any) -> Any:
        given = callables.extra_arguments(function)
        if inspect.iscoroutinefunction(function):
            return await function(task, **given)
        return await _in_thread(lambda: callables.await_result(function(task, **given)))

    def _say(self, said: dict[str, Any]) -> None:
        line = json.dumps(said).encode() + b"\n"
        if threading.current_thread() is threading.main_thread():
            self._writer.write(line)
        else:
            _ = self._loop.call_soon_threadsafe(self._writer.write, line)


async def _in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work`, which goes on however often the attempt is told to stop."""
    done = in_thread(work, "penstock-attempt")
    while True:
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            # The attempt was told to stop, but a thread cannot be stopped.
            if done.cancelled():
                raise


def _function(name: str) -> Callable[..., Any] | str:
    """The function, or the reason why it cannot be loaded."""
    try:
        return load(name)
    except LoadError as e:
        return str(e)
    except BaseException:
        return traceback.format_exc()


async def _serve(path: str, function: Callable[..., Any] | str) -> None:
    reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_LINE)
    await AttemptHost(function, writer).serve(reader)


def main() -> None:
    sys.stdout, sys.stderr = OutputRouter("stdout", sys.stdout), OutputRouter("stderr", sys.stderr)
    asyncio.run(_serve(sys.argv[1], _function(sys.argv[2])))


if __name__ == "__main__":
    main()
