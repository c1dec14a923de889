"""The process of a gateway: starts it, and minds signals.

SIGTERM and SIGINT stop it; a second one ends every wait. SIGHUP starts another process with the same command, and so
does a change of the configuration file where `reload_on_change` says so: that one reads the settings anew, with the
code as it is installed then, and takes over (`server.handover`). Where it does not start, its own words say why, and
this one goes on as it is. When this one has served its last call it becomes the parent of the other (`server.parent`),
so that a reload does not change the process id.

With `--workers` the process is the parent of several gateways (`server.workers`); each of them is a process of this
module too: `python -m penstock.gateway.process ARGUMENTS CHANNEL NAME`.
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
from penstock.gateway.config import Config, ConfigError, load
from penstock.gateway.http import log
from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.model.log_settings import Log
from penstock.gateway.server import hangup, parent
from penstock.gateway.server.ending import first
from penstock.gateway.server.handover import Taken, received, take
from penstock.gateway.server.workers import Leaving, Workers, end_with_parent
from penstock.gateway.store.directory import TapeError

_LOOK_SECONDS: Final = 0.2
_WATCH_SECONDS: Final = 1.0
_log = logging.getLogger("penstock.app")


class Process:
    """What signals do."""

    def __init__(self, command: list[str] | None, watched: Path | None, tape: str = "") -> None:
        """`command`: what starts the next process, None where a parent does that; `watched`: the file whose change
        does, too; `tape`: the one that it must take over."""
        self.stopping, self.hurry = asyncio.Event(), asyncio.Event()
        self.children = set[int]()
        """Processes that were to take over, and have not ended."""
        self.code = 0
        """Of one that had taken over and has ended since."""
        self._taken = asyncio.Event()
        self._command, self._tape = command, tape
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watched = watched
        self._seen = self._tried = _content(watched)

    def listen(self) -> None:
        """From now on."""
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
        if hangup.came():
            _log.info("SIGHUP has come before this process served: it is taken now")
            self._reload()

    def _again(self, look: Callable[[], None], seconds: float) -> None:
        self._timers[look] = asyncio.get_running_loop().call_later(seconds, look)

    def _watch(self) -> None:
        """What has changed counts when it is found the same twice: files are often written in pieces."""
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
        if hangup.terminal_closed():
            self._stop(signal.SIGTERM)
        elif self.children and not self._taken.is_set():
            _log.warning("SIGHUP: another process is taking over already")
        elif not self.stopping.is_set():
            self.children.add(parent.start(self._command, {**os.environ, parent.TAPE: self._tape}))
            self._look()

    def _look(self) -> None:
        code = parent.ended(self.children)
        if code is not None and not self._taken.is_set():
            _log.error(parent.GOES_ON, code)
        elif code or (code is not None and not self.children):
            _log.error("a process that had taken over has ended with status %d", code)
            self.code = code
        if self.children:
            self._again(self._look, _LOOK_SECONDS)

    async def run(self, gateway: Gateway | Workers, scheme: str) -> None:
        """A gateway, from its start to its end."""
        host, port = await gateway.start()
        _collect_rarely()
        self._taken = gateway.offer.taken
        if isinstance(gateway.offer, Leaving):
            gateway.offer.stop = partial(self._stop, signal.SIGTERM)
        self.listen()
        # Whoever reads the address may send a signal at once.
        shown = f"[{host}]" if ":" in host else host
        if self._command is not None:
            _say(f"penstock listening on {scheme}://{shown}:{port}")
        await first((self.stopping, self._taken))
        if self._taken.is_set() and self._command is not None:
            _log.info("another process has taken over: this one ends when its clients have gone or were served")
        await gateway.stop(self.hurry)
        for timer in self._timers.values():
            timer.cancel()
        if self.children and self._command is not None:
            await self._become_parent(self._command)

    async def _become_parent(self, command: list[str]) -> None:
        """Of the process that has taken over. Not after the loop has ended: a signal would have its usual effect then,
        and nobody could stop that process any more."""
        caught = parent.hold_signals()
        os.environ[parent.TAPE] = self._tape
        # The loop passes on those that came before.
        for _ in range(3):
            await asyncio.sleep(0)
        parent.become(sorted(self.children), command, caught)


class Asked(msgspec.Struct):
    """What the command line says."""

    config: str | None = None
    data: str | None = None
    host: str | None = None
    port: int | None = None
    workers: int = 1

    def load(self) -> Config:
        """The settings; raises `ConfigError`."""
        data = None if self.data is None else Path(self.data)
        return load(self.file, data=data, host=self.host, port=self.port)

    @property
    def file(self) -> Path | None:
        """The configuration file."""
        return None if self.config is None else Path(self.config)

    @property
    def command(self) -> list[str]:
        """What starts the next process; not with what lies in this folder, where `python -m` looks first (`-P`)."""
        given = {"--config": self.config, "--data": self.data, "--host": self.host, "--port": self.port}
        if self.workers > 1:
            given["--workers"] = self.workers
        words = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
        return [sys.executable, "-P", "-m", "penstock", "serve", "--take-over", *words]


def run(asked: Asked, *, take_over: bool = False) -> None:
    """Runs a gateway until it is told to stop. Raises `SystemExit` with a message when it cannot start. `take_over`:
    from the gateway that writes this tape, where there is one.
    """
    process = _run(asked, lambda config: _alone_or_parent(asked, config, take_over))
    sys.exit(process.code)


def main(asked: str, channel: int) -> None:
    """Runs a worker; its parent has the other end of the channel."""
    hangup.remember()
    # What it starts itself hashes as it likes.
    del os.environ["PYTHONHASHSEED"]
    os.set_inheritable(channel, False)
    threading.Thread(target=end_with_parent, args=(os.dup(channel),), daemon=True).start()
    taken = received(socket.socket(fileno=channel))
    _ = _run(msgspec.json.decode(asked, type=Asked), lambda config: _worker(config, taken))


def _run(asked: Asked, serve: Callable[[Config], Coroutine[Any, Any, Process]]) -> Process:
    settings = Log()
    log.set_up(settings)
    _take_all_descriptors()
    try:
        config = asked.load()
        settings = config.log
        log.set_up(settings, own_secrets(config.secrets()))
        return uvloop.run(serve(config))
    except (ConfigError, TapeError, OSError) as error:
        raise log.end(settings, f"penstock: {error}") from None


async def _alone_or_parent(asked: Asked, config: Config, take_over: bool) -> Process:
    process = Process(asked.command, asked.file if config.reload_on_change else None, _tape(config))
    taken = take(config.data) if take_over else None
    if take_over and taken is None:
        _log.info("no gateway writes the tape in %s, so there is none to take over from: one is started", config.data)
    if asked.workers > 1:
        words = [sys.executable, "-P", "-m", __spec__.name, msgspec.json.encode(asked).decode()]
        served: Gateway | Workers = Workers(config, asked.workers, words, taken)
    else:
        served = Gateway(config, taken)
    await process.run(served, _scheme(config))
    return process


async def _worker(config: Config, taken: Taken) -> Process:
    process = Process(None, None)
    await process.run(Gateway(config, taken), _scheme(config))
    return process


def _tape(config: Config) -> str:
    """Which one is written; raises `ConfigError` where another is served by the process that has started this one."""
    tape, served = os.path.realpath(config.data), os.environ.pop(parent.TAPE, None)
    if served not in (None, tape):
        raise ConfigError(f"data: {config.data} is another tape than {served}, which is served: that takes a restart")
    return tape


def _scheme(config: Config) -> str:
    return "http" if config.tls.certificate is None else "https"


def _collect_rarely() -> None:
    """Objects that live for good need not be collected; calls leave no cycles behind. To look for any among all of them
    takes a tenth of a second and finds none.
    """
    gc.collect(1)
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _say(line: str) -> None:
    """On stdout, if anybody reads it: the program behind a pipe may have gone since the gateway was started."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("stdout cannot be written (%s): %s", error.strerror, line)
        # What could not be written would be tried again at the end, which would be a failure then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _leave_to_parent(number: int) -> None:
    """Whoever stops a service may send signals to all of its processes, and the parent passes on what it got."""
    _log.debug("signal %d is for the parent of this worker, process %d", number, os.getppid())


def _content(path: Path | None) -> bytes | None:
    """What is in the file; None where that cannot be read now."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _take_all_descriptors() -> None:
    """Raises the soft limit of descriptors: a call is two connections, and the usual limit of 1024 would be a hidden
    cap.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
