"""python -m bench.hiding: what it costs to keep secrets off the tape. The best of five, microseconds of CPU.

A body without a key is searched for some, as the recorder's thread does with every body; beside it, the cost of
packing the same body for the tape when it continues an earlier one. Then the header lines of a call: lines that were
seen before, and with three that differ from call to call.
"""

from __future__ import annotations

import json
import random
import time
import timeit
from collections.abc import Callable

from bench import corpus
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.tape.store.codec import StoredBody, pack_body
from penstock.gateway.wire.http.redaction import Redactor

REPEATS = 5
SIZES = {"1 KB": 1_000, "100 KB": 100_000, "10 MB": 10_000_000}
COUNTS = (0, 1, 3, 10)
_HEADERS = [(b"X-Stainless-Header-%d" % number, b"value of a header %d" % number) for number in range(20)]


def microseconds(do: Callable[[], object], number: int) -> float:
    """Return the time of one run, the best of several."""
    return min(timeit.repeat(do, timer=time.thread_time, number=number, repeat=REPEATS)) / number * 1e6


def keys(rng: random.Random, count: int) -> list[bytes]:
    """Return keys as providers make them."""
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return [b"sk-proj-" + bytes(rng.choices(letters, k=48)) for _ in range(count)]


def body(rng: random.Random, size: int) -> bytes:
    """Return a conversation of about this size."""
    prose, messages, made = corpus.paragraphs(), list[dict[str, str]](), 0
    while made < size:
        text = rng.choice(prose)
        messages.append({"role": "user", "content": text})
        made += len(text) + 30
    return json.dumps({"model": "m", "messages": messages}).encode()[:size]


def _asking(request: bytes) -> StoredBody:
    return StoredBody("", b"", request, b"", b"", b"", [])


def bodies(rng: random.Random) -> None:
    """Print a line for each size."""
    print(f"{'body':>8}{'packing':>12}" + "".join(f"{f'{count} keys':>20}" for count in COUNTS))
    for name, size in SIZES.items():
        made, number = body(rng, size), max(1, 2_000_000 // size)
        _, base = pack_body(_asking(made[: -size // 20]), 1, None, True)
        packed = microseconds(
            lambda made=made, base=base: pack_body(_asking(made), 2, base, True), max(1, number // 10)
        )
        line = f"{name:>8}{packed:>12.1f}"
        for count in COUNTS:
            secrets = Secrets(keys(rng, count))
            taken = microseconds(lambda secrets=secrets, made=made: secrets.hide(made), number)
            line += f"{taken:>11.1f} ({taken / packed:>5.1%})"
        print(line)


def headers() -> None:
    """Print a line for header lines that were seen before, and one with three new ones."""
    redactor, numbers = Redactor(), iter(range(10**9))
    print(f"{len(_HEADERS)} header lines, seen before: {microseconds(lambda: redactor.block(_HEADERS), 1000):.1f}")

    def changing() -> bytes:
        number = next(numbers)
        return redactor.block([*_HEADERS, *((b"X-Request-Id-%d" % at, b"req_%032x" % number) for at in range(3))])

    print(f"and three new ones: {microseconds(changing, 1000):.1f}")


if __name__ == "__main__":
    bodies(random.Random(7))
    headers()
