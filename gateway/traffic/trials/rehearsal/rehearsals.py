"""Rehearsals under way, for calls of their agents and for the control API.

A rehearsal's runs are rollouts of their own, two for each recorded one: `RELEASE-rehearsal-aREVISION-NUMBER-LEG`. A
call to such an address is answered here and never passed on unchanged, also when no such rehearsal is under way (it is
over, or the gateway has just been started): an agent that got a tool call would run the tool. While no release has
asked for a rehearsal, calls skip this check (`Catalog.rehearses`).

Runs are handed out as work is, with a lease, but not from the queue: only a runner that asks for this release gets
them. The tape has the runs that were handed out, so a restart loses no run that has ended. The results that an agent
has had are in memory only: a run that had an answer before a restart cannot go on, is refused with that reason, and is
rehearsed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from penstock.gateway.model.facts import LEG, REHEARSAL, REPLAY_OF
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.release import Release
from penstock.gateway.model.rollout import RolloutConfig
from penstock.gateway.releases.canary.outcomes import Requester
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.transaction import OperationRefusedError
from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.trials.rehearsal.recorded_rollouts import RecordedRollout, is_comparable
from penstock.gateway.traffic.trials.rehearsal.tool_player import RehearsalAnswer, RehearsalContext, ToolPlayer
from penstock.gateway.traffic.trials.replay.sender import RUN, ReleaseContext, ReleaseSender, background
from penstock.gateway.wire.dialects import OPAQUE
from penstock.gateway.wire.http.request import ClientFault, GatewayFault, HttpRequest
from penstock.gateway.work.dispatcher import Dispatcher
from penstock.gateway.work.queue import ClaimedAttempt

RESTARTED: Final = "restarted"
"""Short reason of a refusal: the gateway has lost the answers that the agent has had."""
OVER: Final = "rehearsal"
"""Short reason of a refusal: no rehearsal of the call's address is under way."""
_READY_S: Final = 30.0
"""Seconds that a call waits for a gateway that resumes a rehearsal."""


@dataclass(slots=True)
class RehearsalLeg:
    """One of the two runs of a recorded rollout."""

    rollout: str
    """Rollout id of the run itself."""
    side: str
    """`candidate` or `incumbent`."""
    versions: Mapping[str, str]
    """The versions that the run gets, by resource."""
    original: RecordedRollout
    state: Literal["waiting", "running", "over"] = "waiting"
    attempt: str | None = None
    """The attempt that may call; None until the run is handed out."""
    players: dict[str, ToolPlayer] = field(default_factory=dict[str, ToolPlayer])
    """Agents at work, by attempt."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of the run's spans."""
        return {REPLAY_OF: self.original.name, LEG: self.side}

    @property
    def spec(self) -> RolloutSpec:
        """The rollout of the run. Only this module hands it out again."""
        config = RolloutConfig(max_attempts=1, retry_on=[])
        told = dict(self.attributes)
        return RolloutSpec(
            id=self.rollout, input=self.original.rollout.input, mode="test", config=config, metadata=told
        )


@dataclass(slots=True)
class ActiveRehearsal:
    """A release in rehearsal, with its runs."""

    release: Release
    sender: ReleaseSender
    legs: dict[str, RehearsalLeg]
    """Its runs by rollout, in the order in which they are handed out."""


def leg_name(release: Release, number: int, leg: str) -> str:
    """Return the rollout id of a run; it follows from the release, so that it is found again."""
    return f"{release.id[-80:]}{REHEARSAL}{release.revision}-{number}-{leg}"


