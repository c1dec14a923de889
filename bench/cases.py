"""The cases to measure, and Penstock's targets. CPU targets are relative to `bare` in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bench.corpus import ANSWER_BYTES, EVENTS, Material

PATIENCE = 60
"""Time limit in seconds for a number of calls."""
Answer = Literal["chat", "burst", "paced"]


@dataclass(frozen=True)
class Target:
    """Upper bounds for Penstock; None where there is none."""

    cpu_ratio: float | None = None
    """CPU of the gateway per call or event, relative to bare."""
    cpu_ms: float | None = None
    """CPU of the gateway per call or event, in milliseconds."""
    p50_us: float | None = None
    p99_us: float | None = None
    rss_mb: float | None = None
    ready_ms: float | None = None


@dataclass(frozen=True)
class Case:
    """One kind of traffic. CPU is measured under load, latency at one connection unless the load itself is mild."""

    name: str
    about: str
    prompts: str
    answer: Answer
    target: Target
    seconds: float
    connections: int
    alone_seconds: float = 0.0
    """Length of the measurement at one connection; 0 takes latency from the loaded one."""
    rate: int = 0
    """Calls a second in open loop; 0 is a closed loop."""
    stagger: float = 0.0
    """Seconds over which the connections begin."""
    warm: float = 0.2
    own: bool = False
    """True if each connection tells rollouts of its own; otherwise their calls come over whichever is free."""
    alike: bool = False
    """True if its calls make the same rollouts with an address and without one."""

    @property
    def unit(self) -> Literal["call", "event"]:
        """The unit that CPU is divided by."""
        return "event" if self.answer == "paced" else "call"

    @property
    def holdup(self) -> bool:
        """True if latency is the age of each event on arrival, and not that of the call."""
        return self.answer == "paced"

    def loaded(self, scale: float, calls: int = 0) -> list[str]:
        """Return arguments of the load generator for the measurement under load: `calls` calls, or with 0 a time."""
        counted = calls and not self.rate and not self.holdup
        seconds = ["--seconds", str(self.seconds * scale), "--warm", str(self.warm)]
        seconds = ["--seconds", str(PATIENCE), "--warm", "0", "--calls", str(calls)] if counted else seconds
        shape = ["--connections", str(self.connections), "--rate", str(self.rate), "--stagger", str(self.stagger)]
        return [*seconds, *shape, *(["--own"] if self.own else [])]

    def alone(self, scale: float) -> list[str]:
        """Return arguments of the load generator for the measurement at one connection."""
        return ["--seconds", str(self.alone_seconds * scale), "--warm", "0.1", "--connections", "1"]

    def traffic(self, material: Material, exact: bool) -> list[str]:
        """Return arguments for the requests to send and the right answers to them."""
        size = ANSWER_BYTES if self.answer == "chat" else material.stream_bytes[self.answer]
        events = 0 if self.answer == "chat" else EVENTS
        expected = ["--bytes", str(size if exact else 0), "--events", str(events)]
        return ["--corpus", str(material.prompts(self.prompts)), *expected]


AT_ONE_RATE: list[tuple[str, str, Answer]] = [
    ("openings", "chat_1k at 1,000 calls/s, but each call is a rollout of its own", "chat"),
    ("openings_sse", "the same, each call answered by 200 events in 22 writes", "burst"),
    ("turns", "an agent's conversation, from 3 to 15 KB in 12 calls; 1,000 calls/s", "chat"),
    ("turns_sse", "the same, each call answered by 200 events in 22 writes", "burst"),
]
"""Cases that compare Penstock with and without an address at the same rate. In a closed loop the slower of two makes
smaller batches, and a call of a small batch costs more: the difference would count twice."""
CASES = [
    Case(
        "chat_1k",
        "1 KB prompt, 600 B answer; CPU at 16 connections, latency at one",
        "chat_1k",
        "chat",
        Target(cpu_ratio=0.75, p50_us=160),
        seconds=1.2,
        connections=16,
        alone_seconds=0.8,
    ),
    Case(
        "chat_1k_open",
        "the same, 1,000 calls/s on schedule, latency from the scheduled time",
        "chat_1k",
        "chat",
        Target(p99_us=1500),
        seconds=1.6,
        connections=64,
        rate=1000,
    ),
    Case(
        "chat_1k_own",
        "chat_1k, but each connection has rollouts of its own, as an agent does that keeps its connection",
        "chat_1k",
        "chat",
        Target(),
        seconds=1.2,
        connections=16,
        own=True,
    ),
    Case(
        "chat_100k",
        "a 100 KB conversation that grows by 1 KB a call; CPU at 16 connections, latency at one",
        "chat_100k",
        "chat",
        Target(cpu_ratio=2.0),
        seconds=1.2,
        connections=16,
        alone_seconds=0.6,
        alike=True,
    ),
    *(
        Case(name, about, name, answer, Target(), seconds=2.0, connections=64, alone_seconds=0.6, rate=1000, alike=True)
        for name, about, answer in AT_ONE_RATE
    ),
    Case(
        "sse_200",
        "200 events at once, in 22 writes; CPU at 16 connections, latency at one",
        "burst",
        "burst",
        Target(cpu_ratio=1.1),
        seconds=1.2,
        connections=16,
        alone_seconds=0.6,
    ),
    Case(
        "sse_paced",
        "64 streams, an event every 5 ms each; CPU per event, latency is the events' hold-up, direct's not taken off",
        "paced",
        "paced",
        Target(cpu_ratio=1.0, p50_us=100, p99_us=1500),
        seconds=2.5,
        connections=64,
        stagger=1.0,
        warm=1.0,
    ),
]
IMPLICIT_RATIO = 1.3
"""Most CPU of the gateway for a call without an address, relative to one with an address."""
IDLE = Target(rss_mb=80, ready_ms=1000)
