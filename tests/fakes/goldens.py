"""What people read, as plain text of fixed width, compared with tests/goldens.

`UPDATE_GOLDENS=1 pytest tests/gateway` writes them anew; read the difference before committing it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console, RenderableType

from penstock.console.views.table import ENDLESS

GOLDENS = Path(__file__).parents[1] / "goldens"


def text_of(renderable: RenderableType, width: int = 120) -> str:
    """As a terminal without colours shows it."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False, markup=False, color_system=None)
    console.print(renderable, crop=False)
    assert isinstance(console.file, io.StringIO)
    return "".join(line.rstrip() + "\n" for line in console.file.getvalue().splitlines())


def check_golden(name: str, renderable: RenderableType) -> None:
    """It looks as it did."""
    check_text(f"{name}.txt", text_of(renderable))


def check_widths(name: str, renderable: RenderableType) -> None:
    """It looks as it did on terminals of 80, 120 and 200 columns, and in a pipe."""
    shown = ((f"{width} columns", text_of(renderable, width)) for width in (80, 120, 200))
    pages = (*shown, ("a pipe", text_of(renderable, ENDLESS)))
    check_text(f"{name}.txt", "\n".join(f"--- {title}\n{text}" for title, text in pages))


def check_text(name: str | Path, text: str) -> None:
    """A file that people read is as it was; `name` with its ending, or a path."""
    path = GOLDENS / name
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_text(text)
    assert text == path.read_text()
