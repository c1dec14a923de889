"""The queue in memory, just as the database `queue` has it: a claim must not read the tape, which would let go of the
interpreter and wait for it again, once for every read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from penstock.gateway.model.queue import QueueState


class Waiting:
    """Keys of the queue (`keys.queue_key`) with the names of their rollouts."""

    def __init__(self) -> None:
        self.state: QueueState = "open"
        """Whether work is handed out."""
        self._names: dict[bytes, str] = {}
        self._counts: dict[int, int] = {}
        self._heaps: defaultdict[int, list[bytes]] = defaultdict(list)

    def counts(self) -> dict[int, int]:
        """How many wait, by mode; modes without any may be there with 0."""
        return self._counts.copy()

    def load(self, state: QueueState, stored: Iterable[tuple[bytes, str]]) -> None:
        """Starts anew with what is on the tape."""
        self.state = state
        self._names = dict(stored)
        self._heaps.clear()
        for key in self._names:
            self._heaps[key[0]].append(key)
        self._counts = {mode: len(heap) for mode, heap in self._heaps.items()}
        for heap in self._heaps.values():
            heapify(heap)

    def add(self, key: bytes, name: str) -> None:
        """It waits."""
        if key in self._names:
            return
        # One that was removed and comes back may stand in the heap twice, which does no harm.
        self._names[key] = name
        self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        heappush(self._heaps[key[0]], key)

    def remove(self, key: bytes) -> None:
        """It waits no longer."""
        if self._names.pop(key, None) is not None:
            self._counts[key[0]] -= 1

    def next(self, modes: Iterable[int]) -> tuple[bytes, str] | None:
        """The most urgent of these modes; it stays."""
        heads = [head for mode in modes if (head := self._head(mode)) is not None]
        found = min(heads, key=lambda key: key[1:], default=None)
        return None if found is None else (found, self._names[found])

    def _head(self, mode: int) -> bytes | None:
        heap = self._heaps.get(mode)
        while heap and heap[0] not in self._names:
            heappop(heap)
        return heap[0] if heap else None
