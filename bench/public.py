"""python -m bench.public: gateways in the shape of two public benchmarks; docs/benchmarks.md says how to read it.

`ping` is llm-gateway-bench's (cuihuan, probe/overhead.mjs): rounds of 25 calls one after the other, straight and
through the gateway; what is added is the median of the differences between their medians. `hello` is On the Bench's
(GetBusbar/benchmarking): one small request again and again, over twice as many connections each time. Prints a table
and writes bench/out/public.json. Timing never changes the exit status.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path

from bench import corpus, measure, programs, report
from bench.__main__ import choose, machine, make_parser, rest, say, start_all, tape_note
from bench.cases import Case, Target
from bench.corpus import Material
from bench.peers import BUILD, FORMER_FILES, HERE, PEERS
from bench.programs import Cores
from bench.report import middle, number

OUT = HERE / "out" / "public.json"
USUAL = ["bare", "nginx", "penstock", "implicit", FORMER_FILES.name, "litellm-newest", "smg", "portkey"]
LIMIT = 350.0
"""Seconds a run may take, without installing and the minute of rest: no round begins that would not end in time."""
REQUESTS = {"ping": 1, "hello": 16}
"""The one message of a request, and its max_tokens."""
PING_ROUNDS, PING_CALLS = 7, 25
PING = Case("ping", "25 calls one after the other", "ping", "chat", Target(), seconds=1.0, connections=1)
CLIMB = [
    Case(f"hello_{connections}", "", "hello", "chat", Target(), seconds=1.0, connections=connections)
    for connections in (1, 2, 4, 8, 16, 32, 64)
]
BOUNDS = {"1 ms": 1e3, "10 ms": 1e4, "100 ms": 1e5, "any": inf}
"""Bounds in us of p99, which is not added to direct's but measured through the gateway."""
COLUMNS = [
    "peer",
    "rps a core",
    *(f"rps, p99 < {bound}" for bound in list(BOUNDS)[:-1]),
    "rps",
    "+p50 us",
    "+p99 us",
    "ping +ms",
    "idle MB",
    "loaded MB",
    "loaded anon",
    "rested MB",
    "rested anon",
    "idle CPU ms/s",
]


def write(folder: Path) -> Material:
    """Write the two requests, and the answers that the other benches have."""
    material = corpus.write(folder)
    for word, most in REQUESTS.items():
        messages = [{"role": "user", "content": word}]
        body = corpus.compact({"model": "bench-chat", "messages": messages, "max_tokens": most}).encode()
        corpus.write_corpus(folder / f"{word}.prompts", [(body, [(0, len(body))] * corpus.STEPS)], b"")
    return material


def arguments() -> argparse.Namespace:
    parser = make_parser("bench.public", __doc__, PEERS, f"{', '.join(USUAL)}, if present")
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer climbs (default: 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="at each number of connections (default: 1)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    return parser.parse_args()


def run(options: argparse.Namespace) -> report.Results:
    """Do everything between the command line and the table."""
    notes: list[str] = []
    cores, peers = Cores.choose(), choose(PEERS, USUAL, options, notes)
    began = time.monotonic()
    os.sched_setaffinity(0, {cores.load})
    programs.build()
    material = write(BUILD / "public")
    with programs.mock(material.folder, cores) as upstream, ExitStack() as stack:
        gateways, idle = start_all(peers, upstream.port, cores, stack, notes)
        bench = measure.Bench(
            upstream, cores, material, options.seconds, f"p{os.getpid():x}", began + LIMIT / 4, PING_CALLS
        )
        for gateway in gateways:
            bench.warm_up(gateway, PING)
        pings = measure.Rounds(bench, gateways, say)
        pings.run([PING], PING_ROUNDS, began + LIMIT)
        climbs = measure.Rounds(replace(bench, calls=0), gateways, say)
        done = climbs.run(CLIMB, options.rounds, began + LIMIT)
        rested = rest(gateways)
        notes += [f"{done} climbs, {time.monotonic() - began:.0f} s"]
        notes += [note for gateway in gateways for note in tape_note(gateway)]
    versions = {peer.name: peer.version for peer in peers}
    cells = pings.cells | climbs.cells
    return report.Results([PING, *CLIMB], cells, idle, [machine(cores), *notes], versions, rested)


def row(results: report.Results, peer: str) -> list[str]:
    """Return the figures of a peer that runs."""
    reached: dict[float, float] = {}
    best = CLIMB[0].name, 0.0
    for case in CLIMB:
        mine, straight = results.cells[case.name][peer], results.cells[case.name]["direct"]
        speed, tail, floor = middle(mine, "per_second"), middle(mine, "p99_us"), middle(straight, "p99_us")
        if speed is None or tail is None or floor is None or any(cell.errors for cell in mine):
            continue
        best = max(best, (case.name, speed), key=lambda each: each[1])
        for bound in BOUNDS.values():
            if tail + floor < bound:
                reached[bound] = max(speed, reached.get(bound, 0.0))
    cpu = middle(results.cells[best[0]][peer], "cpu_ms")
    added = [middle(results.cells[CLIMB[0].name][peer], name) for name in ("p50_us", "p99_us")]
    ping = middle(results.cells[PING.name][peer], "p50_us")
    idle, after = results.idle[peer], results.rest[peer]
    memory = [idle.rss_mb, after.loaded.total, after.loaded.anonymous, after.later.total, after.later.anonymous]
    figures = [1000 / cpu if cpu else None, *(reached.get(bound) for bound in BOUNDS.values()), *added]
    milliseconds = number(ping / 1000 if ping is not None else None, 2)
    return [results.label(peer), *map(number, figures), milliseconds, *map(number, memory), number(after.cpu_ms, 1)]


def table(results: report.Results) -> str:
    """Return the table, and below it the complaints."""
    rows = [row(results, peer) for peer in results.rest]
    return "\n".join([*report.markdown(rows, COLUMNS), "", *report.complaints(results)])


def main() -> None:
    options = arguments()
    results = run(options)
    say("")
    print(table(results))
    report.write(results, options.out)
    print(f"as JSON in {options.out}")


if __name__ == "__main__":
    main()
