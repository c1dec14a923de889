"""The control API of retention: forgetting rollouts, keeping them, and the state of deletion."""

from __future__ import annotations

import asyncio

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import answer, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.base import ID_PATTERN, Noun
from penstock.gateway.model.retention import ForgottenPage, RetentionHoldList, RetentionStatus
from penstock.gateway.model.retention_records import ForgottenRollout, RetentionHold
from penstock.gateway.tape.retention.service import RetentionService


class ForgottenQuery(Noun):
    """Parameters of the list of what was forgotten."""

    cursor: str | None = Field(default=None, pattern=ID_PATTERN)
    """Where the page begins: `next` of the page before."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""


async def forget(control: Control, ids: Ids, asked: ActionRequest) -> ForgottenRollout:
    """Take a rollout off the tape for good: what it was given, its attempts, calls and rewards, out of the file and out
    of the index. It is out of sight with the answer; `GET /api/retention` says when nothing is left. A rollout that
    runs, that somebody keeps, or that a live release still has to count is refused. Its name and the time stay, and so
    does what releases have counted of it."""
    return await _retention(control).forget(ids["rid"], asked)


async def hold(control: Control, ids: Ids, asked: ActionRequest) -> RetentionHold:
    """Keep a rollout, whatever the rules of retention say, until the hold is lifted."""
    return await _retention(control).hold(ids["rid"], asked)


async def lift(control: Control, ids: Ids, asked: ActionRequest) -> RetentionHold:
    """Lift the hold of a rollout; how it was kept."""
    return await _retention(control).lift(ids["rid"], asked)


async def get_retention(request: web.Request) -> web.Response:
    """How long rollouts stay here, how much of its file the tape uses, and what is still to be deleted of those that
    were forgotten."""
    control = request.app[CONTROL]
    retention = _retention(control)
    in_index, why = await asyncio.to_thread(_in_index, control.index, retention.hidden_at)
    return answer(await asyncio.to_thread(retention.status, in_index, why))


async def get_holds(request: web.Request) -> web.Response:
    """The rollouts that somebody keeps, by name: who, and why."""
    return answer(await asyncio.to_thread(_retention(request.app[CONTROL]).holds))


async def get_forgotten(request: web.Request) -> web.Response:
    """The rollouts that were forgotten, by name: when, and why."""
    asked = query_of(request, ForgottenQuery)
    return answer(await asyncio.to_thread(_retention(request.app[CONTROL]).forgotten, asked.cursor, asked.limit))


def _in_index(link: IndexLink | None, hidden_at: int) -> tuple[int | None, str]:
    """(forgotten rollouts that are still in files of the index, None while that is not known; why they are not
    removed). `hidden_at`: the change up to which the index must have read."""
    if link is None:
        return 0, ""
    view = link.view()
    if view.status == "ready" and view.cursor >= hidden_at:
        return view.forgotten, ""
    if view.status not in ("small", "off", "missing"):
        return None, ""
    if not link.has_files:
        return 0, ""
    return (
        None,
        f"there are files of an index that nobody keeps ({view.reason}): delete the directory index of the data",
    )


def _retention(control: Control) -> RetentionService:
    assert control.retention is not None
    return control.retention


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        "POST", "/api/rollouts/{rid}/forget", "forget", "Forget a rollout", ForgottenRollout, forget,
        body=ActionRequest, errors=(404, 409), least="admin",
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/hold", "hold_rollout", "Keep a rollout", RetentionHold, hold, body=ActionRequest,
        errors=(404,)
    ),
    ApiRoute(
        "POST", "/api/rollouts/{rid}/lift_hold", "lift_hold", "Lift the hold of a rollout", RetentionHold, lift,
        body=ActionRequest, errors=(404,), least="admin",
    ),
    ApiRoute("GET", "/api/retention", "retention", "How long rollouts stay", RetentionStatus, get_retention),
    ApiRoute("GET", "/api/retention/holds", "holds", "Rollouts that somebody keeps", RetentionHoldList, get_holds),
    ApiRoute(
        "GET", "/api/retention/forgotten", "forgotten", "Rollouts that were forgotten", ForgottenPage, get_forgotten,
        query=ForgottenQuery,
    ),
)  # fmt: skip
"""This part of the API."""
