"""The `penstock` command as people run it: a process, its output, its errors in one line, its exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from aiohttp import web
from fakes.goldens import check_golden
from fakes.memory_tape import MemoryTape, Serving, call, chat_exchange, exchange, serving
from fakes.mistakes import tells
from fakes.process import PATIENCE, ROOT
from fakes.shell import Shell
from fakes.web_site import everywhere, site

from penstock.console.commands import check
from penstock.console.commands.command_table import COMMANDS, FIRST, GROUPS
from penstock.console.main import main
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.console import LOCAL, asked_gateway
from penstock.gateway.model.turn import Side

RAW = b'\xff\x00 {"exact": \r\n}'


def tape_of_two() -> MemoryTape:
    tape = MemoryTape()
    tape.add(call(1), chat_exchange([{"role": "user", "content": "What is 2+2?"}], {"content": "Four."}), mode="train")
    agent = Side(who="agent", dialect="messages", path="/v1/messages", request_body=b"asked", response_body=b"told")
    tape.add(call(2, ms=3000), exchange(RAW, b"answer").model_copy(update={"sides": [agent]}))
    tape.add(call(1, attempt="a2", status="error", error="connect"))
    tape.add(call(1, rollout="r2", agent="two words"), chat_exchange([], {"content": "hi"}))
    return tape


@contextmanager
def logs_as_before() -> Generator[None]:
    """`serve` sets up the log of its process, which is this one here."""
    root, hooks = logging.getLogger(), (sys.excepthook, threading.excepthook)
    before, level = list(root.handlers), root.level
    yield
    for handler in [one for one in root.handlers if one not in before]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook = hooks


@pytest.fixture
async def served() -> AsyncGenerator[Serving]:
    async with serving(tape_of_two()) as running:
        yield running


@pytest.fixture
def shell(served: Serving, tmp_path: Path) -> Shell:
    return Shell(served.url, tmp_path)


@pytest.mark.slow
async def test_rollouts_and_spans_take_filters(shell: Shell) -> None:
    every, one, none = await asyncio.gather(
        shell.run("rollouts"),
        shell.run("rollouts", "mode:train", "latency>2s"),
        shell.run("spans", "r1/a1", "-status:ok", "not", "latency>1h", "--limit", "5"),
    )
    assert (every.code, [line.split()[0] for line in every.text.splitlines()]) == (0, ["rollout", "r2", "r1"])
    assert [line.split()[0] for line in one.text.splitlines()] == ["rollout", "r1"]
    assert (none.code, none.text) == (0, "")


@pytest.mark.slow
async def test_a_filter_may_hold_spaces(shell: Shell) -> None:
    done = await shell.run("spans", "r2", 'agent:"two words"', "--json")
    assert [json.loads(line)["agent"] for line in done.text.splitlines()] == ["two words"]


@pytest.mark.smoke
@pytest.mark.slow
async def test_show_prints_the_tree(shell: Shell) -> None:
    tree, attempt, one = await asyncio.gather(
        shell.run("show", "r1"), shell.run("show", "r1/a2"), shell.run("show", "r2#1")
    )
    assert tree.text.splitlines()[0].startswith("r1  running  3 model calls")
    assert "user  What is 2+2?" in tree.text
    assert "→ answer (stop)  Four." in tree.text
    assert "What is 2+2?" not in attempt.text
    assert "error  connect" in attempt.text
    assert one.text.splitlines()[0].startswith("#1  chat  two words  gpt-5-mini  ok")
    assert "called  https://api.example/v1/chat/completions" in one.text


@pytest.mark.slow
async def test_show_writes_a_page(shell: Shell) -> None:
    done, one = await asyncio.gather(
        shell.run("show", "r1", "--html", "r1.html", "--compare", "r2", "--calls", "2"),
        shell.run("show", "r1/a2", "--html", "a2.html"),
    )
    assert (done.code, done.out, done.err, one.code) == (0, b"", "r1.html: 2 spans\n", 0)
    assert "What is 2+2?" not in (shell.folder / "a2.html").read_text()
    page = (shell.folder / "r1.html").read_text()
    assert "<h1>r1</h1>" in page
    assert "<h2>Against r2</h2>" in page
    assert "What is 2+2?" in page
    assert "2 of 3 spans are shown" in page


@pytest.mark.slow
async def test_show_json_is_the_whole_span(shell: Shell) -> None:
    one, whole = await asyncio.gather(
        shell.run("show", "r1/a1#1", "--json"), shell.run("show", "r1", "--json", "--calls", "2")
    )
    assert json.loads(one.text)["turn"]["choices"][0]["message"]["parts"][0]["text"] == "Four."
    first, *details = map(json.loads, whole.text.splitlines())
    assert first["id"] == "r1"
    assert [detail["span"]["sequence"] for detail in details] == [1, 2]


@pytest.mark.slow
async def test_raw_is_exact_and_a_side_is_shown_and_printed(shell: Shell) -> None:
    request, response, raw, other, tree = await asyncio.gather(
        shell.run("show", "r1/a1#2", "--raw", "request"),
        shell.run("show", "r1/a1#2", "--raw", "response"),
        shell.run("show", "r1/a1#2", "--raw", "request", "--side", "agent"),
        shell.run("show", "r1/a1#2", "--raw", "request", "--side", "engine"),
        shell.run("show", "r1/a1#2"),
    )
    for done, body in ((request, RAW), (response, b"answer"), (raw, b"asked")):
        assert (done.code, done.out, done.err) == (0, body, "")
    assert (other.code, other.out) == (1, b"")
    assert "the engine spoke the exchange's own format" in other.err
    assert "also spoken  agent: messages /v1/messages" in tree.text


@pytest.mark.slow
async def test_token_and_stats(shell: Shell, served: Serving) -> None:
    token, stats = await asyncio.gather(shell.run("token", "r9", "--expires", "1h"), shell.run("stats"))
    assert served.auth.rollout_of(token.text.strip(), now=0) == "r9"
    assert tells(stats.text.splitlines()[0], "1 error, 3 ok")
    assert stats.text.endswith("Queue open: 0 waiting; 0 claimed.\n")


@pytest.mark.slow
async def test_changes_follow_until_interrupted(shell: Shell, served: Serving) -> None:
    process = await shell.start("changes", "--since", "4")
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        assert (await process.stdout.readline()).decode().split()[:2] == ["5", "r2"]
        assert (await process.stdout.readline()).decode().split()[:2] == ["6", "r2/a1"]
        served.tape.add(call(2, rollout="r2"))
        await served.tape.tell()
        assert (await process.stdout.readline()).decode().split()[:3] == ["7", "r2/a1", "#2"]
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert (process.returncode, err) == (130, b"")


@pytest.mark.slow
async def test_the_key_comes_from_the_environment(tmp_path: Path) -> None:
    async with serving(tape_of_two(), admin_key="secret") as served:
        shell = Shell(served.url, tmp_path)
        none, wrong, good, empty = await asyncio.gather(
            shell.run("stats"),
            shell.run("stats", PENSTOCK_ADMIN_KEY="guess"),
            shell.run("stats", PENSTOCK_ADMIN_KEY="secret"),
            shell.run("stats", PENSTOCK_ADMIN_KEY=""),
        )
    assert tells(empty.err, "the admin key is missing", "PENSTOCK_ADMIN_KEY is set, and empty")
    assert "empty" not in none.err
    assert (none.code, wrong.code, good.code) == (1, 1, 0)
    assert tells(none.err, "the admin key is missing", "PENSTOCK_ADMIN_KEY")
    assert "not the gateway's admin key" in wrong.err
    assert "guess" not in wrong.err


ERRORS: list[tuple[tuple[str, ...], int, str]] = [
    (("sql", "select 1", "--timeout", "5m"), 2, "--timeout: 300.0 is not 60 or less"),
    (("sql", ""), 2, "QUERY: '' is not text of 1 character or more"),
    (("sql", "select \udcff"), 2, "'select \\udcff' is not UTF-8"),
    (("rollouts", "group:\udcff"), 2, "'group:\\udcff' is not UTF-8"),
    (("show", "r\udcff"), 2, "'r\\udcff' is not UTF-8"),
    (("search", "r\udcff"), 2, "'r\\udcff' is not UTF-8"),
    (("rollouts", "statsu:x"), 1, "unknown field 'statsu'; did you mean 'status'?"),
    (("show", "none"), 1, "there is no rollout 'none'"),
    (("show", "r1/a1#9"), 1, "attempt 'a1' has no span 9"),
    (("show", "r1#1"), 2, "rollout 'r1' has 2 attempts (a1, a2): say which, as r1/ATTEMPT#1"),
    (("show", "r1/a1#0"), 2, "is not RID, RID/ATTEMPT or RID/ATTEMPT#SEQUENCE"),
    (("show", "r1", "--raw", "request"), 2, "--raw shows one call: say which, such as 'r1/a1#1'"),
    (("show", "r1/a2", "--raw", "request"), 2, "--raw shows one call: say which, such as 'r1/a2#1'"),
    (("show", "r9", "--raw", "request"), 1, "there is no rollout 'r9'"),
    (("show", "r1", "--compare", "r2"), 2, "--compare goes with --html; in a terminal: penstock tui --plain compare"),
    (("show", "r1/a1#1", "--html", "x"), 2, "--html writes a page of a rollout or an attempt: leave out --json, --raw"),
    (("show", "r1", "--html", "no/such/page"), 1, "no/such/page: No such file or directory"),
    (("token", "r1", "--expires", "soon"), 2, "'soon' is not a time"),
    (("token", "a b"), 1, "rollout: 'a b' is not an id: up to 128 letters"),
    (("rollouts", "--limt", "3"), 2, "unknown option '--limt'"),
    (("rollouts", "--limit", "x"), 2, "--limit: 'x' is not a whole number. See penstock rollouts --help."),
    (("show",), 2, "TARGET is missing. See penstock show --help."),
    (("release", "status"), 2, "RELEASE is missing. See penstock release status --help."),
    (("release", "bogus"), 2, 'Unknown command "bogus"'),
    (("enqueue", "missing.jsonl"), 1, "missing.jsonl: No such file or directory"),
    (("enqueue", "/dev/null"), 1, "/dev/null has no tasks"),
    (("enqueue", "/dev/null", "--timeout", "soon"), 2, "'soon' is not a time"),
    (("enqueue", "/dev/null", "--retry-on", "failed,never"), 2, "--retry-on: 'never' is not 'failed', 'timeout'"),
    (("enqueue", "/dev/null", "--priority", "-1001"), 2, "--priority: -1001 is not -1000 or more"),
    (("enqueue", "/dev/null", "--metadata", "x"), 2, "--metadata: 'x' is not NAME=VALUE"),
    (("enqueue", "/dev/null", "--repeat", "0"), 2, "--repeat: 0 is not 1 or more"),
    (("enqueue", "/dev/null", "--mode", "trial"), 2, 'Invalid value "trial" for --mode'),
    (("cancel",), 2, "say which rollouts: by their ids, or by a filter such as group:q1 status:failed"),
    (("cancel", "r1", "status:running"), 2, "give ids or a filter, not both: 'r1' is an id"),
    (("cancel", "r1/a1"), 2, "'r1/a1' is neither the id of a rollout nor a term of a filter"),
    (("doctor", "r1", "--filter", "x"), 2, "unknown option '--filter'"),
    (("rollouts", "--limit", "0"), 2, 'Invalid value "0" for --limit. Must be >= 1.'),
    (("requeue", "statsu:x"), 1, "unknown field 'statsu'; did you mean 'status'?"),
    (("rollouts", "--limit"), 2, "--limit needs a value: How many at most. See penstock rollouts --help."),
    (("enqueue", "/dev/null", "--timeout", "-5s"), 2, "--timeout needs a value: Longest run of an attempt"),
    (("run", "--check", "--", "true"), 2, "--check needs a value: Run nothing: check agents and try the reward"),
    (("runs", "export", "x"), 2, "--to is missing. See penstock runs export --help."),
    (("serve", "--port", "99999"), 2, 'Invalid value "99999" for --port. Must be <= 65535. See penstock serve --help.'),
    (("serve", "--port", "-1"), 2, 'Invalid value "-1" for --port. Must be >= 0.'),
    (("show", "a b"), 1, "rollout: 'a b' is not an id: up to 128 letters, digits and . _ -"),
    (("reward", "r1/a1", "good"), 2, "VALUE: 'good' is not a number."),
    (("reward", "r1/a1"), 2, "say what it is worth: penstock reward r1/a1 1, or --dimension NAME=VALUE"),
    (("reward", "r1/a1", "nan"), 2, "the reward: nan is not a finite number"),
    (("reward", "r1/a1", "--dimension", "style=good"), 2, "--dimension style: 'good' is not a number"),
    (("reward", "r1", "1"), 2, "rollout 'r1' has 2 attempts (a1, a2): say which, as r1/ATTEMPT"),
    (("export", "--format", "parquet"), 2, "Parquet goes to a file: say which, as --output FILE"),
    (("export", "-o", "no/such/folder/x"), 1, "no/such/folder/x: No such file or directory"),
    (("list",), 2, "Unknown command 'list'. Did you mean `penstock rollouts`?"),
    (("enqueue", "pyproject.tml"), 1, "pyproject.tml: No such file or directory; did you mean pyproject.toml?"),
    (("prompts", "check", "./README.m"), 1, "README.m: No such file or directory; did you mean README.md?"),
    (("bogus",), 2, 'Unknown command "bogus". Available commands: serve, rollouts'),
    (("--gateway", "http://127.0.0.1:1", "rollouts"), 1, "cannot reach the gateway at http://127.0.0.1:1: nothing"),
    (("--json", "show", "none"), 1, "there is no rollout 'none'"),
    (("--limit", "x", "rollouts"), 2, "--limit: 'x' is not a whole number. See penstock rollouts --help."),
    (("release", "--gateway=http://127.0.0.1:1", "status", "x"), 1, "cannot reach the gateway at http://127.0.0.1:1"),
    (("--gateway", "x", "rolouts"), 2, 'Unknown command "rolouts". Did you mean "rollouts"?'),
    (("--gateway", "x"), 2, "--gateway goes behind a command: penstock COMMAND --gateway. See penstock --help."),
    (("release", "--json"), 2, "--json goes behind a command: penstock release COMMAND --json."),
    (("mcp", "--gateway", "x", "definitions"), 2, "'definitions' goes before the options. See penstock mcp serve"),
    (("workers", "extra", "more"), 2, "Nothing is done with 'extra' 'more'. See penstock workers --help."),
    (("check", "/tmp"), 2, "Nothing is done with '/tmp'; a tape goes behind --data: --data /tmp. See penstock check"),
    (("run", "--worker", "8", "--", "true"), 2, "Unknown option: --worker. Did you mean --workers?"),
    (("run", "python", "-m", "a"), 2, "Unknown option: -m. Options of what is run go behind --. See penstock run --h"),
    (("sidecar", "--rolout", "r", "--", "true"), 2, "Unknown option: --rolout. Did you mean --rollout?"),
    (("mcp", "wrap", "--name", "s", "--spol=1", "--", "true"), 2, "Unknown option: --spol=1. Did you mean --spool?"),
    (("release", "rehearse", "x", "--worker", "1", "--", "true"), 2, "Unknown option: --worker. Did you mean"),
    (("workers", "--jsn"), 2, "Unknown option: --jsn. Did you mean --json? See penstock workers --help."),
    (("stats", "--gateway", "http://["), 1, "'http://[' is not the URL of a gateway: Invalid IPv6 URL"),
    (("stats", "--gateway", "http://"), 1, "'http:' is not the URL of a gateway: it names no host"),
    (("stats", "--gateway", "http://a.invalid"), 1, "there is no host 'a.invalid'; check --gateway or PENSTOCK_GATE"),
    (("stats", "--gateway", "localhost:1"), 1, "must start with http:// or https://"),
    (("changes", "--gateway", "http://127.0.0.1:1"), 1, "nothing answers there; is `penstock serve` running?"),
    (("serve", "--config", "missing.toml"), 1, "missing.toml does not exist"),
    (("check", "--data", "nowhere"), 1, "nowhere"),
    (("key", "a/b"), 2, "NAME: 'a/b' is not a name: 1 to 64 letters, digits and . _ -"),
    (("budgets", "none"), 1, "The gateway's penstock.toml has no [[budget]]"),
    (("backup",), 2, "TO is missing. See penstock backup --help."),
    (("backup", "to", "--data", "nowhere"), 1, "nowhere holds no tape; name the directory that `penstock serve"),
    (("restore", "nowhere", "--data", "to"), 1, "nowhere holds no tape; name the directory that `penstock serve"),
]


async def test_errors_are_one_line(
    served: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_GATEWAY", served.url)
    for arguments, code, message in ERRORS:
        with logs_as_before(), pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, list(arguments))
        out, err = capsys.readouterr()
        if isinstance(ended.value.code, str):  # as the interpreter does it
            err, ended.value.code = ended.value.code + "\n", 1
        assert (ended.value.code, out) == (code, ""), arguments
        assert message in err, arguments
        assert (err.startswith("penstock: "), err.count("\n")) == (True, 1), arguments


@pytest.mark.parametrize(
    ("toml", "command", "message"),
    [
        ("port = 1", "rollouts", "cannot reach the gateway at http://127.0.0.1:1: "),
        ("port = 1", "--gateway http://127.0.0.1:2 rollouts", "cannot reach the gateway at http://127.0.0.1:2: "),
        ("port = 1\nhost = '::'\ntape = 3", "stats", "cannot reach the gateway at http://[::1]:1: "),
        ("port = 1\nsocket = 's'", "stats", "cannot reach the gateway at http://127.0.0.1:1: "),
        ("port = 0\nsocket = 's'", "stats", "cannot reach the gateway at unix:{here}/s: "),
        ("socket = 's'\n[tls]\ncertificate = 'c'", "stats", "cannot reach the gateway at unix:{here}/s: "),
        ("names = ['a.invalid']\n[tls]\ncertificate = 'c'", "stats", "at https://a.invalid:4747: there is no host"),
        ("port = 1\nsocket = 's'\n[tls]\ncertificate = 'c'", "run -- true", "the gateway at https://127.0.0.1:1: "),
        ("port = 0", "rollouts", "penstock.toml: port = 0 is any free one: name the gateway, as --gateway http://"),
        ("port = 'x'", "rollouts", "penstock.toml: port: 'x' is not a whole number; correct it, or name the gateway"),
        ("port = ", "rollouts", "penstock.toml cannot be read as TOML: Invalid value"),
    ],
)
def test_commands_follow_the_file_of_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    toml: str, command: str, message: str,
) -> None:  # fmt: skip
    _ = (tmp_path / "penstock.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_GATEWAY", raising=False)
    with pytest.raises(SystemExit):
        main(command.split())
    assert message.format(here=tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "samples --form chat", "sql --format parquet select"])
def test_rows_for_programs_do_not_fill_a_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert tells(capsys.readouterr().err, "terminal", "--output FILE")


@pytest.mark.parametrize(
    ("columns", "lines"), [(24, ["penstock: Unknown", "command 'list'. Did you", "mean"]), (0, ["pens"])]
)
def test_messages_are_wrapped_at_words_on_a_terminal(
    columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2)

    def size(number: int) -> os.terminal_size:
        return os.terminal_size((columns, 10))

    monkeypatch.setattr(os, "get_terminal_size", size)
    with pytest.raises(SystemExit):
        main(["list"])
    shown = capsys.readouterr().err.splitlines()
    assert max(map(len, shown)) <= (columns or 80)
    assert [begins for line, begins in zip(shown, lines, strict=False) if not line.startswith(begins)] == []


async def test_a_gateway_that_was_not_named_is_said(
    served: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_GATEWAY", raising=False)
    asked = [asked_gateway(LOCAL), asked_gateway(served.url)]
    _ = (tmp_path / "penstock.toml").write_text(f"port = {served.url.rpartition(':')[2]}")
    way = "--gateway, PENSTOCK_GATEWAY or `port` in penstock.toml names another gateway"
    by_file = f"{served.url}, which penstock.toml names"
    assert asked == [f"{LOCAL}, the default; {way}", ""]
    for command, said in [
        ("show none", f"penstock: there is no rollout 'none'; `penstock rollouts` lists them (asked: {by_file})\n"),
        ("rollouts model:x", f"No rollout matches. (asked: {by_file})\n"),
        ("budgets", f"The gateway's penstock.toml has no [[budget]]. (asked: {by_file})\n"),
        ("budgets x", f"penstock: The gateway's penstock.toml has no [[budget]]. (asked: {by_file})\n"),
        ("rollouts", ""),
    ]:
        with suppress(SystemExit):
            await asyncio.to_thread(main, command.split())
        assert capsys.readouterr().err == said, command
    monkeypatch.setenv("PENSTOCK_GATEWAY", served.url)
    assert asked_gateway(served.url) == ""


@pytest.mark.slow
async def test_a_full_disk_is_said_in_a_line(shell: Shell) -> None:
    for command in ("rollouts", "rollouts --json", "export", "show r1/a1#1 --raw response"):
        full = os.open("/dev/full", os.O_WRONLY)
        process = await shell.start(*command.split(), stdout=full)
        os.close(full)
        _, err = await shell.end_of(process)
        said = b"penstock: stdout cannot be written: No space left on device\n"
        assert (process.returncode, err) == (1, said), command


@pytest.mark.slow
async def test_streams_that_are_closed_are_empty(shell: Shell) -> None:
    for command, code, said in (
        ("rollouts >&-", 0, b""),
        ("show 'r1/a1#1' --raw response >&-", 0, b""),
        ("enqueue - <&-", 1, b"penstock: - has no tasks\n"),
        ("rollouts --limit 1 2>&-", 0, b""),
    ):
        process = await asyncio.create_subprocess_shell(
            f"{shell.command[0]} -m penstock {command}",
            env=shell.env, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await shell.end_of(process)
        assert (process.returncode, err) == (code, said), command


@pytest.mark.slow
async def test_a_reader_that_leaves_is_no_error(shell: Shell) -> None:
    for command in ("show r1", "show r1 --json", "rollouts", "spans r1", "export", "stats", "--help"):
        assert await shell.unread(*command.split()) == "", command


@pytest.mark.slow
async def test_check_reports_a_clean_tape(shell: Shell, tmp_path: Path) -> None:
    with open_store(tmp_path / "data"):
        pass
    done = await shell.run("check", "--data", "data")
    assert (done.code, done.err) == (0, "")
    assert done.text.splitlines()[-1] == "clean"


def test_check_reports_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"rollouts": 1, "attempts": 2, "changes": 1234, "open": 0, "map_bytes": 1 << 40, "used_bytes": 3 << 20}

    def examined(path: Path) -> tuple[dict[str, int], list[str]]:
        return figures, ["rollout r1: odd", "span 2: gone"]

    monkeypatch.setattr(check, "examine", examined)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--data", "data"])
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert out.splitlines() == [
        "data: 1 rollout, 2 attempts, 1,234 changes, 0 open calls, 3 MiB", "rollout r1: odd", "span 2: gone",
    ]  # fmt: skip
    assert err == "penstock: data is not clean: 2 problems\n"


LAZY = """
import os, sys
from penstock.console.main import main
for arguments in ("", "--help", "show --help", "--version", "release --help", "release start --help"):
    try:
        main(arguments.split())
    except SystemExit:
        pass
