"""The control API of training runs: operations that change them, and reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from math import isnan

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, id_of, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.pagination import Mark, Walk, decode_cursor, encode_cursor, page
from penstock.gateway.model.base import Noun
from penstock.gateway.model.run import (
    MOST_READ,
    CurveList,
    NewRun,
    Point,
    PointPage,
    PointsRequest,
    Run,
    RunChange,
    RunEnd,
    RunEventPage,
    RunEventsAnswer,
    RunEventsRequest,
    RunHead,
    RunKind,
    RunPage,
    RunStatus,
    Step,
    status_at,
)
from penstock.gateway.work.curves import curve
from penstock.gateway.work.runs import RunService


class RunsQuery(Noun):
    """Parameters of the list of runs."""

    kind: RunKind | None = None
    """Only those that learn like this."""
    status: RunStatus | None = None
    """Only those that stand here."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""
    cursor: str | None = None
    """The `next` of the page before."""


class CurvesQuery(Noun):
    """Parameters of the metrics of a run."""

    name: str | None = Field(default=None, max_length=4096)
    """Which metrics, with commas between; `*` and `?` are wildcards. All when not given."""
    since_step: Step = 0
    """The first step."""
    until_step: Step | None = None
    """The last step."""
    max_points: int = Field(default=500, ge=1, le=10_000)
    """How many buckets a metric may have."""


class PointsQuery(Noun):
    """Parameters of a page of points."""

    since_step: Step = 0
    """The step from which on."""
    limit: int = Field(default=1000, ge=1, le=1000)
    """How many steps at most."""


class RunEventsQuery(Noun):
    """Parameters of a page of events."""

    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""
    cursor: str | None = None
    """The `next` of the page before."""


# -- changes -----------------------------------------------------------------------------------------------------------


async def start_run(control: Control, ids: Ids, asked: NewRun) -> Run:
    """Start a training run. Sending the same again under its id starts nothing twice; 409 says that the id is taken by
    another one."""
    return await control.runs.do(lambda runs, now: runs.start(asked, now))


async def change_run(control: Control, ids: Ids, asked: RunChange) -> RunHead:
    """Say how a run stands: a message, how many steps are planned, versions of resources that it has made, and the
    candidates of one that searches."""
    return await control.runs.do(lambda runs, now: runs.change(ids["run"], asked, now))


async def finish_run(control: Control, ids: Ids, asked: RunEnd) -> RunHead:
    """End a run. The same end may be sent again; another one is refused with 409."""
    return await control.runs.do(lambda runs, now: runs.finish(ids["run"], asked, now))


async def report_points(control: Control, ids: Ids, asked: PointsRequest) -> RunHead:
    """Report the values of metrics at steps. The same may be sent again: of a metric at a step the newest value is
    kept. With `since_step` a trainer that was started again supersedes the points of that step and later. A value that
    is no finite number (null, NaN or infinite) is kept as null. No points at all is a sign of life."""
    return await control.runs.do(lambda runs, now: runs.add_points(ids["run"], asked, now))


async def add_run_events(control: Control, ids: Ids, asked: RunEventsRequest) -> RunEventsAnswer:
    """Add events to a run: lines for a person. One that comes with its time may be sent again and is kept once."""
    kept = await control.runs.do(lambda runs, now: runs.add_events(ids["run"], asked.events, now))
    return RunEventsAnswer(kept=kept)


# -- reads -------------------------------------------------------------------------------------------------------------


async def get_runs(request: web.Request) -> web.Response:
    """Training runs, newest first, without their configurations."""
    runs, asked = request.app[CONTROL].runs, query_of(request, RunsQuery)
    found = await page(_runs_walk(runs, asked), decode_cursor("runs", asked.cursor), asked.limit)
    return answer(RunPage(runs=found.rows, next=encode_cursor("runs", found.mark), scanned=found.scanned))


def _runs_walk(runs: RunService, asked: RunsQuery) -> Walk[RunHead]:
    def walk(mark: Mark | None) -> Iterator[tuple[Mark, RunHead | None]]:
        now = runs.now_ns()
        for position, run in runs.reader.run_heads(int(mark[0]) if mark else None):
            run.status = status_at(run, now)
            wanted = asked.kind in (None, run.kind) and asked.status in (None, run.status)
            yield (position,), run if wanted else None

    return walk


async def get_run(request: web.Request) -> web.Response:
    """One training run, with its status as of now; 404 when there is none of this name."""
    runs, name = request.app[CONTROL].runs, id_of(request, "run")
    run = runs.reader.run(name)
    if run is None:
        raise _missing(name)
    run.status = status_at(run, runs.now_ns())
    return answer(run)


