"""The other engine: mitmproxy between the agent and our front. It ends the agent's TLS, and does nothing else.

It speaks HTTP/2, which our front does not. The front still decides each connection's fate and rollout, and reports it:
mitmproxy passes every connection on to the front, those of hosts that are not intercepted with their TLS as it is.

It runs as a program, from an environment of its own, because its requirements conflict with those of other packages.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from typing import Any, Final

from penstock.gateway.client.child_process import ChildProcess
from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.rules import InterceptPolicy

PROGRAM: Final = "PENSTOCK_MITMDUMP"
"""The variable with the path of mitmdump."""
_NAME: Final = "mitmdump"
_ADDON: Final = Path(__file__).with_name("mitm_addon.py")
_START: Final = 30.0
"""The longest time until it must listen; s."""
_END: Final = 3.0
"""The longest time in which it may end; s."""
_KEPT: Final = ("PATH", "HOME", "LANG", "TMPDIR")
"""The variables that it inherits: no tokens, and no paths of our Python."""
_WORDS: Final = 5
"""The most lines of its own output that are kept."""


class MitmproxyError(Exception):
    """Raised when mitmproxy is missing, or does not start."""


@dataclass(slots=True)
class MitmproxyProcess:
    """A mitmproxy that runs in front of the sidecar's own proxy."""

    port: int
    """The port of its proxy, for the agent."""
    pem: str
    """The certificate that the agent must trust."""
    folder: Path
    """The folder for the agent's files."""
    problems: list[str] = field(default_factory=list[str])
    """Problems to report to the user."""


def find_mitmdump() -> str:
    """The path of mitmdump; raises `MitmproxyError`."""
    wanted = os.environ.get(PROGRAM) or _NAME
    found = shutil.which(wanted)
    if found is None:
        raise MitmproxyError(
            f"it needs mitmdump, and {wanted!r} is not there: install mitmproxy in an environment of "
            f"its own (Python 3.12 or newer; `make install-mitmproxy`), and set {PROGRAM} to the path of its mitmdump"
        )
    return found


@asynccontextmanager
async def run_mitmproxy(
    policy: InterceptPolicy, folder: Path, front: int, trusted: Path, on_passed: Callable[[ConnectionRecord], None]
) -> AsyncGenerator[MitmproxyProcess]:
    """Run mitmproxy before a front. `front`: the front's port. `trusted`: the file with the front's authority.
    `folder`: the place for its files. Raises `MitmproxyError`.
    """
    hosts = {host for host, _ in policy.hosts}
    if addresses := sorted(host for host in hosts if _is_address(host)):
        # mitmproxy writes an address into the certificate's common name too, and OpenSSL rejects that by the
        # constraints.
        raise MitmproxyError(f"--intercept {addresses[0]}: mitmproxy's certificates hold for names only")
    authority = await CertificateStore.create(hosts, private=True)
    home = folder / "mitmproxy"
    home.mkdir(mode=0o700)
    key = home / "mitmproxy-ca.pem"
    key.touch(0o600)
    try:
        key.write_text(authority.private + authority.pem)
        process = await _started(_options(policy, home, front, trusted))
        child = ChildProcess(process)
        try:
            engine = MitmproxyProcess(await _port(process), authority.pem, home)
            key.unlink()  # before there is an agent that could read it
            listening = asyncio.ensure_future(_listen(process, engine, on_passed))
            try:
                yield engine
            finally:
                if process.returncode is not None:
                    said = f"mitmproxy ended with code {process.returncode}; connections were refused from then on"
                    engine.problems.append(said)
                assert process.stdin is not None
                # It reports the clients that it has not looked at yet, and ends.
                process.stdin.close()
                _ = await child.end(_END)
                await listening
        finally:
            _ = await child.end()
    finally:
        key.unlink(missing_ok=True)


async def _started(options: list[str]) -> asyncio.subprocess.Process:
    place = find_mitmdump()
    try:
        return await asyncio.create_subprocess_exec(
            place,
            *options,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # it must not get a terminal's signals
        )
    except OSError as error:  # its environment was moved, or made for another machine
        said = f"{place}, or the interpreter in its first line: {error.strerror}"
        raise MitmproxyError(f"mitmdump could not be started: {said}") from None


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _options(policy: InterceptPolicy, home: Path, front: int, trusted: Path) -> list[str]:
    hosts = "|".join(re.escape(f"{host}:{port}") for host, port in sorted(policy.hosts))
    options = {
        "confdir": str(home),
        "listen_host": "127.0.0.1",
        "listen_port": "0",
        "mode": f"upstream:http://127.0.0.1:{front}",
        "ssl_verify_upstream_trusted_ca": str(trusted),
        "allow_hosts": f"^(?:{hosts})$",
        # It connects only with a request to send, and takes the host's name from the agent, not from the host's
        # certificate.
        "connection_strategy": "lazy",
        "upstream_cert": "false",
        # Messages of a WebSocket pass unchanged; otherwise it would parse and rewrite each.
        "websocket": "false",
        # No pages of its own.
        "onboarding": "false",
        "flow_detail": "0",
        "termlog_verbosity": "error",
        "scripts": str(_ADDON),
    }
    return [word for name, value in options.items() for word in ("--set", f"{name}={value}")]


async def _port(process: asyncio.subprocess.Process) -> int:
    """Wait for the port that it listens on, the first line that it prints; raises `MitmproxyError`."""
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
    raise MitmproxyError(f"mitmdump could not be started: {' '.join(words[-_WORDS:]) or 'it ended'}")


async def _listen(
    process: asyncio.subprocess.Process, engine: MitmproxyProcess, on_passed: Callable[[ConnectionRecord], None]
) -> None:
    """Read its output until it ends: failed handshakes of the agent, and other lines as problems."""
    assert process.stdout is not None
    async for line in _lines(process.stdout):
        said = _said(line)
        if isinstance(said, dict) and said.keys() >= {"host", "port", "error"}:
            on_passed(ConnectionRecord(said["host"], said["port"], "intercept", monotonic(), problem=said["error"]))
        elif len(engine.problems) < _WORDS:
            engine.problems.append(f"mitmproxy: {said}")


async def _lines(stdout: asyncio.StreamReader) -> AsyncGenerator[bytes]:
    """Yield the lines of its output, except too long ones; mitmproxy must never wait for us to read."""
    while True:
        try:
            line = await stdout.readline()
        except ValueError:
            continue  # the part that was read is dropped
        if not line:
            return
        yield line


def _said(line: bytes) -> dict[str, Any] | str:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return line.decode("utf-8", "replace").strip()
