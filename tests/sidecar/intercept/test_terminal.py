"""`penstock sidecar` in a terminal: keys reach its agent once, signals to the sidecar alone do too."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from fakes.pty_program import pty_program
from fakes.shell import PENSTOCK

AGENT = """
import signal, sys
def told(number, _):
    print(signal.Signals(number).name, flush=True)
for one in (signal.SIGINT, signal.SIGTERM):
    signal.signal(one, told)
print("ready", flush=True)
sys.stdin.readline()
print("done", flush=True)
"""
COMMAND = (*PENSTOCK, "sidecar", "run", "--gateway", "http://127.0.0.1:9", "--", sys.executable, "-c", AGENT)


@pytest.mark.parametrize("sent", ["\x03", signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
async def test_an_agent_hears_of_it_once(sent: str | signal.Signals) -> None:
    name = "SIGINT" if isinstance(sent, str) else sent.name
    async with pty_program(COMMAND, {**os.environ, "TERM": "xterm"}) as program:
        _ = await program.until(lambda text: "ready" in text)
        if isinstance(sent, str):
            program.write(sent)
        else:
            program.signal(sent)
        _ = await program.until(lambda text: name in text)
        program.write("go on\n")
        text = await program.until(lambda text: "done" in text)
        assert text.count(name) == 1
        assert await program.ended() == 0
