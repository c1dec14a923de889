"""Measures the benefit of keeping a rollout on its upstream: `python -m bench.affinity`.

The calls of a tape are simulated, in their order and at their times, on engines that model one thing: the part of a
prompt that is in their prefix cache. An engine remembers the conversations that it served last, as many tokens as its
cache holds; of a call's prompt it has the tokens that it served of the same rollout before. Every call takes as long as
on the tape. Nothing is sent anywhere.

    in turn      each call to the next engine
    least busy   each call to the engine with the fewest calls under way
    by rollout   as `weights` of a route do it (`gateway.traffic.upstreams.routes`)
    by hash      the same without a bound on the load

*cached*: percentage of all prompt tokens that was in the cache. *busiest*: the most calls that one engine had under way
at a time, over the mean of all engines at that time, while at least four calls an engine ran. `--gateway URL` takes the
calls of its tape; without it they are made up: agents of 4 to 40 turns whose prompts grow by 900 tokens a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from unittest.mock import patch

from penstock.gateway.client.client import Client
from penstock.gateway.traffic.upstreams import routes

CACHE: Final = 400_000
"""Tokens that an engine's cache holds: the rest of 80 GB beside the weights of 8 billion parameters in 16 bits."""


class Called(NamedTuple):
    """A call of the tape."""

    began_s: float
    rollout: str
    prompt: int
    """Tokens of the prompt."""
    answer: int
    took_s: float


@dataclass(slots=True)
class Engine:
    """An upstream with its prefix cache."""

    name: str
    running: int = 0
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict[str, int])
    """Tokens by rollout; the rollout that was served last is at the end."""

    def serve(self, call: Called) -> int:
        """Serve a call; return the tokens of its prompt that were in the cache."""
        found = min(self.cached.pop(call.rollout, 0), call.prompt)
        self.cached[call.rollout] = call.prompt + call.answer
        while sum(self.cached.values()) > CACHE and len(self.cached) > 1:
            _ = self.cached.popitem(last=False)
        return found


Choice = Callable[[Sequence[Engine], int, Called], Engine]


def in_turn(engines: Sequence[Engine], number: int, call: Called) -> Engine:
    return engines[number % len(engines)]


def least_busy(engines: Sequence[Engine], number: int, call: Called) -> Engine:
    return min(engines, key=lambda one: one.running)


def by_rollout(engines: Sequence[Engine], number: int, call: Called) -> Engine:
    return routes.rank_upstreams(engines, {one.name: 1.0 for one in engines}, call.rollout)[0]


def by_hash(engines: Sequence[Engine], number: int, call: Called) -> Engine:
    with patch.object(routes, "LOAD_BOUND", 1e9):
        return by_rollout(engines, number, call)


CHOICES: Final[dict[str, Choice]] = {
    "in turn": in_turn, "least busy": least_busy, "by rollout": by_rollout, "by hash": by_hash,
}  # fmt: skip


def play(calls: Sequence[Called], count: int, choose: Choice) -> tuple[float, float]:
    """Return (share of the prompt tokens that was cached, the most calls of one engine over the mean)."""
    engines = [Engine(f"gpu-{number}") for number in range(count)]
    ends: list[tuple[float, int, Engine]] = []
    cached, busiest = 0, 1.0
    for number, call in enumerate(calls):
        while ends and ends[0][0] <= call.began_s:
            heapq.heappop(ends)[2].running -= 1
        engine = choose(engines, number, call)
        cached += engine.serve(call)
        engine.running += 1
        heapq.heappush(ends, (call.began_s + call.took_s, number, engine))
        running = [one.running for one in engines]
        if sum(running) >= 4 * count:
            busiest = max(busiest, max(running) * count / sum(running))
    return cached / max(1, sum(call.prompt for call in calls)), busiest


def made(rollouts: int, seed: int = 1) -> list[Called]:
    """Make up calls of agents that work at the same time."""
    draw, calls = random.Random(seed), list[Called]()
    for number in range(rollouts):
        now, prompt = draw.uniform(0, rollouts / 4), draw.randint(1_500, 6_000)
        for _ in range(round(draw.triangular(4, 40, 10))):
            answer = draw.randint(30, 600)
            took = 0.5 + answer / 60
            calls.append(Called(now, f"rollout-{number}", prompt, answer, took))
            now += took + draw.expovariate(1 / 3)
            prompt += answer + draw.randint(100, 1_200)
    return sorted(calls)


async def recorded(url: str, limit: int) -> list[Called]:
    """Return the newest calls of a tape that have counted tokens."""
    calls = list[Called]()
    async with Client(url) as client:
        async for span in client.recent_spans("kind:llm", limit):
            usage = span.usage
            if usage is not None and usage.input_tokens and span.end_ns is not None:
                took = (span.end_ns - span.start_ns) / 1e9
                called = Called(span.start_ns / 1e9, span.rollout, usage.input_tokens, usage.output_tokens or 0, took)
                calls.append(called)
    return sorted(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description="What it is worth that a rollout stays on its upstream.")
    _ = parser.add_argument("--gateway", help="URL of a gateway whose calls are played")
    _ = parser.add_argument("--calls", type=int, default=20_000, help="its newest calls (20000)")
    _ = parser.add_argument("--rollouts", type=int, default=2_000, help="rollouts that are made without it (2000)")
    _ = parser.add_argument("--engines", type=int, nargs="+", default=[2, 4, 8, 16])
    given = parser.parse_args()
    calls = made(given.rollouts) if given.gateway is None else asyncio.run(recorded(given.gateway, given.calls))
    if not calls:
        raise SystemExit("the tape has no call of a model with counted tokens: nothing to play")
    print(f"{len(calls):,} calls of {len({call.rollout for call in calls}):,} rollouts")
    print(f"{'engines':>8}  {'calls go':12}{'cached':>8}{'busiest':>9}")
    for count in given.engines:
        for name, choose in CHOICES.items():
            cached, busiest = play(calls, count, choose)
            print(f"{count:8}  {name:12}{cached:8.1%}{busiest:8.2f}×")


if __name__ == "__main__":
    main()
