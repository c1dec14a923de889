"""A wrapper is not there: bytes, ends, signals and exit codes are those of the server, with the gateway away."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
from contextlib import suppress

import pytest
from fakes.process import PATIENCE, ROOT, alive, gone, memory_of
from fakes.shell import Refused
from fakes.wrapping import Wrapping

HUGE = 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "stdin",
    [
        b"",
        b'{"jsonrpc":"2.0","id":1}\r\n{}\r\n\r\n\n' + bytes(range(256)) * 300 + b"\n\xff\xfe\0\n" + os.urandom(100_000),
        b"no end",
    ],
    ids=["nothing", "lines and garbage", "no newline"],
)
async def test_bytes_are_those_of_the_server(wrapping: Wrapping, stdin: bytes) -> None:
    code, out, err = await wrapping.run("cat", stdin=stdin)
    assert (code, out) == (0, stdin)
    assert err.count("\n") == (1 if stdin else err.count("\n"))
    assert all(line.startswith("penstock: the gateway does not answer") for line in err.splitlines())


@pytest.mark.slow
async def test_a_huge_line_passes_and_is_not_kept_in_memory(wrapping: Wrapping) -> None:
    wrapper = await wrapping.start("cat", limit=1 << 20)
    stdin, stdout = wrapper.process.stdin, wrapper.process.stdout
    assert stdin is not None
    assert stdout is not None
    sent, got, size = hashlib.sha256(), hashlib.sha256(), 0

    async def send() -> None:
        piece = os.urandom(1 << 20).replace(b"\n", b" ")
        for part in [*[piece] * (HUGE >> 20), b"\n", b"last"]:
            sent.update(part)
            stdin.write(part)
            await stdin.drain()

    sending = asyncio.ensure_future(send())
    while size < HUGE + 5:
        data = await asyncio.wait_for(stdout.read(1 << 20), PATIENCE)
        got.update(data)
        size += len(data)
    await sending
    assert size == HUGE + 5
    assert got.digest() == sent.digest()
    assert memory_of(wrapper.process.pid, "VmHWM") < HUGE, "a line is kept in memory"
    assert await wrapper.end() == 0


@pytest.mark.slow
async def test_stderr_passes_untouched(wrapping: Wrapping) -> None:
    code, out, err = await wrapping.run("sh", "-c", "printf 'no \\r line' >&2; exit 7")
    assert (code, out) == (7, b"")
    assert err.startswith("no \r line")


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [("exit 250", 250), ("kill -SEGV $$", 139)])
async def test_the_exit_code_is_the_servers(wrapping: Wrapping, script: str, code: int) -> None:
    assert (await wrapping.run("sh", "-c", script))[0] == code


@pytest.mark.slow
async def test_the_end_of_stdout_is_passed_on_before_the_server_ends(wrapping: Wrapping) -> None:
    wrapper = await wrapping.start("sh", "-c", "echo ready; exec >&-; read line; exit 5")
    assert wrapper.process.stdout is not None
    assert await asyncio.wait_for(wrapper.process.stdout.read(), PATIENCE) == b"ready\n"
    assert wrapper.process.returncode is None
    assert await wrapper.end() == 5


@pytest.mark.slow
async def test_a_server_hears_that_nobody_reads(wrapping: Wrapping) -> None:
    script = "import sys, os\ntry:\n  while True: os.write(1, b'x\\n' * 9000)\nexcept BrokenPipeError: sys.exit(21)"
    reading, writing = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *wrapping.command(sys.executable, "-c", script),
        stdin=asyncio.subprocess.PIPE,
        stdout=writing,
        stderr=asyncio.subprocess.DEVNULL,
        env=wrapping.variables,
    )
    os.close(writing)
    assert await asyncio.to_thread(os.read, reading, 2) == b"x\n"
    os.close(reading)
    assert await asyncio.wait_for(process.wait(), PATIENCE) == 21
    assert process.stdin is not None
    process.stdin.close()
    _ = await process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_forwarded(wrapping: Wrapping, number: signal.Signals) -> None:
    script = f"import signal, sys; signal.pthread_sigmask(0, [{number}]); print('ready', flush=True)\n"
    script += f"signal.sigwait([{number}]); print('bye', flush=True); sys.exit(9)"
    wrapper = await wrapping.start(sys.executable, "-c", script)
    assert wrapper.process.stdout is not None
    assert await wrapper.process.stdout.readline() == b"ready\n"
    wrapper.process.send_signal(number)
    out, err = await asyncio.wait_for(wrapper.process.communicate(b""), PATIENCE)
    assert (wrapper.process.returncode, out) == (9, b"bye\n"), err


@pytest.mark.slow
async def test_a_server_that_does_not_listen_is_killed(wrapping: Wrapping) -> None:
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
    wrapper = await wrapping.start(sys.executable, "-c", script)
    assert wrapper.process.stdout is not None
    assert await wrapper.process.stdout.readline() == b"ready\n"
    wrapper.process.terminate()
    assert await wrapper.end() == 137


WHILE_IT_WAITS = """
import os, signal, sys, threading
from penstock.sidecar.stdio.command import FORWARDED, ToolServerProcess

