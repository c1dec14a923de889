"""Connections that fail in unforeseen ways: nobody waits for them for ever, and those that follow are served."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes.mistakes import tells
from fakes.runs import PATIENCE
from fakes.shell import PENSTOCK, Shell
from fakes.waiting import until

from penstock.sidecar.intercept import agent_proxy, mitm, service, session
from penstock.sidecar.intercept.agent_connection import ConnectionRecord
from penstock.sidecar.intercept.agent_proxy import AgentProxy
from penstock.sidecar.intercept.certificate_store import CertificateStore
from penstock.sidecar.intercept.egress import EgressConnector, ProxyTimeouts, RolloutBinding
from penstock.sidecar.intercept.environment_check import SidecarUnreachable, query_sidecar
from penstock.sidecar.intercept.rules import InterceptPolicy

FAR = ("192.0.2.9", 443)


@pytest.fixture
async def passed() -> list[ConnectionRecord]:
    """Connections that are over."""
    return []


@pytest.fixture
async def front(passed: list[ConnectionRecord]) -> AsyncGenerator[AgentProxy]:
    """A front in this process, which must come to its end."""
    policy = InterceptPolicy(frozenset({("api.openai.com", 443)}))
    made = AgentProxy("http://127.0.0.1:1", policy, await CertificateStore.create(policy.names), passed.append)
    yield made
    async with asyncio.timeout(PATIENCE):
        await made.stop()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a..b:80", f"{'a' * 64}.example:443", "127.0.0.1:99999"])
async def test_a_host_that_cannot_be_one_is_refused(front: AgentProxy, where: str) -> None:
    port = await front.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(PATIENCE):
        writer.write(f"CONNECT {where} HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 502 ")
        writer.close()
        await writer.wait_closed()


@pytest.mark.slow
async def test_hundreds_of_connections_at_once_are_not_made_to_try_again(front: AgentProxy, tmp_path: Path) -> None:
    port = await front.start()
    await front.start_socket(tmp_path / "front.sock", "api.openai.com")
    with ExitStack() as stack:
        # The front takes none of them meanwhile: they are made on its own loop's thread.
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
            other = stack.enter_context(socket.socket(socket.AF_UNIX))
            other.settimeout(0.5)
            other.connect(str(tmp_path / "front.sock"))


def far(accepted: socket.socket) -> tuple[str, int]:
    return FAR


def no(accepted: socket.socket) -> bool:
    return False


@pytest.mark.slow
async def test_a_redirected_connection_that_is_reset_before_it_has_spoken_is_over(
    front: AgentProxy, passed: list[ConnectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_proxy, "original_destination", far)
    monkeypatch.setattr(agent_proxy, "is_own", no)
    port = front.start_redirected()
    client = socket.create_connection(("127.0.0.1", port))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    await until(lambda: len(passed) == 1)
    assert (passed[0].host, passed[0].port) == FAR


@pytest.mark.slow
async def test_redirected_connections_are_taken_again_when_there_were_too_many_files(
    front: AgentProxy, passed: list[ConnectionRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, accept, loop = list[OSError](), asyncio.get_running_loop().sock_accept, asyncio.get_running_loop()

    async def accepted(listening: socket.socket) -> tuple[socket.socket, Any]:
        try:
            return await accept(listening)
        except OSError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(agent_proxy, "_AGAIN", 0.01)
    monkeypatch.setattr(loop, "sock_accept", accepted)
    port = front.start_redirected()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", port)):
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            await until(lambda: len(failed) > 0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        # Nobody has redirected it: it is refused as soon as it is taken.
        await until(lambda: len(passed) == 1)


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _ = await reader.read(1)
    writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    writer.close()


@pytest.mark.parametrize(("tls", "why"), [(True, "its certificate is not trusted here ("), (False, "WRONG_VERSION")])
async def test_a_gateway_whose_tls_fails_is_named_with_the_reason(tls: bool, why: str) -> None:
    context = CertificateStore.create_in_process(["localhost"]).context("localhost") if tls else None
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        ways = EgressConnector(f"https://localhost:{port}", ProxyTimeouts(), set())
        ways.bind(RolloutBinding(()))
        said = await ways.problem("api.openai.com", 443)
    assert said is not None
    assert said.startswith(f"the gateway could not be reached: localhost:{port} could not be reached: ")
    assert why in said


async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    _ = await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    await hang_up(reader, writer)


async def test_a_proxy_that_is_no_sidecar_is_named_with_the_reason() -> None:
    async with await asyncio.start_server(agree, "127.0.0.1", 0) as server:
        with pytest.raises(SidecarUnreachable, match="WRONG_VERSION_NUMBER"):
            _ = await query_sidecar(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
    with pytest.raises(SidecarUnreachable, match=r"the proxy http://nobody\.invalid:1: .*[Nn]ame"):
        _ = await query_sidecar("http://nobody.invalid:1", None)


def refusing(body: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """What answers all requests with that."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _ = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    return refuse


