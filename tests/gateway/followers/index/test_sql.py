"""SQL over the tape: what it answers, and what it must not do: attacks that DuckDB lets pass by itself."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest
import uvloop
from fakes.entries import body
from fakes.process import ROOT
from fakes.runs import spawned_late

from penstock.gateway.app import open_store
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import IndexLink
from penstock.gateway.followers.index.sql import child, runner
from penstock.gateway.followers.index.sql.runner import SqlQueryError, SqlRunner, run_job
from penstock.gateway.followers.index.sql.views import VIEWS, Format, SqlFailure, SqlJob, SqlOutcome, SqlResult
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus, Judgement
from penstock.gateway.model.rollout import Outcome as Ended
from penstock.gateway.model.span import Usage
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.work.operations import QueueOperations

pq: Any = import_module("pyarrow.parquet")
"""It has no types."""
T0 = 1_790_000_000_000_000_000
ANSWER = {
    "choices": [
        {
            "message": {
                "role": "assistant",
                "content": "I'll look.",
                "tool_calls": [{"id": "c1", "function": {"name": "find", "arguments": '{"q": "Straße"}'}}],
            }
        }
    ]
}
RELEASE = {name: None for name in ("release", "resource", "kind", "stable", "candidate", "stage", "reason", "author")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, list[str]]]]:
    path = tmp_path_factory.mktemp("sql")
    with open_store(path) as store:
        _fill(store)
        index = TapeIndex(store, path / "index", sealed=20)
        assert index.follow(time.monotonic() + 60)
        yield path / "index", index.files()
        index.close()


def _fill(store: Store) -> None:
    asked = json.dumps({"messages": [{"role": "user", "content": "Find it"}]}).encode()
    for number in range(50):
        entry = SpanEntry(
            f"r{number % 5}", "a1", kind="llm", start_ns=T0 + number * 10**9, end_ns=T0 + number * 10**9 + 10**6,
            status="error" if number % 10 == 0 else "ok", model=f"m{number % 2}", agent="planner", dialect="chat",
            usage=Usage(input_tokens=10, output_tokens=number), tool_calls=1, versions={"p": "v1"},
            body=body(asked, json.dumps(ANSWER).encode()),
        )  # fmt: skip
        store.write([entry])
    spec = RolloutSpec(mode="train", group="g1", metadata={"tenant": {"plan": "pro"}})
    said = [(Judgement(value=0.5, source="rule"), True)]
    _operate(store, lambda tape: tape.hand_out("q1", spec, "gpu-1", 10**18, T0))
    _operate(store, lambda tape: tape.finish(("q1", "a1"), None, AttemptStatus.SUCCEEDED, Ended(), said, T0 + 10**9))


def _operate(store: Store, do: Callable[[QueueOperations], object]) -> None:
    task: QueuedOperation[Any] = QueuedOperation(lambda transaction: do(QueueOperations(transaction)))
    store.write([task])
    assert task.refusal is None, task.refusal


ANSWERING = """
import sys
import msgspec
from penstock.gateway.followers.index.sql import child
from penstock.gateway.followers.index.sql.views import SqlJob

opened = None
while size := sys.stdin.buffer.read(4):
    work = msgspec.msgpack.decode(sys.stdin.buffer.read(int.from_bytes(size)), type=SqlJob)
    opened = opened or child._opened(work)
    answer = msgspec.msgpack.encode(child._tried(work, lambda: child.execute(opened, work)))
    child._say(len(answer).to_bytes(4) + answer)
