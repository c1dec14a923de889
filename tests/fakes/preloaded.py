"""`penstock` in a process of its own that does not wait for imports: a fork of one that has (`fakes.preloading`).

Tests run a thousand commands and gateways, and importing Penstock was most of what each took. Such a process has its
own pid, streams, variables, directory, signals and exit code. What it is started with that the interpreter itself
reads (`PYTHONPATH`, the language, which certificates are trusted) it shares with the process that it is forked from:
there is one for each such set of variables.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from asyncio import base_subprocess
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

File: TypeAlias = int | IO[Any] | None

READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC", "SSL_", "OPENSSL", "PYDANTIC", "GLIBC")
"""How variables begin that matter to what is imported, or before."""
LIMIT = 1 << 16


class Server:
    """A process to fork from."""

    def __init__(self, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._orders = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("preloading.py"), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env, pass_fds=(theirs.fileno(),),
            )  # fmt: skip

    def start(self, told: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Has a command started; its pid."""
        sys.audit("subprocess.Popen", "penstock", told["arguments"], told["cwd"], told["env"])
        order = json.dumps(told).encode()
        _ = socket.send_fds(self._orders, [len(order).to_bytes(4)], list(fds))
        self._orders.sendall(order)
        answer = self._orders.recv(4, socket.MSG_WAITALL)
        assert len(answer) == 4, "the process that commands are forked from has died"
        return int.from_bytes(answer)

    def close(self) -> None:
        """The tests are over."""
        self._orders.close()
        _ = self._process.wait()


class Fork:
    """What a transport knows of a process, as `subprocess.Popen` has it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    def poll(self) -> int | None:
        """Its exit code, once it is known."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        """To a process that has not ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Asks it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


class Alone(Fork):
    """A fork that is waited for without an event loop, as `subprocess.Popen` is."""

    def __init__(self, pid: int, out: IO[bytes], status: int) -> None:
        super().__init__(pid)
        self.output, self._status = out, status

    def wait(self, timeout: float) -> int:
        """Its exit code, when it has ended; in time, or it fails the test."""
        if self.returncode is None:
            assert select.select([self._status], [], [], timeout)[0], f"process {self.pid} did not end"
            self.returncode = _exit_code(self._status)
            self.output.close()
        return self.returncode


class Transport(base_subprocess.BaseSubprocessTransport):
    """As that of `asyncio.create_subprocess_exec`, of a fork."""

    def _start(
        self,
        args: str | bytes | Sequence[str | bytes],
        shell: bool,
        stdin: File,
        stdout: File,
        stderr: File,
        bufsize: int,
        **kwargs: Any,
    ) -> None:
        server: Server = kwargs["server"]
        told: dict[str, Any] = {"arguments": args, "env": kwargs["env"], "cwd": kwargs["cwd"]}
        ours: list[IO[bytes] | None] = []
        with ExitStack() as theirs:
            fds: list[int] = []
            for place, given in enumerate((stdin, stdout, stderr)):
                end, fd = _stream(place, given, fds, theirs)
                ours.append(end)
                fds.append(fd)
            status, their_status = os.pipe()
            _ = theirs.callback(os.close, their_status)
            made = Fork(server.start(told, [*fds, their_status]))
        made.stdin, made.stdout, made.stderr = ours
        self._proc = made  # pyright: ignore[reportAttributeAccessIssue, reportIncompatibleVariableOverride]
        self._loop.add_reader(status, self._ended, status)

    def _ended(self, status: int) -> None:
        self._loop.remove_reader(status)
        self._process_exited(_exit_code(status))


def _exit_code(status: int) -> int:
    """What the server says of a process that has ended."""
    said = os.read(status, 4)
    os.close(status)
    return os.waitstatus_to_exitcode(int.from_bytes(said)) if said else -signal.SIGKILL


