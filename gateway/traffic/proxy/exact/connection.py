"""The answer to a prompt of token ids, given to a call as if vLLM's chat endpoint had answered.

To a call this is a connection to its upstream (`gateway.wire.http.upstream_connection`): it sends the chat request,
and the answer arrives read by read. A task does the work: it sends the ids to generate, and gives the result to
derender, which tells text from tool calls. Derender paces streaming: each choice has one request under way, and the
next one takes all tokens that have come since. Its result is passed on at once. Cancelling a call cancels generate.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from penstock.gateway.model.turn import Side
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.proxy.exact.chat_answer import (
    END,
    ChatCompletionWriter,
    ChoiceStream,
    GenerateEvent,
    PendingTokens,
    decode_event,
)
from penstock.gateway.traffic.trials.sender import DROPPED
from penstock.gateway.traffic.upstreams.pool import CONNECT_S, ConnectionPool
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import Json, loads, obj
from penstock.gateway.wire.dialects.sse import SseParser
from penstock.gateway.wire.http.headers import LAST_CHUNK, chunk
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.request import HttpRequest, UpstreamFault
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection

# The requests that exact sessions make to vLLM:
#
#     render     POST {base}/chat/completions/render     a chat request -> its token ids and sampling parameters
#     generate   POST {root}/inference/v1/generate       token ids -> token ids
#     derender   POST {base}/chat/completions/derender   token ids -> a chat answer, by the server's own parsers
#
# They need `--enable-scale-out`; seen with vLLM 0.32. `{root}` is the base URL without `/v1`. Requests carry the
# headers of the call that they are made for, and the upstream's own key.

RENDER, DERENDER, GENERATE = "/chat/completions/render", "/chat/completions/derender", "/inference/v1/generate"
_DELAYS: Final = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each further try of derender."""
_PASSING: Final = (429, 500, 502, 503, 504)
"""Statuses of errors that may be over at the next try."""
_OURS: Final = DROPPED | {b"host", b"content-type", b"accept", b"expect"}
_UNTOUCHED: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_HEADERS: Final = [("Content-Type", "application/json"), ("Accept-Encoding", "identity")]


