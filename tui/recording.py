"""`--record` and `--play`: what a gateway answered, in a file, and a gateway that is such a file.

A recording is lines of JSON, compressed with gzip. The first line says what it is and when it began; each other line is
an answer, with the question that it was for and the nanoseconds since the beginning: a body of the control API, a
refusal, or an event of the feed. So a screen that is played asks the same questions and draws the same panes, at the
times at which they were seen.

A played question gets the last answer that was recorded until then, or the first one after it. Rows that are asked for
by their ids are found in any answer that has them. What nobody had asked cannot be played: the answer says so. Nothing
can be changed in a recording. A recording holds what was looked at, so whoever gets one can read that; it has no keys.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.answers import RolloutPage
from penstock.gateway.model.change import Digest
from penstock.gateway.model.rollout import RolloutSummary

FORMAT: Final = "penstock tui recording 1"
MOVING: Final = frozenset({"since", "limit", "after"})
"""Parameters that differ from look to look at the same thing."""
FEED: Final = "FEED"


class RecordingError(Exception):
    """A file that cannot be written or played; the message says which and why."""


class Recorder:
    """Writes a recording. Each line is whole in the file when it has been written, so a kill loses nothing before."""

    def __init__(self, path: Path, began_ns: int) -> None:
        self._path, self._began = path, began_ns
        self._broke: str | None = None
        try:
            self._file = gzip.GzipFile(path, "xb")
        except FileExistsError:
            raise RecordingError(f"--record: {path} is there already; name a new file") from None
        except OSError as e:
            raise RecordingError(f"--record: {path} cannot be written: {e.strerror}") from None
        self._write({"format": FORMAT, "version": version("penstock-gateway"), "began_ns": began_ns})
        if self._broke is not None:
            raise RecordingError(f"--record: {path} cannot be written: {self._broke}")

    @property
    def note(self) -> str:
        """What becomes of it, in a few words."""
        return f"recording to {self._path}" if self._broke is None else f"not recorded any more: {self._broke}"

    @property
    def problem(self) -> str | None:
        """Why it is not whole; None when it is."""
        return None if self._broke is None else f"--record: {self._path} ends before its end: {self._broke}"

    def add(self, question: str, body: bytes, now_ns: int, status: int | None = None) -> None:
        """Adds an answer, or a refusal by its status."""
        said: dict[str, Any] = {"at_ns": now_ns - self._began, "question": question}
        try:
            said["text"] = body.decode()
        except UnicodeDecodeError:
            said["base64"] = base64.b64encode(body).decode()
        self._write(said if status is None else {**said, "status": status})

    def _write(self, value: Mapping[str, Any]) -> None:
        if self._broke is not None:
            return
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace") + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as e:  # what is shown goes on
            self._broke = e.strerror or str(e)

    def close(self) -> None:
        """Ends the file."""
        try:
            self._file.close()
        except OSError as e:
            self._broke = self._broke or e.strerror or str(e)


class RecordingClient(Client):
    """A client whose answers are recorded."""

    def __init__(self, recorder: Recorder, url: str, key: str | None, compressed: bool) -> None:
        super().__init__(url, key, compressed=compressed)
        self._recorder = recorder

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        """The bytes of a good answer, which are recorded."""
        question = asked(method, path, params)
        try:
            found = await super().read(method, path, params, body)
        except ClientError as e:
            if e.status is not None:
                self._recorder.add(question, str(e).encode(), time.time_ns(), e.status)
            raise
        self._recorder.add(question, found, time.time_ns())
        return found

    async def digests(
        self, since: int | None = None, every_s: float = 1.0, lost: Callable[[ClientError], None] | None = None
    ) -> AsyncGenerator[Digest]:
        """What changes, which is recorded."""
        async for digest in super().digests(since, every_s, lost):
            self._recorder.add(FEED, digest.model_dump_json().encode(), time.time_ns())
            yield digest


def asked(method: str, path: str, params: Mapping[str, str | int | None] | None, moving: bool = True) -> str:
    """A question as it stands in a recording. `moving`: with the parameters that differ from look to look."""
    given = {k: v for k, v in sorted((params or {}).items()) if v is not None and (moving or k not in MOVING)}
    return " ".join([method, path, *(f"{name}={value}" for name, value in given.items())])


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of a recording."""

    at_ns: int
    body: bytes
    status: int | None


@dataclass(slots=True)
class Recording:
    """A recording that was read."""

    began_ns: int
    ended_ns: int = 0
    """When the last answer came; ns since the beginning."""
    answers: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    """By question, in the order in which they came."""
    loose: dict[str, list[Answer]] = field(default_factory=dict[str, list[Answer]])
    """The same by the question without what moves."""
    feed: list[Answer] = field(default_factory=list[Answer])


