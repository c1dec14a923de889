"""What a process becomes that has handed over to another which it had started: the parent of that one, so that whoever
started the gateway finds it under the same process id.

It passes signals on, starts the next process at SIGHUP, and ends when its children have. `python -m
penstock.gateway.server.parent CHILDREN CAUGHT COMMAND...`: process ids with commas between them, a descriptor from
which signals are read that came earlier, and what SIGHUP starts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Final

_PASSED: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = (*_PASSED, signal.SIGHUP, signal.SIGCHLD)
GOES_ON: Final = "a process that was started to take over has ended with status %d: the gateway goes on as it is"
TAPE: Final = "PENSTOCK_RELOADED_TAPE"
"""The variable that tells a process which was started to take over whose tape that is. Not a word of its command: the
version that is installed by then may be another one."""


def start(command: list[str], variables: Mapping[str, str] = os.environ) -> int:
    """Starts a process that gets the terminal's signals from us only; its process id."""
    return os.posix_spawn(command[0], command, variables, setpgroup=0, setsigmask=(), setsigdef=_AWAITED)


def hold_signals() -> int:
    """Those that come from now on wait for the parent that this process becomes. Returns the descriptor of a pipe: the
    system may give them to other threads of this process, which write their numbers there."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    caught, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    os.set_inheritable(caught, True)
    return caught


def become(children: Sequence[int], command: Sequence[str], caught: int) -> None:
    """This process is the parent from now on; does not return. `caught`: of `hold_signals`."""
    sys.stdout.flush()
    named = ",".join(map(str, children))
    words = [sys.executable, "-P", "-m", "penstock.gateway.server.parent", named, str(caught), *command]
    os.execv(sys.executable, words)


def ended(children: set[int]) -> int | None:
    """Takes those that have ended out of the set; the exit code of one of them, None where none has."""
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
    """Until the last child has ended; its exit code."""
    with open(caught, "rb") as pipe:
        earlier = pipe.read()
    signals = chain(earlier, iter(lambda: signal.sigwait(_AWAITED), None))
    code = ended(children) or 0
    while children:
        number = next(signals)
        if number == signal.SIGHUP:
            children.add(start(command))
        elif number == signal.SIGCHLD:
            found = ended(children)
            code = code if found is None else found
            if found and children:
                with suppress(OSError):  # nobody may read it any more
                    print(f"penstock: {GOES_ON % found}", file=sys.stderr)
        else:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, number)
    return code


if __name__ == "__main__":
    sys.exit(main(set(map(int, sys.argv[1].split(","))), int(sys.argv[2]), sys.argv[3:]))
