"""What servers say of themselves, as calls need it: what is approved, what has passed, what differs.

While changes are only warned of, an answer is read after it has passed, in a thread (`heard`); one whose bytes were
read before is recognised by their hash. Where changes are held back or denied an answer is read before it passes
(`held_to`). Either way a whole list goes to the tape when it is new, and once a minute when it is not.

Of a server without an approved version, what passes first holds in memory until the tape has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from penstock.gateway.definitions.operations import DefinitionOperations, Seen, Sighting, Whose, described
from penstock.gateway.definitions.reader import DefinitionReader
from penstock.gateway.definitions.reading import (
    LISTS,
    Change,
    Held,
    Item,
    Listed,
    Unreadable,
    changes,
    fingerprints,
    held,
    list_fingerprint,
    read,
)
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.definitions import ApproveRequest, Kind, OnChange, ServerDefinitions
from penstock.gateway.model.server_settings import McpServer
from penstock.gateway.store.directory import Damaged, TapeError
from penstock.gateway.store.reader import Reader
from penstock.gateway.store.recorder import Recorder

_log = logging.getLogger("penstock.mcp")
_AGAIN_NS: Final = 60 * 10**9
"""After which a list that was seen before is written as seen again."""
_REMEMBERED: Final = 64
"""Answers that are recognised by their hash, and the bytes that one may have."""
_REMEMBERED_BYTES: Final = 1 << 18
_PARTS: Final = 1000
"""Lists whose next page is awaited."""
_UNKNOWN_SERVERS: Final = 1000
"""Servers that no setting names and that are remembered."""
_MOST: Final = 10_000
"""Definitions of one list, and tools of one server whose annotations are remembered."""


class Exchange(NamedTuple):
    """Where a list was asked for."""

    server: str
    method: str
    cursor: str | None
    """Which page was asked for; None for the first."""
    whose: Whose

    @property
    def kind(self) -> Kind:
        """What is listed."""
        return LISTS[self.method][0]


@dataclass(slots=True)
class Server:
    """What is remembered of one server."""

    on_change: OnChange
    known: ServerDefinitions
    approved: dict[Kind, dict[str, Item]] = field(default_factory=dict[Kind, dict[str, Item]])
    """What the pinned versions say."""
    first: dict[Kind, dict[str, Item]] = field(default_factory=dict[Kind, dict[str, Item]])
    """What has passed of lists that have no pinned version yet."""
    changed: dict[Kind, dict[str, Change]] = field(default_factory=dict[Kind, dict[str, Change]])
    """What the server says differently from what is approved, by name, as it was heard last."""
    annotations: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Of tools, by name, as they were heard last; those that were not heard for longest first."""


