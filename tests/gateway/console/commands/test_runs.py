"""`penstock runs` as people run it, against a real gateway; and what it shows."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import sqlite3
import struct
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import AsyncGenerator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fakes.goldens import check_golden, check_widths, text_of
from fakes.local import Local
from fakes.process import Gateway
from fakes.shell import Done, Shell

from penstock.console.commands import runs as run_commands
from penstock.console.main import main
from penstock.console.views import runs as runs_pictures
from penstock.console.views.pages import drawing, run_charts, run_page
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.run import Curve, NewRun, Point, Run, RunEnd, RunEvent, RunHead, VersionReference
from penstock.gateway.work.curves import Series, curve

T0 = 1_790_000_000_000_000_000
"""2026-09-21 14:13:20 UTC."""
MINUTE = 60 * 10**9


def reward(step: int) -> float:
    return 1 - math.exp(-step / 20)


def values(step: int, steps: int) -> dict[str, float | None]:
    """With one that is no number, and one that is rare."""
    rare: dict[str, float | None] = {"eval/success": step / steps} if step % 10 == 0 else {}
    usual: dict[str, float | None] = {"reward": reward(step), "kl": math.nan if step == 7 else step / 100}
    return usual | rare


async def trained(client: Client, name: str, steps: int = 60) -> None:
    await client.start_run(NewRun(id=name, kind="grpo", config={"lr": 1e-6}, steps=100))
    points = [Point(step=step, time_ns=T0 + step * 10**9, values=values(step, steps)) for step in range(steps)]
    await client.add_points(name, points)
    await client.add_run_events(name, [RunEvent(time_ns=T0, step=0, text="published policy v1")])


def good(done: Done) -> str:
    assert done.code == 0, done.err
    return done.text


@pytest.mark.slow
async def test_runs_are_listed_and_shown(shell: Shell, client: Client) -> None:
    await trained(client, "grpo-1")
    await client.start_run(NewRun(id="sft-1", kind="sft"))
    await client.finish_run("sft-1", RunEnd(status="failed", message="out of memory"))
    lines = good(await shell.run("runs", "list")).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [["sft-1", "sft", "failed"], ["grpo-1", "grpo", "running"]]
    assert "59/100" in lines[2]
    (one,) = good(await shell.run("runs", "list", "--kind", "sft", "--status", "failed", "--json")).splitlines()
    assert RunHead.model_validate_json(one).message == "out of memory"
    shown = good(await shell.run("runs", "show", "grpo-1"))
    assert '"lr": 1e-06' in shown
    assert "published policy v1" in shown
    few = good(await shell.run("runs", "show", "grpo-1", "--metrics", "rew*", "--json")).splitlines()
    assert Run.model_validate_json(few[0]).config == {"lr": 1e-6}
    assert Curve.model_validate_json(few[1]).metric == "reward"
    assert "text" in json.loads(few[2])
    assert good(await shell.run("runs", "show", "sft-1")).startswith("sft-1  sft  failed")


@pytest.mark.slow
async def test_a_run_is_followed_until_it_ends(shell: Shell, client: Client) -> None:
    await trained(client, "grpo-1", 20)
    watching = await shell.start("runs", "watch", "grpo-1", "--metrics", "reward")
    assert watching.stdout is not None
    async with asyncio.timeout(60):
        first = [(await watching.stdout.readline()).decode() for _ in range(2)]
        assert first[0].endswith("step 0  published policy v1\n")
        assert first[1].split() == ["grpo-1", "running", "step", "19/100", "reward", f"{reward(19):.6g}"]
        await client.add_points("grpo-1", [Point(step=20, values={"reward": 0.5})])
        assert (await watching.stdout.readline()).split() == b"grpo-1 running step 20/100 reward 0.5".split()
        await client.add_run_events("grpo-1", [RunEvent(level="error", text="the engine is gone")])
        await client.finish_run("grpo-1", RunEnd(status="failed"))
        rest = (await watching.stdout.read()).decode()
        assert "error  the engine is gone\n" in rest
        assert rest.endswith("grpo-1  failed  step 20/100  reward 0.5\n")
        assert await watching.wait() == 0


async def test_a_run_is_followed_when_the_gateway_is_restarted(gateway: Gateway, tmp_path: Path) -> None:
    async with Client(gateway.url) as client, asyncio.timeout(60):
        await trained(client, "grpo-1", 20)
        watching = await Shell(gateway.url, tmp_path).start("runs", "watch", "grpo-1", "--metrics", "reward")
        assert watching.stdout is not None
        while b"step 19/100" not in await watching.stdout.readline():
            pass
        await gateway.kill()
        await gateway.start(gateway.port)
        await client.finish_run("grpo-1", RunEnd(status="succeeded"))
        said, err = await watching.communicate()
    assert (watching.returncode, err) == (0, b"")
    assert said.decode().splitlines()[-1].startswith("grpo-1  succeeded")


@pytest.mark.slow
async def test_on_a_terminal_a_run_is_drawn(shell: Shell, client: Client) -> None:
    await trained(client, "grpo-1")
    await client.finish_run("grpo-1", RunEnd(status="succeeded"))
    said = await shell.typed(b"", "runs", "watch", "grpo-1", TERM="xterm")
    assert "60%" in said
    assert "succeeded" in said
    assert runs_pictures.BARS[-1] in said
    assert "published policy v1" in said


@pytest.mark.slow
async def test_a_run_that_has_ended_is_shown_once(shell: Shell, client: Client) -> None:
    await trained(client, "grpo-1", 3)
    await client.finish_run("grpo-1", RunEnd(status="stopped"))
    lines = good(await shell.run("runs", "watch", "grpo-1", "--json")).splitlines()
    assert [Run.model_validate_json(line).status for line in lines] == ["stopped"]


@pytest.mark.slow
async def test_plots_are_files_that_stand_by_themselves(shell: Shell, client: Client, tmp_path: Path) -> None:
    await trained(client, "grpo-1")
    await trained(client, "grpo-2", 30)
    done = await shell.run("runs", "plot", "grpo-1", "--compare", "grpo-2")
    said = "Not known: no tasks are held out ([[evaluate.suite]]). reward: 0 at step 0 and 0.9477 at step 59."
    assert (done.code, done.err) == (0, f"grpo-1.html: 3 metrics. {said}\n")
    html = (tmp_path / "grpo-1.html").read_text()
    assert f'<p class="result">{said}</p>' in html
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert html.count("<figure>") == 3
    good(await shell.run("runs", "plot", "grpo-1", "--out", "a.svg", "--metrics", "reward,eval*"))
    drawn = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    titles = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["eval/success", "reward"]
    good(await shell.run("runs", "plot", "grpo-1", "--out", "a.png", "--compare", "grpo-2"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 500])  # less than Python holds back, and more
@pytest.mark.parametrize("to", ["jsonl", "csv"])
async def test_an_export_that_nobody_reads_ends_quietly(shell: Shell, client: Client, to: str, steps: int) -> None:
    await trained(client, "grpo-1", steps)
    assert await shell.unread("runs", "export", "grpo-1", "--to", to) == ""


@pytest.mark.slow
async def test_every_point_is_exported(shell: Shell, client: Client, tmp_path: Path) -> None:
    await trained(client, "grpo-1")
    lines = good(await shell.run("runs", "export", "grpo-1", "--to", "jsonl")).splitlines()
    points = [Point.model_validate_json(line) for line in lines]
    assert [point.values["reward"] for point in points] == [reward(step) for step in range(60)]
    assert points[7].values["kl"] is None
    rows = list(csv.reader(io.StringIO(good(await shell.run("runs", "export", "grpo-1", "--to", "csv")))))
    assert rows[0] == ["step", "time_ns", "reward", "kl", "eval/success"]
    assert [float(row[2]) for row in rows[1:]] == [reward(step) for step in range(60)]
    assert [(row[3], row[4]) for row in rows[7:9]] == [("0.06", ""), ("nan", "")]
    done = await shell.run("runs", "export", "grpo-1", "--to", "tensorboard", "-o", "tb/one")
    assert (done.code, done.err) == (0, "tb/one: 60 steps\n")
    found = scalars(tmp_path / "tb" / "one")
    assert [(step, at) for step, at, _ in found["reward"]] == [(step, T0 / 1e9 + step) for step in range(60)]
    assert all(math.isclose(value, reward(step), abs_tol=1e-6) for step, _, value in found["reward"])
    assert [step for step, _, value in found["kl"] if math.isnan(value)] == [7]
    assert [step for step, _, _ in found["eval/success"]] == [0, 10, 20, 30, 40, 50]
    again = await shell.run("runs", "export", "grpo-1", "--to", "tensorboard", "-o", "tb/one")
    assert (again.code, "tb/one exists already" in again.err) == (1, True)


@pytest.mark.slow
async def test_an_export_that_breaks_off_leaves_no_folder(tmp_path: Path) -> None:
    async def points() -> AsyncGenerator[Point]:
        yield Point(step=1, time_ns=T0, values={"reward": 0.5})
        raise ClientError("the gateway has gone")

    with pytest.raises(ClientError):
        await run_commands.tensorboard(points(), tmp_path / "tb")
    assert not (tmp_path / "tb").exists()


@pytest.mark.slow
@pytest.mark.parametrize("format", ["tensorboard", "jsonl"])
async def test_a_full_disk_ends_an_export(shell: Shell, client: Client, tmp_path: Path, format: str) -> None:
    await trained(client, "grpo-1", 60)
    command = f"ulimit -f 1; exec {shell.command[0]} -m penstock runs export grpo-1 --to {format} -o out"
    process = await asyncio.create_subprocess_shell(
        command, env=shell.env, cwd=tmp_path, stderr=asyncio.subprocess.PIPE
    )
    _, err = await shell.end_of(process)
    assert (process.returncode, err) == (1, b"penstock: out: File too large\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_runs_share_a_database_of_mlflow(shell: Shell, client: Client, tmp_path: Path) -> None:
    # MLflow takes seconds of CPU time to make a database.
    shell.patience = 300.0
    for name, steps in (("grpo-1", 60), ("grpo-2", 3)):
        await trained(client, name, steps)
        await client.add_points(name, [Point(step=2, time_ns=T0, values={"pass@1": 0.5})])
    await client.finish_run("grpo-2", RunEnd(status="stopped"))
    for name, steps in (("grpo-1", 60), ("grpo-2", 3)):
        done = await shell.run("runs", "export", name, "--to", "mlflow", "-o", "ml")
        assert (done.code, done.err) == (0, f"ml: {steps} steps\n")
    with closing(sqlite3.connect(tmp_path / "ml" / "mlflow.db")) as database:
        runs = dict(database.execute("select name, status from runs"))
        assert runs == {"grpo-1": "RUNNING", "grpo-2": "KILLED"}
        told = (
            "select step, value, is_nan, timestamp from metrics join runs using (run_uuid) where name = ? and key = ?"
        )
        found = list(database.execute(f"{told} order by step", ("grpo-1", "reward")))
        assert [row[:3] for row in found] == [(step, reward(step), 0) for step in range(60)]
        assert found[1][3] == T0 // 10**6 + 1000
        assert [row[0] for row in database.execute(told, ("grpo-1", "kl")) if row[2]] == [7]
        assert len(list(database.execute(told, ("grpo-2", "pass_1")))) == 1
        assert dict(database.execute("select key, value from params")) == {"lr": "1e-06"}
    again = await shell.run("runs", "export", "grpo-2", "--to", "mlflow", "-o", "ml")
    assert (again.code, "ml has a run 'grpo-2' already" in again.err) == (1, True)


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """What an event file says: records of length, a checksum of it, the event, and its checksum."""
    events: Any = import_module("tensorboardX.proto.event_pb2")
    (file,) = folder.iterdir()
    data, found, at = file.read_bytes(), dict[str, list[tuple[int, float, float]]](), 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        event = events.Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, event.wall_time, value.simple_value))
    return found


WRONG: list[tuple[tuple[str, ...], int, str]] = [
    (("show", "none"), 1, "there is no run 'none'; `penstock runs list` lists them"),
    (("show", "grpo-1", "--metrics", "nothing"), 1, "run 'grpo-1' has no metric 'nothing'"),
    (("plot", "grpo-1", "--out", "a.gif"), 2, "a.gif is not .html, .svg or .png"),
    (("plot", "empty"), 1, "run 'empty' has no points to draw"),
    (("plot", "grpo-1", "--compare", "none"), 1, "there is no run 'none'"),
    (("plot", "grpo-1", "--out", "no/a.html"), 1, "no/a.html: No such file or directory"),
    (("export", "grpo-1", "--to", "tensorboard"), 2, "TensorBoard reads a folder: say which, as --output DIR"),
    (("export", "grpo-1", "--to", "mlflow"), 2, "MLflow reads a folder: say which, as --output DIR"),
    (("export", "grpo-1", "--to", "wandb"), 2, "wandb"),
    (("list", "--status", "lost"), 2, "lost"),
    (("watch", "none"), 1, "there is no run 'none'"),
]
MISSING = [
    ("matplotlib", "plots", ("plot", "grpo-1", "--out", "a.png")),
    ("tensorboardX", "plots", ("export", "grpo-1", "--to", "tensorboard", "-o", "tb")),
    ("mlflow", "mlflow", ("export", "grpo-1", "--to", "mlflow", "-o", "ml")),
]


async def said(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> tuple[object, str]:
    """(exit code, what it complains of) of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        await asyncio.to_thread(main, ["runs", *words])
    return ended.value.code, capsys.readouterr().err


