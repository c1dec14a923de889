"""`penstock train` that is killed where it hurts most: a checkpoint is complete on disk and has not its name yet.

    python -m fakes.interrupted_tuning STEP train sft train.toml --gateway URL

says `renaming` when it is about to give the checkpoint of that step its name, and waits to be killed.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from penstock.gateway.__main__ import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    rename, last = os.rename, f"step-{int(sys.argv[1]):08d}"

    def until(source: Any, target: Any) -> None:
        """Renames all but the one."""
        if Path(target).name == last:
            print("renaming", flush=True)
            threading.Event().wait()
        rename(source, target)

    os.rename = until
    main(sys.argv[2:])
