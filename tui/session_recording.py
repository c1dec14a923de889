"""`--record` and `--play`: writes a gateway's answers to a file, and plays such a file in place of a gateway.

A recording is lines of JSON, compressed with gzip. The first line has the format and the time of the beginning; each
other line is an answer, with its question and the nanoseconds since the beginning: a body of the control API, a
refusal, or an event of the feed. So a screen that is played asks the same questions and draws the same panes, at the
times at which they were recorded.

A played question gets the last answer that was recorded until then, or the first one after it. Rollouts requested by
their ids, and a list without a filter or of a range of time alone, are made of all answers that have rollouts, so that
a screen that is opened again has the rows that have come meanwhile. A question that was never recorded gets a refusal
(404). Nothing can be changed in a recording. A recording holds all data that was shown, so its readers can see that; it
has no keys.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Self

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.connection import REFUSALS, NotAllowed, NotFound, Refused
from penstock.gateway.model.answers import Digest, RolloutPage
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.reading.filters import QueryError, parse

FORMAT: Final = "penstock tui recording 1"
MOVING: Final = frozenset({"since", "limit", "after"})
"""Parameters that differ between two looks at the same data."""
FEED: Final = "FEED"


class RecordingError(Exception):
    """Raised when a file cannot be written or played; the message has the file and the reason."""


class SessionRecorder:
    """Writes a recording. Each line is complete in the file once it is written, so a kill loses none before it."""

    def __init__(self, path: Path, began_ns: int) -> None:
        self._path, self._began = path, began_ns
        self._broke: str | None = None
        self._last: dict[str, bytes] = {}
        """A digest of the last answer to each question."""
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
        """The state of the recording, in a few words."""
        return f"recording to {self._path}" if self._broke is None else f"not recorded any more: {self._broke}"

    @property
    def problem(self) -> str | None:
        """The reason why the recording is incomplete; None when it is complete."""
        return None if self._broke is None else f"--record: {self._path} ends before its end: {self._broke}"

    def add(self, question: str, body: bytes, now_ns: int, status: int | None = None) -> None:
        """Add an answer, or a refusal with its status, unless the last one to the question was the same."""
        digest = hashlib.sha256(b"%d %s" % (status or 0, body)).digest()
        if question != FEED and self._last.get(question) == digest:
            return
        self._last[question] = digest
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
        except OSError as e:  # the TUI goes on without the recording
            self._broke = e.strerror or str(e)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as e:
            self._broke = self._broke or e.strerror or str(e)


class RecordingClient(Client):
    """A client that records its answers."""

    def __init__(self, recorder: SessionRecorder, url: str, key: str | None, compressed: bool) -> None:
        super().__init__(url, key, compressed=compressed)
        self._recorder = recorder

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        question = question_key(method, path, params)
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
        async for digest in super().digests(since, every_s, lost):
            self._recorder.add(FEED, digest.model_dump_json().encode(), time.time_ns())
            yield digest


def question_key(method: str, path: str, params: Mapping[str, str | int | None] | None, moving: bool = True) -> str:
    """The text of a question in a recording. `moving`: with the parameters that differ between looks."""
    given = {k: v for k, v in sorted((params or {}).items()) if v is not None and (moving or k not in MOVING)}
    return " ".join([method, path, *(f"{name}={value}" for name, value in given.items())])


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """A line of a recording; `status` is that of a refusal, else None."""

    at_ns: int
    body: bytes
    status: int | None


@dataclass(slots=True)
class SessionRecording:
    """A recording that was read."""

    began_ns: int
    ended_ns: int = 0
    """The time of the last answer; ns since the beginning."""
    answers: dict[str, list[RecordedAnswer]] = field(default_factory=dict[str, list[RecordedAnswer]])
    """The answers to each question, in order."""
    loose: dict[str, list[RecordedAnswer]] = field(default_factory=dict[str, list[RecordedAnswer]])
    """The same, by the question without the parameters `MOVING`."""
    feed: list[RecordedAnswer] = field(default_factory=list[RecordedAnswer])


def load(path: Path) -> SessionRecording:
    """Read a recording; one that was cut off by a kill, as far as it goes. Raises `RecordingError`."""
    lines = _lines(path)
    try:
        head = next(lines, dict[str, Any]())
        found = SessionRecording(began_ns=int(head["began_ns"] if head["format"] == FORMAT else ""))
    except (KeyError, TypeError, ValueError):
        raise RecordingError(f"{path} is not a recording of `penstock tui --record`") from None
    try:
        _take_in(found, lines)
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise RecordingError(f"{path} is damaged: a line of it is no answer ({type(e).__name__}: {e})") from None
    return found


def _take_in(found: SessionRecording, lines: Iterator[dict[str, Any]]) -> None:
    for line in lines:
        body = base64.b64decode(line["base64"]) if "base64" in line else str(line["text"]).encode()
        answer = RecordedAnswer(int(line["at_ns"]), body, line.get("status"))
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


class ReplayClock:
    """The time of a recording: it runs from the beginning, and stops at the end."""

    def __init__(self, recording: SessionRecording, at_end: bool = False) -> None:
        self._recording, self._at_end = recording, at_end
        self._started_ns = time.monotonic_ns()

    def since_ns(self) -> int:
        """The time since the beginning of the recording; ns."""
        if self._at_end:
            return self._recording.ended_ns
        return min(time.monotonic_ns() - self._started_ns, self._recording.ended_ns)

    def now_ns(self) -> int:
        """The recorded time of day; ns since the epoch."""
        return self._recording.began_ns + self.since_ns()


class ReplayClient(Client):
    """A client that answers from a recording."""

    def __init__(self, recording: SessionRecording, clock: ReplayClock) -> None:
        super().__init__("http://127.0.0.1")
        self._recording, self._clock = recording, clock

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def read(
        self, method: str, path: str, params: Mapping[str, str | int | None] | None = None, body: str | None = None
    ) -> bytes:
        """The recorded answer to a question; raises `ClientError` when there is none, or when it was a refusal."""
        if method != "GET":
            raise NotAllowed("a recording is played: nothing can be changed in it", 403)
        exact, loose = question_key(method, path, params), question_key(method, path, params, moving=False)
        found = self._recording.answers.get(exact) or self._recording.loose.get(loose)
        if not found:
            raise NotFound(f"this recording does not hold {path}: it holds what was opened while it was made", 404)
        answer = self._at(found)
        self.received += len(answer.body)
        if answer.status is not None:
            raise REFUSALS.get(answer.status, Refused)(answer.body.decode(), answer.status)
        return answer.body

    def _at(self, answers: Sequence[RecordedAnswer]) -> RecordedAnswer:
        """The last answer until now, or the first one."""
        now = self._clock.since_ns()
        return next((one for one in reversed(answers) if one.at_ns <= now), answers[0])

    async def rollout_page(self, filter: str, limit: int, cursor: str | None) -> RolloutPage:
        """The rollouts that are known until now and match, newest first; the recorded answer where a filter is about
        calls, and where no list was recorded."""
        found = None if cursor is not None else self._matching(filter)
        if found is None:
            return await super().rollout_page(filter, limit, cursor)
        return RolloutPage(rollouts=sorted(found, key=lambda row: row.created_ns, reverse=True), next=None)

    async def rollouts_by_id(self, ids: Sequence[str], filter: str = "") -> list[RolloutSummary]:
        """Rows from any recorded answers that have them; none where a filter is about calls."""
        found = {row.id: row for row in self._matching(filter) or ()}
        return [found[id] for id in ids if id in found]

    def _matching(self, filter: str) -> list[RolloutSummary] | None:
        """The known rollouts that match; None where they cannot be told."""
        try:
            query = parse(filter, "rollouts", self._clock.now_ns())
        except QueryError as error:
            raise Refused(str(error), 400) from None
        rows = self._rows()
        if query.needs_spans or not rows:
            return None
        return [row for row in rows.values() if all(test(row, None) for test in (*query.on_rollout, *query.on_cost))]

    def _rows(self) -> dict[str, RolloutSummary]:
        """The rollouts of all lists, as they were last seen until now."""
        pages = [name for name in self._recording.answers if name.startswith("GET /api/rollouts ")]
        rows: dict[str, RolloutSummary] = {}
        for answer in sorted((self._at(self._recording.answers[name]) for name in pages), key=lambda one: one.at_ns):
            if answer.status is None:
                page = RolloutPage.model_validate_json(answer.body, extra="ignore")
                rows |= {row.id: row for row in page.rollouts}
        return rows

    async def digests(
        self, since: int | None = None, every_s: float = 1.0, lost: Callable[[ClientError], None] | None = None
    ) -> AsyncGenerator[Digest]:
        """Yield the digests at their recorded times, then nothing more. Of digests that are past at the start only the
        sums are yielded: answers have the rest.
        """
        begun = self._clock.since_ns()
        for answer in self._recording.feed:
            digest = Digest.model_validate_json(answer.body, extra="ignore")
            if answer.at_ns < begun:
                digest.rollouts, digest.more = [], 0
            if (wait_ns := answer.at_ns - self._clock.since_ns()) > 0:
                await asyncio.sleep(wait_ns / 1e9)
            yield digest
        await asyncio.Event().wait()