class Rehearsals:
    """All rehearsals of a gateway."""

    def __init__(self, context: ReleaseContext) -> None:
        self._context = context
        self._under_way: dict[str, ActiveRehearsal] = {}
        self._legs: dict[str, tuple[ActiveRehearsal, RehearsalLeg]] = {}
        self._news = asyncio.Event()
        """Set, and replaced, when a new run may be had."""

    def open(self, rehearsed: ActiveRehearsal) -> None:
        """Hand out the runs of a rehearsal from now on."""
        self._under_way[rehearsed.release.id] = rehearsed
        self._legs |= {name: (rehearsed, leg) for name, leg in rehearsed.legs.items()}
        self.changed()

    def close(self, rehearsed: ActiveRehearsal) -> None:
        """End a rehearsal: calls of its runs are refused from now on."""
        self._under_way.pop(rehearsed.release.id, None)
        for name in rehearsed.legs:
            self._legs.pop(name, None)
        self.changed()

    def changed(self) -> None:
        """Wake all that wait for a run."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    # -- calls of agents ---------------------------------------------------------------------------------------------

    def handles(self, call: CallRequest) -> bool:
        """True if a call of a run is answered by `answer`; other calls that may pass request no answer of a model."""
        return call.dialect.generates or call.dialect is OPAQUE

    def attributes(self, rollout: str) -> Mapping[str, str]:
        """Return the attributes of spans of a run's calls."""
        found = self._legs.get(rollout)
        return {} if found is None else found[1].attributes

    async def answer(self, call: CallRequest, request: HttpRequest, prompt: str | None) -> RehearsalAnswer:
        """Return the agent's answer; raises `Refusal`. `prompt`: the prompt that the call names."""
        if call.dialect is OPAQUE:
            message = f"a rehearsal asks models and does nothing else: {call.path[:80]!r} is not passed on"
            raise ClientFault(400, OVER, message)
        rehearsed, leg = await self._found(call.address.rollout)
        if leg.state != "running" or call.address.attempt != leg.attempt:
            raise ClientFault(400, OVER, f"the run {call.address.rollout} is over")
        async with leg.starting:
            play = leg.players.get(call.address.attempt)
            if play is None:
                play = leg.players[call.address.attempt] = await self._begin(rehearsed, leg, call.address.attempt)
        return await play.answer(call, request, prompt)

    async def _found(self, rollout: str) -> tuple[ActiveRehearsal, RehearsalLeg]:
        """Return the run, as soon as it is under way again after a restart."""
        until = asyncio.get_running_loop().time() + _READY_S
        while (found := self._legs.get(rollout)) is None:
            news = self._news
            if not await background(lambda: self._may_come(rollout)):
                raise ClientFault(400, OVER, f"the rehearsal that {rollout} is a run of is over")
            if not await _until(news, until):
                raise GatewayFault(503, OVER, f"the rehearsal that {rollout} is a run of is not under way")
        return found

    def _may_come(self, rollout: str) -> bool:
        return rollout in self._legs or any(
            one.stage == "checked" and rollout.startswith(f"{one.id[-80:]}{REHEARSAL}{one.revision}-")
            for one in ReleaseReader(self._context.tape).releases()
        )

    async def _begin(self, rehearsed: ActiveRehearsal, leg: RehearsalLeg, attempt: str) -> ToolPlayer:
        original, name = leg.original, f"{leg.rollout}/{attempt}"
        asker = Requester("", "", original.rollout.mode, original.rollout.metadata or {})
        role = RehearsalContext(rehearsed.release, leg.versions, asker, leg.attributes | {RUN: name}, original.name)
        play = ToolPlayer(self._context, rehearsed.sender, role, original.cassette.fresh_copy())
        if await background(lambda: any(map(is_comparable, self._context.tape.spans(leg.rollout, attempt)))):
            message = f"the gateway was restarted in the middle of {name}: it will be rehearsed again"
            play.refusal = ClientFault(400, RESTARTED, message)
        return play

    # -- commands that run agents ------------------------------------------------------------------------------------

    async def claim(
        self, release: str, asked: ClaimRequest, dispatcher: Dispatcher
    ) -> tuple[list[ClaimedAttempt], bool, int]:
        """Return (runs for a worker, True if there may be more of them, the number that wait); wait for runs if need
        be. Raises `OperationRefusedError`."""
        until = asyncio.get_running_loop().time() + asked.wait_s
        while True:
            news, found = self._news, ReleaseReader(self._context.tape).release(release)
            if found is None:
                message = f"there is no release {release!r}; `penstock release list` lists them"
                raise OperationRefusedError("not_found", message, "release", release)
            if not found.policy.replay.closed_loop:
                message = f"release {release} rehearses nothing: its policy has replay.closed_loop = 0"
                raise OperationRefusedError("conflict", message, "release", release)
            claimed = await self._claim(release, asked, dispatcher)
            more = found.stage in ("draft", "checked")
            if claimed or not more or not await _until(news, until):
                return claimed, more, len(self._waiting(release))

    async def _claim(self, release: str, asked: ClaimRequest, dispatcher: Dispatcher) -> list[ClaimedAttempt]:
        claimed: list[ClaimedAttempt] = []
        # Others claim while one is handed out, so the remaining runs are read anew each time.
        while len(claimed) < asked.limit and (waiting := self._waiting(release)):
            leg = waiting[0]
            leg.state = "running"
            # If its worker leaves now, it is handed out again when the lease is over.
            claimed.append(await asyncio.shield(_hand_out(leg, asked, dispatcher)))
        return claimed

    def _waiting(self, release: str) -> list[RehearsalLeg]:
        rehearsed = self._under_way.get(release)
        return [] if rehearsed is None else [leg for leg in rehearsed.legs.values() if leg.state == "waiting"]


async def _hand_out(leg: RehearsalLeg, asked: ClaimRequest, dispatcher: Dispatcher) -> ClaimedAttempt:
    try:
        made = await dispatcher.hand_out(leg.rollout, leg.spec, asked)
    except (OperationRefusedError, TapeError):
        leg.state = "waiting"
        raise
    leg.attempt = made.attempt.id
    return made


async def _until(news: asyncio.Event, until: float) -> bool:
    """Wait for news: True when there may be something new; False when it is time to give up."""
    try:
        async with asyncio.timeout_at(until):
            await news.wait()
    except TimeoutError:
        return False
    return True
