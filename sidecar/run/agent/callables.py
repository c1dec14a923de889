"""Agents that are Python functions, in processes of three kinds.

    python -m penstock.sidecar.run.agent.callables module:function                one attempt
    python -m penstock.sidecar.run.agent.callables --check module:function        only checks that the function exists
    python -m penstock.sidecar.run.agent.callables --fork FD module:function      forks a process for each attempt
    python -m penstock.sidecar.run.agent.callables --host SOCKET module:function  runs many attempts at a time

The function gets the task, and its address if it has a parameter `address`. In a process of its own its clients read
the rollout's variables when they are made, its output is kept apart, and it can be killed. Its return value becomes the
output, as the last line of stdout; an exception becomes a traceback on stderr and exit code 1, as for any script. With
`--check`, exit code 1 and one line say that it certainly does not exist.

The runner's side of the last two is in `sidecar.run.engines.local`.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import importlib
import inspect
import io
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from penstock.sidecar.run.agent import helper, supervisor

if TYPE_CHECKING:
    from penstock.sidecar.run.agent.process import Stream


def main() -> None:
    match sys.argv[1:]:
        case ["--check", name]:
            check(name)
        case ["--fork", orders, name]:
            serve_forks(int(orders), name)
        case ["--host", path, name]:
            serve_host(path, name)
        case words:
            run(words[0])


def run(name: str) -> None:
    """Run one attempt in this process."""
    try:
        line = json.dumps(call(name), allow_nan=False)
    except LoadError as e:
        sys.exit(str(e))
    # The function may have left a line without its end.
    print(f"\n{line}", flush=True)


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
            from difflib import get_close_matches  # only errors need it, and each attempt imports this module

            near = get_close_matches(part, [one for one in dir(found) if callable(getattr(found, one, None))], 1)
            raise LoadError(f"{name!r}: {module} has no {path!r}" + "".join(f"; did you mean {one!r}?" for one in near))
        found = getattr(found, part)
    if not callable(found):
        raise LoadError(f"{name!r} is not a function but {type(found).__name__}")
    return found


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


# -- a fork for each attempt ----
#
# The function is imported once, so that attempts start quickly. The runner has the other end of the socket FD. For each
# attempt it sends a length (4 bytes, big endian) with five descriptors: stdin, stdout, stderr, the warden's control
# socket, and one that stays open until no process of the attempt is left. Then it sends JSON:
# `{"env": {...}, "grace_s": 5}`. The answer is the pid (4 bytes) of a fork, which becomes a warden (`supervisor`); its
# agent calls the function. So an attempt has its own process, variables, output and end, like one that was started by a
# command.
#
# Objects that the function's module makes on import are made once, before any attempt has its variables. A client among
# them would go past the gateway, so its base URL (`environment.import_environment`) names a port where nothing answers.

FDS = 5


class ForkServer:
    """The process from which attempts are forked. No thread may be started here."""

    def __init__(self, orders: socket.socket, function: str) -> None:
        self._orders, self._function = orders, function

    def run(self) -> None:
        """Serve orders until the runner is gone."""
        _ = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the runner alone
        _ = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended are not waited for
        while (order := self._order()) is not None:
            told, fds = order
            pid = os.fork()
            if pid == 0:
                self._attempt(told, fds)
            self._orders.sendall(pid.to_bytes(4))
            for fd in fds:
                os.close(fd)

    def _order(self) -> tuple[dict[str, Any], list[int]] | None:
        """(the order, its descriptors); None when the runner is gone."""
        head, fds, _, _ = socket.recv_fds(self._orders, 4, FDS)
        head += self._orders.recv(4 - len(head), socket.MSG_WAITALL)
        told = self._orders.recv(int.from_bytes(head), socket.MSG_WAITALL)
        return (json.loads(told), fds) if told else None

    def _attempt(self, told: dict[str, Any], fds: list[int]) -> None:
        """Turn the fork into a warden. Both of its processes hold `life` open."""
        stdin, stdout, stderr, control, life = fds
        self._orders.close()
        _ = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd, place in ((stdin, 0), (stdout, 1), (stderr, 2)):
            _ = os.dup2(fd, place)
            os.close(fd)
        _ = supervisor.supervise(control, told["grace_s"], lambda failure: self._become(told, life, failure))
        os._exit(0)

    def _become(self, told: dict[str, Any], life: int, failure: int) -> None:
        """Become the agent, and end as a Python process ends."""
        os.close(life)
        os.environ.clear()
        os.environ.update(told["env"])
        os.close(failure)
        sys.argv = [sys.argv[0], self._function]
        raise _StackUnwind


class _StackUnwind(BaseException):
    """Raised in a fork to leave everything that it has inherited of the fork server's stack."""


def serve_forks(fd: int, function: str) -> None:
    """Fork a process for each attempt until the runner is gone."""
    orders = socket.socket(fileno=fd)
    supervisor.close_inherited(orders.fileno())
    os.set_inheritable(orders.fileno(), False)
    with suppress(Exception):  # each attempt tries again, and its output says why
        _ = load(function)
    # Imported objects share memory with every attempt until a write; a garbage collection at its end would write to
    # them.
    gc.freeze()
    try:
        with orders:
            ForkServer(orders, function).run()
    except _StackUnwind:
        run(function)


# -- many attempts in one process ----
#
# The runner listens on SOCKET. Both sides send lines of JSON:
#
#     from the runner   {"run": 1, "task": ..., "variables": {...}}    {"stop": 1}
#     to the runner     {"of": 1, "stream": "stdout", "text": ...}     {"of": 1, "exit_code": 0}
#
# An async function runs as a task of the one event loop, any other function in a thread. Variables belong to a
# process, so here they lead nowhere; each attempt has its own address in a context variable (`helper.address`), which
# its tasks and `asyncio.to_thread` inherit. In the same way each attempt has its own output. `stop` cancels a task; a
# thread cannot be stopped, and the runner then replaces this process when its other attempts have ended.

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
            _ = await asyncio.to_thread(helper.SENDER.wait_for, address, helper.PATIENCE_S)
        if not code:
            # The function may have left a line without its end.
            print(f"\n{said}")
        self._say({"of": number, "exit_code": code})

    async def _call(self, function: Callable[..., Any], task: Any) -> Any:
        given = extra_arguments(function)
        if inspect.iscoroutinefunction(function):
            return await function(task, **given)
        return await _in_thread(lambda: await_result(function(task, **given)))

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


def serve_host(path: str, function: str) -> None:
    """Run the attempts that the runner orders through the socket at `path`."""
    sys.stdout, sys.stderr = OutputRouter("stdout", sys.stdout), OutputRouter("stderr", sys.stderr)
    asyncio.run(_serve(path, _function(function)))


if __name__ == "__main__":
    main()
