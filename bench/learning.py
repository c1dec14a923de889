"""Does it learn, and how surely? `make demo-rl` with several seeds, as a table and as a drawing.

    .venv-train/bin/python -m bench.learning [--seeds 5] [--steps 20] [--home DIRECTORY] [--svg FILE]

Each seed has a model of its own, with its own start, its own held-out questions and its own order of tasks. A directory
DIRECTORY/seed-N that holds a finished run is not run again. A quarter of an hour a seed at most, on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.store import HERE
from examples.lookup_summary import answered
from penstock.console.views.pages import drawing
from penstock.console.views.svg import Chart, LineSeries
from penstock.gateway.model.run import Point

HELD_OUT = "evaluation/held-out/reward"
DRAWN = {
    HELD_OUT: "Held-out questions answered rightly (greedy)",
    "reward": "Mean reward of the sampled rollouts",
}


@dataclass(slots=True)
class Learnt:
    """A run of the demo with one seed."""

    seed: int
    points: list[Point]
    questions: int
    """Number of held-out questions."""
    seconds: float | None
    """Duration in seconds, making the model included; None if the run was there already."""

    def curve(self, metric: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric, where there is one."""
        return [(one.step, value) for one in self.points if (value := one.values.get(metric)) is not None]


def main() -> None:
    """Run all seeds, one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--home", type=Path, default=HERE / "out" / "learning")
    parser.add_argument("--svg", type=Path, default=HERE / "out" / "learning.svg")
    asked = parser.parse_args()
    runs = [learnt(seed, asked.steps, asked.home / f"seed-{seed}") for seed in range(asked.seeds)]
    print("\n".join(table(runs)))
    asked.svg.write_text(
        drawing({"": [chart(runs, metric, title) for metric, title in DRAWN.items()]}), encoding="utf-8"
    )
    print(f"{asked.svg}: {len(DRAWN)} charts")


def learnt(seed: int, steps: int, home: Path) -> Learnt:
    """Run the demo, or read the result of an earlier run."""
    path, seconds = home / "run.jsonl", None
    if not path.exists():
        began = time.monotonic()
        words = ["--seed", str(seed), "--steps", str(steps), "--out", str(home)]
        subprocess.run([sys.executable, "-m", "examples.lookup_rl", *words], check=True)
        seconds = time.monotonic() - began
    points = [Point.model_validate_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    questions = (home / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    return Learnt(seed, points, len(questions), seconds)


def table(runs: Sequence[Learnt]) -> Iterator[str]:
    """Yield a table of Markdown. Of equal steps the first is the best."""
    yield "| seed | before | after the last step | best step | sampled reward, first and last step | minutes |"
    yield "|---|---|---|---|---|---|"
    for run in runs:
        greedy, sampled = run.curve(HELD_OUT), run.curve("reward")
        best, most = max(greedy, key=lambda one: (one[1], -one[0]))
        before, after, highest = (answered(share, run.questions) for share in (greedy[0][1], greedy[-1][1], most))
        minutes = "" if run.seconds is None else f"{run.seconds / 60:.0f}"
        yield (
            f"| {run.seed} | {before} | {after} | {best:g}: {highest} | {sampled[0][1]:.2f} → {sampled[-1][1]:.2f} "
            f"| {minutes} |"
        )


def chart(runs: Sequence[Learnt], metric: str, title: str) -> Chart:
    """Return a chart with a line for each run."""
    lines = [LineSeries(f"seed {run.seed}", run.curve(metric), style) for style, run in enumerate(runs, 1)]
    said = " ".join(f"{line.name} goes from {line.points[0][1]:.2f} to {line.points[-1][1]:.2f}." for line in lines)
    return Chart(title, said, lines, "step", bounds=(0.0, 1.0))


if __name__ == "__main__":
    main()
