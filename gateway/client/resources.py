"""The parts of the typed client, one for each resource of the control API; `client` joins them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from penstock.gateway.client.connection import PAGE, ApiConnection
from penstock.gateway.model.base import EMPTY_ACTION, ActionRequest
from penstock.gateway.model.queue import ClaimAnswer, ClaimRequest
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AssignmentPage,
    AuditTrail,
    AuditTrailEntry,
    Delivery,
    DeliveryList,
    Forecast,
    NewRelease,
    Pin,
    PinList,
    Release,
    ReleaseList,
    ReleaseView,
    WebhookList,
    WebhookTest,
    WebhookTestResult,
    WebhookView,
)
from penstock.gateway.model.resource import Need, NeedList, NewVersion, Resource, ResourceList, ResourceView
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
from penstock.gateway.model.state import (
    BudgetPage,
    ForgottenPage,
    ForgottenRollout,
    IndexView,
    PauseRequest,
    RetentionHold,
    RetentionHoldList,
    RetentionStatus,
    SqlAnswer,
    SqlRequest,
    SqlViews,
    UpstreamList,
    UpstreamView,
)
from penstock.gateway.model.tools import ApproveRequest, ServerDefinitions, ServerList, ServerView

if TYPE_CHECKING:
    from penstock.gateway.reading.policy.questions import PolicyAnswer, Question
    from penstock.gateway.reading.policy.report import BacktestCall
    from penstock.gateway.reading.policy.rules import PolicyRule

ASSIGNMENT_PAGE = 5000


class ReleaseClient(ApiConnection):
    """Reads resources and releases, registers versions, starts and steers releases."""

    async def resources(self) -> list[ResourceView]:
        """All resources with their versions, by name."""
        return (await self.resource_list()).resources

    async def resource_list(self) -> ResourceList:
        """All resources, and the numbers of requests that could not be searched for their texts, by reason."""
        return await self.get("/api/resources", ResourceList)

    async def resource(self, name: str) -> ResourceView:
        """One resource with its versions."""
        return await self.get(f"/api/resources/{quote(name, safe='')}", ResourceView)

    async def needed_versions(self, name: str) -> list[Need]:
        """The versions of a resource that are still needed, and by whom."""
        return (await self.get(f"/api/resources/{quote(name, safe='')}/needs", NeedList)).needs

    async def add_version(self, name: str, new: NewVersion) -> Resource:
        """Registers a version of a resource."""
        return await self.post(f"/api/resources/{quote(name, safe='')}", Resource, new)

    async def start_release(self, resource: str, new: NewRelease) -> Release:
        """Starts a release of a resource."""
        return await self.post(f"/api/resources/{quote(resource, safe='')}/releases", Release, new)

    async def releases(self, resource: str | None = None, live: bool = False) -> list[Release]:
        """Releases, newest first; of one resource, or only live ones, if asked."""
        params = ({} if resource is None else {"resource": resource}) | ({"live": "true"} if live else {})
        return (await self.get("/api/releases", ReleaseList, params)).releases

    async def release(self, name: str) -> ReleaseView:
        """A release with its evidence."""
        return await self.get(f"/api/releases/{quote(name, safe='')}", ReleaseView)

    async def forecast(self, name: str) -> Forecast:
        """The forecast for a release with an equal candidate: its length, and how it ends."""
        return await self.get(f"/api/releases/{quote(name, safe='')}/forecast", Forecast)

    async def decide(self, name: str, action: str, decision: ActionRequest) -> Release:
        """Promotes, rolls back (`rollback`), aborts, holds, resumes or approves a release."""
        return await self.post(f"/api/releases/{quote(name, safe='')}/{action}", Release, decision)

    async def claim_rehearsals(self, name: str, request: ClaimRequest) -> ClaimAnswer:
        """Claims runs of a release's rehearsal, as `claim` claims work."""
        return await self.post(f"/api/releases/{quote(name, safe='')}/rehearse", ClaimAnswer, request)

    async def audit(self, name: str) -> list[AuditTrailEntry]:
        """The audit chain of a release, oldest first."""
        return (await self.get(f"/api/releases/{quote(name, safe='')}/audit", AuditTrail)).entries

    async def assignments(
        self, name: str, after: int = 0
    ) -> AsyncIterator[tuple[Assignment, AssignmentEvidence | None]]:
        """The assignments of a release in their order, each with its outcome; None while it is awaited."""
        path, at = f"/api/releases/{quote(name, safe='')}/assignments", after
        while True:
            page = await self.get(path, AssignmentPage, {"after": at, "limit": ASSIGNMENT_PAGE})
            seen = {one.number: one for one in page.seen}
            for assignment in page.assignments:
                yield assignment, seen.get(assignment.number)
            if page.next is None:
                return
            at = page.next

    async def pins(self, rollout: str) -> list[Pin]:
        """The versions that a rollout was given."""
        return (await self.get(f"/api/rollouts/{quote(rollout, safe='')}/pins", PinList)).pins


