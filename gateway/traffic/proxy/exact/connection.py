"""The answer to a prompt of token ids, given to a call as if vLLM's chat endpoint had answered.

To a call this is a connection to its upstream (`gateway.wire.http.upstream_connection`): it sends the chat request,
and the answer arrives read by read. A task does the work: it sends the ids to generate, and gives the result to
derender, which tells text from tool calls. Derender paces streaming: each choice has one request under way, and the
next one takes all tokens that have come since. Its result is passed on at once. Cancelling a call cancels generate.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import aiohttp
import orjson

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
from penstock.gateway.traffic.proxy.exact.vllm import ExactEngineClient, VllmError, id_list
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.loose_json import Json
from penstock.gateway.wire.dialects.sse import SseParser
from penstock.gateway.wire.http.headers import LAST_CHUNK, chunk
from penstock.gateway.wire.http.redaction import url as redact_url
from penstock.gateway.wire.http.upstream_connection import UpstreamCaller, UpstreamConnection


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
