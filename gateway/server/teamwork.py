"""What the workers of a gateway do for each other (`server.team`).

The first one asks the others: to write what they have queued, before the end of an attempt is answered; to follow a
change of a release, before that is answered; which rollouts they serve calls of, before one is forgotten; to pause an
upstream; and for their figures. The others tell it when they have written, so that who follows the feed hears of it.

Every second the first one keeps the figures of the others, and gives them what is left of those that have died: a
counter must not fall because a worker has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from penstock.gateway.budgets.service import Budgets
from penstock.gateway.calls.joining import Joining
from penstock.gateway.metrics import Metrics
from penstock.gateway.model.upstream import UpstreamView
from penstock.gateway.queue.waiting import Waiting
from penstock.gateway.releases.adapter_keeper import AdapterKeeper
from penstock.gateway.releases.catalog import Pins
from penstock.gateway.server.conversing import Asker, Keeper
from penstock.gateway.server.figures import Dump, counted, dump, together
from penstock.gateway.server.handover import Place
from penstock.gateway.server.link import Handler, Link
from penstock.gateway.server.team import Leader, Member
from penstock.gateway.store import Store
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.upstreams.health import STATES
from penstock.gateway.upstreams.pool import Pool


@dataclass(slots=True)
class Parts:
    """What they work with."""

    store: Store
    recorder: Recorder
    pins: Pins
    pools: Mapping[str, Pool]
    metrics: Metrics
    budgets: Budgets
    busy: Callable[[], set[str]]
    """Rollouts of which this process serves a call."""
    wrote: Callable[[], None]
    """Is told that another process has written."""
    view: Callable[[Pool], UpstreamView]


@dataclass(slots=True)
class Teamwork:
    """Of one worker. That of the first has no link with itself; that of a gateway that serves alone has none."""

    place: Place
    leads: bool = field(init=False)
    """Whether this is the first one."""
    leader: Leader = field(init=False)
    member: Member | None = field(init=False)
    joining: Joining = field(init=False)
    """The conversations: of all workers, or where they are."""
    _asker: Asker | None = field(init=False)
    _keeper: Keeper = field(init=False)
    _keeps_adapters: Callable[[], asyncio.Future[None]] = field(init=False)
    _parts: Parts = field(init=False)
    _gone: dict[Link, Callable[[], None]] = field(default_factory=dict[Link, Callable[[], None]], init=False)
    """What is to be done when another one is gone."""
    _figures: dict[str, Dump] = field(default_factory=dict[str, Dump], init=False)
    """By process: those of the others, a moment ago."""
    _past: list[Dump] = field(default_factory=list[Dump], init=False)
    """Of workers that have died: of all of them together, or nothing."""
    _known: tuple[float, list[Dump]] = field(default=(0.0, []), init=False)
    """What the first one has said of the past, itself included, and when."""
    _looking: asyncio.Future[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.leads = self.place.number == 0
        self.leader = Leader(self._joined, self._left)
        self.member = None if self.leads else Member()
        self._asker = None if self.member is None else Asker(self.member)
        self.joining = Joining(self._asker)
        self._keeper = Keeper(self.joining)

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.place.of > 1

    def processes(self) -> set[str]:
        """Names of the others that have a link with this one."""
        return {link.name for link in self.leader.links}

    async def ask_first(self, name: str, *said: Any) -> Any:
        """What the first one answers; None where it does not."""
        return None if self.member is None else await self.member.ask_now(name, *said)

    def tell_first(self, name: str, *said: Any) -> None:
        """Says something to the first one."""
        if self.member is not None:
            self.member.tell(name, *said)

    async def ask_others(self, name: str, *said: Any) -> Mapping[str, Any]:
        """What the others answer."""
        return await self.leader.ask(name, *said)

    async def start(self, parts: Parts, inside: Callable[[], asyncio.Protocol]) -> None:
        """From now on. `inside`: makes what serves a request that another worker passes on."""
        self._parts = parts
        if self.member is not None:
            self.member.start(parts.store.path, self._hello, self._asked_of_others(), parts.budgets.bring)
        elif self.place.inside is not None:
            await self.leader.start(
                *self.place.inside,
                inside,
                self._asked_of_first,
            )

    async def stop(self) -> None:
        """Leaves."""
        if self._looking is not None:
            await self._looking
        if self.member is not None:
            await self.member.stop()
        await self.leader.stop()

    def leave(self) -> None:
        """Another gateway takes over."""
        if self.member is not None:
            self.member.leave()

    @property
    def alone(self) -> asyncio.Event:
        """Set while no other one has a link with this."""
        return self.leader.alone

    def repaired(self, keeper: AdapterKeeper) -> Callable[[], asyncio.Future[None]]:
        """As `AdapterKeeper.repaired`, which the first one does for all."""
        self._keeps_adapters = keeper.repaired
        member = self.member
        return keeper.repaired if member is None else lambda: asyncio.ensure_future(member.ask("repaired"))

    def tick(self) -> None:
        """Once a second."""
        if self.member is not None:
            self._tell_of_begun(self.member)
        if self.leader.links and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look())

    def _tell_of_begun(self, member: Member) -> None:
        """The first one ends attempts that nobody has claimed when they have been quiet for long."""
        waiting = self._parts.store.follower(Waiting)
        begun = waiting.newly_unclaimed()
        if begun and member.linked:
            member.tell("begun", begun)
        elif begun:
            # The next first one reads from the tape what there is; this may come twice.
            waiting.unclaimed.extendleft(reversed(begun))

    def wrote(self) -> None:
        """This process has written."""
        self.tell_first("wrote")

    # -- what the first one asks -------------------------------------------------------------------------------------

    async def written(self) -> bool:
        """Returns once what the others have queued is durable; False where the tape does not take it."""
        return all((await self.leader.ask("flush")).values())

    async def follow_releases(self) -> None:
        """Returns once the others know what has changed of releases and versions."""
        _ = await self.leader.ask("releases")

    async def busy(self) -> set[str]:
        """Rollouts of which any worker serves a call."""
        return self._parts.busy().union(*(await self.leader.ask("busy")).values())

    def forget(self, rollout: str) -> None:
        """A rollout was forgotten."""
        self._parts.pins.forget(rollout)
        self.leader.tell("forget", rollout)

    def gave(self, rollout: str, pins: list[dict[str, Any]]) -> None:
        """This worker has given a rollout something of which the tape does not tell."""
        self.tell_first("gave", rollout, pins)
        self.leader.tell("gave", rollout, pins)

    async def figures(self) -> Metrics:
        """Those of all."""
        if not self.leader.links and not self._past:
            return self._parts.metrics
        await self._ask_figures()
        return together([dump(self._parts.metrics), *self._figures.values(), *self._past])

    async def pause(self, upstream: str, bound_s: float) -> None:
        """Has calls to an upstream wait in every worker."""
        self._parts.pools[upstream].gate.pause(bound_s)
        _ = await self.leader.ask("pause", upstream, bound_s)

    async def open(self, upstream: str) -> None:
        """Lets them go."""
        self._parts.pools[upstream].gate.open()
        _ = await self.leader.ask("open", upstream)

    async def upstreams(self) -> dict[str, UpstreamView]:
        """How they are, by name, over all workers."""
        found = {name: self._parts.view(pool) for name, pool in self._parts.pools.items()}
        for others in (await self.leader.ask("upstreams")).values():
            for other in map(UpstreamView.model_validate, others):
                found[other.name] = _joined(found[other.name], other)
        return found

    # -- links -------------------------------------------------------------------------------------------------------

    def _asked_of_first(self, link: Link) -> Mapping[str, Handler]:
        budgets, self._gone[link] = self._parts.budgets.for_others()
        waiting = self._parts.store.follower(Waiting)

        def begun(names: list[list[str]]) -> None:
            waiting.unclaimed.extend((rollout, attempt) for rollout, attempt in names)

        def gave(rollout: str, pins: list[dict[str, Any]]) -> None:
            self._parts.pins.others_gave(rollout, pins)
            self.leader.tell("gave", rollout, pins)

        common = {"wrote": self._parts.wrote, "begun": begun, "gave": gave, "repaired": self._keeps_adapters}
        return {**common, **budgets, **self._keeper.handlers(link)}

    def _asked_of_others(self) -> Mapping[str, Handler]:
        parts = self._parts
        assert self._asker is not None

        async def flush() -> bool:
            # Whoever has been answered before goes on first.
            await asyncio.sleep(0)
            return await parts.recorder.flush()

        def pause(upstream: str, bound_s: float) -> None:
            parts.pools[upstream].gate.pause(bound_s)

        def open_again(upstream: str) -> None:
            parts.pools[upstream].gate.open()

        return {
            "flush": flush,
            "share": parts.budgets.bring,
            "releases": parts.pins.reload,
            "busy": lambda: list(parts.busy()),
            "forget": parts.pins.forget,
            "gave": parts.pins.others_gave,
            "figures": lambda: dump(parts.metrics),
            "past": self._told_past,
            "pause": pause,
            "open": open_again,
            "said": self._asker.said,
            "upstreams": lambda: [parts.view(pool).model_dump() for pool in parts.pools.values()],
        }

    def _hello(self) -> dict[str, Any]:
        paused = {name: pool.gate.bound_s for name, pool in self._parts.pools.items() if pool.gate.paused}
        return {"process": self._parts.store.process, "pid": os.getpid(), "past": self._known, "paused": paused}

    def _joined(self, link: Link, said: dict[str, Any]) -> None:
        """Another one has come: this one may have been started in the place of the first, or that one."""
        gates = {name: pool.gate for name, pool in self._parts.pools.items()}
        for name, bound_s in said["paused"].items():
            if not gates[name].paused:
                gates[name].pause(bound_s)
        for name, gate in gates.items():
            if gate.paused:
                link.tell("pause", name, gate.bound_s)
        self._parts.budgets.look_again()
        at, past = said["past"]
        if at > self._known[0]:
            self._known = (at, past)
            self._past = past

    def _left(self, link: Link) -> None:
        self._gone.pop(link)()
        self._parts.budgets.look_again()
        figures = self._figures.pop(link.name, None)
        if figures is not None:
            self._past = [dump(together([*self._past, counted(figures)]))]

    async def _look(self) -> None:
        await self._ask_figures()
        past = together([*self._past, counted(dump(self._parts.metrics))])
        self.leader.tell("past", monotonic(), [dump(past)])

    async def _ask_figures(self) -> None:
        found, there = await self.leader.ask("figures"), self.processes()
        # Of one that has answered and died since the past has them.
        self._figures |= {process: figures for process, figures in found.items() if process in there}

    def _told_past(self, at: float, past: list[Dump]) -> None:
        self._known = (at, past)


def _joined(one: UpstreamView, other: UpstreamView) -> UpstreamView:
    """How an upstream is as two workers see it."""
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
