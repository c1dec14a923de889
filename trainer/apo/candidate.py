"""Candidates: the texts that an agent's rollouts are to have. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Candidate:
    """A text for each resource that is optimised."""

    texts: Mapping[str, str]
    """By name of the resource."""
    parent: str | None = None
    """The candidate that it was made from."""
    claim: str = ""
    """The failure that it is to mend, or how it came about; for a person."""
    causes: tuple[str, ...] = field(default=())
    """Rollouts that led to it."""
    line_causes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Rollouts that led to a line, by the line that is new or gone, for engines that know; of the others, `causes`."""

    def __post_init__(self) -> None:
        # Engines may have it from a model's JSON, which can spell halves of characters; nothing can send them.
        object.__setattr__(self, "claim", self.claim.encode(errors="ignore").decode())

    @cached_property
    def id(self) -> str:
        """12 hex digits of SHA-256 of the texts: the same texts are the same candidate."""
        return hashlib.sha256(json.dumps(dict(self.texts), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def length(self) -> int:
        """Characters of all its texts."""
        return sum(map(len, self.texts.values()))
