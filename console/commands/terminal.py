"""Prints results on a terminal, into a pipe, or as JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from json import dumps
from typing import TYPE_CHECKING

from penstock.gateway.client.console import note
from penstock.gateway.model.foreign_text import terminal_safe_json

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType


def show(models: Sequence[BaseModel], json: bool, picture: Callable[[], RenderableType], none: str = "") -> None:
    """Prints models as JSON lines, or as their picture; without models prints `none` as a note."""
    if not json and none and not models:
        note(none)
    elif not json:
        console().print(picture(), crop=False)
        return
    for model in models:
        show_json(model)


def show_json(model: BaseModel) -> None:
    """Prints a model as a JSON line."""
    print(terminal_safe_json(_json(model)))


def _json(model: BaseModel) -> str:
    from pydantic_core import PydanticSerializationError

    try:
        return model.model_dump_json(exclude_none=True)
    except PydanticSerializationError:
        # Half of a surrogate pair, which JSON can write as an escape.
        return dumps(model.model_dump(mode="json", exclude_none=True))


def console() -> Console:
    """A console as wide as the terminal. A pipe or a file has endless width, unless COLUMNS is set, as `watch` does."""
    from rich.console import Console

    from penstock.console.views.table import ENDLESS

    endless = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=ENDLESS if endless else None, highlight=False, emoji=False, markup=False)
