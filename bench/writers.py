"""python -m bench.writers: the cost of several processes that write one tape in turns.

So many processes write calls of rollouts of their own, a batch at each turn: each rollout is a conversation that grows
from call to call. For comparison one process writes as many calls in as many batches. It prints calls per second of CPU
time, of all processes together, and bytes of the tape per call. Wall time is meaningless: the processes wait for each
other at every batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Final

from penstock.gateway.app import open_store
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry

SYSTEM: Final = (
    b"You help people to change flights. Be brief, be kind, and say what a change costs before it is made. " * 40
)
TURNS: Final = 16
"""Calls of a rollout."""


def batches(process: int, calls: int, batch: int) -> list[list[SpanEntry]]:
    """Return calls, with as many rollouts at a time as one batch has calls."""
    made: list[list[SpanEntry]] = []
    for number in range(calls // batch):
        generation, turn = divmod(number, TURNS)
        made.append([_call(f"r{process}-{generation}-{at}", turn) for at in range(batch)])
    return made


def _call(rollout: str, turn: int) -> SpanEntry:
    said = b"".join(
        b'{"role":"user","content":"%s: question %d about flight %d"},{"role":"assistant","content":"answer %d"},'
        % (rollout.encode(), at, at * 7919 % 1000, at * 104729 % 10**6)
        for at in range(turn + 1)
    )
    request = b'{"model":"m","messages":[{"role":"system","content":"%s"},%s]}' % (SYSTEM, said)
    response = b'{"choices":[{"message":{"role":"assistant","content":"answer %d"}}]}' % (turn * 104729 % 10**6)
    body = StoredBody("https://api.example/v1/chat/completions", b"", request, b"", response, b"", [900, len(response)])
    return SpanEntry(
        rollout, "a1", status="ok", start_ns=1_700_000_000_000_000_000 + turn, end_ns=1_700_000_001_000_000_000 + turn,
        dialect="chat", path="/v1/chat/completions", http_status=200, model="m", body=body,
        request_bytes=len(request), response_bytes=len(response),
    )  # fmt: skip


def write(path: Path, process: int, calls: int, batch: int) -> None:
    """Be one of the processes: write a batch for each line of stdin, and print a line when it is written; at the end
    print the CPU time."""
    made = batches(process, calls, batch)
    # Another process has the lock, as during a handover.
    with open_store(path, lock=os.open(os.devnull, os.O_RDONLY)) as store:
        print("ready", flush=True)
        began = process_time()
        for entries in made:
            _ = sys.stdin.readline()
            store.write(entries)
            print("written", flush=True)
        print(process_time() - began, flush=True)


def measure(processes: int, calls: int, batch: int) -> tuple[float, float]:
    """Return (calls per second of CPU time, bytes per call)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        with Store(path):
            pass
        size = (path / "tape" / "data.mdb").stat().st_size
        each = [str(calls // processes), "--batch", str(batch), "--path", folder]
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.writers", "--process", str(number), "--calls", *each],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            )
            for number in range(processes)
        ]  # fmt: skip
        for one in running:
            _answer(one)
        for _ in range(calls // processes // batch):
            for one in running:
                assert one.stdin is not None
                _ = one.stdin.write("\n")
                _answer(one)
        cpu = sum(float(_answer(one)) for one in running)
        for one in running:
            _ = one.communicate()
        return calls / cpu, ((path / "tape" / "data.mdb").stat().st_size - size) / calls


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def main() -> None:
    """Print a line for one process and for several."""
    parser = argparse.ArgumentParser(description="What several processes cost that write one tape in turns.")
    parser.add_argument("--calls", type=int, default=9600)
    parser.add_argument("--batch", type=int, default=10, help="calls of one transaction")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process is not None:
        return write(asked.path, asked.process, asked.calls, asked.batch)
    for processes in (1, asked.processes):
        speed, size = measure(processes, asked.calls, asked.batch)
        print(f"{processes} writing: {speed:,.0f} calls per CPU second, {size:,.0f} bytes per call")


if __name__ == "__main__":
    main()
