"""Records the lists of servers, and holds them to their approved versions. The versions are in `tools.definitions`,
those in memory here (`DefinitionService`).

With `warn` an answer passes unchanged and is read afterwards. With `hold` an answer is read before it passes: a changed
definition is replaced by its approved version, a new one is left out. With `deny` a list that differs is refused, and
so are calls of changed definitions. An answer that cannot be read is then refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Final, NamedTuple

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import Pin
from penstock.gateway.model.resource import Template
from penstock.gateway.model.settings import McpServer
from penstock.gateway.model.tools import ApproveRequest, DefinitionKind, OnChange, ServerDefinitions
from penstock.gateway.reading.diagnosis.tool_results import MatchDegree, match_name
from penstock.gateway.releases.catalog import find_tools, write_versions
from penstock.gateway.releases.prompt_recogniser import Recogniser
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tools.definitions import (
    LISTS,
    ApprovedAnswer,
    AttemptRef,
    Definition,
    DefinitionChange,
    DefinitionOperations,
    DefinitionPage,
    DefinitionReader,
    Sighting,
    SightingResult,
    UnreadableMessage,
    changes,
    cursor_of,
    describe_changes,
    fingerprints,
    list_fingerprint,
    method_of_answer,
    read_page,
    requested_name,
    restrict_to_approved,
)
from penstock.gateway.tools.middleware import McpRequest
from penstock.gateway.tools.sessions import TransformResult
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.proxy_context import CallPlan, ProxyContext
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, McpDialect
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, UpstreamFault

HELD: Final = "penstock.mcp.held"
"""Attribute of a span: the definitions that were replaced by their approved versions, or left out."""
_USES: Final[dict[str, DefinitionKind]] = {
    "tools/call": "tools",
    "prompts/get": "prompts",
    "resources/read": "resources",
}
"""Requests that use a listed definition."""
_ANY_PAGE: Final = "\0"
"""A cursor that matches no request."""
_REFUSED: Final = 200
"""Status of a refusal: the exchange itself is in order, and clients look for the error of JSON-RPC in its body."""


class DefinitionMiddleware:
    """The feature that records lists, and holds or denies changed definitions."""

    def __init__(self, definitions: DefinitionService, metrics: Metrics) -> None:
        self._definitions, self._metrics = definitions, metrics

    def changes(self, server: str) -> bool:
        """True if the server's changes are held or denied."""
        return self._definitions.enforces_approval(server)

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Watches or changes the answers to list requests; raises `ClientFault` for a call of a denied definition."""
        server, address = asking.server.name, asking.address
        whose = AttemptRef(address.rollout, address.attempt, address.origin, address.mode)
        denies = self._definitions.on_change.get(server) == "deny"
        if self._definitions.enforces_approval(server):
            asking.transform_other_responses(partial(self._unasked, server, whose))
        for one in asking.messages:
            if one.kind == "request" and one.method in LISTS:
                exchange = ListRequest(server, one.method, cursor_of(one.raw), whose)
                if self._definitions.enforces_approval(server):
                    asking.transform_response(one.id, partial(self._held, exchange))
                else:
                    asking.observe_response(one.id, partial(self._definitions.observe, exchange))
            elif denies and (one.method in _USES or one.kind == "unreadable"):
                self._check(server, one)
        return None

    def _unasked(self, server: str, whose: AttemptRef, answer: bytes) -> bytes | TransformResult:
        """Holds a list in an answer whose request is unknown."""
        method = method_of_answer(answer)
        return answer if method is None else self._held(ListRequest(server, method, _ANY_PAGE, whose), answer)

    def _held(self, exchange: ListRequest, answer: bytes) -> bytes | TransformResult:
        server, on_change = exchange.server, self._definitions.on_change[exchange.server]
        try:
            found = self._definitions.approved_answer(exchange, answer)
        except UnreadableMessage as error:
            said = f"server {server!r}: its answer to {exchange.method} cannot be read and is not passed on"
            why = f'mcp.servers.{server}.on_change = "{on_change}"'
            raise UpstreamFault(502, "unreadable", f"{said} ({why}): {error}") from None
        if found is None or not found.changes:
            return answer
        if on_change == "deny":
            raise self._denied(server, exchange.kind, found.changes)
        self._metrics.mcp_definitions[(server, "held")] += 1
        return TransformResult(found.answer, {HELD: describe_changes(found.changes) or "instructions"})

    def _check(self, server: str, one: JsonRpcMessage) -> None:
        """Raises `ClientFault` for a call of a changed definition."""
        try:
            name = requested_name(one.method, one.raw)
        except UnreadableMessage as error:
            said = f"server {server!r} is asked for something that cannot be read, so it may be what is denied"
            raise ClientFault(400, "unreadable", f"{said}: {error}") from None
        kind = _USES.get(one.method)
        change = None if kind is None or name is None else self._definitions.difference(server, kind, name)
        if kind is not None and change is not None:
            raise self._denied(server, kind, [change])

    def _denied(self, server: str, kind: DefinitionKind, changes: Sequence[DefinitionChange]) -> ClientFault:
        self._metrics.mcp_definitions[(server, "denied")] += 1
        what = "its instructions" if kind == "instructions" else f"{kind} that it lists"
        which = "" if kind == "instructions" else f" ({describe_changes(list(changes))})"
        why = f'mcp.servers.{server}.on_change = "deny"'
        message = (
            f"server {server!r}: {what} are not as they were approved{which}, and {why}; "
            f"see `penstock mcp definitions {server} --diff`, then `penstock mcp approve {server}`"
        )
        return ClientFault(_REFUSED, "definitions", message)


# -- descriptions of tools in the version that a rollout is given: releases of tool texts, in `tools/list` ------------
#
# The description of a tool is changed if it is the text of a resource of kind `tool-text`; its name and its schema
# never are. The rollout is pinned before the list is requested: to the resources of tools that the server has listed
# before or, if these are unknown, to all. In requests to models the same resources are found and written by
# `releases.catalog`, as prompts are.

_LIST: Final = "tools/list"
_DIALECT: Final = McpDialect()


class ToolTextMiddleware:
    """The feature that changes descriptions of tools to released versions."""

    def __init__(self, shared: ProxyContext, definitions: DefinitionService) -> None:
        self._shared, self._definitions = shared, definitions
        self._found: dict[str, tuple[Recogniser, frozenset[str], list[str]]] = {}
        """Resources by server, with the recogniser and the list of tools that they were found by."""

    def changes(self, server: str) -> bool:
        """True if a resource may describe a tool of this server."""
        return bool(self._resources(server))

    def _resources(self, server: str) -> list[str]:
        """Resources that describe a tool of this server."""
        recogniser = self._shared.pins.catalog.recogniser
        if not recogniser.tools:
            return []
        listed = self._definitions.tools(server)
        found = self._found.get(server)
        if found is None or found[0] is not recogniser or found[1] != listed:
            tools = [one for one in recogniser.known if one.tool is not None]
            mine = [one for one in tools if not listed or any(_called(server, one.tool or "", name) for name in listed)]
            found = self._found[server] = recogniser, listed, sorted({one.resource for one in mine})
        return found[2]

    def plan(self, asking: McpRequest, send: CallPlan) -> asyncio.Future[None] | None:
        """Pins the rollout, and has the list changed when it comes."""
        asked = [one.id for one in asking.messages if one.kind == "request" and one.method == _LIST]
        found = ResourceUse(self._resources(asking.server.name) if asked else [], None, None)
        if not found.resources:
            return None
        shared, call = self._shared, send.call
        pins = shared.pins.pinned(call, found)
        if pins is not None:
            self._give(asking, send, asked, found, pins)
            return None
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def pinned(pinning: asyncio.Future[list[Pin]]) -> None:
            if done.done():
                return
            try:
                self._give(asking, send, asked, found, self._pins_of(call, found, pinning.exception()))
                done.set_result(None)
            except GatewayFault as refusal:
                done.set_exception(refusal)

        now = shared.epoch_ns + int(monotonic() * 1e9)
        shared.pins.pin(call, found, now).add_done_callback(pinned)
        return done

    def _pins_of(self, call: CallRequest, found: ResourceUse, error: BaseException | None) -> Mapping[str, Pin]:
        """The pins of the rollout. `error`: the reason why the tape did not take them."""
        shared = self._shared
        if error is not None and shared.refuses_gaps(call.address.mode):
            raise GatewayFault(503, "tape", f"this rollout cannot be given its versions: {error}")
        pins = shared.pins.pinned(call, found) if error is None else None
        return pins or shared.pins.fallback_pins(call, found, error or RuntimeError("it was rolled back meanwhile"))

    def _give(
        self, asking: McpRequest, send: CallPlan, asked: list[bytes], found: ResourceUse, pins: Mapping[str, Pin]
    ) -> None:
        catalog, server = self._shared.pins.catalog, asking.server.name
        send.versions = {name: pins[name].version for name in found.resources}
        arms = {f"{pin.release}:{pin.arm}" for name in found.resources if (pin := pins[name]).release is not None}
        send.arm = ",".join(sorted(arms)) or None
        templates = {name: catalog.templates[name][version] for name, version in send.versions.items()}
        for id in asked:
            asking.transform_response(
                id, partial(self._written, send.call.address.rollout, server, catalog.recogniser, templates)
            )

    def _written(
        self, rollout: str, server: str, recogniser: Recogniser, versions: Mapping[str, Template], answer: bytes
    ) -> bytes:
        """The list with these versions in it. Descriptions that are not recognised pass unchanged and are counted."""
        metrics = self._shared.metrics
        places = _DIALECT.tool_texts(answer)
        made = write_versions(answer, find_tools(places, recogniser, partial(_called, server)), versions)
        for use in made.uses:
            metrics.prompt_rewrites[(use.matched_by,)] += 1
        for miss in made.misses:
            metrics.prompt_misses[(miss.why,)] += 1
        self._shared.pins.notes.add(rollout, {use.resource for use in made.uses}, made.misses)
        return made.body


def _called(server: str, sent: str, name: str) -> bool:
    """True if agents mean this tool of the server by the name that they send."""
    return match_name(sent, server, name) is MatchDegree.SAME


# -- the definitions of servers in memory: the approved ones, those seen last, and the differences --------------------
#
# If changes only cause warnings, an answer is read after it was passed on, in a thread (`observe`); an answer whose
# bytes were read before is recognised by its hash. If changes are held back or denied, an answer is read before it is
# passed on (`approved_answer`). Either way a whole list is written to the tape when it is new, and once a minute when
# it is not.
#
# For a server without an approved version, the first definitions passed on count as approved in memory until the tape
# has them.

_log = logging.getLogger("penstock.mcp")
_AGAIN_NS: Final = 60 * 10**9
"""Time after which a known list is written as seen again."""
_REMEMBERED: Final = 64
"""Maximum number of answers that are recognised by their hash; below, the maximum size of one."""
_REMEMBERED_BYTES: Final = 1 << 18
_PARTS: Final = 1000
"""Maximum number of lists whose next page is awaited."""
_UNKNOWN_SERVERS: Final = 1000
"""Maximum number of remembered servers that no setting names."""
_MOST: Final = 10_000
"""Maximum number of definitions of one list, and of tools of one server whose annotations are remembered."""


class ListRequest(NamedTuple):
    """The request for a page of a list."""

    server: str
    method: str
    cursor: str | None
    """The cursor of the requested page; None for the first."""
    whose: AttemptRef

    @property
    def kind(self) -> DefinitionKind:
        """The kind of the listed definitions."""
        return LISTS[self.method][0]


@dataclass(slots=True)
class DefinitionCache:
    """The definitions of one server in memory."""

    on_change: OnChange
    known: ServerDefinitions
    approved: dict[DefinitionKind, dict[str, Definition]] = field(
        default_factory=dict[DefinitionKind, dict[str, Definition]]
    )
    """The definitions of the pinned versions, by name."""
    first: dict[DefinitionKind, dict[str, Definition]] = field(
        default_factory=dict[DefinitionKind, dict[str, Definition]]
    )
    """The definitions passed on so far of lists that have no pinned version yet."""
    changed: dict[DefinitionKind, dict[str, DefinitionChange]] = field(
        default_factory=dict[DefinitionKind, dict[str, DefinitionChange]]
    )
    """The differences between the server's latest answer and the approved definitions, by name."""
    annotations: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """The annotations of tools, by name, from the latest answer; the least recently listed tools first."""


