"""The work that the workers of a gateway do for each other (`process.leader_rpc`).

The first one asks the others to write their queues, before the end of an attempt is answered; to follow a change of a
release, before that is answered; which rollouts they serve calls of, before one is forgotten; to pause an upstream; and
for their figures. The others tell it when they have written, so that followers of the feed hear of it. Every second the
first one collects the figures of the others, and sends them the counters of those that have died: a counter must not
fall because a worker has died.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from random import getrandbits
from time import monotonic
from typing import Any, Final, TypeAlias, cast

import msgspec

from penstock.gateway.model.metrics import METRICS, Histogram, Metrics
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.process.handover import WorkerSlot
from penstock.gateway.process.leader_rpc import (
    PATIENCE_S,
    Handler,
    LeaderClient,
    LeaderServer,
    LinkLostError,
    WorkerLink,
)
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.traffic.budgets.service import Budgets
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher, read_answers
from penstock.gateway.traffic.calls.conversations import (
    UNREAD_BYTES,
    ConversationFingerprint,
    ConversationMatch,
    RepeatableRequest,
    UnreadAnswer,
)
from penstock.gateway.traffic.trials.adapter_keeper import AdapterKeeper
from penstock.gateway.traffic.upstreams.health import STATES
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.versions import PinTable
from penstock.gateway.wire.http.client_connection import ConnectionHints
from penstock.gateway.work.queue import MemoryQueue

# Conversations of several workers: the first keeps them for all (`calls.conversation_matcher`), the others ask it.
#
# An answer stays with the worker that has passed it on. The first one asks for its content where only that tells equal
# conversations apart. Fingerprints of conversations are numbers that all workers of a gateway make alike
# (`process.workers` gives them one seed for hashes).

_CONNECTIONS: Final = 20_000
"""Connections of each worker whose conversations the first one remembers."""
_UNDER_WAY: Final = 20_000
"""Calls of each worker that were found and have not ended; the end of a call is never reported if its client has
left."""
_NUMBERS: Final = "q"


class ConversationQuery(msgspec.Struct):
    """The facts of a call that the first worker is asked about."""

    connection: int
    """Number of its connection, given by the worker that asks."""
    peer: str
    last: str | None
    """As in `ConnectionHints`."""
    beginnings: bytes
    items: bytes
    previous: str | None
    answers: bool
    repeats: RepeatableRequest | None = None


class CallCompletion(msgspec.Struct):
    """The facts of a call that was answered."""

    number: int
    key: int | None
    connection: int
    peer: str
    rollout: str
    answer: int
    weight: int
    names: list[str]


class CallFailure(msgspec.Struct):
    """The facts of a call that failed."""

    request: RepeatableRequest
    connection: int
    peer: str
    rollout: str


@dataclass(slots=True)
class _PeerState:
    """The first worker's memory of a worker that asks."""

    hints: OrderedDict[int, ConnectionHints] = field(default_factory=OrderedDict[int, ConnectionHints])
    """Hints of recent connections, by number."""
    under_way: dict[int, ConversationMatch] = field(default_factory=dict[int, ConversationMatch])
    """Calls that were found and have not ended, by number."""

    def of(self, connection: int, peer: str) -> ConnectionHints:
        """Return the hints of a connection."""
        hints = self.hints.setdefault(connection, ConnectionHints(peer))
        self.hints.move_to_end(connection)
        if len(self.hints) > _CONNECTIONS:
            self.hints.popitem(last=False)
        return hints

    def begin(self, number: int, found: ConversationMatch) -> None:
        """Remember a call that was found."""
        self.under_way[number] = found
        if len(self.under_way) > _UNDER_WAY:
            del self.under_way[next(iter(self.under_way))]


class _RemoteAnswer:
    """The answer to a call of another worker; it is fetched on the thread that reads answers."""

    def __init__(self, link: WorkerLink, number: int, weight: int) -> None:
        self._link, self._number, self.weight = link, number, weight
        self._loop = asyncio.get_running_loop()

    def said(self) -> array[int]:
        """Return the content of the answer; raises `LookupError` where it is not known any more."""
        asking = asyncio.run_coroutine_threadsafe(_fetch_answer(self._link, self._number), self._loop)
        said = asking.result(PATIENCE_S)
        if said is None:
            raise LookupError("the answer was dropped, or its worker has died")
        return array(_NUMBERS, said)


async def _fetch_answer(link: WorkerLink, number: int) -> bytes | None:
    try:
        return await link.request("said", number)
    except (LinkLostError, RuntimeError):
        return None


