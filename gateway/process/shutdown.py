"""The end of a gateway: stops its parts and cuts off calls that have not ended by themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from penstock.gateway.model.validation_messages import pluralized
from penstock.gateway.traffic.proxy.proxy_context import ActiveCall

_NAMED: Final = 5
"""Rollouts that are named in the log at most."""
_log = logging.getLogger("penstock.app")


async def wait_for_any(events: Sequence[asyncio.Event], seconds: float | None = None) -> None:
    """Wait until one of these events is set, or until `seconds` have passed."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


async def stop_all(*parts: Callable[[], Awaitable[object]]) -> None:
    """End one part after the other. If one fails, the others still end, and the queue still reaches the tape."""
    for end in parts:
        try:
            await end()
        except Exception:
            _log.exception("a part of the gateway has not ended as it should")


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
