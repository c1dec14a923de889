"""The checks of `penstock check` for forgotten rollouts, holds, and bodies that rollouts share."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.gateway.model.forgotten import Forgotten, Holding
from penstock.gateway.store import codec, keys
from penstock.gateway.store.reader import Reader
from penstock.gateway.store.view import View


def going(view: View, key: bytes) -> bool:
    """True if the rest of a rollout is about to be wiped. `key`: any key that begins with the rollout's."""
    stored = view.get("forgotten", key[: key.index(0) + 1])
    return stored is not None and not Forgotten.model_validate_json(stored).wiped


def forgotten_between(tape: Reader, database: str, first: int, following: int) -> bool:
    """True if the numbers from `first` to before `following` were forgotten."""
    with tape.view() as view:
        return view.hole(database, first) == (first, following - 1)


def use(tape: Reader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a body refers to the shared body that its record names."""
    shared, body = keys.to_numbers(key)
    with tape.view() as view:
        if view.get("uses", key) is None:
            return  # it was forgotten meanwhile
        if codec.use_of(view.body_record(body)) != (shared, *keys.to_numbers(value)):
            yield f"body {body} does not stand on body {shared} so"


def forgotten(tape: Reader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a forgotten rollout is gone."""
    one = Forgotten.model_validate_json(value)
    if keys.rollout_key(one.rollout) != key:
        yield "it is the record of another rollout"
    with tape.view() as view:
        left = view.has("attempts", keys.number(one.number))
    if one.wiped and left:
        yield "its attempts are still there"


def held(tape: Reader, key: bytes, value: bytes) -> Iterator[str]:
    """Checks that a rollout with a hold exists."""
    if tape.rollout(Holding.model_validate_json(value).rollout) is None:
        yield "it is kept, and missing"
