"""What `penstock sidecar` and `penstock run --sidecar` refuse before they start anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fakes.shell import Refused

from penstock.console.main import main

SECRET = "a-secret-of-the-runner"
NO_GATEWAY = "is not the URL of a gateway"
WRONG: list[tuple[str, str]] = [
    ("sidecar", "no command was given: put the agent and its arguments after --"),
    ("sidecar --intercept a:b:c:d -- true", "--intercept 'a:b:c:d' is no HOST or HOST:PORT"),
    ("sidecar --intercept x:0 -- true", "--intercept 'x:0' is no HOST or HOST:PORT"),
    ("sidecar --keys surrogate -- true", "--keys surrogate needs the agent's token in PENSTOCK_TOKEN"),
    ("sidecar run --gateway http://127.0.0.1:99999 -- true", NO_GATEWAY),
    ("sidecar run --gateway unix:/run/g.sock -- true", "a sidecar reaches no gateway at 'unix:/run/g.sock'"),
    ("sidecar serve files --agents 0", 'Invalid value "0" for --agents. Must be >= 1.'),
    ("sidecar serve files --port 99999", 'Invalid value "99999" for --port. Must be <= 65535.'),
    ("sidecar serve files --port 65530 --agents 9", "there is no room for so many ports"),
    ("sidecar serve files --admin here", "--admin 'here' is no HOST:PORT and no path of a socket"),
    ("sidecar serve files --admin 127.0.0.1:99999", "--admin '127.0.0.1:99999' is no HOST:PORT"),
    ("sidecar serve files --gateway http://127.0.0.1:99999", NO_GATEWAY),
    ("sidecar serve files --intercept a:b:c:d", "--intercept 'a:b:c:d' is no HOST or HOST:PORT"),
    ("sidecar bind 99999 --rollout r1", 'Invalid value "99999" for PORT. Must be <= 65535.'),
    ("sidecar release 0", 'Invalid value "0" for PORT. Must be >= 1.'),
    ("sidecar release 8100 --admin 127.0.0.1:99999", "--admin '127.0.0.1:99999' is no HOST:PORT"),
    ("sidecar check --gateway http://127.0.0.1:x", NO_GATEWAY),
    ("sidecar check --gateway https://127.0.0.1:1", "PENSTOCK_CLIENT_CERT '/nowhere': No such file or directory"),
    ("sidecar iptables", "say one of --print, --apply and --remove"),
    ("sidecar iptables --print --remove", "say one of --print, --apply and --remove"),
    ("sidecar iptables --print --port 0", 'Invalid value "0" for --port. Must be >= 1.'),
    ("sidecar iptables --print --uid -1", 'Invalid value "-1" for --uid. Must be >= 0.'),
    ("run --sidecar --image x -- true", "--sidecar stands before commands and functions that start here"),
    ("run --intercept x -- true", "--intercept and --on-unknown are for --sidecar: add it, or leave them out"),
    ("run --sidecar --intercept a:b:c -- true", "--intercept 'a:b:c' is no HOST or HOST:PORT"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are given, and nothing must be left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    return tmp_path


@pytest.mark.parametrize(("words", "said"), WRONG)
def test_wrong_words(refused: Refused, folder: Path, words: str, said: str) -> None:
    code, told = refused(*words.split(), PENSTOCK_SIDECAR_TOKEN=SECRET, PENSTOCK_CLIENT_CERT="/nowhere")
    assert (code, said in told, told.count("\n")) == (2, True, 1), told
    assert os.listdir(folder) == []


def test_a_secret_that_is_too_short(refused: Refused) -> None:
    code, told = refused("sidecar", "serve", "files", "--port", "0", PENSTOCK_SIDECAR_TOKEN="short")
    assert (code, "PENSTOCK_SIDECAR_TOKEN: set it to a secret of 16" in told) == (2, True), told


def test_nobody_is_there_to_bind(refused: Refused, folder: Path) -> None:
    gone = str(folder / "gone")
    code, told = refused("sidecar", "bind", "8100", "--rollout", "r1", "--admin", gone, PENSTOCK_SIDECAR_TOKEN=SECRET)
    assert (code, f"the sidecar at {gone} cannot be reached" in told) == (1, True), told


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PENSTOCK_TOKEN", "pst_secret\n", "PENSTOCK_TOKEN has a character that no token has"),
        ("PENSTOCK_TOKEN", "pst_secret\r\nX-Rollout-Id: r2", "PENSTOCK_TOKEN has a character that no token has"),
        ("PENSTOCK_ROLLOUT_ID", "r1\r\nX-Attempt-Id: a2", "'r1\\r\\nX-Attempt-Id: a2' is not the id of a rollout"),
        ("PENSTOCK_ROLLOUT_ID", "\u201cr1\u201d", "'\u201cr1\u201d' is not the id of a rollout"),
        ("PENSTOCK_ATTEMPT_ID", "a1\n", "'a1\\n' is not the id of an attempt"),
    ],
)
@pytest.mark.parametrize("words", ["run -- touch started", "serve files", "check"])
def test_an_agent_whose_rollout_cannot_be_told_is_not_started(
    refused: Refused, folder: Path, words: str, name: str, value: str, said: str
) -> None:
    env = {"PENSTOCK_ROLLOUT_ID": "r1", "PENSTOCK_SIDECAR_TOKEN": SECRET, name: value}
    code, told = refused("sidecar", *words.split(), **env)
    assert (code, said in told, "secret" in told) == (2, True, False), told
    assert os.listdir(folder) == [], "nothing was started"


@pytest.mark.parametrize("url", ["http://me:hunter2@proxy.test:99999", "proxy.test:x", "http://me:hun#ter2@[::1"])
@pytest.mark.parametrize("words", ["sidecar run -- true", "sidecar check", "run --sidecar -- true"])
def test_a_proxy_that_can_be_none_is_told_without_its_password(refused: Refused, words: str, url: str) -> None:
    own = url.rpartition("@")[2]
    code, told = refused(*words.split(), https_proxy=url)
    assert (code, told.count("\n"), "hun" in told) == (2, 1, False)
    assert told.startswith(f"penstock: HTTPS_PROXY: {own!r} is no proxy: HOST, and a port")


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("", "NOT RIGHT: HTTPS_PROXY is not set"),
        ("http://127.0.0.1:9", "NOT RIGHT: HTTPS_PROXY: the proxy http://127.0.0.1:9"),
        ("http://me:hunter2@proxy.test:99999", "NOT RIGHT: HTTPS_PROXY: the proxy proxy.test:99999: "),
    ],
)
def test_there_is_no_way_to_a_sidecar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy: str, said: str
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy if name == "https_proxy" else "")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["sidecar", "check", "--here"])
    told = capsys.readouterr().out
    joined = told.replace("\n" + " " * 35, " ").splitlines()
    (row,) = [line[35:] for line in joined if line.startswith("the way to a sidecar")]
    assert row.startswith(said)
    assert (ended.value.code, "hun" in told) == (1, False)
    assert told.endswith("nothing is known of the gateway.\n")
