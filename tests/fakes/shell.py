"""Runs `penstock` as people do: a process, its output, its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes.preloaded import penstock
from fakes.process import PATIENCE, ROOT

PIPE = asyncio.subprocess.PIPE
PENSTOCK = (sys.executable, "-m", "penstock")
Refused = Callable[..., tuple[object, str]]
"""What is said of words and variables that are not taken: (exit code, words)."""


@dataclass(slots=True)
class Done:
    """What a command left."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def rows(self) -> list[Any]:
        """The lines of JSON of a command that has done what it should."""
        assert (self.code, self.err) == (0, "")
        return [json.loads(line) for line in self.text.splitlines()]


class Shell:
    """A shell in a folder, with a gateway to speak to."""

    def __init__(self, url: str, folder: Path, command: tuple[str | Path, ...] = PENSTOCK) -> None:
        self.folder = folder
        self.command = command
        """What `penstock` is."""
        self.patience = PATIENCE
        """How long a command may take; s."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PENSTOCK", "COLUMNS"))}
        self.env = inherited | {"PENSTOCK_GATEWAY": url, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}

    async def start(
        self, *arguments: str, stdin: Any = None, stdout: Any = PIPE, stderr: Any = PIPE, **env: str
    ) -> asyncio.subprocess.Process:
        """A command that runs."""
        if self.command == PENSTOCK:
            return await penstock(
                *arguments, env=self.env | env, cwd=self.folder, stdin=stdin, stdout=stdout, stderr=stderr
            )
        return await asyncio.create_subprocess_exec(
            *self.command, *arguments, env=self.env | env, cwd=self.folder, stdin=stdin, stdout=stdout, stderr=stderr
        )

    async def run(self, *arguments: str, stdin: bytes | None = None, **env: str) -> Done:
        """A command that has ended."""
        process = await self.start(*arguments, stdin=None if stdin is None else asyncio.subprocess.PIPE, **env)
        out, err = await self.end_of(process, arguments, stdin)
        assert process.returncode is not None
        return Done(process.returncode, out, err.decode())

    async def end_of(
        self, process: asyncio.subprocess.Process, arguments: Sequence[str] = (), stdin: bytes | None = None
    ) -> tuple[bytes, bytes]:
        """All that a command says, once it has ended."""
        try:
            async with asyncio.timeout(self.patience):
                return await process.communicate(stdin)
        except TimeoutError:
            process.kill()
            said = " ".join(["penstock", *arguments])
            raise AssertionError(f"it did not end within {self.patience:g} s: {said}") from None

    async def unread(self, *arguments: str) -> str:
        """What a command complains of whose reader has left before it began."""
        reader, writer = os.pipe()
        os.close(reader)
        try:
            process = await self.start(*arguments, stdout=writer)
        finally:
            os.close(writer)
        _, err = await self.end_of(process, arguments)
        return err.decode()

    async def typed(self, keys: bytes, *arguments: str, TERM: str = "dumb") -> str:
        """What a command says on a terminal to somebody who types this, once it has ended well."""
        ours, theirs = pty.openpty()
        try:
            process = await self.start(*arguments, stdin=theirs, stdout=theirs, stderr=theirs, COLUMNS="100", TERM=TERM)
        finally:
            os.close(theirs)
        os.write(ours, keys)
        try:
            return (await asyncio.wait_for(asyncio.to_thread(_drained, ours), self.patience)).decode()
        finally:
            os.close(ours)
            assert await process.wait() == 0


def demo(module: str, home: Path, patience_s: float = 90.0, **env: str) -> Shell:
    """What starts a demo that knows nothing of this machine, and whose temporary files are to lie here."""
    made = Shell("", ROOT, (sys.executable, "-m", module))
    made.env, made.patience = {"TMPDIR": str(home), "PYTHONPATH": str(ROOT)} | env, patience_s
    return made


def _drained(terminal: int) -> bytes:
    """All that is said on it."""
    said = b""
    while True:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # the other side has gone
            return said
