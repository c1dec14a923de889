"""Cuts the change feed into export requests of a bounded size. `selection` chooses the spans of a change that are sent.

A request ends at a number of spans or at a size, whichever comes first, so memory is bounded whatever the tape holds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

from penstock.gateway.config import OtlpSettings
from penstock.gateway.followers.otlp import request_builder
from penstock.gateway.followers.otlp.collector_client import DEFAULT_LIMITS
from penstock.gateway.followers.otlp.export_request import ExportRequest
from penstock.gateway.followers.otlp.selection import ExportItem, SpanSelector
from penstock.gateway.model.change import Change
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.rollout import Attempt
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.damage import is_damage, unless_damaged
from penstock.gateway.tape.store.directory import TapeError

LARGEST_REQUEST = 4 << 20
"""Bytes after which a request is sent, before compression."""
_log = logging.getLogger("penstock.otlp")


class ExportBatch(NamedTuple):
    """A piece of the feed, ready to be sent."""

    body: bytes
    """The request, gzip; empty when there is nothing to send."""
    spans: int
    after: int
    """The cursor after the piece."""
    full: bool
    """True if there may be more to send at once."""


class BatchReader:
    """Turns pieces of the feed into requests; for one thread at a time."""

    def __init__(
        self,
        tape: Store,
        settings: OtlpSettings,
        servers: Mapping[str, str],
        metrics: Metrics,
        now_ns: Callable[[], int],
        batch: int = DEFAULT_LIMITS.batch,
    ) -> None:
        """`batch`: most spans in one request."""
        self._tape = tape
        self._batch = batch
        self._selection = SpanSelector(tape, settings.wait, now_ns)
        self._maker = request_builder.RequestBuilder(tape, settings, servers)
        self._metrics = metrics
        self._changes: deque[Change] = deque()
        self._going: Iterator[ExportItem] | None = None
        """The rest of the first change's spans, where a request was full before its end."""
        self._at = self._end = 0
        """The cursor at the end of the last piece, and at the end of the changes that were read."""
        self._more = False
        """True if the feed has more changes after those."""

    def read(self, since: int, patient: bool = True) -> ExportBatch:
        """The changes after a cursor, as one request. `patient`: calls may wait for their agents' spans."""
        if since != self._at:
            self._forget()
        try:
            return self._read(since, patient)
        except TapeError:
            self._forget()
            raise

    def _forget(self) -> None:
        self._changes.clear()
        self._going = None

    def _read(self, since: int, patient: bool) -> ExportBatch:
        request = self._maker.request()
        if not self._changes:
            found, self._end = self._tape.changes(since, self._batch)
            self._more = self._end - since >= self._batch
            self._changes.extend(found)
        self._selection.refresh(self._changes, self._going is not None)
        while self._changes:
            change = self._changes[0]
            if patient and unless_damaged(partial(self._selection.must_wait, change)):
                return self._piece(request, change.cursor - 1, False)
            if not self._add(request, change):
                return self._piece(request, change.cursor - 1, True)
            self._changes.popleft()
        return self._piece(request, self._end, self._more)

    def _piece(self, request: ExportRequest, after: int, full: bool) -> ExportBatch:
        self._at = after
        return ExportBatch(request.packed(), request.spans, after, full)

    def _add(self, request: ExportRequest, change: Change) -> bool:
        """Add the spans of a change to a request; False when the request is full before all are added."""
        going = self._going or self._selection.select(change)
        while (following := self._next(going, change)) is not None:
            if request.size >= LARGEST_REQUEST or request.spans >= self._batch:
                self._going = chain((following,), going)
                return False
            self._make(request, following, change)
        self._going = None
        return True

    def _next(self, going: Iterator[ExportItem], change: Change) -> ExportItem | None:
        with self._isolated(change):
            return next(going, None)
        return None

    def _make(self, request: ExportRequest, following: ExportItem, change: Change) -> None:
        with self._isolated(change):
            if isinstance(following, Attempt):
                self._maker.add_root(request, following)
            else:
                self._maker.add(request, *following)

    @contextmanager
    def _isolated(self, change: Change) -> Generator[None]:
        """Skip one span that cannot be sent, so that it does not hold back all that follow."""
        try:
            yield
        except Exception as error:
            damaged = isinstance(error, TapeError)
            if damaged and not is_damage(error):
                raise
            _log.error("change %d cannot be exported", change.cursor, exc_info=None if damaged else error)
            self._metrics.otlp_dropped += 1
