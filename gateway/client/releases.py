"""The part of the typed client for resources and releases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from penstock.gateway.client.connection import ApiConnection
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.queue import ClaimAnswer, ClaimRequest
from penstock.gateway.model.release import (
    Assignment,
    AssignmentEvidence,
    AssignmentPage,
    AuditTrail,
    AuditTrailEntry,
    Forecast,
    NewRelease,
    Pin,
    PinList,
    Release,
    ReleaseList,
    ReleaseView,
)
from penstock.gateway.model.resource import Need, NeedList, NewVersion, Resource, ResourceList, ResourceView

PAGE = 5000


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
            page = await self.get(path, AssignmentPage, {"after": at, "limit": PAGE})
            seen = {one.number: one for one in page.seen}
            for assignment in page.assignments:
                yield assignment, seen.get(assignment.number)
            if page.next is None:
                return
            at = page.next

    async def pins(self, rollout: str) -> list[Pin]:
        """The versions that a rollout was given."""
        return (await self.get(f"/api/rollouts/{quote(rollout, safe='')}/pins", PinList)).pins
