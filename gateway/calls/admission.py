"""Which rollout does a call belong to, and may it pass? The first steps in the life of a call; nothing here does I/O.

An address in the path, the headers or the baggage comes first, then an agent token, then the conversation that the
request continues, or the connection it comes on. A thread does the work that would hold other calls up, and only the
call that needs it waits: it reads large conversations, and answers where only these tell equal conversations apart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from penstock.gateway.calls.address import SESSION_HEADERS, Address, AddressError, from_headers, from_path
from penstock.gateway.calls.auth import KEY_PREFIX, Auth, AuthError
from penstock.gateway.calls.conversations import Answer, Conversations, Ended, Found, new_rollout
from penstock.gateway.calls.fingerprints import EMPTY, Fingerprints, Read, Story
from penstock.gateway.calls.targets import check_path, check_target
from penstock.gateway.calls.tunnel import Tunnel
from penstock.gateway.calls.turns import decode_body
from penstock.gateway.dialects import OPAQUE, find
from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.items import LARGE
from penstock.gateway.dialects.loose_json import Peek
from penstock.gateway.dialects.mcp import MCP, PREFIX
from penstock.gateway.http.client_connection import Hints
from penstock.gateway.http.errors import ClientFault
from penstock.gateway.http.headers import CREDENTIALS
from penstock.gateway.http.request import Request
from penstock.gateway.upstreams.pool import Pool

PACKED: Final = 64 << 10
"""A request that came with a content encoding and is longer is unpacked on the thread; bytes."""
_log = logging.getLogger("penstock.proxy")
_UNREAD: Final = "\0"
"""Stands for a model name that was not read yet; no model is called that."""


@dataclass(slots=True)
class Admitted:
    """A call that may pass."""

    address: Address
    dialect: Dialect
    path: str
    """Path and query below the address."""
    body: bytes
    """The request's; without its content encoding where it has one that can be undone."""
    wanted: Pool | None = None
    """The host that its agent has called, behind a sidecar."""
    token: bool = False
    """Whether it came with the agent token of its rollout."""
    key: str | None = None
    """Name of the key that it came with, where that is one for calls."""
    baggage: str = ""
    """Its `baggage` header."""
    packed: bytes | None = None
    """The request's as it came, where that had a content encoding."""
    waits: bool = field(default=False, init=False)
    """Whether it must be followed (`Admission.follow`) before its rollout, or what it asks for, is known."""
    encodings: str | None = field(default=None, init=False)
    """The content encodings that are not undone yet."""
    anonymous: bool = field(default=False, init=False)
    """Whether its conversation decides the rollout."""
    story: Story | None = field(default=None, init=False)
    """Its conversation, if that decides the rollout; None if something else does, or while it was not read."""
    previous: str | None = field(default=None, init=False)
    """The `previous_response_id` that it names."""
    found: Found = field(default_factory=Found, init=False)
    """What the conversation told."""
    asked: Peek | None = field(default=None, init=False)
    """What was already read of its body, so that nobody reads it again."""
    _model: str | None = field(default=_UNREAD, init=False)

    def is_read(self, read: Read) -> None:
        """Takes what was read of its conversation."""
        self.asked, self.story, self.previous = read.items.asked, read.story, read.items.previous

    @property
    def model(self) -> str | None:
        """The model that it asks for. Read once, by the first who needs it: routes, releases, or the recorder."""
        if self._model is _UNREAD:
            self.asked = self.asked or self.dialect.peek(self.body)
            self._model = self.dialect.model(self.body, self.path, self.asked)
        return self._model


