"""`penstock runs`: shows, follows and plots training runs, and writes them as files for other tools.

Extras are loaded only where they are needed: matplotlib and tensorboardX (which needs neither TensorBoard nor torch)
come with `plots`, MLflow's client with `mlflow`.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import sys
import time
from codecs import getwriter
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from logging import ERROR, getLogger
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from penstock.console.commands.terminal import show
from penstock.gateway.client.console import LOCAL, CommandError, Json, Url, with_client
from penstock.gateway.model.codes import Extra, install_hint

if TYPE_CHECKING:
    from penstock.console.views.svg import Chart
    from penstock.gateway.client.client import Client
    from penstock.gateway.model.run import Curve, Point, Run, RunEvent, RunStatus

Name = Annotated[str, Parameter(help="Name of a run.")]
Metrics = Annotated[str | None, Parameter(help="Which metrics, with commas between; * and ? are wildcards.")]
Format = Literal["tensorboard", "mlflow", "csv", "jsonl"]
FOLDERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow"}
"""Export formats that are folders."""
EVENTS = 10
"""Maximum number of a run's events that are shown."""
PLOTTED = 1000
"""Maximum number of buckets of a plotted curve: more cannot be told apart."""
EXACT = 10_000
"""Maximum number of points of a metric that the result is read from."""


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
    from penstock.console.commands.watch import watch_run

    async def ask(client: Client) -> None:
        await watch_run(client, run, _names(metrics) or [], json)

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
    from penstock.console.views.runs import RESULTS, result
    from penstock.console.views.table import clean
    from penstock.gateway.client.console import whole_file

    path = out or Path(f"{run}.html")
    if path.suffix not in (".html", ".svg", ".png"):
        raise CommandError(f"{path} is not .html, .svg or .png", 2)

    async def ask(client: Client) -> None:
        found, names = await client.run(run), _names(metrics)
        told = [name for name in found.metrics if name.startswith(RESULTS)]
        said = result(found, await client.curves(run, told, max_points=_buckets(found, EXACT)) if told else ())
        curves = {run: await client.curves(run, names, max_points=_buckets(found))}
        for other in compare or ():
            curves[other] = await client.curves(other, names, max_points=_buckets(await client.run(other)))
        if not any(curve.count for curve in curves[run]):
            raise CommandError(f"run {run!r} has no points to draw")
        events = [event async for event in client.run_events(run, EVENTS)]
        with whole_file(path) as file:
            file.write(_drawn(path.suffix, found, said, curves, events))
        print(f"{path}: {sum(curve.count > 0 for curve in curves[run]):,} metrics. {clean(said)}", file=sys.stderr)

    with_client(gateway, ask)


def _drawn(suffix: str, run: Run, said: str, curves: dict[str, list[Curve]], events: list[RunEvent]) -> bytes:
    from penstock.console.views.pages import drawing, run_charts, run_page

    if suffix == ".html":
        return run_page(run, said, curves, events, time.time_ns()).encode()
    found, heading = run_charts(curves, run.tree), f"{run.id}: {said}"
    return drawing(found, heading).encode() if suffix == ".svg" else png(found, heading)


