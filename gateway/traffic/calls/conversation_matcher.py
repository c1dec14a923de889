"""Joins calls without an address to the conversations that they continue. For the event loop.

A thread does the work that would delay other calls, and only the call that needs it waits: it decodes large requests,
reads large conversations, and reads answers if only these distinguish equal conversations. With several workers the
leader keeps the conversations for all: in the others every such call waits for the leader's answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Protocol, TypeVar

from penstock.gateway.reading.turns import decode_body
from penstock.gateway.traffic.calls.call_request import RETRY_COUNT, CallAddress, CallRequest
from penstock.gateway.traffic.calls.conversations import (
    COUNTED_S,
    EMPTY,
    ConversationEnd,
    ConversationFingerprint,
    ConversationIndex,
    ConversationMatch,
    FingerprintCache,
    ParsedConversation,
    ReadableAnswer,
    RepeatableRequest,
    UnreadAnswer,
    new_rollout,
)
from penstock.gateway.wire.dialects.request_body import COMPACTED, LARGE
from penstock.gateway.wire.http.client_connection import ConnectionHints
from penstock.gateway.wire.http.headers import CREDENTIALS
from penstock.gateway.wire.http.request import Headers

_log = logging.getLogger("penstock.proxy")
_DIGITS = 9
"""Digits that a count of retries has fewer of."""
T = TypeVar("T")


class RemoteConversations(Protocol):
    """The conversations, if the leader keeps them for this worker."""

    async def find(
        self,
        story: ConversationFingerprint,
        previous: str | None,
        answers: bool,
        hints: ConnectionHints,
        repeats: RepeatableRequest | None,
    ) -> ConversationMatch:
        """Find a call's rollout, as `ConversationMatcher.find` does."""
        ...

    def remember(
        self,
        found: ConversationMatch,
        key: int | None,
        hints: ConnectionHints,
        rollout: str,
        answer: UnreadAnswer,
        names: list[str],
    ) -> None:
        """Remember an answered call, as `ConversationMatcher.remember_answer` does."""
        ...

    def undo(self, found: ConversationMatch, key: int | None) -> None:
        """Take back a failed call, as `ConversationIndex.undo` does. `key`: None if it has continued no
        conversation."""
        ...

    def remember_failed(self, request: RepeatableRequest, hints: ConnectionHints, rollout: str) -> None:
        """Remember a failed call, as `FailedCalls.remember` does."""
        ...