async def get_curves(request: web.Request) -> web.Response:
    """Metrics of a run over its steps. Where there are more points than `max_points`, they come in buckets of equal
    width in steps that say the lowest, the highest and the mean of what is in them."""
    asked, run, reader = query_of(request, CurvesQuery), _head(request), request.app[CONTROL].runs.reader
    names = _named(run, asked.name)
    if len(names) * asked.max_points > MOST_READ:
        message = (
            f"max_points: {len(names)} metrics of up to {asked.max_points:,} points; ask for {MOST_READ:,} at most"
        )
        raise ApiError(400, message, "max_points", str(asked.max_points), (f"1 to {MOST_READ // len(names)}",))

    def read() -> CurveList:
        every = zip(names, reader.run_series(run.id, names, asked.since_step, asked.until_step), strict=True)
        made = [curve(name, found, asked.since_step, asked.until_step, asked.max_points) for name, found in every]
        return CurveList.model_construct(run=run.id, curves=made)

    return answer(await asyncio.to_thread(read))


def _named(run: RunHead, asked: str | None) -> Sequence[str]:
    """The requested metrics; raises `ApiError` for a pattern that matches none."""
    patterns = ["*"] if asked is None else [pattern for pattern in re.split(r"[,\s]+", asked) if pattern]
    for pattern in patterns if asked is not None else ():
        if not any(fnmatchcase(name, pattern) for name in run.metrics):
            message = f"run {run.id!r} has no metric {pattern!r}"
            raise ApiError(404, message, "name", pattern, run.metrics)
    return [name for name in run.metrics if any(fnmatchcase(name, pattern) for pattern in patterns)]


async def get_points(request: web.Request) -> web.Response:
    """Points of a run exactly as they were reported, by step."""
    asked, run, reader = query_of(request, PointsQuery), _head(request), request.app[CONTROL].runs.reader

    def read() -> PointPage:
        rows = reader.run_points(run.id, asked.since_step, asked.limit)
        points = [Point.model_construct(step=r.step, time_ns=r.time_ns, values=_nulls(r.values)) for r in rows]
        return PointPage.model_construct(points=points, next=rows[-1].step + 1 if len(rows) == asked.limit else None)

    return answer(await asyncio.to_thread(read))


def _nulls(values: dict[str, float]) -> dict[str, float | None]:
    return {name: None if isnan(value) else value for name, value in values.items()}


async def get_run_events(request: web.Request) -> web.Response:
    """Events of a run, newest first."""
    asked, run, reader = query_of(request, RunEventsQuery), _head(request), request.app[CONTROL].runs.reader
    mark = decode_cursor("run_events", asked.cursor)
    before = None if mark is None else (int(mark[0]), int(mark[1]) % 2**56)
    found = await asyncio.to_thread(reader.run_events, run.id, before, asked.limit)
    after = found[-1][0] if len(found) == asked.limit else None
    events = [event for _, event in found]
    return answer(RunEventPage(events=events, next=encode_cursor("run_events", after), scanned=len(found)))


def _head(request: web.Request) -> RunHead:
    name = id_of(request, "run")
    run = request.app[CONTROL].runs.reader.run_head(name)
    if run is None:
        raise _missing(name)
    return run


def _missing(name: str) -> ApiError:
    return ApiError(404, f"there is no run {name!r}; `penstock runs list` lists them", "run", name)


_RUN = "/api/runs/{run}"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/runs", "runs", "List training runs", RunPage, get_runs, query=RunsQuery),
    ApiRoute("POST", "/api/runs", "start_run", "Start a training run", Run, start_run, body=NewRun, errors=(409,)),
    ApiRoute("GET", _RUN, "run", "One training run", Run, get_run),
    ApiRoute("POST", _RUN, "change_run", "Say how a run stands", RunHead, change_run, body=RunChange),
    ApiRoute("GET", f"{_RUN}/metrics", "curves", "Metrics over the steps", CurveList, get_curves, query=CurvesQuery),
    ApiRoute(
        "POST", f"{_RUN}/metrics", "report", "Report metrics",
        RunHead, report_points, body=PointsRequest, errors=(409,),
    ),
    ApiRoute("GET", f"{_RUN}/points", "points", "Points of a run, exactly", PointPage, get_points, query=PointsQuery),
    ApiRoute(
        "GET", f"{_RUN}/events", "run_events", "What happened in a run",
        RunEventPage, get_run_events, query=RunEventsQuery,
    ),
    ApiRoute(
        "POST", f"{_RUN}/events", "add_run_events", "Add events to a run",
        RunEventsAnswer, add_run_events, body=RunEventsRequest,
    ),
    ApiRoute(
        "POST", f"{_RUN}/finish", "finish_run", "End a run",
        RunHead, finish_run, body=RunEnd, errors=(409,),
    ),
)  # fmt: skip
"""This part of the API."""
