"""An agent whose package is not installed."""

from __future__ import annotations

import nowhere_to_be_found  # pyright: ignore # this is what is wrong with it


def answer(task: object) -> object:
    """Never called."""
    return nowhere_to_be_found.answer(task)  # pyright: ignore
