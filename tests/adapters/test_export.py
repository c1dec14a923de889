"""Files: both formats hold the same, the columns are those that are documented, and the command."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import sys
from collections.abc import AsyncGenerator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from fakes.memory_tape import MemoryTape, Serving, call, serving
from fakes.shell import Shell
from fakes.tokens import Talk, message

from penstock.adapters.chat import conversations
from penstock.adapters.export import COLUMNS, Form, Row, of_conversations, of_samples, sink
from penstock.adapters.preferences import pairs, row
from penstock.adapters.samples import Options, samples, triplets
from penstock.adapters.selection import Note, SamplingReason, Start, Unpaired
from penstock.console.main import main
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.turn import Exchange

DOCS = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
KINDS = {
    "whole": "whole number",
    "text": "text",
    "number": "number",
    "json": "JSON",
    "ids": "list of whole numbers",
    "flags": "list of true or false",
    "numbers": "list of numbers",
}
U = message("user", [1])


def talks() -> list[Talk]:
    """Two rollouts of a group."""
    made = [Talk(reward=0.0, rollout="bad"), Talk(reward=1.0, rollout="good")]
    for talk in made:
        one = talk.call([1], [(2,)], [U], agent="planner", versions={"m": "v1"})
        talk.call([*one.whole(), 3], [(4 + int(talk.reward or 0), 5)], [*one.said(), message("user", [3])])
        talk.call([9], [(7,)], logprobs=False)
        talk.call([9], [(7,)], status="error")
    return made


def rows(form: Form) -> list[Row]:
    episodes = [talk.episode() for talk in talks()]
    if form in ("samples", "triplets"):
        made = [it for one in episodes for it in samples(one, Options(allow=frozenset({"no_logprobs"})))[0]]
        return list(of_samples(made) if form == "samples" else triplets(made))
    said = [it for one in episodes for it in conversations(one)[0]]
    return list(of_conversations(said) if form == "chat" else map(row, pairs(said)[0]))


def plain(logprobs: list[float]) -> list[float | None]:
    """JSON has no nan, and writes what is enough to tell 32-bit numbers apart."""
    return [None if math.isnan(it) else float(str(np.float32(it))) for it in logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("form", get_args(Form))
def test_both_formats_hold_the_same(form: Form) -> None:
    lines, parquet = io.BytesIO(), io.BytesIO()
    for file, format in ((lines, "jsonl"), (parquet, "parquet")):
        out = sink(file, form, "jsonl" if format == "jsonl" else "parquet")
        for line in rows(form):
            out.write(line)
        out.close()
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    table = import_module("pyarrow.parquet").read_table(io.BytesIO(parquet.getvalue()))
    assert found
    assert table.schema.names == list(COLUMNS[form]) == list(found[0])
    texts = {name for name, kind in COLUMNS[form].items() if kind == "json"}
    for a, b in zip(found, table.to_pylist(), strict=True):
        numbers = {"logprobs": plain(b["logprobs"])} if "logprobs" in b else {}
        assert a == {name: json.loads(value) if name in texts else value for name, value in b.items()} | numbers


@pytest.mark.parametrize("form", get_args(Form))
def test_the_columns_are_documented_and_exist(form: Form) -> None:
    section = DOCS.split(f"\n### `--form {form}`\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    listed = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", section, re.MULTILINE)
    assert listed == [(name, KINDS[kind]) for name, kind in COLUMNS[form].items()]


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("| a row begins as |", Start),
        ("| reason |", SamplingReason),
        ("| note |", Note),
        ("| not in a pair |", Unpaired),
    ],
)
def test_every_reason_is_documented_and_exists(head: str, names: Any) -> None:
    table = DOCS.split(f"\n{head}", 1)[1].split("\n\n", 1)[0]
    assert re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE) == list(get_args(names))


# --- the command ---


@pytest.fixture
async def served() -> AsyncGenerator[Serving]:
    tape = MemoryTape()
    for talk in talks():
        for span in talk.heads:
            request, response = talk.bodies[span.attempt, span.sequence]
            exchange = Exchange(
                url="u", request_headers=[], request_body=request, response_headers=[], response_body=response
            )
            tape.add(span, exchange, group="g1", mode="train")
        tape.add(call(9, talk.rollout, kind="reward", attributes=Reward(value=talk.reward).attributes()))
    async with serving(tape) as running:
        yield running


@pytest.fixture
def shell(served: Serving, tmp_path: Path) -> Shell:
    return Shell(served.url, tmp_path)


@pytest.mark.smoke
@pytest.mark.slow
async def test_samples_go_to_stdout_and_the_report_to_stderr(shell: Shell) -> None:
    done = await shell.run("samples", "mode:train")
    made = [json.loads(line) for line in done.text.splitlines()]
    assert (done.code, [(row["rollout"], row["response"]) for row in made]) == (
        0,
        [("good", [2]), ("good", [5, 5]), ("bad", [2]), ("bad", [4, 5])],
    )
    assert done.err.splitlines() == [
        "2 rollouts, 8 calls: 4 rows of 4 answers, 6 sampled tokens",
        "rows begin: first 4",
        "left out: error 2, no_logprobs 2",
    ]


@pytest.mark.slow
async def test_what_the_command_is_told(shell: Shell) -> None:
    done = await shell.run(
        *(
            "samples",
            "--agent",
            "planner",
            "--transitions",
            "--mask-forced",
            "--allow",
            "no_logprobs",
            "--attempt",
            "last",
        ),
        *("--longest-prompt", "1", "--longest-response", "5", "--weight", "reward=3", "--model", "m"),
    )
    made = [json.loads(line) for line in done.text.splitlines()]
    assert [(row["prompt"], row["reward"]) for row in made] == [([1], 3.0), ([1], 0.0)]
    assert "other_agent 4" in done.err


@pytest.mark.slow
async def test_every_form_can_be_asked_for(shell: Shell) -> None:
    expected = {"chat": 6, "preferences": 1, "triplets": 4}
    ends = await asyncio.gather(*(shell.run("samples", "--form", form) for form in expected))
    assert [(done.code, len(done.text.splitlines())) for done in ends] == [(0, count) for count in expected.values()]


@pytest.mark.slow
async def test_parquet_is_a_file_that_is_whole(shell: Shell) -> None:
    done = await shell.run("samples", "--format", "parquet", "-o", "out.parquet")
    assert (done.code, done.out) == (0, b"")
    table = import_module("pyarrow.parquet").read_table(shell.folder / "out.parquet")
    assert table.num_rows == 4


WRONG = {
    ("--format", "parquet"): "Parquet goes to a file",
    ("--margin", "-1"): "--margin is -1.0: it must not be negative",
    ("--weight", "style"): "--weight: 'style' is not NAME=VALUE",
    ("--weight", "style=big"): "--weight: 'big' of style is not a number",
    ("--allow", "nothing"): "--allow: 'nothing' is no reason; there are ambiguous, base_url, cancelled,",
    ("-o", "no/such/place"): "no/such/place: No such file or directory",
}


@pytest.mark.slow
async def test_what_is_wrong_is_told_in_a_line(shell: Shell) -> None:
    ends = await asyncio.gather(*(shell.run("samples", *arguments) for arguments in WRONG))
    for done, error in zip(ends, WRONG.values(), strict=True):
        assert done.code in (1, 2)
        assert done.err.startswith(f"penstock: {error}")
        assert len(done.err.splitlines()) == 1


HERE = " in Penstock's checkout"
WITHOUT = f"{HERE}; chat and preferences do without"
MISSING: dict[tuple[str, ...], str] = {
    ("samples",): "--form samples needs numpy: pip install '.[samples]'" + WITHOUT,
    ("samples", "--form", "triplets"): "--form triplets needs numpy: pip install '.[samples]'" + WITHOUT,
    ("samples", "--format", "parquet", "-o", "x"): (
        "--form samples needs numpy: pip install '.[samples,parquet]'" + WITHOUT
    ),
    ("samples", "--form", "chat", "--format", "parquet", "-o", "x"): (
        "Parquet needs pyarrow: pip install '.[parquet]'" + HERE
    ),
}


@pytest.mark.parametrize("arguments", MISSING)
def test_what_a_form_needs_is_told_with_its_extra(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SystemExit):
        main([*arguments, "--gateway", "http://127.0.0.1:9"])
    assert capsys.readouterr().err == f"penstock: {MISSING[arguments]}\n"
