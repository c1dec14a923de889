"""Exports: the columns, both formats, and files that are whole or not there."""

from __future__ import annotations

import gc
import io
import json
import os
import re
from collections.abc import AsyncIterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fakes.memory_tape import MemoryTape, call, chat_exchange
from pydantic import BaseModel

from penstock.gateway.api.rollouts import detail_of
from penstock.gateway.client import sinks
from penstock.gateway.client.console import whole_file
from penstock.gateway.client.tables import NOUNS, ConversationRow, ExportKind, columns, export, row, sink
from penstock.gateway.model.rollout import Attempt, Reward, RolloutSummary, Totals
from penstock.gateway.model.tools import ToolRow

DOCS = (Path(__file__).parents[4] / "docs" / "export.md").read_text(encoding="utf-8")


def a_rollout() -> RolloutSummary:
    attempt = Attempt(rollout="r1", id="a1", reward=0.5)
    totals = Totals(calls=2, input_tokens=200)
    return RolloutSummary(
        id="r1", input={"q": "Straße"}, group="g", attempts=[attempt], totals=totals, reward=0.5, created_ns=10**18
    )


def nouns(what: str) -> list[BaseModel]:
    tape = MemoryTape()
    head = call(1, versions={"policy": "v1"}, stream=True)
    tape.add(head, chat_exchange([{"role": "user", "content": "hi\u2028"}], {"content": "ho"}, temperature=0.5))
    bare = call(2, kind="reward", name="reward", usage=None, body=None, attributes=Reward(value=1).attributes())
    if what == "messages":
        said = ConversationRow.of(detail_of(tape, head))
        assert said is not None
        return [said, said.model_copy(update={"model": None, "messages": [], "problems": ["odd"]})]
    if what == "tools":
        run = ToolRow(rollout="r1", attempt="a1", tool="sum", grade="ambiguous", reason="x", start_ns=1, end_ns=None)
        sure = {"span": 2, "server": "calc", "grade": "certain", "asked_by": 1, "asked_span_id": "ab", "end_ns": 3}
        return [run.model_copy(update=sure), run.model_copy(update={"candidates": [1, 3]})]
    return [a_rollout(), RolloutSummary(id="r2")] if what == "rollouts" else [head, bare]


async def given(items: list[BaseModel]) -> AsyncIterator[BaseModel]:
    for item in items:
        yield item


@pytest.mark.slow
@pytest.mark.parametrize("what", list(NOUNS))
async def test_both_formats_hold_the_same(what: ExportKind) -> None:
    lines, parquet = io.BytesIO(), io.BytesIO()
    assert await export(given(nouns(what)), sink(lines, what, "jsonl")) == 2
    assert await export(given(nouns(what)), sink(parquet, what, "parquet")) == 2
    plain = [json.loads(line) for line in lines.getvalue().decode().split("\n")[:-1]]
    table = import_module("pyarrow.parquet").read_table(io.BytesIO(parquet.getvalue()))
    assert table.schema.names == [column.name for column in columns(what)] == list(plain[0])
    texts = {column.name for column in columns(what) if column.kind == "json"}
    for a, b in zip(plain, table.to_pylist(), strict=True):
        assert a == {name: json.loads(v) if name in texts and v is not None else v for name, v in b.items()}


def test_sums_and_usage_are_columns() -> None:
    made = row(a_rollout())
    assert (made["calls"], made["input_tokens"], made["reward"], made["input"]) == (2, 200, 0.5, {"q": "Straße"})
    assert (made["attempts"][0]["id"], "totals" in made) == ("a1", False)
    head, bare = map(row, nouns("spans"))
    assert (head["output_tokens"], head["versions"], head["status"]) == (20, {"policy": "v1"}, "ok")
    assert (bare["output_tokens"], bare["attributes"]) == (None, {"penstock.reward.value": 1.0})


def test_what_was_never_recorded_is_no_conversation() -> None:
    tape = MemoryTape()
    tape.add(call(1, status="open", body=None))
    tape.add(call(2, kind="event", name="stdout"))
    assert [ConversationRow.of(detail_of(tape, span)) for span in tape.spans("r1")] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "size", "groups"), [(2, 1 << 30, [2, 2, 1]), (100, 1, [1, 1, 1, 1, 1])])
async def test_row_groups_are_written_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, rows: int, size: int, groups: list[int]
) -> None:
    monkeypatch.setattr(sinks, "GROUP_ROWS", rows)
    monkeypatch.setattr(sinks, "GROUP_BYTES", size)
    file = io.BytesIO()
    await export(given([a_rollout()] * 5), sink(file, "rollouts", "parquet"))
    found: Any = import_module("pyarrow.parquet").ParquetFile(io.BytesIO(file.getvalue())).metadata
    assert [found.row_group(n).num_rows for n in range(found.num_row_groups)] == groups


@pytest.mark.slow
async def test_parquet_that_fails_leaves_nothing_and_says_one_thing(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[BaseModel]:
        yield a_rollout()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "out.parquet") as file:
        await export(broken(), sink(file, "rollouts", "parquet"))
    gc.collect()  # a writer that was left open complains when it is gone
    assert os.listdir(tmp_path) == []


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("before")
    with whole_file(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["out.jsonl"]


def test_a_file_that_fails_leaves_nothing(tmp_path: Path) -> None:
    odd: Any = [b"half", None]
    with pytest.raises(TypeError), whole_file(tmp_path / "out.jsonl") as file:
        file.writelines(odd)
    assert os.listdir(tmp_path) == []


def test_a_link_is_followed(tmp_path: Path) -> None:
    link = tmp_path / "latest.jsonl"
    link.symlink_to("out.jsonl")
    with whole_file(link) as file:
        file.write(b"after")
    assert link.is_symlink()
    assert (tmp_path / "out.jsonl").read_text() == "after"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """As `/dev/null` and `/dev/stdout` do."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(pipe) as file:
            file.write(b"said")
        assert os.read(reader, 100) == b"said"
        assert pipe.is_fifo()
    finally:
        os.close(reader)


@pytest.mark.parametrize("what", list(NOUNS))
def test_every_column_is_documented_and_exists(what: ExportKind) -> None:
    section = DOCS.split(f"\n## `--what {what}`\n", 1)[1].split("\n## ", 1)[0]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", section, re.MULTILINE))
    wanted = [(c.name, "*" if c.kind == "json" else "") for c in columns(what)]
    assert sorted(re.findall(r"`(\w+)`(\*?)", cells)) == sorted(wanted)
