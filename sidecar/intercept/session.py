"""One agent behind its own front: makes authority and variables, and reports the contacted hosts to the gateway.

`open_session` does all of this without the agent. `run` starts the agent as well, passes signals on, and reaps it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import ssl
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Awaitable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final, Literal

from penstock.gateway.client.child_process import LockedFolder, socket_folder
from penstock.sidecar.intercept import mitm, namespace
from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import RolloutBinding
from penstock.sidecar.intercept.rules import HINTS, KEYS, LOGINS, InterceptPolicy

if TYPE_CHECKING:
    from penstock.gateway.model.queue import Event, Scalar

# The variables and files that make an agent's clients use the front and trust its authority.
#
# Clients read different variables. Some replace the system's certificates, so they name a bundle of these and ours.
# Node's own variable adds to them, so it names ours alone.

BUNDLES: Final = (
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "CODEX_CA_CERTIFICATE",
    "GIT_SSL_CAINFO",
    "CARGO_HTTP_CAINFO",
    "AWS_CA_BUNDLE",
    "PIP_CERT",
    "DENO_CERT",
)
"""Read, in this order, by OpenSSL (Python's httpx, Ruby, PHP) and Go; requests; curl; Codex; git; cargo; boto; pip;
Deno.
"""
ADDED: Final = ("NODE_EXTRA_CA_CERTS",)
"""Read by Node, in addition to its built-in certificates."""
PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_SYSTEM: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


_PR_SET_DUMPABLE: Final = 4
_HERE: Final = ("localhost", "127.0.0.1", "::1")


def variables(bundle: Path, own: Path, port: int, hosts: Collection[str]) -> dict[str, str]:
    """The variables of an agent with a proxy. Only this machine itself is exempt from the proxy, unless one of the
    intercepted hosts is on it.
    """
    excepted = "" if set(_HERE) & set(hosts) else ",".join(_HERE)
    proxy = f"http://127.0.0.1:{port}"
    return {
        **certificates(bundle, own),
        **dict.fromkeys(PROXIES, proxy),
        **dict.fromkeys(("NO_PROXY", "no_proxy"), excepted),
        "NODE_USE_ENV_PROXY": "1",
    }


def certificates(bundle: Path, own: Path) -> dict[str, str]:
    """The variables of an agent whose connections the kernel redirects: it has no proxy."""
    return {**dict.fromkeys(BUNDLES, str(bundle)), **dict.fromkeys(ADDED, str(own))}


def write(folder: Path, pem: str) -> tuple[Path, Path]:
    """Write (bundle, our certificate alone) into a folder; return their paths."""
    bundle, own = folder / "ca-bundle.pem", folder / "penstock-ca.pem"
    own.write_text(pem)
    bundle.write_bytes(_system() + pem.encode())
    return bundle, own


def _system() -> bytes:
    """The certificates that this machine trusts, as bytes: comments among them may be in any encoding."""
    found = ssl.get_default_verify_paths().cafile
    for name in filter(None, (found, *_SYSTEM)):
        file = Path(name)
        if file.is_file():
            return file.read_bytes() + b"\n"
    return b""


def close_memory() -> None:
    """Forbid other processes of this user, such as an agent, to read the memory and the variables of this one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


SOCKETS: Final = {
    "api.anthropic.com": {"ANTHROPIC_UNIX_SOCKET": "{path}", "ANTHROPIC_BASE_URL": "http://api.anthropic.com"},
}
"""Variables for clients that accept a Unix socket to a host: Claude Code, where this is undocumented."""
_SOCKET: Final = "{host}.sock"
_KEYS: Final = (signal.SIGINT, signal.SIGQUIT)
"""Signals that a terminal's keys send to all processes in its foreground."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """The options of the user."""

    gateway: str
    policy: InterceptPolicy
    identity: AgentIdentity
    sockets: bool = False
    """True if clients that can use a Unix socket get one."""
    surrogates: bool = False
    """True if the agent gets its token in place of keys."""
    transparent: bool = False
    """True if the agent gets a network of its own in place of a proxy."""
    engine: Literal["own", "mitmproxy"] = "own"
    """The engine that ends the TLS of an agent with a proxy: our front, or mitmproxy before it."""

    @property
    def address(self) -> str:
        """The address of the rollout, by which `penstock mcp wrap` finds it; without one the gateway's."""
        whose = self.identity
        return (
            f"{self.gateway}/rollout/{whose.rollout}/attempt/{whose.attempt or 'a1'}" if whose.rollout else self.gateway
        )


@dataclass(slots=True)
class AgentSession:
    """A running front and the variables of its agent."""

    front: AgentProxy
    variables: dict[str, str]
    """Variables for the agent."""
    problems: list[str] = field(default_factory=list[str])
    """Problems to report to the user; complete when the front is closed."""


@asynccontextmanager
async def open_session(wanted: SessionOptions, folder: Path) -> AsyncGenerator[AgentSession]:
    """Run a front for one agent, with files for it in a folder. At the end the contacted hosts are reported to the
    gateway.
    """
    names = wanted.policy.names
    authority, ledger = await CertificateStore.create(names), EgressLedger()
    ours: set[int] = set()
    front = AgentProxy(wanted.gateway, wanted.policy, authority, ledger.add, ours=ours)
    engine: mitm.MitmproxyProcess | None = None
    stack = AsyncExitStack()
    try:
        front.bind(wanted.identity.rollout_binding)
        bundle, own = write(folder, authority.pem)
        if wanted.transparent:
            made = AgentSession(front, certificates(bundle, own))
        else:
            port = await front.start()
            if wanted.engine == "mitmproxy":
                standing = mitm.run_mitmproxy(wanted.policy, folder, port, bundle, ledger.add)
                engine = await stack.enter_async_context(standing)
                ours.add(engine.port)
                # With our authority too: our front's own answers pass through mitmproxy with our certificate.
                port, (bundle, own) = engine.port, write(engine.folder, engine.pem + authority.pem)
            made = AgentSession(front, variables(bundle, own, port, names))
        if wanted.surrogates and wanted.identity.token is not None:
            made.variables |= dict.fromkeys(KEYS, wanted.identity.token) | dict.fromkeys(LOGINS, "")
        if wanted.sockets:
            for host, templates in SOCKETS.items():
                path = folder / _SOCKET.format(host=host)
                await front.start_socket(path, host)
                made.variables |= {name: value.format(path=path) for name, value in templates.items()}
        yield made
    finally:
        await stack.aclose()
        await front.stop()
    made.problems += ledger.problems + ([] if engine is None else engine.problems) or ledger.nothing_recorded()
    if (untold := await report_egress(wanted.gateway, wanted.identity, ledger.take())) is not None:
        made.problems.append(f"where the agent has been is not on the tape: {untold}")


def folder_for_sockets() -> LockedFolder:
    """The temporary folder for `open_session`, with a path short enough for its sockets."""
    return socket_folder("penstock-sidecar-", max((_SOCKET.format(host=host) for host in SOCKETS), key=len))


async def run(wanted: SessionOptions, command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command; return its exit code (128 plus the number of a signal that ended it, 127 when it does not exist)
    and the problems to report to the user. Raises `NamespaceError` when it cannot have a network of its own.
    """
    close_memory()
    with folder_for_sockets() as folder:
        async with open_session(wanted, Path(folder)) as made:
            given = {"PENSTOCK_URL": wanted.address} | HINTS | os.environ | made.variables
            env = {name: value for name, value in given.items() if value or name not in LOGINS}
            start = (
                _start_in_namespace(made.front, Path(folder), command, env)
                if wanted.transparent
                else _start(command, env)
            )
            code = await _run_to_end(start)
        return code, made.problems


async def _start(argv: Sequence[str], env: dict[str, str]) -> Process | None:
    """Start the command; None when it cannot be started, which is printed."""
    try:
        return await asyncio.create_subprocess_exec(*argv, env=env)
    except OSError as error:
        print(f"penstock: {argv[0]!r} could not be started: {error.strerror}", file=sys.stderr)
        return None


async def _start_in_namespace(front: AgentProxy, folder: Path, argv: Sequence[str], env: dict[str, str]) -> Process:
    """Start the command in a network of its own, from which only the front leads out."""
    resolv = folder / "resolv.conf"
    resolv.write_text("nameserver 127.0.0.1\n")
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            way = theirs.fileno()
            own = (sys.executable, "-P", "-m", namespace.__name__, str(way), str(resolv), "--")
            process = await asyncio.create_subprocess_exec(*own, *argv, env=env, pass_fds=[way])
        said, files, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 4096, 3)
        if said != b"+":
            _ = await process.wait()
            raise namespace.NamespaceError(said.decode(errors="replace") or "the agent's network could not be made")
        await front.start_in_namespace([socket.socket(fileno=file) for file in files])
        ours.sendall(b"+")
    return process


async def _run_to_end(start: Awaitable[Process | None]) -> int:
    """Start a command, pass signals on until it has ended, and return its exit code. A signal that comes during the
    start is passed on right after it.
    """
    loop = asyncio.get_running_loop()
    early: list[signal.Signals] = []
    process: Process | None = None

    # One handler for all of the time: asyncio may call a handler that was replaced, once more and too late.
    def hear(one: signal.Signals) -> None:
        if process is None:
            early.append(one)
        else:
            _pass_on(process, one)

    try:
        for one in _SIGNALS:
            loop.add_signal_handler(one, hear, one)
        if (process := await start) is None:
            return 127
        for one in early:
            _pass_on(process, one)
        code = await process.wait()
    finally:
        for one in _SIGNALS:
            loop.remove_signal_handler(one)
    return 128 - code if code < 0 else code


def _pass_on(process: Process, one: signal.Signals) -> None:
    if one in _KEYS and _in_foreground():
        return  # the terminal has signalled the agent too, and to many agents a second signal means something else
    with suppress(ProcessLookupError):
        process.send_signal(one)


def _in_foreground() -> bool:
    """True if a terminal's keys signal us and the processes that we start."""
    for file in range(3):
        with suppress(OSError):
            return os.tcgetpgrp(file) == os.getpgrp()
    return False


# Reports to the gateway which hosts besides its model hosts an agent has contacted: an event on its rollout for each.
#
# Its heavy imports, which would be half of a sidecar's memory, wait until there is something to report.


EGRESS_EVENT: Final = "egress"
_SECONDS: Final = 10.0
_MOST: Final = 500
"""The most events in one request, and the most rows of a ledger."""
_OTHERS: Final = "(others)"
_SHOWN: Final = 3
"""Hosts that are named where nothing was recorded."""
_Key = tuple[str, int, str, str | None]
"""Host, port, fate; the address of a redirected connection, else None."""


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The known identity of an agent: its rollout and attempt, its token, or nothing."""

    rollout: str | None = None
    attempt: str | None = None
    token: str | None = None

    @property
    def rollout_binding(self) -> RolloutBinding:
        """The headers that identify the agent's connections to the gateway."""
        named = {"x-rollout-id": self.rollout, "x-attempt-id": self.attempt}
        key = [] if self.token is None else [("Proxy-Authorization", f"Bearer {self.token}")]
        return RolloutBinding((*((name, value) for name, value in named.items() if value), *key))


class EgressLedger:
    """The connections of one agent, summed by host, port and fate."""

    def __init__(self) -> None:
        self._rows: dict[_Key, tuple[ConnectionRecord, int]] = {}
        """The sum of a row's connections, and their number."""
        self.intercepted = False
        """True if a connection went to the gateway."""

    def add(self, one: ConnectionRecord) -> None:
        """Add a closed connection. Calls that went to the gateway have spans of their own, so only those that failed to
        are added.
        """
        if one.action == "intercept" and one.problem is None:
            self.intercepted = True
            return
        if one.action == "check":
            return
        key = (one.host, one.port, one.action, one.address)
        if key not in self._rows and len(self._rows) >= _MOST:
            key = (_OTHERS, 0, one.action, None)
        row, count = self._rows.get(key, (None, 0))
        if row is None:
            self._rows[key] = (one, 1)
            return
        row.started = min(row.started, one.started)
        row.seconds, row.sent, row.received = (
            row.seconds + one.seconds,
            row.sent + one.sent,
            row.received + one.received,
        )
        row.problem = row.problem or one.problem
        self._rows[key] = (row, count + 1)

    @property
    def problems(self) -> list[str]:
        """A line for each host with a problem, for the user."""
        rows = self._rows.items()
        return [f"{host}:{port}: {one.problem}" for (host, port, *_), (one, _) in rows if one.problem is not None]

    def nothing_recorded(self) -> list[str]:
        """A line for the user if no connection went to the gateway: where the agent was instead, and the way out."""
        if self.intercepted:
            return []
        hosts = list(dict.fromkeys(f"{host}:{port}" for host, port, *_ in self._rows))
        others = ", ".join(hosts[:_SHOWN]) + (" ..." if len(hosts) > _SHOWN else "") or "none at all"
        return [
            f"nothing was recorded: the agent opened no connection to a host of models (others: {others}). Name its "
            "host with --intercept HOST; `penstock sidecar check` says which clients come here"
        ]

    def take(self) -> list[Event]:
        """The rows as events; the ledger is empty afterwards."""
        if not self._rows:
            return []
        from penstock.gateway.model.queue import Event

        rows, self._rows = self._rows, {}
        now, wall = monotonic(), time.time_ns()
        return [
            Event(
                name=EGRESS_EVENT,
                time_ns=wall - int((now - one.started) * 1e9),
                attributes={"server.address": host, "server.port": port, "fate": fate, **_figures(one, count)}
                | ({} if address in (None, host) else {"network.peer.address": address}),
            )
            for (host, port, fate, address), (one, count) in rows.items()
        ]


def _figures(one: ConnectionRecord, count: int) -> dict[str, Scalar]:
    figures: dict[str, Scalar] = {
        "connections": count,
        "bytes_sent": one.sent,
        "bytes_received": one.received,
        "seconds": round(one.seconds, 3),
    }
    return figures if one.problem is None else figures | {"problem": one.problem}


async def report_egress(gateway: str, whose: AgentIdentity, made: list[Event]) -> str | None:
    """Post events to the gateway; return the reason when they could not be stored. Without a rollout there is nothing
    to attach them to: they are dropped.
    """
    if whose.rollout is None or not made:
        return None
    import aiohttp

    from penstock.gateway.client.opener import client_context
    from penstock.gateway.model.queue import EventsRequest

    url = f"{gateway}/rollout/{whose.rollout}/attempt/{whose.attempt or 'a1'}/events"
    headers = {} if whose.token is None else {"Authorization": f"Bearer {whose.token}"}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        connector = aiohttp.TCPConnector(ssl=client_context() if gateway.startswith("https:") else True)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            for at in range(0, len(made), _MOST):
                body = EventsRequest(events=made[at : at + _MOST]).model_dump_json(exclude_none=True)
                kind = {"Content-Type": "application/json"}
                async with http.post(url, data=body, headers=kind, allow_redirects=False) as answer:
                    if answer.status >= 300:
                        return f"the gateway answered {answer.status}: {(await answer.text(errors='replace'))[:200]}"
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return str(error) or "the gateway did not answer"
    return None
