"""Reads the queue: waiting rollouts, running attempts, and workers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import QueueState, QueueStatus
from penstock.gateway.model.rollout import Worker
from penstock.gateway.tape.store import keys, records
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.work.queue.results import MODES, queue_key


class QueueReader:
    """Reads the queue of a tape."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    def live(self) -> list[tuple[str, str]]:
        """(rollout, attempt) of attempts that were claimed and have not ended."""
        return [keys.split_attempt_key(key) for key, _ in self._tape.records("live")]

    def unclaimed(self, at_once: int) -> Iterator[list[tuple[str, str]]]:
        """(rollout, attempt) of running attempts that nobody has claimed, in lists of at most `at_once`. Reads all of
        them: for a start."""
        places = (key for key, _ in self._tape.records("unclaimed"))
        while piece := list(islice(places, at_once)):
            with self._tape.view() as view:
                # Some may have ended, or been removed, by now.
                left = [key for key in piece if view.get("unclaimed", key) is not None]
                names = [(view.name(keys.to_number(key)), keys.attempt_of_record_key(key)) for key in left]
            yield names

    def queue(self) -> QueueStatus:
        """The state and the length of the queue, by mode. Walks through the queue: for people and scrapes, not for
        claims."""
        with self._tape.view() as view:
            state, claimed = view.queue_state(), view.count("live")
        waiting: dict[Mode, int] = {}
        oldest: tuple[int, str] | None = None
        for key, name in self._tape.records("queue"):
            mode = MODES[key[0]]
            waiting[mode] = waiting.get(mode, 0) + 1
            made = keys.to_number(key[-8:]), name[:-1].decode("ascii")
            oldest = made if oldest is None else min(oldest, made)
        found = None if oldest is None else self._tape.rollout(oldest[1])
        return QueueStatus(
            state=state, waiting=waiting, claimed=claimed, oldest_ns=None if found is None else found.created_ns
        )

    def workers(self) -> list[Worker]:
        """All workers that are remembered, by name."""
        return [Worker.model_validate_json(record) for _, record in self._tape.records("workers")]


# The queue in memory, equal to the database `queue` (a `store.follower`): a claim must not read the tape, because
# every read would release the interpreter and wait for it again.

_SPARSE: Final = 4
"""A heap may be this many times as long as needed."""


class MemoryQueue:
    """Keys of the queue (`keys.queue_key`) with the names of their rollouts."""

    def __init__(self) -> None:
        self.state: QueueState = "open"
        self.unclaimed: deque[tuple[str, str]] = deque()
        """Unclaimed attempts that have begun since the last call of `newly_unclaimed`; some may be there twice."""
        self._names: dict[bytes, str] = {}
        self._counts: dict[int, int] = {}
        self._heaps: defaultdict[int, list[bytes]] = defaultdict(list)

    def counts(self) -> dict[Mode, int]:
        """Number of waiting rollouts by mode; modes without any are left out."""
        return {MODES[mode]: count for mode, count in self._counts.copy().items() if count}

    def newly_unclaimed(self) -> list[tuple[str, str]]:
        """Attempts that nobody has claimed and that began since the last call; some may come twice."""
        return [self.unclaimed.popleft() for _ in range(len(self.unclaimed))]

    def recall(self, view: TapeView) -> None:
        """Start anew from the tape."""
        self.state = view.queue_state()
        self._names = {key: name[:-1].decode("ascii") for key, name in view.scan("queue")}
        self._heaps.clear()
        for key in self._names:
            self._heaps[key[0]].append(key)
        self._counts = {mode: len(heap) for mode, heap in self._heaps.items()}
        for heap in self._heaps.values():
            heapify(heap)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Apply changes: a rollout that joins or leaves the queue has a change in the log."""
        if any(record.startswith(b"f") for record in changes):
            return self.recall(view)  # The place of a rollout that is gone is only in its record.
        self.state = view.queue_state()
        if self._names or view.has("queue", b""):
            for name in {record[1:] for record in changes if record.startswith(b"r")}:
                self._follow(view, name)

    def _follow(self, view: TapeView, rollout: bytes) -> None:
        stored, name = view.get("rollouts", rollout), rollout[:-1].decode("ascii")
        assert stored is not None, name
        key = queue_key(records.rollout_from(name, stored, None)[1])
        if view.get("queue", key) == rollout:
            self.add(key, name)
        elif self._names.get(key) == name:
            self.remove(key)

    def add(self, key: bytes, name: str) -> None:
        """Add a waiting rollout under its key."""
        if key in self._names:
            return
        # A key that was removed and comes back may be in the heap twice, which does no harm.
        self._names[key] = name
        self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        heappush(self._heaps[key[0]], key)

    def remove(self, key: bytes) -> None:
        """Remove the rollout under a key."""
        if self._names.pop(key, None) is not None:
            mode = key[0]
            self._counts[mode] -= 1
            if len(self._heaps[mode]) > _SPARSE * (self._counts[mode] + _SPARSE):
                # Where nobody claims work, removed keys are never popped.
                self._heaps[mode] = [it for it in self._names if it[0] == mode]
                heapify(self._heaps[mode])

    def next(self, modes: Iterable[int]) -> tuple[bytes, str] | None:
        """The most urgent rollout of these modes, as (key, name); it stays in the queue. None if none waits."""
        heads = [head for mode in modes if (head := self._head(mode)) is not None]
        found = min(heads, key=lambda key: key[1:], default=None)
        return None if found is None else (found, self._names[found])

    def _head(self, mode: int) -> bytes | None:
        heap = self._heaps.get(mode)
        while heap and heap[0] not in self._names:
            heappop(heap)
        return heap[0] if heap else None