class Admission:
    """Knows the keys and the conversations."""

    def __init__(self, auth: Auth, conversations: Conversations, token_required: bool, local_only: bool) -> None:
        """`local_only`: whether only this machine can connect."""
        self._auth = auth
        self._foreign_pages = local_only and not token_required
        """Whether a page of a foreign site could call, in the browser of somebody on this machine."""
        self._hosts: set[bytes] = set()
        """Some that may be named in `Host`."""
        self._conversations = conversations
        self._fingerprints = Fingerprints()
        self._token_required = token_required
        self._ended: list[tuple[Admitted, Hints, Answer | None]] = []
        """Calls that have ended in this turn of the loop."""
        self._thread = ThreadPoolExecutor(1, "penstock-reader")
        """One thread: what it was asked first is done when it comes to what was asked later."""

    def open_tunnel(self, request: Request, wanted: Pool) -> Tunnel:
        """What a sidecar says of a connection; raises `ClientFault`."""
        headers = {low: value for low, _, value in request.headers}
        try:
            address = from_headers(headers)
        except AddressError as error:
            raise ClientFault(400, "address", str(error), error.part) from None
        headers[b"authorization"] = headers.pop(b"proxy-authorization", b"")
        shown = self._authorize(headers)
        return Tunnel(_agreed(address, shown.rollout), shown.rollout is not None, wanted, shown.key)

    def admit_tunnelled(self, request: Request, hints: Hints, tunnel: Tunnel, server: Pool | None) -> Admitted:
        """A call that came through a tunnel, which says whose it is; an agent token in place of a key says it, too.
        `server`: whose tools it asks for. Raises `ClientFault`."""
        target = request.target.decode("latin-1")
        check_target(target)
        dialect = find(request.method, target.partition("?")[0] if server is None else PREFIX + server.name)
        if dialect.family is MCP and server is None:
            # `/mcp/NAME` is an address of ours, and means nothing on another host.
            dialect = OPAQUE
        admitted = Admitted(
            _NOWHERE, dialect, target, request.body(), server or tunnel.wanted, tunnel.token, tunnel.key
        )
        if admitted.dialect is not OPAQUE and any(low == b"content-encoding" for low, _, _ in request.headers):
            _unpack(admitted, request)
        headers = {low: value for low, _, value in request.headers}
        admitted.baggage = _baggage(request)
        shown = self._shown(headers)
        admitted.key = shown.key or tunnel.key
        address = _agreed(tunnel.address, shown.rollout)
        if address is None:
            named = {low: value for low, value in headers.items() if low in SESSION_HEADERS}
            address = from_headers(named) or self._implicit(admitted, hints)
        admitted.address = address
        return admitted

    def admit_message(self, opening: Admitted, dialect: Dialect, body: bytes, hints: Hints) -> Admitted:
        """A request that came as a message on a WebSocket, whose opening was admitted."""
        call = Admitted(opening.address, dialect, opening.path, body, opening.wanted, opening.token, opening.key)
        call.baggage = opening.baggage
        if opening.address.origin == "implicit":
            call.address = self._implicit(call, hints)
        return call

    def admit(self, request: Request, hints: Hints) -> Admitted:
        """Finds the address; raises `ClientFault`. `hints`: of the connection it came on."""
        target = request.target.decode("latin-1")
        check_target(target)
        path, mark, query = target.partition("?")
        headers = {low: value for low, _, value in request.headers}
        try:
            address, below = from_path(path)
            address = address or from_headers(headers)
        except AddressError as error:
            raise ClientFault(400, "address", str(error), error.part) from None
        admitted = Admitted(_NOWHERE, find(request.method, below), below + mark + query, request.body())
        if admitted.dialect is OPAQUE:
            check_path(below)
        elif b"content-encoding" in headers:
            _unpack(admitted, request)
        shown = self._authorize(headers)
        if self._foreign_pages and shown is _NOTHING and hints.peer:
            self._check_names(headers)
        address = _agreed(address, shown.rollout)
        if address is None:
            address = self._implicit(admitted, hints)
        elif address.origin == "implicit":
            hints.last = address.rollout
        admitted.address, admitted.token, admitted.key = address, shown.rollout is not None, shown.key
        admitted.baggage = _baggage(request)
        return admitted

    def _check_names(self, headers: Mapping[bytes, bytes]) -> None:
        """Raises `ClientFault` for what a page of a foreign site asks: it would use the keys of this gateway."""
        host, origin = headers.get(b"host", b""), headers.get(b"origin", b"")
        if host not in self._hosts:
            if host and not self._auth.names.may_be_asked(host.decode("latin-1")):
                raise _foreign("host", host)
            if len(self._hosts) < _HOSTS:
                self._hosts.add(host)
        if origin and not self._auth.names.may_ask(origin.decode("latin-1"), host.decode("latin-1")):
            raise _foreign("origin", origin)

    def _authorize(self, headers: Mapping[bytes, bytes]) -> Shown:
        """What a call comes with; raises `ClientFault` where it needs more."""
        shown = self._shown(headers)
        if shown is _NOTHING and self._token_required and not self._auth.is_admin(_text(headers)):
            message = "an agent token is needed: `penstock token ROLLOUT` makes one, give it as the API key"
            raise ClientFault(401, "token", message, "authorization")
        return shown

    def _shown(self, headers: Mapping[bytes, bytes]) -> Shown:
        """What a call comes with."""
        token = _agent_token(headers)
        if token is None:
            return _NOTHING
        try:
            if token.startswith(KEY_PREFIX):
                return Shown(None, self._auth.caller(token))
            return Shown(self._auth.rollout_of(token, time.time()), None)
        except AuthError as error:
            kind = "key NAME --role call" if token.startswith(KEY_PREFIX) else "token"
            message = f"{error}; make a new one with `penstock {kind}`"
            raise ClientFault(401, "token", message, "authorization") from None

    def _implicit(self, call: Admitted, hints: Hints) -> Address:
        """The implicit rollout of a call that names none. A new one for now, if finding it takes longer."""
        call.anonymous = True
        if call.encodings is not None:
            return Address(new_rollout(), origin="implicit")
        read = self._fingerprints.follow(call.dialect, call.body)
        if read is None:
            if len(call.body) > LARGE:
                call.waits = True
                return Address(new_rollout(), origin="implicit")
            read = self._fingerprints.read(call.dialect, call.body)
            self._fingerprints.keep(call.dialect, call.body, read)
        call.is_read(read)
        return self._given(call, hints)

    def follow(self, call: Admitted, hints: Hints, then: Callable[[], None]) -> None:
        """Does what a call waits for, on the thread, and calls `then` when its rollout is known."""
        done = asyncio.get_running_loop().run_in_executor(self._thread, self._catch_up, call)
        done.add_done_callback(lambda done: self._caught_up(call, done.result(), hints, then))

    def _caught_up(self, call: Admitted, caught: _Caught, hints: Hints, then: Callable[[], None]) -> None:
        if caught.body is not None:
            call.packed, call.body = call.body, caught.body
        call.encodings, call.waits = None, False
        if caught.read is not None:
            call.is_read(caught.read)
            self._fingerprints.keep(call.dialect, call.body, caught.read)
        if call.anonymous:
            call.address = self._given(call, hints)
        if call.waits:
            self.follow(call, hints, then)
        else:
            then()

    def _catch_up(self, call: Admitted) -> _Caught:
        """Unpacks the request, reads the conversation and unread answers; on the thread."""
        body = read = None
        try:
            if call.encodings is not None:
                body = _unpacked(call.body, call.encodings)
            if call.anonymous and call.story is None:
                read = self._fingerprints.read(call.dialect, call.body if body is None else body)
        except Exception:
            _log.exception("a conversation could not be read: it opens a new rollout")
        _settle(call.found.unread)
        return _Caught(body, read)

    def _given(self, call: Admitted, hints: Hints) -> Address:
        """The rollout that the conversation continues, else that of the connection if there is no conversation, else a
        new one.
        """
        story = call.story or EMPTY
        if call.previous is not None:
            # It sends only the new items.
            call.story = story = EMPTY
            rollout = self._conversations.find_response(call.previous)
        else:
            call.found = self._conversations.find(story, hints)
            rollout = call.found.rollout or (None if story.items else hints.last)
        call.waits = bool(call.found.unread)
        rollout = rollout or new_rollout()
        if not call.waits and (call.dialect.answers or not story.items):
            self._conversations.follow(call.found, story, hints, rollout)
        return Address(rollout, origin="implicit", ambiguous=call.found.ambiguous)

    def remember_soon(self, call: Admitted, hints: Hints, answer: Answer | None) -> None:
        """As `remember`, when the bytes of this turn of the loop have gone out, but before a client can react."""
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._remember_all)
        self._ended.append((call, hints, answer))

    def _remember_all(self) -> None:
        ended, self._ended = self._ended, []
        for call, hints, answer in ended:
            try:
                self.remember(call, hints, answer)
            except Exception:
                _log.exception("the end of a call of %s could not be remembered", call.address.rollout)

    def remember(self, call: Admitted, hints: Hints, answer: Answer | None) -> None:
        """Remembers a call that a later request may continue. `answer`: None when the call failed."""
        story, dialect = call.story, call.dialect
        if story is None or call.waits or not dialect.answers:
            return
        if answer is None:
            self._conversations.undo(call.found, story)
            return
        if story.items:
            ended = self._conversations.remember(story, call.found, hints, call.address.rollout, answer)
            if ended:
                asyncio.get_running_loop().run_in_executor(self._thread, _settle, ended)
        made = dialect.response_id(answer.body(), answer.stream) if dialect.stateful else None
        if made is not None:
            self._conversations.remember_response(made, call.address.rollout)


