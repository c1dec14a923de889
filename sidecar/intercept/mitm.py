"""The other engine: mitmproxy between the agent and our front. It ends the agent's TLS, and does nothing else.

It speaks HTTP/2, which our front does not. What becomes of a connection, whose it is and what is told of it stays where
it was: mitmproxy passes everything on to our front, hosts that are not intercepted with their TLS as it is.

It runs as a program, from an environment of its own: what it requires does not go together with what others do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any, Final

from penstock.sidecar.intercept.authority import Authority
from penstock.sidecar.intercept.policy import Policy
from penstock.sidecar.intercept.visit import Passed

PROGRAM: Final = "PENSTOCK_MITMDUMP"
"""Variable with the path of mitmdump."""
_NAME: Final = "mitmdump"
_ADDON: Final = Path(__file__).with_name("mitm_addon.py")
_START: Final = 30.0
"""Seconds in which it must listen."""
_KEPT: Final = ("PATH", "HOME", "LANG", "TMPDIR")
"""What it gets of our environment: no tokens, and no paths of our Python."""
_WORDS: Final = 5
"""Lines of its own that are kept."""


class EngineError(Exception):
    """mitmproxy is not there, or does not start."""


@dataclass(slots=True)
class Engine:
    """mitmproxy, running."""

    port: int
    """Where the agent finds it."""
    pem: str
    """What the agent must trust."""
    folder: Path
    """For files of the agent."""
    problems: list[str] = field(default_factory=list[str])
    """What its owner should know."""


def program() -> str:
    """The path of mitmdump; raises `EngineError`."""
    wanted = os.environ.get(PROGRAM) or _NAME
    found = shutil.which(wanted)
    if found is None:
        raise EngineError(
            f"it needs mitmdump, and {wanted!r} is not there: install mitmproxy in an environment of "
            f"its own (Python 3.12 or newer; `make install-mitmproxy`), and set {PROGRAM} to the path of its mitmdump"
        )
    return found


@asynccontextmanager
async def standing(
    policy: Policy, folder: Path, front: int, trusted: Path, on_passed: Callable[[Passed], None]
) -> AsyncGenerator[Engine]:
    """mitmproxy before a front. `front` is its port and `trusted` the file with its authority; `folder` gets
    its files. Raises `EngineError`."""
    hosts = {host for host, _ in policy.hosts}
    if addresses := sorted(host for host in hosts if _is_address(host)):
        # It writes an address into the name of the certificate as well, and OpenSSL holds that against the constraints.
        raise EngineError(f"--intercept {addresses[0]}: mitmproxy's certificates hold for names only")
    authority = await Authority.made(hosts, private=True)
    home = folder / "mitmproxy"
    home.mkdir(mode=0o700)
    key = home / "mitmproxy-ca.pem"
    key.touch(0o600)
    try:
        key.write_text(authority.private + authority.pem)
        process = await _started(_options(policy, home, front, trusted))
        try:
            engine = Engine(await _port(process), authority.pem, home)
            key.unlink()  # before there is an agent that could read it
            listening = asyncio.ensure_future(_listen(process, engine, on_passed))
            try:
                yield engine
            finally:
                if process.returncode is not None:
                    said = f"mitmproxy ended with code {process.returncode}; connections were refused from then on"
                    engine.problems.append(said)
                await _end(process)
                await listening
        finally:
            await _end(process)
    finally:
        key.unlink(missing_ok=True)


async def _started(options: list[str]) -> asyncio.subprocess.Process:
    place = program()
    try:
        return await asyncio.create_subprocess_exec(
            place,
            *options,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # signals of a terminal are not for it
        )
    except OSError as error:  # an environment that was moved, or made for another machine
        said = f"{place}, or the interpreter in its first line: {error.strerror}"
        raise EngineError(f"mitmdump could not be started: {said}") from None


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _options(policy: Policy, home: Path, front: int, trusted: Path) -> list[str]:
    hosts = "|".join(re.escape(f"{host}:{port}") for host, port in sorted(policy.hosts))
    options = {
        "confdir": str(home),
        "listen_host": "127.0.0.1",
        "listen_port": "0",
        "mode": f"upstream:http://127.0.0.1:{front}",
        "ssl_verify_upstream_trusted_ca": str(trusted),
        "allow_hosts": f"^(?:{hosts})$",
        # It connects when it knows what to send; who the host is, it hears from the agent and not from the host.
        "connection_strategy": "lazy",
        "upstream_cert": "false",
        # Messages of a WebSocket pass as they are. Otherwise it takes each apart and writes it anew.
        "websocket": "false",
        # No pages of its own.
        "onboarding": "false",
        "flow_detail": "0",
        "termlog_verbosity": "error",
        "scripts": str(_ADDON),
    }
    return [word for name, value in options.items() for word in ("--set", f"{name}={value}")]


async def _port(process: asyncio.subprocess.Process) -> int:
    """Where it listens, which it says first."""
    assert process.stdout is not None
    words: list[str] = []
    try:
        async with asyncio.timeout(_START):
            async for line in _lines(process.stdout):
                said = _said(line)
                if isinstance(said, dict) and "port" in said:
                    return said["port"]
                words.append(str(said))
    except TimeoutError:
        words.append(f"it did not listen within {_START:g} s")
    raise EngineError(f"mitmdump could not be started: {' '.join(words[-_WORDS:]) or 'it ended'}")


async def _listen(process: asyncio.subprocess.Process, engine: Engine, on_passed: Callable[[Passed], None]) -> None:
    """Until it ends: what it says of agents, and its own words."""
    assert process.stdout is not None
    async for line in _lines(process.stdout):
        said = _said(line)
        if isinstance(said, dict) and said.keys() >= {"host", "port", "error"}:
            on_passed(Passed(said["host"], said["port"], "intercept", monotonic(), problem=said["error"]))
        elif len(engine.problems) < _WORDS:
            engine.problems.append(f"mitmproxy: {said}")


async def _lines(stdout: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """All that it says, but for lines that are too long: it must never wait for us."""
    while True:
        try:
            line = await stdout.readline()
        except ValueError:
            continue  # what has come of it is dropped
        if not line:
            return
        yield line


def _said(line: bytes) -> dict[str, Any] | str:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode("utf-8", "replace").strip()
