"""Training runs as files for other tools: PNG, CSV, JSON lines, TensorBoard's event files.

matplotlib and tensorboardX (which needs neither TensorBoard nor torch) come with the extra `plots`, and are loaded only
where they are needed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterable, Sequence
from importlib import import_module
from logging import ERROR, getLogger
from pathlib import Path
from typing import IO, Any

from gateway.commands.common import Failure
from gateway.releases.charts import Chart
from gateway.runs.model import Point

INCHES = 7.2, 3.0
"""Width and height of a chart in a PNG."""


def extra(module: str, what: str) -> Any:
    """A module that comes with the extra `plots`."""
    try:
        return import_module(module)
    except ImportError:
        raise Failure(f"{what} needs {module.partition('.')[0]}: pip install 'penstock[plots]'") from None


def png(charts: Sequence[Chart]) -> bytes:
    """The charts below each other as an image."""
    width, height = INCHES
    figure = extra("matplotlib.figure", "PNG").Figure(figsize=(width, height * len(charts)), layout="tight")
    for place, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(len(charts), 1, place), chart)
    made = io.BytesIO()
    # Without pyplot: a figure by itself draws with Agg, opens no window and leaves nothing behind.
    figure.savefig(made, format="png", dpi=150)
    return made.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        # A dollar sign would begin a formula.
        axes.plot(*zip(*line.points, strict=True), label=line.name.replace("$", r"\$")) if line.points else None
    if chart.band:
        axes.fill_between(*zip(*chart.band, strict=True), alpha=0.15)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(chart.x)
    axes.grid(alpha=0.3)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8)


async def lines(points: AsyncIterable[Point], file: IO[bytes]) -> int:
    """A JSON object for each step; how many there were."""
    count = 0
    async for point in points:
        file.write(point.model_dump_json().encode() + b"\n")
        count += 1
    return count


async def table(points: AsyncIterable[Point], metrics: Sequence[str], file: IO[bytes]) -> int:
    """CSV: a row for each step, a column for each metric, `nan` for what was no finite number; how many rows."""
    count, text = 0, io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "time_ns", *metrics])
    async for point in points:
        said = {name: "nan" if value is None else repr(value) for name, value in point.values.items()}
        writer.writerow([point.step, point.time_ns, *(said.get(name, "") for name in metrics)])
        count += 1
    # The file is its owner's to close.
    text.detach()
    return count


def _summaries(folder: Path) -> Any:
    module = extra("tensorboardX", "TensorBoard's files")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise Failure(f"{folder} exists already; TensorBoard would show both: remove it or choose another") from None
    except OSError as e:
        raise Failure(f"{folder}: {e.strerror}") from None
    # It warns of every value that is no finite number; these are so on purpose.
    getLogger("tensorboardX").setLevel(ERROR)
    return module.SummaryWriter(str(folder))


async def tensorboard(points: AsyncIterable[Point], folder: Path) -> int:
    """An event file in a new folder, a scalar for each value; how many steps."""
    count = 0
    with _summaries(folder) as writer:
        async for point in points:
            for name, value in point.values.items():
                number = float("nan") if value is None else value
                writer.add_scalar(name, number, point.step, walltime=(point.time_ns or 0) / 1e9)
            count += 1
    return count
