"""Runs the official conformance suite of MCP and reads what it found.

    python -m conformance.suite

prints what a server and a client without anything between them pass, and the seconds. The suite has two sides: its
clients call a server (`server_leg`), and clients that it starts call its servers (`client_leg`). What counts is not
that everything passes, but that through something in between the list of checks is the same as directly
(`differences`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fakes import environments

ROOT = Path(__file__).parents[2]
MODULES = environments.folder("mcp") / "node_modules"
SUITE = MODULES / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"
NOWHERE = "the conformance suite is not here: `make install-mcp` installs it, `make test-mcp` runs this"
REVISIONS = ("2025-11-25", "2026-07-28")
CLIENT = (sys.executable, "-m", "conformance.client")
PATIENCE_S = 600.0
TOLD = frozenset({"SUCCESS", "FAILURE", "WARNING", "SKIPPED"})
"""The other status, INFO, tells what was on the wire."""
STAMP = re.compile(r"-\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}-\d{3}Z$")
UNFINISHED = "scenario-did-not-finish"


@dataclass(frozen=True, order=True)
class Check:
    """One thing that the suite looked at."""

    scenario: str
    id: str
    name: str
    status: str
    message: str = ""
    """Why it failed."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What must be the same: all but the words."""
        return self.scenario, self.id, self.name, self.status


Leg = Callable[[str], Awaitable[list[Check]]]
"""Given a revision, the checks of one side of the suite."""


def installed() -> bool:
    return environments.installed("mcp") and node() is not None


def node() -> Path | None:
    """The suite's own Node.js, which it is installed with where there is a package of it; else that of the machine."""
    own = MODULES / ".bin" / "node"
    found = str(own) if own.exists() else shutil.which("node")
    return Path(found) if found else None


async def server_leg(url: str, revision: str, folder: Path) -> list[Check]:
    """What the suite's clients find at a server. It writes into the folder."""
    return await _run(["server", "--url", url], revision, folder)


async def client_leg(revision: str, folder: Path, command: Sequence[str] = CLIENT) -> list[Check]:
    """What the suite's servers see of clients; each is the command with the server's URL as its last argument."""
    # A scenario's time runs from the start, and with it the wait for a turn.
    turns = Path(tempfile.mkdtemp(prefix="turns-"))
    try:
        whole = shlex.join([sys.executable, "-m", "conformance.turns", str(turns), *command])
        timeout = ["--timeout", str(int(PATIENCE_S * 1000))]
        return await _run(["client", "--command", whole, *timeout], revision, folder)
    finally:
        shutil.rmtree(turns)


async def _run(arguments: list[str], revision: str, folder: Path) -> list[Check]:
    installed_node = node()
    assert installed_node is not None, NOWHERE
    process = await asyncio.create_subprocess_exec(
        installed_node, SUITE, *arguments, "--requirements", revision, "--output-dir", folder,
        env=environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(PATIENCE_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
            await process.wait()
    found = read(folder)
    # It ends with 1 when a check fails, and also when it could not begin.
    if not found:
        raise RuntimeError(f"the suite ended with {process.returncode} and wrote nothing:\n{output.decode()[-3000:]}")
    return found


def environment() -> dict[str, str]:
    """That of a process that runs a module of this folder."""
    paths = [str(ROOT / "tests"), str(ROOT)]
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return inherited | {"PYTHONPATH": os.pathsep.join(paths)}


def read(folder: Path) -> list[Check]:
    """The checks in an output folder of the suite, in order. A scenario that broke off is a failed check of its own."""
    found: list[Check] = []
    for place in sorted(path for path in folder.rglob("*") if path.is_dir() and STAMP.search(path.name)):
        scenario = STAMP.sub("", place.relative_to(folder).as_posix()).removeprefix("server-")
        written = place / "checks.json"
        if not written.exists():
            found.append(Check(scenario, UNFINISHED, "", "FAILURE", "the suite wrote no checks for it"))
            continue
        for check in json.loads(written.read_text()):
            if check["status"] in TOLD:
                message = check.get("errorMessage", "")
                found.append(Check(scenario, check["id"], check["name"], check["status"], message))
    return sorted(found)


def failed(checks: Iterable[Check]) -> list[Check]:
    return [check for check in checks if check.status == "FAILURE"]


def differences(direct: Iterable[Check], other: Iterable[Check]) -> list[str]:
    """How two lists differ, check by check; empty when they are the same but for words and order."""
    first, second = list(direct), list(other)
    words = {check.key: check.message for check in (*first, *second)}
    before, after = Counter(check.key for check in first), Counter(check.key for check in second)
    found: list[str] = []
    for key in sorted((before - after) + (after - before)):
        scenario, check_id, name, status = key
        label = check_id if name in ("", check_id) else f"{check_id} ({name})"
        why = f": {words[key]}" if words[key] else ""
        found.append(f"{scenario}: {label} is {status} {before[key]} times directly, {after[key]} through it{why}")
    return found


@asynccontextmanager
async def everything() -> AsyncGenerator[str]:
    """The URL of a server, in a process of its own, that offers everything the suite asks for."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "conformance.server", env=environment(), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            url = (await process.stdout.readline()).decode().strip()
        assert url, "the server ended before it listened"
        yield url
    finally:
        process.terminate()
        await process.wait()


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for revision in REVISIONS:
            began = time.monotonic()
            async with everything() as url:
                _tell("server", revision, await server_leg(url, revision, Path(folder, "server", revision)), began)
            began = time.monotonic()
            _tell("client", revision, await client_leg(revision, Path(folder, "client", revision)), began)


def _tell(leg: str, revision: str, checks: list[Check], began: float) -> None:
    counted = Counter(check.status for check in checks)
    scenarios = len({check.scenario for check in checks})
    figures = ", ".join(f"{counted[status]} {status}" for status in sorted(counted))
    print(f"{leg} {revision}: {scenarios} scenarios, {figures}; {time.monotonic() - began:.1f} s", flush=True)
    for check in checks:
        if check.status != "SUCCESS":
            print(f"  {check.status} {check.scenario}: {check.id} {check.message[:160]}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
