"""Promises of docs/security.md that are nobody else's: who listens where, files, processes, where calls go."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_hosted import Hosted
from fakes.mcp_hosted import config as hosted_server
from fakes.odd import odd
from fakes.preloaded import penstock
from fakes.process import ROOT, Gateway, running, upstream, upstreams
from fakes.provider import Provider
from fakes.raw import connect, head
from fakes.shell import Shell
from fakes.tape import Tape
from fakes.tls_host import tls_host
from fakes.waiting import until

from penstock.gateway.client.client import Client
from penstock.gateway.model.state import SqlRequest
from penstock.gateway.traffic.calls import admission

ADMIN, UPSTREAM = "an-admin-key-PLANTED-1234", "sk-upstream-PLANTED-1234"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANYBODY = ("sh", "-c", 'umask 0; exec "$@"', "sh")
"""Runs a command that would let everybody read what it writes."""


@pytest.mark.slow
async def test_without_a_key_nothing_listens_beyond_this_machine(tmp_path: Path) -> None:
    """Neither when it is told to, nor by default."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    words = ("serve", "--data", tmp_path / "data", "--host", "0.0.0.0", "--port", "0")
    pipe = asyncio.subprocess.PIPE
    refused = await penstock(*words, env=env | {"PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe)
    out, err = await refused.communicate()
    assert (refused.returncode, out) == (1, b"")
    assert b"no admin key is set" in err
    async with running(tmp_path / "usual", "") as gateway:
        assert set(listening(gateway.pid)) == {"127.0.0.1"}


def listening(pid: int) -> Iterator[str]:
    """The addresses at which a process accepts connections."""
    own = {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                packed = bytes.fromhex(words[1].partition(":")[0])
                quads = [packed[at : at + 4][::-1] for at in range(0, len(packed), 4)]
                yield socket.inet_ntop(family, b"".join(quads))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_what_it_writes_is_for_its_owner_alone(tmp_path: Path, provider: Provider) -> None:
    """The tape, the index, a backup and what is restored, whatever the umask, and in a folder that is open to all."""
    (tmp_path / "home" / "data").mkdir(parents=True, mode=0o777)
    text = '[index]\nwhen = "always"\n' + upstreams(openai=provider.openai_url)
    async with running(tmp_path / "home", text, under=ANYBODY) as gateway:
        await said(gateway)
        async with Client(gateway.url) as client:

            async def ready() -> bool:
                return (await client.index()).status == "ready"

            await until(ready)
            found = await client.sql(SqlRequest(query="select model from spans"))
            assert found.count == 1
        shell = Shell(gateway.url, tmp_path)
        before = os.umask(0)
        try:
            for command in (("backup", "copy", "--data", str(gateway.data)), ("restore", "copy", "--data", "restored")):
                done = await shell.run(*command)
                assert done.code == 0, done.err
        finally:
            os.umask(before)
        assert (gateway.data / "index").exists()
        assert list(too_open(gateway.data)) == []
        for made in ("copy", "restored"):
            assert (tmp_path / made).stat().st_mode & 0o777 == 0o700
            assert list(too_open(tmp_path / made)) == []


def too_open(place: Path) -> Iterator[Path]:
    """What others than the owner may open below a folder, or change the names in."""
    for path in place.rglob("*"):
        if path.stat().st_mode & 0o077:
            yield path


async def test_no_key_is_in_a_command_line(start_gateway: StartGateway) -> None:
    """Every user of a machine sees those, of the gateway and of all that it starts."""
    mark = uuid4().hex
    text = hosted_server(mark, 'env_keys = ["ITS_KEY"]\n') + '[index]\nwhen = "always"\n'
    keys = {"PENSTOCK_ADMIN_KEY": ADMIN, "UP": UPSTREAM, "ITS_KEY": "its-own-key-PLANTED-1"}
    gateway = await start_gateway(text + upstream("up", "http://127.0.0.1:9/v1", "openai", "UP"), env=keys)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {ADMIN}"}) as admin:
        hosted = Hosted(gateway, admin, mark)
        await hosted.opened()
        commands = command_lines(gateway.pid)
    assert len(commands) >= 4  # the index, a warden and its server
    assert [command for command in commands.values() if b"PLANTED" in command] == []


def command_lines(pid: int) -> dict[int, bytes]:
    return {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in family(pid)}


def family(pid: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for one in (task / "children").read_text().split():
            yield from family(int(one))


def test_no_command_of_its_own_is_looked_for_in_the_folder_it_is_started_in() -> None:
    """An agent's folder may hold a `penstock`, or an `aiohttp.py`, and `python -m` without `-P` looks there first."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for part in ("gateway", "console", "tui", "trainer", "adapters")
        for path in sorted((ROOT / part).rglob("*.py"))
        if "demo" not in path.parts
        for line in path.read_text(encoding="utf-8").splitlines()
        if '"-m", "penstock' in line and '"-P", "-m"' not in line
    ]
    assert found == []


async def test_nothing_in_a_request_chooses_where_it_goes(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    """Neither a header, nor the target, nor a tunnel: calls go to upstreams that are configured."""
    gateway = await start_gateway(upstreams(openai=provider.openai_url))
    url = gateway.openai("r1") + "/chat/completions"
    async with odd() as evil:
        place = evil.url.removeprefix("http://")
        names = ("Host", "X-Forwarded-Host", "Forwarded", "X-Original-URL", "X-Rewrite-URL", "X-Upstream", "X-Base-Url")
        for name in names:
            async with http.post(url, json=CHAT, headers={name: place}) as answer:
                assert answer.status == 200, name
        for target in (f"POST {evil.url}/v1/chat/completions", f"CONNECT {place}", f"GET //{place}/v1/models"):
            async with connect(gateway.url) as client:
                client.send(head(f"{target} HTTP/1.1", [("Host", place), ("Content-Length", "0")]))
                answered = await client.message()
                assert answered.split()[1][:1] == b"4", (target, answered)
        assert evil.connections == []
    assert len(provider.log) >= len(names)


async def test_an_upstream_whose_certificate_is_not_trusted_gets_nothing(
    start_gateway: StartGateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Neither where nobody who is trusted has signed it, nor where it is of another host."""
    async with tls_host(tmp_path) as host:
        unknown = upstream("up", f"https://{host.name}/v1", "openai", "UP")
        trusting = f'ca_file = "{host.trust}"\n'
        other = upstream("up", f"https://127.0.0.1:{host.port}/v1", "openai", "UP") + trusting
        for text, status in ((unknown, 502), (other, 502), (unknown + trusting, 200)):
            gateway = await start_gateway(text, env={"UP": UPSTREAM})
            async with http.post(gateway.openai("r1") + "/chat/completions", json=CHAT) as answer:
                said = await answer.text()
                assert answer.status == status, said
                assert status == 200 or "certificate" in said
            assert len(host.asked) == (1 if status == 200 else 0)


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key that is presented is compared whole, by `hmac.compare_digest`, wherever the first difference is."""
    compared: list[tuple[bytes, bytes]] = []
    real = admission.hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(admission.hmac, "compare_digest", compare)
    made = admission.Auth(ADMIN, b"0123456789abcdef", "a-read-key-1234")
    presented = ["x" + ADMIN[1:], ADMIN[:-1] + "x", "short", ADMIN]
    assert made.holder(presented) == admission.Holder("admin", "admin")
    assert compared == [(one.encode(), ADMIN.encode()) for one in presented]
    compared.clear()
    reader = "a-read-key-1234"
    presented = ["x" + reader[1:], reader]
    assert made.holder(presented) == admission.Holder("read", "read")
    assert compared == [(one.encode(), key.encode()) for key in (ADMIN, reader) for one in presented]
    compared.clear()
    token = made.mint("r1")
    assert made.rollout_of(token, 0) == "r1"
    ((signature, wanted),) = compared
    assert signature == wanted
    assert len(wanted) == 32


async def test_a_page_of_another_site_changes_nothing(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    """What a browser sends without asking first has another content type, and the site's name where names are
    rebound."""
    body = b'{"rollout": "r1"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for origin, status in (("https://evil.test", 403), (None, 415)):
            headers = {"Content-Type": kind} | ({} if origin is None else {"Origin": origin})
            async with http.post(f"{gateway.url}/api/tokens", data=body, headers=headers) as answer:
                assert answer.status == status, (kind, origin)
    rebound = {"Content-Type": "application/json", "Host": f"evil.test:{gateway.port}"}
    async with http.post(f"{gateway.url}/api/tokens", data=body, headers=rebound) as answer:
        assert answer.status == 403
    async with http.options(f"{gateway.url}/api/tokens", headers={"Origin": "https://evil.test"}) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


async def said(gateway: Gateway) -> None:
    """One call that is on the tape."""
    async with aiohttp.ClientSession() as http:
        async with http.post(gateway.openai("r1") + "/chat/completions", json=CHAT) as answer:
            assert answer.status == 200
        await Tape(gateway.url, http).spans("r1", 1)
