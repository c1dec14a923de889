"""A laboratory for tests of engines and of the search: rewards and answers are functions, and what has ended is kept.

A second life on the same laboratory finds what the first has run, as on a tape. `cut` ends a life before some order.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.gateway.model.base import Mode
from penstock.trainer.apo.protocol import AgentTask, Candidate, Reflection, Trial, TrialSpec

SEED: Final = Candidate({"desk": "Answer."})
BROKEN: Final = "broken"
"""A candidate with this word in a text cannot be run."""


class Killed(BaseException):
    """A life has ended: nothing that catches errors goes on."""


@dataclass(slots=True)
class Bench:
    """Rewards by candidate and order, answers by question and number. `late`: seed of how long each takes, in turns of
    the event loop; None: no time."""

    reward: Callable[[Candidate, TrialSpec], float | None] = lambda candidate, order: 0.5
    answer: Callable[[str, int], str] = lambda prompt, number: "Nothing."
    tokens: int = 10
    """Of an answer; `most` says twice as many."""
    late: int | None = None
    cut: int | None = None
    """Orders and questions after which the life ends; None: never."""
    runs: list[tuple[TrialSpec, Mode]] = field(default_factory=list[tuple[TrialSpec, Mode]])
    """What was run, in every life; an order that is on the tape is not run again."""
    asked: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """And asked."""
    ordered: list[tuple[TrialSpec, Mode]] = field(default_factory=list[tuple[TrialSpec, Mode]])
    """What was ordered, whether it was run before or not."""
    _trials: dict[TrialSpec, Trial] = field(default_factory=dict[TrialSpec, Trial])
    _answers: dict[tuple[str, int], Reflection] = field(default_factory=dict[tuple[str, int], Reflection])

    async def run(
        self, candidates: Sequence[Candidate], orders: Sequence[TrialSpec], mode: Mode = "train"
    ) -> list[Trial]:
        """See `Laboratory`."""
        known = {candidate.id: candidate for candidate in candidates}
        self.ordered.extend((order, mode) for order in orders)
        await self._later(str(orders))
        return [self._trial(known[order.candidate], order, mode) for order in orders]

    def _trial(self, candidate: Candidate, order: TrialSpec, mode: Mode) -> Trial:
        assert not self.problem(candidate), "it cannot be run"
        if order not in self._trials:
            self._live()
            self.runs.append((order, mode))
            reward, name = self.reward(candidate, order), ".".join(map(str, order))
            self._trials[order] = Trial(*order, reward, f"reason of {name}", f"transcript of {name}", 1, name)
        return self._trials[order]

    async def reflect(self, prompt: str, number: int) -> Reflection:
        """See `Laboratory`."""
        await self._later(f"{prompt}{number}")
        if (prompt, number) not in self._answers:
            self._live()
            self.asked.append((prompt, number))
            self._answers[prompt, number] = Reflection(self.answer(prompt, number), self.tokens, self.tokens / 100)
        return self._answers[prompt, number]

    def most(self, prompt: str) -> tuple[int, float]:
        """See `Laboratory`."""
        return 2 * self.tokens, 2 * self.tokens / 100

    def problem(self, candidate: Candidate) -> str:
        """See `Laboratory`."""
        return "it is broken" if any(BROKEN in text for text in candidate.texts.values()) else ""

    def _live(self) -> None:
        if self.cut is not None and len(self.runs) + len(self.asked) >= self.cut:
            raise Killed

    async def _later(self, what: str) -> None:
        for _ in range(0 if self.late is None else random.Random(f"{self.late}-{what}").randrange(1, 20)):
            await asyncio.sleep(0)


def tasks(count: int, first: int = 0) -> list[AgentTask]:
    """So many, each with a key of its own."""
    return [AgentTask(f"t{at}", f"question {at}", f"t{at}") for at in range(first, first + count)]