"""
"""A process of queries as the gateway starts one, which answers more than one."""


class Asking:
    """Asks the index."""

    def __init__(self, path: Path, files: dict[str, list[str]]) -> None:
        self.path, self._files = path, files
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", "-c", ANSWERING]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self.answer("select 1", "parquet")  # it has read what Parquet needs before it gives up its rights

    def work(self, query: str, format: Format = "rows", rows: int = 100, seconds: float = 60.0) -> SqlJob:
        times = {"created_ns": T0, "changed_ns": T0}
        release = RELEASE | {"release": "rel-1", "split": 0.5, "assigned": 3, "counted": 2} | times
        return SqlJob(query, str(self.path), self._files, {"releases": [release]}, format, rows, 1 << 20, seconds, True)

    def outcome(self, query: str, format: Format = "rows", rows: int = 100) -> SqlOutcome:
        ours, theirs = self._process.stdin, self._process.stdout
        assert ours is not None
        assert theirs is not None
        asked = msgspec.msgpack.encode(self.work(query, format, rows))
        ours.write(len(asked).to_bytes(4) + asked)
        ours.flush()
        return msgspec.msgpack.decode(theirs.read(int.from_bytes(theirs.read(4))), type=SqlOutcome)

    def alone(self, query: str, seconds: float = 60.0) -> SqlOutcome:
        """By a process of its own, as the gateway asks."""
        return uvloop.run(run_job(self.work(query, seconds=seconds)))

    def answer(self, query: str, format: Format = "rows", rows: int = 100) -> Any:
        return json.loads(result(self.outcome(query, format, rows)).json)

    def refused(self, query: str) -> SqlFailure:
        return failure(self.outcome(query))

    def close(self) -> None:
        self._process.communicate()


def result(found: SqlOutcome) -> SqlResult:
    assert isinstance(found, SqlResult), found
    return found


def failure(found: SqlOutcome) -> SqlFailure:
    assert isinstance(found, SqlFailure), found
    return found


@pytest.fixture(scope="module")
def ask(made: tuple[Path, dict[str, list[str]]]) -> Iterator[Asking]:
    asking = Asking(*made)
    yield asking
    asking.close()


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("select count(*), sum(output_tokens) from spans where kind = 'llm'", [[50, 1225]]),
        ("select model, count(*) from spans where status = 'error' group by 1 order by 1", [["m0", 5]]),
        ("select started, duration_ms, versions, tools from spans order by span limit 1",
         [["2026-09-21T14:13:20", 1.0, ["p@v1"], ["find"]]]),
        ("select role, part, count(*) from messages group by all order by 1, 2",
         [["assistant", "text", 50], ["assistant", "tool_call", 50], ["user", "text", 50]]),
        ("select distinct tool, arguments, run, id from tool_calls", [["find", '{"q": "Straße"}', False, "c1"]]),
        ("select text from messages where part = 'tool_call' limit 1", [['find({"q": "Straße"})']]),
        ("select task, mode, status, reward, metadata['tenant.plan'] from rollouts where rollout = 'q1'",
         [["g1", "train", "succeeded", 0.5, "pro"]]),
        ("select count(*) from rollouts", [[6]]),
        ("select worker, status from attempts where rollout = 'q1'", [["gpu-1", "succeeded"]]),
        ("select rollout, value, source, trusted from rewards", [["q1", 0.5, "rule", True]]),
        ("select release, split, created from releases", [["rel-1", 0.5, "2026-09-21T14:13:20"]]),
        ("select count(*) from runs", [[0]]),
        ("select 1 as x -- and a comment", [[1]]),
        ("select to_timestamp(0), timestamp '2026-01-02' at time zone 'Europe/Berlin'",
         [["1970-01-01T00:00:00+00:00", "2026-01-01T23:00:00+00:00"]]),
        ("with m as (select model from spans) select count(*) from m;", [[50 + 1]]),
        ("with recursive n as (select 1 as i union all select i + 1 from n where i < 4) select max(i) from n", [[4]]),
        ("select 'NaN'::double, 9007199254740993, 'a'::blob, {'a': [1, null]}, null",
         [["nan", "9007199254740993", "YQ==", {"a": [1, None]}, None]]),
    ],
)  # fmt: skip
def test_it_answers(ask: Asking, query: str, rows: list[list[Any]]) -> None:
    assert ask.answer(query)["rows"] == rows


def test_every_view_has_the_columns_that_it_says(ask: Asking) -> None:
    for name, view in VIEWS.items():
        found = {row[0]: row[1].lower() for row in ask.answer(f"describe {name}")["rows"]}
        assert found == {column: one.type for column, one in view.columns.items()}, name
    assert [row[0] for row in ask.answer("show tables")["rows"]] == sorted(VIEWS)


def test_an_index_of_nothing_has_empty_views() -> None:
    work = SqlJob("select count(*) from messages", "/usr", {}, {}, "rows", 10, 1 << 20, 10, True)
    assert json.loads(result(asyncio.run(run_job(work))).json)["rows"] == [[0]]


def test_rows_are_bounded_and_it_says_so(ask: Asking) -> None:
    found = ask.answer("select span from spans order by span", rows=7)
    assert (found["count"], found["more"], len(found["rows"])) == (7, True, 7)
    assert not ask.answer("select span from spans", rows=51)["more"]
    large = ask.answer("select repeat('x', 300000) from range(100)")
    assert (large["count"], large["more"]) == (3, True)
    assert ask.refused("select repeat('x', 3000000)").kind == "too_large"


def test_rows_as_csv_and_as_parquet(ask: Asking) -> None:
    query = "select agent, tools, count(*) as n from spans where kind = 'llm' group by all"
    assert ask.answer(query, "csv")["file"] == 'agent,tools,n\r\nplanner,"[""find""]",50\r\n'
    found = ask.answer(query, "parquet")
    table = pq.read_table(io.BytesIO(base64.b64decode(found["file"])))
    assert table.to_pylist() == [{"agent": "planner", "tools": ["find"], "n": 50}]
    some = ask.answer("select span from spans", "parquet", rows=9)
    assert (some["count"], some["more"]) == (9, True)
    assert pq.read_table(io.BytesIO(base64.b64decode(some["file"]))).num_rows == 9


# -- what it must not do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    [
        "copy spans to '/tmp/x.csv'",
        "with x as (copy (select 1) to '/tmp/x.csv') select 1",
        "with x as (insert into spans values (1)) select 1",
        "insert into spans select * from spans",
        "update releases set stage = 'stable'",
        "delete from releases",
        "drop view spans",
        "create table t as select 1",
        "create view v as select 1",
        "attach '/tmp/x.db'",
        "export database '/tmp/x'",
        "install httpfs",
        "load httpfs",
        "set memory_limit = '100GB'",
        "pragma database_list",
        "call duckdb_settings()",
        "begin",
        "checkpoint",
        "select 1; select 2",
        "select 1; copy spans to '/tmp/x.csv'",
        "select * from read_text('/etc/passwd')",
        "select * from read_csv('/etc/passwd')",
        "select * from read_blob('/proc/self/environ')",
        "select * from glob('/*')",
        "select * from '/etc/passwd'",
        "select * from 'https://example.com/x.parquet'",
        "select * from read_parquet('s3://bucket/x')",
        "from parquet_metadata('x')",
        "select * from duckdb_settings()",
        "select * from duckdb_databases()",
        "select * from information_schema.tables",
        "select * from pg_catalog.pg_tables",
        "select * from query('select 1')",
        "select * from query_table('spans')",
        "select * from sqlite_master",
        "select * from (select * from read_text('/etc/passwd'))",
        "select (select content from read_text('/etc/passwd'))",
        "with x as (from read_text('/etc/passwd')) from x",
        "select * from spans, lateral (select * from glob('/*'))",
        "select * from spans where model in (select file from glob('/*'))",
        "describe select * from '/etc/passwd'",
        "summarize '/etc/passwd'",
        "select current_setting('temp_directory')",
        "select getvariable('x')",
        'with "/etc/passwd" as (select 1) select * from "/etc/passwd"',
        "select interval '1000000000 days'",
        f"select {'[' * 500}{']' * 500}",
        "select 'a\0b'",
        "explain analyze select * from spans",
        "",
        ";",
    ],
)
def test_what_is_no_reading_of_the_views_is_refused(ask: Asking, query: str) -> None:
    before = sorted(ask.path.rglob("*"))
    found = ask.refused(query)
    assert found.kind == "query"
    assert str(ask.path) not in found.reason
    assert sorted(ask.path.rglob("*")) == before


@pytest.mark.parametrize(
    "query",
    [
        "select list_sort(range(500000000))[1]",
        "select format('{:>2000000000}', 'x')",
        "select repeat('x', 2000000000)",
        "select string_agg(repeat('x', 10000000), '') from range(1000)",
        "with recursive n as (select 1 as i union all select i + 1 from n) select count(*) from n",
        "select sum(a.range + b.range + c.range) from range(100000) a, range(100000) b, range(100000) c",
        f"select {'(' * 3000}1{')' * 3000}",
        "select " + "+".join(["1"] * 20_000),
        "select regexp_matches(repeat('a', 50000000), '(a*)*b')",
    ],
)
def test_a_bomb_ends_and_takes_little(ask: Asking, query: str) -> None:
    """Some of them would go on for years."""
    found = ask.alone(query, 0.3)
    assert isinstance(found, SqlFailure) or len(found.json) < 1 << 20


def alone(path: Path, *codes: str) -> list[str]:
    """What Python says of each in a process that has given its rights up, with an open DuckDB."""
    script = f"""
        import duckdb, socket, os, subprocess, encodings.idna
        listening = socket.create_server(("127.0.0.1", 0))
        from pathlib import Path
        from penstock.gateway.followers.index.sql import child
        child.limit_resources(10)
        child.enclose(Path({str(path)!r}))
        for code in {codes!r}:
            duck = duckdb.connect()
            try:
                print("did", eval(code))
            except Exception as error:
                print("refused", type(error).__name__)
    """
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


FORBIDDEN = [
    "duck.execute(\"copy (select 1) to '{}/x.csv'\")",
    "duck.execute(\"copy (select 1) to '{}/spans.parquet' (format parquet)\")",
    "duck.execute(\"attach '{}/x.db'\")",
    "duck.execute(\"export database '{}/x'\")",
    "duck.execute(\"select * from read_text('/etc/passwd')\").fetchall()",
    "duck.execute(\"select * from read_text('/proc/self/environ')\").fetchall()",
    "duck.execute(\"select * from read_text('/proc/1/status')\").fetchall()",
    "duck.execute(\"set temp_directory = '/tmp'\") and duck.execute(\"copy (select 1) to '/tmp/x.csv'\")",
    "open('/etc/passwd').read()",
    "open('{}/x', 'w')",
    "os.listdir('/')",
    "os.unlink('{}/manifest.json')",
    "os.rename('{}/lock', '{}/lock2')",
    "os.truncate('{}/lock', 5)",
    "os.mkdir('{}/x')",
    "os.symlink('/etc/passwd', '{}/x')",
    "subprocess.run(['/bin/true'])",
    "socket.create_connection(listening.getsockname())",
    f"len(bytearray({child.MEMORY_BYTES}))",
]


def test_the_sandbox_holds_by_itself(made: tuple[Path, dict[str, list[str]]]) -> None:
    path, files = made
    before = {it: it.stat().st_size for it in sorted(path.rglob("*"))}
    count = f'duck.execute("select count(*) from read_parquet({files["spans"]})").fetchall()'
    said = alone(path, *(code.replace("{}", str(path)) for code in FORBIDDEN), count)
    wrong = [(code, it) for code, it in zip(FORBIDDEN, said, strict=False) if not it.startswith("refused ")]
    assert wrong == []
    assert said[-3:] == ["refused PermissionError", "refused MemoryError", "did [(51,)]"]
    assert {it: it.stat().st_size for it in sorted(path.rglob("*"))} == before


def test_without_landlock_it_is_refused_unless_an_operator_has_asked_for_it(
    made: tuple[Path, dict[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from penstock.gateway.followers.index.sql import child; child.landlock_version = lambda: 0; child.main()"
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", code))
    path, files = made
    link = IndexLink(tmp_path, "always", lambda: 0)
    monkeypatch.setattr(link, "files", lambda: files)

    async def run(kind: runner.Sandbox) -> bytes:
        return await SqlRunner(link, path, kind).run("select count(*) from spans", "rows", 10, 10, {})

    with pytest.raises(
        SqlQueryError, match=r"this kernel has no Landlock.*\[index\] sql = \"none\" lets it"
    ) as refused:
        asyncio.run(run("landlock"))
    assert refused.value.status == 409
    assert json.loads(asyncio.run(run("none")))["rows"] == [[51]]
    with pytest.raises(SqlQueryError, match="SQL is turned off"):
        asyncio.run(run("off"))


def test_a_process_that_dies_or_babbles_is_no_answer(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = "import os; os.write(1, b'ready'); "
    for code, said in {
        "import os; os.kill(os.getpid(), 9)": "it needed more memory or processor time than it may have",
        ready + "os.kill(os.getpid(), 24)": "it needed more memory or processor time than it may have",
        ready + "os.kill(os.getpid(), 11)": "its process has ended (-11)",
        "print('x' * 100)": "its process has ended",
        ready + "print('x' * 100)": "its process has ended (0)",
        ready + "[print('x' * 1_000_000) for _ in range(10**6)]": "its process does not say what it should",
    }.items():
        monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", code))
        assert failure(ask.alone("select 1")).reason.startswith(said), code


def test_a_process_may_end_before_it_is_asked(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    spawned_late(monkeypatch)
    assert "more memory or processor time" in failure(ask.alone("select 1")).reason


def test_a_process_that_does_not_start_is_not_the_querys_fault(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "COMMAND", ("sleep", "600"))
    monkeypatch.setattr(runner, "START_S", 0.1)
    with pytest.raises(SqlQueryError, match=r"was not ready in 0\.1 s: .* ask again") as refused:
        ask.alone("select 1")
    assert refused.value.status == 503


def test_a_client_that_leaves_leaves_nothing_behind(
    made: tuple[Path, dict[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, files = made
    link, linking, left = IndexLink(tmp_path, "always", lambda: 0), threading.Event(), threading.Event()

    def slow() -> dict[str, list[str]]:
        linking.set()
        assert left.wait(60)
        return files

    monkeypatch.setattr(link, "files", slow)

    async def leave() -> None:
        asking = asyncio.ensure_future(SqlRunner(link, path, "landlock").run("select 1", "rows", 10, 10, {}))
        await asyncio.to_thread(linking.wait)
        asking.cancel()
        asyncio.get_running_loop().call_later(0.1, left.set)
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(leave())
    assert not list((path / "linked").glob("*"))


def test_more_than_may_wait_are_refused(
    made: tuple[Path, dict[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, files = made
    link = IndexLink(tmp_path, "always", lambda: 0)
    monkeypatch.setattr(link, "files", lambda: files)
    monkeypatch.setattr(runner, "MOST_WAITING", 2)

    async def run() -> list[Any]:
        queries = SqlRunner(link, path, "landlock")
        asked = [queries.run("select count(*) from spans", "rows", 10, 10, {}) for _ in range(3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    *answers, refused = asyncio.run(run())
    assert [json.loads(answer)["rows"] for answer in answers] == [[[51]], [[51]]]
    assert isinstance(refused, SqlQueryError)
    assert (refused.status, "2 queries are under way: ask again" in refused.message) == (503, True), refused.message


def test_little_of_its_memory_is_gone_before_it_begins(ask: Asking) -> None:
    """Or a query would fail by chance."""
    for _ in range(3):
        found = result(ask.alone("select length(string_agg(repeat('x', 1000000), '')) from range(100)"))
        assert json.loads(found.json)["rows"] == [[10**8]]


def test_what_was_not_asked_for_is_not_there(monkeypatch: pytest.MonkeyPatch, ask: Asking) -> None:
    """No key of the gateway's environment is in that of the process."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    code = "import os, sys; sys.stdout.write(repr(sorted(os.environ)))"
    monkeypatch.setattr(runner, "COMMAND", (sys.executable, "-c", code))
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "OPENAI_API_KEY" in process.stdout
    seen: list[bytes] = []
    decode = runner.msgspec.msgpack.decode

    def kept(data: bytes, **more: Any) -> Any:
        seen.append(data)
        return decode(data, **more)

    monkeypatch.setattr(runner.msgspec.msgpack, "decode", kept)
    failure(ask.alone("select 1"))
    assert not re.search(rb"KEY|TOKEN|SECRET", b"".join(seen))