def _settle(some: Iterable[Ended]) -> None:
    """Reads answers; on the thread."""
    for ended in some:
        try:
            ended.settle()
        except Exception:
            _log.exception("an answer of %s could not be read", ended.rollout)
            ended.answer = None


class _Caught(NamedTuple):
    """What the thread has done for a call."""

    body: bytes | None
    """The request without its content encodings; None where it stays as it is."""
    read: Read | None
    """Its conversation; None where that does not matter, or could not be read."""


class Shown(NamedTuple):
    """What a call comes with: an agent token, or a key for calls."""

    rollout: str | None
    """The one that the token names."""
    key: str | None
    """The name of the key."""


_NOTHING: Final = Shown(None, None)
_NOWHERE = Address("nowhere")
_HOSTS: Final = 64


def _foreign(field: str, value: bytes) -> ClientFault:
    shown = value.decode("latin-1")[:100]
    message = (
        f"{shown!r} is no name of this machine: without agent tokens only local programs and pages are served; if it "
        "is one, add it to `names` in the settings"
    )
    return ClientFault(403, "origin", message, field)


def _agreed(address: Address | None, token: str | None) -> Address | None:
    """The address that is named, or that of the token; raises `ClientFault` where they are not of one rollout."""
    if address is None:
        return None if token is None else Address(token)
    if token is not None and token != address.rollout:
        message = f"the agent token is for another rollout than {address.rollout!r}"
        raise ClientFault(403, "token", message, "authorization")
    return address


def _baggage(request: Request) -> str:
    """May be in several headers."""
    return b",".join([value for low, _, value in request.headers if low == b"baggage"]).decode("latin-1")


def _unpack(call: Admitted, request: Request) -> None:
    """Undoes the content encoding of a request, or has it wait for the thread."""
    names = b",".join(value for low, _, value in request.headers if low == b"content-encoding").decode("latin-1")
    if len(call.body) > PACKED:
        call.encodings, call.waits = names, True
    elif (body := _unpacked(call.body, names)) is not None:
        call.packed, call.body = call.body, body


def _unpacked(packed: bytes, names: str) -> bytes | None:
    """A request without its content encodings. None: it passes as it came, unread where these cannot be undone."""
    body, problem = decode_body(packed, names)
    return None if problem is not None or body is packed else body


def _agent_token(headers: Mapping[bytes, bytes]) -> str | None:
    for name in CREDENTIALS:
        value = headers.get(name)
        if value is not None and b"pst_" in value:
            return value[value.index(b"pst_") :].decode("latin-1").strip()
    return None


def _text(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
