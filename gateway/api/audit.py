"""The control API of the caller's role, and of the audit log."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from aiohttp import web
from pydantic import Field

from penstock.gateway.api.context import CONTROL
from penstock.gateway.api.guard import answer, query_of
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import Mark, decode_cursor, encode_cursor, page
from penstock.gateway.model.answers import AuditPage
from penstock.gateway.model.audit import AuditEntry, Caller
from penstock.gateway.model.base import Noun
from penstock.gateway.traffic.calls.auth import credentials


class AuditQuery(Noun):
    """Parameters of the audit log."""

    cursor: str | None = Field(default=None, max_length=1000)
    """Where the page begins: `next` of the page before."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""


async def get_caller(request: web.Request) -> web.Response:
    """What the gateway takes the client for: whether its key may change things, or only read. Without keys everybody
    may change everything."""
    control = request.app[CONTROL]
    # The guard has refused callers without a role.
    found = control.auth.holder(list(credentials(request.headers)))
    role, key = ("read", "") if found is None else (found.role, found.name)
    return answer(Caller(role=role, key=key, version=version("penstock-gateway"), started_ns=control.started_ns))


async def get_audit_log(request: web.Request) -> web.Response:
    """What people, and programs in their place, have changed, newest first: who, what, and why, as each request said.
    What workers report of their work is not in it."""
    log, asked = request.app[CONTROL].audit_log, query_of(request, AuditQuery)

    def walk(mark: Mark | None) -> Iterator[tuple[Mark, AuditEntry | None]]:
        for entry in log.entries(int(mark[0]) if mark else None):
            yield (entry.number,), entry

    found = await page(walk, decode_cursor("audit_log", asked.cursor), asked.limit)
    return answer(AuditPage(entries=found.rows, next=encode_cursor("audit_log", found.mark), scanned=found.scanned))


ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute("GET", "/api/whoami", "whoami", "What this key may do", Caller, get_caller),
    ApiRoute("GET", "/api/audit", "audit_log", "Who changed what", AuditPage, get_audit_log, query=AuditQuery),
)
"""This part of the API."""
