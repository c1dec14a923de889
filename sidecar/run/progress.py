"""Results of attempts, as a runner reports them, and the progress of a run: a bar on a terminal, plain lines elsewhere,
both on stderr, and the tally at the end.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self, TextIO

from penstock.gateway.model.queue import Claim
from penstock.gateway.model.rollout import Outcome
from penstock.sidecar.run.agent.process import Stream

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Bar

AT_ONCE_S = 10.0
"""The longest time of a failure at once; a later one comes from the work. Imports on a busy machine may take seconds;
s.
"""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt, for the tally."""

    rollout: str
    """Rollout id."""
    attempt: str
    """Attempt id."""
    worker: str
    """The worker that held it."""
    end: Literal["succeeded", "failed", "timeout", "lost", "returned", "environment"]
    """Its end, as this runner saw it."""
    seconds: float
    """Time from claim to end; s."""
    reward: float | None = None
    """Its reward; None without one."""
    reason: str | None = None
    """The reason of its end; None when there is none."""
    outcome: Outcome | None = None
    """The outcome that the gateway got; None when the attempt was lost or returned."""
    calls: int = 0
    """Model calls of the attempt at the gateway."""
    last_lines: tuple[str, ...] = ()
    """The last lines that the agent printed."""
    no_reward: str | None = None
    """The error for which it has no reward; None without one."""

    @property
    def name(self) -> str:
        """The attempt as `ROLLOUT/ATTEMPT`, for messages to people."""
        return f"{self.rollout}/{self.attempt}"

    @property
    def at_once(self) -> bool:
        """True if it failed before it did anything: soon, and without a model call."""
        took = 0 if self.outcome is None else self.outcome.duration_ns or 0
        return self.end == "failed" and not self.calls and took < AT_ONCE_S * 1e9


FIRST = "asking for work"
"""Shown before the first attempt has begun."""
SAID = {"timeout": "timed out", "returned": "given back", "environment": "handed back"}
ORDER = ("succeeded", "failed", "timeout", "lost", "returned", "environment")
GOT_NONE = "got none"
MOST_REASONS, REASON = 5, 120
"""Reasons that a summary names, and characters of each."""
BACK = ("returned", "environment")
"""Ends of an attempt after which its rollout waits for another one."""


@dataclass(slots=True)
class AttemptTally:
    """Counts of attempts by their ends, and the sum of their rewards."""

    ends: Counter[str] = field(default_factory=Counter[str])
    rewarded: int = 0
    reward: float = 0.0
    unrewarded: Counter[str] = field(default_factory=Counter[str])
    """Counts of attempts without a reward by the reason, of those whose rollouts do not return to the queue."""
    reason: str | None = None
    """The reason of the first attempt that did not succeed."""
    stopped: str | None = None
    """The reason why the runner stopped, when its agents could not work."""

    def add(self, result: AttemptResult) -> None:
        """Count an attempt that has ended."""
        self.ends[result.end] += 1
        if result.reward is not None:
            self.rewarded += 1
            self.reward += result.reward
        elif result.end not in BACK:
            self.unrewarded[_without_reward(result)] += 1
        if result.end != "succeeded" and self.reason is None:
            self.reason = result.reason

    def hand_back(self, result: AttemptResult) -> None:
        """Count a failed attempt as handed back."""
        self.ends["failed"] -= 1
        self.ends["environment"] += 1
        if result.reward is not None:
            self.rewarded -= 1
            self.reward -= result.reward
        else:
            self.unrewarded[_without_reward(result)] -= 1

    @property
    def total(self) -> int:
        """Number of attempts that have ended."""
        return self.ends.total()

    @property
    def done(self) -> int:
        """Number of attempts whose rollouts do not return to the queue."""
        return self.total - sum(self.ends[end] for end in BACK)

    def __str__(self) -> str:
        if not self.total:
            return "no attempt was made; `penstock queue` says what waits"
        parts = [f"{self.ends[end]} {SAID.get(end, end)}" for end in ORDER if self.ends[end] or end in ORDER[:2]]
        mean = f", mean reward {self.reward / self.rewarded:.3f} of {self.rewarded}" if self.rewarded else ""
        return ", ".join(parts) + mean

    def summary(self, judged: bool) -> str:
        """The same with the reasons for which attempts have no reward, unless nobody gives rewards. `judged`: whether
        somebody should."""
        without = +self.unrewarded
        if not (judged or self.rewarded):
            return str(self)
        reasons = [f"{count} {reason}" for reason, count in without.most_common(MOST_REASONS)]
        more = f" and {len(without) - MOST_REASONS} more reasons" if len(without) > MOST_REASONS else ""
        none = f", {without.total()} without a reward ({'; '.join(reasons)}{more})" if without else ""
        return f"{self}{none}"


