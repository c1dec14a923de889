"""Candidates: texts for an agent's rollouts. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Candidate:
    """A text for each optimised resource."""

    texts: Mapping[str, str]
    """Texts by resource name."""
    parent: str | None = None
    """Id of the candidate that it was made from; None for the seed."""
    claim: str = ""
    """The failure that it should fix, or its origin; for a person."""
    causes: tuple[str, ...] = field(default=())
    """Rollouts that led to it."""
    line_causes: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Rollouts that led to a line, by the new or removed line, for engines that know; `causes` holds for all other
    lines."""

    def __post_init__(self) -> None:
        # A claim from a model's JSON may have halves of characters (lone surrogates), which cannot be sent.
        object.__setattr__(self, "claim", self.claim.encode(errors="ignore").decode())

    @cached_property
    def id(self) -> str:
        """12 hex digits of SHA-256 of the texts: the same texts are the same candidate."""
        return hashlib.sha256(json.dumps(dict(self.texts), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def length(self) -> int:
        """Characters of all its texts."""
        return sum(map(len, self.texts.values()))
