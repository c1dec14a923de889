"""Forgetting and keeping rollouts, as operations inside a write transaction.

A forgotten rollout is hidden at once, in one transaction, and its data is deleted step by step (`wipe`). So a gateway
that is killed in between goes on where it was. What remains is a `ForgottenRollout`: a name and a time. The
assignments of releases stay, with their outcomes, so that their audit chains can still be verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.gateway.model.base import GATEWAY, ActionRequest, parse_record
from penstock.gateway.model.release import PinList, Release
from penstock.gateway.model.resource import Coverage
from penstock.gateway.model.rollout import FINAL
from penstock.gateway.model.state import ForgottenRollout, RetentionHold
from penstock.gateway.tape import background_answers
from penstock.gateway.tape.store import audit_log, keys
from penstock.gateway.tape.store.erasure import WipePosition
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tape.store.view import TapeView

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
        number = self._tape.erasure.hide(rollout)
        self._forget_pins(rollout)
        self._forget_misses(rollout)
        made = ForgottenRollout(rollout=rollout, at_ns=now, why=self._tape.secrets.text(why), number=number)
        self._put(FORGOTTEN, made)
        return made

    def _why_not(self, rollout: str) -> OperationRefusedError | None:
        """Return why a rollout must stay; None when it may go."""
        key, known = keys.rollout_key(rollout), self._tape.rollout(rollout)
        if known is None:
            stored = self._tape.get(FORGOTTEN, key)
            gone = "; `penstock rollouts` lists them" if stored is None else ": it was forgotten already"
            return OperationRefusedError("not_found", f"there is no rollout {rollout!r}{gone}")
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
            raise OperationRefusedError("not_found", f"there is no rollout {rollout!r}; `penstock rollouts` lists them")
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
