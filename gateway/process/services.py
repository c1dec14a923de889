"""The services of a gateway: they start in their order and end in the reverse one. And the end of what runs beside
them: waits with a limit, and calls that have not ended by themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from penstock.gateway.model.validation_messages import pluralized
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.traffic.proxy.proxy_context import ActiveCall

RETRY_S: Final = 1.0
"""Seconds until a service that could not start is started again."""
_NAMED: Final = 5
"""Rollouts that are named in the log at most."""
_log = logging.getLogger("penstock.app")


class Service(Protocol):
    """A part of a gateway that works by itself."""

    async def start(self) -> None:
        """Begin. Raises `TapeError` where the tape does not let it."""
        ...

    async def stop(self) -> None:
        """End what has begun, and leave the rest to the next process."""
        ...


class ServiceGroup:
    """Services that start and stop together. Each may need those before it: it starts after them, and ends before
    them."""

    def __init__(self, services: Mapping[str, Service], patient: bool = False) -> None:
        """`services`: by their names, which the log tells. `patient`: one that a full tape does not let start is
        started again until it does; otherwise its `TapeError` is raised."""
        self._services, self._patient = dict(services), patient
        self.begun = False
        """True from `start` to `stop`."""
        self._retrying: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start all that can start."""
        self.begun = True
        waiting = await self._start(self._services)
        if waiting:
            self._retrying = asyncio.ensure_future(self._start_later(waiting))

    async def _start(self, services: Mapping[str, Service]) -> Mapping[str, Service]:
        """Start services and return those that the tape did not let start."""
        left = dict[str, Service]()
        for name, service in services.items():
            try:
                await service.start()
            except TapeError as error:
                if not self._patient:
                    raise
                # The recorder logs once that it cannot write the tape.
                _log.debug("a part of the gateway (%s) waits for the tape: %s", name, error)
                left[name] = service
        return left

    async def _start_later(self, waiting: Mapping[str, Service]) -> None:
        """Calls are served meanwhile: a process that has handed over to this one does not serve any more."""
        while waiting:
            await asyncio.sleep(RETRY_S)
            waiting = await self._start(waiting)
        _log.info("all that only one process may do has begun")

    async def stop(self) -> None:
        """Stop them in the reverse order; a second call does nothing."""
        if not self.begun:
            return
        self.begun = False
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
        await stop_all({name: service.stop for name, service in reversed(self._services.items())})


async def stop_all(parts: Mapping[str, Callable[[], Awaitable[object]]]) -> None:
    """End one part after the other. If one fails, the others still end, and the queue still reaches the tape."""
    for name, end in parts.items():
        try:
            await end()
        except Exception:
            _log.exception("a part of the gateway (%s) has not ended as it should", name)


async def wait_for_any(events: Sequence[asyncio.Event], seconds: float | None = None) -> None:
    """Wait until one of these events is set, or until `seconds` have passed."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


def cut_off(running: Iterable[ActiveCall]) -> None:
    """End calls that have not ended by themselves, and log their rollouts."""
    left = list(running)
    for call in left:
        call.give_up()
    if left:
        rollouts = sorted({call.rollout for call in left})
        named = ", ".join(rollouts[:_NAMED])
        if len(rollouts) > _NAMED:
            named += f" and {len(rollouts) - _NAMED} more"
        calls = pluralized(len(left), "call")
        _log.warning("cut off %s that had not ended (limits.drain_seconds): of rollout %s", calls, named)
