"""`penstock sidecar serve`: agents that are there before their rollouts, each with a port of its own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from fakes.process import PATIENCE, Gateway, running
from fakes.shell import PENSTOCK, Done, Shell
from fakes.tape import Tape
from fakes.tls_host import TlsHost, tls_host

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SECRET = "a-secret-of-the-runner"
AGENT = """
import json, sys, urllib.request
print("up", flush=True)
for word in sys.stdin:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": word.strip()}]}).encode()
    ask = urllib.request.Request("https://HOST/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        print(json.load(urllib.request.urlopen(ask))["choices"][0]["message"]["content"], flush=True)
    except Exception as error:
        print(error, flush=True)
"""


@dataclass
class Pod:
    """A sidecar that serves agents, and the agents."""

    host: TlsHost
    gateway: Gateway
    folder: Path
    shell: Shell
    process: asyncio.subprocess.Process
    ports: list[int] = field(default_factory=list[int])
    admin: str = ""
    agents: list[asyncio.subprocess.Process] = field(default_factory=list[asyncio.subprocess.Process])

    def variables(self, number: int) -> dict[str, str]:
        lines = (self.folder / "files" / f"agent-{number}.env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    async def agent(self, number: int) -> asyncio.subprocess.Process:
        """One that asks its model for each line that it is given."""
        shell = Shell(self.gateway.url, self.folder, (sys.executable,))
        script = AGENT.replace("HOST", self.host.name)
        made = await shell.start("-c", script, stdin=asyncio.subprocess.PIPE, **self.variables(number))
        self.agents.append(made)
        assert await line(made) == "up"
        return made

    async def tell(self, action: str, place: int, *words: str, secret: str = SECRET) -> Done:
        port = str(self.ports[place - 1])
        return await self.shell.run(
            "sidecar", action, port, "--admin", self.admin, *words, PENSTOCK_SIDECAR_TOKEN=secret
        )


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        return (await process.stdout.readline()).decode().strip()


def ask(process: asyncio.subprocess.Process, words: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{words}\n".encode())


async def served(shell: Shell, *words: str) -> tuple[asyncio.subprocess.Process, list[int], str]:
    """The process, its ports, and where it is told of rollouts."""
    process = await shell.start(
        "sidecar", "serve", str(shell.folder / "files"), "--port", "0", *words, PENSTOCK_SIDECAR_TOKEN=SECRET
    )
    agents, _, admin = (await line(process)).partition("; rollouts at ")
    return process, [int(port) for port in agents.removeprefix("agents on ").split(", ")], admin


@asynccontextmanager
async def serving(folder: Path, admin: str = "127.0.0.1:0") -> AsyncGenerator[Pod]:
    async with tls_host(folder) as host:
        text = f'[[upstream]]\nname = "host"\nbase_url = "https://{host.name}/v1"\nca_file = "{host.trust}"\n'
        async with running(folder / "gateway", text) as gateway:
            shell = Shell(gateway.url, folder, PENSTOCK)
            made = await served(shell, "--agents", "2", "--intercept", host.name, "--admin", admin)
            pod = Pod(host, gateway, folder, shell, *made)
            yield pod
            for process in (pod.process, *pod.agents):
                if process.returncode is None:
                    process.kill()
                await process.communicate()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Pod]:
    async with serving(tmp_path_factory.mktemp("pod")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def pod(shared: Pod) -> AsyncGenerator[Pod]:
    """The module's pod, whose agents have no rollouts."""
    yield shared
    for place in (1, 2):
        assert (await shared.tell("release", place)).code == 0


@pytest_asyncio.fixture(loop_scope="module")
async def http() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def test_a_call_waits_for_its_rollout_and_each_agent_has_its_own(pod: Pod, http: aiohttp.ClientSession) -> None:
    first, second = await pod.agent(1), await pod.agent(2)
    ask(first, "one")
    waiting = asyncio.ensure_future(line(first))
    ask(second, "two")
    done = await pod.tell("bind", 2, "--rollout", "is-bound")
    assert (done.code, done.text) == (0, f"port {pod.ports[1]} has rollout is-bound\n")
    assert await line(second) == "hello"
    assert not waiting.done()
    assert (await pod.tell("bind", 1, "--rollout", "waits", "--attempt", "a7")).code == 0
    assert await waiting == "hello"
    tape = Tape(pod.gateway.url, http)
    for rollout, attempt, words in (("waits", "a7", "one"), ("is-bound", "a1", "two")):
        (span,) = await tape.spans(rollout, 1, attempt)
        assert span.status == "ok"
        assert words in str(await tape.get(f"/api/rollouts/{rollout}/attempts/{attempt}/spans/1"))


async def test_it_is_told_of_rollouts_on_a_socket_and_ends_with_a_signal(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    admin = str(tmp_path / "admin")
    async with serving(tmp_path, admin) as pod:
        assert pod.admin == admin
        assert os.stat(admin).st_mode & 0o777 == 0o600
        assert (await pod.tell("bind", 1, "--rollout", "r1")).text == f"port {pod.ports[0]} has rollout r1\n"
        refused = await pod.tell("bind", 2, "--rollout", "r2", secret="another")
        assert "answered 401" in refused.err
        pod.process.kill()
        _ = await pod.process.wait()
        pod.process, pod.ports, _ = await served(pod.shell, "--admin", admin)
        assert (await pod.tell("bind", 1, "--rollout", "r1")).code == 0
        # Where agents were is told, too, when a signal ends it.
        reader, writer = await asyncio.open_connection("127.0.0.1", pod.ports[0])
        writer.write(f"CONNECT 127.0.0.1:{pod.host.port} HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        pod.process.terminate()
        _, err = await asyncio.wait_for(pod.process.communicate(), PATIENCE)
        assert (pod.process.returncode, err) == (0, b"")
        (event,) = await Tape(pod.gateway.url, http).spans("r1", 1)
        assert event.name == "egress"
        writer.close()


async def test_a_place_is_used_again(pod: Pod, http: aiohttp.ClientSession) -> None:
    agent = await pod.agent(1)
    assert (await pod.tell("bind", 1, "--rollout", "first")).code == 0
    ask(agent, "one")
    assert await line(agent) == "hello"
    other = await pod.tell("bind", 1, "--rollout", "second")
    assert other.code == 1
    assert f"answered 409: port {pod.ports[0]} has rollout first: release it first" in other.err
    assert (await pod.tell("bind", 1, "--rollout", "first")).code == 0
    # What it has open to other hosts closes, and is told of.
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.ports[0])
    writer.write(f"CONNECT 127.0.0.1:{pod.host.port} HTTP/1.1\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    freed = await pod.tell("release", 1)
    assert (freed.code, freed.text) == (0, f"port {pod.ports[0]} is free\n")
    assert await reader.read() == b""
    writer.close()
    assert (await pod.tell("bind", 1, "--rollout", "second")).code == 0
    ask(agent, "two")
    assert await line(agent) == "hello"
    tape = Tape(pod.gateway.url, http)
    call, event = await tape.spans("first", 2)
    assert (call.kind, event.name, (event.attributes or {})["server.port"]) == ("llm", "egress", pod.host.port)
    (only,) = await tape.spans("second", 1)
    assert only.kind == "llm"


async def test_who_does_not_know_the_token_binds_nothing(pod: Pod) -> None:
    for secret in ("", "a-secret-of-the-runneR"):
        done = await pod.tell("bind", 1, "--rollout", "r1", secret=secret)
        assert (done.code, "answered 401: the sidecar's token is needed" in done.err) == (1, True), done.err


async def test_an_agent_does_not_see_the_token(pod: Pod) -> None:
    assert SECRET not in str(pod.variables(1))
    assert SECRET not in "".join(file.read_text() for file in (pod.folder / "files").iterdir())


async def test_other_processes_of_its_user_do_not_read_its_memory(tmp_path: Path) -> None:
    # A test as root could read it in any case, so the kernel is asked what it would say to others.
    script = """if True:
        import ctypes
        from penstock.sidecar.intercept.session import close_memory
        close_memory()
        print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
    """
    done = await Shell("http://127.0.0.1:1", tmp_path, (sys.executable,)).run("-c", script)
    assert (done.out, done.err) == (b"0\n", "")


async def test_an_agent_does_not_read_the_memory_of_its_sidecar(tmp_path: Path) -> None:
    script = """if True:
        import os
        try:
            open(f"/proc/{os.getppid()}/mem", "rb")
            print("it is open")
        except PermissionError:
            print("it is closed")
    """
    # Root may read any memory by a right of its own, which is taken from it here.
    powerless = ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.geteuid() == 0 else ()
    shell = Shell("http://127.0.0.1:1", tmp_path, (*powerless, *PENSTOCK))
    done = await shell.run("sidecar", "run", "--rollout", "r1", "--", sys.executable, "-c", script)
    assert done.text == "it is closed\n"


async def test_no_agent_gets_to_what_binds_through_its_front(pod: Pod) -> None:
    port = pod.admin.rpartition(":")[2]
    key = f"Authorization: Bearer {SECRET}\r\n"
    for name in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "127.0.0.2", socket.gethostname()):
        for words in (
            f"CONNECT {name}:{port} HTTP/1.1\r\n{key}\r\n",
            f"GET http://{name}:{port}/agents HTTP/1.1\r\n{key}\r\n",
            f"CONNECT {name}:{pod.ports[1]} HTTP/1.1\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", pod.ports[0])
            writer.write(words.encode())
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
            assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 502 ")), answer
            if name in ("127.0.0.1", "localhost"):
                assert b"may not be reached from here" in answer
            writer.close()


async def test_ready_means_that_calls_would_pass(pod: Pod, http: aiohttp.ClientSession) -> None:
    async with http.get(f"http://{pod.admin}/ready") as answer:
        assert (answer.status, await answer.text()) == (200, "serving\n")
    port = pod.gateway.port
    await pod.gateway.kill()
    try:
        async with http.get(f"http://{pod.admin}/ready") as answer:
            assert answer.status == 503
            assert "cannot be reached" in await answer.text()
    finally:
        await pod.gateway.start(port)
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with http.get(f"http://{pod.admin}/agents", headers=headers) as answer:
        # Bytes that are no text are a wrong token too.
        reader, writer = await asyncio.open_connection(*pod.admin.split(":"))
        writer.write(b"GET /agents HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()
        assert await answer.json() == {
            "agents": [{"port": port, "rollout": None, "attempt": None} for port in pod.ports]
        }
    for path, body, status, words in [
        (pod.ports[0], {"attempt": "a1"}, 400, "rollout: Field required"),
        (pod.ports[0], {"rollout": "r 1"}, 400, "rollout: String should match"),
        (pod.ports[0], {"rollout": "r1", "token": "a\r\nx-rollout-id: r2"}, 400, "token: String should match"),
        (1, {"rollout": "r1"}, 404, f"there is no agent on port 1: there are {pod.ports[0]}, {pod.ports[1]}"),
        ("9" * 5000, {"rollout": "r1"}, 404, "there is no agent on port 999"),
    ]:
        async with http.put(f"http://{pod.admin}/agents/{path}", headers=headers, json=body) as answer:
            assert (answer.status, words in await answer.text()) == (status, True), await answer.text()
