"""Requests to a collector: sent until they are accepted or refused for good.

Answers are handled as the OTLP specification says ("Retryable Response Codes", "OTLP/HTTP Throttling"). After 429, 502,
503, 504 or no answer at all the request is sent again, after `Retry-After` or after pauses that grow and vary. After
any other answer that is no success it is dropped and counted. One request is under way at a time: the tape is the
buffer.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import aiohttp
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.times import Backoff
from penstock.gateway.wire.http.retry_after import retry_after

RETRYABLE = frozenset({429, 502, 503, 504})
PAUSES: Final = Backoff(0.5, 30.0)
LONGEST_WAIT_S: Final = 300.0
"""Longest pause that a collector may ask for."""
LARGEST_ANSWER = 4 << 20

_HEADERS = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
_log = logging.getLogger("penstock.otlp")


class ExportLimits(NamedTuple):
    """The size of requests, and the time for an answer."""

    batch: int = 512
    """Most spans in one request: as many as SDKs send at most, so that every collector takes it."""
    timeout: float = 10.0
    """Seconds after which a request that was not answered is sent again: the OTLP specification's."""


DEFAULT_LIMITS = ExportLimits()


class CollectorClient:
    """A connection to one collector. `open` before use, `close` after."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, metrics: Metrics) -> None:
        self.failing = False
        """True while the collector accepts nothing."""
        self._url = url
        self._headers = {**headers, **_HEADERS}
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Create the client; on the event loop."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, body: bytes, spans: int, before_pause: Callable[[], None]) -> None:
        """Send a request (gzip); returns when it was accepted, or dropped for good. Cancel it to give up."""
        failures = 0
        while (wait := await self._try(body, spans)) is not None:
            before_pause()
            failures += 1
            # A collector that comes back must not get all its clients at once.
            await asyncio.sleep(wait or PAUSES.after(failures, random.uniform(0.5, 1.5)))
            self._metrics.otlp_retries += 1

    async def _try(self, body: bytes, spans: int) -> float | None:
        """Send once. Returns None when the request is done, else the seconds that the collector asks to wait, 0 when it
        gives none."""
        assert self._session is not None, "open() comes first"
        try:
            async with self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False) as answer:
                if answer.status in RETRYABLE:
                    self._fails(f"{answer.status} {answer.reason}")
                    return retry_after(answer.headers.get("Retry-After"), LONGEST_WAIT_S) or 0.0
                told = bytearray()
                while len(told) < LARGEST_ANSWER and (piece := await answer.content.read(LARGEST_ANSWER)):
                    told += piece
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            # ValueError: an invalid host name (UnicodeError).
            self._fails(str(error) or type(error).__name__)
            return 0.0
        self._settle(answer.status, bytes(told), spans)
        return None

    def _settle(self, status: int, told: bytes, spans: int) -> None:
        if self.failing:
            _log.info("%s takes spans again", self._url)
        self.failing = False
        if not 200 <= status < 300:
            # The collector's message is not shown: it may repeat the headers that were sent.
            _log.error("%s refused %d spans for good with %d: they are dropped", self._url, spans, status)
            self._metrics.otlp_dropped += spans
            return
        rejected, why = _rejected(told)
        if why:
            _log.warning("%s rejected %d of %d spans: %.500s", self._url, rejected, spans, why)
        self._metrics.otlp_dropped += min(rejected, spans)
        self._metrics.otlp_exported += spans - min(rejected, spans)

    def _fails(self, why: str) -> None:
        if not self.failing:
            _log.warning("%s does not take spans (%s): trying again until it does", self._url, why)
        self.failing = True


def _rejected(told: bytes) -> tuple[int, str]:
    """(number of rejected spans, why) in a successful answer."""
    try:
        partial = ExportTraceServiceResponse.FromString(told).partial_success
    except DecodeError:
        return 0, ""
    return max(0, partial.rejected_spans), partial.error_message
