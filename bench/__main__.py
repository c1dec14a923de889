"""python -m bench: Penstock and other gateways side by side, one core each; docs/benchmarks.md says how to read it.

Prints a table with ratios and targets and writes bench/out/gateway.json. Timing never changes the exit status.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench import corpus, measure, procfs, programs, report
from bench.cases import CASES
from bench.peers import BUILD, HERE, PEERS, Peer
from bench.programs import Cores, Gateway

OUT = HERE / "out" / "gateway.json"
STARTS = 3
SLOW_START = 2.0
"""A peer that takes longer than these seconds to start is started only once."""
IDLE_SECONDS = 1.0
REST_SECONDS = 60.0
LIMIT, QUICK_LIMIT = 350.0, 70.0
"""Seconds a run may take: no round begins that would not end in time, cells are repeated in the first quarter only."""
QUICK_SCALE = 0.35
QUICK_PEERS = ["bare", "penstock"]


def make_parser(
    program: str, doc: str | None, peers: list[Peer], usual: str = "those present"
) -> argparse.ArgumentParser:
    """Return a parser with the options that `choose` reads. `usual`: the peers without them, for people."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=(doc or "").partition("\n")[0])
    names = ", ".join(peer.name for peer in peers)
    parser.add_argument("--peers", help=f"`all`, or some of {names}; missing ones are installed. Default: {usual}")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing")
    return parser