class ConversationMatcher:
    """Joins all calls of one process. It keeps the conversations itself unless they are elsewhere."""

    def __init__(self, elsewhere: RemoteConversations | None = None) -> None:
        self.conversations = ConversationIndex()
        self._remote = elsewhere
        self._fingerprints = FingerprintCache()
        self._ended: list[tuple[CallRequest, ConnectionHints, UnreadAnswer | None, bool]] = []
        """Calls that have ended in this turn of the loop, not remembered yet."""
        self._following = set[asyncio.Future[None]]()
        self._thread = ThreadPoolExecutor(1, "penstock-reader")
        """One thread, so that work is done in the order of requests."""

    # -- a call begins -----------------------------------------------------------------------------------------------

    def match(self, call: CallRequest, hints: ConnectionHints, headers: Headers | tuple[()] = ()) -> CallAddress:
        """The implicit rollout of a call that names none; a new one for now, if finding it takes longer."""
        call.anonymous, call.headers = True, headers
        if hints.failed or self.conversations.failed.calls or self._remote is not None:
            self.conversations.failed.forget(monotonic() - COUNTED_S)
            call.repeats = _repeated(call, hints)
        if call.encodings is not None:
            return CallAddress(new_rollout(), origin="implicit")
        read = self._fingerprints.follow(call.dialect, call.body)
        if read is None:
            if len(call.body) > LARGE:
                call.waits = True
                return CallAddress(new_rollout(), origin="implicit")
            read = self._fingerprints.read(call.dialect, call.body)
            self._fingerprints.add_stem(call.dialect, call.body, read)
        call.set_conversation(read)
        return self._given(call, hints)

    def follow(self, call: CallRequest, hints: ConnectionHints, then: Callable[[], None]) -> None:
        """Do the work that a call waits for, and call `then` when its rollout, and its request, are known."""
        following = asyncio.ensure_future(self._follow(call, hints))
        self._following.add(following)

        def done(following: asyncio.Future[None]) -> None:
            self._following.discard(following)
            if following.cancelled():
                return
            if (error := following.exception()) is not None:
                _log.error("a conversation could not be followed: it opens a new rollout", exc_info=error)
                call.encodings, call.waits = None, False
            then()

        following.add_done_callback(done)

    async def _follow(self, call: CallRequest, hints: ConnectionHints) -> None:
        if call.encodings is not None or call.conversation is None:
            body, read = await self.on_thread(lambda: self._catch_up(call))
            if body is not None:
                call.encoded_body, call.body = call.body, body
            call.encodings, call.waits = None, False
            if read is not None:
                call.set_conversation(read)
                self._fingerprints.add_stem(call.dialect, call.body, read)
            if call.anonymous:
                call.address = self._given(call, hints)
        while call.waits:
            if self._remote is None:
                unread = call.match.unread
                await self.on_thread(lambda: read_answers(unread))  # noqa: B023 - it is done before the next one
                call.address = self._given(call, hints)
            else:
                call.match = await self._remote.find(
                    call.conversation or EMPTY, call.previous, call.dialect.answers, hints, call.repeats
                )
                call.waits = False
                found = call.match
                hints.last = rollout = found.rollout or new_rollout()
                call.address = CallAddress(rollout, origin="implicit", ambiguous=found.ambiguous, retry=found.retry)

    async def on_thread(self, do: Callable[[], T]) -> T:
        """Run a slow function on the thread, after all earlier ones."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, do)

    def _catch_up(self, call: CallRequest) -> tuple[bytes | None, ParsedConversation | None]:
        """The request without its content encodings, if it has any, and its conversation, if that matters; on the
        thread."""
        body = read = None
        try:
            if call.encodings is not None:
                body = decode_request(call.body, call.encodings)
            if call.anonymous and call.conversation is None:
                read = self._fingerprints.read(call.dialect, call.body if body is None else body)
        except Exception:
            _log.exception("a conversation could not be read: it opens a new rollout")
        return body, read

    def _given(self, call: CallRequest, hints: ConnectionHints) -> CallAddress:
        """The rollout that the conversation continues, else that of the connection if there is no conversation, else a
        new one."""
        story = call.conversation or EMPTY
        if call.dialect.retrieves:
            fetched = call.dialect.fetched_response(call.path)
            known = fetched is not None and self.conversations.find_response(fetched) is not None
            call.previous = fetched if known or self._remote is not None else None
        if call.previous is not None and not call.previous.startswith(COMPACTED):
            # Such a request has only the new items.
            call.conversation = story = EMPTY
        if self._remote is not None and (story.items or call.previous is not None or call.repeats is not None):
            call.waits = True
            return CallAddress(new_rollout(), origin="implicit")
        call.match = found = self.find(story, call.previous, call.dialect.answers, hints, call.repeats)
        call.waits = bool(found.unread)
        rollout = found.rollout or new_rollout()
        return CallAddress(rollout, origin="implicit", ambiguous=found.ambiguous, retry=found.retry)

    def find(
        self,
        story: ConversationFingerprint,
        previous: str | None,
        answers: bool,
        hints: ConnectionHints,
        repeats: RepeatableRequest | None = None,
    ) -> ConversationMatch:
        """The rollout of a call with this conversation on a connection; a new one if it continues none. `previous`: the
        name of the answer that it continues; `answers`: its answer can be continued; `repeats`: its request, if it may
        be a retry. If the result has unread answers, read them and call again."""
        known = None if previous is None else self.conversations.find_response(previous)
        found = ConversationMatch(known) if known is not None else self.conversations.find(story, hints)
        if repeats is not None and found.rollout is None and not found.unread:
            found = self.conversations.failed.find(repeats, hints, monotonic()) or found
        if previous is None and not story.items:
            found.rollout = found.rollout or hints.last
        if not found.unread:
            found.rollout = found.rollout or new_rollout()
            if answers or not story.items:
                self.conversations.follow(found, story, hints, found.rollout)
        return found

    # -- a call ends -------------------------------------------------------------------------------------------------

    def remember_soon(
        self, call: CallRequest, hints: ConnectionHints, answer: UnreadAnswer | None, failed: bool = False
    ) -> None:
        """Remember a call, as `remember` does, when the bytes of this turn of the loop have gone out, but before a
        client can react. If conversations are elsewhere, before these bytes: the client may continue in that worker
        before this process runs again."""
        if self._remote is not None:
            self._remember(call, hints, answer, failed)
            return
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._remember_all)
        self._ended.append((call, hints, answer, failed))

    def _remember_all(self) -> None:
        ended, self._ended = self._ended, []
        for call, hints, answer, failed in ended:
            self._remember(call, hints, answer, failed)

    def _remember(self, call: CallRequest, hints: ConnectionHints, answer: UnreadAnswer | None, failed: bool) -> None:
        try:
            self.remember(call, hints, answer, failed)
        except Exception:
            _log.exception("the end of a call of %s could not be remembered", call.address.rollout)

    def remember(
        self, call: CallRequest, hints: ConnectionHints, answer: UnreadAnswer | None, failed: bool = False
    ) -> None:
        """Remember a call that a later request may continue or repeat. `answer`: None if it got none; `failed`: its
        client did not get the whole of a good answer, and may try again."""
        story, dialect = call.conversation, call.dialect
        if call.anonymous and not call.waits:
            hints.failed = failed
            if failed and (request := _repeatable(call)) is not None:
                if self._remote is not None:
                    self._remote.remember_failed(request, hints, call.address.rollout)
                else:
                    self.conversations.failed.remember(request, hints, call.address.rollout, monotonic())
        if story is None or call.waits or not (dialect.answers or dialect.stateful):
            return
        key = story.key if story.items and dialect.answers else None
        kept = dialect.stateful or (dialect.state_field is not None and dialect.state_field in call.body)
        names = [] if answer is None or not kept else dialect.continuation_names(answer.body(), answer.stream)
        if answer is not None and self._remote is None:
            self.remember_answer(call.match, key, hints, call.address.rollout, answer, names)
        elif answer is not None and self._remote is not None and (key is not None or names):
            self._remote.remember(call.match, key, hints, call.address.rollout, answer, names)
        elif self._remote is not None and (key is not None or call.match.number):
            # No call can continue it, so the leader need not remember it.
            self._remote.undo(call.match, key)
        elif key is not None:
            self.conversations.undo(call.match, key)

    def remember_answer(
        self,
        found: ConversationMatch,
        key: int | None,
        hints: ConnectionHints,
        rollout: str,
        answer: ReadableAnswer,
        names: list[str],
    ) -> None:
        """Remember that a call was answered. `key`: of its conversation, if it has one; `names`: those by which later
        requests may name the answer."""
        if key is not None:
            ended = self.conversations.remember(key, found, hints, rollout, answer)
            if ended:
                asyncio.get_running_loop().run_in_executor(self._thread, read_answers, ended)
        for name in names:
            self.conversations.remember_response(name, rollout)


def _repeatable(call: CallRequest) -> RepeatableRequest | None:
    """A call's request as it is recognised when it comes again; None if it has no body."""
    body = call.body if call.encoded_body is None else call.encoded_body
    if not body:
        return None
    said = {low: value for low, _, value in call.headers if low == RETRY_COUNT or low in CREDENTIALS}
    tries = said.pop(RETRY_COUNT, b"")
    # A longer body takes too long to hash: conversations differ at their end, and pictures in every part.
    told = body if len(body) <= LARGE else (len(body), body[:: len(body) // LARGE + 1], body[-LARGE // 2 :])
    count = int(tries) if tries.isdigit() and len(tries) < _DIGITS else None
    return RepeatableRequest(hash((call.path, told, *sorted(said.values()))), count)


def _repeated(call: CallRequest, hints: ConnectionHints) -> RepeatableRequest | None:
    """A call's request if it may repeat a call that failed: its client has counted it, or says nothing and its last
    call on the connection failed."""
    tries = next((value for low, _, value in call.headers if low == RETRY_COUNT), None)
    may = hints.failed if tries is None else tries != b"0"
    return _repeatable(call) if may else None


def decode_request(packed: bytes, names: str) -> bytes | None:
    """A request without its content encodings. None if it passes unchanged, unread if these cannot be undone."""
    body, problem = decode_body(packed, names)
    return None if problem is not None or body is packed else body


def read_answers(some: Iterable[ConversationEnd]) -> None:
    """Read answers; on the thread."""
    for ended in some:
        try:
            ended.settle()
        except Exception:
            _log.exception("an answer of %s could not be read", ended.rollout)
            ended.answer = None
