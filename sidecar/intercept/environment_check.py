"""`penstock sidecar check`: follows the way of an agent's calls, for each family of clients, and reports what is
missing.

It tries the variables of each family as its clients read them: their proxy must lead to a sidecar, and their file must
hold its certificate. If the family's program is on this machine, it is run too. Then the sidecar reports for which
hosts the gateway takes calls. No model is called.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, cast
from urllib.parse import urlsplit

from penstock.gateway.client.child_process import ChildProcess, socket_folder
from penstock.sidecar.intercept.egress import failure_reason
from penstock.sidecar.intercept.rules import CHECK

# Asks a sidecar for its description of itself, as a client of its agent would: `https://192.0.2.1/`, through the
# proxy of an environment or a redirection by the kernel, and with the certificates that the client would trust. An
# answer proves that connections reach the sidecar.

_REACHABILITY_SECONDS: Final = 5.0
_ALL: Final = 30.0
"""The longest time of a request that tries every host; s."""


class SidecarUnreachable(Exception):
    """Raised when connections do not reach a sidecar; the text is the reason."""


async def query_sidecar(proxy: str | None, trusted: Path | str | None, hosts: bool = False) -> Mapping[str, Any]:
    """The sidecar's description of itself; with `hosts`, also which hosts' calls reach the gateway. `proxy`: the
    sidecar's URL as a proxy; None where the kernel redirects. `trusted`: a file of certificates, or the certificates,
    or None to trust any server. Raises `SidecarUnreachable`.
    """
    try:
        if trusted is None:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        elif isinstance(trusted, Path):
            context = ssl.create_default_context(cafile=trusted)
        else:
            context = ssl.create_default_context(cadata=trusted)
    except ssl.SSLError:
        raise SidecarUnreachable(f"{trusted} holds no certificates") from None
    except OSError as error:
        raise SidecarUnreachable(f"{trusted}: {error.strerror}") from None
    try:
        async with asyncio.timeout(_ALL if hosts else _REACHABILITY_SECONDS):
            return await _asked(proxy, context, "/hosts" if hosts else "/")
    except TimeoutError:
        raise SidecarUnreachable(f"no answer from {_place(proxy)}") from None
    except ssl.SSLCertVerificationError as error:
        file = trusted if isinstance(trusted, Path) else "what is trusted"
        why = f"does not hold the certificate of this sidecar ({error.verify_message})"
        raise SidecarUnreachable(f"{file} {why}") from None
    except OSError as error:
        raise SidecarUnreachable(f"{_place(proxy)}: {failure_reason(error)}") from None
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise SidecarUnreachable(f"{_place(proxy)}: {error}") from None


async def _asked(proxy: str | None, context: ssl.SSLContext, target: str) -> Mapping[str, Any]:
    host, port = CHECK
    if proxy is not None:
        try:
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            host, port = parts.hostname or "", parts.port or 80
        except ValueError:  # Python's message may hold a part of a password
            raise ValueError("it is no HOST with a port up to 65535") from None
    reader, writer = await asyncio.open_connection(host, port)
    try:
        if proxy is not None:
            await _tunnel(reader, writer)
        await writer.start_tls(context, server_hostname=CHECK[0])
        writer.write(f"GET {target} HTTP/1.1\r\nHost: {CHECK[0]}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        said = json.loads(await reader.read()) if head.startswith(b"HTTP/1.1 200 ") else None
    except asyncio.IncompleteReadError:
        raise ValueError("it closed the connection") from None
    finally:
        writer.close()
    if not isinstance(said, dict) or cast(dict[str, Any], said).get("penstock") != "sidecar":
        raise ValueError("something else than a sidecar has answered")
    return cast(dict[str, Any], said)


async def _tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    where = f"{CHECK[0]}:{CHECK[1]}"
    writer.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
    line = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0]
    if b" 200 " not in line:
        raise ValueError(f"it answered {line.decode('latin-1')[:80]!r}: it is no sidecar")


def _place(proxy: str | None) -> str:
    return f"{CHECK[0]}:{CHECK[1]}" if proxy is None else f"the proxy {proxy.rpartition('@')[2]}"


URL: Final = f"https://{CHECK[0]}/"
_URLLIB: Final = f"import urllib.request; print(urllib.request.urlopen({URL!r}, timeout=10).read().decode())"
_HTTPX: Final = f"import httpx; print(httpx.get({URL!r}, timeout=10).text)"
_REQUESTS: Final = f"import requests; print(requests.get({URL!r}, timeout=10).text)"
_FETCH: Final = (
    f"fetch({URL!r}).then(it => it.text()).then(console.log, it => {{ console.error(`${{it.cause?.code ?? it}}, Node "
    "${process.version}; its fetch uses proxies from 22.21 and 24.0 on`); process.exit(1) })"
)


@dataclass(frozen=True, slots=True)
class ClientFamily:
    """Clients that read the same variables."""

    name: str
    certificates: str
    """The variable that names the certificates they trust."""
    probe: tuple[str, ...] = ()
    """A command that asks the sidecar; run if its program is on this machine."""
    also: str = ""
    """Another variable without which they use no proxy."""


FAMILIES: Final = (
    ClientFamily("curl", "CURL_CA_BUNDLE", ("curl", "-sS", "-m", "10", URL)),
    ClientFamily("Python, Go, Ruby (OpenSSL)", "SSL_CERT_FILE", (sys.executable, "-c", _URLLIB)),
    ClientFamily("Python httpx (openai, anthropic)", "SSL_CERT_FILE", (sys.executable, "-c", _HTTPX)),
    ClientFamily("Python requests", "REQUESTS_CA_BUNDLE", (sys.executable, "-c", _REQUESTS)),
    ClientFamily("Node.js (Gemini CLI)", "NODE_EXTRA_CA_CERTS", ("node", "-e", _FETCH), "NODE_USE_ENV_PROXY"),
    ClientFamily("Claude Code, opencode", "NODE_EXTRA_CA_CERTS"),
    ClientFamily("Codex", "CODEX_CA_CERTIFICATE"),
    ClientFamily("git", "GIT_SSL_CAINFO"),
    ClientFamily("cargo", "CARGO_HTTP_CAINFO"),
    ClientFamily("AWS CLI, boto", "AWS_CA_BUNDLE"),
    ClientFamily("pip", "PIP_CERT"),
    ClientFamily("Deno", "DENO_CERT"),
)


SOCKET: Final = "ANTHROPIC_UNIX_SOCKET"
_SECONDS: Final = 30.0
_PROBE: Final = "probe.sock"
_ABSENT: Final = ("No module named", "Cannot find module")


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """A finding: a family or host, the result in words, and True if it is good."""

    name: str
    said: str
    good: bool


@dataclass(slots=True)
class EnvironmentCheck:
    """The check of one environment and its findings."""

    env: Mapping[str, str]
    rows: list[CheckFinding] = field(default_factory=list[CheckFinding])
    hosts: list[CheckFinding] = field(default_factory=list[CheckFinding])
    rollout: str | None = None
    _asked: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """For each file of certificates that was tried, the problem; None when the sidecar was reached with it."""

    @property
    def proxy(self) -> str | None:
        """The proxy that clients use; None where the kernel redirects connections."""
        names = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")
        return next((found for name in names if (found := self.env.get(name))), None)

    @property
    def good(self) -> bool:
        """True if all calls reach the gateway."""
        return bool(self.hosts) and all(row.good for row in (*self.rows, *self.hosts))

    def lines(self) -> Iterator[str]:
        """The findings as lines of at most 80 columns."""
        for row in (*self.rows, *self.hosts):
            told = row.said if row.good else f"NOT RIGHT: {row.said}"
            yield from wrap(
                f"{row.name:<34} {told}", 80, subsequent_indent=" " * 35, break_long_words=False, break_on_hyphens=False
            )
        wrong = sum(not row.good for row in (*self.rows, *self.hosts))
        if not self.hosts:
            yield "No connection gets to a sidecar, so nothing is known of the gateway."
        elif wrong:
            yield f"{wrong} of {len(self.rows) + len(self.hosts)} are not right."
        else:
            whose = f"as those of rollout {self.rollout}" if self.rollout else "as those of their conversations"
            yield f"Calls get to the gateway, {whose}."

    async def run(self) -> None:
        """Run all checks, and fill `rows`, `hosts` and `rollout`. A sidecar that is not reached ends them."""
        try:
            _ = await query_sidecar(self.proxy, None)
        except SidecarUnreachable as problem:
            way = "HTTPS_PROXY" if self.proxy else "HTTPS_PROXY is not set, and the kernel redirects nothing"
            self.rows.append(CheckFinding("the way to a sidecar", f"{way}: {problem}", False))
            return
        for family in FAMILIES:
            self.rows.append(await self._family(family))
        if SOCKET in self.env:
            self.rows.append(await self._socket(self.env[SOCKET]))
        good = next((name for name, problem in self._asked.items() if problem is None), None)
        if good is None:
            return
        said = await query_sidecar(self.proxy, Path(good), hosts=True)
        self.rollout = said.get("rollout")
        for host, problem in said["hosts"].items():
            self.hosts.append(
                CheckFinding(host.removesuffix(":443"), problem or "the gateway takes its calls", problem is None)
            )

    async def _family(self, family: ClientFamily) -> CheckFinding:
        problem = await self._missing(family)
        if problem is not None:
            return CheckFinding(family.name, problem, False)
        if not family.probe or shutil.which(family.probe[0], path=self.env.get("PATH")) is None:
            return CheckFinding(
                family.name, f"{family.certificates} and the proxy are right" if self.proxy else "set", True
            )
        said, failed = await self._probe(family.probe)
        if failed and any(words in said for words in _ABSENT):
            return CheckFinding(family.name, f"{family.certificates} is right; it is not on this machine", True)
        return CheckFinding(family.name, f"does not get here: {said}" if failed else "gets here", not failed)

    async def _missing(self, family: ClientFamily) -> str | None:
        """A message about the variable that is missing or wrong; None when all are right."""
        if self.proxy is not None and family.also and not self.env.get(family.also):
            return f"{family.also} is not set"
        file = self.env.get(family.certificates)
        if not file:
            return f"{family.certificates} is not set"
        if file not in self._asked:
            self._asked[file] = await self._reached(file)
        problem = self._asked[file]
        return None if problem is None else f"{family.certificates}: {problem}"

    async def _reached(self, file: str) -> str | None:
        try:
            _ = await query_sidecar(self.proxy, Path(file))
        except SidecarUnreachable as problem:
            return str(problem)
        return None

    async def _probe(self, command: tuple[str, ...]) -> tuple[str, bool]:
        """Run a family's program: (its message, True if it did not reach the sidecar)."""
        process = await asyncio.create_subprocess_exec(
            *command,
            env=dict(self.env),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await ChildProcess(process).output(_SECONDS)
        except TimeoutError:
            return f"nothing for {_SECONDS:g} s", True
        if b'"penstock": "sidecar"' in out:
            return "", False
        lines = (err or out).decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:200] if lines else f"it ended with {process.returncode}", True

    async def _socket(self, path: str) -> CheckFinding:
        """Check the Unix socket that takes the place of proxy and certificate: the sidecar must listen on it."""
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            return CheckFinding("Claude Code, by its socket", f"{SOCKET}={path}: {error.strerror or error}", False)
        writer.close()
        said = "the sidecar listens"
        if shutil.which("claude", path=self.env.get("PATH")) is None:
            return CheckFinding("Claude Code, by its socket", said, True)
        used = await uses_socket(dict(self.env))
        return CheckFinding(
            "Claude Code, by its socket", f"{said}, this version {'uses' if used else 'ignores'} it", used
        )


async def uses_socket(env: dict[str, str]) -> bool:
    """True if the Claude Code of this machine calls its model on a Unix socket that a variable names, which is
    undocumented. Tried with a socket of ours that answers nothing.
    """
    came = asyncio.Event()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if b"/v1/messages" in await reader.readuntil(b"\r\n"):
                came.set()
        writer.close()

    with socket_folder("penstock-check-", _PROBE) as folder:
        path = os.path.join(folder, _PROBE)
        server = await asyncio.start_unix_server(served, path)
        given = env | {
            SOCKET: path,
            "HOME": folder,
            "ANTHROPIC_API_KEY": "sk-ant-probe",
            "HTTPS_PROXY": "http://127.0.0.1:9",
        }
        process = await asyncio.create_subprocess_exec(
            "claude", "-p", "hello",
            env=given, cwd=folder,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        ended, seen = asyncio.ensure_future(process.wait()), asyncio.ensure_future(came.wait())
        _ = await asyncio.wait((ended, seen), timeout=_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        seen.cancel()
        _ = await ChildProcess(process).end()
        _ = await ended
        server.close()
    return came.is_set()
