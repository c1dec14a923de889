"""The server that plays a recording: lines of JSON-RPC in, lines out.

Results are sent as the recorded bytes. Only the ids (the client's own in answers to it), the progress token, and line
ends between values, which a line cannot have, are replaced. The player waits only for the client's answers to a
recorded server's requests. It accepts any answer, because the recording has only one continuation, and a note says
where it differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from penstock.console.mcp_server.replay.catalog import DISCOVER, ReplayCatalog
from penstock.console.mcp_server.replay.matcher import CallMatcher, ReplayMiss, canonical, differences
from penstock.console.mcp_server.replay.replay_calls import (
    ACKNOWLEDGED,
    LISTENING,
    ReplayCall,
    ReplayMessage,
    fields,
    value_of,
)
from penstock.gateway.wire.dialects.loose_json import obj
from penstock.gateway.wire.dialects.mcp import JsonRpcMessage, cancelled_request_id, messages

_UNREADABLE, _NO_REQUEST, _FAILED = -32700, -32600, -32603
_PROGRESS: Final = "notifications/progress"
_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode


class Player:
    """One client's session with a recording."""

    def __init__(
        self, calls: Sequence[ReplayCall], write: Callable[[bytes], None], note: Callable[[str], None]
    ) -> None:
        """`write`: writes a line, which is given without its end; `note`: shows a message to a person."""
        self._matcher, self._offer = CallMatcher(calls), ReplayCatalog(calls)
        self._write, self._note = write, note
        self._asked = 0
        """The number of requests sent to the client."""
        self._asking: dict[bytes, asyncio.Future[bytes | None]] = {}
        """Requests that the client has not answered, by id."""
        self._playing: dict[bytes, asyncio.Task[bytes]] = {}
        """Calls that are being played, by the client's id."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = False
        """True if the client sends no more lines."""

    async def play(self, lines: AsyncIterable[str]) -> None:
        """Answers until the lines end, and then the requests that can still be answered."""
        async for line in lines:
            if data := line.strip().encode():
                self._take(data)
        self._ended = True
        for waiting in self._asking.values():
            waiting.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _take(self, data: bytes) -> None:
        answers = list[asyncio.Task[bytes]]()
        for sent in messages(data):
            if sent.kind == "request":
                answers.append(self._answer(sent))
            elif sent.kind == "notification":
                playing = self._playing.get(cancelled_request_id(sent) or b"")
                if playing is not None:
                    playing.cancel()
            elif sent.kind == "answer":
                self._answered(sent)
            else:
                code, what = (
                    (_NO_REQUEST, "this is no message") if fields(sent.raw) else (_UNREADABLE, "this is no JSON")
                )
                self._write(_error(b"null", code, f"{what} of JSON-RPC: one message a line", None))
        if answers:
            self._start(self._hand_in(answers, batch=data.startswith(b"[")))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hand_in(self, answers: list[asyncio.Task[bytes]], batch: bool) -> None:
        """Writes the answers to one line, those to a batch as a list."""
        made = await asyncio.gather(*answers, return_exceptions=True)
        lines = [one for one in made if isinstance(one, bytes) and one]
        for failed in made:
            if isinstance(failed, Exception):
                raise failed
        if lines:
            self._write(b"[" + b",".join(lines) + b"]" if batch else lines[0])

    def _answer(self, sent: JsonRpcMessage) -> asyncio.Task[bytes]:
        """Chooses the recorded call now, so that requests are matched in their order, and starts to play it."""
        params = value_of(fields(sent.raw).get("params"))
        made = self._offer.make_result(sent.method, params)
        found = _result(sent.id, made) if made is not None else self._matcher.take(sent.method, params)
        if isinstance(found, ReplayMiss):
            if sent.method != DISCOVER:  # Clients send this to every server, whether it knows the method or not.
                self._note(f"{sent.method}: {found.message}")
            found = _error(sent.id, found.code, found.message, found.data)
        task = asyncio.get_running_loop().create_task(self._say(sent, params, found))
        self._playing[sent.id] = task
        task.add_done_callback(lambda done: self._played(sent.id, done))
        return task

    def _played(self, id: bytes, task: asyncio.Task[bytes]) -> None:
        if self._playing.get(id) is task:
            del self._playing[id]

    async def _say(self, sent: JsonRpcMessage, params: Any, found: bytes | ReplayCall) -> bytes:
        """The answer to a request, after the messages that preceded it; empty if the request stays open."""
        if isinstance(found, bytes):
            return found
        token = obj(obj(params).get("_meta")).get("progressToken")
        for step in found.steps:
            if step.sent.kind == "request":
                await self._ask(step, found)
            elif (line := _notification(step.sent, sent.id, token)) is not None:
                self._write(line)
        if found.answer is not None:
            return _with(found.answer, id=sent.id)
        if found.method == LISTENING:
            return b""
        why = f"in the recording {found.method} ({found.place}) has no answer: {found.missing}"
        return _error(sent.id, _FAILED, why, {"reason": "no_answer", "span": found.place})

    async def _ask(self, step: ReplayMessage, call: ReplayCall) -> None:
        """Sends a server's recorded request to the client, and waits for the answer if the server did."""
        self._asked += 1
        id = b'"replay-%d"' % self._asked
        self._asking[id] = waiting = asyncio.get_running_loop().create_future()
        self._write(_with(step.sent.raw, id=id))
        if step.answer is None:
            return  # The recorded server did not wait either.
        if self._ended:
            waiting.cancel()
        try:
            answer = await waiting
        finally:
            self._asking.pop(id, None)
        self._compare(step.sent.method, call.place, step.answer, answer or b"")

    def _answered(self, sent: JsonRpcMessage) -> None:
        waiting = self._asking.pop(sent.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(sent.raw)

    def _compare(self, method: str, place: str, recorded: bytes, given: bytes) -> None:
        then, now = (_outcome(raw) for raw in (recorded, given))
        if canonical(then) != canonical(now):
            found = "; ".join(map(str, list(differences(then, now))[:3]))
            self._note(
                f"the answer to {method} is another than the recorded one ({place}): {found}. It goes on as then"
            )


def _outcome(raw: bytes) -> dict[str, Any]:
    said = fields(raw)
    return {name: value_of(said[name]) for name in ("result", "error") if name in said}


def _notification(sent: JsonRpcMessage, id: bytes, token: Any) -> bytes | None:
    """A server's notification for this request; None if it has no meaning for this client."""
    if sent.method == "notifications/cancelled":
        return None  # It cancels a request of the server, which has another id now.
    params = fields(bytes(fields(sent.raw).get("params") or b"{}"))
    if sent.method == _PROGRESS:
        if token is None:
            return None
        return _with(sent.raw, params=_encode(params | {"progressToken": msgspec.Raw(_encode(token))}))
    meta = fields(bytes(params.get("_meta") or b"{}"))
    if _SUBSCRIPTION in meta or sent.method == ACKNOWLEDGED:
        meta[_SUBSCRIPTION] = msgspec.Raw(id)
        return _with(sent.raw, params=_encode(params | {"_meta": msgspec.Raw(_encode(meta))}))
    return _with(sent.raw)


def _with(raw: bytes, **other: bytes) -> bytes:
    """A message with other fields, as one line; all other fields keep their bytes."""
    said = fields(raw) | {name: msgspec.Raw(value) for name, value in other.items()}
    return _encode(said).translate(_ONE_LINE)


def _result(id: bytes, result: dict[str, Any]) -> bytes:
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (id, _encode(result))


def _error(id: bytes, code: int, said: str, data: dict[str, Any] | None) -> bytes:
    error = {"code": code, "message": said} | ({} if data is None else {"data": data})
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (id, _encode(error))