def load(path: Path) -> Recording:
    """Reads a recording; one that was cut off by a kill as far as it goes. Raises `RecordingError`."""
    lines = _lines(path)
    try:
        head = next(lines, dict[str, Any]())
        found = Recording(began_ns=int(head["began_ns"] if head["format"] == FORMAT else ""))
    except (KeyError, TypeError, ValueError):
        raise RecordingError(f"{path} is not a recording of `penstock tui --record`") from None
    try:
        _take_in(found, lines)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise RecordingError(f"{path} is damaged: a line of it is no answer ({type(e).__name__}: {e})") from None
    return found


def _take_in(found: Recording, lines: Iterator[dict[str, Any]]) -> None:
    for line in lines:
        body = base64.b64decode(line["base64"]) if "base64" in line else str(line["text"]).encode()
        answer = Answer(int(line["at_ns"]), body, line.get("status"))
        found.ended_ns = answer.at_ns
        if line["question"] == FEED:
            found.feed.append(answer)
            continue
        question = str(line["question"])
        found.answers.setdefault(question, []).append(answer)
        found.loose.setdefault(_loosely(question), []).append(answer)


def _loosely(question: str) -> str:
    return " ".join(word for word in question.split(" ") if word.partition("=")[0] not in MOVING)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(path, "rb") as file:
            for line in file:
                yield json.loads(line)
    except (EOFError, json.JSONDecodeError):
        return  # cut off in the middle of a line
    except (UnicodeDecodeError, RecursionError, zlib.error) as e:
        raise RecordingError(f"{path} is damaged: {e}") from None
    except gzip.BadGzipFile:
        raise RecordingError(f"{path} is not a recording of `penstock tui --record`") from None
    except OSError as e:
        raise RecordingError(f"--play: {path} cannot be read: {e.strerror}") from None


class Clock:
    """The time of a recording: it goes on from its beginning, and stands still at its end."""

    def __init__(self, recording: Recording, at_end: bool = False) -> None:
        self._recording, self._at_end = recording, at_end
        self._started_ns = time.monotonic_ns()

    def since_ns(self) -> int:
        """Nanoseconds since the beginning."""
        if self._at_end:
            return self._recording.ended_ns
        return min(time.monotonic_ns() - self._started_ns, self._recording.ended_ns)

    def now_ns(self) -> int:
        """The time of day, then."""
        return self._recording.began_ns + self.since_ns()


class PlayedClient(Client):
    """A client of a gateway that is a recording."""

    def __init__(self, recording: Recording, clock: Clock) -> None:
        super().__init__("http://127.0.0.1")
        self._recording, self._clock = recording, clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        """The answer that was recorded."""
        if method != "GET":
            raise ClientError("a recording is played: nothing can be changed in it", 403)
        exact, loose = asked(method, path, params), asked(method, path, params, moving=False)
        found = self._recording.answers.get(exact) or self._recording.loose.get(loose)
        if not found:
            raise ClientError(f"this recording does not hold {path}: nobody looked at it then", 404)
        answer = self._at(found)
        self.received += len(answer.body)
        if answer.status is not None:
            raise ClientError(answer.body.decode(), answer.status)
        return answer.body

    def _at(self, answers: Sequence[Answer]) -> Answer:
        """The last answer until now, or the first one."""
        now = self._clock.since_ns()
        return next((one for one in reversed(answers) if one.at_ns <= now), answers[0])

    async def rollouts_by_id(self, ids: Sequence[str], filter: str = "") -> list[RolloutSummary]:
        """Rows from whatever answer has them."""
        pages = [name for name in self._recording.answers if name.startswith("GET /api/rollouts ")]
        rows: dict[str, RolloutSummary] = {}
        for answer in sorted((self._at(self._recording.answers[name]) for name in pages), key=lambda one: one.at_ns):
            if answer.status is None:
                page = RolloutPage.model_validate_json(answer.body, extra="ignore")
                rows |= {row.id: row for row in page.rollouts}
        return [rows[id] for id in ids if id in rows]

    async def digests(
        self, since: int | None = None, every_s: float = 1.0, lost: Callable[[ClientError], None] | None = None
    ) -> AsyncGenerator[Digest]:
        """What changed, when it did; then nothing more. Of what is over by now the sums: answers hold the rest."""
        begun = self._clock.since_ns()
        for answer in self._recording.feed:
            digest = Digest.model_validate_json(answer.body, extra="ignore")
            if answer.at_ns < begun:
                digest.rollouts, digest.more = [], 0
            if (wait_ns := answer.at_ns - self._clock.since_ns()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            yield digest
        await asyncio.Event().wait()