class Definitions:
    """What all servers say of themselves. For the event loop."""

    def __init__(
        self,
        tape: Reader,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        servers: Mapping[str, McpServer],
    ) -> None:
        """`servers`: those that are configured."""
        self.reader = DefinitionReader(tape)
        self.on_change: dict[str, OnChange] = {name: server.on_change for name, server in servers.items()}
        self._recorder, self._metrics, self._now_ns = recorder, metrics, now_ns
        self._servers: dict[str, Server] = {}
        self._thread = ThreadPoolExecutor(1, "penstock-definitions")
        self._read: OrderedDict[bytes, Listed] = OrderedDict()
        self._parts: OrderedDict[tuple[str, str, Kind], tuple[str, dict[str, Item]]] = OrderedDict()
        self._closed = False
        self._coming = 0
        """Answers whose reading has not begun."""
        self._reading: set[asyncio.Future[Any]] = set()

    def start(self) -> None:
        """Remembers what the tape has."""
        for name, on_change in self.on_change.items():
            self._open(name, on_change)

    def _open(self, name: str, on_change: OnChange) -> None:
        """Remembers what the tape has of a server. Where that cannot be read, nothing counts as approved."""
        self._servers[name] = server = Server(on_change, ServerDefinitions(server=name))
        try:
            self._recall(server, self.reader.server(name) or server.known)
        except Damaged as error:
            _log.error("%s. Nothing that it lists counts as approved", error)
            server.approved = {kind: {} for kind, _, _ in LISTS.values()}

    async def close(self) -> None:
        """Ends the thread, and waits for what is on its way to the tape."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._reading:
            await asyncio.wait(list(self._reading), timeout=1)

    @property
    def busy(self) -> bool:
        """Whether anything that has passed is not on the tape yet."""
        return bool(self._coming or self._reading)

    async def settled(self) -> None:
        """Waits for what is read and written now."""
        await asyncio.sleep(0)
        if self._reading:
            await asyncio.wait(list(self._reading))

    def _recall(self, server: Server, known: ServerDefinitions) -> None:
        """The tape has this of a server."""
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

    def _annotate(self, server: Server, items: Mapping[str, Item]) -> None:
        for name, item in items.items():
            try:
                # Its digits may be more than orjson takes, its texts what orjson refuses.
                found = json.loads(item.text).get("annotations")
            except RecursionError:
                found = None
            _ = server.annotations.pop(name, None)
            server.annotations[name] = found if isinstance(found, dict) else {}
        while len(server.annotations) > _MOST:
            del server.annotations[next(iter(server.annotations))]

    # -- what others ask ----------------------------------------------------------------------------------------------

    def annotations(self, server: str, tool: str) -> dict[str, Any] | None:
        """The annotations of a tool as the server has listed it last; None for a tool that it has never listed."""
        found = self._servers.get(server)
        return None if found is None else found.annotations.get(tool)

    def tools(self, server: str) -> frozenset[str]:
        """Names of the tools that a server has listed; empty where it has not been asked yet."""
        found = self._servers.get(server)
        return frozenset() if found is None else frozenset(found.annotations)

    def reads(self, server: str) -> bool:
        """Whether lists of a server are read before they pass."""
        return self.on_change.get(server, "warn") != "warn"

    def difference(self, server: str, kind: Kind, name: str) -> Change | None:
        """What a server says of something differently from what is approved, as it was heard last."""
        return self._servers[server].changed.get(kind, {}).get(name)

    async def approve(self, server: str, asked: ApproveRequest) -> ServerDefinitions:
        """Approves what a server says; durable when it is answered. Raises `Refused`."""
        now = self._now_ns()
        known = await self._recorder.submit(lambda tape: DefinitionOperations(tape).approve(server, asked, now))
        if server in self._servers:
            self._recall(self._servers[server], known)
        numbers = ", ".join(map(str, known.pinned.values()))
        _log.info("server %s: %r has approved; version %s is served", server, asked.who, numbers)
        return known

    # -- what passes --------------------------------------------------------------------------------------------------

    def heard(self, exchange: Exchange, answer: bytes) -> None:
        """An answer passes: it is read in a thread, after what is written to the client now. Penstock's own tools are
        nobody else's to change."""
        if exchange.server not in self._servers:
            return
        self._coming += 1
        asyncio.get_running_loop().call_soon(self._begin, exchange, answer)

    def overheard(self, exchange: Exchange, answer: bytes) -> None:
        """An answer has passed a wrapper. A server that the settings name is known by its own answers alone: anybody
        can give that name to a wrapper."""
        name = exchange.server
        if name in self.on_change:
            return
        if name not in self._servers:
            if len(self._servers) >= len(self.on_change) + _UNKNOWN_SERVERS:
                return
            self._open(name, "warn")
        self.heard(exchange, answer)

    def _begin(self, exchange: Exchange, answer: bytes) -> None:
        self._coming -= 1
        if self._closed:
            return
        reading = asyncio.get_running_loop().run_in_executor(self._thread, self._listed, exchange.method, answer)
        self._reading.add(reading)
        reading.add_done_callback(lambda done: self._on_read(exchange, done))

    def _on_read(self, exchange: Exchange, done: asyncio.Future[Listed | None]) -> None:
        self._reading.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if isinstance(error, Unreadable):
            self._metrics.mcp_definitions[(exchange.server, "unreadable")] += 1
            _log.warning("server %s: its answer to %s cannot be read: %s", exchange.server, exchange.method, error)
        elif error is not None:
            _log.error("an answer to %s could not be read", exchange.method, exc_info=error)
        elif (listed := done.result()) is not None:
            self._note(exchange, listed)

    def held_to(self, exchange: Exchange, answer: bytes) -> Held | None:
        """An answer, held to what is approved; None for an error. Raises `Unreadable`."""
        try:
            listed = self._listed(exchange.method, answer)
        except Unreadable:
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
        made = Held(answer, []) if said.items() <= meant.items() else held(exchange.method, answer, approved)
        assert made is not None
        differ.update({one.name: one for one in made.changes})
        self._note(exchange, listed)
        return made

    def _listed(self, method: str, answer: bytes) -> Listed | None:
        """An answer, read. The same bytes again are recognised. All of them count: what is left out of a hash is where
        something could hide."""
        digest = hashlib.blake2b(answer, digest_size=32, person=method.encode()[:16]).digest()
        known = self._read.get(digest)
        if known is None:
            known = read(method, answer)
            if known is not None and len(answer) <= _REMEMBERED_BYTES:
                self._read[digest] = known
                if len(self._read) > _REMEMBERED:
                    self._read.popitem(last=False)
        return known

    # -- what is kept -------------------------------------------------------------------------------------------------

    def _note(self, exchange: Exchange, listed: Listed) -> None:
        """A page was listed."""
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
            # Parts of another list have passed before: what is approved is what agents were given.
            self._write(server, sighting._replace(items=served), now)
        self._write(server, sighting, now)

    def _write(self, server: Server, sighting: Sighting, now: int) -> None:
        writing = self._recorder.submit(lambda tape: DefinitionOperations(tape).seen(sighting, now))
        self._reading.add(writing)
        writing.add_done_callback(lambda done: self._on_written(server, sighting, done))

    def _on_written(self, server: Server, sighting: Sighting, done: asyncio.Future[Seen]) -> None:
        self._reading.discard(done)
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            # It is written when it is listed the next time.
            if not isinstance(error, TapeError):
                _log.error("what server %s lists could not be kept", sighting.server, exc_info=error)
            return
        seen = done.result()
        self._recall(server, seen.known)
        if seen.changes:
            self._metrics.mcp_definitions[(sighting.server, "changed")] += 1
            _log.warning(
                "server %s lists other %s than before (version %s): %s; see `penstock mcp definitions %s --diff`",
                *(sighting.server, sighting.kind, seen.version, described(seen.changes), sighting.server),
            )

    def _whole(self, exchange: Exchange, listed: Listed) -> dict[str, Item] | None:
        """All definitions of a list, once its last page was listed; None before, or where pages are missing."""
        place = exchange.server, exchange.whose.rollout, listed.kind
        expected, items = self._parts.pop(place, (None, dict[str, Item]()))
        if exchange.cursor is None:
            items = dict[str, Item]()
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