def _without_reward(result: AttemptResult) -> str:
    """The reason why an attempt has no reward."""
    if result.no_reward is not None:
        return f"{GOT_NONE}: {' '.join(result.no_reward.split())[:REASON]}"
    return GOT_NONE if result.end == "succeeded" else SAID.get(result.end, result.end)


class LineProgress:
    """Plain lines on stderr, one for each attempt that has ended."""

    def __init__(self, echo: bool) -> None:
        self._echo = echo
        self._away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: plain lines stay."""

    def on_begin(self, claim: Claim, waiting: int) -> None:
        """Called when an attempt begins. Prints nothing."""
        self._away = False

    def on_end(self, result: AttemptResult, tally: AttemptTally) -> None:
        """Print name, end, time, reward and reason of an attempt."""
        self._away = False
        reward = "" if result.reward is None else f", reward {result.reward:g}"
        reason = f": {' '.join(result.reason.split())}" if result.reason and result.end != "succeeded" else ""
        self.say(f"{result.name} {SAID.get(result.end, result.end)} after {result.seconds:.1f} s{reward}{reason}")

    def on_hand_back(self, tally: AttemptTally) -> None:
        """Called when an attempt that had ended was handed back. Prints nothing."""

    def line(self, claim: Claim, stream: Stream, text: str) -> None:
        """Echo a line of output to the stream that it came from, with the attempt in front."""
        if self._echo:
            self._show(f"{claim.rollout.id}/{claim.attempt.id} | {text}", stream)

    def report_away(self, reason: str) -> None:
        """Print the reason once for each time that the gateway is away."""
        if not self._away:
            self._away = True
            self.say(f"waiting for the gateway: {reason}")

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        self._show(text, "stderr")

    def _show(self, text: str, stream: Stream) -> None:
        """Print a text. An error of our own output (a closed pipe, an encoding) must not stop the reading of an
        agent's.
        """
        out = sys.stdout if stream == "stdout" else sys.stderr
        encoding = out.encoding or "utf-8"
        with suppress(OSError):
            self._put(text.encode(encoding, "replace").decode(encoding), out)

    def _put(self, text: str, out: TextIO) -> None:
        print(text, file=out, flush=True)


class TerminalProgress(LineProgress):
    """A progress bar with the tally below it; messages are printed above. Use as a context manager."""

    def __init__(self, echo: bool, most: int | None, clock: Callable[[], float] | None = None) -> None:
        """`clock` returns seconds, for the elapsed time."""
        super().__init__(echo)
        self._bar = _bar(clock)
        self._most = most
        self._running = self._done = self._waiting = 0
        self._task = self._bar.add_task(FIRST, total=most)

    def picture(self) -> list[RenderableType]:
        """The renderables that the terminal shows now."""
        return [*self._bar.get_renderables()]

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The command prints the tally at its end; left here, it would be shown twice.
        self._bar.update(self._task, description="")
        self._bar.stop()

    def on_begin(self, claim: Claim, waiting: int) -> None:
        """The bar's length is the number of rollouts that are done, running or waiting."""
        super().on_begin(claim, waiting)
        self._running, self._waiting = self._running + 1, waiting
        self._draw(None if self._done else f"{self._running} running")

    def on_end(self, result: AttemptResult, tally: AttemptTally) -> None:
        """Advance the bar, unless the rollout waits again; print an attempt that did not succeed above it."""
        self._running, self._done = self._running - 1, tally.done
        self._waiting += result.end in BACK
        if result.end != "succeeded":
            super().on_end(result, tally)
        self._draw(str(tally))

    def on_hand_back(self, tally: AttemptTally) -> None:
        """Move the bar back by one rollout."""
        self._done, self._waiting = tally.done, self._waiting + 1
        self._draw(str(tally))

    def _draw(self, description: str | None = None) -> None:
        total = self._most or self._done + self._running + self._waiting
        self._bar.update(self._task, total=total, completed=self._done, description=description)

    def _put(self, text: str, out: TextIO) -> None:
        if out is sys.stdout and not out.isatty():
            super()._put(text, out)  # a file or a pipe: the bar is not there
        else:
            self._bar.console.print(text, soft_wrap=True)


def _bar(clock: Callable[[], float] | None) -> Bar:
    """A bar with the tally below it, because beside it the tally would not fit into 80 columns."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
    from rich.text import Text

    class StackedProgress(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.tasks:
                yield self.make_tasks_table([task])
                if task.description:
                    yield Text(task.description)

    columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    return StackedProgress(*columns, console=console, redirect_stdout=False, get_time=clock)


def progress(echo: bool, most: int | None) -> LineProgress:
    """A bar when stderr is a terminal, else plain lines."""
    return TerminalProgress(echo, most) if sys.stderr.isatty() else LineProgress(echo)
