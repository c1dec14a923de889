"""Retention: rollouts stay until a rule, the size of the tape or a request removes them; a held rollout stays.

One task does three things in turn, never for long at a time. It wipes forgotten rollouts and overwrites their bytes in
the file. It looks through all rollouts, the oldest first, for those whose time is over by a rule. While the tape uses
more than it may, it takes the oldest that have ended. Each look, and each pass over the file, is followed by a pause of
twenty times its length, so that they take a twentieth of a core at most; a person's request to forget does not wait for
that.

Writes go through the recorder, between calls; a pause as long as the write follows each. They are not counted as part
of a look: otherwise the more rollouts had to go, the longer nothing would happen. Work that was begun when a gateway
was killed is on the tape and is finished by the next one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import monotonic
from typing import Final, NamedTuple, TypeVar

from penstock.gateway.model.base import GATEWAY, ActionRequest, parse_record
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import PinList, Release
from penstock.gateway.model.resource import Coverage
from penstock.gateway.model.rollout import FINAL, Rollout, last_seen_ns, missing_rollout, summarised
from penstock.gateway.model.state import (
    ForgottenPage,
    ForgottenRollout,
    RetentionHold,
    RetentionHoldList,
    RetentionRule,
    RetentionStatus,
)
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.reading.filters import Query, QueryError, parse
from penstock.gateway.tape import background_answers, hosted_sessions
from penstock.gateway.tape.store import Store, audit_log, keys
from penstock.gateway.tape.store.directory import DamagedRecordError, TapeError
from penstock.gateway.tape.store.erasure import WipePosition
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.tape.store.view import TapeView

EVERY_S: Final = 60.0
"""Seconds between two looks at all rollouts, at least."""
SHARE: Final = 20
"""Length of the pause after a look, or a pass over the file, as a multiple of its length."""
LOOKED: Final = 512
"""Rollouts that are examined without a pause."""
AT_ONCE: Final = 64
"""Rollouts that are taken off the tape in one transaction."""
RETRY_S: Final = 5.0
"""Seconds until a step that the tape did not take is tried again."""
READER_S: Final = 1.0
"""Seconds between two checks whether a reader has ended that sees pages which must be overwritten."""
FOR_SPACE: Final = "space"
"""The reason for rollouts that go without a rule."""
T = TypeVar("T")
_log = logging.getLogger("penstock.retention")


class RetentionService:
    """The retention of one gateway. `start` before use, `stop` before the recorder closes."""

    def __init__(
        self,
        rules: Sequence[RetentionRule],
        keep_bytes: int | None,
        store: Store,
        recorder: Recorder,
        metrics: Metrics,
        now_ns: Callable[[], int],
        busy: Callable[[], Awaitable[Collection[str]]],
        gone: Callable[[str], None],
    ) -> None:
        """`busy`: returns the rollouts of which a call is being served; most calls are not on the tape before they end.
        `gone`: called with each rollout that was hidden.

        Raises `ConfigError` when a filter cannot be understood, or is about calls.
        """
        self._rules = [(rule, parse_rule(place, rule)) for place, rule in enumerate(rules, 1)]
        self._keep_bytes = keep_bytes
        self._store, self._recorder, self._metrics, self._now_ns = store, recorder, metrics, now_ns
        self._busy, self._gone = busy, gone
        self._to_wipe = deque[str]()
        self._given_up = dict[str, str]()
        """Rollouts that cannot be wiped completely, because the tape is damaged there, with the error. They wait for
        the next start."""
        self._unreadable = dict[str, str]()
        """Rollouts that cannot be read, or taken off the tape, because it is damaged there, with the error. They hold
        up no others."""
        self._hiding = set[asyncio.Future[ForgottenRollout]]()
        self._recalled = self._urgent = False
        self.hidden_at = store.cursor()
        """A cursor that is later than all changes that hide a rollout."""
        self._retired = 0
        self._looked_ns: int | None = None
        self._failing = self._full = ""
        self._next_look = self._next_pass = self._looking = 0.0
        self._asked, self._stopping = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue the work of an earlier gateway, then follow the rules."""
        self._task = asyncio.ensure_future(self._run())

    async def stop(self) -> None:
        """End after the step in progress."""
        self._stopping.set()
        self._asked.set()
        if self._task is not None:
            await self._task

    # -- requests ----------------------------------------------------------------------------------------------------

    async def forget(self, rollout: str, said: ActionRequest) -> ForgottenRollout:
        """Hide a rollout, and begin to wipe it. Raises `OperationRefusedError`."""
        # It goes on even if nobody waits for the answer any more.
        hiding = asyncio.ensure_future(self._hide(rollout, said))
        self._hiding.add(hiding)
        hiding.add_done_callback(self._hiding.discard)
        return await asyncio.shield(hiding)

    async def _hide(self, rollout: str, said: ActionRequest) -> ForgottenRollout:
        if rollout in await self._busy():
            raise running_call_error(rollout)
        made = await self._recorder.submit(lambda tape: RetentionOperations(tape).forget(rollout, said, self._now_ns()))
        self._gone(rollout)
        self._to_wipe.append(rollout)
        self._metrics.forgotten_rollouts += 1
        self._urgent = True
        self.hidden_at = self._store.cursor()
        self._asked.set()
        return made

    async def hold(self, rollout: str, said: ActionRequest) -> RetentionHold:
        """Keep a rollout. Raises `OperationRefusedError`."""
        return await self._recorder.submit(lambda tape: RetentionOperations(tape).hold(rollout, said, self._now_ns()))

    async def lift(self, rollout: str, said: ActionRequest) -> RetentionHold:
        """Lift the hold of a rollout. Raises `OperationRefusedError`."""
        return await self._recorder.submit(lambda tape: RetentionOperations(tape).lift(rollout, said, self._now_ns()))

    def status(self, in_index: int | None, left_behind: str = "") -> RetentionStatus:
        """Return the state of retention, read from the tape. `left_behind`: why the index has files from which nothing
        is removed."""
        with self._store.view() as view:
            forgotten, overwriting = view.count(FORGOTTEN), pending_wipe_count(view) > 0
        return RetentionStatus(
            rules=[rule for rule, _ in self._rules], keep_bytes=self._keep_bytes, used_bytes=self._store.live_bytes(),
            file_bytes=self._store.figures()["used_bytes"], forgotten=forgotten, retired=self._retired,
            wiping=len(self._to_wipe) + len(self._given_up),
            overwriting=overwriting or bool(self._to_wipe) or not self._recalled,
            in_index=in_index, looked_ns=self._looked_ns, full=self._full,
            stuck=self._failing or self._unwipeable or left_behind,
        )  # fmt: skip

    @property
    def _unwipeable(self) -> str:
        """The reason why calls of some rollouts stay; empty when none do."""
        found = {**self._given_up, **self._unreadable}
        said = "; ".join(f"{rollout}: {why}" for rollout, why in list(found.items())[:3])
        return f"{len(found):,} rollouts cannot be deleted ({said})" if said else ""

    def holds(self) -> RetentionHoldList:
        """Return the rollouts that are kept."""
        return RetentionHoldList(
            holds=[RetentionHold.model_validate_json(record) for _, record in self._store.records(HELD)]
        )

    def forgotten(self, after: str | None, limit: int) -> ForgottenPage:
        """Return a page of forgotten rollouts."""
        start = b"" if after is None else keys.rollout_key(after) + b"\0"
        found = [
            ForgottenRollout.model_validate_json(one) for _, one in islice(self._store.records(FORGOTTEN, start), limit)
        ]
        return ForgottenPage(forgotten=found, next=found[-1].rollout if len(found) == limit else None)

    # -- in the background -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping.is_set():
            self._asked.clear()
            try:
                if not self._recalled:
                    await asyncio.to_thread(self._recall)
                await self._wipe()
                await self._overwrite()
                await self._look()
                wait_s = self._due_s()
            except TapeError as error:
                wait_s = self._failed(str(error))
            except Exception as error:
                # A rollout that cannot be wiped must not end the recording of others.
                _log.exception("retention has failed: it is tried again")
                wait_s = self._failed(f"{type(error).__name__}: {error}")
            await self._pause(wait_s)

    def _failed(self, why: str) -> float:
        if why != self._failing:
            _log.error("what was forgotten cannot be deleted, it is tried again: %s", why)
        self._failing = why
        return RETRY_S

    async def _pause(self, seconds: float) -> None:
        """Wait until a request comes, at most `seconds`."""
        try:
            await asyncio.wait_for(self._asked.wait(), seconds)
        except TimeoutError:
            return

    def _due_s(self) -> float:
        """Seconds until the next work is due."""
        with self._store.view() as view:
            due = pending_wipe_count(view) > 0
        if due and self._urgent:
            return 0.0
        return max(0.0, min(self._next_look, self._next_pass if due else self._next_look) - monotonic())

    def _recall(self) -> None:
        found = (
            ForgottenRollout.model_validate_json(one) for _, one in self._store.records(FORGOTTEN) if needs_wipe(one)
        )
        known = set(self._to_wipe)
        self._to_wipe.extend(one.rollout for one in found if one.rollout not in known)
        self._recalled = True

    async def _wipe(self) -> None:
        """Wipe the forgotten rollouts, then the old part of the log."""
        wiped, place, most = False, WipePosition(), AT_ONCE
        while self._to_wipe and not self._stopping.is_set():
            some = list(islice(self._to_wipe, most))
            going = [(some[0], place), *((rollout, WipePosition()) for rollout in some[1:])]
            try:
                following = await self._step(partial(_wipe, going))
            except DamagedRecordError as error:
                if len(some) == 1:
                    self._given_up[self._to_wipe.popleft()] = str(error)
                    _log.error("%s", self._unwipeable)
                    place = WipePosition()
                # One of them is damaged: one by one, they show which.
                most = AT_ONCE if len(some) == 1 else 1
                continue
            for after in following[:-1]:
                assert after is None  # only the last one can be unfinished
            for _ in range(sum(after is None for after in following)):
                self._to_wipe.popleft()
            place, wiped = following[-1] or WipePosition(), True
        # A rollout that is about to be hidden is no problem: it is still listed when this begins, or is found here.
        # The log of rollouts that cannot be wiped is kept: it tells where the rest of them is.
        in_the_way = (self._to_wipe, self._hiding, self._given_up)
        while wiped and not self._stopping.is_set() and not any(in_the_way):
            wiped = await self._step(lambda tape: RetentionOperations(tape).sweep())
        self._failing = ""

    async def _step(self, do: Callable[[Transaction], T]) -> T:
        """Run one write, and pause for as long. The time of earlier items of the recorder's queue is not counted."""
        took = 0.0

        def timed(tape: Transaction) -> T:
            nonlocal took
            began = monotonic()
            try:
                return do(tape)
            finally:
                took = monotonic() - began

        result = await self._recorder.submit(timed)
        await asyncio.sleep(took)
        return result

    async def _overwrite(self) -> None:
        """Make a pass over the file, if something was wiped since the last one and it is time for it."""
        with self._store.view() as view:
            when = pending_wipe_count(view)
        if not when or not (self._urgent or monotonic() >= self._next_pass) or self._to_wipe:
            return
        began, self._urgent = monotonic(), False
        await self._recorder.submit(lambda tape: RetentionOperations(tape).touch())
        overwriting = await asyncio.to_thread(self._store.overwrite_pass)
        with overwriting:
            more = True
            # Rollouts forgotten meanwhile need another pass: this one is past their pages. Rules wait for no reader.
            while more and not (self._stopping.is_set() or self._to_wipe):
                if overwriting.is_blocked and monotonic() >= self._next_look:
                    return
                if overwriting.is_blocked:
                    await self._recorder.submit(lambda tape: RetentionOperations(tape).touch())
                step = monotonic()
                more = await asyncio.to_thread(overwriting.step)
                if more:
                    await asyncio.sleep(READER_S if overwriting.is_blocked else 4 * (monotonic() - step))
        if not more:
            await self._recorder.submit(lambda tape: RetentionOperations(tape).mark_overwritten(when))
            self._next_pass = monotonic() + SHARE * (monotonic() - began)

    async def _look(self) -> None:
        """Look for rollouts whose time is over, and take them off the tape."""
        if monotonic() < self._next_look or self._stopping.is_set():
            return
        self._looking = 0.0
        self._full = ""
        try:
            if self._rules:
                await self._retire(self._over(self._now_ns()), lambda: AT_ONCE)
                self._looked_ns = self._now_ns()
            if self._keep_bytes is not None and self._store.live_bytes() > self._keep_bytes:
                await self._make_space(self._keep_bytes)
        finally:
            self._next_look = monotonic() + max(EVERY_S, SHARE * self._looking)

    async def _retire(self, found: Iterator[ExpiredRollout | None], wanted: Callable[[], int]) -> None:
        """Take rollouts off the tape, and wipe them. `wanted`: returns how many may go now; 0 ends it."""
        more = True
        while more and not self._stopping.is_set() and (most := wanted()):
            began = monotonic()
            some, more = await asyncio.to_thread(take_expired, found, most)
            self._looking += monotonic() - began
            for why in dict.fromkeys(one.why for one in some):
                busy = await self._busy()
                names = [one.rollout for one in some if one.why == why and one.rollout not in busy]
                made = await self._taken_off(names, why)
                for one in made:
                    self._gone(one.rollout)
                    self._to_wipe.append(one.rollout)
                self.hidden_at = self._store.cursor()
                self._retired += len(made)
                self._metrics.forgotten_rollouts += len(made)
            await self._wipe()
            await asyncio.sleep(0)

    async def _taken_off(self, names: Sequence[str], why: str) -> list[ForgottenRollout]:
        try:
            return await self._step(partial(_retire, names, why, self._now_ns()))
        except DamagedRecordError as error:
            if len(names) == 1:
                self._leave(names[0], error)
                return []
        # One of them is damaged: one by one, they show which.
        return [made for name in names for made in await self._taken_off([name], why)]

    def _leave(self, rollout: str, error: TapeError) -> None:
        if rollout not in self._unreadable:
            _log.error("rollout %s stays, whatever the rules say: %s", rollout, error)
        self._unreadable[rollout] = str(error)

    def _over(self, now: int) -> Iterator[ExpiredRollout | None]:
        """Yield for each rollout that may be old enough the rule by which its time is over; None for no rule."""
        youngest = now - min(rule.after_ns for rule, _ in self._rules)
        for _, rollout in self._store.rollouts_oldest_first():
            # A rollout with the time of a wrong clock tells nothing about those that follow.
            if youngest < rollout.created_ns <= now:
                return
            try:
                yield self._rule_of(rollout, now) if self._may_go(rollout) else None
            except TapeError as error:
                self._leave(rollout.id, error)

    def _rule_of(self, rollout: Rollout, now: int) -> ExpiredRollout | None:
        attempts = self._store.attempts(rollout.id)
        silent_ns = now - last_seen_ns(rollout, attempts)
        due = [(rule, query) for rule, query in self._rules if rule.after_ns <= silent_ns]
        if not due:
            return None
        row = summarised(rollout, attempts)
        return next((ExpiredRollout(rollout.id, str(rule)) for rule, query in due if query.matches_rollout(row)), None)

    def _may_go(self, rollout: Rollout) -> bool:
        if rollout.status not in FINAL or rollout.id in self._unreadable:
            return False
        with self._store.view() as view:
            return view.get(HELD, keys.rollout_key(rollout.id)) is None

    def _too_many(self, keep_bytes: int) -> int:
        """Return about how many rollouts are too many, at most those of one transaction."""
        used = self._store.live_bytes()
        with self._store.view() as view:
            share = (used - keep_bytes) * view.count("rollouts") / used
        return min(AT_ONCE, max(1, int(share))) if used > keep_bytes else 0

    async def _make_space(self, keep_bytes: int) -> None:
        found = (
            ExpiredRollout(one.id, FOR_SPACE) if self._may_go(one) else None
            for _, one in self._store.rollouts_oldest_first()
        )
        await self._retire(found, lambda: self._too_many(keep_bytes))
        used = self._store.live_bytes()
        if used > keep_bytes and not self._stopping.is_set():
            self._full = (
                f"the tape uses {used:,} bytes, tape.keep_bytes is {keep_bytes:,}, and no rollout may go: what is left "
                "runs, is kept by somebody, or a release has not counted it"
            )
            _log.warning("%s", self._full)


