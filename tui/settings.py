"""The settings of a person: gateways by name, keys, a theme. A file that need not be there.

# ~/.config/penstock/tui.toml, or PENSTOCK_TUI
context = "prod"                  # the one that `penstock tui` begins with
theme = "nord"

[contexts.prod]
gateway = "https://penstock.example.org"
key = "PENSTOCK_PROD_KEY"         # the variable that has the key; keys do not stand in files
read_only = true

[keys]
"rollout.cancel" = ["ctrl+k"]     # ids as `?` lists them

Saved views are in `views.json` beside it, which only the TUI writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from platformdirs import user_config_path
from pydantic import Field, TypeAdapter, ValidationError

from penstock.gateway.client.console import CommandError, control_key
from penstock.gateway.model.toml import ConfigError, Section, read, validated

FILE: Final = "tui.toml"
VIEWS_FILE: Final = "views.json"
MOST_VIEWS: Final = 100


class GatewayContext(Section):
    """A gateway under a name, with the way to its key."""

    gateway: str
    """Its URL."""
    key: str | None = None
    """The environment variable that holds its key; the usual ones when not given."""
    read_only: bool = False
    """Whether the TUI changes nothing there."""

    def secret(self, environment: Mapping[str, str] = os.environ) -> str | None:
        """The key; None without one. Raises `CommandError` when its variable is not set."""
        if self.key is None:
            return control_key()
        if not environment.get(self.key):
            raise CommandError(f"the variable {self.key}, which has the key of {self.gateway}, is not set", 2)
        return environment[self.key]


class TuiSettings(Section):
    """The whole file of settings of the TUI."""

    context: str | None = None
    """The name of the context to begin with; the gateway of `--gateway` when not given."""
    theme: str | None = None
    """A theme as `:theme` completes it."""
    contexts: dict[str, GatewayContext] = Field(default_factory=dict[str, GatewayContext])
    """Gateways by name."""
    keys: dict[str, list[str]] = Field(default_factory=dict[str, list[str]])
    """Other keys, by the ids of the key map."""


def load(environment: Mapping[str, str] = os.environ) -> TuiSettings:
    """The settings; the defaults when there is no file. Raises `CommandError` for an invalid file."""
    named = environment.get("PENSTOCK_TUI")
    path = Path(named) if named else user_config_path("penstock") / FILE
    if not named and not path.exists():
        return TuiSettings()
    try:
        found = validated(TuiSettings, read(path), str(path))
    except ConfigError as e:
        raise CommandError(str(e), 2) from None
    if found.context is not None and found.context not in found.contexts:
        known = ", ".join(found.contexts) or "none"
        raise CommandError(f"{path}: context: there is no [contexts.{found.context}]; there are {known}", 2)
    return found


class SavedView(Section):
    """A screen as a person has arranged it."""

    words: list[str] = Field(min_length=1)
    """The screen and what it wants, as behind `:`, such as ["rollouts", "status:failed"]."""
    columns: list[str] = Field(default_factory=list[str])
    """Names of the columns; all when empty."""
    sort: str = ""
    reverse: bool = False
    since: str = ""
    """The range of time, such as 24h; all when empty."""


_VIEWS: Final = TypeAdapter(dict[str, SavedView])


class SavedViews:
    """The saved views of a person, by name. Each question reads the file: another terminal may have written it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of_person(cls, environment: Mapping[str, str] = os.environ) -> SavedViews:
        """The views that are saved beside the settings of the TUI."""
        named = environment.get("PENSTOCK_TUI")
        return cls((Path(named).parent if named else user_config_path("penstock")) / VIEWS_FILE)

    def load(self) -> dict[str, SavedView]:
        """All of them, in the order in which they were saved. Raises `ValueError` for a file that is damaged or cannot
        be read."""
        try:
            return _VIEWS.validate_json(self._path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValidationError) as e:
            why = e.strerror if isinstance(e, OSError) else f"{e.errors()[0]['msg']}; mend it, or delete it"
            raise ValueError(f"{self._path} cannot be read: {why}") from None

    def save(self, name: str, view: SavedView | None) -> None:
        """Keep a view under a name, in place of the one before; None deletes it. Raises `ValueError` when the file
        cannot be read or written."""
        found = self.load()
        found.pop(name, None)
        if view is not None:
            found[name] = view
        if len(found) > MOST_VIEWS:
            raise ValueError(f"{MOST_VIEWS} views are saved; delete one first (v lists them, X deletes)")
        text = json.dumps(_VIEWS.dump_python(found, exclude_defaults=True), indent=2, ensure_ascii=False)
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(text + "\n")
            fresh.replace(self._path)
        except OSError as e:
            raise ValueError(f"{self._path} cannot be written: {e.strerror}") from None


def contexts(settings: TuiSettings, gateway: str) -> dict[str, GatewayContext]:
    """All contexts; the gateway of the command line is one too, under its host."""
    return {**settings.contexts, host(gateway): GatewayContext(gateway=gateway)}


def host(url: str) -> str:
    """A short name for a URL: the URL without its scheme."""
    return url.split("://", 1)[-1].rstrip("/")
