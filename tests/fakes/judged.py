"""Rollouts as the statistics of releases read them from a tape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.model.release import Pin
from penstock.gateway.model.rollout import Attempt, Reward, Rollout
from penstock.gateway.model.span import Span


@dataclass
class FakeTape:
    """Rollouts with what is read of them."""

    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    tries: list[Attempt] = field(default_factory=list[Attempt])
    said: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    given: list[Pin] = field(default_factory=list[Pin])

    def rollout(self, rollout: str, /) -> Rollout | None:
        return self.rollouts.get(rollout)

    def attempts(self, rollout: str, /) -> list[Attempt]:
        return [one for one in self.tries if one.rollout == rollout]

    def spans(self, rollout: str, /) -> Iterator[Span]:
        yield from self.said.get(rollout, [])

    def pins(self, rollout: str, /) -> list[Pin]:
        return self.given if rollout == "r1" else []

    def add(
        self, kind: str, name: str | None = None, rollout: str = "r1", attempt: str = "a1", **attributes: Any
    ) -> None:
        """Another span."""
        spans = self.said.setdefault(rollout, [])
        span = {"rollout": rollout, "attempt": attempt, "sequence": len(spans) + 1, "kind": kind, "name": name}
        spans.append(Span.model_validate(span | {"attributes": attributes}))

    def reward(self, value: float | None, rollout: str = "r1", attempt: str = "a1", **about: Any) -> None:
        self.add("reward", "reward", rollout, attempt, **Reward(value=value, **about).attributes())