class ConversationServer:
    """The first worker's end: keeps the conversations and answers the others."""

    def __init__(self, joining: ConversationMatcher) -> None:
        self._joining = joining
        # Numbers begin at random, so that they are not those of an earlier first worker.
        self._numbers = count(1 + getrandbits(48))

    def handlers(self, link: WorkerLink) -> Mapping[str, Handler]:
        """Return the handlers for requests of another worker by this link."""
        worker = _PeerState()

        async def find(said: Any) -> tuple[str | None, bool, int, bool]:
            return await self._find(worker, msgspec.convert(said, ConversationQuery))

        def remember(said: Any) -> None:
            self._remember(worker, link, msgspec.convert(said, CallCompletion))

        def undo(number: int, key: int | None) -> None:
            found = worker.under_way.pop(number, None)
            if found is not None and key is not None:
                self._joining.conversations.undo(found, key)

        def failed(said: Any) -> None:
            call = msgspec.convert(said, CallFailure)
            hints = worker.of(call.connection, call.peer)
            self._joining.conversations.failed.remember(call.request, hints, call.rollout, monotonic())

        return {"find": find, "remember": remember, "undo": undo, "failed": failed}

    async def _find(self, worker: _PeerState, asked: ConversationQuery) -> tuple[str | None, bool, int, bool]:
        hints = worker.of(asked.connection, asked.peer)
        hints.last = asked.last
        story = ConversationFingerprint(array(_NUMBERS, asked.items), array(_NUMBERS, asked.beginnings))
        while True:
            found = self._joining.find(story, asked.previous, asked.answers, hints, asked.repeats)
            if not found.unread:
                break
            unread = found.unread
            await self._joining.on_thread(lambda: read_answers(unread))  # noqa: B023 - it is done before the next one
        number = 0
        if asked.answers:
            number = next(self._numbers)
            worker.begin(number, found)
        return found.rollout, found.ambiguous, number, found.retry

    def _remember(self, worker: _PeerState, link: WorkerLink, said: CallCompletion) -> None:
        # An earlier first worker may have found it, and has died since.
        found = worker.under_way.pop(said.number, None) or ConversationMatch()
        hints = worker.of(said.connection, said.peer)
        answer = _RemoteAnswer(link, said.answer, said.weight)
        self._joining.remember_answer(found, said.key, hints, said.rollout, answer, said.names)


class ConversationClient:
    """Another worker's end: implements `calls.conversation_matcher.RemoteConversations`."""

    def __init__(self, member: LeaderClient) -> None:
        self._member = member
        self._connections, self._numbers = count(1), count(1)
        self._answers: OrderedDict[int, UnreadAnswer] = OrderedDict()
        self._weight = 0

    async def find(
        self,
        story: ConversationFingerprint,
        previous: str | None,
        answers: bool,
        hints: ConnectionHints,
        repeats: RepeatableRequest | None,
    ) -> ConversationMatch:
        """Find the conversation of a call as `ConversationMatcher.find` does; without a rollout where the first worker
        does not answer."""
        beginnings, items = story.beginnings.tobytes(), story.items.tobytes()
        hints.number = hints.number or next(self._connections)
        asked = ConversationQuery(hints.number, hints.peer, hints.last, beginnings, items, previous, answers, repeats)
        found = await self._member.request("find", asked)
        if found is None:
            return ConversationMatch()
        rollout, ambiguous, number, retry = found
        return ConversationMatch(rollout, ambiguous, number=number, retry=retry)

    def remember(
        self,
        found: ConversationMatch,
        key: int | None,
        hints: ConnectionHints,
        rollout: str,
        answer: UnreadAnswer,
        names: list[str],
    ) -> None:
        """Report an answered call as `ConversationMatcher.remember_answer` does."""
        number = next(self._numbers)
        if key is not None:
            self._answers[number] = answer
            self._weight += answer.weight
            # The first worker keeps as many of all workers together.
            while self._weight > UNREAD_BYTES:
                self._weight -= self._answers.popitem(last=False)[1].weight
        ended = CallCompletion(found.number, key, hints.number, hints.peer, rollout, number, answer.weight, names)
        self._member.notify("remember", ended)

    def undo(self, found: ConversationMatch, key: int | None) -> None:
        self._member.notify("undo", found.number, key)

    def remember_failed(self, request: RepeatableRequest, hints: ConnectionHints, rollout: str) -> None:
        hints.number = hints.number or next(self._connections)
        self._member.notify("failed", CallFailure(request, hints.number, hints.peer, rollout))

    async def said(self, number: int) -> bytes | None:
        """Return the content of an answer, for the first worker; None where it was dropped."""
        answer = self._answers.pop(number, None)
        if answer is None:
            return None
        self._weight -= answer.weight
        return (await asyncio.to_thread(answer.said)).tobytes()


