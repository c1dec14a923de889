"""python -m bench.mcp: what a call of a tool costs through proxies for MCP, one core each; docs/benchmarks.md.

The tool echoes 1 KB. It is called in one session of revision 2025-11-25 (`session`) and without one, as 2026-07-28 has
it (`stateless`), over 1 and 16 connections. Prints a table and writes bench/out/mcp.json. Timing never changes the exit
status.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

from bench import corpus, measure, programs, report
from bench.__main__ import choose, machine, make_parser, say, start_all, tape_note
from bench.cases import Case, Target
from bench.corpus import Material
from bench.mcp_peers import PEERS
from bench.mcp_upstream import HANDSHAKE, STATELESS
from bench.peers import BUILD, HERE
from bench.programs import Cores, Gateway, Mock, pin

OUT = HERE / "out" / "mcp.json"
TEXTS, TEXT_BYTES = 256, 1024
LIMIT = 300.0
"""Seconds a run may take: no round begins that would not end in time, cells are repeated in the first quarter only."""
ACCEPT = "application/json, text/event-stream"
NUMBERED = "Task 00000000"
"""The id of a call. The load generator replaces the number every time by another of the same length."""
CLIENT = {"name": "bench", "version": "1"}
META = {
    "io.modelcontextprotocol/protocolVersion": STATELESS,
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "session": ({}, [f"MCP-Protocol-Version: {HANDSHAKE}"]),
    "stateless": ({"_meta": META}, [f"MCP-Protocol-Version: {STATELESS}", "Mcp-Method: tools/call", "Mcp-Name: echo"]),
}
"""Parameters and headers of a call besides tool and text."""
ALONE, CROWD = Target(cpu_ms=0.3, p50_us=500), Target(cpu_ms=0.3)
"""Targets. Over 16 connections a call waits for others; there latency is shown and not judged."""
CASES = [
    Case(
        f"{kind}_{connections}",
        f"{about}, over {connections} connection{'s' * (connections > 1)}",
        kind,
        "chat",
        ALONE if connections == 1 else CROWD,
        seconds=2.0,
        connections=connections,
    )
    for kind, about in (("session", "one session of 2025-11-25"), ("stateless", "no session, 2026-07-28"))
    for connections in (1, 16)
]


def call(kind: str, text: str) -> dict[str, Any]:
    """Return a call of the tool."""
    params = {"name": "echo", "arguments": {"text": text}, **KINDS[kind][0]}
    return {"jsonrpc": "2.0", "id": NUMBERED, "method": "tools/call", "params": params}


def write(folder: Path) -> Material:
    """Write the requests, a corpus for each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, words = random.Random(21), corpus.plain_words(corpus.paragraphs())
    texts = [" ".join(rng.choices(words, k=TEXT_BYTES))[:TEXT_BYTES] for _ in range(TEXTS)]
    for kind in KINDS:
        bodies = [corpus.compact(call(kind, text)).encode() for text in texts]
        corpus.write_corpus(folder / f"{kind}.prompts", [(body, [(0, len(body))]) for body in bodies], b"")
    return Material(folder, {})


@contextmanager
def upstream(cores: Cores) -> Generator[Mock]:
    """Run the server for the context."""
    command = [sys.executable, "-m", "bench.mcp_upstream"]
    place, where = HERE.parent, pin(cores.load)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place, preexec_fn=where) as process:
        assert process.stdout
        try:
            yield Mock(process.pid, int(process.stdout.readline()))
        finally:
            process.kill()


