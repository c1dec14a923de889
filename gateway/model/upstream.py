"""Upstreams as shown to people and trainers, and requests to hold one."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final, Literal

from pydantic import Field

from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.base import Noun

LONGEST_HOLD_S: Final = 3600.0
"""The longest hold, in seconds: no client waits for longer."""


class PauseRequest(ActionRequest):
    """The request that pauses an upstream, and the time for which its calls may wait."""

    bound_s: float = Field(default=60.0, gt=0, le=LONGEST_HOLD_S)
    """Seconds from now after which calls are refused unless it was opened or paused again."""


class UpstreamView(Noun):
    """An upstream, as calls meet it."""

    name: str
    """Its name in the configuration."""
    paused: bool
    """Whether calls to it wait."""
    paused_s: float | None
    """Seconds since it was first paused; None while it is open."""
    bound_s: float | None
    """Seconds that the last hold allows; None while it is open."""
    waiting: int
    """Calls that wait: it is paused, or has no place (`max_concurrent`)."""
    running: int
    """Connections with a call on them: none is left when the weights may be changed."""
    waited: int
    """Calls that have waited since the gateway started, or still do, for either reason."""
    refused: int
    """Those of them that were refused because it was paused."""
    health: Literal["good", "resting", "probing"] = "good"
    """How calls to it go: `resting` after it failed, so that others serve what they can; `probing` when that is over,
    until a call has shown how it is."""
    failing: str = ""
    """Why the last call to it failed, while it is not good."""
    rests_s: float | None = None
    """Seconds that it still rests; None while it does not."""
    check: str | None = None
    """What the last check of its `health_path` has found: `passed`, or why it failed; None where there was none."""
    checked_s: float | None = None
    """How many seconds ago that was."""


class RouteView(Noun):
    """A `[[route]]` of the configuration: which upstreams serve a model."""

    model: str
    """Model name as agents ask for it, or a pattern (`qwen*`)."""
    upstreams: list[str]
    """Names of the upstreams that are tried in turn."""
    alias: str | dict[str, str] | None
    """Model name that is sent instead."""
    train: bool | Literal["exact"]
    """Whether its calls are recorded with token ids, as training needs them."""

    def matches(self, model: str) -> bool:
        """True if this route serves the model."""
        return fnmatchcase(model, self.model)


class UpstreamList(Noun):
    """All upstreams, and the routes to them."""

    upstreams: list[UpstreamView]
    """One each, by name."""
    routes: list[RouteView]
    """In the order of the configuration: the first that matches a model counts."""
