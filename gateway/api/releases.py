"""The control API of resources and releases: operations that change them, and reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import get_args

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.guard import CONTROL, ApiError, Control, answer, id_of, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.api.rollouts import worker_claim
from penstock.gateway.config import ConfigError
from penstock.gateway.model.base import ActionRequest, Id, Noun
from penstock.gateway.model.queue import ClaimAnswer, ClaimRequest
from penstock.gateway.model.release import (
    AssignmentPage,
    AuditTrail,
    Forecast,
    NewRelease,
    PinList,
    Release,
    ReleaseList,
    ReleaseView,
)
from penstock.gateway.model.resource import NeedList, NewVersion, Resource, ResourceList, ResourceView, UnreadReason
from penstock.gateway.releases.transitions import PERSON_CHANGES


class ReleasesQuery(Noun):
    """Parameters of the list of releases."""

    resource: Id | None = None
    """Only those of this resource."""
    live: bool = False
    """Only those that can still change what an agent gets."""


class AssignmentsQuery(Noun):
    """Parameters of a page of assignments."""

    after: int = Field(default=0, ge=0, lt=2**32)
    """The number after which the page begins."""
    limit: int = Field(default=1000, ge=1, le=10_000)
    """How many at most."""


async def add_version(control: Control, ids: Ids, asked: NewVersion) -> Resource:
    """Register a version of a resource. The first one is stable at once; every other is tried by a release. Versions
    never change: the same content again is answered with the version that has it, and 409 says that a name is taken."""
    return await control.releases.add_version(ids["resource"], asked)


async def start_release(control: Control, ids: Ids, asked: NewRelease) -> Release:
    """Start a release of a resource: its candidate is checked, replayed and shadowed as the policy says, then new
    rollouts are assigned to it. 409 when another release is live for the same calls."""
    try:
        return await control.releases.begin(ids["resource"], asked)
    except ConfigError as error:
        raise ApiError(400, f"policy: {error}", "policy") from None


async def rehearse(control: Control, ids: Ids, asked: ClaimRequest) -> ClaimAnswer:
    """Take runs of a release's rehearsal: recorded tasks that the agent does again. Its calls go to the address of the
    claim, where its tools are played. A run is kept by heartbeats and finished like work from the queue. When there is
    nothing to do yet the answer waits up to `wait_s`; `queue` is `draining` when there will be nothing more."""
    claimed, more, waiting = await control.rehearsals.claim(ids["release"], asked, control.dispatcher)
    claims = [worker_claim(control, one) for one in claimed]
    return ClaimAnswer(claims=claims, queue="open" if more else "draining", waiting=waiting)


def decision(action: str) -> Callable[[Control, Ids, ActionRequest], Awaitable[Release]]:
    """The operation by which a person acts on a release. `action`: key of `DECISIONS`."""

    async def decide(control: Control, ids: Ids, asked: ActionRequest) -> Release:
        return await control.releases.decide(ids["release"], action, asked)

    decide.__doc__ = DECISIONS[action]
    return decide


DECISIONS = {
    "promote": "Make the candidate the stable version now, whatever the evidence says. Rollouts keep what they have.",
    "rollback": "Send every new call to the stable version, also those of rollouts on the candidate: these are marked "
    "as mixed.",
    "abort": "End a release: no new rollout gets the candidate; those that have it keep it.",
    "hold": "Stop a release where it is: no new rollout takes part.",
    "resume": "Go on with a release that is held.",
    "approve": "Let a release leave the stage of its canary that waits for a person.",
}
"""Actions of a person on a release, with their descriptions."""
assert DECISIONS.keys() == PERSON_CHANGES.keys()


async def get_resources(request: web.Request) -> web.Response:
    """All resources with their versions, by name."""
    control = request.app[CONTROL]
    misses = (await control.team.figures()).prompt_misses
    unread = {why: count for why in get_args(UnreadReason) if (count := misses[(why,)])}
    return answer(ResourceList(resources=await asyncio.to_thread(_resources, control), unread=unread))


async def get_resource(request: web.Request) -> web.Response:
    """One resource with its versions."""
    control, name = request.app[CONTROL], id_of(request, "resource")
    found = {one.name: one for one in await asyncio.to_thread(_resources, control)}
    if name not in found:
        raise _no_resource(name)
    return answer(found[name])


def _no_resource(name: str) -> ApiError:
    message = f"there is no resource {name!r}; `penstock resource list` lists them"
    return ApiError(404, message, "resource", name)


async def get_needs(request: web.Request) -> web.Response:
    """The versions of a resource that something needs: the stable version, those of live releases, and those that a
    rollout which may still call is pinned to. A version that is not in the list may be taken from its server."""
    releases, name = request.app[CONTROL].releases, id_of(request, "resource")
    if releases.reader.resource(name) is None:
        raise _no_resource(name)
    return answer(NeedList(needs=await asyncio.to_thread(releases.needs, name)))


def _resources(control: Control) -> list[ResourceView]:
    reader = control.releases.reader
    live, found = [release for release in reader.releases() if release.live], reader.resources()
    coverage = reader.coverage(found)
    return [
        ResourceView(
            name=name,
            kind=versions[0].kind,
            stable=stable,
            versions=versions,
            releases=[release.id for release in live if name in release.resources],
            coverage=coverage.get(name),
        )
        for name, (stable, versions) in sorted(found.items())
    ]


async def get_releases(request: web.Request) -> web.Response:
    """The releases of the tape, newest first."""
    control, asked = request.app[CONTROL], query_of(request, ReleasesQuery)
    found = await asyncio.to_thread(control.releases.reader.releases)
    kept = [
        one
        for one in found
        if (asked.resource is None or asked.resource in one.resources) and (one.live or not asked.live)
    ]
    return answer(ReleaseList(releases=kept))


async def get_release(request: web.Request) -> web.Response:
    """One release with what its evidence says now."""
    control = request.app[CONTROL]
    found: ReleaseView = await asyncio.to_thread(control.releases.view, _release(request))
    return answer(found)


async def get_forecast(request: web.Request) -> web.Response:
    """The time and the rollouts that a release is likely to take until it is decided, if its candidate is equal:
    simulated with the rollouts of the stable version before its start."""
    release = _release(request)
    control = request.app[CONTROL]
    return answer(await control.heavy.run(control.releases.forecast, release))


async def get_audit(request: web.Request) -> web.Response:
    """Every change of a release: who, why, and the evidence, each linked to the one before by its hash."""
    release = _release(request)
    return answer(AuditTrail(entries=await asyncio.to_thread(request.app[CONTROL].releases.reader.audit, release.id)))


async def get_assignments(request: web.Request) -> web.Response:
    """Rollouts that take part in a release, in the order of their assignment, with what was seen of each."""
    asked, release = query_of(request, AssignmentsQuery), _release(request)
    read = request.app[CONTROL].releases.reader.assignments
    assigned, seen = await asyncio.to_thread(read, release.id, asked.after, asked.limit)
    more = assigned[-1].number if assigned and assigned[-1].number < release.assigned else None
    return answer(AssignmentPage(assignments=assigned, seen=seen, next=more))


async def get_pins(request: web.Request) -> web.Response:
    """The versions that a rollout was given."""
    return answer(PinList(pins=request.app[CONTROL].releases.reader.pins_under(id_of(request, "rid"))))


def _release(request: web.Request) -> Release:
    name = id_of(request, "release")
    found = request.app[CONTROL].releases.reader.release(name)
    if found is None:
        raise ApiError(404, f"there is no release {name!r}; `penstock release list` lists them", "release", name)
    return found


_RELEASE = "/api/releases/{release}"

ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/resources", "resources", "What releases can change", ResourceList, get_resources),
    ApiRoute("GET", "/api/resources/{resource}", "resource", "One resource", ResourceView, get_resource),
    ApiRoute("GET", "/api/resources/{resource}/needs", "needs", "Who needs a version", NeedList, get_needs),
    ApiRoute(
        "POST", "/api/resources/{resource}", "add_version", "Register a version",
        Resource, add_version, body=NewVersion, errors=(409,),
    ),
    ApiRoute(
        "POST", "/api/resources/{resource}/releases", "start_release", "Start a release",
        Release, start_release, body=NewRelease, errors=(409,),
    ),
    ApiRoute("GET", "/api/releases", "releases", "List releases", ReleaseList, get_releases, query=ReleasesQuery),
    ApiRoute("GET", _RELEASE, "release", "One release", ReleaseView, get_release),
    ApiRoute("GET", f"{_RELEASE}/forecast", "forecast", "What it is likely to take", Forecast, get_forecast),
    ApiRoute("GET", f"{_RELEASE}/audit", "audit", "Why it is where it is", AuditTrail, get_audit),
    ApiRoute(
        "GET", f"{_RELEASE}/assignments", "assignments", "Who takes part",
        AssignmentPage, get_assignments, query=AssignmentsQuery,
    ),
    *(
        ApiRoute(
            "POST", f"{_RELEASE}/{action}", action, f"{action.capitalize()} a release",
            Release, decision(action), body=ActionRequest, errors=(409,),
        )
        for action in DECISIONS
    ),
    ApiRoute(
        "POST", f"{_RELEASE}/rehearse", "rehearse", "Take runs of a rehearsal",
        ClaimAnswer, rehearse, body=ClaimRequest, errors=(409,), waits=True,
    ),
    ApiRoute("GET", "/api/rollouts/{rid}/pins", "pins", "What a rollout was given", PinList, get_pins),
)  # fmt: skip
"""This part of the API."""
