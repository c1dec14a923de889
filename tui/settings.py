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
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from platformdirs import user_config_path
from pydantic import Field

from penstock.gateway.client.console import CommandError, control_key
from penstock.gateway.model.toml import ConfigError, Section, read, validated

FILE: Final = "tui.toml"


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


def contexts(settings: TuiSettings, gateway: str) -> dict[str, GatewayContext]:
    """All contexts; the gateway of the command line is one too, under its host."""
    return {**settings.contexts, host(gateway): GatewayContext(gateway=gateway)}


def host(url: str) -> str:
    """A short name for a URL: the URL without its scheme."""
    return url.split("://", 1)[-1].rstrip("/")
