"""What `make demo-rl` closes with: before and after, with intervals, and where everything is. Pure but for one link."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from penstock.trainer.runs.evaluation import wilson


class Results(NamedTuple):
    """What the training has come to."""

    shares: Mapping[int, float]
    """Share of the held-out questions that were answered rightly, by step; the first is from before the training."""
    questions: int
    """The held-out questions."""
    url: str
    """Where the gateway was, and will be with the same configuration."""


def summary(found: Results, home: Path, python: str, making_s: float, training_s: float) -> Iterator[str]:
    """Lines for a person. `python`: that of the environment."""
    steps = sorted(found.shares)
    best = max(steps, key=lambda step: (found.shares[step], -step))
    yield f"Held-out questions answered rightly: {found.questions} that were never trained on, asked"
    yield "greedily (temperature 0). In brackets the 95 % interval (Wilson)."
    for step in steps:
        named = "before the first step" if step == 0 else f"after step {step}"
        yield f"  {named:<22} {answered(found.shares[step], found.questions):>30}{'  best' if step == best else ''}"
    yield f"The model took {spent(making_s)}, {steps[-1]} steps with vLLM's start {spent(training_s)}."
    yield ""
    yield f"  results       {home}"
    yield f"  plot          {home / 'run.html'}"
    yield f"  all figures   {home / 'run.jsonl'}"
    yield f"  best weights  {best_weights(home)}"
    yield ""
    penstock = Path(python).with_name("penstock")
    yield "To look at every call, start the gateway again, and ask it in another terminal:"
    yield f"  {penstock} serve --config {home / 'penstock.toml'}"
    yield f"  {penstock} runs show lookup --gateway {found.url}"
    yield f"  {penstock} rollouts --gateway {found.url}"


def answered(share: float, questions: int) -> str:
    """How many, their share, and its interval."""
    low, high = wilson(share, questions)
    return f"{round(share * questions)} of {questions}  {share:.2f} [{low:.2f}, {high:.2f}]"


def spent(seconds: float) -> str:
    """A duration, for a person."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def best_weights(home: Path) -> str:
    """The link to them, and where it leads."""
    link = home / "run" / "best"
    return f"{link} -> {os.readlink(link)}" if link.is_symlink() else "none"
