"""SIGHUP, also before a gateway listens: it would kill the process. The settings may have been read before the change
that it tells of, so it is remembered, and the reload is made then.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class _Seen:
    """What this process has seen of it."""

    came = False
    terminal = False
    """Whether there was a terminal in the beginning."""


def remember() -> None:
    """From now on, until the loop handles it."""
    _Seen.terminal = _terminal()
    if threading.current_thread() is threading.main_thread():  # no other can
        signal.signal(signal.SIGHUP, _remember)


def came() -> bool:
    """Whether it has come before the loop handled it."""
    return _Seen.came


def terminal_closed() -> bool:
    """Whether it was the end of the terminal: nobody can stop this process from there any more."""
    return _Seen.terminal and not _terminal()


def _remember(_: int, __: FrameType | None) -> None:
    _Seen.came = True


def _terminal() -> bool:
    """Whether there is a terminal whose end would be told by SIGHUP."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
