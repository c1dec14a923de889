"""What a process becomes that has handed over to another which it had started: the parent of that one, so that whoever
started the gateway finds it under the same process id.

It passes signals on, starts the next process at SIGHUP, and ends when its children have. `python -m
penstock.gateway.server.parent CHILDREN COMMAND...`: process ids with commas between them, and what SIGHUP starts.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

_PASSED: Final = (signal.SIGTERM, signal.SIGINT)
_AWAITED: Final = (*_PASSED, signal.SIGHUP, signal.SIGCHLD)


def start(command: list[str]) -> int:
    """Starts a process that gets the terminal's signals from us only; its process id."""
    return os.posix_spawn(command[0], command, os.environ, setpgroup=0, setsigmask=(), setsigdef=_AWAITED)


def become(children: Sequence[int], command: Sequence[str]) -> None:
    """This process is the parent from now on; does not return."""
    # A signal that comes before it is ready waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    sys.stdout.flush()
    named = ",".join(map(str, children))
    os.execv(sys.executable, [sys.executable, "-P", "-m", "penstock.gateway.server.parent", named, *command])


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


def main(children: set[int], command: list[str]) -> int:
    """Until the last child has ended; its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    code = ended(children) or 0
    while children:
        number = signal.sigwait(_AWAITED)
        if number == signal.SIGHUP:
            children.add(start(command))
        elif number == signal.SIGCHLD:
            found = ended(children)
            code = code if found is None else found
            if found and children:
                print(f"penstock: a process has ended with status {found}: the other goes on", file=sys.stderr)
        else:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, number)
    return code


if __name__ == "__main__":
    sys.exit(main(set(map(int, sys.argv[1].split(","))), sys.argv[2:]))