class DefinitionService:
    """The definitions of all servers. Only the event loop may use it."""

    def __init__(
        self,
        tape: StoreReader,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        servers: Mapping[str, McpServer],
    ) -> None:
        """`servers`: the configured servers, by name."""
        self.reader = DefinitionReader(tape)
        self.on_change: dict[str, OnChange] = {name: server.on_change for name, server in servers.items()}
        self._recorder, self._metrics, self._now_ns = recorder, metrics, now_ns
        self._servers: dict[str, DefinitionCache] = {}
        self._thread = ThreadPoolExecutor(1, "penstock-definitions")
        self._read: OrderedDict[bytes, DefinitionPage] = OrderedDict()
        self._parts: OrderedDict[tuple[str, str, DefinitionKind], tuple[str, dict[str, Definition]]] = OrderedDict()
        self._closed = False
        self._coming = 0
        """Number of answers whose reading has not begun."""
        self._reading: set[asyncio.Future[Any]] = set()

    async def start(self) -> None:
        """Loads the definitions of the configured servers from the tape."""
        for name, on_change in self.on_change.items():
            self._open(name, on_change)

    def _open(self, name: str, on_change: OnChange) -> None:
        """Loads a server's definitions from the tape. If they cannot be read, nothing counts as approved."""
        self._servers[name] = server = DefinitionCache(on_change, ServerDefinitions(server=name))
        try:
            self._recall(server, self.reader.server(name) or server.known)
        except DamagedRecordError as error:
            _log.error("%s. Nothing that it lists counts as approved", error)
            server.approved = {kind: {} for kind, _, _ in LISTS.values()}

    async def stop(self) -> None:
        """Ends the thread, and waits for writes to the tape, for at most 1 s."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._reading:
            await asyncio.wait(list(self._reading), timeout=1)

    @property
    def busy(self) -> bool:
        """True while an answer that was passed on is not on the tape yet."""
        return bool(self._coming or self._reading)

    async def drain(self) -> None:
        """Waits for the present reads and writes."""
        await asyncio.sleep(0)
        if self._reading:
            await asyncio.wait(list(self._reading))

    def _recall(self, server: DefinitionCache, known: ServerDefinitions) -> None:
        """Updates a server in memory from its record on the tape."""
        before, server.known = server.known, known
        for kind, number in known.pinned.items():
            if kind in server.approved and before.pinned.get(kind) == number:
                continue
            if server.on_change != "warn":
                server.approved[kind] = self.reader.items(known, number)
            server.first.pop(kind, None)
        for kind, number in known.newest.items():
            said, approved = known.version(number), known.version(known.pinned.get(kind))
            if said is not None and approved is not None:
                different = changes(approved.items, said.items)
                server.changed[kind] = {one.name: one for one in different if one.what != "removed"}
        if not server.annotations and "tools" in known.newest:
            self._annotate(server, self.reader.items(known, known.newest["tools"]))

    def _annotate(self, server: DefinitionCache, items: Mapping[str, Definition]) -> None:
        for name, item in items.items():
            try:
                # Not orjson: it refuses some numbers and texts that were accepted.
                found = json.loads(item.text).get("annotations")
            except RecursionError:
                found = None
            _ = server.annotations.pop(name, None)
            server.annotations[name] = found if isinstance(found, dict) else {}
        while len(server.annotations) > _MOST:
            del server.annotations[next(iter(server.annotations))]

    # -- reads and approvals ------------------------------------------------------------------------------------------

    def annotations(self, server: str, tool: str) -> dict[str, Any] | None:
        """The annotations of a tool in the server's latest list; None for a tool that it has never listed."""
        found = self._servers.get(server)
        return None if found is None else found.annotations.get(tool)

    def tools(self, server: str) -> frozenset[str]:
        """Names of the tools that a server has listed; empty before its first list."""
        found = self._servers.get(server)
        return frozenset() if found is None else frozenset(found.annotations)

    def enforces_approval(self, server: str) -> bool:
        """True if lists of a server are read before they are passed on."""
        return self.on_change.get(server, "warn") != "warn"

    def difference(self, server: str, kind: DefinitionKind, name: str) -> DefinitionChange | None:
        """The difference between a definition in the server's latest answer and the approved one; None without one."""
        return self._servers[server].changed.get(kind, {}).get(name)

    async def approve(self, server: str, asked: ApproveRequest) -> ServerDefinitions:
        """Approves a version, or the newest of every list; durable when it returns. Raises `OperationRefusedError`."""
        now = self._now_ns()
        known = await self._recorder.submit(lambda tape: DefinitionOperations(tape).approve(server, asked, now))
        if server in self._servers:
            self._recall(self._servers[server], known)
        numbers = ", ".join(map(str, known.pinned.values()))
        _log.info("server %s: %r has approved; version %s is served", server, asked.who, numbers)
        return known

    # -- lists in passing answers -------------------------------------------------------------------------------------

    def observe(self, exchange: ListRequest, answer: bytes) -> None:
        """Reads an answer that is being passed on: in a thread, after the present write to the client. Penstock's own
        tools are left out: nobody else can change them."""
        if exchange.server not in self._servers:
            return
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._begin, exchange, answer)

    def observe_wrapped(self, exchange: ListRequest, answer: bytes) -> None:
        """Reads an answer that has passed a wrapper. A server in the settings is known by its own answers alone:
        anybody can give its name to a wrapper."""
        name = exchange.server
        if name in self.on_change:
            return
        if name not in self._servers:
            if len(self._servers) >= len(self.on_change) + _UNKNOWN_SERVERS:
                return
            self._open(name, "warn")
        self.observe(exchange, answer)

    def _begin(self, exchange: ListRequest, answer: bytes) -> None:
        self._coming -= 1
        if self._closed:
            return
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._listed, exchange.method, answer)
        self._reading.add(reading)
        reading.add_done_callback(lambda done: self._on_read(exchange, done))

    def _on_read(self, exchange: ListRequest, done: asyncio.Future[DefinitionPage | None]) -> None:
        self._reading.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, UnreadableMessage):
            self._metrics.mcp_definitions[(exchange.server, "unreadable")] += 1
            _log.warning("server %s: its answer to %s cannot be read: %s", exchange.server, exchange.method, error)
        elif error is not None:
            _log.error("an answer to %s could not be read", exchange.method, exc_info=error)
        elif (listed := done.result()) is not None:
            self._note(exchange, listed)

    def approved_answer(self, exchange: ListRequest, answer: bytes) -> ApprovedAnswer | None:
        """An answer with the approved definitions only; None for an error. Raises `UnreadableMessage`."""
        try:
            listed = self._listed(exchange.method, answer)
        except UnreadableMessage:
            self._metrics.mcp_definitions[(exchange.server, "unreadable")] += 1
            raise
        if listed is None:
            return None
        server, kind = self._servers[exchange.server], exchange.kind
        approved = server.approved.get(kind)
        if approved is None:
            approved = server.first.setdefault(kind, {})
            for name, item in listed.items.items() if len(approved) < _MOST else ():
                approved.setdefault(name, item)
        differ = server.changed.setdefault(kind, {})
        for name in listed.items:
            differ.pop(name, None)
        said, meant = fingerprints(listed.items), fingerprints(approved)
        made = (
            ApprovedAnswer(answer, [])
            if said.items() <= meant.items()
            else restrict_to_approved(exchange.method, answer, approved)
        )
        assert made is not None
        differ.update({one.name: one for one in made.changes})
        self._note(exchange, listed)
        return made

    def _listed(self, method: str, answer: bytes) -> DefinitionPage | None:
        """A parsed answer. Bytes that were read before are recognised by their hash, which covers all bytes: a change
        could hide in bytes left out."""
        digest = hashlib.blake2b(answer, digest_size=32, person=method.encode()[:16]).digest()
        known = self._read.get(digest)
        if known is None:
            known = read_page(method, answer)
            if known is not None and len(answer) <= _REMEMBERED_BYTES:
                self._read[digest] = known
                if len(self._read) > _REMEMBERED:
                    self._read.popitem(last=False)
        return known

    # -- recording ----------------------------------------------------------------------------------------------------

    def _note(self, exchange: ListRequest, listed: DefinitionPage) -> None:
        """Remembers a page that was listed, and writes the whole list when it is complete."""
        server = self._servers[exchange.server]
        if listed.kind == "tools":
            self._annotate(server, listed.items)
        items = self._whole(exchange, listed)
        if items is None:
            return
        wanted = list_fingerprint(fingerprints(items))
        version = server.known.version(server.known.newest.get(listed.kind))
        now = self._now_ns()
        if version is not None and version.fingerprint == wanted and now - version.last_seen_ns < _AGAIN_NS:
            return
        accepted = server.on_change == "warn"
        sighting = Sighting(exchange.server, listed.kind, items, exchange.whose, accepted)
        first = server.first.get(listed.kind, {})
        served = {name: first[name] for name in items if name in first}
        if served and fingerprints(served) != fingerprints(items):
            # Parts of another list were passed on before: the definitions that agents were given are approved.
            self._write(server, sighting._replace(items=served), now)
        self._write(server, sighting, now)

    def _write(self, server: DefinitionCache, sighting: Sighting, now: int) -> None:
        writing = self._recorder.submit(lambda tape: DefinitionOperations(tape).record_sighting(sighting, now))
        self._reading.add(writing)
        writing.add_done_callback(lambda done: self._on_written(server, sighting, done))

    def _on_written(self, server: DefinitionCache, sighting: Sighting, done: asyncio.Future[SightingResult]) -> None:
        self._reading.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            # It is written when the server lists it the next time.
            if not isinstance(error, TapeError):
                _log.error("what server %s lists could not be kept", sighting.server, exc_info=error)
            return
        seen = done.result()
        self._recall(server, seen.known)
        if seen.changes:
            self._metrics.mcp_definitions[(sighting.server, "changed")] += 1
            _log.warning(
                "server %s lists other %s than before (version %s): %s; see `penstock mcp definitions %s --diff`",
                *(sighting.server, sighting.kind, seen.version, describe_changes(seen.changes), sighting.server),
            )

    def _whole(self, exchange: ListRequest, listed: DefinitionPage) -> dict[str, Definition] | None:
        """All definitions of a list, once its last page was listed; None before, or where pages are missing."""
        place = exchange.server, exchange.whose.rollout, listed.kind
        expected, items = self._parts.pop(place, (None, dict[str, Definition]()))
        if exchange.cursor is None:
            items = dict[str, Definition]()
        elif exchange.cursor != expected:
            return None
        items = items | listed.items
        if listed.more is None:
            return items
        if len(items) < _MOST:
            self._parts[place] = listed.more, items
            if len(self._parts) > _PARTS:
                self._parts.popitem(last=False)
        return None
