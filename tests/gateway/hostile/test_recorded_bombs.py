"""What was recorded packed and stands for gigabytes costs little whenever it is read, by whatever reads a tape."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import aiohttp
import pytest
import zstandard
from fakes.collector import collecting
from fakes.indexed import until_indexed
from fakes.odd import odd, request, send
from fakes.process import Gateway, child, forget_peak, memory_of, running, upstreams
from fakes.raw import chunk, connect, events_head, post
from fakes.shell import PENSTOCK, Shell
from fakes.tape import Tape

from penstock.gateway.reading.turns import LIMIT

pytestmark = pytest.mark.slow

MEGABYTE = 1 << 20
MOST_GROWN = 12 * LIMIT
"""Of one reader: two bodies of a call, the same as text and as what is answered, and those of the call before."""
MOST_HELD = 200 * MEGABYTE + MOST_GROWN
"""Private memory of a command, Python and its libraries included."""
ZEROS = b"0" * MEGABYTE
SETTINGS = '[index]\nwhen = "always"\n[otlp]\nendpoint = "{}"\ncapture_content = true\nwait = 0\n'
"""The gateway has an index, and exports what was said."""
ATTEMPT = "/api/rollouts/r1/attempts/a1"
READ_BY_API = (
    "/api/rollouts/r1/diagnosis",
    "/api/rollouts/r1/exchanges",
    f"{ATTEMPT}/spans/1",
    f"{ATTEMPT}/spans/2?exchange=plain",
    f"{ATTEMPT}/tools",
    "/api/whole?ids=r1",
    "/api/spans?filter=text~nothing",
    "/api/spans?filter=raw~nothing",
    "/api/search?text=nothing",
)


def bombs() -> dict[str, bytes]:
    """Each of less than a megabyte. Brotli is told apart where bodies are unpacked (`test_bombs.py`)."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(ZEROS) + packer.flush(zlib.Z_FULL_FLUSH)
    return {
        "gzip": b"\x1f\x8b\x08\0\0\0\0\0\x02\x03" + block * 200,
        "zstd": zstandard.compress(ZEROS) * (10 << 10),
    }


async def record(url: str, packed: dict[str, bytes]) -> None:
    """Makes a call for each: its request and its answer are a bomb."""
    async with connect(url) as client:
        for name, bomb in packed.items():
            client.send(post("/rollout/r1/attempt/a1/v1/chat/completions", bomb, [("Content-Encoding", name)]))
            assert (await client.message()).startswith(b"HTTP/1.1 200 ")


async def test_every_reader_has_bounds(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    packed = bombs()
    script = [
        step
        for name, bomb in packed.items()
        for step in (request(), send(events_head([("Content-Encoding", name)]) + chunk(bomb) + chunk(b"")))
    ]
    async with odd(script) as upstream, collecting() as collector:
        settings = upstreams(openai=upstream.url + "/v1") + SETTINGS.format(collector.url)
        async with running(tmp_path, settings) as gateway:
            await record(gateway.url, packed)
            tape = Tape(gateway.url, http)
            assert len(await tape.spans("r1", len(packed))) == len(packed)
            await collector.until(spans=len(packed))
            await read_by_api(gateway, tape)
            await read_by_commands(gateway, tmp_path)


async def read_by_api(gateway: Gateway, tape: Tape) -> None:
    """The gateway and its index read it, and say that they read a part."""
    await until_indexed(gateway, tape)
    for path in READ_BY_API:
        forget_peak(gateway.pid)
        before = memory_of(gateway.pid)
        async with tape.http.get(gateway.url + path) as answer:
            assert answer.status == 200, (path, await answer.text())
            async for _ in answer.content.iter_chunked(MEGABYTE):
                pass
        grown = memory_of(gateway.pid, "VmHWM") - before
        assert grown < MOST_GROWN, f"{path}: {grown >> 20} MB"
    assert memory_of(child(gateway.pid, b"index"), "VmHWM") < MOST_HELD
    for sequence, name in enumerate(bombs(), 1):
        shown = await tape.get(f"{ATTEMPT}/spans/{sequence}?exchange=none")
        said = [problem for problem in shown["turn"]["problems"] if f": {name}: larger than " in problem]
        assert [problem.partition(":")[0] for problem in said] == ["request", "response"], json.dumps(shown["turn"])


async def read_by_commands(gateway: Gateway, folder: Path) -> None:
    """Commands that read the tape themselves, or what the gateway gives them, have no more memory than they need."""
    shell = Shell(gateway.url, folder, ("prlimit", f"--data={MOST_HELD}", *PENSTOCK))
    lake, data = str(folder / "lake"), str(gateway.data)
    for command in (
        ("lake", "--to", lake, "--bodies", "--data", data),
        ("check", "--data", data),
        ("export", "--what", "messages"),
        ("samples", "--form", "chat", "--allow", "no_reward"),
        ("show", "r1"),
    ):
        done = await shell.run(*command)
        assert done.code in (0, 1), (command, done.err)
        assert "MemoryError" not in done.err, command
