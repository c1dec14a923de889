"""SIGHUP before the loop handles it: it would kill the process. The settings may have been read before the change that
it reports, so the signal is remembered and the reload is made later.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class _HangupState:
    """The SIGHUP and the terminal that this process has seen."""

    came = False
    terminal = False
    """True if the process had a terminal in the beginning."""


def remember() -> None:
    """Remember SIGHUP from now on, until the loop handles it."""
    _HangupState.terminal = _terminal()
    if threading.current_thread() is threading.main_thread():  # no other can
        signal.signal(signal.SIGHUP, _remember)


def was_received() -> bool:
    """True if SIGHUP has come before the loop handled it."""
    return _HangupState.came


def terminal_closed() -> bool:
    """True if the signal meant the end of the terminal: nobody can stop this process from there any more."""
    return _HangupState.terminal and not _terminal()


def _remember(_: int, __: FrameType | None) -> None:
    _HangupState.came = True


def _terminal() -> bool:
    """True if there is a terminal, whose end would send SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
