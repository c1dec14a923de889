"""Runs a command when it is its turn: no more than a few at once.

    python -m conformance.turns FOLDER COMMAND [ARGUMENT ...]

The suite starts the clients of all scenarios together, some forty. Their start alone takes each a second of a core, and
one scenario measures in milliseconds when its client comes back.
"""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

AT_ONCE = 2


def main(folder: str, *command: str) -> None:
    # The lock goes with the file's descriptor, and that with the process the command becomes.
    turn = os.open(Path(folder) / str(os.getpid() % AT_ONCE), os.O_CREAT | os.O_RDWR)
    os.set_inheritable(turn, True)
    fcntl.flock(turn, fcntl.LOCK_EX)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
