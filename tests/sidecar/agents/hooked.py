"""Hooks of a runner."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any


def note(given: dict[str, Any]) -> None:
    """Append what it is given to a file, and try to change it."""
    with Path(os.environ["NOTES"]).open("a") as notes:
        _ = notes.write(json.dumps(given) + "\n")
    given["rewards"] = given["outcome"] = "changed"


async def fails(given: dict[str, Any]) -> None:
    """Fail."""
    await asyncio.sleep(0)
    raise KeyError(given["event"])


class Figures:
    """Figures of its own."""

    @staticmethod
    def read(given: dict[str, Any]) -> dict[str, float]:
        """Two figures."""
        return {"gpu.temperature": 61, "loss": 0.25}


def waits(given: dict[str, Any]) -> None:
    """Take too long."""
    time.sleep(600)