class VllmError(Exception):
    """The engine has refused a request."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}")
        self.status, self.body = status, body


@dataclass(frozen=True, slots=True)
class RenderResponse:
    """A conversation as its template renders it."""

    ids: bytes
    """Token ids as bytes of 32-bit integers."""
    request: Json
    """The request to generate: sampling parameters, model, and the rest."""
    plain: bool
    """True if the ids are all of it: there are no pictures."""


class ExactEngineClient:
    """One upstream, for one call."""

    def __init__(
        self,
        session: Callable[[], aiohttp.ClientSession],
        pool: ConnectionPool,
        request: HttpRequest,
        families: Sequence[Family],
    ) -> None:
        """`request`, `families`: of the call."""
        self.pool = pool
        self._session = session
        self._headers = _headers(pool, request, families)

    @property
    def generates_at(self) -> str:
        """Path of the generate endpoint at this upstream."""
        return self.pool.path.removesuffix("/v1") + GENERATE

    async def render(self, asked: Json) -> RenderResponse:
        """Render a chat request. Raises `VllmError`, `UpstreamFault` if the endpoint is not served, and aiohttp's
        errors."""
        try:
            answer = await self.request(self.pool.target("/v1" + RENDER), orjson.dumps(asked))
        except VllmError as error:
            if not _served(error):
                raise UpstreamFault(502, "scale_out", self._unserved()) from None
            raise
        return _rendered(answer)

    async def derender(self, body: bytes) -> bytes:
        """Return the server's parse of tokens. The request changes nothing and the tokens are there, so one that fails
        is repeated a few times within seconds. Raises `VllmError`, and aiohttp's errors."""
        for delay in _DELAYS:
            try:
                return await self.request(self.pool.target("/v1" + DERENDER), body)
            except (aiohttp.ClientError, TimeoutError, VllmError) as error:
                if isinstance(error, VllmError) and error.status not in _PASSING:
                    raise
                _log.warning("upstream %r could not derender and is asked again: %r", self.pool.name, error)
            await asyncio.sleep(delay)
        return await self.request(self.pool.target("/v1" + DERENDER), body)

    async def request(self, path: str, body: bytes) -> bytes:
        """Return the complete answer. These requests change nothing: one whose connection was closed is sent once
        more."""
        try:
            return await self._ask(path, body)
        except aiohttp.ServerDisconnectedError:
            return await self._ask(path, body)

    async def _ask(self, path: str, body: bytes) -> bytes:
        async with self.post(path, body) as response:
            answer = await response.read()
            if response.status >= 400:
                raise VllmError(response.status, answer)
            return answer

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request and yield the answer; leaving the context early cancels it."""
        read_s = self.pool.config.read_timeout
        bounds = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=read_s)
        async with self._session().post(
            URL(self.pool.origin + path, encoded=True),
            data=body,
            headers=self._headers,
            skip_auto_headers=_UNTOUCHED,
            timeout=bounds,
            allow_redirects=False,
            **self.pool.transport.options,
        ) as response:
            yield response

    def _unserved(self) -> str:
        return (
            f"upstream {self.pool.name!r} ({self.pool.origin}) does not serve {RENDER}, which a route with "
            'train = "exact" needs: start vLLM (0.32 or newer) with --enable-scale-out, or set it to true'
        )


def _headers(pool: ConnectionPool, request: HttpRequest, families: Sequence[Family]) -> list[tuple[str, str]]:
    """The headers that the call itself would send, without those about its own body."""
    head, _ = pool.heads.compose(request, b"/", None, None, families)
    lines = [line.partition(b": ")[::2] for line in head.split(b"\r\n")[1:] if line]
    kept = [(name, value) for name, value in lines if name.lower() not in _OURS]
    return [*_HEADERS, *((name.decode("latin-1"), value.decode("latin-1")) for name, value in kept)]


def _served(error: VllmError) -> bool:
    """True if an error is about the request, and not about a missing endpoint."""
    if error.status in (404, 405):
        # An unknown model is an error of the API; an unknown path is one of the server.
        return bool(obj(loads(error.body)).get("error"))
    return error.status != 403 or b"scale-out" not in error.body


def _rendered(answer: bytes) -> RenderResponse:
    try:
        request: Json = orjson.loads(answer)
        ids = array("i", request.pop("token_ids")).tobytes()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise VllmError(502, f"the engine's rendering cannot be read: {error!r}".encode()) from None
    return RenderResponse(ids, request, request.get("features") is None)


def id_list(ids: bytes) -> list[int]:
    """Ids as a list for JSON."""
    return array("i", ids).tolist()


class PausableTransport(asyncio.Transport):
    """Holds an answer back while its client does not take it; takes the place of a connection's transport."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        self.open.clear()

    def resume_reading(self) -> None:
        self.open.set()

    def abort(self) -> None:
        """Do nothing: there is no socket."""


class ChoiceBuffer:
    """One choice: the tokens that have come and were not sent yet."""

    def __init__(self, voice: ChoiceStream) -> None:
        self.stream = voice
        self.tokens = PendingTokens()
        self.news = asyncio.Event()
        self.over = False

    def take(self) -> PendingTokens:
        """Return and clear all tokens that have come."""
        piece, self.tokens = self.tokens, PendingTokens()
        self.news.clear()
        return piece


