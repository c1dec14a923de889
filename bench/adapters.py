"""Measures how long recorded rollouts take to become samples and packed batches, on one core.

    python -m bench.adapters [--rollouts 1000] [--calls 10] [--tokens 4000] [--no-gateway]

Every rollout is one conversation; its calls have prompts of `--tokens` tokens on average, each with the whole
conversation so far. Answers carry the fields that vLLM sends with `return_token_ids` and `logprobs`: the ids of prompt
and answer, and for each sampled token its text, bytes and log-probability. Cases:

* *plain*, *stream*: bytes in memory -> samples;
* *broken*: the same with every prompt tokenised anew, so that nothing merges and every reason is checked;
* *gateway*: a tape behind a real gateway -> samples -> credit -> packed batches, as a trainer does it, stage by stage;
* *gateway, broken*: the same where nothing merges, so that every call is a sample of its own.

CPU is that of this process; the gateway's own is reported apart. Bytes are made and written before the clock starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.procfs import cpu_seconds
from bench.store import URL, entry
from penstock.adapters.episode import Bodies, Episode, read_episode
from penstock.adapters.samples import Sample, samples
from penstock.adapters.selection import SampleReport
from penstock.adapters.source import load
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import Attempt, AttemptStatus, Reward, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, Usage
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry
from penstock.trainer.config import AdvantageSettings
from penstock.trainer.mathematics.advantage import credit
from penstock.trainer.mathematics.batch import micro_batches

WORDS = ["the", "of", "a", "gate", "river", "that", "holds", "water", "tool", "result", "flight", "user", "asks"]
ANSWER, RESULT = 60, 40
"""Sampled tokens of an answer, and tokens of the tool result after it."""
VOCABULARY = 150_000
MODEL = "gpt-4o"
"""Model name in the calls of `bench.store`."""
START_NS = 1_790_000_000_000_000_000
MICRO_BATCH = 16_384
"""Tokens of one forward pass."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers and form of the calls to make."""

    rollouts: int
    calls: int
    tokens: int
    stream: bool = False
    broken: bool = False


