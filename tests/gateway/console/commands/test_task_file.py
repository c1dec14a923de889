"""Files of tasks: what becomes of each line, and what is said of one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes.mistakes import tells
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.commands.enqueue import TaskLine, batches, first_flaws, read, rollouts
from penstock.gateway.model.queue import RolloutSpec


def ids(lines: Sequence[bytes], id_field: str | None = None) -> list[str]:
    found, flaws = read(lines, id_field, None)
    assert flaws == []
    return [task.id for task in found]


def test_ids_come_from_the_id_or_the_content() -> None:
    assert ids([b'{"id": "q1", "x": 1}', b'{"id": 7}', b"\n", b' {"id":"q3"} \r\n']) == ["q1", "7", "q3"]
    assert ids([b'{"id": 1, "name": "a"}', b'{"id": 1, "name": "b"}'], "name") == ["a", "b"]
    one, two, same = (ids([line])[0] for line in (b'{"a": 1, "b": 2}', b'{"a": 1, "b": 3}', b'{"b":2,"a":1}'))
    assert (len(one), one == same, one == two) == (16, True, False)
    assert len(set(ids([b'"text"', b"[1]", b"5", b"null"]))) == 4


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        (b"{oops}", "line 2: is not JSON at column 2: a name without double quotes: {oops}"),
        (b"nope", "line 2: is not JSON at column 2: no value, or a text without double quotes: nope"),
        (b"", None),
        (
            b'{"id": "q2", "g": "x"',
            "line 2: is not JSON at column 21: the line ends too early (each task is one line): ",
        ),
        (b'{"id": "q2", "g": NaN}', "line 2: is not JSON at column 19: no value, or a text without double quotes: "),
        (b'{"id": "\xff", "g": "x"}', "line 2: is not JSON at column 9: invalid unicode code point: "),
        (
            b'{"id": "q2"} {"id": "q3"}',
            "line 2: is not JSON at column 14: more stands behind the task (each task is one line): ",
        ),
        (b'{"id": "q2", "g": [1e999]}', "line 2: a number in it is larger than 1.8e308, or is none"),
        (b"[" * 300 + b"]" * 300, "line 2: is not JSON at column 202: recursion limit exceeded: " + "[" * 60 + " ..."),
        (b'{"id": "q1", "g": "x"}', "line 2: its id 'q1' is that of line 1 already; --repeat"),
        (b'{"id": "a b", "g": "x"}', "line 2: id: 'a b' is not an id: up to 120 letters, digits and . _ - only"),
        (b'{"id": "' + b"x" * 121 + b'", "g": "x"}', "line 2: id: 'xxx"),
        (b'{"id": true, "g": "x"}', "line 2: id: is neither text nor a whole number: true"),
        (b'{"id": "q2"}', "line 2: g: is missing; there are: id"),
        (b'{"id": "q2", "g": ""}', "line 2: g: a group has 1 to 256 characters"),
        (b'{"id": "q2", "g": ["x"]}', 'line 2: g: is neither text nor a whole number: ["x"]'),
        (b'"no object"', "line 2: g: is missing; there are: no fields"),
    ],
)
def test_a_flaw_names_its_line_and_field(line: bytes, flaw: str | None) -> None:
    _, flaws = read([b'{"id": "q1", "g": "x"}', line], None, "g")
    assert len(flaws) == (flaw is not None)
    assert flaw is None or str(flaws[0]).startswith(flaw)


def test_an_id_field_that_was_named_must_be_there() -> None:
    _, flaws = read([b'{"id": "q1"}'], "key", None)
    assert tells(str(flaws[0]), "line 1: key: is missing", "id")


def test_many_flaws_are_counted() -> None:
    _, flaws = read([b"x"] * 1500, None, None)
    assert tells(first_flaws(flaws), "line 1", "column 1", "1,499 more")


def test_repetitions_are_a_group() -> None:
    tasks = [TaskLine("q1", None, {"n": 1}), TaskLine("q2", "hard", None)]
    once = list(rollouts(tasks, 1, RolloutSpec(mode="val", priority=3)))
    assert [(spec.id, spec.group, spec.mode, spec.priority) for spec in once] == [
        ("q1.0", "q1", "val", 3),
        ("q2.0", "hard", "val", 3),
    ]
    twice = list(rollouts(tasks, 2, RolloutSpec()))
    assert [(spec.id, spec.group) for spec in twice] == [
        ("q1.0", "q1"), ("q1.1", "q1"), ("q2.0", "hard"), ("q2.1", "hard"),
    ]  # fmt: skip
    assert [spec.input for spec in twice] == [{"n": 1}, {"n": 1}, None, None]


def test_batches_hold_everything_in_order() -> None:
    assert list(batches(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(batches(list[int](), 2)) == []


@given(st.lists(st.binary(max_size=30), max_size=5), st.sampled_from([None, "id"]), st.sampled_from([None, "g"]))
def test_any_lines_are_read_or_refused(lines: list[bytes], id_field: str | None, group: str | None) -> None:
    found, flaws = read(lines, id_field, group)
    assert len(found) + len(flaws) == sum(bool(line.strip()) for line in lines)
    for spec in rollouts(found, 2, RolloutSpec()):
        RolloutSpec.model_validate_json(spec.model_dump_json(exclude_unset=True))
