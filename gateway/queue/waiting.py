"""The queue in memory, exactly as the database `queue` has it (a `store.follower`): a claim must not read the tape,
because every read would release the interpreter and wait for it again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import QueueState
from penstock.gateway.queue.results import MODES, queue_key
from penstock.gateway.store import records
from penstock.gateway.store.view import View

_SPARSE: Final = 4
"""How many times as long as needed a heap may become."""


class Waiting:
    """Keys of the queue (`keys.queue_key`) with the names of their rollouts."""

    def __init__(self) -> None:
        self.state: QueueState = "open"
        """Whether work is handed out."""
        self.unclaimed: deque[tuple[str, str]] = deque()
        """Attempts that nobody has claimed and that run since somebody has last looked here, some of them perhaps
        twice."""
        self._names: dict[bytes, str] = {}
        self._counts: dict[int, int] = {}
        self._heaps: defaultdict[int, list[bytes]] = defaultdict(list)

    def counts(self) -> dict[Mode, int]:
        """How many wait, by mode; modes without any are not there."""
        return {MODES[mode]: count for mode, count in self._counts.copy().items() if count}

    def newly_unclaimed(self) -> list[tuple[str, str]]:
        """Attempts that nobody has claimed and that began since the last call; some may come twice."""
        return [self.unclaimed.popleft() for _ in range(len(self.unclaimed))]

    def recall(self, view: View) -> None:
        """Starts anew with what is on the tape."""
        self.state = view.queue_state()
        self._names = {key: name[:-1].decode("ascii") for key, name in view.scan("queue")}
        self._heaps.clear()
        for key in self._names:
            self._heaps[key[0]].append(key)
        self._counts = {mode: len(heap) for mode, heap in self._heaps.items()}
        for heap in self._heaps.values():
            heapify(heap)

    def follow(self, view: View, changes: Sequence[bytes]) -> None:
        """Whoever joins or leaves the queue has a change of its rollout in the log."""
        if any(record.startswith(b"f") for record in changes):
            return self.recall(view)  # where one waited that is gone is only in its record
        self.state = view.queue_state()
        if self._names or view.has("queue", b""):
            for name in {record[1:] for record in changes if record.startswith(b"r")}:
                self._follow(view, name)

    def _follow(self, view: View, rollout: bytes) -> None:
        stored, name = view.get("rollouts", rollout), rollout[:-1].decode("ascii")
        assert stored is not None, name
        key = queue_key(records.rollout_from(name, stored, None)[1])
        if view.get("queue", key) == rollout:
            self.add(key, name)
        elif self._names.get(key) == name:
            self.remove(key)

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
            mode = key[0]
            self._counts[mode] -= 1
            if len(self._heaps[mode]) > _SPARSE * (self._counts[mode] + _SPARSE):
                # Where nobody takes work what was removed is never met.
                self._heaps[mode] = [it for it in self._names if it[0] == mode]
                heapify(self._heaps[mode])

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
