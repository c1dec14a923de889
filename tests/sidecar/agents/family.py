"""An agent with descendants that want to outlive it: one in a session of its own, one that ignores TERM, and theirs.

family.py PIDS SECONDS: writes all their pids to the file PIDS, its own first, then stays for SECONDS.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Have children, then stay."""
    reading, writing = os.pipe()
    for deaf in (False, True):
        if os.fork() == 0:
            _ = os.setsid()
            if deaf:
                _ = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = os.fork()
            if child:
                os._exit(0)  # its child is an orphan in another session now
            _ = os.write(writing, b"%d\n" % os.getpid())
            while True:
                time.sleep(60)
    pids = b""
    while pids.count(b"\n") < 2:
        pids += os.read(reading, 100)
    new = Path(sys.argv[1] + ".new")
    _ = new.write_bytes(b"%d\n" % os.getpid() + pids)
    _ = new.rename(sys.argv[1])
    time.sleep(float(sys.argv[2]))


if __name__ == "__main__":
    main()
