"""The signals of a gateway outside its event loop: those of the parent of a process that has taken over, and a SIGHUP
that comes too early.

A process that hands over to one which it has started becomes that one's parent, so that whoever started the gateway
finds it under the same process id. It passes signals on, starts the next process at SIGHUP, and ends when its children
have. `python -m penstock.gateway.process.parent CHILDREN CAUGHT COMMAND...`: process ids separated by commas, a
descriptor from which earlier signals are read, and the command that SIGHUP starts.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from types import FrameType
from typing import Final

_PASSED: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = (*_PASSED, signal.SIGHUP, signal.SIGCHLD)
GOES_ON: Final = "a process that was started to take over has ended with status %d: the gateway goes on as it is"
TAPE: Final = "PENSTOCK_RELOADED_TAPE"
"""The variable that names the tape to a process that was started to take over. It is not a word of its command: the
version that is installed by then may be another one."""


def start(command: list[str], variables: Mapping[str, str] = os.environ) -> int:
    """Start a process that gets the terminal's signals only from this one; return its process id."""
    return os.posix_spawn(command[0], command, variables, setpgroup=0, setsigmask=(), setsigdef=_AWAITED)


def hold_signals() -> int:
    """Hold signals from now on for the parent that this process becomes. Return the descriptor of a pipe: the system
    may deliver signals to other threads of this process, which write their numbers there."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    caught, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    os.set_inheritable(caught, True)
    return caught


def become(children: Sequence[int], command: Sequence[str], caught: int) -> None:
    """Make this process the parent; does not return. `caught`: from `hold_signals`."""
    sys.stdout.flush()
    named = ",".join(map(str, children))
    words = [sys.executable, "-P", "-m", "penstock.gateway.process.parent", named, str(caught), *command]
    os.execv(sys.executable, words)


def reap(children: set[int]) -> int | None:
    """Remove the children that have ended from the set; return the exit code of one of them, None where none has."""
    code = None
    for child in list(children):
        with suppress(ChildProcessError):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            found = os.waitstatus_to_exitcode(status)
            code = 128 - found if found < 0 else found
        children.discard(child)
    return code


def main(children: set[int], caught: int, command: list[str]) -> int:
    """Run until the last child has ended; return its exit code."""
    with open(caught, "rb") as pipe:
        earlier = pipe.read()
    signals = chain(earlier, iter(lambda: signal.sigwait(_AWAITED), None))
    code = reap(children) or 0
    while children:
        number = next(signals)
        if number == signal.SIGHUP:
            children.add(start(command))
        elif number == signal.SIGCHLD:
            found = reap(children)
            code = code if found is None else found
            if found and children:
                with suppress(OSError):  # the output may be closed by now
                    print(f"penstock: {GOES_ON % found}", file=sys.stderr)
        else:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, number)
    return code


# Before the loop handles it SIGHUP would kill the process. The settings may have been read before the change that it
# reports, so the signal is remembered and the reload is made later.


class _HangupState:
    """The SIGHUP and the terminal that this process has seen."""

    came = False
    terminal = False
    """True if the process had a terminal in the beginning."""


def remember_hangup() -> None:
    """Remember SIGHUP from now on, until the loop handles it."""
    _HangupState.terminal = _terminal()
    if threading.current_thread() is threading.main_thread():  # no other can
        signal.signal(signal.SIGHUP, _remember)


def hangup_came() -> bool:
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


if __name__ == "__main__":
    sys.exit(main(set(map(int, sys.argv[1].split(","))), int(sys.argv[2]), sys.argv[3:]))
