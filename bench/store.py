"""Measures the tape: bytes on disk, CPU per call, time to read back. `python -m bench.store`.

*Bytes* are those of real agent trajectories (`../shared/data`, where it exists): replayed through a running gateway,
and written straight into a tape, one call to a commit, which is the dearest; answers carry ids and headers as a
provider's do. *Raw* are the bytes on the wire: bodies and headers. *On disk* is the whole file, free pages included.
*CPU* is process time; *spans a second* is wall time with an fsync for every batch.

Figures are printed beside their targets and written to bench/out/store.json; a missed target is marked, not hidden.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

from bench import corpus, replay, trajectories
from bench.trajectories import Agent, response_id, wire_answer
from penstock.gateway.app import open_store
from penstock.gateway.model.span import Usage
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry

HERE = Path(__file__).parent
OUT = HERE / "out" / "store.json"
URL = "https://api.openai.com/v1/chat/completions"
BATCH = 128
MILLION = 1_000_000
PAGE = 100
TRIES = 300
START_NS = 1_763_700_000_000_000_000

REQUEST_HEADERS = (
    b"host: 127.0.0.1:4747\r\naccept-encoding: gzip, deflate\r\nconnection: keep-alive\r\naccept: application/json\r\n"
    b"content-type: application/json\r\nuser-agent: OpenAI/Python 3.52.0\r\nx-stainless-lang: python\r\n"
    b"x-stainless-package-version: 3.52.0\r\nx-stainless-os: Linux\r\nx-stainless-arch: x64\r\n"
    b"x-stainless-runtime: CPython\r\nx-stainless-runtime-version: 3.11.9\r\nauthorization: ***\r\n"
    b"x-stainless-async: false\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\ncontent-length: %d\r\n"
)
RESPONSE_HEADERS = (
    b"date: Sat, 21 Nov 2026 07:%02d:%02d GMT\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"openai-processing-ms: %d\r\nx-request-id: req_%s\r\n"
)


@dataclass(slots=True)
class Figure:
    """A line of the report, with its target."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without one."""
        if self.at_most is None and self.at_least is None:
            return None
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    def __str__(self) -> str:
        bound = f"<= {self.at_most:,g}" if self.at_most is not None else f">= {self.at_least or 0:,g}"
        target = "" if self.met is None else f"   target {bound}{'' if self.met else '   MISSED'}"
        return f"{self.name:<58}{self.value:>12,.2f} {self.unit}{target}"


# -- calls -----------------------------------------------------------------------------------------------------------


def recorded(agents: list[Agent]) -> list[list[SpanEntry]]:
    """Return the calls of each agent as the recorder hands them over."""
    rng = random.Random(5)
    return [[answered(f"tau-{number}", *call, rng) for call in agent] for number, agent in enumerate(agents)]