def _wipe(going: Sequence[tuple[str, WipePosition]], tape: Transaction) -> list[WipePosition | None]:
    return RetentionOperations(tape).wipe(going)


def _retire(rollouts: Sequence[str], why: str, now: int, tape: Transaction) -> list[ForgottenRollout]:
    return RetentionOperations(tape).retire(rollouts, why, now)


class ExpiredRollout(NamedTuple):
    """A rollout whose time is over."""

    rollout: str
    why: str
    """The rule by which its time is over."""


def take_expired(found: Iterator[ExpiredRollout | None], most: int) -> tuple[list[ExpiredRollout], bool]:
    """Return at most `most` due rollouts, and whether there may be more."""
    some: list[ExpiredRollout] = []
    for _ in range(LOOKED):
        try:
            one = next(found)
        except StopIteration:
            return some, False
        if one is not None:
            some.append(one)
            if len(some) == most:
                break
    return some, True


def parse_rule(place: int, rule: RetentionRule) -> Query:
    """Return the filter of the `place`th rule, before a gateway starts. Raises `ConfigError` when it cannot be
    understood, or is about calls."""
    try:
        query = parse(rule.filter, "rollouts")
    except QueryError as error:
        raise ConfigError(f"retention {place}: filter: {rule.filter!r} cannot be understood: {error}") from None
    if query.needs_spans:
        raise ConfigError(
            f"retention {place}: filter: {rule.filter!r} is about calls, and rollouts are forgotten as a whole: name "
            "what `penstock rollouts` shows of them, such as status, mode, group, reward or metadata.NAME"
        )
    if query.on_cost:
        raise ConfigError(f"retention {place}: filter: {rule.filter!r} is about costs, and retention has no prices")
    return query