async def test_a_refusal_that_nobody_can_be_sent_is_told_as_far_as_it_can_be(passed: list[ConnectionRecord]) -> None:
    body = b'{"error":{"message":"nothing for \\ud800"}}'
    async with await asyncio.start_server(refusing(body), "127.0.0.1", 0) as server:
        gateway = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        made = AgentProxy(
            gateway, InterceptPolicy(frozenset({("llm.test", 80)})), CertificateStore("", {}), passed.append
        )
        made.bind(RolloutBinding(()))
        reader, writer = await asyncio.open_connection("127.0.0.1", await made.start())
        async with asyncio.timeout(PATIENCE):
            writer.write(b"GET http://llm.test/ HTTP/1.1\r\nHost: llm.test\r\n\r\n")
            assert (await reader.read()).endswith(b"the gateway refused this connection: nothing for ?\n")
            writer.close()
            await made.stop()


@pytest.mark.slow
async def test_an_agent_keeps_its_exit_code_where_the_answer_to_its_events_is_no_text(tmp_path: Path) -> None:
    script = """if True:
        import os, socket, sys
        proxy = socket.create_connection(("127.0.0.1", int(os.environ["HTTPS_PROXY"].split(":")[-1])))
        proxy.sendall(b"CONNECT far.test:443 HTTP/1.1\\r\\n\\r\\n")
        sys.exit(7 if b"403" in proxy.recv(99) else 1)
    """
    async with await asyncio.start_server(refusing("nicht für dich".encode("latin-1")), "127.0.0.1", 0) as server:
        shell = Shell(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", tmp_path, PENSTOCK)
        agent = ("--", sys.executable, "-c", script)
        done = await shell.run("sidecar", "--rollout", "r1", "--on-unknown", "deny", *agent)
    assert (done.code, tells(done.err, "not on the tape", "403: nicht f\ufffdr dich")) == (7, True), done.err


@pytest.mark.slow
@pytest.mark.parametrize("length", [b"Content-Length: 0\r\n", b"content-length:0\r\nX: y\r\n"])
async def test_a_proxy_that_refuses_without_a_word_is_not_waited_for(
    front: AgentProxy, monkeypatch: pytest.MonkeyPatch, length: bytes
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _ = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n" + length + b"\r\n")
        _ = await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        proxy = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy}")
        monkeypatch.delenv("https_proxy", raising=False)
        reader, writer = await asyncio.open_connection("127.0.0.1", await front.start())
        writer.write(b"CONNECT far.test:443 HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
    assert tells(answer.decode(), f"the proxy {proxy}", "far.test:443", "407")


async def test_a_sidecar_that_does_not_answer_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        admin = f"127.0.0.1:{silent.getsockname()[1]}"
        said = await service.request_admin("DELETE", "/agents/1", admin, None)
    assert said == (0, f"the sidecar at {admin} cannot be reached: it did not answer")


async def test_certificates_of_the_machine_may_have_comments_of_any_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(
        "# für uns\n".encode("latin-1") + CertificateStore.create_in_process(["localhost"]).pem.encode()
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    bundle, own = session.write(tmp_path, "ours\n")
    assert bundle.read_bytes() == trusted.read_bytes() + b"\nours\n"
    assert own.read_bytes() == b"ours\n"


@pytest.mark.slow
async def test_a_mitmproxy_whose_interpreter_is_gone_is_told_in_one_line(tmp_path: Path) -> None:
    program = tmp_path / "mitmdump"
    program.write_text("#!/nowhere/python\n")
    program.chmod(0o755)
    shell = Shell("http://127.0.0.1:1", tmp_path, PENSTOCK)
    words = ("sidecar", "--rollout", "r1", "--engine", "mitmproxy", "--", "true")
    done = await shell.run(*words, PENSTOCK_MITMDUMP=str(program))
    said = f"mitmdump could not be started: {program}, or the interpreter in its first line: No such file or directory"
    assert (done.code, done.err) == (1, f"penstock: --engine mitmproxy: {said}\n")


@pytest.mark.slow
@pytest.mark.parametrize("line", ["'x' * 200_000", "'[' * 60_000"])
async def test_odd_lines_of_mitmproxy_do_not_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    program, written = tmp_path / "mitmdump", tmp_path / "written"
    program.write_text(
        f"#!{sys.executable}\nimport time\nprint('{{\"port\": 1}}', flush=True)\n"
        f"for _ in range(3): print({line}, flush=True)\nopen({str(written)!r}, 'w').close()\ntime.sleep(600)\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv(mitm.PROGRAM, str(program))
    trusted = tmp_path / "trusted.pem"
    trusted.touch()
    policy = InterceptPolicy(frozenset({("api.openai.com", 443)}))
    async with asyncio.timeout(PATIENCE), mitm.run_mitmproxy(policy, tmp_path, 1, trusted, lambda _: None) as engine:
        await until(written.exists)
    assert engine.port == 1
