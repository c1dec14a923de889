"""Versions of what servers list, on a tape: what is kept, what is forgotten, what is approved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from penstock.gateway.app import open_store
from penstock.gateway.cli.check import problems
from penstock.gateway.definitions.operations import (
    MOST_VERSIONS,
    DefinitionOperations,
    Seen,
    Sighting,
    Whose,
    described,
    server_key,
    text_key,
)
from penstock.gateway.definitions.reader import DefinitionReader
from penstock.gateway.definitions.reading import Change, Item, canonical, fingerprint
from penstock.gateway.model.definitions import ApproveRequest, Kind, ServerDefinitions
from penstock.gateway.model.known_secrets import own_secrets
from penstock.gateway.store import Store
from penstock.gateway.store.operation import Refused, Task
from penstock.gateway.store.transaction import Transaction

T = TypeVar("T")
KEY = "sk-AbCdEf0123456789AbCdEf"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path, secrets=own_secrets([KEY])) as made:
        yield made


def do(store: Store, operation: Callable[[Transaction], T]) -> T:
    task = Task(operation)
    _ = store.write([task])
    if task.refusal is not None:
        raise task.refusal
    assert task.result is not None
    return task.result


def sees(
    store: Store, texts: dict[str, str], now: int = 1, accepted: bool = False, kind: Kind = "tools", rollout: str = "r1"
) -> Seen:
    items = {name: Item(fingerprint(canonical(text)), canonical(text)) for name, text in texts.items()}
    sighting = Sighting("web", kind, items, Whose(rollout, "a1", "implicit", "val"), accepted)
    return do(store, lambda tape: DefinitionOperations(tape).seen(sighting, now))


def approves(store: Store, version: int | None = None) -> ServerDefinitions:
    asked = ApproveRequest(version=version, who="ada")
    return do(store, lambda tape: DefinitionOperations(tape).approve("web", asked, 9))


def test_the_first_version_is_approved_and_the_next_is_not(store: Store) -> None:
    assert sees(store, {"a": "1"}, 5).changes == []
    seen = sees(store, {"a": "2", "b": "1"}, 7)
    assert seen.changes == [Change("changed", "a"), Change("new", "b")]
    assert (seen.known.pinned, seen.known.newest) == ({"tools": 1}, {"tools": 2})
    again = sees(store, {"a": "1"}, 9)
    assert (again.version, again.changes, again.known.newest) == (1, [], {"tools": 1})
    assert [(one.first_seen_ns, one.last_seen_ns) for one in again.known.versions] == [(5, 9), (7, 7)]
    assert DefinitionReader(store).server("web") == again.known
    assert list(problems(store)) == []


def test_what_is_only_warned_of_is_approved_at_once(store: Store) -> None:
    seen = [sees(store, {"a": text}, number, accepted=True) for number, text in enumerate("1213", 1)]
    assert [one.known.pinned == one.known.newest == {"tools": one.version} for one in seen] == [True] * 4
    assert [one.version for one in seen[-1].known.versions] == [1, 2, 3]


def test_a_list_without_anything_is_no_first_version(store: Store) -> None:
    assert sees(store, {}).version is None
    assert DefinitionReader(store).server("web") is None
    _ = sees(store, {"a": "1"})
    assert sees(store, {}).changes == [Change("removed", "a")]


def test_the_rollout_that_saw_a_change_has_an_event(store: Store) -> None:
    _ = sees(store, {"a": "1"})
    _ = sees(store, {"a": "2"}, now=50, rollout="r2")
    _ = sees(store, {"a": "2"}, now=60, rollout="r3")
    assert (list(store.spans("r1")), list(store.spans("r3"))) == ([], [])
    (event,) = store.spans("r2")
    made = store.rollout("r2")
    assert made is not None
    assert (made.origin, made.mode) == ("implicit", "val")
    assert (event.kind, event.name, event.start_ns, event.status) == ("event", "mcp_definitions_changed", 50, "ok")


def test_lists_of_a_server_are_approved_together_or_one_by_one(store: Store) -> None:
    for kind in ("tools", "prompts"):
        for text in "12":
            _ = sees(store, {"a": text}, kind=kind)
    assert approves(store).pinned == {"tools": 2, "prompts": 4}
    known = approves(store, 1)
    assert known.pinned == {"tools": 1, "prompts": 4}
    said = [(one.kind, one.version, one.before, one.person) for one in known.approvals]
    assert said == [("tools", 2, 1, "ada"), ("prompts", 4, 3, "ada"), ("tools", 1, 2, "ada")]
    # What is approved already is not approved again.
    assert approves(store, 1).approvals == known.approvals
    with pytest.raises(Refused, match="has no version 7; it has 1, 2, 3, 4"):
        approves(store, 7)


def test_nothing_is_approved_that_was_not_seen(store: Store) -> None:
    with pytest.raises(Refused, match="has not listed anything yet"):
        approves(store)


def test_the_oldest_versions_are_forgotten_with_their_texts_and_what_is_approved_is_not(store: Store) -> None:
    many = [sees(store, {"same": "always", "clock": str(number)}, number) for number in range(MOST_VERSIONS + 20)]
    seen = many[-1]
    numbers = [one.version for one in seen.known.versions]
    assert len(numbers) == MOST_VERSIONS
    assert numbers[:2] == [1, 22]
    assert seen.known.pinned == {"tools": 1}
    with store.view() as view:
        kept = [key for key, _ in view.scan("definitions")]
    # The record of the server, what all have in common, and a clock for each version.
    assert len(kept) == 1 + 1 + MOST_VERSIONS
    assert sees(store, {"same": "always", "clock": "5"}).version == MOST_VERSIONS + 21
    assert list(problems(store)) == []


def test_secrets_are_taken_out_of_texts(store: Store) -> None:
    _ = sees(store, {"a": f"Use {KEY}."})
    (text,) = DefinitionReader(store).texts("web", [fingerprint(canonical(f"Use {KEY}."))]).values()
    assert text == canonical(f"Use {'*' * len(KEY)}.")
    assert list(problems(store)) == []


def test_damage_is_found(store: Store) -> None:
    _ = sees(store, {"a": "1", "b": "2"})
    one, other = (text_key("web", fingerprint(canonical(text))) for text in "12")

    def damage(tape: Transaction) -> bool:
        stored = tape.get("definitions", one)
        assert stored is not None
        tape.put("definitions", other, stored)
        tape.delete("definitions", one)
        record = tape.get("definitions", server_key("web"))
        assert record is not None
        tape.put("definitions", server_key("far"), record.replace(b'"tools":1', b'"tools":8'))
        return True

    assert do(store, damage)
    found = "\n".join(problems(store))
    for said in (
        "definitions web: 1 of the definitions that it names are missing",
        "it was changed: its hash does not agree",
        "definitions far: it is the record of another server",
        "definitions far: its version 8 of tools is missing",
    ):
        assert said in found


def test_changes_are_told_in_a_line() -> None:
    many = [Change("new", f"tool\u200b\n{number}") for number in range(22)]
    said = described(many)
    assert said.startswith("new tool<U+200B><U+000A>0, new tool<U+200B>")
    assert said.endswith(" and 2 more")
    assert described([Change("changed", "")]) == "changed"