heavy = ("aiohttp", "lmdb", "pydantic", "uvloop", "prometheus_client")
ours = ("gateway.app", "gateway.client.client", "gateway.model.release", "gateway.dialects")
print("LOADED", *sorted(name for name in (*heavy, *(f"penstock.{one}" for one in ours)) if name in sys.modules))
"""


@pytest.mark.slow
async def test_help_loads_neither_server_nor_database_nor_client() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAZY, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    lines = out.decode().splitlines()
    assert lines[-1] == "LOADED"
    assert len(lines) > 100, "it has said something"


@pytest.mark.slow
async def test_help_names_every_command_and_looks_as_it_did(shell: Shell) -> None:
    pages = await asyncio.gather(
        *(shell.run(*words, "--help", COLUMNS="100") for words in ((), ("enqueue",), ("reward",), ("export",)))
    )
    check_golden("help", "\n".join(page.text for page in pages))
    assert [name for name in COMMANDS if f"│ {name} " not in pages[0].text] == []
    first = await shell.run()
    assert re.findall("^│ ([a-z]+) ", first.text, re.MULTILINE) == list(FIRST)
    assert "penstock --help lists all commands" in first.text
    groups = await asyncio.gather(
        *(shell.run(*it, "--help", COLUMNS="100") for it in (*([name] for name in GROUPS), ["resource", "add"]))
    )
    check_golden("help-releases", "\n".join(page.text for page in groups))


# --- the first minutes ---


@pytest.mark.slow
async def test_the_version_is_what_is_installed(shell: Shell) -> None:
    assert (await shell.run("--version")).text == f"penstock {version('penstock-gateway')}\n"


async def completed(shell: Shell, tmp_path: Path, *words: str) -> list[str]:
    """What a real bash offers for the last of these words."""
    script = tmp_path / "completion.bash"
    if not script.exists():
        script.write_bytes((await shell.run("completion", "bash")).out)
    program = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
function=$(complete -p penstock | sed -E 's/.*-F ([^ ]+) .*/\\1/')
"$function" penstock "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
    bash = await asyncio.create_subprocess_exec(
        "bash", "--norc", "-c", program, "bash", script, "penstock", *words,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await bash.communicate()
    assert err == b""
    return sorted(out.decode().split())


@pytest.mark.slow
async def test_bash_completes(shell: Shell, tmp_path: Path) -> None:
    assert await completed(shell, tmp_path, "ro") == ["rollouts"]
    assert await completed(shell, tmp_path, "") == sorted([*COMMANDS, *GROUPS])
    assert await completed(shell, tmp_path, "release", "re") == ["rehearse", "resume"]
    assert await completed(shell, tmp_path, "enqueue", "--re") == ["--repeat", "--retry-on", "--reward-on-failure"]
    assert await completed(shell, tmp_path, "export", "--what", "") == ["messages", "rollouts", "spans", "tools"]
    assert await completed(shell, tmp_path, "completion", "") == ["bash", "fish", "zsh"]


@pytest.mark.slow
async def test_other_shells_have_their_script(shell: Shell) -> None:
    for name, mark in (("zsh", "#compdef penstock"), ("fish", "complete -c penstock")):
        text = (await shell.run("completion", name)).text
        assert [word for word in (mark, *COMMANDS, *GROUPS) if word not in text] == []


@pytest.mark.slow
async def test_a_port_that_is_taken_is_told(shell: Shell, served: Serving) -> None:
    port = served.url.rpartition(":")[2]
    done = await shell.run("serve", "--port", port)
    assert (done.code, done.text) == (1, "")
    assert tells(done.err, f"penstock: port {port} of 127.0.0.1 is taken", "--port", "--port 0")
    assert "Errno" not in done.err


@pytest.mark.slow
async def test_a_host_of_another_machine_is_told(shell: Shell) -> None:
    done = await shell.run("serve", "--host", "192.0.2.1", "--port", "0", PENSTOCK_ADMIN_KEY="k")
    assert (done.code, "--host 127.0.0.1 is" in done.err) == (1, True)


async def other_server(request: web.Request) -> web.Response:
    if request.path.startswith("/odd"):
        return web.json_response({"rollouts": "none"})
    status = {"down": 502, "none": 501}.get(request.path.split("/")[1], 404)
    return web.Response(status=status, text="<html>Not\nFound</html>")


@pytest.mark.slow
async def test_another_kind_of_server_is_told(shell: Shell, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    _ = tasks.write_text("{}\n")
    async with site(everywhere(other_server)) as url:
        other, odd, down, tls, none = await asyncio.gather(
            *(shell.run("rollouts", "--gateway", url + path) for path in ("", "/odd", "/down")),
            shell.run("rollouts", "--gateway", url.replace("http:", "https:")),
            shell.run("enqueue", str(tasks), "--gateway", f"{url}/none"),
        )
    secure = url.replace("http:", "https:")
    for done, *said in (
        (other, f"at {url} is not a Penstock gateway (it answered 404 Not Found)", "check --gateway or PENSTOCK_GATEW"),
        (odd, f"{url}/odd/api/rollouts did not answer as a Penstock gateway of this version"),
        (down, f"cannot reach the gateway at {url}/down: ", "502 Bad Gateway"),
        (none, f"at {url}/none is not a Penstock gateway (it answered 501 Not Implemented)", "nothing was queued: "),
        (tls, f"cannot reach the gateway at {secure}: ", f"is it {url}?"),
    ):
        assert done.code == 1
        assert [word for word in said if word not in done.err] == [], done.err


async def test_the_base_url_of_an_agent_is_not_asked(served: Serving) -> None:
    """What is asked there would be a call of a model, and a rollout of its own."""
    for path in ("/v1", "/v1/", "/v1beta", "/rollout/r1/attempt/a1/v1", "/rollout/r1/attempt/a1"):
        with pytest.raises(ClientError, match=f"is the base URL of an agent; the gateway's own is {served.url}$"):
            async with Client(served.url + path):
                pass