# The figures of several workers as those of one gateway: counters and most gauges are added up.

MetricsDump: TypeAlias = "dict[str, Any]"
"""Figures in the form that is sent to another process: a number, (counts, total) of a histogram, or pairs of labels and
these."""
_NOT_ADDED: Final = frozenset(
    {
        "tape_bytes", "certificate_expires_timestamp_seconds", "upstream_health", "resource_coverage_fell",
        "recorder_oldest_seconds",
    }
)  # fmt: skip
"""Gauges of a value that all workers share, or that each finds out by itself: the largest is shown."""
_GAUGES: Final = frozenset(name.removeprefix("penstock_") for name, one in METRICS.items() if one.kind == "gauge")


def dump(metrics: Metrics) -> MetricsDump:
    """Return all figures of this process."""
    return {name: _dumped(getattr(metrics, name)) for name in metrics.__slots__}


def counters_only(of: MetricsDump) -> MetricsDump:
    """Return the counters of a worker that has died; its gauges are emptied."""
    empty = dump(Metrics())
    return {name: empty[name] if name in _GAUGES else value for name, value in of.items()}


def merge_metrics(dumps: Iterable[MetricsDump]) -> Metrics:
    """Return the figures of several processes as those of one."""
    made = Metrics()
    for one in dumps:
        for name in made.__slots__:
            setattr(made, name, _merge_joined(getattr(made, name), one[name], name in _NOT_ADDED))
    return made


def _dumped(value: Any) -> Any:
    if isinstance(value, dict):
        return [(labels, _dumped(one)) for labels, one in cast(dict[Any, Any], value).items()]
    return (value.counts, value.total) if isinstance(value, Histogram) else value


def _merge_joined(value: Any, dumped: Any, largest: bool) -> Any:
    if isinstance(value, Histogram):
        other = Histogram()
        other.counts, other.total = list(dumped[0]), dumped[1]
        value.add(other)
        return value
    if isinstance(value, dict):
        found = cast(dict[Any, Any], value)
        for labels, one in dumped:
            key = tuple(labels)
            empty = Histogram() if isinstance(one, list | tuple) else 0
            found[key] = _merge_joined(found.get(key, empty), one, largest)
        return found
    return max(value, dumped) if largest else value + dumped


@dataclass(slots=True)
class WorkerServices:
    """The parts of the gateway that this work needs."""

    store: Store
    recorder: Recorder
    pins: PinTable
    pools: Mapping[str, ConnectionPool]
    metrics: Callable[[], Metrics]
    """Returns the figures of this process, with gauges as they are now."""
    budgets: Budgets
    busy: Callable[[], set[str]]
    """Returns the rollouts of which this process serves a call."""
    wrote: Callable[[], None]
    """Called when another process has written."""
    view: Callable[[ConnectionPool], UpstreamView]


