"""What people read, as plain text of fixed width, compared with tests/goldens.

`UPDATE_GOLDENS=1 pytest tests/gateway` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console, RenderableType

GOLDENS = Path(__file__).parents[1] / "goldens"


def text_of(renderable: RenderableType, width: int = 120) -> str:
    """As a terminal without colours shows it."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False, color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def check_golden(name: str, renderable: RenderableType) -> None:
    """It looks as it did."""
    path, text = GOLDENS / f"{name}.txt", text_of(renderable)
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text()
