"""Settings of the log: `[log]` of penstock.toml. `gateway.wire.http.log` writes it."""

from __future__ import annotations

from typing import Literal

from penstock.gateway.model.toml import Section


class LogSettings(Section):
    """`[log]`: what the gateway writes to stderr."""

    format: Literal["text", "json"] = "text"
    """`json` is one object a line, whose names are in operations.md."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines of lower levels are left out; those of calls are not."""
    calls: bool = False
    """Whether each call has a line when it has ended: what it was, how it went and how long it took, and nothing that
    was said."""
