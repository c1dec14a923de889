"""What `penstock serve` prints on a terminal: what to paste, and a line for each call."""

from __future__ import annotations

import os
import re
import signal
import sys
import tomllib
from pathlib import Path

import aiohttp
import pytest
from fakes.entries import call
from fakes.process import ROOT, upstreams, write_config
from fakes.provider import Provider
from fakes.pty_program import pty_program

from penstock.gateway.config import GatewayConfig
from penstock.gateway.process.terminal import WAYS_OUT, CallLines, gateway_url, welcome
from penstock.gateway.tape.store.records import SpanEntry

BODY = {"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}]}
KEY = "sk-abcdefghijklmnopqrstuvwxyz0123456789"
ONE = upstreams(openai="http://127.0.0.1:8000/v1")
KEPT = upstreams(openai="http://127.0.0.1:8000/v1", key_env="MY_KEY")


def config(toml: str = "") -> GatewayConfig:
    return GatewayConfig.model_validate(tomllib.loads(toml))


def printed(*calls: SpanEntry, toml: str = "") -> str:
    """The lines of calls on a terminal that takes them at once."""
    reader, writer = os.pipe()
    lines = CallLines(config(toml), most=50, out=writer)
    for one in calls:
        lines.add(one)
    lines.close()
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as file:
        return file.read()


def failed(error: str, upstream: str | None = "fake-openai") -> SpanEntry:
    made = call()
    made.status, made.error, made.upstream = "error", error, upstream
    return made


def test_a_line_has_what_a_call_was_and_nothing_that_was_said() -> None:
    made = call(request=b"the question", response=b"the answer")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d r1            m-1                ok                 12\+10   1.0s  900ms\n", printed(made)
    )
    made.model, made.path = None, f"/v1/models?key={KEY}"
    assert "POST /v1/models " in (shown := printed(made))
    made.model = f"\x1b]0;x\x07{KEY}"
    assert not {KEY[:12], "\x1b", "question", "answer"} & set(re.split(r"[ ?=]", shown + printed(made)))
    assert "<U+001B>[2Jgone" in (shown := printed(failed("\x1b[2Jgone\n")))
    assert "\x1b[2J" not in shown
    made.kind, made.name, made.model = "tool", "search", None
    assert " search " in printed(made)


def test_what_runs_and_what_is_no_call_has_no_line() -> None:
    made, event = call(), call()
    made.status, event.kind = "open", "reward"
    assert printed(made, event) == ""


@pytest.mark.parametrize(
    ("error", "toml", "way"),
    [
        ("http_401", ONE, "upstream fake-openai refuses the agent's key: give the agent another"),
        ("http_403", KEPT, "upstream fake-openai refuses the key in MY_KEY (its key_env)"),
        ("connect", ONE, "nobody listens at upstream fake-openai: is it running?"),
        ("http_418", ONE, "`penstock show r1` has the whole answer"),
    ],
)
def test_a_failed_call_is_red_and_has_the_way_out(error: str, toml: str, way: str) -> None:
    shown = printed(failed(error), failed(error), toml=toml)
    first, second = shown.split("\x1b[0m\n")[:2]
    assert all(one.startswith("\x1b[31m") and error in one for one in (first, second))
    assert way in re.sub(r"\s+", " ", first)
    assert "\n" not in second, "one of many that fail alike is enough"
    assert all(len(line) <= 80 for line in re.sub(r"\x1b\[\d+m", "", shown).splitlines())


def test_colour_is_left_out_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(failed("connect"))


def test_every_way_out_is_of_an_error_that_there_is() -> None:
    table = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [error for error in WAYS_OUT if not error.startswith("http_") and f"| `{error}` |" not in table] == []


def test_a_terminal_that_takes_nothing_delays_no_call_and_all_are_counted() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    try:
        while True:
            filled += os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    lines = CallLines(config(), most=5, out=writer)
    for number in range(10_000):
        lines.add(failed("connect") if number % 2 else call())
    with os.fdopen(reader, encoding="utf-8") as file:
        assert len(file.read(filled)) == filled
        lines.close()
        os.close(writer)
        shown = file.read()
    more = [int(found.replace(",", "")) for found in re.findall(r"\.\.\. ([\d,]+) more call", shown)]
    assert len(re.findall(r"^(?:\x1b\[31m)?\d\d:", shown, flags=re.MULTILINE)) + sum(more) == 10_000
    assert " of them failed" in shown


@pytest.mark.parametrize(
    ("toml", "lines"),
    [
        ("", ["export OPENAI_BASE_URL=http://127.0.0.1:4747/rollout/first/v1"]),
        ("", ["export ANTHROPIC_BASE_URL=http://127.0.0.1:4747/rollout/first\n"]),
        (KEPT, ["OPENAI_API_KEY=none-needed"]),
        ("require_token = true", [f"{name}_API_KEY=$(penstock token first)" for name in ("OPENAI", "ANTHROPIC")]),
        ('host = "0.0.0.0"', ["http://127.0.0.1:4747/rollout", "On other machines"]),
        ('names = ["gate.example"]\n[tls]\ncertificate = "c.pem"', ["https://gate.example:4747/rollout/first/v1"]),
        ("port = 5000", ["export PENSTOCK_GATEWAY=http://127.0.0.1:5000\n"]),
        ('host = "::1"\nport = 5000\nrequire_token = true', ["http://[::1]:5000/", "first --gateway http://[::1]:5000)"]),
    ],
)  # fmt: skip
def test_the_lines_to_paste_are_those_of_this_gateway(
    toml: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = config(toml)
    shown = welcome(made, gateway_url(made, made.host, made.port))
    assert [line for line in lines if line not in shown] == []
    assert ("API_KEY" in shown) == any("API_KEY" in line for line in lines) or made.token_required
    assert "MY_KEY" not in shown
    assert ("PENSTOCK_GATEWAY" in shown) == (":4747/" not in shown or "https" in shown)
    _ = (tmp_path / "penstock.toml").write_text(toml)
    assert "PENSTOCK_GATEWAY" not in welcome(made, gateway_url(made, made.host, made.port))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--workers", "2"), ("--quiet",)], ids=["one", "two", "quiet"])
async def test_a_person_sees_calls_unless_they_want_none(
    flags: tuple[str, ...], tmp_path: Path, provider: Provider, http: aiohttp.ClientSession
) -> None:
    written = write_config(tmp_path, upstreams(openai=provider.openai_url))
    words = ["serve", "--config", str(written), "--data", str(tmp_path / "data"), "--port", "0", *flags]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    async with pty_program([sys.executable, "-m", "penstock", *words], env) as program:
        await program.until_raw(b"\r\n" if "--quiet" in flags else b" first\r\n")
        url = program.text.split()[3]
        for _ in range(2):
            async with http.post(f"{url}/rollout/seen/v1/chat/completions", json=BODY) as answer:
                assert answer.status == 200
        async with http.get(f"{url}/rollout/seen/v1/models?key={KEY}") as answer:
            await answer.read()
        if "--quiet" not in flags:
            await program.until(lambda text: text.count(" seen ") >= 3 and " ok " in text)
        program.signal(signal.SIGINT)
        assert await program.ended() == 0
        text = program.raw.decode()
        assert (" seen " in text, "export " in text) == (("--quiet" not in flags),) * 2
        assert KEY not in text
