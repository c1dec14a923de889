"""How a run is going: a bar on a terminal, plain lines elsewhere, both on stderr, and the tally of the whole."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, Self

from gateway.work import Claim
from sidecar.output import Stream

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from sidecar.attempt import Result

SAID = {"timeout": "timed out", "returned": "given back"}
ORDER = ("succeeded", "failed", "timeout", "lost", "returned")


@dataclass(slots=True)
class Tally:
    """Attempts by how they ended, and their rewards."""

    ends: Counter[str] = field(default_factory=Counter[str])
    rewarded: int = 0
    reward: float = 0.0
    reason: str | None = None
    """Why the first attempt that did not succeed ended."""

    def add(self, result: Result) -> None:
        """One more attempt."""
        self.ends[result.end] += 1
        if result.reward is not None:
            self.rewarded += 1
            self.reward += result.reward
        if result.end != "succeeded" and self.reason is None:
            self.reason = result.reason

    def merge(self, other: Tally) -> None:
        """The attempts of another runner."""
        self.ends.update(other.ends)
        self.rewarded += other.rewarded
        self.reward += other.reward
        self.reason = self.reason or other.reason

    @property
    def total(self) -> int:
        """Attempts."""
        return self.ends.total()

    def __str__(self) -> str:
        parts = [f"{self.ends[end]} {SAID.get(end, end)}" for end in ORDER if self.ends[end] or end in ORDER[:2]]
        mean = f", mean reward {self.reward / self.rewarded:.3f} of {self.rewarded}" if self.rewarded else ""
        return ", ".join(parts) + mean


class Progress(Protocol):
    """Is told what happens."""

    def begun(self, claim: Claim, waiting: int) -> None:
        """An attempt was claimed; so many rollouts are left in the queue."""
        ...

    def ended(self, result: Result, tally: Tally) -> None:
        """An attempt has ended."""
        ...

    def line(self, claim: Claim, stream: Stream, text: str) -> None:
        """An agent has printed something."""
        ...

    def away(self, reason: str) -> None:
        """The gateway did not answer."""
        ...

    def say(self, text: str) -> None:
        """Something that a person should know."""
        ...


class Lines:
    """Plain lines on stderr, one for each attempt that has ended."""

    def __init__(self, echo: bool) -> None:
        self._echo = echo
        self._away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to be cleared away."""

    def begun(self, claim: Claim, waiting: int) -> None:
        """Nothing is said of a beginning."""
        self._away = False

    def ended(self, result: Result, tally: Tally) -> None:
        """Name, end, time, reward and reason."""
        self._away = False
        reward = "" if result.reward is None else f", reward {result.reward:g}"
        reason = f": {' '.join(result.reason.split())}" if result.reason and result.end != "succeeded" else ""
        self.say(f"{result.name} {SAID.get(result.end, result.end)} after {result.seconds:.1f} s{reward}{reason}")

    def line(self, claim: Claim, stream: Stream, text: str) -> None:
        """Echoed where it was printed to, with the attempt in front."""
        if self._echo:
            self._show(f"{claim.rollout.id}/{claim.attempt.id} | {text}", stream)

    def away(self, reason: str) -> None:
        """Said once for each time that it is away."""
        if not self._away:
            self._away = True
            self.say(f"waiting for the gateway: {reason}")

    def say(self, text: str) -> None:
        """A line on stderr."""
        self._show(text, "stderr")

    def _show(self, text: str, stream: Stream) -> None:
        print(text, file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


class Terminal(Lines):
    """A bar with the tally below what is said. Use as a context manager."""

    def __init__(self, echo: bool, most: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        super().__init__(echo)
        columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._bar: Bar = Progress(*columns, TimeElapsedColumn(), console=console, redirect_stdout=False)
        self._most = most
        self._running = self._done = self._waiting = 0
        self._task = self._bar.add_task("waiting for work", total=most)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begun(self, claim: Claim, waiting: int) -> None:
        """The bar is as long as what is done, running and waiting."""
        super().begun(claim, waiting)
        self._running, self._waiting = self._running + 1, waiting
        self._draw()

    def ended(self, result: Result, tally: Tally) -> None:
        """The bar goes on; what did not succeed is said above it."""
        self._running, self._done = self._running - 1, self._done + 1
        if result.end != "succeeded":
            super().ended(result, tally)
        self._draw(str(tally))

    def _draw(self, description: str | None = None) -> None:
        total = self._most or self._done + self._running + self._waiting
        self._bar.update(self._task, total=total, completed=self._done, description=description)

    def _show(self, text: str, stream: Stream) -> None:
        self._bar.console.print(text, soft_wrap=True)


def progress(kind: Literal["bar", "lines"], echo: bool, most: int | None) -> Lines:
    """What tells a person."""
    return Terminal(echo, most) if kind == "bar" else Lines(echo)
