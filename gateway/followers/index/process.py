"""The process of the index, which `link` starts: `python -m penstock.gateway.followers.index.process DATA LOG
DESCRIPTOR ROWS PRICES`.

It follows the tape and answers the questions of one socket, one at a time. It ends when the other side is closed, so
also when its gateway was killed. It runs at a low priority (`nice`): calls are served first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import msgspec

from penstock.gateway.followers.index.finder import NoAnswerError
from penstock.gateway.followers.index.follower import TapeIndex
from penstock.gateway.followers.index.link import (
    FilesRequest,
    FilesResult,
    FindRequest,
    IndexFailure,
    IndexLag,
    IndexReply,
    IndexRequest,
    RebuildRequest,
    StatusRequest,
    SumRequest,
    TotalRequest,
)
from penstock.gateway.followers.index.segments import NEAR, IndexLockedError
from penstock.gateway.followers.index.tables import DAMAGE_ERRORS, PERSISTENT_ERRORS
from penstock.gateway.model.prices import PriceFile, Prices
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.model.times import Backoff
from penstock.gateway.reading.filters import QueryError
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.wire.http.log import set_up

POLL_S: Final = 0.25
"""Wait for a question before the next look for changes of the tape."""
PIECE_S: Final = 0.1
"""Seconds of reading before the next look for questions."""
CATCH_UP_S: Final = 0.3
"""Seconds of catching up for a question; after that the gateway scans."""
HELD_S: Final = 5.0
"""Longest wait for the process of a killed gateway to release the index."""
NICE: Final = 10
PAUSES: Final = Backoff(2.0, 300.0)
"""Time before a damaged index is made anew."""
_log = logging.getLogger("penstock.index")


class IndexServer:
    """One index and the connection of its gateway."""

    def __init__(self, index: TapeIndex, asked: Connection) -> None:
        self._index, self._asked = index, asked
        self._broken: str | None = None
        """The damage for which it does not follow; no question is answered until the index was made anew. Else None."""
        self._again = 0.0
        """The time when it is made anew (of `time.monotonic`)."""
        self._damages = 0
        self._said = ""

    def run(self) -> None:
        """Sends its state, then follows and answers until the other side is closed."""
        self._say(self._index.state())
        behind = True
        while True:
            if self._asked.poll(0.0 if behind else POLL_S):
                self._say(self._answer(msgspec.msgpack.decode(self._asked.recv_bytes(), type=IndexRequest)))
            behind = not self._follow()

    def _say(self, answer: IndexReply) -> None:
        self._asked.send_bytes(msgspec.msgpack.encode(answer))

    def _follow(self) -> bool:
        """Reads for a moment; True if there is nothing more to read now."""
        try:
            return self._catch_up(PIECE_S) and not self._tidy()
        except TapeError as error:
            # The gateway reports the same error of its own reads; it may pass.
            if str(error) != self._said:
                self._said = str(error)
                _log.warning("the index cannot follow: %s", error)
        return True

    def _catch_up(self, seconds: float) -> bool:
        """Reads on; True if there is nothing more to read now. Raises `TapeError`."""
        try:
            if self._broken is not None:
                if time.monotonic() < self._again:
                    return True
                self._make_anew()
            return self._index.follow(time.monotonic() + seconds)
        except DAMAGE_ERRORS as error:
            self._give_up(error)
        return True

    def _tidy(self) -> bool:
        """Takes forgotten rollouts out of one seal's files. True if there is more to do."""
        try:
            return self._broken is None and self._index.tidy()
        except DAMAGE_ERRORS as error:
            self._give_up(error)
        return False

    def _make_anew(self) -> None:
        self._index.rebuild()
        self._broken = None

    def _give_up(self, error: Exception) -> None:
        self._broken = f"{type(error).__name__}: {error}"
        self._damages += 1
        pause_s = PAUSES.after(self._damages)
        self._again = time.monotonic() + pause_s
        _log.error("the index is made anew in %.0f s, and the tape is scanned: %s", pause_s, self._broken)

    def _answer(self, question: IndexRequest) -> IndexReply:
        try:
            if isinstance(question, RebuildRequest):
                self._make_anew()
                return self._index.state()
            if isinstance(question, StatusRequest):
                self._catch_up(CATCH_UP_S)
                return IndexFailure(self._broken) if self._broken is not None else self._index.state()
            if self._index.lag > NEAR or not self._catch_up(CATCH_UP_S):
                return IndexLag(self._index.cursor)
            return IndexFailure(self._broken) if self._broken is not None else self._found(question)
        except NoAnswerError as error:
            return IndexFailure(str(error), error.again)
        except (QueryError, TapeError) as error:
            return IndexFailure(str(error))
        except PERSISTENT_ERRORS as error:
            self._give_up(error)
            return IndexFailure(str(self._broken))
        except DAMAGE_ERRORS as error:
            # It may be the question's fault: that it needs too much memory, for example.
            if not self._index.sound():
                self._give_up(error)
            return IndexFailure(f"{type(error).__name__}: {error}")

    def _found(self, question: FindRequest | SumRequest | TotalRequest | FilesRequest) -> IndexReply:
        if isinstance(question, FilesRequest):
            return FilesResult(self._index.files())
        if isinstance(question, TotalRequest):
            return self._index.total()
        return self._index.find(question) if isinstance(question, FindRequest) else self._index.sum(question)


class _PandasBlock(MetaPathFinder):
    """pyarrow imports pandas wherever it is installed, for 42 MB. Nothing here makes a frame."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


def main(path: Path, descriptor: int, sealed: int, log: LogSettings) -> None:
    """Runs until the other side is closed. Stdin: the list of prices, unless it is the built-in one."""
    set_up(log)
    prices = Prices()
    if given := sys.stdin.buffer.read():
        prices.file = PriceFile.model_validate_json(given)
    os.nice(NICE)
    sys.meta_path.insert(0, _PandasBlock())
    # Files that libraries make are readable for the owner only, too.
    os.umask(0o077)
    asked = Connection(descriptor)
    with Store(path, readonly=True) as store:
        index = _opened(store, path / "index", sealed, prices)
        try:
            IndexServer(index, asked).run()
        except (EOFError, ConnectionError):
            return  # its gateway is gone
        finally:
            index.close()


def _opened(store: Store, path: Path, sealed: int, prices: Prices) -> TapeIndex:
    until = time.monotonic() + HELD_S
    while True:
        try:
            return TapeIndex(store, path, sealed, prices)
        except IndexLockedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)  # a lock of a file cannot be awaited with a deadline


if __name__ == "__main__":
    # A terminal's Ctrl-C is for the gateway, which then closes the other side.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, data, log, descriptor, sealed = sys.argv
    main(Path(data), int(descriptor), int(sealed), LogSettings.model_validate_json(log))