_log = logging.getLogger("penstock.exact")
_STREAM: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_PLAIN: Final = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class GenerateConnection(UpstreamConnection):
    """The answer to one call."""

    def __init__(
        self, engine: ExactEngineClient, words: ChatCompletionWriter, request: Json, prompt: bytes, record: CallRecord
    ) -> None:
        """`request`: the answer of render to the call's request; `prompt`: the ids to send instead of those in it."""
        super().__init__(engine.pool)
        self.transport = self._tap = PausableTransport()
        self._engine, self._words, self._record = engine, words, record
        self._streams = bool(request.get("stream"))
        self._request = orjson.dumps(request | {"token_ids": id_list(prompt), "output_mode": "text"})
        self._response: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._buffers: dict[int, ChoiceBuffer] = {}
        self._usage: Any = None
        self._failed: Json | None = None
        self._ended = self._told = False

    # -- the interface of a connection -------------------------------------------------------------------------------

    def send(self, caller: UpstreamCaller, head: bytes, body: bytes) -> None:
        """Send the request to generate; the chat request itself is not sent."""
        self.caller = caller
        self._task = asyncio.ensure_future(self._run())

    def release(self) -> None:
        """Called when the answer is complete."""
        self.caller = None

    def cancel(self) -> None:
        """Cancel generate: nobody waits for the answer."""
        self.caller = None
        self._record_side()
        if self._task is not None:
            self._task.cancel()

    # -- generate ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            async with self._engine.post(self._engine.generates_at, self._request) as response:
                self.seen = True
                if response.status >= 400 or not self._streams:
                    await self._answer(response)
                else:
                    await self._stream(response)
        except* (aiohttp.ClientError, TimeoutError) as errors:
            self._broken("upstream_closed", errors)
        except* (VllmError, ValueError) as errors:
            self._broken("upstream_protocol", errors)
        except* Exception as errors:
            _log.error("an exact call of %s failed", self._record.call.address.rollout, exc_info=errors)
            self._broken("internal", errors)

    def _broken(self, reason: str, errors: BaseExceptionGroup[Exception]) -> None:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        _log.warning("upstream %r broke off an exact call: %r", self.owner.name, first)
        self._record_side()
        self.pieces = []
        self._break(reason)

    def _record_side(self) -> None:
        """Record the engine's own bytes as a side of the call."""
        if self._told or not self.seen:
            return
        self._told = True
        path = redact_url(self._engine.generates_at)
        answer = b"".join(self._response)
        side = Side(who="engine", dialect="generate", path=path, request_body=self._request, response_body=answer)
        self._record.sides = (*self._record.sides, side)

    async def _answer(self, response: aiohttp.ClientResponse) -> None:
        """Pass on a plain answer, or a refusal, which is the same as that of the chat endpoint."""
        answer = await response.read()
        self._response.append(answer)
        if response.status < 400:
            made = decode_event(answer)
            asked = self._words.plain_request(made.choices)
            answer = self._words.plain_answer(made, await self._engine.derender(asked) if asked else None)
        await self._tap.open.wait()
        self._record_side()
        head = _PLAIN % (response.status, (response.reason or "").encode("latin-1", "replace"), len(answer))
        self._begin(response.status, head)
        self.length_known = self.done = True
        self.pieces = [answer]
        if self.caller is not None:
            self.caller.on_answer(self, head, answer)

    async def _stream(self, response: aiohttp.ClientResponse) -> None:
        """Read a streamed answer; a task for each choice sends its events."""
        parser = SseParser()
        async with asyncio.TaskGroup() as speaking:
            async for read in response.content.iter_any():
                self._response.append(read)
                for one in parser.feed(read):
                    self._ended = self._ended or one.data == "[DONE]"
                    if not self._ended:
                        self._take(decode_event(one.data.encode()), speaking)
            for mouth in self._buffers.values():
                mouth.over = True
                mouth.news.set()
        if not self._ended:
            raise ValueError("the stream ended early")
        usage = self._words.usage_event(self._usage) if self._usage else b""
        failed = self._words.error_event(self._failed) if self._failed else b""
        self._record_side()
        self.done = True
        self._emit(failed + usage + END)

    def _take(self, event: GenerateEvent, speaking: asyncio.TaskGroup) -> None:
        self._failed = self._failed or event.error
        self._usage = event.usage if not event.choices else self._usage
        for delta in event.choices:
            mouth = self._buffers.get(delta.index)
            if mouth is None:
                mouth = self._buffers[delta.index] = ChoiceBuffer(ChoiceStream(self._words, delta.index))
                self._emit(self._words.opening(delta.index))
                speaking.create_task(self._stream_choice(mouth))
            mouth.tokens.add(delta, event.usage)
            mouth.news.set()

    # -- derender ----------------------------------------------------------------------------------------------------

    async def _stream_choice(self, mouth: ChoiceBuffer) -> None:
        """Send the events of a choice, as its tokens come."""
        while True:
            if not mouth.over:
                await mouth.news.wait()
            piece = mouth.take()
            if piece.ids or piece.finish is not None:
                answer = await self._engine.derender(mouth.stream.derender_request(piece))
                await self._tap.open.wait()
                self._emit(mouth.stream.event(piece, answer))
            elif mouth.over:
                return
            if piece.finish is not None:
                return

    # -- the answer for the call -------------------------------------------------------------------------------------

    def _begin(self, status: int, head: bytes) -> None:
        self._headed, self.status, self.head = True, status, head

    def _emit(self, payload: bytes) -> None:
        """Pass on events as one read."""
        caller = self.caller
        if caller is None:
            return
        self.pieces.append(payload)
        raw = chunk(payload) + (LAST_CHUNK if self.done else b"")
        if self._headed:
            caller.on_data(self, raw)
            return
        self._begin(200, _STREAM)
        self.chunked, self.content_type = True, EVENT_STREAM
        caller.on_answer(self, _STREAM, raw)
