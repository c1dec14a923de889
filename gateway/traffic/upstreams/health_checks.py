"""Health checks of upstreams that have a path for them (`health_path`): they find out before a call does whether an
upstream can serve.

Each is checked every five seconds, and a second after a failed check. `upstreams.health` has the effect: an upstream
that fails is passed over, and never refused to a call that no other one can serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import aiohttp

from penstock.gateway.traffic.upstreams.health import HealthState
from penstock.gateway.traffic.upstreams.pool import ConnectionPool

EVERY_S: Final = 5.0
AGAIN_S: Final = 1.0
ANSWER_S: Final = 5.0
"""Seconds that a check may take."""
_log = logging.getLogger("penstock.upstream")


class HealthChecker:
    """The health checks of all upstreams. `start`, then `stop`."""

    def __init__(
        self,
        pools: Iterable[ConnectionPool],
        session: Callable[[], aiohttp.ClientSession],
        counted: Counter[tuple[str, ...]],
    ) -> None:
        """`counted`: the numbers of passed and failed checks, by upstream."""
        self._counted = counted
        self._pools = [pool for pool in pools if pool.config.health_path is not None]
        self._session = session
        self._tasks: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Start the checks; the first of each upstream is made at once."""
        self._tasks = [asyncio.ensure_future(self._watch(pool)) for pool in self._pools]

    async def stop(self) -> None:
        """Cancel the checks and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, pool: ConnectionPool) -> None:
        while True:
            why = await self._check(pool)
            before = pool.health.state(monotonic())
            pool.health.checked(why, monotonic())
            self._counted[pool.name, "passed" if why is None else "failed"] += 1
            _tell(pool, why, before)
            await asyncio.sleep(EVERY_S if why is None else AGAIN_S)

    async def _check(self, pool: ConnectionPool) -> str | None:
        """Return why the check failed; None where it passed."""
        sent = {} if pool.credential is None else {pool.credential[0].decode(): pool.credential[1].decode()}
        asked = aiohttp.ClientTimeout(total=ANSWER_S)
        url = f"{pool.origin}{pool.config.health_path}"
        try:
            async with self._session().get(
                url, headers=sent, timeout=asked, allow_redirects=False, **pool.transport.options
            ) as answer:
                return None if 200 <= answer.status < 300 else f"http_{answer.status}"
        except TimeoutError:
            return "timeout"
        except (aiohttp.ClientError, OSError, ValueError):
            # ValueError: an invalid host name (UnicodeError).
            return "connect"


def _tell(pool: ConnectionPool, why: str | None, before: HealthState) -> None:
    """Log a change of state."""
    after = pool.health.state(monotonic())
    if before != "resting" and after == "resting":
        _log.warning("upstream %r fails its checks (%s %s): it is passed over", pool.name, pool.config.health_path, why)
    elif before == "resting" and after != "resting":
        _log.info("upstream %r passes its checks again", pool.name)
