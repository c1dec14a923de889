"""Counts the outcomes of a canary, in the order of assignment, and writes down what follows from them.

A count and the decision that follows from it are one operation on the tape. The release's revision shows when somebody
else has changed it, a person or an earlier process. The counter then walks the canary again from the tape (`walked`)
and makes a decision that follows and was not made yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

from penstock.gateway.canary.decision import Canary
from penstock.gateway.canary.evidence import Evidence
from penstock.gateway.canary.outcomes import deadline, look, observation
from penstock.gateway.canary.verify import Decided, decided, no_evidence, walk, weigh
from penstock.gateway.model.release import Assignment, Release, Seen
from penstock.gateway.model.resource import GATEWAY
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.releases.transitions import DECIDED, entry
from penstock.gateway.store import Store
from penstock.gateway.store.feed import Feed
from penstock.gateway.store.recorder import Recorder
from penstock.gateway.store.transaction import Transaction

BATCH: Final = 64
"""Assignments that are looked at together."""
BETWEEN_S: Final = 0.02
"""Seconds between two looks: while calls are recorded there is a commit every few milliseconds."""


class Counting:
    """Counts for all canaries of a gateway."""

    def __init__(
        self,
        tape: Store,
        recorder: Recorder,
        feed: Feed,
        now_ns: Callable[[], int],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`changed` is told of every decision, when it is durable."""
        self._tape = tape
        self._reader = ReleaseReader(tape)
        self._recorder = recorder
        self._feed = feed
        self._now_ns = now_ns
        self._changed = changed

    async def run(self, release: Release, show: Callable[[Canary], None]) -> None:
        """Counts until something changes; `show` is given the canary that is stepped."""
        canary, left = await asyncio.to_thread(self.walked, release)
        show(canary)
        if left is not None:
            await self._act(release, [], left)
            return
        cursor = self._feed.cursor
        while (now := self._reader.release(release.id)) is not None and now.revision == release.revision:
            release = now
            seen, found, due = await asyncio.to_thread(self._count, release, canary)
            if seen:
                release = await self._act(release, seen, found)
            if found is not None:
                return
            if len(seen) < BATCH:
                cursor = await self._wait(cursor, due)

    def walked(self, release: Release) -> tuple[Canary, Decided | None]:
        """The canary as the tape has it, and the decision that follows from it and was not made yet."""
        canary, audit, (assigned, seen) = (
            Canary(release.policy, release.margin),
            self._reader.audit(release.id),
            self._read(release),
        )
        made = sum(entry.who == GATEWAY and entry.assignment is not None for entry in audit)
        return canary, next(islice(walk(canary, assigned, seen, audit), made, None), None)

    def evidence(self, release: Release) -> Evidence:
        """All that was counted."""
        return weigh(no_evidence(release), zip(*self._read(release), strict=False))

    def _read(self, release: Release) -> tuple[list[Assignment], list[Seen]]:
        """What was assigned and counted, up to this state of the release."""
        assigned, seen = list[Assignment](), list[Seen]()
        while len(seen) < release.counted:
            page = self._reader.assignments(release.id, len(seen))
            assigned += page[0]
            seen += page[1]
        return assigned, seen[: release.counted]

    def _count(self, release: Release, canary: Canary) -> tuple[list[Seen], Decided | None, int | None]:
        """(what is seen of the next assignments, the decision after the last of them, when the next one is due)."""
        seen: list[Seen] = []
        for assignment in self._reader.assignments(release.id, release.counted, BATCH)[0]:
            one = look(self._tape, self._reader.pins(assignment.rollout), release, assignment, self._now_ns())
            if one is None:
                return seen, None, deadline(release, assignment)
            seen.append(one)
            if one.left_out is None:
                found = decided(canary.step(observation(assignment, one)), one.number)
                if found is not None and not (found.action == "wait" and release.waits):
                    return seen, found, None
        return seen, None, None

    async def _act(self, release: Release, seen: Sequence[Seen], found: Decided | None) -> Release:
        """Writes down the outcomes and the decision that follows, in one transaction."""
        now = self._now_ns()
        if found is None:
            return await self._recorder.submit(
                lambda transaction: ReleaseOperations(transaction).count(release.id, release.revision, seen)
            )
        update = DECIDED[found.action](release)
        link = entry(found.action, GATEWAY, found.verdict.reason, found.counted)
        link.evidence = dict(found.verdict.figures)

        def operation(transaction: Transaction) -> Release:
            ReleaseOperations(transaction).count(release.id, release.revision, seen)
            return ReleaseOperations(transaction).change(release.id, release.revision, update, link, now)

        made = await self._recorder.submit(operation)
        await self._changed()
        return made

    async def _wait(self, cursor: int, due: int | None) -> int:
        """Until something was written, or the deadline of the next assignment; where the feed is then."""
        await asyncio.sleep(BETWEEN_S)
        seconds = None if due is None else max(0.0, (due - self._now_ns()) / 1e9)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._feed.wait(cursor)
        return cursor
