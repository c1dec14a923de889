"""Forgetting on a tape that no gateway serves."""

from __future__ import annotations

from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.erasure import WipePosition
from penstock.gateway.tape.store.transaction import QueuedOperation, Writer


def forget(tape: Store | Writer, rollout: str) -> None:
    """Takes a rollout off the tape, whatever its status is."""
    hidden = QueuedOperation(lambda it: it.erasure.hide(rollout))
    tape.write([hidden])
    number, place = hidden.result, WipePosition()
    assert number is not None
    while place is not None:
        step = QueuedOperation(lambda it, at=place: it.erasure.wipe([(number, at)]))
        tape.write([step])
        assert step.result is not None
        (place,) = step.result


def overwrite(store: Store) -> int:
    """Writes zeros over what was deleted; how many pages had something in them."""
    store.write([QueuedOperation(lambda tape: tape.put("meta", b"note commit", b"1"))])
    with store.overwrite_pass() as overwriting:
        while overwriting.step():
            if overwriting.is_blocked:
                store.write([QueuedOperation(lambda tape: tape.put("meta", b"note commit", b"2"))])
        return overwriting.pages_overwritten