def _stream(place: int, given: File, before: list[int], theirs: ExitStack) -> tuple[IO[bytes] | None, int]:
    """(our end of a pipe, their descriptor), as the arguments of `subprocess.Popen` mean it."""
    if given == subprocess.PIPE:
        reading, writing = os.pipe()
        mine, other = (writing, reading) if place == 0 else (reading, writing)
        _ = theirs.callback(os.close, other)
        return os.fdopen(mine, "wb" if place == 0 else "rb", 0), other
    if given == subprocess.DEVNULL:
        null = os.open(os.devnull, os.O_RDWR)
        _ = theirs.callback(os.close, null)
        return None, null
    if given == subprocess.STDOUT:
        return None, before[1]
    if given is None:
        return None, place
    return None, given if isinstance(given, int) else given.fileno()


_servers: dict[frozenset[tuple[str, str]], Server | None] = {}
"""By the variables that theirs must be; None: one command was started with them, and not yet a second one."""


def _server(env: Mapping[str, str], at_once: bool = False) -> Server | None:
    wanted = frozenset((name, value) for name, value in env.items() if name.startswith(READ_AT_START))
    if wanted not in _servers and not at_once:
        _servers[wanted] = None
        return None
    found = _servers.get(wanted)
    if found is None:
        found = _servers[wanted] = Server(env)
        _ = atexit.register(found.close)
    return found


async def penstock(
    *arguments: str | Path,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: File = None,
    stdout: File = None,
    stderr: File = None,
) -> asyncio.subprocess.Process:
    """`python -m penstock` with these arguments, as `asyncio.create_subprocess_exec` starts it."""
    server = _server(env)
    if server is None:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments), env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr
        )
    loop = asyncio.get_running_loop()
    protocol, waiter = SubprocessStreamProtocol(limit=LIMIT, loop=loop), loop.create_future()
    transport = Transport(
        loop, protocol, [str(word) for word in arguments], False, stdin, stdout, stderr, 0,
        waiter=waiter, server=server, env=dict(env), cwd=str(cwd or Path.cwd()),
    )  # fmt: skip
    await waiter
    return asyncio.subprocess.Process(transport, protocol, loop)


COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
signals = signal.SIGHUP, signal.SIGINT, signal.SIGTERM
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with socket.socket(socket.AF_UNIX) as door:
    door.connect({path!r})
    told = json.dumps({{"arguments": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}).encode()
    socket.send_fds(door, [len(told).to_bytes(4)], [0, 1, 2])
    door.sendall(told)
    said, (status,), _, _ = socket.recv_fds(door, 4, 1)
    pid = int.from_bytes(said)
    for number in signals:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = os.waitstatus_to_exitcode(int.from_bytes(os.read(status, 4)))
sys.exit(code if code >= 0 else 128 - code)
"""
"""A `penstock` for shells: it has the command started behind a door, passes signals on, and ends as that ends."""


@contextmanager
def door(path: Path) -> Generator[str]:
    """A socket behind which commands of other processes are started, and the text of the program that knocks there."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        loop.add_reader(listening.fileno(), _knocked, listening)
        try:
            yield COMMAND.format(python=sys.executable, path=str(path))
        finally:
            _ = loop.remove_reader(listening.fileno())


def _knocked(listening: socket.socket) -> None:
    """Whoever knocked gets the pid, and the pipe to which is written how the command ends: that may be at once."""
    knocker, _ = listening.accept()
    with knocker:
        head, fds, _, _ = socket.recv_fds(knocker, 4, 3)
        told = json.loads(knocker.recv(int.from_bytes(head), socket.MSG_WAITALL))
        server = _server(told["env"], at_once=True)
        assert server is not None
        status, their_status = os.pipe()
        pid = server.start(told, [*fds, their_status])
        _ = socket.send_fds(knocker, [pid.to_bytes(4)], [status])
        for fd in (*fds, status, their_status):
            os.close(fd)


def alone(*arguments: str | Path, env: Mapping[str, str], stderr: IO[bytes]) -> Alone:
    """The same for who has no event loop; its output is in a pipe."""
    server = _server(env, at_once=True)
    assert server is not None
    told = {"arguments": [str(word) for word in arguments], "env": dict(env), "cwd": str(Path.cwd())}
    (out, their_out), (status, their_status) = os.pipe(), os.pipe()
    pid = server.start(told, [0, their_out, stderr.fileno(), their_status])
    os.close(their_out)
    os.close(their_status)
    return Alone(pid, os.fdopen(out, "rb"), status)