# The part of the typed client for the index, SQL, retention and budgets.


class IndexClient(ApiConnection):
    """Reads and rebuilds the index, runs SQL, forgets and keeps rollouts, and reads budgets."""

    async def forget(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> ForgottenRollout:
        """Removes a rollout from the tape for good."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/forget", ForgottenRollout, said)

    async def hold_rollout(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> RetentionHold:
        """Keeps a rollout from being forgotten, until the hold is lifted."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/hold", RetentionHold, said)

    async def lift_hold(self, rollout: str, said: ActionRequest = EMPTY_ACTION) -> RetentionHold:
        """Lifts the hold of a rollout."""
        return await self.post(f"/api/rollouts/{quote(rollout, safe='')}/lift_hold", RetentionHold, said)

    async def retention(self) -> RetentionStatus:
        """The rules for how long rollouts stay, and what is still to be deleted of forgotten ones."""
        return await self.get("/api/retention", RetentionStatus)

    async def holds(self) -> list[RetentionHold]:
        """The holds: rollouts that somebody keeps from being forgotten."""
        return (await self.get("/api/retention/holds", RetentionHoldList)).holds

    async def forgotten(self, limit: int | None = None) -> AsyncIterator[ForgottenRollout]:
        """The rollouts that were forgotten, by name."""
        async for one in self.rows("/api/retention/forgotten", ForgottenPage, {}, limit, lambda page: page.forgotten):
            yield one

    async def budgets(self, budget: str | None = None, limit: int = 100) -> BudgetPage:
        """The use of budgets, the fullest first."""
        return await self.get("/api/budgets", BudgetPage, {"budget": budget, "limit": limit})

    async def index(self) -> IndexView:
        """The state of the index, and how far it has read."""
        return await self.get("/api/index", IndexView)

    async def rebuild_index(self, said: ActionRequest = EMPTY_ACTION) -> IndexView:
        """Deletes the index; the gateway makes it anew from the tape."""
        return await self.post("/api/index/rebuild", IndexView, said)

    async def sql(self, asked: SqlRequest) -> SqlAnswer:
        """The rows of a query over the views of the tape."""
        return await self.query("/api/sql", SqlAnswer, asked)

    async def sql_views(self) -> SqlViews:
        """The views that a query may read, with their columns."""
        return await self.get("/api/sql", SqlViews)


# The part of the typed client for the definitions that servers of tools list.


class DefinitionClient(ApiConnection):
    """Reads and approves the definitions that servers of tools list."""

    async def definitions(self) -> list[ServerView]:
        """All servers of tools, by name, without the texts of their definitions."""
        return (await self.get("/api/mcp/definitions", ServerList)).servers

    async def server_definitions(self, name: str) -> ServerView:
        """The definitions that one server lists, with their texts."""
        return await self.get(_path(name), ServerView)

    async def approve_definitions(self, name: str, asked: ApproveRequest) -> ServerDefinitions:
        """Approves the definitions that a server lists."""
        return await self.post(f"{_path(name)}/approve", ServerDefinitions, asked)


def _path(name: str) -> str:
    return f"/api/mcp/definitions/{quote(name, safe='')}"


# The part of the typed client for policies on tool calls.


class PolicyClient(ApiConnection):
    """Tests policies, and reads and answers the tool calls that wait for a person. The modules that read rules are
    imported where they are used, because few clients need them."""

    async def waiting(self) -> list[Question]:
        """Tool calls that wait for a person, the longest wait first."""
        from penstock.gateway.reading.policy.questions import QuestionList

        return (await self.get("/api/policy/waiting", QuestionList)).waiting

    async def answer_waiting(self, question: str, said: PolicyAnswer) -> Question:
        """Lets a waiting tool call run, or refuses it; returns that call."""
        from penstock.gateway.reading.policy.questions import Question

        return await self.post(f"/api/policy/waiting/{quote(question, safe='')}", Question, said)

    async def try_policy(self, rules: Sequence[PolicyRule], filter: str = "") -> AsyncIterator[BacktestCall]:
        """The effect that rules would have had on recorded tool calls, newest first."""
        from penstock.gateway.reading.policy.report import BacktestPage, PolicyTest

        cursor: str | None = None
        while True:
            asked = PolicyTest(rules=list(rules), filter=filter, cursor=cursor)
            page = await self.query("/api/policy/test", BacktestPage, asked)
            for call in page.calls:
                yield call
            if (cursor := page.next) is None:
                return


# The part of the typed client for upstreams.