def _buckets(run: Run, most: int = PLOTTED) -> int:
    """At most `most` buckets, within the gateway's limit for one answer."""
    from penstock.gateway.model.run import MOST_READ

    return min(most, MOST_READ // max(1, len(run.metrics)))


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
    from penstock.gateway.client.console import whole_file

    if to in FOLDERS and output is None:
        raise CommandError(f"{FOLDERS[to]} reads a folder: say which, as --output DIR", 2)

    async def ask(client: Client) -> None:
        found, points = await client.run(run), client.points(run)
        if to == "tensorboard" and output is not None:
            count = await tensorboard(points, output)
        elif to == "mlflow" and output is not None:
            count = await mlflow(found, points, output)
        else:
            with whole_file(output) as file:
                if to == "jsonl":
                    count = await lines(points, file)
                else:
                    count = await table(points, found.metrics, file)
        if output is not None:
            print(f"{output}: {count:,} steps", file=sys.stderr)

    with_client(gateway, ask)


def _names(metrics: str | None) -> list[str] | None:
    return None if metrics is None else [name for name in metrics.replace(",", " ").split() if name]


# -- files: PNG, JSON lines, CSV, TensorBoard's event files, MLflow's database ----

INCHES = 4.8, 2.8
"""Width and height of a chart in a PNG."""
ACROSS = 2
"""Charts beside each other in a PNG."""
EXPERIMENT = "penstock"
"""Name of MLflow's experiment that runs belong to."""
STATES: dict[RunStatus, str] = {"succeeded": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""MLflow's names of states; runs in all other states are `RUNNING`."""
BATCH = 1000
"""Maximum number of metrics in one request to MLflow; of settings it takes a tenth."""


def extra(module: str, what: str, name: Extra = "plots") -> Any:
    """A module that comes with the extra `name`. Raises `CommandError` when it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise CommandError(f"{what} needs {module.partition('.')[0]}: {install_hint(name)}") from None


def png(groups: Mapping[str, Sequence[Chart]], heading: str) -> bytes:
    """The charts as an image, in the order of their groups."""
    (width, height), charts = INCHES, [chart for charts in groups.values() for chart in charts]
    rows = -(-len(charts) // ACROSS)
    size = (width * ACROSS, height * rows + 0.8)
    figure = extra("matplotlib.figure", "PNG").Figure(figsize=size, layout="constrained")
    # A dollar sign would begin a formula.
    figure.suptitle(heading.replace("$", r"\$"), fontsize=10, wrap=True)
    for place, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(rows, ACROSS, place), chart)
    made = io.BytesIO()
    # Without pyplot: a figure by itself draws with Agg, opens no window and leaves nothing behind.
    figure.savefig(made, format="png", dpi=150)
    return made.getvalue()


def _draw(axes: Any, chart: Chart) -> None:
    for line in (line for line in chart.lines if line.points):
        way = {"marker": "o", "linestyle": ""} if line.dots or line.marked else {}
        way |= {"drawstyle": "steps-post"} if line.stepped else {}
        (drawn,) = axes.plot(*zip(*line.points, strict=True), label=line.name.replace("$", r"\$"), **way)
        for x, ends in line.intervals.items():
            axes.vlines(x, *ends, color=drawn.get_color(), linewidth=1)
        for x, y in line.points if line.marked else ():
            axes.annotate(line.said(x, y), (x, y), (8, -3), textcoords="offset points", fontsize=8)
    for name, limit in chart.limits:
        axes.axhline(limit, linestyle=":", color="tab:red")
        axes.annotate(name, (0.02, limit), (0, 3), ("axes fraction", "data"), "offset points", fontsize=8)
    if chart.log:
        axes.set_yscale("log")
    if chart.band:
        axes.fill_between(*zip(*chart.band, strict=True), alpha=0.15)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(chart.title.replace("$", r"\$"), fontsize=10)
    axes.set_xlabel(chart.x)
    axes.grid(alpha=0.3)
    if len(chart.lines) > 1:
        axes.legend(fontsize=8)


async def lines(points: AsyncIterable[Point], file: IO[bytes]) -> int:
    """Writes a JSON object for each step; returns the number of steps."""
    count = 0
    async for point in points:
        file.write(point.model_dump_json().encode() + b"\n")
        count += 1
    return count


async def table(points: AsyncIterable[Point], metrics: Sequence[str], file: IO[bytes]) -> int:
    """Writes CSV: a row for each step, a column for each metric, `nan` for values that are not finite. Returns the
    number of steps."""
    count, writer = 0, csv.writer(getwriter("utf-8")(file), lineterminator="\n")
    writer.writerow(["step", "time_ns", *metrics])
    async for point in points:
        said = {name: "nan" if value is None else repr(value) for name, value in point.values.items()}
        writer.writerow([point.step, point.time_ns, *(said.get(name, "") for name in metrics)])
        count += 1
    return count


def _event_file(folder: Path) -> Any:
    """A writer of an event file in a new folder. It is no `SummaryWriter`: that writes in a thread, and waits for it
    even after a full disk has ended it."""
    _ = extra("tensorboardX", "TensorBoard's files")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise CommandError(
            f"{folder} exists already; TensorBoard would show both: remove it or choose another"
        ) from None
    except OSError as e:
        raise CommandError(f"{folder}: {e.strerror}") from None
    # It warns of every value that is not finite; these values are intended.
    getLogger("tensorboardX").setLevel(ERROR)
    return import_module("tensorboardX.event_file_writer").EventsWriter(str(folder / "events"))


async def tensorboard(points: AsyncIterable[Point], folder: Path) -> int:
    """Writes an event file in a new folder, a scalar for each value; returns the number of steps."""
    count, writer = 0, _event_file(folder)
    event, scalar = import_module("tensorboardX.proto.event_pb2").Event, import_module("tensorboardX.summary").scalar
    try:
        async for point in points:
            for name, value in point.values.items():
                said = scalar(name, float("nan") if value is None else value)
                writer.write_event(event(summary=said, step=point.step, wall_time=(point.time_ns or 0) / 1e9))
            count += 1
        writer.close()
    except BaseException as e:
        # An incomplete run must not be shown, nor block the next try.
        with suppress(OSError, ValueError):
            writer.close()
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(e, OSError):
            raise CommandError(f"{folder}: {e.strerror}") from None
        raise
    return count


def _database(folder: Path) -> tuple[Any, str]:
    """(a client of the database in a folder, the id of the experiment in it that runs belong to)."""
    # MLflow must not report anywhere that a run was exported.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    module = extra("mlflow.tracking", "MLflow's database", "mlflow")
    for name in ("mlflow", "alembic"):
        getLogger(name).setLevel(ERROR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        client = module.MlflowClient(tracking_uri=f"sqlite:///{folder.absolute()}/mlflow.db")
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return client, found.experiment_id
        return client, client.create_experiment(EXPERIMENT, str(folder.absolute() / "artifacts"))
    # Any error of SQLAlchemy or alembic: the file may have another version, or be no database.
    except Exception as e:
        raise CommandError(f"{folder}: {' '.join(str(e).split())}") from None


async def mlflow(run: Run, points: AsyncIterable[Point], folder: Path) -> int:
    """Adds a run to the database in a folder; returns the number of steps."""
    (client, place), entities = _database(folder), import_module("mlflow.entities")
    if client.search_runs([place], f"attributes.run_name = '{run.id}'"):
        raise CommandError(f"{folder} has a run {run.id!r} already; MLflow would show both: choose another folder")
    made = client.create_run(place, run.created_ns // 10**6, {"penstock.kind": run.kind}, run.id).info.run_id
    try:
        count = await _filled(client, entities, made, run.config, points)
    except BaseException:
        # An incomplete run must not be shown, nor block the next try.
        client.delete_run(made)
        raise
    client.set_terminated(made, STATES.get(run.status, "RUNNING"), run.ended_ns and run.ended_ns // 10**6)
    return count


async def _filled(client: Any, entities: Any, made: str, config: Any, points: AsyncIterable[Point]) -> int:
    params = [entities.Param(name, value[:6000]) for name, value in settings(config)]
    for start in range(0, len(params), BATCH // 10):
        client.log_batch(made, params=params[start : start + BATCH // 10])
    count, held = 0, list[Any]()
    async for point in points:
        held += (_metric(entities, point, name, value) for name, value in point.values.items())
        while len(held) >= BATCH:
            client.log_batch(made, metrics=held[:BATCH])
            del held[:BATCH]
        count += 1
    client.log_batch(made, metrics=held)
    return count


def _metric(entities: Any, point: Point, name: str, value: float | None) -> Any:
    number = float("nan") if value is None else value
    # MLflow allows no % and no @ in names.
    return entities.Metric(re.sub("[@%]", "_", name), number, (point.time_ns or 0) // 10**6, point.step)


def settings(config: Any, path: str = "config") -> Iterator[tuple[str, str]]:
    """The leaves of a configuration, each with its dotted path."""
    if not isinstance(config, Mapping):
        yield path, str(config)
        return
    for key, value in cast(Mapping[str, Any], config).items():
        yield from settings(value, key if path == "config" else f"{path}.{key}")
