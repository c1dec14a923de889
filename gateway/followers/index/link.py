"""The gateway's end of its index: starts the process, queries it, and starts it again when it has ended.

A question returns an answer or None, which means: scan the tape. No question waits for a process that is starting, is
far behind the tape, or has ended. `find` and the others are called from worker threads, `ensure_running` from the
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from operator import neg
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, Literal, TypeAlias

import msgspec

from penstock.gateway.followers.index.segments import NEAR, SEALED, clear
from penstock.gateway.model.codes import BreakdownDimension, install_hint
from penstock.gateway.model.prices import BUILTIN, Prices
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.model.state import IndexStatus, IndexView
from penstock.gateway.model.times import Backoff
from penstock.gateway.reading.filter_fields import Target

# The questions and the answers: MessagePack in both directions.


class FindRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for the positions of a filter's rows."""

    target: Target
    filter: str
    now_ns: int
    """The time from which `started>2h` counts back."""
    before: int | None
    """Only positions below this one; None: all."""
    limit: int


class FindResult(msgspec.Struct, tag=True, frozen=True):
    """Positions, newest first: cursors of spans, numbers of rollouts. None that the filter takes is missing; some that
    it does not take may be among them."""

    positions: list[int]
    complete: bool
    """True if there are no more."""
    reached: int = 0
    """If there are more: the position from which on all were searched."""
    names: list[str] = []
    """For rollouts: their ids."""
    hits: list[int] = []
    """For rollouts with a filter of spans: the cursor of a span that it takes; else empty."""

    def below(self, before: int) -> FindResult | None:
        """The part below a position; None if not all of it is known."""
        at = bisect_left(self.positions, 1 - before, key=neg)
        if at == len(self.positions) and not self.complete:
            return None
        return FindResult(self.positions[at:], self.complete, self.reached, self.names[at:], self.hits[at:])


class SumRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for sums over the calls that a filter of spans takes."""

    by: BreakdownDimension
    filter: str
    now_ns: int
    limit: int
    """Most rows of the answer."""


class SumResult(msgspec.Struct, tag=True, frozen=True):
    """A row for each value, as `Breakdown` has them."""

    rows: list[dict[str, Any]]
    values: int
    """The number of different values."""


class TotalRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for sums over all spans."""


class TotalResult(msgspec.Struct, tag=True, frozen=True):
    """The sums of `Stats`, with the names that they have there."""

    counted_spans: int
    since_ns: int | None
    by_kind: dict[str, int]
    by_status: dict[str, int]
    models: list[dict[str, Any]]
    """A row for each model, as `SumResult` has them."""
    by_tool: list[dict[str, Any]]
    rewards: dict[str, Any]


class FilesRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for files with all rows of the index."""


class FilesResult(msgspec.Struct, tag=True, frozen=True):
    """The files of each table: `spans`, `rollouts`, `attempts`, `passages`. Those of a snapshot stay for at least a
    second (`follower.Snapshots`)."""

    files: dict[str, list[str]]


class StatusRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks for the progress and size of the index."""


class RebuildRequest(msgspec.Struct, tag=True, frozen=True):
    """Asks to delete the index and begin anew."""


class IndexState(msgspec.Struct, tag=True, frozen=True):
    """The progress and size of the index."""

    cursor: int
    """The last change of the tape in the index."""
    newest: int
    """The newest change of the tape."""
    files: int
    """Sealed files."""
    bytes: int
    """Size of the sealed files."""
    fresh: int
    """Spans that are not sealed yet."""
    forgotten: int
    """Forgotten rollouts that are still in files."""


class IndexLag(msgspec.Struct, tag=True, frozen=True):
    """No answer yet, because the index is far behind the tape."""

    cursor: int


class IndexFailure(msgspec.Struct, tag=True, frozen=True):
    """No answer: `reason` says why."""

    reason: str
    again: bool = False
    """True if the same question continues the search from where it stopped."""


IndexRequest: TypeAlias = FindRequest | SumRequest | TotalRequest | FilesRequest | StatusRequest | RebuildRequest
IndexReply: TypeAlias = FindResult | SumResult | TotalResult | FilesResult | IndexState | IndexLag | IndexFailure


