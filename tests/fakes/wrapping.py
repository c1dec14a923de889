"""`penstock mcp wrap` as an agent starts it: a process with pipes, a place of its own for what waits on disk."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.process import PATHS, PATIENCE

NOWHERE = "http://127.0.0.1:9"
"""A gateway that is away: nobody listens on the discard port."""
SDK_SERVER = (sys.executable, str(Path(__file__).parent / "mcp_sdk_server.py"), "0", "stdio")
ANSWERING = """
import json, sys
for line in sys.stdin:
    said = json.loads(line)
    if said.get("method") == "die":
        sys.exit(3)
    if "id" in said and said.get("method") != "wait":
        print(json.dumps({"jsonrpc": "2.0", "id": said["id"], "result": {"is": said["method"]}}), flush=True)
"""
"""A server that answers everything but `wait`."""


@dataclass(slots=True)
class Wrapping:
    """How wrappers are started."""

    state: Path
    url: str = NOWHERE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    name: str = "tools"
    """How the server is called."""

    @property
    def variables(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK")}
        own = {"PENSTOCK_GATEWAY": self.url, "PYTHONPATH": PATHS, "XDG_STATE_HOME": str(self.state)}
        return inherited | own | dict(self.env)

    @property
    def left(self) -> list[Path]:
        """Sessions that wait on disk."""
        return sorted(self.state.glob("penstock/wrapped/*"))

    def command(self, *server: str, options: tuple[str, ...] = ()) -> list[str]:
        patient = (sys.executable, "-m", "fakes.patient_wrapper", "mcp", "wrap")
        return [*patient, "--name", self.name, *options, "--", *server]

    async def start(self, *server: str, options: tuple[str, ...] = (), limit: int = 1 << 16) -> Wrapper:
        """A wrapper that runs."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*server, options=options),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.variables,
            limit=limit,
        )
        return Wrapper(process)

    async def run(self, *server: str, stdin: bytes = b"", options: tuple[str, ...] = ()) -> tuple[int, bytes, str]:
        """(exit code, stdout, stderr) of one that has ended."""
        wrapper = await self.start(*server, options=options)
        out, err = await asyncio.wait_for(wrapper.process.communicate(stdin), PATIENCE)
        assert wrapper.process.returncode is not None
        return wrapper.process.returncode, out, err.decode()


@dataclass(slots=True)
class Wrapper:
    """One that runs, with an `ANSWERING` server behind it."""

    process: asyncio.subprocess.Process

    def say(self, method: str, id: Any = None, **params: Any) -> None:
        """Sends a message without waiting for an answer."""
        assert self.process.stdin is not None
        said = {"jsonrpc": "2.0", "method": method, "params": params} | ({} if id is None else {"id": id})
        self.process.stdin.write(json.dumps(said).encode() + b"\n")

    async def ask(self, method: str, id: Any, **params: Any) -> Any:
        """Its answer."""
        assert self.process.stdout is not None
        self.say(method, id, **params)
        answer = json.loads(await asyncio.wait_for(self.process.stdout.readline(), PATIENCE))
        assert answer["id"] == id
        return answer["result"]

    async def end(self) -> int:
        """Closes its stdin and waits until it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _ = await asyncio.wait_for(self.process.communicate(), PATIENCE)
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def answering(wrapping: Wrapping, *options: str) -> AsyncGenerator[Wrapper]:
    """A wrapper with a server that answers; ended at the end."""
    wrapper = await wrapping.start(sys.executable, "-c", ANSWERING, options=options)
    try:
        yield wrapper
    finally:
        _ = await wrapper.end()
