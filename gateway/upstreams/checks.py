"""Checks of upstreams that have a path for it (`health_path`): whether one can serve is known before a call finds out.

Each is asked every five seconds, and a second after a check that failed. What that changes is told by
`upstreams.health`: one that fails is passed over, and never refused to a call that nobody else can serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Final

import aiohttp

from penstock.gateway.upstreams.health import State
from penstock.gateway.upstreams.pool import Pool

EVERY_S: Final = 5.0
AGAIN_S: Final = 1.0
ANSWER_S: Final = 5.0
"""How long a check may take."""
_log = logging.getLogger("penstock.upstream")


class Checks:
    """Those of all upstreams. `start`, then `stop`."""

    def __init__(
        self, pools: Iterable[Pool], session: Callable[[], aiohttp.ClientSession], counted: Counter[tuple[str, ...]]
    ) -> None:
        """`counted`: how many have passed and failed, by upstream."""
        self._counted = counted
        self._pools = [pool for pool in pools if pool.config.health_path is not None]
        self._session = session
        self._tasks: list[asyncio.Future[None]] = []

    def start(self) -> None:
        """From now on; the first of each is made at once."""
        self._tasks = [asyncio.ensure_future(self._watch(pool)) for pool in self._pools]

    async def stop(self) -> None:
        """Ends them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, pool: Pool) -> None:
        while True:
            why = await self._check(pool)
            before = pool.health.state(monotonic())
            pool.health.checked(why, monotonic())
            self._counted[pool.name, "passed" if why is None else "failed"] += 1
            _tell(pool, why, before)
            await asyncio.sleep(EVERY_S if why is None else AGAIN_S)

    async def _check(self, pool: Pool) -> str | None:
        """Why it failed; None where it passed."""
        sent = {} if pool.credential is None else {pool.credential[0].decode(): pool.credential[1].decode()}
        asked = aiohttp.ClientTimeout(total=ANSWER_S)
        url = f"{pool.origin}{pool.config.health_path}"
        try:
            async with self._session().get(
                url, headers=sent, timeout=asked, allow_redirects=False, **pool.reach.options
            ) as answer:
                return None if 200 <= answer.status < 300 else f"http_{answer.status}"
        except TimeoutError:
            return "timeout"
        except (aiohttp.ClientError, OSError, ValueError):
            # ValueError: a host name that is none (UnicodeError).
            return "connect"


def _tell(pool: Pool, why: str | None, before: State) -> None:
    """Says in the log what has changed."""
    after = pool.health.state(monotonic())
    if before != "resting" and after == "resting":
        _log.warning("upstream %r fails its checks (%s %s): it is passed over", pool.name, pool.config.health_path, why)
    elif before == "resting" and after != "resting":
        _log.info("upstream %r passes its checks again", pool.name)
