"""Forgetting on a tape that no gateway serves."""

from __future__ import annotations

from penstock.gateway.store import Store
from penstock.gateway.store.forgetting import Place
from penstock.gateway.store.operation import Task
from penstock.gateway.store.writer import Writer


def forget(tape: Store | Writer, rollout: str) -> None:
    """Takes a rollout off the tape, whatever its status is."""
    hidden = Task(lambda it: it.forgetting.hide(rollout))
    tape.write([hidden])
    number, place = hidden.result, Place()
    assert number is not None
    while place is not None:
        step = Task(lambda it, at=place: it.forgetting.wipe([(number, at)]))
        tape.write([step])
        assert step.result is not None
        (place,) = step.result


def overwrite(store: Store) -> int:
    """Writes zeros over what was deleted; how many pages had something in them."""
    store.write([Task(lambda tape: tape.put("meta", b"note commit", b"1"))])
    with store.overwriting() as overwriting:
        while overwriting.step():
            if overwriting.waits:
                store.write([Task(lambda tape: tape.put("meta", b"note commit", b"2"))])
        return overwriting.overwritten