def conversation(shape: Shape, seed: int) -> Iterator[Bodies]:
    """Yield the calls of one rollout."""
    rng = random.Random(seed)
    turn = ANSWER + RESULT
    ids = tokens(rng, max(1, shape.tokens - turn * (shape.calls - 1) // 2))
    said = [message("user", rng, len(ids))]
    for number in range(shape.calls):
        if shape.broken and number:
            ids[1] += 1
        answer, more = tokens(rng, ANSWER), tokens(rng, RESULT)
        spoken = message("assistant", rng, ANSWER)
        request = json.dumps({"model": MODEL, "messages": said, "stream": shape.stream}).encode()
        yield request, (streamed if shape.stream else plain)(ids, answer, spoken, rng)
        ids += answer + more
        said += [spoken, message("tool", rng, RESULT)]


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return random ids of a large vocabulary."""
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def message(role: str, rng: random.Random, count: int) -> dict[str, str]:
    """Return a message of about four letters a token."""
    return {"role": role, "content": " ".join(rng.choices(WORDS, k=count))}


def entries(answer: list[int], rng: random.Random) -> list[dict[str, Any]]:
    """Return log-probabilities as vLLM writes them."""
    return [
        {"token": word, "logprob": -rng.expovariate(1.0), "bytes": list(word.encode()), "top_logprobs": []}
        for word in rng.choices(WORDS, k=len(answer))
    ]


def plain(prompt: list[int], answer: list[int], spoken: dict[str, str], rng: random.Random) -> bytes:
    """Return an answer that is not streamed."""
    logprobs = {"content": entries(answer, rng)}
    choice = {"index": 0, "message": spoken, "logprobs": logprobs, "finish_reason": "stop", "token_ids": answer}
    return json.dumps({"id": "c", "model": MODEL, "choices": [choice], "prompt_token_ids": prompt}).encode()


def streamed(prompt: list[int], answer: list[int], spoken: dict[str, str], rng: random.Random) -> bytes:
    """Return a streamed answer with an event for each token."""
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1_790_000_000, "model": MODEL}
    events: list[dict[str, Any]] = [head | {"choices": [], "prompt_token_ids": prompt}]
    words = spoken["content"].split(" ")
    for at, (id, logprob) in enumerate(zip(answer, entries(answer, rng), strict=True)):
        delta = {"role": "assistant", "content": words[at] + " " * (at + 1 < len(words))}
        ended = "stop" if at + 1 == len(answer) else None
        piece = {"index": 0, "delta": delta, "logprobs": {"content": [logprob]}, "finish_reason": ended}
        events.append(head | {"choices": [piece | {"token_ids": [id]}]})
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def episode(shape: Shape, number: int, bodies: list[Bodies]) -> Episode:
    """Return a rollout as the client returns it."""
    name = f"r{number}"
    attempt = Attempt(rollout=name, id="a1", status=AttemptStatus.SUCCEEDED, reward=1.0)
    rollout = RolloutSummary(id=name, group=f"g{number // 8}", status=RolloutStatus.SUCCEEDED, attempts=[attempt])
    spans = [
        Span(rollout=name, attempt="a1", sequence=at, dialect="chat", model=MODEL, stream=shape.stream)
        for at in range(1, len(bodies) + 1)
    ]
    return read_episode(rollout, spans, lambda span: bodies[span.sequence - 1])


def in_memory(name: str, shape: Shape) -> None:
    """Measure bytes -> samples, some rollouts at a time so that the input needs no gigabytes."""
    report, wall, cpu, size = SampleReport(), 0.0, 0.0, 0
    for first in range(0, shape.rollouts, 50):
        numbers = range(first, min(first + 50, shape.rollouts))
        made = [(number, list(conversation(shape, number))) for number in numbers]
        size += sum(len(body) for _, bodies in made for pair in bodies for body in pair)
        clock, process = time.perf_counter(), time.process_time()
        for number, bodies in made:
            report.add(samples(episode(shape, number, bodies))[1])
        wall, cpu = wall + time.perf_counter() - clock, cpu + time.process_time() - process
    told(name, report, size, wall, cpu)


def told(name: str, report: SampleReport, size: int, wall: float, cpu: float, more: str = "") -> None:
    """Print a line of figures."""
    rate = report.calls / cpu
    rows = f"{report.calls:,} calls -> {report.samples:,} samples"
    print(f"{name:<8} {rows}, {size / 1e6:,.0f} MB: {cpu:6.2f} s CPU, {wall:6.2f} s wall, {rate:,.0f} calls/s{more}")


# -- behind a gateway --------------------------------------------------------------------------------------------------


def record(data: Path, shape: Shape) -> int:
    """Write the same calls to a tape; return the bytes of their bodies."""
    size = 0
    with open_store(data) as store:
        for number in range(shape.rollouts):
            bodies = list(conversation(shape, number))
            size += sum(len(body) for pair in bodies for body in pair)
            calls = [call(f"r{number}", at, *pair) for at, pair in enumerate(bodies)]
            _ = store.write([*calls, reward(f"r{number}", len(calls), float(number % 2))])
    return size


def call(rollout: str, at: int, request: bytes, response: bytes) -> SpanEntry:
    """Return a finished call as the recorder makes it."""
    body = StoredBody(URL, b"host: engine\r\n", request, b"content-type: application/json\r\n", response, b"", [])
    return entry(rollout, body, f"c{at}", Usage(), START_NS + at * 10**9, 100_000)


def reward(rollout: str, at: int, value: float) -> SpanEntry:
    """Return the span of a rollout's reward."""
    start, given = START_NS + at * 10**9, Reward(value=value).attributes()
    return SpanEntry(
        rollout, "a1", status="ok", start_ns=start, end_ns=start, kind="reward", name="reward", attributes=given
    )


@asynccontextmanager
async def serving(data: Path) -> AsyncGenerator[tuple[str, int]]:
    """Yield URL and process id of a gateway on this tape."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock", "serve", "--data", str(data), "--port", "0"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().split()[-1], process.pid
    finally:
        process.terminate()
        _ = await process.wait()


async def through_a_gateway(name: str, shape: Shape) -> None:
    """Measure a tape behind a gateway -> batches."""
    with tempfile.TemporaryDirectory() as folder:
        size, report, taken = record(Path(folder) / "data", shape), SampleReport(), Stages()
        key = os.environ.get("PENSTOCK_ADMIN_KEY")
        async with serving(Path(folder) / "data") as (url, pid), Client(url, key) as client:
            clock, process, theirs, made = time.perf_counter(), time.process_time(), cpu_seconds(pid), list[Sample]()
            async for one in load(client, client.rollouts()):
                with taken.stage("samples"):
                    found, of_one = samples(one)
                made += found
                report.add(of_one)
            theirs = cpu_seconds(pid) - theirs
        taken.seconds["reading"] = time.process_time() - process - taken.seconds["samples"]
        tokens = batched(made, taken)
        wall, cpu = time.perf_counter() - clock, time.process_time() - process
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in taken.seconds.items())
        told(name, report, size, wall, cpu, f" ({stages}; {tokens:,} tokens); the gateway {theirs:.2f} s CPU")


class Stages:
    """CPU seconds of this process by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the CPU seconds of the context to a stage."""
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


def batched(made: list[Sample], taken: Stages) -> int:
    """Turn samples into packed batches, as one step; return their tokens. The rollouts of the tape have no group: the
    baseline is taken over all."""
    with taken.stage("credit"):
        credited = credit(made, AdvantageSettings(estimator="reinforce++"))
    with taken.stage("batches"):
        batches = micro_batches(credited.examples, MICRO_BATCH, "packed")
    return sum(one.length for one in credited.examples) if batches else 0


def main() -> None:
    parser = argparse.ArgumentParser(description="How long recorded rollouts take to become samples.")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--no-gateway", action="store_true")
    given = parser.parse_args()
    size = given.rollouts, given.calls, given.tokens
    in_memory("plain", Shape(*size))
    in_memory("stream", Shape(*size, stream=True))
    in_memory("broken", Shape(*size, broken=True))
    if not given.no_gateway:
        asyncio.run(through_a_gateway("gateway", Shape(*size)))
        asyncio.run(through_a_gateway("gateway, broken", Shape(*size, broken=True)))


if __name__ == "__main__":
    main()
