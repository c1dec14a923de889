"""Checks every request to the control API before its handler, and completes its answer after it.

Before: without an admin key the gateway trusts every client on its loopback port, so the Host header must name the
loopback, and so must Origin if there is one. That refuses web pages, including those that rebind their own name to
127.0.0.1. Then the key is checked: its role must be the one that the route needs, or a higher one; agent tokens never
pass. After: every error becomes one shape of JSON, and every answer carries the headers that keep browsers from
guessing, framing or caching it. This module also reads parameters and bodies through pydantic, for the same errors.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, Final, Literal, Protocol, TypeVar
from urllib.parse import unquote

from aiohttp import web
from multidict import CIMultiDict
from pydantic import BaseModel, Field, ValidationError

from penstock.gateway.api import compression
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.pagination import (
    CursorError,
    HeavyReads,
    Mark,
    RolloutCosts,
    TapeSource,
    decode_cursor,
    encode_cursor,
    page,
)
from penstock.gateway.config import RouteSettings
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.index.sql.runner import SqlRunner
from penstock.gateway.followers.webhooks import WebhookService
from penstock.gateway.model.answers import AuditEntry, AuditPage, Caller, ErrorAnswer, Problem
from penstock.gateway.model.base import CALL, ID_PATTERN, ROLES, Noun, Role
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.prices import Prices
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.toml import sentence
from penstock.gateway.reading.filters import QueryError
from penstock.gateway.reading.policy.policy import ToolPolicy
from penstock.gateway.reading.policy.questions import QuestionQueue
from penstock.gateway.releases.driver import Driver
from penstock.gateway.tape.retention import RetentionService
from penstock.gateway.tape.store.audit_log import AuditLog
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.tools.definition_enforcement import DefinitionService
from penstock.gateway.traffic.budgets.service import Budgets
from penstock.gateway.traffic.calls.admission import Auth, credentials, is_token
from penstock.gateway.traffic.trials.rehearsal import Rehearsals
from penstock.gateway.wire.dialects.loose_json import MOST_OBJECTS, MOST_VALUES, is_bulky
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.runs import RunService

# The services that handlers use: small protocols (tests bring their own) and one application key.


class Readiness(Protocol):
    """Says whether the gateway can take calls; `not_ready` is the reason, or None when it can."""

    @property
    def not_ready(self) -> str | None: ...


class GatewayWorkers(Protocol):
    """All workers of the gateway."""

    async def figures(self) -> Metrics: ...
    async def upstreams(self) -> Mapping[str, UpstreamView]: ...
    async def pause(self, upstream: str, bound_s: float) -> None: ...
    async def open(self, upstream: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Control:
    """The services that handlers use."""

    tape: TapeSource
    dispatcher: Dispatcher
    releases: Driver
    rehearsals: Rehearsals
    runs: RunService
    feed: ChangeFeed
    team: GatewayWorkers
    auth: Auth
    metrics: Metrics
    state: Readiness
    definitions: DefinitionService
    audit_log: AuditLog
    webhooks: WebhookService
    questions: QuestionQueue = field(default_factory=QuestionQueue)
    """Tool calls that wait for a person."""
    policy: ToolPolicy = field(default_factory=lambda: ToolPolicy([]))
    """Rules on tool calls, as configured."""
    retention: RetentionService | None = None
    """Service that forgets rollouts."""
    index: IndexLink | None = None
    """Index that finds rows without a scan."""
    queries: SqlRunner | None = None
    """Service that answers SQL."""
    costs: RolloutCosts = field(default_factory=lambda: RolloutCosts(Prices()))
    """Adds costs to rollouts."""
    routes: Sequence[RouteSettings] = ()
    """Routes of models to upstreams, as configured."""
    budgets: Budgets | None = None
    """Budgets of calls."""
    keep_alive_s: float = 15.0
    """Seconds between keep-alive comments to a follower without events."""
    started_ns: int = field(default_factory=time.time_ns)
    """When the gateway started."""
    heavy: HeavyReads = field(default_factory=HeavyReads)
    """Queue of the reads that take the bytes of calls."""
    followers: set[asyncio.Task[object]] = field(default_factory=set[asyncio.Task[object]])
    pending_operations: set[asyncio.Future[object]] = field(default_factory=set[asyncio.Future[object]])
    """Operations that are finished even if the client has left."""

    @property
    def prices(self) -> Prices:
        """The list of prices that costs are computed with."""
        return self.costs.prices


CONTROL = web.AppKey("control", Control)


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
M = TypeVar("M", bound=BaseModel)
Fault = Literal["invalid_request", "unauthorized", "forbidden", "not_found", "conflict", "unavailable", "internal"]

AGENT = "/agent/"
FAULTS: dict[int, Fault] = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    503: "unavailable",
}
REFUSALS = {"not_found": 404, "conflict": 409, "invalid": 400}
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
JSON = CIMultiDict(HEADERS | {"Content-Type": "application/json; charset=utf-8"})
_ID = re.compile(ID_PATTERN)
_KEY_COMES_FROM = (
    "`penstock` commands take it from the variable PENSTOCK_ADMIN_KEY (or PENSTOCK_READ_KEY, to read only), "
    "requests carry it as `Authorization: Bearer KEY` or `x-api-key`"
)
log = logging.getLogger("penstock.control")


class ApiError(Exception):
    """A request that is refused."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        value: str | None = None,
        allowed: Sequence[str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = FAULTS.get(status, "internal" if status >= 500 else "invalid_request")
        self.problem = Problem(
            message=message, type=kind, field=field, value=value, allowed=list(allowed) if allowed else None
        )


def middleware(auth: Auth, public: frozenset[str], needs: Mapping[str, Role]) -> Any:
    """The guard of an application. `public`: paths that need no key; `needs`: roles by path for POST requests. Paths
    below `/agent` cannot be reached from outside: the data plane has checked such a request and sends it there."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not request.path.startswith(AGENT):
                what = f"{request.method} {request.path}"
                check(request.headers, request.path, auth, public, _needs(request, needs), what)
            return await _compressed(request, await handler(request))
        except Exception as error:
            status, reason, headers, body = refusal(classify(error, request.method, request.path))
            return web.Response(
                status=status, reason=reason, body=body, headers=headers | {"Content-Type": "application/json"}
            )

    return guard


async def _compressed(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """The answer, with gzip if requested and worth it. A feed compresses itself."""
    if not isinstance(response, web.Response) or response.prepared:
        return response
    body: object = response.body
    if isinstance(body, bytes):
        response.body, headers = await compression.compress_body_async(request.headers, body)
        response.headers.update(headers)
    return response


def _needs(request: web.Request, needs: Mapping[str, Role]) -> Role:
    """The role that a request needs. A path may contain escapes, so the route is looked up."""
    if request.method in ("GET", "HEAD"):
        return "read"
    resource = request.match_info.route.resource
    return "operate" if resource is None else needs.get(resource.canonical, "operate")


def check(
    headers: Mapping[str, str],
    path: str,
    auth: Auth,
    public: frozenset[str] = frozenset(),
    needs: Role = "read",
    what: str = "it",
) -> str:
    """Return the name of the request's key; raises `ApiError` if it may not pass. `needs`: the least role that opens
    `what`."""
    _check_names(headers, auth)
    return _check_key(list(credentials(headers)), path, auth, "public" if path in public else needs, what)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler: runs before any response is sent, streams included."""
    if "Cache-Control" not in response.headers:
        response.headers.update(HEADERS)


def answer(model: BaseModel) -> web.Response:
    """The response with a model as JSON."""
    return web.Response(body=json_of(model), headers=JSON)


def json_of(model: BaseModel) -> bytes:
    """The JSON of a model, as bytes."""
    return model.model_dump_json().encode()


def query_of(request: web.Request, model: type[M]) -> M:
    """The checked query parameters; raises `ApiError`."""
    doubled = [name for name in request.query if len(request.query.getall(name)) > 1]
    if doubled:
        raise ApiError(400, f"the parameter {doubled[0]!r} is given more than once", field=doubled[0])
    return _validated(model, lambda: model.model_validate(dict(request.query)))


def body_of(content_type: str, body: bytes, model: type[M]) -> M:
    """The checked JSON body; raises `ApiError`. Other content types are refused: a foreign web page can send those
    without asking."""
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, "the body must be JSON", "Content-Type", media, ("application/json",))
    if is_bulky(body):
        allowed = (f"{MOST_OBJECTS} objects and arrays", f"{MOST_VALUES} values")
        raise ApiError(413, "the body holds more than is read in one request: send it in parts", "body", None, allowed)
    return _validated(model, lambda: model.model_validate_json(body))


