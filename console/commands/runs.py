"""`penstock runs`: shows, follows, plots and exports training runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, whole_file, with_client
from penstock.gateway.model.run import MOST_READ

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.run import Curve, Run, RunEvent

Name = Annotated[str, Parameter(help="Name of a run.")]
Metrics = Annotated[str | None, Parameter(help="Which metrics, with commas between; * and ? are wildcards.")]
Format = Literal["tensorboard", "mlflow", "csv", "jsonl"]
FOLDERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}
"""Export formats that are folders."""
EVENTS = 10
"""Maximum number of a run's events that are shown."""
PLOTTED = 1000
"""Maximum number of buckets of a plotted curve."""


def show_run(run: Name, /, *, metrics: Metrics = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Show a run: its configuration, its metrics as a table, what happened last."""
    from penstock.console.views import runs

    async def ask(client: Client) -> None:
        found = await client.run(run)
        curves = await client.curves(run, _names(metrics), max_points=runs.TREND) if found.metrics else []
        events = [event async for event in client.run_events(run, EVENTS)]
        show([found, *curves, *events], json, lambda: runs.show(found, curves, events, time.time_ns()))

    with_client(gateway, ask)


def watch(run: Name, /, *, metrics: Metrics = None, json: Json = False, gateway: Url = LOCAL) -> None:
    """Follow a run until it ends: how far it is, its curves, what happens."""
    from penstock.console.commands import watch_run

    async def ask(client: Client) -> None:
        await watch_run.watch(client, run, _names(metrics) or [], json)

    with_client(gateway, ask)


def plot(
    run: Name,
    /,
    *,
    out: Path | None = None,
    metrics: Metrics = None,
    compare: Annotated[list[str] | None, Parameter(negative="")] = None,
    gateway: Url = LOCAL,
) -> None:
    """Draw the metrics of a run, beside those of others if you like.

    Parameters
    ----------
    out
        File to write, .html, .svg or .png (which needs the extra `plots`); RUN.html if not given.
    compare
        Another run to draw beside it; may be given several times.
    """
    path = out or Path(f"{run}.html")
    if path.suffix not in (".html", ".svg", ".png"):
        raise CommandError(f"{path} is not .html, .svg or .png", 2)

    async def ask(client: Client) -> None:
        found, names = await client.run(run), _names(metrics)
        curves = {run: await client.curves(run, names, max_points=_buckets(found))}
        for other in compare or ():
            curves[other] = await client.curves(other, names, max_points=_buckets(await client.run(other)))
        if not any(curve.count for curve in curves[run]):
            raise CommandError(f"run {run!r} has no points to draw")
        events = [event async for event in client.run_events(run, EVENTS)]
        with whole_file(path) as file:
            file.write(_drawn(path.suffix, found, curves, events))
        print(f"{path}: {sum(curve.count > 0 for curve in curves[run]):,} metrics", file=sys.stderr)

    with_client(gateway, ask)


def _drawn(suffix: str, run: Run, curves: dict[str, list[Curve]], events: list[RunEvent]) -> bytes:
    from penstock.console.commands.export_runs import png
    from penstock.console.views.run_page import charts, drawing, page

    if suffix == ".html":
        return page(run, curves, events, time.time_ns()).encode()
    found = list(charts(curves, run.tree))
    return drawing(found).encode() if suffix == ".svg" else png(found)


def _buckets(run: Run) -> int:
    """The number of buckets that can be told apart, within the gateway's limit for one answer."""
    return min(PLOTTED, MOST_READ // max(1, len(run.metrics)))


def export(
    run: Name,
    /,
    *,
    to: Format,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    gateway: Url = LOCAL,
) -> None:
    """Write every point of a run for another tool.

    Parameters
    ----------
    to
        tensorboard (a folder with an event file, which needs the extra `plots`), mlflow (a folder with a database,
        which needs the extra `mlflow`), csv or jsonl.
    output
        File to write, which appears when it is whole; for TensorBoard a new folder, for MLflow one that may hold other
        runs. Stdout if not given.
    """
    from penstock.console.commands import export_runs

    if to in FOLDERS and output is None:
        raise CommandError(f"{FOLDERS[to]} reads a folder: say which, as --output DIR", 2)

    async def ask(client: Client) -> None:
        found, points = await client.run(run), client.points(run)
        if to == "tensorboard" and output is not None:
            count = await export_runs.tensorboard(points, output)
        elif to == "mlflow" and output is not None:
            count = await export_runs.mlflow(found, points, output)
        else:
            with whole_file(output) as file:
                if to == "jsonl":
                    count = await export_runs.lines(points, file)
                else:
                    count = await export_runs.table(points, found.metrics, file)
        if output is not None:
            print(f"{output}: {count:,} steps", file=sys.stderr)

    with_client(gateway, ask)


def _names(metrics: str | None) -> list[str] | None:
    return None if metrics is None else [name for name in metrics.replace(",", " ").split() if name]
