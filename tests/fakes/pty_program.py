"""A program in a terminal of its own: a pseudo-terminal, and an emulator that knows what is on the screen."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import termios
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pyte
from fakes.process import PATIENCE
from fakes.waiting import News


class PtyProgram:
    """A running program."""

    def __init__(self, process: asyncio.subprocess.Process, terminal: int, columns: int, lines: int) -> None:
        self.process, self._terminal = process, terminal
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = bytearray()
        """Everything that it has written."""
        self._more = News()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(terminal, self._read)

    def _read(self) -> None:
        try:
            found = os.read(self._terminal, 1 << 16)
        except OSError:  # nobody has the other side open any more
            found = b""
        if found:
            self.raw += found
            self._stream.feed(found)
        else:
            self._loop.remove_reader(self._terminal)
        self._more.tell()

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def write(self, keys: str) -> None:
        """Types."""
        os.write(self._terminal, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size, as a window does."""
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program alone."""
        self.process.send_signal(number)

    async def until(self, seen: Callable[[str], bool]) -> str:
        """The screen once it is as wanted; fails with the last one."""
        await self._more.until(lambda: seen(self.text), lambda: self.text)
        return self.text

    async def until_raw(self, found: bytes) -> None:
        """Waits until it has written some bytes."""
        await self._more.until(lambda: found in self.raw, lambda: f"it has not written {found!r}: {self.text}")

    async def ended(self) -> int:
        """Its exit status."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"it has not ended; the screen was at last:\n{self.text}") from None

    def hang_up(self) -> None:
        """The window is closed."""
        self._loop.remove_reader(self._terminal)
        os.close(self._terminal)
        self._terminal = -1

    @property
    def is_raw(self) -> bool:
        """Whether the terminal passes every key on, as full-screen programs want it."""
        return not termios.tcgetattr(self._terminal)[3] & termios.ICANON

    def close(self) -> None:
        """Ends it, however it is."""
        if self._terminal >= 0:
            self.hang_up()
        if self.process.returncode is None:
            self.process.kill()


@asynccontextmanager
async def pty_program(
    command: Sequence[str | Path], env: Mapping[str, str], size: tuple[int, int] = (80, 24)
) -> AsyncGenerator[PtyProgram]:
    """Runs a program in a terminal; it is its session's leader, so a hang-up reaches it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    # A window has a size; these variables would say another.
    own = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=own, preexec_fn=lead
    )
    os.close(theirs)
    program = PtyProgram(process, ours, *size)
    try:
        yield program
    finally:
        program.close()
        await process.wait()
