"""The part of the typed client for training runs: for trainers and for readers.

    run = await client.start_run(NewRun(id="grpo-7", kind="grpo", config={...}, steps=400))
    await client.add_points(run.id, [Point(step=0, values={"reward": 0.31})])
    await client.add_run_events(run.id, [RunEvent(text="published policy v12", time_ns=time.time_ns())])
    await client.finish_run(run.id, RunEnd(status="succeeded"))

Each request may be sent again after a lost answer; see `gateway.model.run`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

from penstock.gateway.client.connection import PAGE, ApiConnection
from penstock.gateway.model.run import (
    Curve,
    CurveList,
    NewRun,
    Point,
    PointPage,
    PointsRequest,
    Run,
    RunChange,
    RunEnd,
    RunEvent,
    RunEventPage,
    RunEventsAnswer,
    RunEventsRequest,
    RunHead,
    RunKind,
    RunPage,
    RunStatus,
)


class RunClient(ApiConnection):
    """Reports training runs, and reads them."""

    async def start_run(self, new: NewRun) -> Run:
        """Starts a run; the same request again returns the run that exists under its id."""
        return await self.post("/api/runs", Run, new)

    async def add_points(
        self, run: str, points: Sequence[Point], since_step: int | None = None, resumed: int | None = None
    ) -> RunHead:
        """Adds points, at most `MOST_POINTS`; an empty list is a sign of life. `since_step`, `resumed`: see
        `PointsRequest`."""
        request = PointsRequest(points=list(points), since_step=since_step, resumed=resumed)
        return await self.post(f"{_path(run)}/metrics", RunHead, request)

    async def add_run_events(self, run: str, events: Sequence[RunEvent]) -> int:
        """Adds events; returns how many were new. Events that have a time may be sent again."""
        request = RunEventsRequest(events=list(events))
        return (await self.post(f"{_path(run)}/events", RunEventsAnswer, request)).kept

    async def change_run(self, run: str, change: RunChange) -> RunHead:
        """Reports the state of a run, and what it has made."""
        return await self.post(_path(run), RunHead, change)

    async def finish_run(self, run: str, end: RunEnd) -> RunHead:
        """Ends a run; the same end may be sent again."""
        return await self.post(f"{_path(run)}/finish", RunHead, end)

    async def runs(
        self, kind: RunKind | None = None, status: RunStatus | None = None, limit: int | None = None
    ) -> AsyncIterator[RunHead]:
        """Training runs, newest first; all of them or up to `limit`."""
        params = {"kind": kind, "status": status}
        async for run in self.rows("/api/runs", RunPage, params, limit, lambda page: page.runs):
            yield run

    async def run(self, run: str) -> Run:
        """A training run with its configuration."""
        return await self.get(_path(run), Run)

    async def curves(
        self,
        run: str,
        names: Sequence[str] | None = None,
        since_step: int | None = None,
        until_step: int | None = None,
        max_points: int | None = None,
    ) -> list[Curve]:
        """Metrics over the steps, in at most `max_points` buckets each; `names` may hold `*` and `?`."""
        params = {
            "name": None if names is None else ",".join(names),
            "since_step": since_step,
            "until_step": until_step,
            "max_points": max_points,
        }
        return (await self.get(f"{_path(run)}/metrics", CurveList, params)).curves

    async def points(self, run: str, since_step: int = 0) -> AsyncIterator[Point]:
        """Every point exactly, by step."""
        at: int | None = since_step
        while at is not None:
            page = await self.get(f"{_path(run)}/points", PointPage, {"since_step": at, "limit": PAGE})
            for point in page.points:
                yield point
            at = page.next

    async def run_events(self, run: str, limit: int | None = None) -> AsyncIterator[RunEvent]:
        """The events of a run, newest first; all of them or up to `limit`."""
        async for event in self.rows(f"{_path(run)}/events", RunEventPage, {}, limit, lambda page: page.events):
            yield event


def _path(run: str) -> str:
    return f"/api/runs/{quote(run, safe='')}"
