"""`POST /wrapped`, below the address of a rollout: frames of lines that have passed a wrapper.

When the request is answered, its frames are durable. The answer says which frames the wrapper must keep, and which it
must send again because this gateway has lost them in a restart: those of requests that wait for their answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import time_ns
from typing import Annotated, Final
from weakref import WeakValueDictionary

from aiohttp import web
from pydantic import Field, StringConstraints

from penstock.gateway.api.guard import AGENT, ApiError, answer
from penstock.gateway.model.base import Noun
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.model.stdio_frames import PATH, StdioFrame, parse_frames
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.definition_enforcement import DefinitionService, ListRequest
from penstock.gateway.tools.definitions import AttemptRef, cursor_of
from penstock.gateway.tools.pipe import (
    Pipe,
    WrapperSession,
    decode_progress,
    encode_progress,
    keep,
    session_key,
)
from penstock.gateway.traffic.calls.call_request import FIRST_ATTEMPT
from penstock.gateway.wire.http.redaction import Redactor

FRAMES: Final = "application/octet-stream"
SESSIONS: Final = 10_000
"""Most sessions in memory, the most recently used; others are read back from the tape."""


class FrameHeader(Noun):
    """The head of a request of a wrapper: the session and the server that the frames after it belong to."""

    session: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{11}-[0-9a-f]{16}$")]
    """The wrapper's own name for its session."""
    server: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    lost: list[int] = Field(default=[], max_length=100_000)
    """Frames that the gateway needs and the wrapper has no more."""


class FrameReceipt(Noun):
    """The frames of a session that the gateway has, and those that it still needs."""

    done: int
    """Frames up to this number are on the tape or in `open`."""
    open: list[int]
    """Frames of what is not over yet, which the wrapper must keep."""
    need: list[int]
    """Those of them that must be sent before anything else."""
    recorded_bytes: int
    """Bytes of a line that are kept."""


class FrameReceiver:
    """The sessions of all wrappers."""

    def __init__(self, recorder: Recorder, redactor: Redactor, definitions: DefinitionService, limit: int) -> None:
        """`limit`: bytes of a line that are kept."""
        self._recorder, self._redactor, self._definitions, self._limit = recorder, redactor, definitions, limit
        self._pipes: OrderedDict[str, Pipe] = OrderedDict()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[asyncio.Task[FrameReceipt]] = set()

    async def post(self, request: web.Request) -> web.StreamResponse:
        """Frames, or none to learn what is known of a session. Other content types are refused: a foreign web page can
        send those without asking."""
        if request.content_type != FRAMES or "Content-Type" not in request.headers:
            raise ApiError(415, "what a wrapper sends is no text", "Content-Type", request.content_type, (FRAMES,))
        head, _, body = (await request.read()).partition(b"\n")
        try:
            about, some = FrameHeader.model_validate_json(head), list(parse_frames(body))
        except ValueError as error:
            # pydantic names the line of JSON and its field, `parse_frames` the byte.
            message = f"what a wrapper sends is a line of JSON and frames: {' '.join(str(error).split())[:300]}"
            raise ApiError(400, message, "body") from None
        found = request.match_info
        if "rid" in found:
            source = WrapperSession(found["rid"], found["aid"], "header", about.session, about.server)
        else:
            source = WrapperSession(f"i-{about.session}", FIRST_ATTEMPT, "implicit", about.session, about.server)
        key = request.headers.get("Authorization", "").encode("latin-1")
        secrets = self._redactor.secrets([(b"authorization", b"Authorization", key)], "")
        task = asyncio.ensure_future(self._in_turn(source, secrets, some, about.lost))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # A wrapper that disconnects must not interrupt this: memory and tape would then differ.
        return answer(await asyncio.shield(task))

    async def _in_turn(
        self, source: WrapperSession, secrets: Secrets, some: list[StdioFrame], lost: list[int]
    ) -> FrameReceipt:
        """Takes the requests of a session one at a time."""
        name = session_key(source.rollout, source.attempt, source.session)
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = asyncio.Lock()
        async with turn:
            return await self._take(name, source, secrets, some, lost)

    async def _take(
        self, name: str, source: WrapperSession, secrets: Secrets, some: list[StdioFrame], lost: list[int]
    ) -> FrameReceipt:
        pipe = self._pipes.pop(name, None)
        if pipe is None:
            note = await asyncio.to_thread(self._recorder.store.note, name)
            pipe = Pipe(source, decode_progress(note), self._limit)
        pipe.secrets = secrets
        before = pipe.progress()
        # On a thread: reading large messages would hold up calls.
        entries = await asyncio.to_thread(_read, pipe, some, lost)
        after = pipe.progress()
        if after != before and not pipe.need:
            record, now = encode_progress(after), time_ns()
            await self._recorder.submit(lambda transaction: keep(transaction, entries, name, record, now))
        whose = AttemptRef(source.rollout, source.attempt, source.origin)
        for sent, listed in pipe.listed:
            self._definitions.observe_wrapped(
                ListRequest(source.server, sent.method, cursor_of(sent.raw), whose), listed
            )
        pipe.listed.clear()
        if not pipe.over:
            # Only now: if the tape had refused the spans, the memory would be ahead of it.
            self._pipes[name] = pipe
            if len(self._pipes) > SESSIONS:
                self._pipes.popitem(last=False)
        return FrameReceipt(done=pipe.done, open=after.open_frames(), need=pipe.need, recorded_bytes=self._limit)


def _read(pipe: Pipe, some: list[StdioFrame], lost: list[int]) -> list[SpanEntry]:
    pipe.restore(some, lost)
    return [] if pipe.need else pipe.take(some)


WRAPPED: Final = web.AppKey("wrapped", FrameReceiver)


def add_to(application: web.Application, made: FrameReceiver) -> None:
    """Adds the route. The dispatch has checked the scope in the path: see `gateway.process.control_plane`."""
    application[WRAPPED] = made
    for scope in ("none", "{kind}/{rid}/{aid}"):
        application.router.add_post(f"{AGENT}{scope}{PATH}", made.post)