@dataclass
class Client:
    """Opens a session for a measurement, and checks that the tool answers."""

    port: int
    path: str
    kind: str
    headers: list[str] = field(default_factory=list[str])

    def open(self) -> int:
        """Open a session if the kind has any; return the length of a right answer. Raises RuntimeError without one."""
        self.headers = list(KINDS[self.kind][1])
        if self.kind == "session":
            params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": CLIENT}
            begin = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
            _, session = self._post(begin)
            self.headers += [f"Mcp-Session-Id: {session}"] if session else []
            self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        text = "x" * TEXT_BYTES
        answer, _ = self._post(call(self.kind, text))
        if text not in answer or NUMBERED not in answer:
            raise RuntimeError(f"the tool does not answer: {answer[:300]}")
        return len(answer)

    def _post(self, message: dict[str, Any]) -> tuple[str, str | None]:
        """Return the answer, and the session that it names."""
        headers = {"Content-Type": "application/json", "Accept": ACCEPT}
        headers |= {name: value for name, _, value in (line.partition(": ") for line in self.headers)}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", self.path, json.dumps(message), headers)
            answer = connection.getresponse()
            body, session = answer.read().decode(), answer.headers["Mcp-Session-Id"]
        finally:
            connection.close()
        if answer.status not in (200, 202):
            raise RuntimeError(f"{message['method']} is answered with {answer.status}: {body[:300]}")
        return body, session


@dataclass(frozen=True)
class Bench(measure.Bench):
    """A bench in which each measurement has a session, or a rollout, of its own."""

    names: count[int] = field(default_factory=count)

    def straight(self, case: Case) -> list[str]:
        """Return the load generator's arguments for calls to the server itself."""
        return self._traffic(self.mock.port, "/mcp", case, True)

    def arguments(self, gateway: Gateway, case: Case) -> list[str]:
        """Return the load generator's arguments for calls to a proxy."""
        path = gateway.peer.path.replace("{r}", f"{self.run}-{next(self.names)}")
        return self._traffic(gateway.start.port, path, case, gateway.peer.exact)

    def _traffic(self, port: int, path: str, case: Case, exact: bool) -> list[str]:
        client = Client(port, path, case.prompts)
        size = client.open()
        headers = [part for line in client.headers for part in ("--header", line)]
        sent = ["--corpus", str(self.material.prompts(case.prompts)), "--bytes", str(size if exact else 0)]
        return [*sent, "--path", path, "--accept", ACCEPT, *headers]


def serves(gateway: Gateway, case: Case, notes: list[str]) -> bool:
    """True if the proxy can do this case; notes why not."""
    try:
        Client(gateway.start.port, gateway.peer.path.replace("{r}", "first"), case.prompts).open()
    except (RuntimeError, OSError) as error:
        notes.append(f"{gateway.peer.name} is left out of {case.name}: {error}")
        return False
    return True


def arguments() -> argparse.Namespace:
    parser = make_parser("bench.mcp", __doc__, PEERS)
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer takes its turn (default: 3)")
    parser.add_argument(
        "--calls", type=int, default=0, help="make so many calls instead of measuring for a time: for busy machines"
    )
    parser.add_argument("--quick", action="store_true", help="one round of short cells, about a minute")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    return parser.parse_args()


def run(options: argparse.Namespace) -> report.Results:
    """Do everything between the command line and the table."""
    notes: list[str] = []
    cores, peers = Cores.choose(), choose(PEERS, [peer.name for peer in PEERS], options, notes)
    began = time.monotonic()
    os.sched_setaffinity(0, {cores.load})
    programs.build()
    material = write(BUILD / "mcp")
    cells: measure.Cells = {}
    with upstream(cores) as server, ExitStack() as stack:
        gateways, idle = start_all(peers, server.port, cores, stack, notes)
        scale, rounds = (0.3, 1) if options.quick else (1.0, options.rounds)
        bench = Bench(server, cores, material, scale, f"m{os.getpid():x}", began + LIMIT / 4, options.calls)
        for kind in KINDS:
            cases = [case for case in CASES if case.prompts == kind]
            able = [gateway for gateway in gateways if serves(gateway, cases[0], notes)]
            for gateway in able:
                bench.warm_up(gateway, cases[0])
            taken = measure.Rounds(bench, able, say)
            done = taken.run(cases, rounds, began + LIMIT)
            notes.append(f"{kind}: {done} rounds")
            cells |= taken.cells
        notes += [note for gateway in gateways for note in tape_note(gateway)]
    return report.Results(CASES, cells, idle, [machine(cores), *notes, f"{time.monotonic() - began:.0f} s"])


def main() -> None:
    options = arguments()
    results = run(options)
    say("")
    print(report.table(results))
    report.write(results, options.out)
    print(f"as JSON in {options.out}")


if __name__ == "__main__":
    main()
