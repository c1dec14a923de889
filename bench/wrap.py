"""What `penstock mcp wrap` adds to a line: python -m bench.wrap [--lines 3000] [--rounds 5].

One server that answers each line with another is asked directly and through the wrapper, in turn, so that what the
machine does besides falls on both. The gateway runs, and everything is recorded. Printed are latencies of a line and
its answer, which pass the wrapper once each, and their ratio side by side. The goal: 0.3 ms a line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles

from bench.programs import HERE

ROOT = Path(HERE).parent
SERVER = """
import os
rest = b""
while data := os.read(0, 65536):
    *lines, rest = (rest + data).split(b"\\n")
    for line in lines:
        os.write(1, line.replace(b'"method":"tools/call"', b'"result":{"isError":false}') + b"\\n")
"""
GOAL_MS = 0.3
"""Most milliseconds that the wrapper may add to a line: a call is two."""


class Asked:
    """A running server, and the seconds of its answers."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=os.environ | env
        )
        self.seconds: list[float] = []
        self._number = 0

    def ask(self, size: int) -> None:
        """Make a call with so many bytes, and note the seconds of its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._number += 1
        said = {"jsonrpc": "2.0", "id": self._number, "method": "tools/call", "params": {"name": "t", "x": "y" * size}}
        line = json.dumps(said, separators=(",", ":")).encode() + b"\n"
        began = time.perf_counter()
        self.process.stdin.write(line)
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self.process.stdout.read(1 << 16) or b"\n"
        self.seconds.append(time.perf_counter() - began)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def gateway(stack: ExitStack, home: Path) -> str:
    """Run a gateway as long as the stack; return its URL."""
    command = [sys.executable, "-m", "penstock", "serve", "--data", str(home / "data"), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout is not None
    return process.stdout.readline().split()[-1]


def report(size: int, bare: list[float], wrapped: list[float]) -> str:
    """Return a row: milliseconds of one call, and the addition to a line."""
    found = [(median(one) * 1e3, quantiles(one, n=100)[98] * 1e3) for one in (bare, wrapped)]
    (b50, b99), (w50, w99) = found
    ratio, a_line = f"{w50 / b50:.2f} : 1", (w50 - b50) / 2
    return f"{size:>8,}  {b50:8.3f} {b99:8.3f}  {w50:8.3f} {w99:8.3f}  {ratio:>10}  {a_line:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    server = [sys.executable, "-c", SERVER]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        env = {"XDG_STATE_HOME": str(home), "PYTHONPATH": str(ROOT)}
        wrap = [sys.executable, "-m", "penstock", "mcp", "wrap", "--name", "b", "--gateway", gateway(stack, home)]
        print("   bytes  bare p50      p99   wrap p50      p99       ratio  ms a line (goal 0.3)")
        for size in (100, 10_000, 1_000_000):
            both = Asked(server, env), Asked([*wrap, "--", *server], env)
            for one in both:
                for _ in range(50):
                    one.ask(size)
                one.seconds.clear()
            count = max(20, given.lines // given.rounds // (1 + size // 10_000))
            for _ in range(given.rounds):
                for one in both:
                    for _ in range(count):
                        one.ask(size)
            print(report(size, both[0].seconds, both[1].seconds), flush=True)
            for one in both:
                one.end()


if __name__ == "__main__":
    main()