# -- forgetting and keeping rollouts, as operations inside a write transaction ----------------------------------------
#
# A forgotten rollout is hidden at once, in one transaction, and its data is deleted step by step (`wipe`). So a
# gateway that is killed in between goes on where it was. What remains is a `ForgottenRollout`: a name and a time. The
# assignments of releases stay, with their outcomes, so that their audit chains can still be verified.

FORGOTTEN, HELD = "forgotten", "held"
_DUE: Final = b"overwriting"
"""Key in `meta` of the number of wipes since the tape was last overwritten; missing when there were none."""


class RetentionOperations:
    """The operations of retention in one transaction."""

    def __init__(self, tape: Transaction) -> None:
        self._tape = tape

    def forget(self, rollout: str, said: ActionRequest, now: int) -> ForgottenRollout:
        """Take a rollout off the tape at a person's request."""
        made = self._hide(rollout, said.why, now)
        audit_log.write(self._tape, said, "forget_rollout", rollout, now)
        return made

    def retire(self, rollouts: Iterable[str], why: str, now: int) -> list[ForgottenRollout]:
        """Take rollouts off the tape by a rule, or for space; those that must stay after all are left out."""
        made: list[ForgottenRollout] = []
        for rollout in rollouts:
            try:
                made.append(self._hide(rollout, why, now))
            except OperationRefusedError:
                continue  # the rollout runs, somebody keeps it, or a release has not counted it
        if made:
            said = ActionRequest.model_construct(who=GATEWAY, why=why)
            audit_log.write(self._tape, said, "retire_rollouts", f"{len(made)} rollouts", now)
        return made

    def _hide(self, rollout: str, why: str, now: int) -> ForgottenRollout:
        reason = self._why_not(rollout)
        if reason is not None:
            raise reason
        background_answers.give_up(self._tape, keys.rollout_key(rollout))
        hosted_sessions.forget_rollout(self._tape, rollout)
        number = self._tape.erasure.hide(rollout)
        self._forget_pins(rollout)
        self._forget_misses(rollout)
        made = ForgottenRollout(rollout=rollout, at_ns=now, why=self._tape.secrets.text(why), number=number)
        self._put(FORGOTTEN, made)
        return made

    def _missing(self, rollout: str) -> OperationRefusedError:
        said = missing_rollout(rollout, lambda name: self._tape.rollout(name) is not None)
        return OperationRefusedError("not_found", said)

    def _why_not(self, rollout: str) -> OperationRefusedError | None:
        """Return why a rollout must stay; None when it may go."""
        key, known = keys.rollout_key(rollout), self._tape.rollout(rollout)
        if known is None:
            stored = self._tape.get(FORGOTTEN, key)
            if stored is None:
                return self._missing(rollout)
            return OperationRefusedError("not_found", f"there is no rollout {rollout!r}: it was forgotten already")
        before = self._tape.get(FORGOTTEN, key)
        if before is not None and needs_wipe(before):
            return OperationRefusedError(
                "conflict", f"another rollout named {rollout} is still being deleted; try again in a moment"
            )
        held = self._tape.get(HELD, key)
        if held is not None:
            one = RetentionHold.model_validate_json(held)
            return OperationRefusedError(
                "conflict", f"{one.who} keeps rollout {rollout}{one.why and f' ({one.why})'}; "
                f"end that first: penstock hold --lift {rollout}",
            )  # fmt: skip
        if known.rollout.status not in FINAL:
            status = known.rollout.status
            return OperationRefusedError(
                "conflict", f"rollout {rollout} is {status}: `penstock cancel` it, or wait until it has ended"
            )
        if self._tape.has_running_call(key):
            return running_call_error(rollout)
        release = self._counting(key)
        if release is not None:
            return OperationRefusedError(
                "conflict", f"release {release} has not counted rollout {rollout} yet; forget it when it has, or when "
                "the release has ended",
            )  # fmt: skip
        return None

    def _counting(self, key: bytes) -> str | None:
        """Return a live release that still has to count a rollout; None when there is none."""
        stored = self._tape.get("pins", key)
        for pin in [] if stored is None else PinList.model_validate_json(stored).pins:
            release = None if pin.release is None else self._tape.get("releases", pin.release.encode())
            if release is None or pin.release is None or pin.number is None or pin.forgotten:
                continue
            counted = self._tape.get("seen", keys.numbered_key(pin.release, pin.number)) is not None
            if not counted and (found := parse_record(Release, release)) is not None and found.live:
                return pin.release
        return None

    def _forget_pins(self, rollout: str) -> None:
        """Keep the pins of releases, which have counted the rollout, and mark them as forgotten: another rollout of its
        name does not get them. Delete all others."""
        key = keys.rollout_key(rollout)
        stored = self._tape.get("pins", key)
        if stored is None:
            return
        found = PinList.model_validate_json(stored).pins
        kept = [pin.model_copy(update={"forgotten": True}) for pin in found if pin.release is not None]
        if kept:
            self._tape.put("pins", key, PinList(pins=kept).model_dump_json(exclude_defaults=True).encode())
        else:
            self._tape.delete("pins", key)

    def _forget_misses(self, rollout: str) -> None:
        """Delete the last miss of each resource that was seen in the rollout."""
        found = [(key, Coverage.model_validate_json(record)) for key, record in self._tape.scan("coverage")]
        for key, coverage in found:
            if coverage.last is not None and coverage.last.rollout == rollout:
                coverage.last = None
                self._tape.put("coverage", key, coverage.model_dump_json(exclude_defaults=True).encode())

    def wipe(self, going: Sequence[tuple[str, WipePosition]]) -> list[WipePosition | None]:
        """Delete some calls of forgotten rollouts, of each from a place on. Return, for as many as there was time for,
        the place to go on from; None when all of its calls are gone."""
        stored = [self._tape.get(FORGOTTEN, keys.rollout_key(rollout)) for rollout, _ in going]
        found = [ForgottenRollout.model_validate_json(one) for one in stored if one is not None]
        following = self._tape.erasure.wipe([(one.number, at) for one, (_, at) in zip(found, going, strict=True)])
        done = [one for one, at in zip(found, following, strict=False) if at is None]
        for one in done:
            one.wiped = True
            self._put(FORGOTTEN, one)
        if done:
            self._tape.put("meta", _DUE, keys.number(wipe_count(self._tape.get("meta", _DUE)) + 1))
        return following

    def sweep(self) -> bool:
        """Delete some of the log before the oldest rollout that is left; return True if there is more. All forgotten
        rollouts must be wiped."""
        oldest = self._tape.oldest_rollout()
        return oldest is not None and self._tape.erasure.sweep(oldest)

    def touch(self) -> None:
        """Make a commit without a change: pages that the last commit has freed can be overwritten after it."""
        self._tape.put("meta", _DUE, keys.number(wipe_count(self._tape.get("meta", _DUE))))

    def mark_overwritten(self, when: int) -> None:
        """Note that everything was overwritten that had been wiped by then: `when` is the number of wipes at that
        time."""
        if wipe_count(self._tape.get("meta", _DUE)) == when:
            self._tape.delete("meta", _DUE)

    def hold(self, rollout: str, said: ActionRequest, now: int) -> RetentionHold:
        """Keep a rollout until somebody lifts the hold."""
        if self._tape.rollout(rollout) is None:
            raise self._missing(rollout)
        who, why = map(self._tape.secrets.text, (said.who or said.key or "somebody", said.why))
        made = RetentionHold(rollout=rollout, at_ns=now, who=who, why=why)
        self._put(HELD, made)
        audit_log.write(self._tape, said, "hold_rollout", rollout, now)
        return made

    def lift(self, rollout: str, said: ActionRequest, now: int) -> RetentionHold:
        """Lift the hold of a rollout; return it."""
        key = keys.rollout_key(rollout)
        held = self._tape.get(HELD, key)
        if held is None:
            raise OperationRefusedError("not_found", f"nobody keeps rollout {rollout}")
        self._tape.delete(HELD, key)
        audit_log.write(self._tape, said, "lift_hold", rollout, now)
        return RetentionHold.model_validate_json(held)

    def _put(self, database: str, one: ForgottenRollout | RetentionHold) -> None:
        self._tape.put(database, keys.rollout_key(one.rollout), one.model_dump_json(exclude_defaults=True).encode())


def running_call_error(rollout: str) -> OperationRefusedError:
    """Return the refusal to forget a rollout of which a call runs."""
    return OperationRefusedError("conflict", f"a call of rollout {rollout} still runs; forget it when that has ended")


def wipe_count(stored: bytes | None) -> int:
    """Return the number in `meta` of wipes since the tape was last overwritten; 0 for none."""
    return 0 if stored is None else keys.to_number(stored)


def pending_wipe_count(view: TapeView) -> int:
    """Return the number of wipes since the tape was last overwritten; 0 when there were none."""
    return wipe_count(view.get("meta", _DUE))


def needs_wipe(record: bytes) -> bool:
    """True if calls of a forgotten rollout are still on the tape. The record is searched without decoding it."""
    return b'"wiped":true' not in record