async def test_what_is_wrong_is_one_line(
    local: Local, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_GATEWAY", local.url)
    await trained(client, "grpo-1", 2)
    await client.start_run(NewRun(id="empty", kind="sft"))
    for words, code, way_out in WRONG:
        found, err = await said(capsys, words)
        assert (found, way_out in err, err.count("\n")) == (code, True, 1), (words, err)
    for module, extra, words in MISSING:
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, module, None)  # as if it were not installed
            found, err = await said(capsys, words)
        assert (found, err.count("\n")) == (1, 1), err
        assert f"needs {module}: pip install '.[{extra}]'" in err


# -- what is shown -----------------------------------------------------------------------------------------------------


def example() -> tuple[Run, list[Curve], list[RunEvent]]:
    """A run that was resumed, with a metric that diverged and one that is rare."""
    run = Run(
        id="grpo-7", kind="grpo", name="toy environment", created_ns=T0, last_seen_ns=T0 + 59 * MINUTE, step=119,
        steps=400, resumed=1, since_step=90, metrics=["reward", "grad_norm", "eval/success"],
        made=[VersionReference(name="policy", version="v12")], message="collecting", config={"lr": 1e-6, "group": 8},
    )  # fmt: skip
    steps = range(120)
    columns = {
        "reward": Series(steps, [reward(step) for step in steps]),
        "grad_norm": Series(steps, [math.nan if 40 <= step < 60 else 1 + step % 7 for step in steps]),
        "eval/success": Series(range(0, 120, 20), [0.25, 0.25, 0.5, 0.5, 0.75, 0.875]),
    }
    events = [
        RunEvent(time_ns=T0 + 58 * MINUTE, step=119, level="warning", text="dropped 3 groups \x1b[31mred"),
        RunEvent(time_ns=T0 + 2 * MINUTE, step=0, text="published policy v12"),
    ]
    return run, [curve(name, found, 0, None, 32) for name, found in columns.items()], events


