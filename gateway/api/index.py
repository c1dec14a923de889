"""The control API of the index: its state, and rebuilding it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from penstock.gateway.api.context import CONTROL, Control
from penstock.gateway.api.guard import ApiError, answer
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.index import IndexView


async def get_index(request: web.Request) -> web.Response:
    """How the index of the tape is: whether filters answer from it, and else why; how far it has read; its size."""
    return answer(await asyncio.to_thread(_link(request.app[CONTROL]).view))


async def rebuild(control: Control, ids: Ids, asked: ActionRequest) -> IndexView:
    """Delete the index and make it anew from the tape. Until it has caught up filters scan."""
    link = _link(control)
    view = await asyncio.to_thread(link.view)
    if view.status not in ("ready", "reading", "broken"):
        raise ApiError(409, f"there is no index to make anew: {view.reason}", "index", view.status)
    await control.audit_log.record(asked, "rebuild_index", "index")
    return await asyncio.to_thread(link.rebuild)


def _link(control: Control) -> IndexLink:
    assert control.index is not None
    return control.index


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/index", "index", "The index of the tape", IndexView, get_index),
    ApiRoute(
        "POST", "/api/index/rebuild", "rebuild_index", "Make the index anew", IndexView, rebuild, body=ActionRequest,
        errors=(409,),
    ),
)  # fmt: skip
"""This part of the API."""
