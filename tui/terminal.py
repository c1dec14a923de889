"""Textual's driver of a terminal, changed so that the program ends when the window is closed.

The kernel then sends SIGHUP and SIGCONT, every write fails, and every read reports the end of the file. Textual's own
driver (8.2) takes the SIGCONT for a return from the background: it starts a second thread of each kind, and the writing
thread ends at its first error, so that its queue is never emptied. After thirty more writes the program waits forever,
without a terminal. Here a SIGCONT without a terminal is ignored, and failed writes are dropped.
"""

from __future__ import annotations

import os
from typing import IO, Any, cast

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver


class TerminalDriver(LinuxDriver):
    """The driver of `penstock tui` in a terminal."""

    def __init__(
        self, app: App[Any], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)  # pyright: ignore[reportUnknownMemberType]  # Textual leaves it untyped
        self._file = cast("IO[str]", TerminalOutput(self._file))

    def _sigcont_application(self, *_: object) -> None:
        if os.isatty(self.fileno):
            super()._sigcont_application()  # pyright: ignore[reportUnknownMemberType]  # Textual leaves it untyped


class TerminalOutput:
    """The output file of a terminal; drops writes once the window is closed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
        except OSError:  # the window is closed: SIGHUP ends the program
            return

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            return

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return self._file.isatty()
