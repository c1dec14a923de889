"""Agent Lightning 0.3's store API, below `/v1/agl`: its client works unchanged, and what it stores is on the tape.

Every request is answered where it was parsed, as operations are (`gateway.api.operations`): a client sends one for each
span. Keys and roles are those of the control API; because its client can send no header of its own, the password of
`Authorization: Basic` counts as a key here. Statuses and the shape of errors are those of its server, but a name that
is unknown is a 404: its own server fails with a 500, which its client sends again for eight seconds.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeVar, cast
from urllib.parse import parse_qs

import msgspec
from multidict import CIMultiDict
from pydantic import BaseModel, ValidationError

from penstock.gateway.api import compression, guard
from penstock.gateway.api.guard import ApiError, Control, check_id
from penstock.gateway.api.lightning_reads import LightningReader
from penstock.gateway.api.openapi import ApiRoute
from penstock.gateway.api.operations import Ids, Operations, head_lines, write_answer
from penstock.gateway.followers.otlp.ingest import REQUEST_BYTES
from penstock.gateway.followers.otlp.lightning_spans import arrival_of
from penstock.gateway.model.lightning import (
    FIELDS,
    NAMED_RESOURCES,
    AttemptListing,
    AttemptUpdate,
    Json,
    LightningAttempt,
    LightningDequeue,
    LightningEnqueue,
    LightningSpan,
    LightningStart,
    ResourceListing,
    RolloutListing,
    RolloutUpdate,
    RolloutWait,
    SequenceRequest,
    SpanListing,
    StoreListing,
    WorkerListing,
    WorkerUpdate,
    completed,
    encode,
)
from penstock.gateway.model.rollout import FINAL
from penstock.gateway.tape.store.view import ChangeFilter
from penstock.gateway.wire.dialects.loose_json import is_bulky
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.request import HttpRequest
from penstock.gateway.work.lightning import LightningOperations
from penstock.gateway.work.queue import ClaimedAttempt

PREFIX: Final = "/v1/agl"
PATH: Final = PREFIX.encode()
_CREATED: Final = frozenset({"lightning_enqueue", "lightning_start", "lightning_start_attempt", "lightning_add_span",
                             "lightning_add_resources"})  # fmt: skip
"""Names of routes that answer 201."""
_BODILESS: Final = frozenset({"lightning_dequeue", "lightning_start_attempt", "lightning_update_worker"})
"""Names of routes whose body may be left out."""
_PAGE: Final = 1_000
"""Changes that a wait reads at once."""
_spans = msgspec.json.Decoder(strict=True)
M = TypeVar("M", bound=BaseModel)


class StoreError(Exception):
    """A request that is refused with what FastAPI would say of its fields."""

    def __init__(self, place: tuple[str | int, ...], kind: str, message: str, status: int = 422) -> None:
        super().__init__(message)
        self.status, self.detail = status, [{"type": kind, "loc": list(place), "msg": message}]


class LightningService(Operations):
    """Serves Agent Lightning's store API."""

    created, bodiless = _CREATED, _BODILESS

    def __init__(self, control: Control, reader: LightningReader, routes: Sequence[ApiRoute] | None = None) -> None:
        """`routes`: those of another API of its."""
        super().__init__(control, ROUTES if routes is None else routes)
        self.control, self.reader = control, reader

    def refuse(self, client: ClientConnection, request: HttpRequest) -> None:
        """Answer a request for which there is no route."""
        path = request.target.partition(b"?")[0].decode("latin-1")
        known = [
            method for method in ("GET", "POST", "PATCH", "DELETE") if self.find(method, request.target) is not None
        ]
        status, what = (405, "Method Not Allowed") if known else (404, f"there is nothing at {path}")
        more = {"Allow": ", ".join(known)} if known else {}
        _write(client, request, status, b"" if request.method == "HEAD" else encode({"detail": what}), more)

    async def _answer(
        self, client: ClientConnection, request: HttpRequest, route: ApiRoute, ids: dict[str, str], trusted: bool
    ) -> None:
        more: Mapping[str, str] = {}
        try:
            headers = CIMultiDict[str]([(name.decode(), value.decode("latin-1")) for name, _, value in request.headers])
            if not route.public:
                what = f"{route.method} {route.path}"
                _ = guard.check(with_key(headers), PREFIX, self.control.auth, needs=route.required_role, what=what)
            asked = _asked(route, request, headers, self.bodiless)
            for name, value in ids.items():
                _ = check_id(name, value)
            found = await self._found(route, ids, asked)
            if route.method == "DELETE" and found is None:
                write_no_content(client, request)
                return
            body = encode(found)
            status = 201 if route.name in self.created else 200
            if len(body) > compression.LEAST:
                body, more = await compression.compress_body_async(headers, body)
        except Exception as error:
            status, more, body = _refusal(error, request.method, route.path)
        _write(client, request, status, body, more)

    async def _found(self, route: ApiRoute, ids: Ids, asked: Any) -> Any:
        handler = cast(Callable[[LightningService, Ids, Any], Awaitable[Any]], route.handler)
        if not route.changes:
            return await handler(self, ids, asked)
        # A change on the tape is followed up even if the client has left.
        doing = asyncio.ensure_future(handler(self, ids, asked))
        self.control.pending_operations.add(doing)
        doing.add_done_callback(self.control.pending_operations.discard)
        return await asyncio.shield(doing)

    def admit(self, request: HttpRequest) -> bool:
        """True for telemetry with a key as a password, as Agent Lightning's exporter sends it; raises `ApiError` if the
        key opens nothing here."""
        basic = any(low == b"authorization" and value[:6].lower() == b"basic " for low, _, value in request.headers)
        if basic:
            headers = CIMultiDict[str]([(name.decode(), value.decode("latin-1")) for name, _, value in request.headers])
            _ = guard.check(with_key(headers), PREFIX, self.control.auth, needs="operate", what="telemetry")
        return basic

    async def read(self, do: Callable[..., Any], *args: Any) -> Any:
        """Read much from the tape, in a thread."""
        return await self.control.heavy.run(do, *args)


