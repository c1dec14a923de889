"""The process of a gateway: starts it, and handles signals.

SIGTERM and SIGINT stop it; a second one ends every wait. SIGHUP starts another process with the same command, and so
does a change of the configuration file if `reload_on_change` is set. The new process reads the settings anew, with the
code that is installed then, and takes over (`process.handover`). If it does not start, its own output says why, and the
old one goes on unchanged. When the old one has served its last call it becomes the parent of the new one
(`process.parent`), so that a reload does not change the process id.

With `--workers` the process is the parent of several gateways (`process.workers`); each of them is a process of this
module too: `python -m penstock.gateway.process.main ARGUMENTS CHANNEL NAME`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from penstock.gateway.app import Gateway
from penstock.gateway.config import ConfigError, GatewayConfig, load
from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.process import parent, terminal
from penstock.gateway.process.handover import HandoverGrant, receive_grant, request_handover
from penstock.gateway.process.services import wait_for_any
from penstock.gateway.process.workers import ParentChannel, WorkerSupervisor, end_with_parent
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.wire.http import log

_LOOK_SECONDS: Final = 0.2
_WATCH_SECONDS: Final = 1.0
_log = logging.getLogger("penstock.app")


class GatewayProcess:
    """Handles the signals of a gateway's process."""

    def __init__(self, command: list[str] | None, watched: Path | None, tape: str = "") -> None:
        """`command`: starts the next process, None for a worker, whose parent does that; `watched`: the file whose
        change starts it, too; `tape`: path of the tape that it must take over."""
        self.stopping, self.hurry = asyncio.Event(), asyncio.Event()
        self.children = set[int]()
        """Ids of processes that were started to take over, and have not ended."""
        self.code = 0
        """Exit status of a process that had taken over and has ended since."""
        self._taken = asyncio.Event()
        self._command, self._tape = command, tape
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watched = watched
        self._seen = self._tried = _content(watched)

    def listen(self) -> None:
        """Handle SIGTERM, SIGINT and SIGHUP: stop, and reload the configuration. A child leaves them to its parent."""
        loop = asyncio.get_running_loop()
        if self._command is None:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.add_signal_handler(number, _leave_to_parent, number)
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self._watched is not None:
            self._again(self._watch, _WATCH_SECONDS)
        if parent.hangup_came():
            _log.info("SIGHUP has come before this process served: it is taken now")
            self._reload()

    def _again(self, look: Callable[[], None], seconds: float) -> None:
        self._timers[look] = asyncio.get_running_loop().call_later(seconds, look)

    def _watch(self) -> None:
        """Reload after a change of the file, once two looks have found the same content: files are often written in
        pieces."""
        before, self._seen = self._seen, _content(self._watched)
        if self._seen not in (None, self._tried) and self._seen == before and not self.children:
            self._tried = self._seen
            _log.info("%s has changed: another process takes over if it can start with that", self._watched)
            self._reload()
        if not self._taken.is_set():
            self._again(self._watch, _WATCH_SECONDS)

    def _stop(self, number: int) -> None:
        (self.hurry if self.stopping.is_set() else self.stopping).set()
        for child in self.children:
            os.kill(child, number)

    def _reload(self) -> None:
        assert self._command is not None
        if parent.terminal_closed():
            self._stop(signal.SIGTERM)
        elif self.children and not self._taken.is_set():
            _log.warning("SIGHUP: another process is taking over already")
        elif not self.stopping.is_set():
            self.children.add(parent.start(self._command, {**os.environ, parent.TAPE: self._tape}))
            self._look()

    def _look(self) -> None:
        code = parent.reap(self.children)
        if code is not None and not self._taken.is_set():
            _log.error(parent.GOES_ON, code)
        elif code or (code is not None and not self.children):
            _log.error("a process that had taken over has ended with status %d", code)
            self.code = code
        if self.children:
            self._again(self._look, _LOOK_SECONDS)

    async def run(self, gateway: Gateway | WorkerSupervisor, config: GatewayConfig, greets: bool = False) -> None:
        """Run a gateway from its start to its end. `greets`: print what leads agents to it."""
        host, port = await gateway.start()
        _collect_rarely()
        self._taken = gateway.offer.taken
        if isinstance(gateway.offer, ParentChannel):
            gateway.offer.stop = partial(self._stop, signal.SIGTERM)
        self.listen()
        # A program that reads this address may send a signal at once, so the handlers are installed before.
        shown = f"[{host}]" if ":" in host else host
        if self._command is not None:
            _say(f"penstock listening on {_scheme(config)}://{shown}:{port}")
        if greets:
            _say(terminal.welcome(config, terminal.gateway_url(config, host, port)))
        await wait_for_any((self.stopping, self._taken))
        if self._taken.is_set() and self._command is not None:
            _log.info("another process has taken over: this one ends when its clients have gone or were served")
        await gateway.stop(self.hurry)
        for timer in self._timers.values():
            timer.cancel()
        if self.children and self._command is not None:
            await self._become_parent(self._command)

    async def _become_parent(self, command: list[str]) -> None:
        """Become the parent of the process that has taken over. This must happen before the loop ends: after it a
        signal would have its default effect, and nothing could stop the other process any more."""
        caught = parent.hold_signals()
        os.environ[parent.TAPE] = self._tape
        # Let the loop handle signals that came before.
        for _ in range(3):
            await asyncio.sleep(0)
        parent.become(sorted(self.children), command, caught)


