"""`penstock mcp replay`: the recorded servers of a rollout as one MCP server, so that agents can be tried without them.

Lines of JSON-RPC come in, lines go out. Results are sent as the recorded bytes. Only the ids (the client's own in
answers to it), the progress token, and line ends between values, which a line cannot have, are replaced. The player
waits only for the client's answers to a recorded server's requests. It accepts any answer, because the recording has
only one continuation, and a note says where it differs. `replay_calls` makes calls of the spans, and finds the recorded
call of a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any, Final, cast

import msgspec

from penstock.console.mcp_server.replay_calls import (
    ACKNOWLEDGED,
    LISTENING,
    CallMatcher,
    ReplayCall,
    ReplayMessage,
    ReplayMiss,
    SpanExchange,
    canonical,
    differences,
    fields,
    read,
    result_of,
    target_of,
    value_of,
)
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.wire.dialects.loose_json import arr, obj, objs, text
from penstock.gateway.wire.dialects.mcp import CALL, JsonRpcMessage, cancelled_request_id, messages

DISCOVER: Final = "server/discover"
INITIALIZE: Final = "initialize"
LISTS: Final = {
    "tools/list": ("tools", "name"),
    "prompts/list": ("prompts", "name"),
    "resources/list": ("resources", "uri"),
    "resources/templates/list": ("resourceTemplates", "uriTemplate"),
}
"""Method -> the member of its result that holds the list, and the unique member of an element."""
_USES: Final = {CALL: "tools/list", "prompts/get": "prompts/list", "resources/read": "resources/list"}
_CAPABILITIES: Final = {"tools": "tools", "prompts": "prompts", "resources": "resources", "completion": "completions",
                        "logging": "logging"}  # fmt: skip
"""First part of a method -> the capability that declares it."""
_VERSION: Final = "io.modelcontextprotocol/protocolVersion"
_INFO: Final = "io.modelcontextprotocol/serverInfo"
_LAST_WITH_SESSIONS: Final = "2025-11-25"
NAME: Final = "penstock-replay"
_FRESH: Final = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
"""Additional members of a result in a revision without sessions."""
_UNREADABLE, _NO_REQUEST, _FAILED = -32700, -32600, -32603
_PROGRESS: Final = "notifications/progress"
_SUBSCRIPTION: Final = "io.modelcontextprotocol/subscriptionId"
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode
_MOST_NAMED = 5
PIECE = 1 << 16


async def load_calls(client: Client, rollout: str, attempt: str | None, server: str | None) -> list[ReplayCall]:
    """The recorded calls of MCP servers. All refusals come here, before a client is answered: raises `ClientError` if
    there is no call that can be played."""
    attempt = attempt or await _only_attempt(client, rollout)
    spans = {one.sequence: one async for one in client.spans(rollout, attempt) if one.kind in ("tool", "mcp")}
    exchanges = list[SpanExchange]()
    async for one in client.exchanges(rollout, "tools"):
        if one.attempt == attempt and one.sequence in spans:
            exchanges.append(SpanExchange(spans[one.sequence], one.request, one.response))
    calls = read(exchanges)
    where = f"{rollout}/{attempt}"
    if not calls:
        raise ClientError(
            f"{where} has no recorded call of a server of tools: tools of agents are recorded when their address is "
            "below the gateway's (docs/mcp.md)"
        )
    servers = ", ".join(dict.fromkeys(call.server for call in calls))
    if server is not None:
        calls = [call for call in calls if call.server == server]
        if not calls:
            raise ClientError(f"--server: {where} has no recorded call of {server!r}; it has calls of: {servers}")
    _refuse_collisions(calls, where)
    return calls


async def _only_attempt(client: Client, rollout: str) -> str:
    attempts = [one.id for one in await client.attempts(rollout)]
    if len(attempts) != 1:
        named = ", ".join(attempts[:20]) or "none"
        raise ClientError(f"rollout {rollout!r} has {len(attempts)} attempts ({named}): say which, with --attempt ID")
    return attempts[0]


def _refuse_collisions(calls: Sequence[ReplayCall], where: str) -> None:
    """Raises `ClientError` if two servers have tools, prompts or resources of one name: none is chosen silently."""
    found = list(ReplayCatalog(calls).collisions())
    if found:
        named = "; ".join(f"{what} {name!r}: {', '.join(who)}" for what, name, who in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if found[_MOST_NAMED:] else ""
        raise ClientError(
            f"servers of {where} have the same names ({named}{more}): play one of them, with --server NAME"
        )


# -- the server ----


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


# -- the offer of a recording: the beginning of a session, and the lists of tools, prompts and resources ----
#
# For one server the recorded answers are played. Answers that were not recorded, and answers for several servers
# together, are made here from the tape.


class ReplayCatalog:
    """The tools, prompts, resources and capabilities of the recorded servers, one or several."""

    def __init__(self, calls: Sequence[ReplayCall]) -> None:
        self._calls = calls
        self.servers = list(dict.fromkeys(call.server for call in calls))
        self._recorded = {call.method for call in calls if "result" in fields(call.answer or b"")}

    def collisions(self) -> Iterator[tuple[str, str, list[str]]]:
        """(kind, name, servers) of every name that several servers have."""
        for method, (what, _) in LISTS.items():
            owners: dict[str, list[str]] = {}
            for server in self.servers:
                for name in dict.fromkeys(self._names(server, method)):
                    owners.setdefault(name, []).append(server)
            yield from ((what, name, who) for name, who in owners.items() if len(who) > 1)

    def make_result(self, method: str, params: Any) -> dict[str, Any] | None:
        """A result for a request whose recorded answer cannot be played; None if there is none."""
        if len(self.servers) == 1 and method in self._recorded:
            return None
        if method == INITIALIZE:
            return self._initialize(params)
        if method == DISCOVER:
            return self._discover() if self.modern else None
        if method in LISTS and obj(params).get("cursor") is None:
            return self._list(method)
        return {} if method == "ping" else None

    @property
    def modern(self) -> bool:
        """True if all servers were used in a revision without sessions."""
        return all(self._versions(server) for server in self.servers)

    def _versions(self, server: str) -> list[str]:
        """The revisions without sessions that a server knows."""
        found = list[str]()
        for call in self._of(server):
            if call.method == DISCOVER:
                found += [one for one in arr(obj(result_of(call)).get("supportedVersions")) if isinstance(one, str)]
            elif (version := text(obj(obj(call.params).get("_meta")).get(_VERSION))) is not None:
                found.append(version)
        return [one for one in dict.fromkeys(found) if one > _LAST_WITH_SESSIONS]

    def _initialize(self, params: Any) -> dict[str, Any]:
        asked = text(obj(params).get("protocolVersion")) or _LAST_WITH_SESSIONS
        recorded = [one for said in self._said(INITIALIZE) if (one := text(said.get("protocolVersion"))) is not None]
        version = min(recorded) if recorded else min(asked, _LAST_WITH_SESSIONS)
        return {"protocolVersion": version, "serverInfo": self._info(), **self._abilities()}

    def _discover(self) -> dict[str, Any]:
        versions = [self._versions(server) for server in self.servers]
        common = [one for one in versions[0] if all(one in others for others in versions)]
        return {
            "supportedVersions": common or versions[0],
            "_meta": {_INFO: self._info()},
            **self._abilities(),
            **_FRESH,
        }

    def _abilities(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        said = list[str]()
        for server in self.servers:
            opened = [*self._said(INITIALIZE, server), *self._said(DISCOVER, server)]
            declared = [obj(one.get("capabilities")) for one in opened] or [self._used(server)]
            for one in declared:
                _merge(found, one)
            words = next(filter(None, (text(one.get("instructions")) for one in opened)), None)
            if words:
                said.append(words if len(self.servers) == 1 else f"{server}: {words}")
        return {"capabilities": found, **({"instructions": "\n\n".join(said)} if said else {})}

    def _used(self, server: str) -> dict[str, Any]:
        parts = (call.method.partition("/")[0] for call in self._of(server))
        return {_CAPABILITIES[part]: {} for part in parts if part in _CAPABILITIES}

    def _info(self) -> dict[str, Any]:
        if len(self.servers) == 1:
            for said in (*self._said(INITIALIZE), *self._said(DISCOVER)):
                info = obj(said.get("serverInfo")) or obj(obj(said.get("_meta")).get(_INFO))
                if info:
                    return info
        return {"name": NAME, "version": "1"}

    def _list(self, method: str) -> dict[str, Any] | None:
        what, unique = LISTS[method]
        found = list[Any]()
        for server in self.servers:
            listed = self._listed(server, method)
            # Of a tool that was called without being listed only the name is known.
            found += listed or [_unlisted(what, unique, name) for name in dict.fromkeys(self._names(server, method))]
        known = found or any(call.method == method for call in self._calls)
        return {what: found, **(_FRESH if self.modern else {})} if known else None

    def _names(self, server: str, method: str) -> Iterator[str]:
        """The names that a server has listed, and those that were used."""
        for one in objs(self._listed(server, method)):
            if (name := text(one.get(LISTS[method][1]))) is not None:
                yield name
        for call in self._of(server):
            if _USES.get(call.method) == method and (name := target_of(call)) is not None:
                yield name

    def _listed(self, server: str, method: str) -> list[Any]:
        """The pages of the list when it was last read."""
        pages = list[Any]()
        for call in self._of(server):
            result = result_of(call) if call.method == method else None
            if result is not None:
                pages = pages if obj(call.params).get("cursor") is not None else []
                pages = pages + arr(result.get(LISTS[method][0]))
        return pages

    def _said(self, method: str, server: str | None = None) -> list[dict[str, Any]]:
        calls = [call for call in self._calls if call.method == method and server in (None, call.server)]
        return [result for call in calls if (result := result_of(call)) is not None]

    def _of(self, server: str) -> Iterator[ReplayCall]:
        return (call for call in self._calls if call.server == server)


def _unlisted(what: str, unique: str, name: str) -> dict[str, Any]:
    one = {"name": name} | {unique: name}
    return one | {"inputSchema": {"type": "object"}} if what == "tools" else one


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], cast("dict[str, Any]", value))
        else:
            into[name] = into.get(name) or value


# -- lines of stdin ----
#
# The SDK's own reader holds Ctrl-C back until the next line arrives. This one reads the descriptor itself, in a thread
# that the process does not wait for, without a lock of the interpreter, so that the process can end while it waits.


class LineReader:
    """Lines of a descriptor, read from its creation on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        Thread(target=self._read, name="stdin", daemon=True).start()

    async def __aiter__(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line

    def _read(self) -> None:
        waiting = bytearray()
        # The loop is closed if the server has ended first.
        with suppress(RuntimeError):
            while piece := self._piece():
                waiting += piece
                *whole, rest = waiting.split(b"\n") if b"\n" in piece else [waiting]
                waiting = rest
                for line in whole:
                    self._put(line.decode(errors="replace"))
            if waiting:
                self._put(waiting.decode(errors="replace"))
            self._put(None)

    def _piece(self) -> bytes:
        """The next bytes; empty at the end and after an error."""
        try:
            return os.read(self._descriptor, PIECE)
        except OSError:
            return b""

    def _put(self, line: str | None) -> None:
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
