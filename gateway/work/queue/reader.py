"""Reads the queue: waiting rollouts, running attempts, and workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import QueueStatus
from penstock.gateway.model.rollout import Worker
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.work.queue.results import MODES


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