class ServeOptions(msgspec.Struct):
    """The options of the command line."""

    config: str | None = None
    data: str | None = None
    host: str | None = None
    port: int | None = None
    workers: int = 1
    quiet: bool = False

    def load(self) -> GatewayConfig:
        """Read the settings; raises `ConfigError`."""
        data = None if self.data is None else Path(self.data)
        return load(self.file, data=data, host=self.host, port=self.port)

    @property
    def file(self) -> Path | None:
        """Path of the configuration file; None without one."""
        return None if self.config is None else Path(self.config)

    @property
    def command(self) -> list[str]:
        """The command that starts the next process. `-P` keeps `python -m` from importing modules of the current
        directory."""
        given = {"--config": self.config, "--data": self.data, "--host": self.host, "--port": self.port}
        if self.workers > 1:
            given["--workers"] = self.workers
        words = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
        flags = ["--take-over", "--quiet"] if self.quiet else ["--take-over"]
        return [sys.executable, "-P", "-m", "penstock", "serve", *flags, *words]


def run(asked: ServeOptions, *, take_over: bool = False) -> None:
    """Run a gateway until it is stopped. Raises `SystemExit` with a message if it cannot start. `take_over`: from the
    gateway that writes this tape, if there is one."""
    process = _run(asked, lambda config: _alone_or_parent(asked, config, take_over))
    sys.exit(process.code)


def main(asked: str, channel: int) -> None:
    """Run a worker; its parent has the other end of the channel."""
    parent.remember_hangup()
    # The parent fixed the hash seed for this worker; its own children need none.
    del os.environ["PYTHONHASHSEED"]
    os.set_inheritable(channel, False)
    threading.Thread(target=end_with_parent, args=(os.dup(channel),), daemon=True).start()
    taken = receive_grant(socket.socket(fileno=channel))
    options = msgspec.json.decode(asked, type=ServeOptions)
    _ = _run(options, lambda config: _worker(config, taken, options.quiet))


def _run(asked: ServeOptions, serve: Callable[[GatewayConfig], Coroutine[Any, Any, GatewayProcess]]) -> GatewayProcess:
    settings = LogSettings()
    log.set_up(settings)
    _take_all_descriptors()
    try:
        config = asked.load()
        settings = config.log
        log.set_up(settings, own_secrets(config.secrets()))
        return uvloop.run(serve(config))
    except (ConfigError, TapeError, OSError) as error:
        raise log.fatal_exit(settings, f"penstock: {error}") from None


async def _alone_or_parent(asked: ServeOptions, config: GatewayConfig, take_over: bool) -> GatewayProcess:
    shown, reloaded = terminal.is_shown(config, asked.quiet), parent.TAPE in os.environ
    process = GatewayProcess(asked.command, asked.file if config.reload_on_change else None, _tape(config))
    taken = request_handover(config.data) if take_over else None
    if take_over and taken is None:
        _log.info("no gateway writes the tape in %s, so there is none to take over from: one is started", config.data)
    if asked.workers > 1:
        words = [sys.executable, "-P", "-m", __spec__.name, msgspec.json.encode(asked).decode()]
        served: Gateway | WorkerSupervisor = WorkerSupervisor(config, asked.workers, words, taken)
    else:
        served = Gateway(config, taken, _call_lines(shown, config))
    await process.run(served, config, greets=shown and not reloaded)
    return process


async def _worker(config: GatewayConfig, taken: HandoverGrant, quiet: bool) -> GatewayProcess:
    process, place = GatewayProcess(None, None), taken.place
    lines = _call_lines(terminal.is_shown(config, quiet), config, place.share(terminal.LINES_A_SECOND))
    await process.run(Gateway(config, taken, lines), config)
    return process


def _call_lines(shown: bool, config: GatewayConfig, most: int = terminal.LINES_A_SECOND) -> terminal.CallLines | None:
    return terminal.CallLines(config, most) if shown else None


def _tape(config: GatewayConfig) -> str:
    """Path of the tape to write; raises `ConfigError` if the process that has started this one serves another tape."""
    tape, served = os.path.realpath(config.data), os.environ.pop(parent.TAPE, None)
    if served not in (None, tape):
        raise ConfigError(f"data: {config.data} is another tape than {served}, which is served: that takes a restart")
    return tape


def _scheme(config: GatewayConfig) -> str:
    return "http" if config.tls.certificate is None else "https"


def _collect_rarely() -> None:
    """Keep the garbage collector off long-lived objects. Calls leave no cycles behind, so a full collection takes a
    tenth of a second and finds none."""
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _say(line: str) -> None:
    """Print a line on stdout. A failure is logged: the program behind a pipe may have gone since the start."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("stdout cannot be written (%s): %s", error.strerror, line)
        # Python would try to write the rest again at exit, and fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave_to_parent(number: int) -> None:
    """Ignore a signal: whoever stops a service may signal all of its processes, and the parent passes on what it
    got."""
    _log.debug("signal %d is for the parent of this worker, process %d", number, os.getppid())


def _content(path: Path | None) -> bytes | None:
    """The content of the file; None if it cannot be read now."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _take_all_descriptors() -> None:
    """Raise the soft limit of file descriptors: a call is two connections, and the usual limit of 1024 would be a
    hidden cap."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