When = Literal["large", "always", "never"]
LARGE: Final = 20_000
"""Changes of a tape above which an index is worth its process; a scan of fewer takes a fraction of a second."""
PATIENCE_S: Final = 5.0
"""Longest wait of a question for its answer. Then the tape is scanned."""
STUCK_S: Final = 60.0
"""Longest time for an answer. Then the process is killed and a new one started. It is long, because on an overloaded
machine a new one would take longer still. Requests for files wait so long, too."""
CLOSING_S: Final = 3.0
PAUSES: Final = Backoff(1.0, 60.0)
"""Least time from one start of the process to the next."""
TURN_S: Final = 1.0
"""Longest wait of a list while other questions are answered, before it scans."""
SEARCHED_S: Final = 5.0
"""Longest wait of figures for a search of all texts, before the newest calls are scanned."""
OTHERS_S: Final = 0.002
"""Pause between two steps of such a search, in which waiting questions get the lock; without a pause none would."""
FAULTS: Final = (OSError, EOFError, msgspec.MsgspecError)
"""Errors of a connection whose process ends, or does not send a whole message."""
BEHIND_S: Final = 1.0
"""Seconds in which an index that is far behind the tape is not asked again."""
_REASONS: Final[dict[IndexStatus, str]] = {
    "ready": "filters answer from it",
    "reading": "it reads the tape; filters scan until it has caught up",
    "starting": "its process is starting; filters scan until then",
    "busy": "it still works on an earlier question; filters scan meanwhile",
    "small": f'the tape has fewer than {LARGE:,} changes: a scan is as fast ([index] when = "always" makes one)',
    "off": 'it is turned off ([index] when = "never"): filters scan the tape',
    "missing": f"{install_hint('index')}, then restart the gateway; until then filters scan the tape",
    "broken": "filters scan, and it is made anew in a moment",
}
_log = logging.getLogger("penstock.index")