server, main = ToolServerProcess(["sleep", "600"]), threading.main_thread().ident
for number in FORWARDED:
    signal.signal(number, lambda number, _: server.forward(number))
assert server.started()


def interrupt():
    while sys._current_frames()[main].f_code.co_name != "_listen":
        pass
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


threading.Thread(target=interrupt).start()
os._exit(server.wait())
"""
"""A signal that interrupts nothing: another thread gets it while the main thread waits."""


@pytest.mark.slow
async def test_a_signal_that_interrupts_nothing_is_passed_on() -> None:
    """As one that comes just before the wrapper waits for its server."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", WHILE_IT_WAITS, cwd=ROOT)
    try:
        assert await asyncio.wait_for(process.wait(), PATIENCE) == 128 + signal.SIGTERM
    finally:
        with suppress(ProcessLookupError):
            process.kill()


@pytest.mark.slow
async def test_nothing_outlives_a_wrapper_that_is_killed(wrapping: Wrapping) -> None:
    script = "sleep 600 & setsid sleep 601 & echo $$ $(jobs -p); trap '' TERM; while true; do sleep 0.2; done"
    wrapper = await wrapping.start("bash", "-c", script)
    assert wrapper.process.stdout is not None
    pids = list(map(int, (await wrapper.process.stdout.readline()).split()))
    assert len(pids) == 3
    assert all(map(alive, pids))
    wrapper.process.kill()
    assert await wrapper.end() == -signal.SIGKILL
    for pid in pids:
        await gone(pid)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "x"], "say which server to start, after --: penstock mcp wrap --name search -- python server.py"),
        (["--", "cat"], "--name is missing"),
        (["--name", "a/b", "--", "cat"], "--name: 'a/b' is not up to 64 letters, digits and . _ -"),
        (["--name", "x", "--rollout", "a b", "--", "cat"], "--rollout: 'a b' is not an id"),
        (["--name", "x", "--attempt", "a2", "--", "cat"], "--attempt is of a rollout: say --rollout, too"),
        (["--name", "x", "--spool", "0", "--", "cat"], "--spool: 0 is not a number of megabytes from 1"),
    ],
)
def test_what_is_wrong_is_one_line(refused: Refused, arguments: list[str], said: str) -> None:
    code, told = refused("mcp", "wrap", *arguments)
    assert (code, told.count("\n")) == (2, 1)
    assert told.startswith(f"penstock: {said}")


@pytest.mark.slow
async def test_a_server_that_cannot_be_started(wrapping: Wrapping) -> None:
    code, out, err = await wrapping.run("not-there-at-all")
    assert (code, out, err.count("\n")) == (127, b"", 1)
    assert err.startswith("penstock: cannot start 'not-there-at-all': No such file")


@pytest.mark.slow
async def test_a_disk_that_takes_nothing_does_not_stop_the_tool(wrapping: Wrapping) -> None:
    wrapping.state.write_text("a file where a folder should be")
    code, out, err = await wrapping.run("cat", stdin=b"{}\n")
    assert (code, out) == (0, b"{}\n")
    assert err.startswith("penstock: nothing is recorded, because ")
    assert "XDG_STATE_HOME" in err
    assert err.count("\n") == 1