@dataclass(slots=True)
class WorkerPeers:
    """A worker's connections to the others. The first worker has no link to itself, a single-process gateway has no
    links."""

    place: WorkerSlot
    is_leader: bool = field(init=False)
    """True if this is the first one."""
    leader: LeaderServer = field(init=False)
    member: LeaderClient | None = field(init=False)
    joining: ConversationMatcher = field(init=False)
    """The conversations: those of all workers in the first one, else a client of them."""
    _asker: ConversationClient | None = field(init=False)
    _keeper: ConversationServer = field(init=False)
    _keeps_adapters: Callable[[], asyncio.Future[None]] = field(init=False)
    _parts: WorkerServices = field(init=False)
    _gone: dict[WorkerLink, Callable[[], None]] = field(
        default_factory=dict[WorkerLink, Callable[[], None]], init=False
    )
    """Functions to call when a worker is gone."""
    _figures: dict[str, MetricsDump] = field(default_factory=dict[str, MetricsDump], init=False)
    """The last figures of the others, by process."""
    _past: list[MetricsDump] = field(default_factory=list[MetricsDump], init=False)
    """The added counters of workers that have died, as one entry; empty when there are none."""
    _known: tuple[float, list[MetricsDump]] = field(default=(0.0, []), init=False)
    """What a first worker that dies leaves behind: the time, and the counters of the past and of itself, as it sent
    them last."""
    _looking: asyncio.Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.is_leader = self.place.number == 0
        self.leader = LeaderServer(self._joined, self._left)
        self.member = None if self.is_leader else LeaderClient()
        self._asker = None if self.member is None else ConversationClient(self.member)
        self.joining = ConversationMatcher(self._asker)
        self._keeper = ConversationServer(self.joining)

    @property
    def has_peers(self) -> bool:
        """True if the gateway has several workers."""
        return self.place.of > 1

    def peer_processes(self) -> set[str]:
        """Return the names of the workers that have a link with this one."""
        return {link.name for link in self.leader.links}

    async def request_leader(self, name: str, *said: Any) -> Any:
        """Return the first worker's answer; None where it gives none."""
        return None if self.member is None else await self.member.request_now(name, *said)

    def notify_leader(self, name: str, *said: Any) -> None:
        """Send a message to the first worker."""
        if self.member is not None:
            self.member.notify(name, *said)

    async def request_peers(self, name: str, *said: Any) -> Mapping[str, Any]:
        """Return the answers of the other workers, by the names of their processes."""
        return await self.leader.request(name, *said)

    async def start(self, parts: WorkerServices, inside: Callable[[], asyncio.Protocol]) -> None:
        """Open the links. `inside`: makes the protocol of a request that another worker passes on."""
        self._parts = parts
        if self.member is not None:
            self.member.start(parts.store.path, self._hello, self._asked_of_others(), parts.budgets.move_remote_to_tape)
        elif self.place.inside is not None:
            await self.leader.start(
                *self.place.inside,
                inside,
                self._asked_of_first,
            )

    async def stop(self) -> None:
        if self._looking is not None:
            await self._looking
        if self.member is not None:
            await self.member.stop()
        await self.leader.stop()

    def leave(self) -> None:
        """Called when another gateway takes over: make no further link to a first worker."""
        if self.member is not None:
            self.member.leave()

    @property
    def no_peers(self) -> asyncio.Event:
        """Set while no other worker has a link with this one."""
        return self.leader.alone

    def adapter_repair(self, keeper: AdapterKeeper) -> Callable[[], asyncio.Future[None]]:
        """Return `AdapterKeeper.repair` of the first worker, which repairs for all."""
        self._keeps_adapters = keeper.repair
        member = self.member
        return keeper.repair if member is None else lambda: asyncio.ensure_future(member.request("repaired"))

    def tick(self) -> None:
        """Called once a second: report new attempts and collect figures."""
        if self.member is not None:
            self._tell_of_begun(self.member)
        if self.leader.links and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look())

    def _tell_of_begun(self, member: LeaderClient) -> None:
        """Report new attempts that nobody has claimed: the first worker ends them when they have been quiet for
        long."""
        waiting = self._parts.store.follower(MemoryQueue)
        begun = waiting.newly_unclaimed()
        if begun and member.linked:
            member.notify("begun", begun)
        elif begun:
            # A successor of the first worker reads these attempts from the tape; they may be reported twice.
            waiting.unclaimed.extendleft(reversed(begun))

    def notify_write(self) -> None:
        """Called when this process has written."""
        self.notify_leader("wrote")

    # -- requests of the first worker --------------------------------------------------------------------------------

    async def flush_peers(self) -> bool:
        """Wait until the queues of the others are durable; False where the tape does not take them."""
        return all((await self.leader.request("flush")).values())

    async def follow_releases(self) -> None:
        """Wait until the others know the changes of releases and versions."""
        _ = await self.leader.request("releases")

    async def active_rollouts(self) -> set[str]:
        """Return the rollouts of which any worker serves a call."""
        return self._parts.busy().union(*(await self.leader.request("busy")).values())

    def forget(self, rollout: str) -> None:
        """Forget a rollout in all workers."""
        self._parts.pins.forget(rollout)
        self.leader.notify("forget", rollout)

    def notify_assigned(self, rollout: str, pins: list[dict[str, Any]]) -> None:
        """Tell the other workers of pins that this one has given a rollout and that are not on the tape."""
        self.notify_leader("gave", rollout, pins)
        self.leader.notify("gave", rollout, pins)

    async def figures(self) -> Metrics:
        """Return the figures of all workers together."""
        if not self.leader.links and not self._past:
            return self._parts.metrics()
        await self._ask_figures()
        return merge_metrics([dump(self._parts.metrics()), *self._figures.values(), *self._past])

    async def pause(self, upstream: str, bound_s: float) -> None:
        """Make calls to an upstream wait in every worker."""
        self._parts.pools[upstream].gate.pause(bound_s)
        _ = await self.leader.request("pause", upstream, bound_s)

    async def open(self, upstream: str) -> None:
        """Let calls to an upstream go in every worker."""
        self._parts.pools[upstream].gate.open()
        _ = await self.leader.request("open", upstream)

    async def upstreams(self) -> dict[str, UpstreamView]:
        """Return the states of the upstreams, by name, over all workers."""
        found = {name: self._parts.view(pool) for name, pool in self._parts.pools.items()}
        for others in (await self.leader.request("upstreams")).values():
            for other in map(UpstreamView.model_validate, others):
                found[other.name] = _joined(found[other.name], other)
        return found

    # -- links -------------------------------------------------------------------------------------------------------

    def _asked_of_first(self, link: WorkerLink) -> Mapping[str, Handler]:
        budgets, self._gone[link] = self._parts.budgets.peer_handlers()
        waiting = self._parts.store.follower(MemoryQueue)

        def begun(names: list[list[str]]) -> None:
            waiting.unclaimed.extend((rollout, attempt) for rollout, attempt in names)

        def gave(rollout: str, pins: list[dict[str, Any]]) -> None:
            self._parts.pins.assigned_by_peer(rollout, pins)
            self.leader.notify("gave", rollout, pins)

        common = {"wrote": self._parts.wrote, "begun": begun, "gave": gave, "repaired": self._keeps_adapters}
        return {**common, **budgets, **self._keeper.handlers(link)}

    def _asked_of_others(self) -> Mapping[str, Handler]:
        parts = self._parts
        assert self._asker is not None

        async def flush() -> bool:
            # Callers that were answered before go on first.
            await asyncio.sleep(0)
            return await parts.recorder.flush()

        def pause(upstream: str, bound_s: float) -> None:
            parts.pools[upstream].gate.pause(bound_s)

        def open_again(upstream: str) -> None:
            parts.pools[upstream].gate.open()

        return {
            "flush": flush,
            "share": parts.budgets.move_remote_to_tape,
            "releases": parts.pins.reload,
            "busy": lambda: list(parts.busy()),
            "forget": parts.pins.forget,
            "gave": parts.pins.assigned_by_peer,
            "figures": lambda: dump(parts.metrics()),
            "past": self._told_past,
            "pause": pause,
            "open": open_again,
            "said": self._asker.said,
            "upstreams": lambda: [parts.view(pool).model_dump() for pool in parts.pools.values()],
        }

    def _hello(self) -> dict[str, Any]:
        paused = {name: pool.gate.bound_s for name, pool in self._parts.pools.items() if pool.gate.paused}
        return {"process": self._parts.store.process, "pid": os.getpid(), "past": self._known, "paused": paused}

    def _joined(self, link: WorkerLink, said: dict[str, Any]) -> None:
        """Called when another worker has come: either may have been started in the place of one that died."""
        gates = {name: pool.gate for name, pool in self._parts.pools.items()}
        for name, bound_s in said["paused"].items():
            if not gates[name].paused:
                gates[name].pause(bound_s)
        for name, gate in gates.items():
            if gate.paused:
                link.notify("pause", name, gate.bound_s)
        self._parts.budgets.recheck_writers()
        at, past = said["past"]
        if at > self._known[0]:
            self._known = (at, past)
            self._past = past

    def _left(self, link: WorkerLink) -> None:
        self._gone.pop(link)()
        self._parts.budgets.recheck_writers()
        figures = self._figures.pop(link.name, None)
        if figures is not None:
            self._past = [dump(merge_metrics([*self._past, counters_only(figures)]))]

    async def _look(self) -> None:
        await self._ask_figures()
        past = merge_metrics([*self._past, counters_only(dump(self._parts.metrics()))])
        self.leader.notify("past", monotonic(), [dump(past)])

    async def _ask_figures(self) -> None:
        found, there = await self.leader.request("figures"), self.peer_processes()
        # The figures of a worker that has died since are in the past already.
        self._figures |= {process: figures for process, figures in found.items() if process in there}

    def _told_past(self, at: float, past: list[MetricsDump]) -> None:
        self._known = (at, past)


def _joined(one: UpstreamView, other: UpstreamView) -> UpstreamView:
    """Combine the views of an upstream of two workers."""
    worse = max(one, other, key=lambda view: STATES.index(view.health))
    return one.model_copy(
        update={
            "waiting": one.waiting + other.waiting,
            "running": one.running + other.running,
            "waited": one.waited + other.waited,
            "refused": one.refused + other.refused,
            "health": worse.health,
            "failing": worse.failing,
            "rests_s": worse.rests_s,
        }
    )