class IndexLink:
    """One index process, or none. Thread-safe."""

    def __init__(
        self,
        path: Path,
        when: When,
        newest: Callable[[], int],
        sealed: int = SEALED,
        prices: Prices | None = None,
        log: LogSettings = LogSettings(),  # noqa: B008
    ) -> None:
        """`newest`: returns the last change of the tape; called from any thread. `prices`: the list that the
        gateway has, whatever its file says by now. `log`: how the process logs; it inherits stderr."""
        self._path, self._when, self._newest, self._sealed, self._prices = path, when, newest, sealed, prices
        self._log_settings = log.model_dump_json()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Connection
        self._ready = self._closed = self._asked_for = False
        self._next_start = self._not_before = 0.0
        self._unanswered_since: float | None = None
        self._starts = 0
        """Starts of the process since one was ready."""
        self._said = ""
        self.missing = any(find_spec(name) is None for name in ("duckdb", "numpy", "pyarrow"))
        """True if the extra `index` is not installed."""

    async def start(self) -> None:
        """Deletes temporary files that the index processes of an earlier gateway have left; `ensure_running` starts a
        process."""
        clear(self._path / "index")

    async def stop(self) -> None:
        """The same as `close`; does not block."""
        await asyncio.to_thread(self.close)

    @property
    def has_files(self) -> bool:
        """True if there are files of an index, even if no process keeps one."""
        return any(self._path.joinpath("index").rglob("*.parquet*"))

    @property
    def should_run(self) -> bool:
        """True if an index process should run."""
        enough = self._when == "always" or (self._when == "large" and (self._asked_for or self._newest() >= LARGE))
        return enough and not self.missing and not self._closed

    def ensure_running(self, ending: bool = False) -> None:
        """Starts the process if it should run and does not, unless the gateway is stopping. Blocks for a start: some
        milliseconds."""
        if not ending and self.should_run and self._lock.acquire(blocking=False):
            try:
                self._start_if_due()
            finally:
                self._lock.release()

    def _start_if_due(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end(f"it ended with status {self._process.returncode}")
        if self._process is None and time.monotonic() >= self._next_start and not self._closed:
            self._starts += 1
            self._next_start = time.monotonic() + PAUSES.after(self._starts)
            try:
                self._start()
            except OSError as error:
                _log.warning("the process of the index cannot be started: %s", error)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # An incomplete answer counts as none.
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", *divmod(int(PATIENCE_S * 1e6), 1_000_000)))
        command = [sys.executable, "-P", "-m", "penstock.gateway.followers.index.process"]
        command += [str(self._path), self._log_settings, str(theirs.fileno()), str(self._sealed)]
        with ours, theirs, TemporaryFile(dir=self._path) as prices:
            if self._prices is not None and self._prices.path != BUILTIN:
                prices.write(self._prices.file.model_dump_json().encode())
                prices.seek(0)
            self._process = subprocess.Popen(command, stdin=prices, pass_fds=[theirs.fileno()])
            self._asked, self._ready, self._unanswered_since = Connection(ours.detach()), False, None

    def _end(self, reason: str) -> None:
        """Kills a useless process; `ensure_running` starts the next one."""
        assert self._process is not None
        _log.warning("the process of the index is started again (%s); the tape is scanned meanwhile", reason)
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._process, self._ready = None, False

    def find(self, asked: FindRequest) -> FindResult | None:
        """The positions of a filter's rows; None: scan."""
        answer = self._ask_if_near(asked)
        return answer if isinstance(answer, FindResult) else None

    def sum(self, asked: SumRequest) -> SumResult | None:
        """Sums over the calls of a filter; None: scan. Continues a search of texts for up to `SEARCHED_S`: a scan would
        find less, and compute in the gateway."""
        until = time.monotonic() + SEARCHED_S
        while (
            isinstance(answer := self._ask_if_near(asked), IndexFailure) and answer.again and time.monotonic() < until
        ):
            time.sleep(OTHERS_S)
        return answer if isinstance(answer, SumResult) else None

    def total(self) -> TotalResult | None:
        """Sums over all spans; None: scan."""
        answer = self._ask_if_near(TotalRequest())
        return answer if isinstance(answer, TotalResult) else None

    def files(self) -> dict[str, list[str]] | str:
        """Files with all rows of the index, by table; or why there are none. From then on an index is made even of a
        small tape."""
        self._asked_for = True
        answer = self._ask(FilesRequest(), patience_s=STUCK_S)
        if isinstance(answer, FilesResult):
            return answer.files
        return answer.reason if isinstance(answer, IndexFailure) else self.view().reason

    def _ask_if_near(self, asked: FindRequest | SumRequest | TotalRequest) -> IndexReply | None:
        if time.monotonic() < self._not_before:
            return None
        answer = self._ask(asked, TURN_S)
        if isinstance(answer, IndexLag):
            self._not_before = time.monotonic() + BEHIND_S
        if isinstance(answer, IndexFailure) and not answer.again and answer.reason != self._said:
            self._said = answer.reason
            _log.warning("the index did not answer, the tape is scanned: %s", answer.reason)
        return answer

    def view(self) -> IndexView:
        """The state of the index, for the API."""
        return self._view(self._ask(StatusRequest()))

    def rebuild(self) -> IndexView:
        """Deletes the index and begins anew, if its process runs."""
        return self._view(self._ask(RebuildRequest()))

    def _view(self, answer: IndexReply | None) -> IndexView:
        newest = self._newest()
        if isinstance(answer, IndexState):
            status = "ready" if answer.newest - answer.cursor < NEAR else "reading"
            return IndexView(
                status=status, reason=_REASONS[status], cursor=answer.cursor, newest=answer.newest,
                files=answer.files, bytes=answer.bytes, unsealed=answer.fresh,
                forgotten=answer.forgotten,
            )  # fmt: skip
        if isinstance(answer, IndexFailure):
            return IndexView(status="broken", reason=f"{_REASONS['broken']}: {answer.reason}", newest=newest)
        working = "starting" if self._unanswered_since is None else "busy"
        status = "off" if self._when == "never" else "missing" if self.missing else working
        status = "small" if status == "starting" and not self.should_run else status
        return IndexView(status=status, reason=_REASONS[status], newest=newest)

    def _ask(
        self, question: IndexRequest, wait_s: float = PATIENCE_S, patience_s: float | None = None
    ) -> IndexReply | None:
        """`wait_s`: longest wait while other questions are answered; `patience_s`: longest time for the answer. None:
        there was no answer, or that to an earlier question is still awaited."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        if not self._lock.acquire(timeout=wait_s):
            return None
        try:
            if self._process is None or not self._is_ready():
                return None
            try:
                if self._unanswered_since is None:
                    self._asked.send_bytes(msgspec.msgpack.encode(question))
                    self._unanswered_since = time.monotonic()
                    if self._asked.poll(patience_s):
                        return self._heard()
                if time.monotonic() - self._unanswered_since >= STUCK_S:
                    self._end(f"it did not answer for {STUCK_S:.0f} s")
            except FAULTS as error:
                self._end(str(error) or "it has ended")
        finally:
            self._lock.release()
        return None

    def _is_ready(self) -> bool:
        """True if the process has opened its files. Discards the answer to a question that is no longer awaited."""
        try:
            if (not self._ready or self._unanswered_since is not None) and self._asked.poll(0.0):
                self._heard()
                self._ready, self._starts = True, 0
        except FAULTS as error:
            self._end(str(error) or "it has ended")
        return self._ready

    def _heard(self) -> IndexReply:
        self._unanswered_since = None
        return msgspec.msgpack.decode(self._asked.recv_bytes(), type=IndexReply)

    def close(self) -> None:
        """Ends the process, by force after `CLOSING_S`."""
        with self._lock:
            self._closed = True
            if self._process is None:
                return
            self._asked.close()
            try:
                self._process.wait(CLOSING_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
