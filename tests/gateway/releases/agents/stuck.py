"""An agent that says who it is in the file `stuck`, and waits for ever."""

from __future__ import annotations

import os
import signal
from pathlib import Path

with Path("stuck").open("a") as file:
    file.write(f"{os.getpid()}\n")
signal.pause()
