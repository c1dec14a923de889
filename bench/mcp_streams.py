"""python -m bench.mcp_streams [--streams 10000] [--servers 10] [--silence 120]: what streams cost that only listen.

An agent listens to a server of tools, mostly for hours and for nothing. A gateway, a server and the listeners, each a
process; every stream is in a session of its own. Prints what the gateway holds for all of them, then keeps silent, and
at the end the server says one thing in every stream, which must reach its listener. Exits with 1 where a stream was
lost or the goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from bench import procfs
from bench.programs import free_port

GOAL_MB = 200.0
"""Resident memory of the gateway with 10,000 streams."""
AT_ONCE = 200
"""Streams that are opened at the same time."""
PATIENCE = 120.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nMcp-Session-Id: %d\r\nTransfer-Encoding: chunked\r\n\r\n"
SAID = b'data: {"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n\n'


class Server(asyncio.Protocol):
    """A stream of a server that is silent until a request for `/speak`."""

    streams: dict[Server, None] = {}  # noqa: RUF012 one server a process

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request, which comes in one piece because it is small: `/speak` writes into all streams."""
        if data.startswith(b"GET /speak"):
            for stream in list(self.streams):
                stream.transport.write(b"%x\r\n%b\r\n" % (len(SAID), SAID))
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
        else:
            self.transport.write(HEAD % len(self.streams))
            self.streams[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


class Listener(asyncio.Protocol):
    """A client that listens and stores nothing."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout
        self.begun = asyncio.get_running_loop().create_future()
        self.told = asyncio.get_running_loop().create_future()
        self.lost = False
        self._seen = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(
            b"GET /rollout/r%d/mcp/tools HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"
            % self.rollout
        )

    def data_received(self, data: bytes) -> None:
        """Note the head of the stream, and later the server's message."""
        self._seen = (self._seen + data)[-4096:]
        if b"event-stream" in self._seen and not self.begun.done():
            self.begun.set_result(None)
        if SAID in self._seen and not self.told.done():
            self.told.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the stream has ended, which it must not."""
        self.lost = True


async def listen(port: int, upstream: int, pid: int, streams: int, each_has: int, silence: float) -> bool:
    """Measure; return True if all streams and the goal are met."""
    loop = asyncio.get_running_loop()
    before = procfs.memory(pid).total
    listeners = [Listener(number // each_has) for number in range(streams)]
    began = time.monotonic()
    for start in range(0, streams, AT_ONCE):
        some = listeners[start : start + AT_ONCE]
        await asyncio.gather(*[loop.create_connection(lambda one=one: one, "127.0.0.1", port) for one in some])
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*[one.begun for one in some])
    print(f"{streams} streams after {time.monotonic() - began:.1f} s", flush=True)
    await asyncio.sleep(min(silence, 5.0))
    busy = procfs.cpu_seconds(pid)
    memory = procfs.memory(pid).total
    each = (memory - before) * 1024 / streams
    mapped = memory - procfs.memory(pid).anonymous
    print(f"{before:.1f} MB before, {memory:.1f} MB with them: {each:.1f} KB a stream", flush=True)
    print(f"of it {mapped:.1f} MB are pages of files, the tape among them", flush=True)
    await asyncio.sleep(max(0.0, silence - 5.0))
    used = (procfs.cpu_seconds(pid) - busy) / max(0.1, silence - 5.0)
    lost = sum(one.lost for one in listeners)
    print(f"{silence:g} s of silence: {lost} lost, {used * 100:.1f} % of a core", flush=True)
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", upstream)
    writer.write(b"GET /speak HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.read()
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*[one.told for one in listeners if not one.lost])
    print(f"all were told something within {time.monotonic() - began:.1f} s", flush=True)
    end = procfs.memory(pid).total
    goal = before + (GOAL_MB - before) * streams / 10_000 if streams < 10_000 else GOAL_MB
    print(f"{end:.1f} MB after it; at most {goal:.0f} MB while silent are the goal", flush=True)
    return lost == 0 and memory <= goal


@contextmanager
def started(command: list[str], word: str) -> Generator[int]:
    """Run a program and wait for its first line; yield its process id."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith(word), "it did not start"
            yield process.pid
        finally:
            process.terminate()


def raised(wanted: int) -> int:
    """Raise the limit of open files of this process and its children if possible; return the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (max(most, wanted), most):
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return limit
    return most


def main() -> int:
    """Run gateway, server and listeners."""
    parser = argparse.ArgumentParser(prog="bench.mcp_streams", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--silence", type=float, default=120.0, help="seconds")
    parser.add_argument("--servers", type=int, default=10, help="streams of one rollout: servers that an agent uses")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    most = raised(2 * asked.streams + 500)
    if asked.serve is not None:
        asyncio.run(serve(asked.serve))
        return 0
    # The gateway has two descriptors a stream.
    if most < 2 * asked.streams + 200:
        sys.exit(f"a process may open {most} files here: ask for at most {(most - 200) // 2} --streams")
    upstream, port = free_port(), free_port()
    with tempfile.TemporaryDirectory() as home:
        config = Path(home, "penstock.toml")
        config.write_text(f'[mcp.servers.tools]\nurl = "http://127.0.0.1:{upstream}/mcp"\n')
        gateway = ["-m", "penstock", "serve", "--config", str(config), "--data", str(Path(home, "data"))]
        own = [sys.executable, "-m", "bench.mcp_streams", "--serve", str(upstream)]
        with started(own, "ready"), started([sys.executable, *gateway, "--port", str(port)], "penstock") as pid:
            good = asyncio.run(listen(port, upstream, pid, asked.streams, asked.servers, asked.silence))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