def with_key(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """The headers with the password of `Authorization: Basic` as a bearer's key."""
    scheme, _, rest = headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            key = base64.b64decode(rest.strip(), validate=True).decode("latin-1").partition(":")[2]
        except binascii.Error:
            key = ""
        headers = headers.copy()
        headers["Authorization"] = f"Bearer {key}"
    return headers


def _write(
    client: ClientConnection, request: HttpRequest, status: int, body: bytes, more: Mapping[str, str] | None = None
) -> None:
    head = b"HTTP/1.1 %d %b\r\n%b" % (status, HTTPStatus(status).phrase.encode(), head_lines(guard.JSON))
    write_answer(client, request, head + head_lines(more or {}), body)
    client.finish(request.keep_alive)


def write_no_content(client: ClientConnection, request: HttpRequest) -> None:
    """Answer 204, which has no body."""
    close = {} if request.keep_alive else {"Connection": "close"}
    client.transport.write(b"HTTP/1.1 204 No Content\r\n%b\r\n" % head_lines(guard.HEADERS | close))
    client.finish(request.keep_alive)


def _refusal(error: Exception, method: str, path: str) -> tuple[int, Mapping[str, str], bytes]:
    """(Status, headers, body) of an error, in FastAPI's shape."""
    if isinstance(error, StoreError):
        return error.status, {}, json.dumps({"detail": error.detail}).encode()
    known = guard.classify(error, method, path)
    headers = {"WWW-Authenticate": "Bearer"} if known.status == 401 else {}
    return known.status, headers, encode({"detail": str(known)})


# -- requests ----------------------------------------------------------------------------------------------------------


def _asked(route: ApiRoute, request: HttpRequest, headers: Mapping[str, str], bodiless: frozenset[str]) -> Any:
    """Check a request and return its body or its query; raises `ApiError` or `StoreError`."""
    if route.query is not None:
        return _listing(_of_query(route.query, request.target))
    if route.body is None:
        return None
    body = request.body()
    if not body or body == b"null":
        if route.name in bodiless:
            return route.body()
        raise StoreError(("body",), "missing", "Field required: the request needs a JSON body")
    media = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise ApiError(415, f"the body must be JSON: its Content-Type is {media!r}, not 'application/json'")
    if route.body is _SpanBody and len(body) > REQUEST_BYTES:
        raise ApiError(413, f"the span has {len(body)} bytes; at most {REQUEST_BYTES} are kept of one")
    if is_bulky(body):
        raise ApiError(413, "the body holds more than is read in one request: send it in parts")
    if route.body is _SpanBody:
        return _span(body)
    if route.body is _ResourcesBody:
        return _valid(lambda: NAMED_RESOURCES.dump_python(NAMED_RESOURCES.validate_json(body)))
    model = route.body
    found = _valid(lambda: model.model_validate_json(body))
    return _listing(found) if isinstance(found, StoreListing) else found


class _SpanBody(BaseModel):
    """Stands for a span, which is checked by `LightningSpan`."""


class _ResourcesBody(BaseModel):
    """Stands for resources by name, which are checked by `NAMED_RESOURCES`."""


def _valid(check: Callable[[], M], where: str = "body") -> M:
    try:
        return check()
    except ValidationError as error:
        raise _field_errors(error, where) from None


def _field_errors(error: ValidationError, where: str) -> StoreError:
    found = error.errors(include_url=False, include_context=False)
    said = StoreError((where,), "value_error", str(error))
    said.detail = [
        {"type": one["type"], "loc": [where, *one["loc"]], "msg": one["msg"], "input": str(one["input"])[:200]}
        for one in found[:20]
    ]
    return said


def _of_query(model: type[M], target: bytes) -> M:
    given = parse_qs(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True)
    lists = {name for name, field in model.model_fields.items() if "list" in str(field.annotation)}
    values = {name: found if name in lists else found[-1] for name, found in given.items()}
    return _valid(lambda: model.model_validate(values), "query")


def _listing(asked: M) -> M:
    """The request for a list; raises `ApiError` where its limits or its order are none."""
    if not isinstance(asked, StoreListing):
        return asked
    fields = FIELDS[type(asked)]
    if asked.sort_by is not None and asked.sort_by not in fields:
        raise ApiError(400, f"Invalid sort_by: {asked.sort_by[:100]}, allowed fields are: {', '.join(fields)}")
    if asked.limit == 0 or asked.limit < -1:
        raise ApiError(400, f"limit: {asked.limit} is none: Limit must be greater than 0 or -1 for no limit")
    if asked.offset < 0:
        raise ApiError(400, f"offset: {asked.offset} is none: Offset must be greater than or equal to 0")
    return asked


def _span(body: bytes) -> Json:
    try:
        found = _spans.decode(body)
        _ = msgspec.convert(found, LightningSpan)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        path = [part for part in place.rstrip("`").replace("[", ".").replace("]", "").split(".") if part]
        if message.startswith("Object missing required field"):
            raise StoreError(("body", *path, message.split("`")[1]), "missing", "Field required") from None
        raise StoreError(("body", *path), "value_error", message) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise StoreError(("body",), "json_invalid", f"JSON decode error: {error}") from None
    return completed(found)


def _not_null(asked: BaseModel, *names: str) -> None:
    """Refuse fields that are null: what they name is always there."""
    for name in names:
        if name in asked.model_fields_set and getattr(asked, name) is None:
            raise ApiError(400, f"{name} is invalid; it cannot be a null value.", name)


# -- rollouts ----------------------------------------------------------------------------------------------------------


async def get_health(service: LightningService, ids: Ids, asked: None) -> Json:
    """Always `ok`. Its client asks this before it sends a request again."""
    return {"status": "ok"}


async def get_statistics(service: LightningService, ids: Ids, asked: None) -> Json:
    """The numbers of rollouts, attempts, spans, resources and workers on the tape."""
    started = service.control.started_ns
    return await service.read(service.reader.statistics, service.control.dispatcher.now_ns() - started)


async def enqueue(service: LightningService, ids: Ids, asked: LightningEnqueue) -> list[Json]:
    """Queue tasks. A task without resources gets the newest ones."""
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    if not asked.rollouts:
        return []
    return await dispatcher.change(lambda tape: LightningOperations(tape).enqueue(asked.rollouts, now))


async def dequeue(service: LightningService, ids: Ids, asked: LightningDequeue) -> list[Json]:
    """Take work: each rollout with a new attempt, or nothing at once."""
    dispatcher, answers = service.control.dispatcher, list[Json]()
    if asked.limit <= 0:
        return answers
    now = dispatcher.now_ns()

    def claim(tape: Any) -> list[ClaimedAttempt]:
        operations = LightningOperations(tape)
        claimed = operations.dequeue(asked.limit, asked.worker_id, now)
        answers[:] = map(operations.attempted, claimed)
        return claimed

    _ = await dispatcher.take(claim, now)
    return answers


async def start(service: LightningService, ids: Ids, asked: LightningStart) -> Json:
    """Begin a task at once, without the queue."""
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    return await dispatcher.change(lambda tape: LightningOperations(tape).start(asked, now))


async def get_rollouts(service: LightningService, ids: Ids, asked: RolloutListing) -> Json:
    """Rollouts, each with its newest attempt; the oldest first unless another order is asked for."""
    return await service.read(service.reader.rollouts, asked)


async def get_rollout(service: LightningService, ids: Ids, asked: None) -> Json:
    """One rollout with its newest attempt, if it has any."""
    return service.reader.rollout(ids["rid"])


async def update_rollout(service: LightningService, ids: Ids, asked: RolloutUpdate) -> Json:
    """Change a rollout. A field that is left out stays, null clears it. Its attempts stay as they are, unless it is
    cancelled."""
    _not_null(asked, "status", "config")
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    return await dispatcher.change(lambda tape: LightningOperations(tape).update_rollout(ids["rid"], asked, now))


async def start_attempt(service: LightningService, ids: Ids, asked: LightningAttempt) -> Json:
    """Begin another attempt of a rollout, whatever its number of attempts. It is the one that counts from now on."""
    dispatcher = service.control.dispatcher
    now, worker = dispatcher.now_ns(), asked.worker_id
    return await dispatcher.change(lambda tape: LightningOperations(tape).start_attempt(ids["rid"], worker, now))


async def get_attempts(service: LightningService, ids: Ids, asked: AttemptListing) -> Json:
    """The attempts of a rollout."""
    return service.reader.attempts(ids["rid"], asked)


async def get_latest_attempt(service: LightningService, ids: Ids, asked: None) -> Json | None:
    """The newest attempt of a rollout; null where there is none."""
    return service.reader.latest_attempt(ids["rid"])


async def update_attempt(service: LightningService, ids: Ids, asked: AttemptUpdate) -> Json:
    """Change an attempt, or the `latest`; the rollout follows the newest one. When its end is answered, every earlier
    call of it is durable."""
    _not_null(asked, "status", "worker_id", "last_heartbeat_time", "metadata")
    dispatcher = service.control.dispatcher
    if asked.status in ("succeeded", "failed"):
        _ = await dispatcher.flush_calls()
    now, name = dispatcher.now_ns(), (ids["rid"], ids["aid"])
    return await dispatcher.change(lambda tape: LightningOperations(tape).update_attempt(*name, asked, now))


async def wait_for_rollouts(service: LightningService, ids: Ids, asked: RolloutWait) -> list[Json]:
    """The rollouts among these that have ended, once all have or the time is over; without a `timeout` it waits for as
    long as the client does. Those that do not exist are left out."""
    control, task = service.control, asyncio.current_task()
    until = None if asked.timeout is None else asyncio.get_running_loop().time() + max(0.0, asked.timeout)
    cursor = control.tape.cursor()
    known = {rollout.id: rollout for _, rollout in await asyncio.to_thread(control.tape.named, asked.rollout_ids)}
    left = {name for name, rollout in known.items() if rollout.status not in FINAL}
    assert task is not None
    control.followers.add(task)
    try:
        with control.feed.subscribe(ChangeFilter(["rollout", "forgotten"], left)) as watch:
            wanted = ChangeFilter(["rollout", "forgotten"], left, FINAL)
            while left:
                async with asyncio.timeout_at(until):
                    cursor = await watch.wait(cursor)
                changes, cursor = control.tape.changes(cursor, _PAGE, wanted)
                left -= {change.rollout.id for change in changes if change.rollout is not None}
                left -= {change.name for change in changes if change.kind == "forgotten" and change.name is not None}
    except TimeoutError:
        pass
    finally:
        control.followers.discard(task)
    ended = [name for name in dict.fromkeys(asked.rollout_ids) if name in known and name not in left]
    return await service.read(service.reader.ended, ended)


# -- spans -------------------------------------------------------------------------------------------------------------


async def add_span(service: LightningService, ids: Ids, asked: Json) -> Json | None:
    """Keep a span, which counts as a sign of life of its attempt; null where the attempt has one of this id. A reward
    that it carries is one. When this is answered, the span is durable."""
    dispatcher, arrived = service.control.dispatcher, arrival_of(asked)
    if arrived.judged is not None:
        await dispatcher.wait_until_recorded()
    now = dispatcher.now_ns()
    if not arrived.entry.start_ns:
        arrived.entry.start_ns = arrived.entry.end_ns = now
    [kept] = await dispatcher.change(lambda tape: LightningOperations(tape).add_spans([arrived], now))
    return kept


async def next_sequence(service: LightningService, ids: Ids, asked: SequenceRequest) -> Json:
    """Take the next number for a span of a rollout. No number is given twice."""
    name = asked.rollout_id
    found = await service.control.dispatcher.run(lambda tape: LightningOperations(tape).next_sequence(name))
    return {"sequence_id": found}


async def get_spans(service: LightningService, ids: Ids, asked: SpanListing) -> Json:
    """The spans of a rollout, or of one of its attempts: those that Agent Lightning has sent, as they came, and those
    of the gateway's own, as its tracers would have made them."""
    _ = await service.control.dispatcher.flush_calls()
    return await service.read(service.reader.spans, asked)


# -- resources and workers ---------------------------------------------------------------------------------------------


async def get_resources(service: LightningService, ids: Ids, asked: ResourceListing) -> Json:
    """Resources, each in its newest version; the oldest first unless another order is asked for."""
    return await service.read(service.reader.resources, asked)


async def add_resources(service: LightningService, ids: Ids, asked: Json) -> Json:
    """Keep new resources; they are the newest then."""
    return await _put_resources(service, None, asked)


async def get_latest_resources(service: LightningService, ids: Ids, asked: None) -> Json | None:
    """The newest resources; null where there are none."""
    return service.reader.latest_resources()


async def get_resource(service: LightningService, ids: Ids, asked: None) -> Json | None:
    """Resources by their id; null where there are none."""
    return service.reader.resource(ids["resources"])


async def update_resources(service: LightningService, ids: Ids, asked: Json) -> Json:
    """Keep the next version of resources in place of the last one; they are the newest then."""
    return await _put_resources(service, ids["resources"], asked)


async def _put_resources(service: LightningService, name: str | None, asked: Json) -> Json:
    dispatcher = service.control.dispatcher
    now = dispatcher.now_ns()
    return await dispatcher.run(lambda tape: LightningOperations(tape).put_resources(name, asked, now))


async def get_workers(service: LightningService, ids: Ids, asked: WorkerListing) -> Json:
    """Workers, also the gateway's own."""
    return await service.read(service.reader.workers, asked)


async def get_worker(service: LightningService, ids: Ids, asked: None) -> Json | None:
    """One worker; null where there is none."""
    return service.reader.worker(ids["wid"])


async def update_worker(service: LightningService, ids: Ids, asked: WorkerUpdate) -> Json:
    """Say that a worker is alive, with its figures."""
    _not_null(asked, "heartbeat_stats")
    dispatcher = service.control.dispatcher
    now, name, stats = dispatcher.now_ns(), ids["wid"], asked.heartbeat_stats
    return await dispatcher.run(lambda tape: LightningOperations(tape).update_worker(name, stats, now))


# -- the table ---------------------------------------------------------------------------------------------------------

_JSON: Final = "application/json"
_ROLLOUT, _ATTEMPTS = f"{PREFIX}/rollouts/{{rid}}", f"{PREFIX}/rollouts/{{rid}}/attempts"


def _get(path: str, name: str, handler: Any, query: type[BaseModel] | None = None, public: bool = False) -> ApiRoute:
    return ApiRoute("GET", path, f"lightning_{name}", "", _JSON, handler, query=query, often=True, public=public)


def _post(path: str, name: str, handler: Any, body: type[BaseModel], reads: bool = False) -> ApiRoute:
    waits = name == "dequeue"  # what its client has left without is given back
    return ApiRoute("POST", path, f"lightning_{name}", "", _JSON, handler, body=body, reads=reads, waits=waits)


ROUTES: Final[tuple[ApiRoute, ...]] = (
    _get(f"{PREFIX}/health", "health", get_health, public=True),
    _get(f"{PREFIX}/statistics", "statistics", get_statistics),
    _post(f"{PREFIX}/queues/rollouts/enqueue", "enqueue", enqueue, LightningEnqueue),
    _post(f"{PREFIX}/queues/rollouts/dequeue", "dequeue", dequeue, LightningDequeue),
    _post(f"{PREFIX}/rollouts", "start", start, LightningStart),
    _get(f"{PREFIX}/rollouts", "rollouts", get_rollouts, RolloutListing),
    _post(f"{PREFIX}/rollouts/search", "search_rollouts", get_rollouts, RolloutListing, reads=True),
    _get(_ROLLOUT, "rollout", get_rollout),
    _post(_ROLLOUT, "update_rollout", update_rollout, RolloutUpdate),
    _post(_ATTEMPTS, "start_attempt", start_attempt, LightningAttempt),
    _get(_ATTEMPTS, "attempts", get_attempts, AttemptListing),
    _post(f"{_ATTEMPTS}/search", "search_attempts", get_attempts, AttemptListing, reads=True),
    _get(f"{_ATTEMPTS}/latest", "latest_attempt", get_latest_attempt),
    _post(f"{_ATTEMPTS}/{{aid}}", "update_attempt", update_attempt, AttemptUpdate),
    _get(f"{PREFIX}/workers", "workers", get_workers, WorkerListing),
    _post(f"{PREFIX}/workers/search", "search_workers", get_workers, WorkerListing, reads=True),
    _get(f"{PREFIX}/workers/{{wid}}", "worker", get_worker),
    _post(f"{PREFIX}/workers/{{wid}}", "update_worker", update_worker, WorkerUpdate),
    _get(f"{PREFIX}/resources", "resources", get_resources, ResourceListing),
    _post(f"{PREFIX}/resources", "add_resources", add_resources, _ResourcesBody),
    _get(f"{PREFIX}/resources/latest", "latest_resources", get_latest_resources),
    _get(f"{PREFIX}/resources/{{resources}}", "resource", get_resource),
    _post(f"{PREFIX}/resources/{{resources}}", "update_resources", update_resources, _ResourcesBody),
    _post(f"{PREFIX}/spans", "add_span", add_span, _SpanBody),
    _get(f"{PREFIX}/spans", "spans", get_spans, SpanListing),
    _post(f"{PREFIX}/spans/search", "search_spans", get_spans, SpanListing, reads=True),
    _post(f"{PREFIX}/spans/next", "next_sequence", next_sequence, SequenceRequest),
    _post(f"{PREFIX}/waits/rollouts", "wait", wait_for_rollouts, RolloutWait, reads=True),
)
"""The store API: a path's fixed words are tried before its ids."""