def arguments() -> argparse.Namespace:
    parser = make_parser("bench", __doc__, PEERS)
    parser.add_argument("--cases", default="", help=f"some of {', '.join(case.name for case in CASES)}; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="how often every peer takes its turn (default: 3)")
    parser.add_argument(
        "--calls", type=int, default=0, help="make so many calls instead of measuring for a time: for busy machines"
    )
    parser.add_argument("--quick", action="store_true", help="about a minute: short cells, bare and penstock only")
    parser.add_argument("--out", type=Path, default=OUT, help="where the JSON goes")
    return parser.parse_args()


def choose(every: list[Peer], usual: list[str], options: argparse.Namespace, notes: list[str]) -> list[Peer]:
    """Return the peers that take part, `usual` if none are named; note those that cannot."""
    known = [peer.name for peer in every]
    wanted = known if options.peers == "all" else ["bare", *options.peers.split(",")] if options.peers else usual
    if unknown := sorted({*wanted} - {*known, "direct"}):
        sys.exit(f"no such peer: {', '.join(unknown)}; there are {', '.join(known)}")
    asked = bool(options.install or options.peers)
    return [peer for peer in every if peer.name in wanted and present(peer, asked, notes)]


def present(peer: Peer, install: bool, notes: list[str]) -> bool:
    """True if the peer can be started, after installing it if `install`. Notes why not."""
    if not peer.installed() and install and peer.install:
        say(f"installing {peer.name}")
        try:
            peer.install()
        except (RuntimeError, OSError) as error:
            notes.append(f"{peer.name}: cannot be installed: {error}")
            return False
    if not peer.installed():
        notes.append(f"{peer.name}: not installed" + ("; --install gets it" if peer.install else ""))
    return peer.installed()


def start(peer: Peer, upstream: int, cores: Cores, stack: ExitStack) -> tuple[Gateway, report.Idle]:
    """Start a peer several times, keep the last, and return it with the medians of its start time and memory; raises
    RuntimeError."""
    seen: list[tuple[float, procfs.Memory]] = []
    while True:
        gateway = Gateway(peer, upstream, cores)
        with ExitStack() as mine:
            mine.callback(gateway.close)
            gateway.wait_ready()
            time.sleep(IDLE_SECONDS)
            seen.append((gateway.ready_seconds, procfs.memory(gateway.pid)))
            if len(seen) == STARTS or gateway.ready_seconds > SLOW_START:
                stack.push(mine.pop_all())
                return gateway, summary(seen)


def summary(starts: list[tuple[float, procfs.Memory]]) -> report.Idle:
    """Return the medians over the starts."""
    seconds, memories = [each[0] for each in starts], [each[1] for each in starts]
    total, anonymous = median(each.total for each in memories), median(each.anonymous for each in memories)
    return report.Idle(median(seconds) * 1000, total, anonymous)


def start_all(
    peers: list[Peer], upstream: int, cores: Cores, stack: ExitStack, notes: list[str]
) -> tuple[list[Gateway], dict[str, report.Idle]]:
    """Start the peers; return those that run, and note the others."""
    gateways: list[Gateway] = []
    idle: dict[str, report.Idle] = {}
    for peer in peers:
        say(f"starting {peer.name}")
        try:
            gateway, idle[peer.name] = start(peer, upstream, cores, stack)
        except (RuntimeError, OSError) as error:
            notes.append(f"{peer.name}: {error}")
        else:
            gateways.append(gateway)
    return gateways, idle


def rest(gateways: list[Gateway]) -> dict[str, report.Rest]:
    """Call nobody for a minute; return what each peer holds before and after it."""
    say("a minute of rest")
    loaded = [procfs.memory(gateway.pid) for gateway in gateways]
    time.sleep(REST_SECONDS / 2)
    spent = [procfs.cpu_seconds(gateway.pid) for gateway in gateways]
    time.sleep(REST_SECONDS / 2)
    found: dict[str, report.Rest] = {}
    for gateway, memory, before in zip(gateways, loaded, spent, strict=True):
        share = (procfs.cpu_seconds(gateway.pid) - before) / (REST_SECONDS / 2)
        found[gateway.peer.name] = report.Rest(memory, procfs.memory(gateway.pid), share * 1000)
    return found


def tape_note(gateway: Gateway) -> list[str]:
    """Return a note on the bytes that recording took on disk; empty for a peer that does not record."""
    recorded = gateway.recorded()
    if not recorded:
        return []
    size = gateway.stored_bytes()
    return [f"{gateway.peer.name} recorded {recorded:,} calls in {size / 1e6:,.0f} MB, {size / recorded:,.0f} B a call"]


def machine(cores: Cores) -> str:
    """Return a description of the machine and the cores that were used."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = models[0].partition(": ")[2] if models else platform.machine()
    where = f"gateway on core {cores.gateway}, mock and load on core {cores.load}"
    return f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python {platform.python_version()}; {where}"


def say(what: str) -> None:
    """Print progress on stderr, beside the table."""
    print(f"\r\033[K{what}" if sys.stderr.isatty() else what, end="" if sys.stderr.isatty() else "\n", file=sys.stderr)


def run(options: argparse.Namespace) -> report.Results:
    """Do everything between the command line and the table."""
    notes: list[str] = []
    usual = QUICK_PEERS if options.quick else [peer.name for peer in PEERS]
    cores, peers = Cores.choose(), choose(PEERS, usual, options, notes)
    began = time.monotonic()
    os.sched_setaffinity(0, {cores.load})
    programs.build()
    material = corpus.write(BUILD / "corpus")
    cases = [case for case in CASES if not options.cases or case.name in options.cases.split(",")]
    with programs.mock(material.folder, cores) as upstream, ExitStack() as stack:
        gateways, idle = start_all(peers, upstream.port, cores, stack, notes)
        scale = QUICK_SCALE if options.quick else 1.0
        limit = QUICK_LIMIT if options.quick else LIMIT
        bench = measure.Bench(upstream, cores, material, scale, f"r{os.getpid():x}", began + limit / 4, options.calls)
        for gateway in gateways:
            bench.warm_up(gateway, CASES[0])
        rounds = measure.Rounds(bench, gateways, say)
        done = rounds.run(cases, options.rounds, began + limit)
        rested = {} if options.quick else rest(gateways)
        notes.append(f"{done} rounds, {time.monotonic() - began:.0f} s")
        notes += [note for gateway in gateways for note in tape_note(gateway)]
    versions = {peer.name: peer.version for peer in peers}
    return report.Results(cases, rounds.cells, idle, [machine(cores), *notes], versions, rested)


def main() -> None:
    options = arguments()
    results = run(options)
    say("")
    print(report.table(results))
    report.write(results, options.out)
    print(f"as JSON in {options.out}")


if __name__ == "__main__":
    main()