ID_WORDS: Final = {"rid": "rollout", "aid": "attempt"}
"""Words for the ids of a path in messages."""


def id_of(request: web.Request, name: str) -> str:
    """A checked id from the path; raises `ApiError`."""
    return check_id(name, request.match_info[name])


def check_id(name: str, value: str) -> str:
    """Return the id; raises `ApiError` if it is not valid."""
    if not _ID.fullmatch(value):
        message = (
            f"{ID_WORDS.get(name, name)}: {unquote(value)[:40]!r} is not an id: up to 128 letters, digits and . _ -"
        )
        raise ApiError(400, message, name, value, (ID_PATTERN,))
    return value


def sequence_of(request: web.Request) -> int:
    """A span's number from the path; raises `ApiError`."""
    value = request.match_info["sequence"]
    if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) == 0:
        raise ApiError(400, "sequence is a whole number from 1", "sequence", value, ("1", "2", "..."))
    return int(value)


def _check_names(headers: Mapping[str, str], auth: Auth) -> None:
    """Refuse a request from a foreign site's page: without a key nothing else would refuse it."""
    if auth.admin_key is not None:
        return
    host, origin = headers.get("Host", ""), headers.get("Origin", "")
    allowed = ("localhost", "127.0.0.1", "[::1]", "`names` in the settings")
    if not auth.names.is_own(host):
        raise ApiError(403, "without an admin key the control API answers to local names only", "Host", host, allowed)
    if origin and not auth.names.is_own(origin.partition("://")[2]):
        message = "without an admin key the control API answers to pages of this machine only"
        raise ApiError(403, message, "Origin", origin, allowed)