# -- the documentation -------------------------------------------------------------------------------------------------

DOCS = (ROOT / "docs" / "sql.md").read_text()


def test_the_documentation_has_every_view_and_column() -> None:
    common = ["span", "rollout", "attempt", "sequence"]
    for name, view in VIEWS.items():
        section = DOCS.split(f"\n### {name}\n\n{view.help}\n", 1)[1].split("\n### ", 1)[0]
        found = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)))
        columns = list(view.columns)
        assert sorted(found) == sorted(columns[4:] if columns[:4] == common else columns), name


def test_the_queries_of_the_documentation_are_answered(ask: Asking) -> None:
    block = DOCS.partition("```sql\n")[2].partition("```")[0]
    queries = [query for query in block.split(";") if query.strip()]
    assert len(queries) == 4
    for query in queries:
        assert ask.answer(query)["columns"], query


def test_an_index_that_becomes_ready_as_the_wait_ends_answers(
    made: tuple[Path, dict[str, list[str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, files = made
    link, answers = IndexLink(tmp_path, "always", lambda: 0), iter(["its process is starting", files])

    async def find() -> dict[str, list[str]]:
        loop = asyncio.get_running_loop()

        def late() -> dict[str, list[str]] | str:
            monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 2 * runner.INDEX_S)
            return next(answers)

        monkeypatch.setattr(link, "files", late)
        monkeypatch.setattr(link, "ensure_running", lambda: None)
        return await SqlRunner(link, path, "landlock")._files(runner._SnapshotLinks(path))

    assert set(asyncio.run(find())) == set(files)
