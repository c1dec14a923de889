"""`penstock train` that is killed where it hurts most: a checkpoint is complete on disk and has not its name yet.

    with fork(interrupted_tuning.run, 4, ["train", "sft", "train.toml", "--gateway", url]) as (process, said): ...

says `renaming` when it is about to give the checkpoint of that step its name, and waits to be killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fakes.lives import as_its_own

from penstock.console.main import main


def run(says: Connection, step: int, words: Sequence[str]) -> None:
    """In a process of its own."""
    as_its_own()
    rename, last = os.rename, f"step-{step:08d}"

    def until(source: Any, target: Any) -> None:
        """Renames all but the one."""
        if Path(target).name == last:
            says.send("renaming")
            threading.Event().wait()
        rename(source, target)

    os.rename = until
    main(list(words))