class UpstreamClient(ApiConnection):
    """Reads, pauses and opens upstreams."""

    async def upstreams(self) -> list[UpstreamView]:
        """All upstreams with their state, by name."""
        return (await self.upstream_list()).upstreams

    async def upstream_list(self) -> UpstreamList:
        """All upstreams, by name, and the routes to them."""
        return await self.get("/api/upstreams", UpstreamList)

    async def pause_upstream(self, name: str, bound_s: float, said: ActionRequest = EMPTY_ACTION) -> UpstreamView:
        """Makes calls to an upstream wait; after `bound_s` seconds they are refused until it is opened or paused
        anew."""
        asked = PauseRequest(bound_s=bound_s, **said.model_dump(exclude_unset=True))
        return await self.post(f"{_upstreams_path(name)}/pause", UpstreamView, asked)

    async def open_upstream(self, name: str, said: ActionRequest = EMPTY_ACTION) -> UpstreamView:
        """Ends the pause of an upstream: serves the calls that wait for it, and all later ones."""
        return await self.post(f"{_upstreams_path(name)}/open", UpstreamView, said)


def _upstreams_path(name: str) -> str:
    return f"/api/upstreams/{quote(name, safe='')}"


# The part of the typed client for webhooks.


class WebhookClient(ApiConnection):
    """Reads webhooks and their deliveries, and sends tests."""

    async def webhooks(self) -> list[WebhookView]:
        """The webhooks in the gateway's configuration."""
        return (await self.get("/api/webhooks", WebhookList)).webhooks

    async def deliveries(self, webhook: str, limit: int = 100) -> list[Delivery]:
        """The deliveries to a webhook, made and due, newest first."""
        return (await self.get(f"{_webhooks_path(webhook)}/deliveries", DeliveryList, {"limit": limit})).deliveries

    async def test_webhook(self, webhook: str) -> WebhookTestResult:
        """Sends a test to a webhook, and returns its answer."""
        return await self.post(f"{_webhooks_path(webhook)}/test", WebhookTestResult, WebhookTest())


def _webhooks_path(webhook: str) -> str:
    return f"/api/webhooks/{quote(webhook, safe='')}"


# The part of the typed client for training runs: for trainers and for readers.
#
#     run = await client.start_run(NewRun(id="grpo-7", kind="grpo", config={...}, steps=400))
#     await client.add_points(run.id, [Point(step=0, values={"reward": 0.31})])
#     await client.add_run_events(run.id, [RunEvent(text="published policy v12", time_ns=time.time_ns())])
#     await client.finish_run(run.id, RunEnd(status="succeeded"))
#
# Each request may be sent again after a lost answer; see `gateway.model.run`.


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
        return await self.post(f"{_runs_path(run)}/metrics", RunHead, request)

    async def add_run_events(self, run: str, events: Sequence[RunEvent]) -> int:
        """Adds events; returns how many were new. Events that have a time may be sent again."""
        request = RunEventsRequest(events=list(events))
        return (await self.post(f"{_runs_path(run)}/events", RunEventsAnswer, request)).kept

    async def change_run(self, run: str, change: RunChange) -> RunHead:
        """Reports the state of a run, and what it has made."""
        return await self.post(_runs_path(run), RunHead, change)

    async def finish_run(self, run: str, end: RunEnd) -> RunHead:
        """Ends a run; the same end may be sent again."""
        return await self.post(f"{_runs_path(run)}/finish", RunHead, end)

    async def runs(
        self, kind: RunKind | None = None, status: RunStatus | None = None, limit: int | None = None
    ) -> AsyncIterator[RunHead]:
        """Training runs, newest first; all of them or up to `limit`."""
        params = {"kind": kind, "status": status}
        async for run in self.rows("/api/runs", RunPage, params, limit, lambda page: page.runs):
            yield run

    async def run(self, run: str) -> Run:
        """A training run with its configuration."""
        return await self.get(_runs_path(run), Run)

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
        return (await self.get(f"{_runs_path(run)}/metrics", CurveList, params)).curves

    async def points(self, run: str, since_step: int = 0) -> AsyncIterator[Point]:
        """Every point exactly, by step."""
        at: int | None = since_step
        while at is not None:
            page = await self.get(f"{_runs_path(run)}/points", PointPage, {"since_step": at, "limit": PAGE})
            for point in page.points:
                yield point
            at = page.next

    async def run_events(self, run: str, limit: int | None = None) -> AsyncIterator[RunEvent]:
        """The events of a run, newest first; all of them or up to `limit`."""
        async for event in self.rows(f"{_runs_path(run)}/events", RunEventPage, {}, limit, lambda page: page.events):
            yield event


def _runs_path(run: str) -> str:
    return f"/api/runs/{quote(run, safe='')}"


# Reads the whole history of a release from a gateway.


class ReleaseHistory(NamedTuple):
    """The audit chain of a release, its assignments, and their outcomes."""

    audit: list[AuditTrailEntry]
    assigned: list[Assignment]
    seen: list[AssignmentEvidence]


async def read_history(client: ReleaseClient, release: str, after: int = 0) -> ReleaseHistory:
    """The chain, and the assignments after number `after` with their outcomes."""
    audit = await client.audit(release)
    rows = [row async for row in client.assignments(release, after)]
    return ReleaseHistory(audit, [one for one, _ in rows], [one for _, one in rows if one is not None])
