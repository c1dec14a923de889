"""Counts the outcomes of a canary, in the order of assignment, and writes down the decisions that follow.

Two counts go over the same assignments: an early look for errors, which waits for seconds, and the outcome, which waits
for a reward. The early one is always ahead.

A count and the decision that follows from it are one operation on the tape. The release's revision shows when somebody
else has changed it, a person or an earlier process. The counter then walks the canary again from the tape (`replayed`)
and makes a decision that follows and was not made yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Final, NamedTuple

from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import Assignment, AssignmentEvidence, Release
from penstock.gateway.releases.canary.decision import (
    Canary,
    CanaryDecision,
    add_early_looks,
    add_outcomes,
    apply_early_look,
    decision_of,
    empty_evidence,
    replay_decisions,
)
from penstock.gateway.releases.canary.evidence import CanaryEvidence
from penstock.gateway.releases.canary.outcomes import (
    as_of,
    assignment_outcome,
    early_deadline,
    early_outcome,
    has_early_guard,
    observation,
    outcome_due,
)
from penstock.gateway.releases.operations import ReleaseChange, ReleaseOperations
from penstock.gateway.releases.reader import CanaryReader, ReleaseReader
from penstock.gateway.releases.transitions import RULE_CHANGES, entry
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import DamagedRecordError
from penstock.gateway.tape.store.feed import ChangeFeed
from penstock.gateway.tape.store.recorder import Recorder

BATCH: Final = 16
"""Assignments that are examined in one transaction, twice this if some are examined early."""
ROUND_S: Final = 0.02
"""Seconds after which a round examines no further assignment: its transaction holds up the tape's growth, and so other
readers."""
BETWEEN_S: Final = 0.02
"""Seconds between two rounds: while calls are recorded there is a commit every few milliseconds."""


class CountRound(NamedTuple):
    """The result of one round over the next assignments."""

    looked: Sequence[Assignment] = ()
    """Assignments that were examined early, with the result."""
    seen: Sequence[AssignmentEvidence] = ()
    """The counted outcomes."""
    found: CanaryDecision | None = None
    """The decision that follows from the last of them."""
    due: int | None = None
    """Time at which the next assignment counts at the latest; ns since the epoch."""

    more: bool = False
    """True if further assignments may be ready at once."""


class OutcomeCounter:
    """The counter of all canaries of a gateway."""

    def __init__(
        self,
        tape: Store,
        recorder: Recorder,
        feed: ChangeFeed,
        now_ns: Callable[[], int],
        changed: Callable[[], Awaitable[None]],
    ) -> None:
        """`changed` is called after every decision, when it is durable."""
        self._reader = ReleaseReader(tape)
        self._recorder = recorder
        self._feed = feed
        self._now_ns = now_ns
        self._changed = changed

    async def run(self, release: Release, show: Callable[[Canary], None]) -> None:
        """Count until the release changes; `show` is called with the canary that is stepped."""
        canary, left = await asyncio.to_thread(self.replayed, release)
        show(canary)
        if left is not None:
            await self._act(release, CountRound(found=left))
            return
        cursor = self._feed.cursor
        while (done := await asyncio.to_thread(self._round, release, canary)) is not None:
            if done.looked or done.seen:
                await self._act(release, done)
            if done.found is not None:
                return
            if not done.more:
                cursor = await self._wait(cursor, done.due)

    def replayed(self, release: Release) -> tuple[Canary, CanaryDecision | None]:
        """Return the canary as the tape has it, and the decision that follows from it and was not made yet."""
        canary, audit, (assigned, seen) = (
            Canary.of(release),
            self._reader.audit(release.id),
            self._read(release),
        )
        if len(assigned) < max(release.counted, release.early):
            raise _missing(release, len(assigned) + 1)
        made = sum(entry.who == GATEWAY and entry.assignment is not None for entry in audit)
        return canary, next(islice(replay_decisions(canary, assigned, seen, audit), made, None), None)

    def evidence(self, release: Release) -> CanaryEvidence:
        """Return the evidence of all counted rollouts."""
        assigned, seen = self._read(release)
        return add_early_looks(add_outcomes(empty_evidence(release), zip(assigned, seen, strict=False)), assigned)

    def _read(self, release: Release) -> tuple[list[Assignment], list[AssignmentEvidence]]:
        """Return the assignments that were counted or examined early up to this state of the release, and the
        outcomes."""
        assigned, seen, until = list[Assignment](), list[AssignmentEvidence](), max(release.counted, release.early)
        while len(assigned) < until:
            page = self._reader.assignments(release.id, len(assigned))
            if not page[0]:
                break
            assigned += page[0]
            seen += page[1]
        return as_of(release, assigned[:until]), seen[: release.counted]

    def _round(self, begun: Release, canary: Canary) -> CountRound | None:
        """Examine the next assignments, in one transaction; None if somebody else has changed the release."""
        # The time comes first: what was on the tape by then is in the transaction.
        now, until = self._now_ns(), monotonic() + ROUND_S
        with self._reader.canary() as tape:
            release = tape.release(begun.id)
            if release is None or release.revision != begun.revision:
                return None
            if not has_early_guard(release):
                return self._count(tape, release, canary, release.assigned, now, until)
            early = self._early(tape, release, canary, now, until)
            if early.found is not None:
                return early
            looked = release.early + len(early.looked)
            late = self._count(tape, release, canary, looked, now, until)
        found = None if late.found is None else late.found._replace(early=looked)
        dues = [one.due for one in (early, late) if one.due is not None]
        return CountRound(early.looked, late.seen, found, min(dues, default=None), early.more or late.more)

    def _early(self, tape: CanaryReader, release: Release, canary: Canary, now: int, until: float) -> CountRound:
        """Examine the next assignments early."""
        looked: list[Assignment] = []
        for assignment in _next(tape, release, release.early, release.assigned):
            if looked and monotonic() > until:
                return CountRound(looked, more=True)
            seen = early_outcome(tape, release, assignment, now)
            if seen is None:
                return CountRound(looked, due=early_deadline(release, assignment))
            looked.append(assignment.model_copy(update={"early": seen}))
            if (verdict := apply_early_look(canary, looked[-1])) is not None:
                return CountRound(looked, found=decision_of(verdict, release.counted, assignment.number))
        return CountRound(looked, more=len(looked) == BATCH)

    def _count(
        self, tape: CanaryReader, release: Release, canary: Canary, ahead: int, now: int, until: float
    ) -> CountRound:
        """Count the outcomes of the next assignments, up to `ahead`, the last one that was examined early."""
        seen: list[AssignmentEvidence] = []
        for assignment in _next(tape, release, release.counted, ahead):
            if seen and monotonic() > until:
                return CountRound(seen=seen, more=True)
            members = () if assignment.unit is None else tape.members(release.id, assignment)
            one = assignment_outcome(tape, members, release, assignment, now)
            if one is None:
                return CountRound(seen=seen, due=outcome_due(release, assignment, now))
            seen.append(one)
            if one.left_out is None:
                found = decision_of(canary.step(observation(assignment, one)), one.number)
                if found is not None and not (found.action == "wait" and release.waits):
                    return CountRound(seen=seen, found=found)
        return CountRound(seen=seen, more=len(seen) == BATCH)

    async def _act(self, release: Release, done: CountRound) -> None:
        """Write the counts and the decision that follows, in one transaction."""
        found, decided = done.found, None
        if found is not None:
            link = entry(found.action, GATEWAY, found.verdict.reason, found.counted, found.early)
            link.evidence = dict(found.verdict.figures)
            decided = ReleaseChange(RULE_CHANGES[found.action](release), link, self._now_ns())
        await self._recorder.submit(
            lambda transaction: ReleaseOperations(transaction).count(
                release.id, release.revision, done.looked, done.seen, decided
            )
        )
        if decided is not None:
            await self._changed()

    async def _wait(self, cursor: int, due: int | None) -> int:
        """Wait for the next commit, or the deadline of the next assignment; return the cursor of the feed."""
        await asyncio.sleep(BETWEEN_S)
        seconds = None if due is None else max(0.0, (due - self._now_ns()) / 1e9)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._feed.wait(cursor)
        return cursor


def _next(tape: CanaryReader, release: Release, after: int, until: int) -> Iterator[Assignment]:
    """Yield up to `BATCH` assignments after a number and up to another. Raises `DamagedRecordError` if one is
    missing."""
    number, last = after, min(until, after + BATCH)
    for assignment, _ in tape.assignments(release.id, after, last):
        number = assignment.number
        yield assignment
    if number < last:
        raise _missing(release, number + 1)


def _missing(release: Release, number: int) -> DamagedRecordError:
    return DamagedRecordError(f"assignment {number} of release {release.id} is missing; run `penstock check`")
