"""What Agent Lightning's store API reads from the tape: rollouts, attempts, spans, resources and workers, in its words.

A list names the number of all that fit, so that it looks at all rollouts unless it names those that it wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from penstock.gateway.api.guard import ApiError
from penstock.gateway.followers.otlp.lightning_spans import answers_of
from penstock.gateway.model.lightning import (
    LATEST,
    AttemptListing,
    Json,
    ResourceListing,
    RolloutListing,
    SpanListing,
    WorkerListing,
    attempt_answer,
    fits,
    listed,
    page_of,
    rollout_answer,
    unpack,
    worker_answer,
)
from penstock.gateway.model.rollout import Rollout, Worker, missing_rollout
from penstock.gateway.model.span import SpanStatus
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.reader import StoreReader
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.work.lightning import attempt_extra, rollout_extra

_AT_ONCE: Final = 256
"""Rollouts whose records are read in one transaction."""
_COUNTED: Final = 100_000
"""Most attempts whose spans are counted for the statistics."""


class LightningReader:
    """Reads a tape in Agent Lightning's words; thread-safe."""

    def __init__(self, tape: StoreReader) -> None:
        self._tape = tape

    # -- rollouts and attempts ---------------------------------------------------------------------------------------

    def rollout(self, name: str) -> Json:
        """A rollout with its newest attempt; raises `ApiError`."""
        with self._tape.view() as view:
            found = view.rollout(name)
            if found is not None:
                return self._attempted(view, found)
            said = missing_rollout(name, lambda other: view.rollout(other) is not None)
        raise ApiError(404, said, "rollout_id", name)

    def ended(self, names: Sequence[str]) -> list[Json]:
        """These rollouts, without attempts; those that are gone are left out."""
        made: list[Json] = []
        for some in _pieces(names):
            with self._tape.view() as view:
                found = [rollout for name in some if (rollout := view.rollout(name)) is not None]
                made += [self._bare(view, rollout) for rollout in found]
        return made

    def rollouts(self, asked: RolloutListing) -> Json:
        """A page of rollouts, each with its newest attempt."""
        test, rows = fits(asked), list[Json]()
        for some in _pieces(self._candidates(asked)):
            with self._tape.view() as view:
                found = (self._bare(view, rollout) for rollout in some)
                # What may be large is read again for those of the page.
                rows += [one | {"input": None, "metadata": None} for one in found if test(one)]
        page = listed(rows, asked)
        page["items"] = [one for name in page["items"] if (one := self._again(name["rollout_id"])) is not None]
        return page

    def _candidates(self, asked: RolloutListing) -> Iterator[Rollout]:
        if asked.rollout_id_in is not None and asked.filter_logic == "and":
            found = {rollout.id: number for number, rollout in self._tape.named(asked.rollout_id_in)}
            by_age = sorted(found, key=found.__getitem__)
            return (rollout for name in by_age if (rollout := self._tape.rollout(name)) is not None)
        return (rollout for _, rollout in self._tape.rollouts_oldest_first())

    def _again(self, name: str) -> Json | None:
        with self._tape.view() as view:
            found = view.rollout(name)
            return None if found is None else self._attempted(view, found)

    def attempts(self, rollout: str, asked: AttemptListing) -> Json:
        """A page of a rollout's attempts."""
        with self._tape.view() as view:
            return listed(self._attempts(view, rollout), asked)

    def latest_attempt(self, rollout: str) -> Json | None:
        """The newest attempt of a rollout; None where there is none."""
        with self._tape.view() as view:
            return next(reversed(self._attempts(view, rollout)), None)

    def _attempts(self, view: TapeView, rollout: str) -> list[Json]:
        kind = keys.LIGHTNING_ATTEMPT
        return [
            attempt_answer(one, attempt_extra(view.get("lightning", kind + keys.attempt_key(rollout, one.id))))
            for one in view.attempts(rollout)
        ]

    def _attempted(self, view: TapeView, rollout: Rollout) -> Json:
        attempt = next(reversed(self._attempts(view, rollout.id)), None)
        return self._bare(view, rollout) | ({} if attempt is None else {"attempt": attempt})

    def _bare(self, view: TapeView, rollout: Rollout) -> Json:
        stored = view.get("lightning", keys.LIGHTNING_ROLLOUT + keys.rollout_key(rollout.id))
        return rollout_answer(rollout, rollout_extra(stored))

    # -- spans -------------------------------------------------------------------------------------------------------

    def spans(self, asked: SpanListing) -> Json:
        """A page of a rollout's spans; an empty one where there is no such rollout or attempt."""
        attempts = [one.id for one in self._tape.attempts(asked.rollout_id)]
        wanted = attempts[-1:] if asked.attempt_id == LATEST else [asked.attempt_id]
        if asked.attempt_id is not None and wanted[0] not in attempts:
            return page_of([], 0, asked)
        found = self._spans(asked.rollout_id, attempts)
        return listed((one for one in found if asked.attempt_id is None or one["attempt_id"] in wanted), asked)

    def _spans(self, rollout: str, attempts: Sequence[str]) -> Iterator[Json]:
        """The spans of a rollout with their numbers: those that came have one, others follow the highest before."""
        number = 0
        for attempt in attempts:
            stored = self._stored(rollout, attempt)
            spans = list(self._tape.spans(rollout, attempt))
            calls = self._tape.exchanges(one for one in spans if one.kind == "llm" and one.status != SpanStatus.OPEN)
            for span in spans:
                if (whole := stored.get(span.sequence)) is not None:
                    number = max(number, whole["sequence_id"])
                    yield whole
                    continue
                number += 1
                if span.status != SpanStatus.OPEN:
                    exchange = next(calls)[1] if span.kind == "llm" else None
                    yield from answers_of(span, number, exchange)

    def _stored(self, rollout: str, attempt: str) -> dict[int, Json]:
        """The spans of an attempt that came from Agent Lightning, whole, by sequence."""
        with self._tape.view() as view:
            origins = view.origins(rollout)
            if origins is None:
                return {}
            prefix = keys.LIGHTNING_SPAN + keys.attempt_record_key(origins.number, attempt)
            return {int.from_bytes(key[-4:]): unpack(value) for key, value in view.scan("lightning", prefix)}

    # -- resources, workers, figures ---------------------------------------------------------------------------------

    def resource(self, name: str) -> Json | None:
        """Resources by their id; None where there are none."""
        return self._one(keys.LIGHTNING_RESOURCES + name.encode())

    def latest_resources(self) -> Json | None:
        """The newest resources; None where there are none."""
        with self._tape.view() as view:
            name = view.get("lightning", keys.LIGHTNING_LATEST)
            found = None if name is None else view.get("lightning", keys.LIGHTNING_RESOURCES + name)
        return None if found is None else unpack(found)

    def resources(self, asked: ResourceListing) -> Json:
        """A page of resources, each in its newest version."""
        return listed(sorted(self._all(keys.LIGHTNING_RESOURCES), key=lambda one: one["create_time"]), asked)

    def worker(self, name: str) -> Json | None:
        """A worker; None where there is none."""
        found = self._one(keys.LIGHTNING_WORKER + name.encode())
        if found is not None:
            return found
        with self._tape.view() as view:
            own = view.get("workers", name.encode())
        return None if own is None else worker_answer(Worker.model_validate_json(own))

    def workers(self, asked: WorkerListing) -> Json:
        """A page of workers, also of the gateway's own."""
        theirs = self._all(keys.LIGHTNING_WORKER)
        known = {one["worker_id"] for one in theirs}
        own = (Worker.model_validate_json(record) for _, record in self._tape.records("workers"))
        return listed([*theirs, *(worker_answer(one) for one in own if one.id not in known)], asked)

    def statistics(self, uptime_ns: int) -> Json:
        """Numbers of what is on the tape."""
        with self._tape.view() as view:
            attempts = view.count("attempts")
        rollouts = sum(1 for _ in self._tape.numbers())
        found: Json = {"name": "PenstockStore", "total_rollouts": rollouts, "total_attempts": attempts}
        if attempts <= _COUNTED:
            each = (self._tape.attempts(rollout.id) for _, rollout in self._tape.rollouts_oldest_first())
            found["total_spans"] = sum(attempt.spans for some in each for attempt in some)
        found["total_resources"] = len(self._all(keys.LIGHTNING_RESOURCES))
        return found | {"total_workers": len(self._all(keys.LIGHTNING_WORKER)), "uptime": uptime_ns / 1e9}

    def _one(self, key: bytes) -> Any:
        with self._tape.view() as view:
            found = view.get("lightning", key)
        return None if found is None else unpack(found)

    def _all(self, kind: bytes) -> list[Json]:
        with self._tape.view() as view:
            return [unpack(value) for _, value in view.scan("lightning", kind)]


def _pieces(found: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(found)
    while some := list(islice(rest, _AT_ONCE)):
        yield some
