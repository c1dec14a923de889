"""Common parts of commands: they print results, read texts, and say who wants a change."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.gateway.client.console import CommandError, note, unreadable, validated_model, with_asked
from penstock.gateway.model.foreign_text import terminal_safe_json

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console, RenderableType

    from penstock.gateway.model.base import ActionRequest


def show(models: Sequence[BaseModel], json: bool, picture: Callable[[], RenderableType], none: str = "") -> None:
    """Prints models as JSON lines, or as their picture; without models prints `none` as a note."""
    if not json and none and not models:
        note(with_asked(none))
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


def text_of(file: str) -> str:
    """The text in a file; - is stdin. Raises `CommandError` if it cannot be read."""
    try:
        return (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode()
    except OSError as e:
        raise CommandError(unreadable(file, e)) from None
    except UnicodeDecodeError as e:
        raise CommandError(f"{file} is not UTF-8: byte {e.start + 1}") from None


def person(given: str | None) -> str:
    """The given name, else that of the user who is logged in; empty if there is none."""
    import getpass

    try:
        return getpass.getuser() if given is None else given
    except (KeyError, OSError):
        # A container may have no users: then nobody is logged in.
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionOptions:
    """Options of every command that changes something: the author and the reason of the change."""

    who: str | None = None
    """Who wants it; the name you are logged in with if not given."""
    why: str = ""
    """Why, in a sentence; `penstock audit` shows it."""

    def request(self) -> ActionRequest:
        """The options as the gateway takes them."""
        from penstock.gateway.model.base import ActionRequest

        return validated_model(ActionRequest, who=person(self.who), why=self.why)


ACTION_DEFAULTS = ActionOptions()
