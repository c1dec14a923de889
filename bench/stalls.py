"""How long a large call keeps all others waiting: python -m bench.stalls [--mb 19] [--calls 8].

A gateway on one core; a client on another that makes small calls one after the other; and in the middle of that large
conversations, sent by a process of its own, with an address and without one: many messages, or one picture. What a
large call has cost the others is the longest latency of a small one while it was on its way. Shown are the middle and
the least of several large calls: on a machine that has other things to do the least says most.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from statistics import median

from bench import corpus, programs
from bench.peers import BUILD, HERE, PEERS
from bench.programs import Cores, Gateway, pin

SMALL = b'{"messages":[{"role":"user","content":"hello"}],"model":"bench-chat"}'
PATHS = {"with an address": "/rollout/large/v1/chat/completions", "without": "/v1/chat/completions"}
PAUSE = 0.2
"""Seconds between two large calls, so that the tape is quiet again."""
TARGET_MS = 2.0
"""Largest addition to the others' latency by a call without an address, compared to one with an address."""

Times = list[tuple[float, float]]
"""Begin and end of calls in seconds of the monotonic clock, which processes share."""


def conversation(megabytes: float, kind: str) -> bytes:
    """Return the beginning of a request of about this size."""
    rng, size, prose = random.Random(7), int(megabytes * 1e6), corpus.paragraphs()
    start = corpus.opening(rng, prose, 900)
    if kind == "picture":
        url = "data:image/png;base64," + "iVBORw0KGgo" * (size // 11)
        part = {"type": "image_url", "image_url": {"url": url}}
        return f"{start},{corpus.compact({'role': 'user', 'content': [part]})}".encode()
    turns = "".join(corpus.agent_turn(rng, prose) for _ in range(200))
    return (start + turns * (size // len(turns) + 1)).encode()


def call(connection: http.client.HTTPConnection, path: str, body: bytes) -> tuple[float, float]:
    """Make a call; return the times of its begin and its answer."""
    began = time.monotonic()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    return began, time.monotonic()


def send(port: int, path: str, megabytes: float, kind: str, calls: int) -> Times:
    """Make large calls, each one turn longer than the one before; return their times. The first is left out."""
    connection, body = http.client.HTTPConnection("127.0.0.1", port), conversation(megabytes, kind)
    rng, prose, found = random.Random(), corpus.paragraphs(), Times()
    for _ in range(calls + 1):
        time.sleep(PAUSE)
        found.append(call(connection, path, body + corpus.tail("bench-chat", tools=corpus.TOOLS)))
        body += corpus.agent_turn(rng, prose).encode()
    return found[1:]


class Small:
    """Makes small calls in a thread, one after the other, within the context."""

    def __init__(self, port: int) -> None:
        self.times = Times()
        self._port, self._over = port, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        while not self._over.is_set():
            self.times.append(call(connection, "/rollout/small/v1/chat/completions", SMALL))

    def __enter__(self) -> Small:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def longest(self, began: float, ended: float) -> float:
        """Return the longest latency of small calls under way in this interval; ms."""
        return max((b - a for a, b in self.times if b > began and a < ended), default=0.0) * 1000


def measured(
    port: int, core: int, kind: str, path: str, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Return (longest latencies during each large call, and in as long a time before each)."""
    numbers = [str(port), path, kind]
    command = [sys.executable, "-m", "bench.stalls", "--mb", str(options.mb), "--calls", str(options.calls), "--send"]
    with Small(port) as small:
        done = subprocess.run(
            [*command, *numbers], stdout=subprocess.PIPE, check=True, cwd=HERE.parent, preexec_fn=pin(core)
        )
    large = [(a, b) for a, b in json.loads(done.stdout)]
    quiet = [(b, min(c, b + (d - c))) for (_, b), (c, d) in pairwise(large)]
    return [small.longest(*each) for each in large], [small.longest(*each) for each in quiet]


def shown(name: str, found: list[float]) -> str:
    """Return a line of the report."""
    return f"{name:34} {median(found):8.1f} {min(found):8.1f}"


def run(options: argparse.Namespace) -> None:
    """Do everything but the command line."""
    cores, peer = Cores.choose(), next(peer for peer in PEERS if peer.name == "penstock")
    programs.build()
    material = corpus.write(BUILD / "corpus")
    with programs.mock(material.folder, cores) as upstream, ExitStack() as stack:
        gateway = Gateway(peer, upstream.port, cores)
        stack.callback(gateway.close)
        gateway.wait_ready()
        print(f"{options.mb:g} MB; longest latency of a small call meanwhile, ms{'':3}  middle    least")
        for kind in ("messages", "picture"):
            least: list[float] = []
            for name, path in PATHS.items():
                busy, quiet = measured(gateway.start.port, cores.load, kind, path, options)
                print(shown(f"{kind}, nothing large", quiet))
                print(shown(f"{kind}, {name}", busy))
                least.append(min(busy))
            more = least[1] - least[0]
            print(f"{kind}: {more:+.1f} ms without an address ({'reached' if more <= TARGET_MS else 'NOT reached'})")


def main() -> None:
    """Measure and print; with --send be the process that sends large calls."""
    parser = argparse.ArgumentParser(prog="python -m bench.stalls", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=float, default=19, help="size of the large calls (default: 19)")
    parser.add_argument("--calls", type=int, default=8, help="how many of each kind (default: 8)")
    parser.add_argument("--send", nargs=3, metavar=("PORT", "PATH", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        port, path, kind = options.send
        print(json.dumps(send(int(port), path, options.mb, kind, options.calls)))
    else:
        run(options)


if __name__ == "__main__":
    main()