def test_a_run_looks_as_it_did() -> None:
    run, curves, events = example()
    check_widths("run", runs_pictures.show(run, curves, events, T0 + 60 * MINUTE))
    check_golden("run-watched", runs_pictures.watched(run, curves, events, T0 + 60 * MINUTE))
    ended = RunHead(
        id="sft-1", kind="sft", status="failed", created_ns=T0, ended_ns=T0 + MINUTE, message="out of memory"
    )
    silent = run.model_copy(update={"status": "silent"})
    check_widths("runs", runs_pictures.RUNS.table([silent, ended], T0 + 60 * MINUTE))


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], ""),
        ([1.0], "▄"),
        ([1.0, 1.0], "▄▄"),
        ([0.0, None, 7.0], "▁ █"),
        ([-1e308, 1e308], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparklines(values: list[float | None], shown: str) -> None:
    assert runs_pictures.sparkline(values) == shown


def test_the_page_says_what_is_there_and_nothing_in_it_is_markup() -> None:
    run, curves, events = example()
    run.message, run.config = "<b>collecting</b>", {"prompt": "</pre><script>"}
    html = run_page(run, "5 < 6", {"grpo-7": curves, "grpo<6": curves[:1]}, events, T0 + 60 * MINUTE)
    assert "<b>collecting" not in html
    assert "<script>" not in html
    assert "&lt;b&gt;collecting" in html
    assert html.index("5 &lt; 6") < html.index("<h2>Result</h2>") < html.index("<h2>Learning</h2>")
    assert "grpo&lt;6" in html
    assert "\x1b" not in html
    assert "grad_norm (20 not finite)" in html
    assert "policy@v12" in html
    assert "published policy v12" in html


def test_a_drawing_is_xml_and_shows_what_lies_between() -> None:
    _, curves, _ = example()
    groups = run_charts({"a": curves, "b": curves[:1]})
    assert {name: [chart.title for chart in charts] for name, charts in groups.items()} == {
        "Result": ["eval/success", "reward"], "Learning": ["grad_norm (20 not finite)"]
    }  # fmt: skip
    rare, often = groups["Result"]
    assert (len(rare.lines), len(often.lines), rare.band) == (1, 2, [])
    low, high = min(low for _, low, _ in often.band), max(high for _, _, high in often.band)
    assert (low, high) == (reward(0), reward(119))
    drawn = ElementTree.fromstring(drawing(groups, "a: " + "word " * 60))
    assert "var(" not in ElementTree.tostring(drawn).decode(), "many viewers know no variables"
    lines = [one for one in drawn.iter("{http://www.w3.org/2000/svg}path") if one.get("class", "").startswith("line")]
    assert len(lines) == 4 + 2, "each line, and the two that a legend names"


def test_the_pictures_fit_a_narrow_terminal() -> None:
    run, curves, events = example()
    text = text_of(runs_pictures.watched(run, curves, events, T0 + 60 * MINUTE), 80)
    assert max(map(len, text.splitlines())) <= 80
