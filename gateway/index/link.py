"""The gateway's end of its index: starts the process, asks it, and starts it again when it has ended.

Whoever asks gets an answer or None, which means: scan. No question waits for a process that is starting, reads a tape
far ahead of it, or has ended. `find` and the others are called from worker threads, `tend` from the event loop.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Literal

import msgspec

from penstock.gateway.index.questions import (
    Answer,
    Behind,
    Failed,
    Find,
    Found,
    List,
    Listed,
    Question,
    Rebuild,
    State,
    Status,
    Sum,
    Summed,
    Total,
    Totalled,
)
from penstock.gateway.index.segments import NEAR, SEALED, clear
from penstock.gateway.model.index import IndexStatus, IndexView
from penstock.gateway.model.log_settings import Log
from penstock.gateway.model.prices import BUILTIN

When = Literal["large", "always", "never"]
LARGE: Final = 20_000
"""Changes of a tape from which on an index is worth its process; a scan of fewer takes a fraction of a second."""
PATIENCE_S: Final = 5.0
"""How long a question waits for its answer. Then the tape is scanned."""
STUCK_S: Final = 60.0
"""How long an answer may take. Then the process is killed, and a new one started: on a machine without time for it, a
new one would take longer still. Who needs files of what is in memory waits so long, too."""
CLOSING_S: Final = 3.0
PAUSES_S: Final = (1.0, 60.0)
"""How long after its start a process that has ended is started again: at first, and at most."""
TURN_S: Final = 1.0
"""How long a list waits while others are answered, before it scans."""
SEARCHED_S: Final = 5.0
"""How long figures wait for a search of all texts to end, before the newest calls are scanned."""
OTHERS_S: Final = 0.002
"""How long it is left between two steps of that to others who wait: a lock alone lets nobody else in."""
FAULTS: Final = (OSError, EOFError, msgspec.MsgspecError)
"""What comes of a process that ends, or that does not say the whole of what it says."""
BEHIND_S: Final = 1.0
"""How long an index that is far behind the tape is not asked again."""
_REASONS: Final[dict[IndexStatus, str]] = {
    "ready": "filters answer from it",
    "reading": "it reads the tape; filters scan until it has caught up",
    "starting": "its process is starting; filters scan until then",
    "busy": "it still works on an earlier question; filters scan meanwhile",
    "small": f'the tape has fewer than {LARGE:,} changes: a scan is as fast ([index] when = "always" makes one)',
    "off": 'it is turned off ([index] when = "never"): filters scan the tape',
    "missing": "pip install 'penstock-gateway[index]', then restart the gateway; until then filters scan the tape",
    "broken": "filters scan, and it is made anew in a moment",
}
_log = logging.getLogger("penstock.index")


class Link:
    """One index process, or none. Thread-safe."""

    def __init__(
        self,
        path: Path,
        when: When,
        newest: Callable[[], int],
        sealed: int = SEALED,
        prices: Path = BUILTIN,
        log: Log = Log(),  # noqa: B008
    ) -> None:
        """`newest`: the last change of the tape; called from any thread. `prices`: the file of prices. `log`: how it is
        written; the process has our stderr."""
        self._path, self._when, self._newest, self._sealed, self._prices = path, when, newest, sealed, prices
        self._log_settings = log.model_dump_json()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Connection
        self._ready = self._closed = self._asked_for = False
        self._next_start = self._not_before = 0.0
        self._unanswered_since: float | None = None
        self._pause_s = PAUSES_S[0]
        self._said = ""
        self.missing = any(find_spec(name) is None for name in ("duckdb", "numpy", "pyarrow"))
        """It cannot be had: its extra is not installed."""

    def begin(self) -> None:
        """Deletes what the processes of an earlier gateway, which have ended, have left beside the files."""
        clear(self._path / "index")

    @property
    def has_files(self) -> bool:
        """Whether there are files of an index, also where no process keeps one."""
        return any(self._path.joinpath("index").rglob("*.parquet*"))

    @property
    def wanted(self) -> bool:
        """Whether there should be a process."""
        enough = self._when == "always" or (self._when == "large" and (self._asked_for or self._newest() >= LARGE))
        return enough and not self.missing and not self._closed

    def tend(self, ending: bool = False) -> None:
        """Starts the process where one should run and none does, unless its gateway is ending. Blocks for the time that
        a start takes: some milliseconds."""
        if not ending and self.wanted and self._lock.acquire(blocking=False):
            try:
                self._start_if_due()
            finally:
                self._lock.release()

    def _start_if_due(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._end(f"it ended with status {self._process.returncode}")
        if self._process is None and time.monotonic() >= self._next_start and not self._closed:
            self._next_start = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSES_S[1])
            try:
                self._start()
            except OSError as error:
                _log.warning("the process of the index cannot be started: %s", error)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # An answer that does not come whole is none.
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, side, struct.pack("ll", *divmod(int(PATIENCE_S * 1e6), 1_000_000)))
        command = [sys.executable, "-P", "-m", "penstock.gateway.index.process"]
        command += [str(self._path), self._log_settings, str(theirs.fileno()), str(self._sealed), str(self._prices)]
        with ours, theirs:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
            self._asked, self._ready, self._unanswered_since = Connection(ours.detach()), False, None

    def _end(self, reason: str) -> None:
        """The process is of no use: the next one is started later."""
        assert self._process is not None
        _log.warning("the process of the index is started again (%s); the tape is scanned meanwhile", reason)
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._process, self._ready = None, False

    def find(self, asked: Find) -> Found | None:
        """Where the rows are that a filter takes; None: scan."""
        answer = self._ask_if_near(asked)
        return answer if isinstance(answer, Found) else None

    def sum(self, asked: Sum) -> Summed | None:
        """What the calls of a filter come to; None: scan. A search of texts goes on for a while: a scan would say less,
        and compute in the gateway."""
        until = time.monotonic() + SEARCHED_S
        while isinstance(answer := self._ask_if_near(asked), Failed) and answer.again and time.monotonic() < until:
            time.sleep(OTHERS_S)
        return answer if isinstance(answer, Summed) else None

    def total(self) -> Totalled | None:
        """What all spans come to; None: scan."""
        answer = self._ask_if_near(Total())
        return answer if isinstance(answer, Totalled) else None

    def files(self) -> dict[str, list[str]] | str:
        """Files that have all that is in the index, by table; or why there are none. Whoever asks wants an index, also
        of a tape that is small."""
        self._asked_for = True
        answer = self._ask(List(), patience_s=STUCK_S)
        if isinstance(answer, Listed):
            return answer.files
        return answer.reason if isinstance(answer, Failed) else self.view().reason

    def _ask_if_near(self, asked: Find | Sum | Total) -> Answer | None:
        if time.monotonic() < self._not_before:
            return None
        answer = self._ask(asked, TURN_S)
        if isinstance(answer, Behind):
            self._not_before = time.monotonic() + BEHIND_S
        if isinstance(answer, Failed) and not answer.again and answer.reason != self._said:
            self._said = answer.reason
            _log.warning("the index did not answer, the tape is scanned: %s", answer.reason)
        return answer

    def view(self) -> IndexView:
        """How it is."""
        return self._view(self._ask(Status()))

    def rebuild(self) -> IndexView:
        """Deletes the index and begins anew, where there is a process to do so."""
        return self._view(self._ask(Rebuild()))

    def _view(self, answer: Answer | None) -> IndexView:
        newest = self._newest()
        if isinstance(answer, State):
            status = "ready" if answer.newest - answer.cursor < NEAR else "reading"
            return IndexView(
                status=status, reason=_REASONS[status], cursor=answer.cursor, newest=answer.newest,
                files=answer.files, bytes=answer.bytes, unsealed=answer.fresh,
                forgotten=answer.forgotten,
            )  # fmt: skip
        if isinstance(answer, Failed):
            return IndexView(status="broken", reason=f"{_REASONS['broken']}: {answer.reason}", newest=newest)
        working = "starting" if self._unanswered_since is None else "busy"
        status = "off" if self._when == "never" else "missing" if self.missing else working
        status = "small" if status == "starting" and not self.wanted else status
        return IndexView(status=status, reason=_REASONS[status], newest=newest)

    def _ask(self, question: Question, wait_s: float = PATIENCE_S, patience_s: float | None = None) -> Answer | None:
        """`wait_s`: how long others may be answered before; `patience_s`: how long the answer may take. None: it did
        not come, or the answer to an earlier question is still to come."""
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
        """Whether it has said that it has opened its files. An answer that nobody waits for any more is let go of."""
        try:
            if (not self._ready or self._unanswered_since is not None) and self._asked.poll(0.0):
                self._heard()
                self._ready, self._pause_s = True, PAUSES_S[0]
        except FAULTS as error:
            self._end(str(error) or "it has ended")
        return self._ready

    def _heard(self) -> Answer:
        self._unanswered_since = None
        return msgspec.msgpack.decode(self._asked.recv_bytes(), type=Answer)

    def close(self) -> None:
        """Ends the process."""
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
