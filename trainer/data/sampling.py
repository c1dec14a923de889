"""Compares the sampling settings of a step's calls with the training's assumption: `rollouts.temperature`, and no
tokens cut off.

An answer that was sampled with other settings comes from another distribution than the trainer's. Importance sampling
corrects a little of it; tokens that top_p or top_k cut off cannot come back. So the run reports how many calls are
concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.adapters.episode import Episode
from penstock.adapters.samples import Sample
from penstock.gateway.wire.dialects.sampling import distribution_changes


@dataclass(slots=True)
class SamplingCounts:
    """Counts of the calls that are in samples."""

    calls: int = 0
    """Number of calls."""
    mismatched: int = 0
    """Number of calls with settings that training does not assume."""
    settings: Counter[str] = field(default_factory=Counter[str])
    """Number of calls by setting that training does not assume, such as `top_p 0.9`."""

    def record(self, episode: Episode, made: Sequence[Sample], temperature: float) -> None:
        """Add the calls of a rollout that are in its samples."""
        used = {(one.attempt, part.sequence) for one in made for part in one.segments}
        calls = [call for one in episode.attempts for call in one.calls]
        for call in calls:
            if (call.span.attempt, call.span.sequence) in used:
                found = distribution_changes(call.skewing, temperature)
                self.calls += 1
                self.mismatched += bool(found)
                self.settings.update(found)

    def add(self, other: SamplingCounts) -> None:
        self.calls += other.calls
        self.mismatched += other.mismatched
        self.settings += other.settings

    @property
    def share(self) -> float:
        """Share of the calls with settings that training does not assume."""
        return self.mismatched / max(1, self.calls)

    def warning(self, temperature: float) -> str | None:
        """Return a warning for a person; None if all calls are as assumed."""
        if not self.mismatched:
            return None
        found = ", ".join(f"{name} ({count})" for name, count in self.settings.most_common(5))
        return (
            f"{self.mismatched} of {self.calls} calls ({self.share:.0%}) were sampled otherwise than training assumes, "
            f"which is temperature {temperature:g} (rollouts.temperature) and nothing else: {found}; let the agent "
            "leave these out, or set rollouts.temperature to what it asks for"
        )
