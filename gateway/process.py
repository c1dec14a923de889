"""The process of a gateway: starts it, and minds signals.

SIGTERM and SIGINT stop it; a second one ends every wait. SIGHUP starts another process with the same command, and so
does a change of the configuration file where `reload_on_change` says so: that one reads the settings anew, with the
code as it is installed then, and takes over (`server.handover`). Where it does not start, its own words say why, and
this one goes on as it is. When this one has served its last call it becomes the parent of the other (`server.parent`),
so that a reload does not change the process id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import uvloop

from penstock.gateway.app import Gateway
from penstock.gateway.config import Config, ConfigError, load
from penstock.gateway.http import log
from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.model.log_settings import Log
from penstock.gateway.server import parent
from penstock.gateway.server.ending import first
from penstock.gateway.server.handover import Taken, take
from penstock.gateway.store.directory import TapeError

_LOOK_SECONDS: Final = 0.2
_WATCH_SECONDS: Final = 1.0
_log = logging.getLogger("penstock.app")


class Process:
    """What signals do."""

    def __init__(self, command: list[str], watched: Path | None) -> None:
        """`command`: what starts the next process; `watched`: the file whose change does, too."""
        self.stopping, self.hurry = asyncio.Event(), asyncio.Event()
        self.children = set[int]()
        """Processes that were to take over, and have not ended."""
        self.code = 0
        """Of one that had taken over and has ended since."""
        self._taken = asyncio.Event()
        self._command = command
        self._terminal = _terminal()
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._watched = watched
        self._seen = self._tried = _content(watched)

    def listen(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if self._watched is not None:
            self._again(self._watch, _WATCH_SECONDS)

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
        if self._terminal and not _terminal():
            # It was closed, and nobody can stop this process from it any more.
            self._stop(signal.SIGTERM)
        elif self.children and not self._taken.is_set():
            _log.warning("SIGHUP: another process is taking over already")
        elif not self.stopping.is_set():
            self.children.add(parent.start(self._command))
            self._look()

    def _look(self) -> None:
        code = parent.ended(self.children)
        if code is not None and not self._taken.is_set():
            _log.error("the process that was to take over has ended with status %d: this one goes on as it is", code)
        elif code or (code is not None and not self.children):
            _log.error("a process that had taken over has ended with status %d", code)
            self.code = code
        if self.children:
            self._again(self._look, _LOOK_SECONDS)

    async def run(self, config: Config, taken: Taken | None) -> None:
        """A gateway, from its start to its end."""
        gateway = Gateway(config, taken)
        host, port = await gateway.start()
        self._taken = gateway.offer.taken
        self.listen()
        # Whoever reads the address may send a signal at once.
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls.certificate is None else "https"
        print(f"penstock listening on {scheme}://{shown}:{port}", flush=True)
        await first((self.stopping, self._taken))
        if self._taken.is_set():
            _log.info("another process has taken over: this one ends when its clients have gone or were served")
        await gateway.stop(self.hurry)
        for timer in self._timers.values():
            timer.cancel()


def run(
    config_path: Path | None, data: Path | None, host: str | None, port: int | None, *, take_over: bool = False
) -> None:
    """Runs a gateway until it is told to stop. Raises `SystemExit` with a message when it cannot start. `take_over`:
    from the gateway that writes this tape, where there is one.
    """
    settings = Log()
    log.set_up(settings)
    _take_all_descriptors()
    given = {"--config": config_path, "--data": data, "--host": host, "--port": port}
    words = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    command = [sys.executable, "-m", "penstock", "serve", "--take-over", *words]
    try:
        config = load(config_path, data=data, host=host, port=port)
        settings = config.log
        log.set_up(settings, own_secrets(config.secrets()))
        watched = config_path if config.reload_on_change else None
        process = uvloop.run(_run(config, command, watched, take_over))
    except (ConfigError, TapeError, OSError) as error:
        raise log.end(settings, f"penstock: {error}") from None
    if process.children:
        parent.become(sorted(process.children), command)
    sys.exit(process.code)


async def _run(config: Config, command: list[str], watched: Path | None, take_over: bool) -> Process:
    process = Process(command, watched)
    await process.run(config, take(config.data) if take_over else None)
    return process


def _content(path: Path | None) -> bytes | None:
    """What is in the file; None where that cannot be read now."""
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None


def _terminal() -> bool:
    """Whether there is a terminal whose end would be told by SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _take_all_descriptors() -> None:
    """Raises the soft limit of descriptors: a call is two connections, and the usual limit of 1024 would be a hidden
    cap.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