def _check_key(presented: Sequence[str], path: str, auth: Auth, needs: Role | Literal["public"], what: str) -> str:
    if any(map(is_token, presented)) and path.startswith(("/api", "/metrics", "/v1/agl", "/agl1")):
        raise ApiError(403, "an agent token opens the data plane for its own rollout only, never the control API")
    caller = auth.find_call_key(presented)
    if caller is not None and needs != "public":
        message = f"the key {caller!r} has the role {CALL!r}, which opens calls and nothing of the control API"
        raise ApiError(403, message, "Authorization", CALL, ROLES)
    found = auth.holder(presented)
    if needs == "public":
        return "" if found is None else found.name
    enough = ROLES[ROLES.index(needs) :]
    if found is not None and found.role in enough:
        return found.name
    if found is not None:
        message = f"the key {found.name!r} has the role {found.role!r}; {what} needs {' or '.join(map(repr, enough))}"
        raise ApiError(403, message, "Authorization", found.role, enough)
    if presented:
        raise ApiError(401, f"this is not the gateway's admin key; {_KEY_COMES_FROM}", "Authorization")
    raise ApiError(401, f"the admin key is missing; {_KEY_COMES_FROM}", "Authorization")


def classify(error: Exception, method: str, path: str) -> ApiError:
    """The `ApiError` for any exception; an unknown one is the gateway's own, and is logged."""
    match error:
        case ApiError():
            return error
        case OperationRefusedError():
            return ApiError(REFUSALS[error.kind], str(error), error.field, error.value)
        case TapeError():
            return ApiError(503, f"the tape does not take it: {error}")
        case QueryError():
            return ApiError(400, str(error), "filter", error.term, error.allowed)
        case CursorError():
            return ApiError(400, f"cursor {error}", "cursor", error.given)
        case web.HTTPNotFound():
            return ApiError(404, f"there is nothing at {path}; GET /api/docs lists what there is")
        case web.HTTPMethodNotAllowed():
            return ApiError(405, f"{path} does not know {method}", "method", method, list(error.allowed_methods))
        case web.HTTPException():
            return ApiError(error.status, error.reason)
        case _:
            log.error("%s %s failed", method, path, exc_info=error)
            return ApiError(500, "the gateway failed; its log says why")


def refusal(error: ApiError) -> tuple[int, str, dict[str, str], bytes]:
    """(status, reason, own headers, body) of an error."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 405:
        headers["Allow"] = ", ".join(error.problem.allowed or ())
    body = ErrorAnswer(error=error.problem).model_dump_json(exclude_none=True)
    return error.status, HTTPStatus(error.status).phrase, headers, body.encode()


def _validated(model: type[M], validate: Callable[[], M]) -> M:
    try:
        return validate()
    except ValidationError as e:
        first: Mapping[str, Any] = e.errors(include_url=False)[0]
        raise _refused(model, first) from None


def _refused(model: type[BaseModel], error: Mapping[str, Any]) -> ApiError:
    field = ".".join(map(str, error["loc"])) or None
    if error["type"] == "extra_forbidden" and field:
        near = get_close_matches(field, model.model_fields, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ApiError(400, f"{field!r} is not known here{hint}", field, allowed=list(model.model_fields))
    value = None if error["type"] in ("missing", "json_invalid") else str(error["input"])[:200]
    return ApiError(400, f"{field or 'the body'}: {sentence(error)}", field, value, _allowed(model, field))


def _allowed(model: type[BaseModel], field: str | None) -> list[str] | None:
    """The range or pattern of a field, from its schema."""
    schema = model.model_json_schema()["properties"].get(field, {})
    schema = next((s for s in schema.get("anyOf", ()) if "minimum" in s), schema)
    if "minimum" in schema:
        return [f"{schema['minimum']} to {schema.get('maximum', 'any')}"]
    return [schema["pattern"]] if "pattern" in schema else None


# The caller's role, and the audit log.


class AuditQuery(Noun):
    """Parameters of the audit log."""

    cursor: str | None = Field(default=None, max_length=1000)
    """Where the page begins: `next` of the page before."""
    limit: int = Field(default=100, ge=1, le=1000)
    """How many at most."""


async def get_caller(request: web.Request) -> web.Response:
    """The role that the gateway gives the client: whether its key may change things, or only read. Without keys
    everybody may change everything."""
    control = request.app[CONTROL]
    # The guard has refused callers without a role.
    found = control.auth.holder(list(credentials(request.headers)))
    role, key = ("read", "") if found is None else (found.role, found.name)
    return answer(Caller(role=role, key=key, version=version("penstock-gateway"), started_ns=control.started_ns))


async def get_audit_log(request: web.Request) -> web.Response:
    """The changes that people, and programs in their place, have made, newest first: who, what, and why, as each
    request said. It leaves out what workers report of their work."""
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
