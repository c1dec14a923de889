"""Makes the tape for `bench.questions`: rollouts of real trajectories, varied, with every field that filters can name.

Each rollout is one of the trajectories of `../shared/data` with numbers and an eighth of the words replaced, so that
texts neither repeat nor become noise. 128 rollouts run at once. Agents, models, tenants, durations, failures, versions,
arms and rewards are drawn; the same number of calls gives the same tape.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from bench.store import START_NS, answered
from bench.trajectories import DATA, calls_of
from penstock.gateway.app import open_store
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import AttemptStatus, Judgement, Outcome
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.work.operations import QueueOperations

AT_ONCE: Final = 128
"""Rollouts that run at the same time; a commit has a call of each."""
AGENTS, MODELS = ("planner", "critic", "booker", "refunds"), ("gpt-4o", "gpt-4o-mini", "claude-sonnet-4", "qwen3-8b")
MODES: Final[tuple[Mode, ...]] = ("train", "train", "val", "online")
VERSIONS: Final = {"stable": "v1", "candidate": "v2"}
TENANTS: Final = 40
NEEDLE: Final = "needle-777 timeout"
"""Words in one call of every 20,000."""
_VARIED: Final = re.compile(r"\b(?:[a-z]{5,}|[0-9]{2,})\b")
_WORDS: Final = 0.12
_LITERAL: Final = frozenset({"false"})


def make(path: Path, calls: int) -> tuple[int, int]:
    """Write a tape of at least so many calls; return (calls, rollouts)."""
    rng, number, made = random.Random(18), 0, 0
    with gzip.open(DATA) as lines:
        told: list[str] = [json.dumps(json.loads(line)["messages"], ensure_ascii=False) for line in lines]
    with open_store(path) as store:
        while made < calls:
            batch = [_Rollout(number + at, rng.choice(told), rng) for at in range(AT_ONCE)]
            number += AT_ONCE
            made += sum(len(one.calls) for one in batch)
            _run(store, batch)
    return made, number


class _Rollout:
    """A rollout with random properties, and its calls."""

    def __init__(self, number: int, messages: str, rng: random.Random) -> None:
        self.name = f"flight-{number}"
        self.began = START_NS + number * 400_000_000
        self.failed = rng.random() < 0.04
        self.reward = None if rng.random() < 0.03 else float(rng.random() < (0.2 if self.failed else 0.7))
        tenant = rng.randrange(TENANTS)
        metadata = {"tenant": f"tenant-{tenant}", "customer": {"plan": rng.choice(["free", "team", "scale"])}}
        mode = rng.choice(MODES)
        self.spec = RolloutSpec(
            input={"question": number % 50}, mode=mode, group=f"task-{number % 5000}", metadata=metadata
        )
        self.calls = list(self._calls(json.loads(messages), rng))

    def _calls(self, messages: list[Any], rng: random.Random) -> Iterator[SpanEntry]:
        name, model, arm = rng.choice(AGENTS), rng.choice(MODELS), rng.choice(["stable"] * 9 + ["candidate"])
        swapped: dict[str, str] = {}
        for message in messages:
            _vary(message, swapped, rng)
        at, asked = self.began, list(calls_of(messages))
        for place, (request, message) in enumerate(asked):
            said = dict(message)
            if rng.random() < 1 / 20_000:
                said["content"] = f"{said.get('content') or ''} {NEEDLE}"
            one = answered(self.name, request, said, rng)
            took = int(rng.lognormvariate(0.2, 0.8) * 1e9)
            broken = self.failed and place == len(asked) - 1
            yield replace(
                one, attempt="a1", agent=name, model=model, model_served=model, start_ns=at, end_ns=at + took,
                first_byte_ns=took // 4, versions={"travel": VERSIONS[arm]}, arm=f"travel-1:{arm}",
                status="error" if broken else "ok", http_status=rng.choice([429, 500]) if broken else 200,
                error="http_429" if broken else None, tool_calls=len(message.get("tool_calls") or ()),
            )  # fmt: skip
            at += took + 20_000_000


def _vary(message: dict[str, Any], swapped: dict[str, str], rng: random.Random) -> None:
    """Replace numbers and some words of a message, each by the same one in the whole rollout."""

    def other(found: re.Match[str]) -> str:
        word = found[0]
        if word not in swapped:
            letters = "0123456789" if word.isdigit() else "etaoinshrdlu"
            kept = word in _LITERAL or not (word.isdigit() or rng.random() < _WORDS)
            swapped[word] = word if kept else word[0] + "".join(rng.choices(letters, k=len(word) - 1))
        return swapped[word]

    if isinstance(message.get("content"), str):
        message["content"] = _VARIED.sub(other, message["content"])
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = _VARIED.sub(other, call["function"]["arguments"])


def _run(store: Store, batch: list[_Rollout]) -> None:
    """Hand out the rollouts, write a call of each in turn, and end them."""

    def begin(transaction: Transaction) -> None:
        queue = QueueOperations(transaction)
        for one in batch:
            _ = queue.hand_out(one.name, one.spec, f"worker-{one.began % 7}", 10**18, one.began)

    def end(transaction: Transaction) -> None:
        queue = QueueOperations(transaction)
        for one in batch:
            status = AttemptStatus.FAILED if one.failed else AttemptStatus.SUCCEEDED
            given: list[tuple[Judgement, bool]] = []
            if one.reward is not None:
                given.append((Judgement(value=one.reward, source="rule"), True))
            last = one.calls[-1].end_ns if one.calls else None
            _ = queue.finish((one.name, "a1"), None, status, Outcome(), given, last or one.began)

    _ = store.write([QueuedOperation(begin)])
    for turn in range(max(len(one.calls) for one in batch)):
        _ = store.write([one.calls[turn] for one in batch if turn < len(one.calls)])
    _ = store.write([QueuedOperation(end)])