def answered(rollout: str, request: bytes, message: Any, rng: random.Random) -> SpanEntry:
    """Return a call and its answer, with random ids like a provider's."""
    name = response_id(rng)
    usage = Usage(input_tokens=len(request) // 4, output_tokens=rng.randrange(20, 400), cached_tokens=0)
    response, took = wire_answer(request, message, name, rng), rng.randrange(300_000, 4_000_000)
    clock = rng.randrange(60), rng.randrange(60)
    headers = RESPONSE_HEADERS % (*clock, len(response), took // 1000, rng.randbytes(12).hex().encode())
    body = StoredBody(URL, REQUEST_HEADERS % len(request), request, headers, response, b"", [took, len(response)])
    return entry(rollout, body, name, usage, START_NS + rng.randrange(10**15), took)


def entry(rollout: str, body: StoredBody, name: str, usage: Usage, start_ns: int, took_us: int) -> SpanEntry:
    """Return a finished call as the recorder makes it."""
    return SpanEntry(
        rollout,
        "a1",
        status="ok",
        start_ns=start_ns,
        end_ns=start_ns + took_us * 1000 + 81_234,
        first_byte_ns=took_us * 1000 + 417,
        dialect="chat",
        path="/v1/chat/completions",
        upstream="openai",
        http_status=200,
        model="gpt-4o",
        model_served="gpt-4o-2024-08-06",
        finish="stop",
        response_id=name,
        usage=usage,
        choices=1,
        request_bytes=len(body.request),
        response_bytes=len(body.response),
        body=body,
    )


def short_calls(count: int) -> list[SpanEntry]:
    """Return single questions of about 1 KB, six to a rollout."""
    rng = random.Random(6)
    text = "\n".join(corpus.paragraphs())
    made: list[SpanEntry] = []
    for number in range(count):
        at = rng.randrange(len(text) - 2000)
        asked = {"messages": [{"role": "user", "content": text[at : at + 900]}], "model": "gpt-4o"}
        answer = {"role": "assistant", "content": text[at + 900 : at + 1200]}
        made.append(answered(f"q-{number // 6}", json.dumps(asked).encode(), answer, rng))
    return made


def raw_bytes(calls: Iterable[SpanEntry]) -> int:
    """Return the bytes on the wire."""
    bodies = [call.body for call in calls if call.body is not None]
    return sum(len(b.request) + len(b.response) + len(b.request_headers) + len(b.response_headers) for b in bodies)


def in_turn(agents: list[list[SpanEntry]]) -> list[SpanEntry]:
    """Return the calls of all agents interleaved: the first call of each, then the second of each."""
    longest = max(map(len, agents))
    return [calls[turn] for turn in range(longest) for calls in agents if turn < len(calls)]


# -- measurements ----------------------------------------------------------------------------------------------------


def measure_replays(agents: list[Agent]) -> Iterator[Figure]:
    """Replay through a gateway, with instant and with delayed answers."""
    for name, seconds in (("at once", 0.0), ("after 0.1 s", 0.1), ("after 0.4 s", 0.4)):
        raw, used = asyncio.run(replay.replay(agents, seconds))
        yield Figure(f"trajectories through a gateway, answers {name}: of raw", 100 * used / raw, "%", at_most=5)


def measure_bytes(agents: list[list[SpanEntry]]) -> Iterator[Figure]:
    """Write one call to a commit, with and without an announcement while it ran."""
    calls = in_turn(agents)
    raw = raw_bytes(calls)
    bodies = sum(call.request_bytes + call.response_bytes for call in calls)
    yield Figure("trajectories: raw", raw / len(calls), "bytes/call")
    for announced in (False, True):
        forget(calls)
        with tempfile.TemporaryDirectory() as folder, open_store(Path(folder), map_bytes=1 << 20) as store:
            cpu = sum(write_alone(store, call, announced) for call in calls)
            used, how = store.figures()["used_bytes"], "announced, " if announced else ""
            yield Figure(f"trajectories, {how}one call a commit: on disk", used / len(calls), "bytes/call")
            yield Figure(f"trajectories, {how}one call a commit: of raw", 100 * used / raw, "%", at_most=5)
            yield Figure(f"trajectories, {how}one call a commit: of bodies", 100 * used / bodies, "%")
            yield Figure(f"trajectories, {how}one call a commit: CPU", cpu / len(calls) * 1e6, "us/call")
            yield Figure(f"trajectories, {how}one call a commit: worst read", worst_read(store, calls), "ms", at_most=5)


def write_alone(store: Store, call: SpanEntry, announced: bool) -> float:
    """Write one call; return seconds of CPU."""
    began = time.process_time()
    if announced:
        answer, call.status = call.body, "open"
        call.body = (
            None
            if answer is None
            else StoredBody(answer.url, answer.request_headers, answer.request, b"", b"", b"", [])
        )
        store.write([call])
        call.body, call.status = answer, "ok"
    store.write([call])
    return time.process_time() - began


def forget(calls: list[SpanEntry]) -> None:
    """Reset the calls so that they can be written to another tape."""
    for call in calls:
        call.sequence = 0


def worst_read(store: Store, calls: list[SpanEntry]) -> float:
    """Return milliseconds that the slowest call took to read back, the better of two tries; asserts that it is
    unchanged."""
    return max(min(read_back(store, call), read_back(store, call)) for call in calls) * 1000


def read_back(store: Store, call: SpanEntry) -> float:
    began = time.perf_counter()
    span = store.span(call.rollout, call.attempt, call.sequence)
    exchange = None if span is None else store.exchange(span)
    took = time.perf_counter() - began
    assert exchange is not None
    assert call.body is not None
    assert (exchange.request_body, exchange.response_body) == (call.body.request, call.body.response)
    return took


def measure_batches(name: str, calls: list[SpanEntry]) -> Iterator[Figure]:
    """Write many calls to a commit; times are the best of three, because others use the machine too."""
    walls, cpus = zip(*(write_batches(calls) for _ in range(3)), strict=True)
    yield Figure(f"{name}, {BATCH} a commit: CPU", min(cpus) / len(calls) * 1e6, "us/call", at_most=20)
    yield Figure(f"{name}, {BATCH} a commit: durable spans", len(calls) / min(walls), "/s", at_least=10_000)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        write_to(store, calls)
        used = store.figures()["used_bytes"]
        yield Figure(f"{name}, {BATCH} a commit: of raw", 100 * used / raw_bytes(calls), "%")
        yield Figure(f"{name}, {BATCH} a commit: worst read", worst_read(store, calls), "ms", at_most=5)


def measure_bookkeeping(calls: list[SpanEntry]) -> Iterator[Figure]:
    """Measure rollouts of one call, body and all: with random names, which leave pages half full, and with the
    gateway's own, which grow."""
    rng = random.Random(8)
    names = {
        "random names": [str(UUID(bytes=rng.randbytes(16), version=4)) for _ in calls],
        "names that grow": [f"i-{at * 977:011x}-{rng.randbytes(4).hex()}" for at in range(len(calls))],
    }
    for kind, each in names.items():
        with tempfile.TemporaryDirectory() as folder, open_store(Path(folder), map_bytes=1 << 20) as store:
            write_to(store, [replace(call, rollout=name) for call, name in zip(calls, each, strict=True)])
            yield Figure(f"rollouts of one call, {kind}: on disk", store.figures()["used_bytes"] / len(calls), "bytes")


def write_batches(calls: list[SpanEntry]) -> tuple[float, float]:
    """Write all calls to a new tape; return seconds of wall time and of CPU."""
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        wall, cpu = time.perf_counter(), time.process_time()
        write_to(store, calls)
        return time.perf_counter() - wall, time.process_time() - cpu


def write_to(store: Store, calls: list[SpanEntry]) -> None:
    forget(calls)
    for at in range(0, len(calls), BATCH):
        store.write(calls[at : at + BATCH])


def measure_million() -> Iterator[Figure]:
    """Read pages of summaries out of a million spans of 2000 rollouts."""
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        [model] = short_calls(1)
        began = time.perf_counter()
        for start in range(0, MILLION, 250):
            store.write([copy_of(model, number) for number in range(start, start + 250)])
        yield Figure("a million summaries: written", MILLION / (time.perf_counter() - began), "/s", at_least=10_000)
        yield Figure("a million summaries: on disk", store.figures()["used_bytes"] / MILLION, "bytes/summary")
        rng, newest = random.Random(7), store.cursor()

        def recent() -> int:
            return len(list(islice(store.recent(rng.randrange(1000, newest)), PAGE)))

        def of_a_rollout() -> int:
            return len(list(islice(store.spans(f"m-{rng.randrange(2000)}", after=("a1", rng.randrange(300))), PAGE)))

        def changes() -> int:
            return len(store.changes(rng.randrange(newest - 1000), PAGE)[0])

        for name, page in (("recent", recent), ("of a rollout", of_a_rollout), ("changes", changes)):
            times = [timed(page) for _ in range(TRIES)]
            yield Figure(
                f"a million summaries, a page of 100 {name}: median", statistics.median(times), "ms", at_most=5
            )
            yield Figure(
                f"a million summaries, a page of 100 {name}: 99 %", statistics.quantiles(times, n=100)[98], "ms"
            )


def copy_of(model: SpanEntry, number: int) -> SpanEntry:
    """Return a head without a body."""
    made = SpanEntry(f"m-{number % 2000}", "a1", status="ok", start_ns=model.start_ns + number, end_ns=model.end_ns)
    made.dialect, made.path, made.model, made.upstream = model.dialect, model.path, model.model, model.upstream
    made.usage, made.response_id, made.http_status = model.usage, f"chatcmpl-{number:029}", 200
    made.request_bytes, made.response_bytes, made.first_byte_ns = 900, 300, model.first_byte_ns
    return made


def timed(page: Callable[[], int]) -> float:
    """Return milliseconds of one page; it must be full."""
    began = time.perf_counter()
    found = page()
    took = time.perf_counter() - began
    assert found == PAGE
    return took * 1000


def figures() -> Iterator[Figure]:
    """Yield all figures, as they are measured."""
    if trajectories.DATA.exists():
        made = trajectories.agents()
        yield from measure_replays(made)
        agents = recorded(made)
        yield from measure_bytes(agents)
        yield from measure_batches("trajectories", in_turn(agents))
    else:
        print("no trajectories at ../shared/data: the figures on real traffic are left out")
    yield from measure_batches("short chats", short_calls(60 * BATCH))
    yield from measure_bookkeeping(short_calls(24 * BATCH))
    yield from measure_million()


def report(figures: Iterable[Figure], out: Path) -> None:
    """Print figures as they are measured, and write them."""
    found: list[Figure] = []
    for figure in figures:
        print(figure, flush=True)
        found.append(figure)
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps([asdict(figure) | {"met": figure.met} for figure in found], indent=1) + "\n")
    missed = sum(figure.met is False for figure in found)
    print(f"\n{missed} targets missed; written to {out.relative_to(HERE.parent)}")


if __name__ == "__main__":
    report(figures(), OUT)
