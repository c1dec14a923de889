"""`penstock sidecar check`: what it says of each family of clients, and the address at which a sidecar answers."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from fakes.process import Gateway, running
from fakes.shell import PENSTOCK, Shell

from penstock.sidecar.intercept import session
from penstock.sidecar.intercept.environment_check import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

GOOD = "gets here"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    async with running(tmp_path_factory.mktemp("gateway"), "") as made:
        yield made


@pytest.fixture
def shell(gateway: Gateway, tmp_path: Path) -> Shell:
    """Clients of a machine without Node.js: an old one uses no proxy."""
    made = Shell(gateway.url, tmp_path, PENSTOCK)
    folder = tmp_path / "bin"
    folder.mkdir()
    curl = shutil.which("curl")
    if curl is not None:
        (folder / "curl").symlink_to(curl)
    made.env["PATH"] = str(folder)
    made.env |= dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"), "")
    return made


def rows(text: str) -> dict[str, str]:
    """What is said of each client and host; lines that go on are put together."""
    lines = text.replace("\n" + " " * 35, " ").splitlines()
    return {line[:34].strip(): line[35:] for line in lines if len(line) > 35 and line[34] == " "}


async def test_everything_is_right(shell: Shell) -> None:
    done = await shell.run("sidecar", "check", "--rollout", "r1")
    assert done.code == 0, done.text + done.err
    found = rows(done.text)
    assert list(found)[: len(FAMILIES)] == [family.name for family in FAMILIES]
    for name in ("Python, Go, Ruby (OpenSSL)", "Python httpx (openai, anthropic)", "Python requests"):
        assert found[name] == GOOD
    assert found["git"] == "GIT_SSL_CAINFO and the proxy are right"
    assert found["api.anthropic.com"] == "the gateway takes its calls"
    assert done.text.endswith("Calls get to the gateway, as those of rollout r1.\n")
    assert max(map(len, done.text.splitlines())) <= 80


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_any_client_may_ask(shell: Shell) -> None:
    done = await shell.run("sidecar", "run", "--rollout", "r1", "--", "curl", "-sS", "https://192.0.2.1/")
    assert done.text == '{"penstock": "sidecar", "bound": true, "rollout": "r1", "attempt": null}\n'


async def test_missing_variables_are_named(shell: Shell) -> None:
    """All but one, by which the sidecar is asked."""
    missing = [family for family in FAMILIES if family.name != "pip"]
    unset = [word for family in missing for word in ("-u", family.certificates)]
    shell.env["PATH"] += ":/usr/bin"
    done = await shell.run("sidecar", "run", "--", "env", *unset, *PENSTOCK, "sidecar", "check", "--here")
    assert done.code == 1
    found = rows(done.text)
    for family in missing:
        assert found[family.name] == f"NOT RIGHT: {family.certificates} is not set"
    assert found["pip"] == "PIP_CERT and the proxy are right"
    assert found["api.openai.com"] == "the gateway takes its calls"


WRONG = {
    "CURL_CA_BUNDLE": "{folder}/none.pem",
    "GIT_SSL_CAINFO": "{folder}/odd.pem",
    "REQUESTS_CA_BUNDLE": "{folder}/other.pem",
    "NODE_USE_ENV_PROXY": "",
    "ANTHROPIC_UNIX_SOCKET": "/nowhere",
}
SAID = {
    "curl": "none.pem: No such file or directory",
    "git": "odd.pem holds no certificates",
    "Python requests": "does not hold the certificate of this sidecar",
    "Node.js (Gemini CLI)": "NODE_USE_ENV_PROXY is not set",
    "Claude Code, by its socket": "/nowhere: No such file or directory",
}


@pytest.mark.parametrize(
    ("env", "said"), [(WRONG, SAID), ({"https_proxy": "{gateway}"}, {"the way to a sidecar": "it is no sidecar"})]
)
async def test_what_is_wrong_is_named(
    shell: Shell, gateway: Gateway, tmp_path: Path, env: dict[str, str], said: dict[str, str]
) -> None:
    (tmp_path / "odd.pem").write_text("no certificate\n")
    other, _ = session.write(tmp_path, "")
    (tmp_path / "other.pem").write_text(other.read_text())
    given = [f"{name}={value.format(folder=tmp_path, gateway=gateway.url)}" for name, value in env.items()]
    shell.env["PATH"] += ":/usr/bin"
    done = await shell.run("sidecar", "run", "--", "env", *given, *PENSTOCK, "sidecar", "check", "--here")
    assert done.code == 1
    found = rows(done.text)
    for client, words in said.items():
        assert found[client].startswith("NOT RIGHT: ")
        assert words in found[client]


async def test_a_unix_socket_and_a_host_that_the_gateway_does_not_know(shell: Shell) -> None:
    done = await shell.run("sidecar", "check", "--socket", "--intercept", "llm.example.com")
    assert done.code == 1
    found = rows(done.text)
    assert found["Claude Code, by its socket"] == "the sidecar listens"
    assert "add an [[upstream]] with that host" in found["llm.example.com"]
    assert done.text.endswith("1 of 18 are not right.\n")


async def test_nothing_runs(shell: Shell) -> None:
    done = await shell.run("sidecar", "check", "--gateway", "http://127.0.0.1:9")
    assert done.code == 1
    assert rows(done.text)["Python requests"] == GOOD
    gone = "NOT RIGHT: the gateway could not be reached: 127.0.0.1:9 could not be reached: Connection refused"
    assert rows(done.text)["api.openai.com"] == gone


async def test_a_machine_without_nft(shell: Shell) -> None:
    done = await shell.run("sidecar", "iptables", "--print", "--port", "8200")
    assert (done.code, done.err) == (0, "")
    assert "redirect to :8200" in done.text
    done = await shell.run("sidecar", "iptables", "--apply")
    assert (done.code, "install nftables" in done.err) == (1, True)
    done = await shell.run("sidecar", "run", "--rollout", "r1", "--mode", "transparent", "--", "true")
    assert done.code == 1
    assert done.err.startswith("penstock: --mode transparent: ")
    assert len(done.err.splitlines()) == 1
