"""HTTP heads, composed: of requests to upstreams, of answers to clients, and of the gateway's own refusals.

Every header passes in its order, spelling and number, except those that concern one connection only (hop-by-hop
headers, RFC 9110 §7.6.1), the client's `Host`, the gateway's own keys, which no upstream may see, and keys of other
families than the upstream's (`dialects.family`). The action for a header is decided once per name and upstream,
for a key once per value. Only the optional whitespace around a request's header value is normalised; an answer's lines
pass byte for byte. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from penstock.gateway.wire.dialects.family import (
    INSECURE,
    SUBPROTOCOL,
    Family,
    KeyFilter,
    key_kind,
    query_parameter_kind,
)
from penstock.gateway.wire.http.redaction import MASK
from penstock.gateway.wire.http.request import Headers, HttpRequest, Refusal

Fields = list[tuple[bytes, bytes]]
"""(name, value) of header or trailer fields, in order."""
_FIELD: Final = re.compile(rb"([^:]++):[ \t]*+([^\r]*+)\r\n")
HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"upgrade",
    }
)
PEER_REQUEST: Final = b"penstock-told"
"""The header in which one worker of a gateway describes a checked call to another (`process.leader_rpc`)."""
_NOT_PASSED: Final = HOP | {b"expect", PEER_REQUEST}
CREDENTIALS: Final = (b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"x-penstock-token")
"""Headers in which clients put keys, including agent tokens."""

PROMPT: Final = b"x-penstock-prompt"
"""Names the prompt that the first system text of a request is."""

_OWN: Final = HOP | {b"host", b"expect", b"x-penstock-token", PROMPT}
_NOT_THEIRS: Final = frozenset({b"expect", b"proxy-authorization", b"proxy-connection", b"x-penstock-token", PROMPT})
"""Headers for the gateway that are removed even where the agent does not know of it."""
_NO_TRAILERS: Final = _OWN | {b"content-length", b"transfer-encoding", b"trailer", *CREDENTIALS}
_TOKEN: Final = re.compile(rb"pst_(?:key_login\.)?[A-Za-z0-9_-]{40,}")
_REPLACED: Final = {*CREDENTIALS, b"x-amz-security-token", b"x-amz-date", b"x-amz-content-sha256"}
"""Headers that the upstream's own key replaces."""
_PLAIN: Final = frozenset(
    {
        b"accept", b"accept-encoding", b"accept-language", b"anthropic-beta", b"anthropic-version", b"baggage",
        b"content-type", b"date", b"openai-beta", b"openai-organization", b"openai-project",
        b"traceparent", b"tracestate", b"transfer-encoding", b"user-agent", b"x-app", b"x-goog-api-client",
    }
)  # fmt: skip
"""Headers that ordinary clients send and that hold no key. Any other header may hold one, if its value has a known
form."""
_KNOWN: Final = 4096
_LONGEST: Final = 1024
"""Largest header value that is remembered, in bytes."""
LAST_CHUNK: Final = b"0\r\n\r\n"
"""The end of a body without trailers."""
_PASS, _DROP, _KEY, _LENGTH, _FOREIGN = range(5)

_REASONS: Final = {
    200: b"OK",  # JSON-RPC refuses within an answer
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    413: b"Content Too Large",
    426: b"Upgrade Required",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    505: b"HTTP Version Not Supported",
}


class RequestHeads:
    """Composes the heads of requests to one upstream."""

    def __init__(
        self,
        host: bytes,
        credentials: Sequence[tuple[bytes, bytes]],
        own_keys: Sequence[str] = (),
        session: str | None = None,
        keys: KeyFilter | None = None,
        serves: frozenset[Family] = frozenset(),
        replaced: bool = False,
    ) -> None:
        """`credentials`: headers that replace the agent's keys; `replaced`: whether the caller adds such headers;
        `own_keys`: the gateway's own, never passed on. `session`: name of the header that carries the rollout id.
        `keys`: which agents' keys the upstream may be sent; None for all. `serves`: the families whose calls the
        upstream takes."""
        self._session = None if session is None else session.encode("ascii")
        self.vary = session is not None
        """True if calls with the same head may be sent with different ones."""
        self._start = [b"Host", b": ", host, b"\r\n"]
        self._credentials = [part for name, value in credentials for part in (name, b": ", value, b"\r\n")]
        self._replaced = replaced or bool(self._credentials)
        self._own_keys = tuple(key.encode() for key in own_keys)
        self._takes, self._serves = keys, serves
        self._actions: dict[bytes, int] = {}
        self._keys: dict[tuple[bytes, bytes, bool], int] = {}
        """The action for a header of this name and value; the last member is True if the call is of a family that the
        upstream serves."""
        self.verbatim = False
        """True if the agent has named the host itself: its headers pass unchanged, those of the connection too."""

    def compose(
        self,
        request: HttpRequest,
        target: bytes,
        length: int | None,
        rollout: str | None = None,
        families: Collection[Family] = (),
    ) -> tuple[bytes, list[bytes]]:
        """Returns the head to send, and the names of headers and parameters that are left out because they hold another
        family's key.

        `length`: that of the body if it is no longer the client's. `rollout`: the id that is sent to an upstream with a
        `session` header. `families`: those that the call may be of; empty if unknown.
        """
        left: list[bytes] = []
        own = not families or not self._serves.isdisjoint(families)
        headers = _subprotocols(request.headers, self._replaced) if request.websocket else request.headers
        parts = self._parts(headers, request.hops, length, own, left)
        sent = b"".join(parts)
        if b"pst_" in sent:
            clean = [header for header in headers if not _has_token(header)]
            left.clear()
            parts = self._parts(clean, request.hops, length, own, left)
            sent = b"".join(parts)
        if self._session is not None and rollout is not None and not self.verbatim:
            low = self._session.lower()
            if all(header[0] != low for header in request.headers):
                parts += (self._session, b": ", rollout.encode("ascii"), b"\r\n")
                sent = b"".join(parts)
        if request.websocket and not self.verbatim:
            # Hop-by-hop headers are needed here: the WebSocket's connection has one upstream connection of its own.
            parts += (b"Connection", b": ", b"Upgrade", b"\r\n", b"Upgrade", b": ", b"websocket", b"\r\n")
            sent = b"".join(parts)
        if b"pst_" in target:
            target = _TOKEN.sub(MASK, target)
        if b"?" in target and b"=" in target and not self.verbatim:
            target = self._without_keys(target, own, left)
        return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), target, sent), left

    def _parts(
        self, headers: Headers, hops: frozenset[bytes], length: int | None, own: bool, left: list[bytes]
    ) -> list[bytes]:
        parts, actions, keys = [] if self.verbatim else self._start.copy(), self._actions, self._keys
        for low, name, value in headers:
            action = actions.get(low)
            if action is None:
                action = self._decide(low)
            if action or hops:
                if action == _DROP or (low in hops and not self.verbatim):
                    continue
                if action == _KEY and (found := keys.get((low, value, own)) or self._judge(low, value, own)) != _KEY:
                    if found == _FOREIGN:
                        left.append(low)
                    continue
                if action == _LENGTH and length is not None:
                    value = b"%d" % length
            parts += (name, b": ", value, b"\r\n")
        return parts + self._credentials

    def _decide(self, low: bytes) -> int:
        own = _NOT_THEIRS if self.verbatim else _OWN
        if low in own or (self._replaced and low in _REPLACED):
            action = _DROP
        elif low == b"content-length":
            action = _LENGTH
        else:
            plain = low in _PLAIN or low.startswith(b"x-stainless-")
            action = _PASS if plain else _KEY
        if len(self._actions) < _KNOWN:
            self._actions[low] = action
        return action

    def _judge(self, low: bytes, value: bytes, own: bool) -> int:
        """_KEY for a key that passes, _DROP for one of the gateway's, _FOREIGN for one of another family."""
        if low in CREDENTIALS and self._is_ours(value):
            found = _DROP
        else:
            found = _KEY if self._is_sent(key_kind(low, value), own) else _FOREIGN
        if len(self._keys) >= _KNOWN:
            self._keys.clear()
        if len(value) <= _LONGEST:
            self._keys[low, value, own] = found
        return found

    def _is_sent(self, kind: str | None, own: bool) -> bool:
        return self.verbatim or self._takes is None or self._takes.accepts(kind, own)

    def _is_ours(self, value: bytes) -> bool:
        return b"pst_" in value or any(key in value for key in self._own_keys)

    def _without_keys(self, target: bytes, own: bool, left: list[bytes]) -> bytes:
        """A path and query without keys that the upstream's own replaces, and without those of other families."""
        path, _, query = target.partition(b"?")
        kept: list[bytes] = []
        for one in query.split(b"&"):
            name, found = query_parameter_kind(one)
            if found is None or one.endswith(b"=" + MASK):
                kept.append(one)
            elif not self._replaced:
                if self._is_sent(found, own):
                    kept.append(one)
                else:
                    left.append(name)
        return path + (b"?" + b"&".join(kept) if kept else b"")


class KnownUpstreamHead:
    """The head that goes to one upstream for a head that an agent sends again and again."""

    __slots__ = ("_form", "_left", "_length", "_places")

    def __init__(self, head: bytes, left: list[bytes], request: HttpRequest) -> None:
        """`head`, `left`: as `RequestHeads.compose` made them for the request."""
        begin = head[: head.index(b"\r\n")]
        self._left, self._length = left, -1
        self._places: list[int] = []
        """Indices of the headers in the request whose values may differ, in the order of the head."""
        places = () if request.head is None else request.head.places
        differing = {name: (at, low) for at, low, name in places}
        form = [begin.replace(b"%", b"%%"), b"\r\n"]
        for name, value in header_fields(head):
            if name in differing:
                at, low = differing[name]
                if low == b"content-length":
                    self._length = len(self._places)
                self._places.append(at)
                value = b"%b"
            else:
                value = value.replace(b"%", b"%%")
            form += name.replace(b"%", b"%%"), b": ", value, b"\r\n"
        self._form = b"".join((*form, b"\r\n"))

    def compose(self, headers: Headers, length: int | None) -> tuple[bytes, list[bytes]]:
        """Return the same as `RequestHeads.compose` for another request with this head."""
        values = [headers[at][2] for at in self._places]
        if length is not None and self._length >= 0:
            values[self._length] = b"%d" % length
        return self._form % (*values,), self._left


def with_fields(head: bytes, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A head with more header fields at its end."""
    return b"%b%b\r\n" % (head[:-2], b"".join([b"%b: %b\r\n" % field for field in fields]))


def header_fields(head: bytes) -> Fields:
    """The header fields of a head that was found valid."""
    return _FIELD.findall(head, head.find(b"\r\n") + 2)


def chunk(piece: bytes) -> bytes:
    """A piece of a body; nothing for an empty piece, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""


def last_chunk(trailers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The end of a body."""
    return b"0\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % field for field in trailers])


def frame_body(request: HttpRequest, body: bytes) -> bytes:
    """The body as it is sent: in the client's own chunks if it came in chunks. Chunk extensions are dropped."""
    if not request.chunked:
        return body
    ends = request.chunks if request.chunks and request.chunks[-1] == len(body) else [len(body)]
    parts: list[bytes] = []
    start = 0
    for end in ends:
        if end > start:
            parts.append(chunk(body[start:end]))
        start = end
    kept = [
        it for it in request.trailers if it[0] not in _NO_TRAILERS and not _has_token(it) and not key_kind(it[0], it[2])
    ]
    return b"".join([*parts, last_chunk([it[1:] for it in kept])])


def _subprotocols(headers: Headers, replaced: bool) -> Headers:
    """The headers of an opening without the gateway's own keys among its subprotocols; without any key if one is
    `replaced`. The subprotocols themselves stay: the server chooses one of them."""
    kept: Headers = []
    for low, name, value in headers:
        if low == SUBPROTOCOL and INSECURE in value:
            some = [it for one in value.split(b",") if not _is_replaced(it := one.strip(), replaced)]
            value = b", ".join(some) if len(some) <= value.count(b",") else value
            if not value:
                continue
        kept.append((low, name, value))
    return kept


def _is_replaced(subprotocol: bytes, replaced: bool) -> bool:
    return subprotocol.startswith(INSECURE) and (replaced or b"pst_" in subprotocol)


def _has_token(header: tuple[bytes, bytes, bytes]) -> bool:
    return any(_TOKEN.search(part) is not None for part in header[1:])


def control_head(request: HttpRequest, target: bytes, told: bytes | None = None) -> bytes:
    """The head of a request to one of the gateway's own servers, without hop-by-hop headers. `told`: the value of
    `PEER_REQUEST`; a client's header of that name is removed."""
    lines = [b"%b: %b\r\n" % (name, value) for low, name, value in request.headers if low not in _NOT_PASSED]
    if told is not None:
        lines.append(b"%b: %b\r\n" % (PEER_REQUEST, told))
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (request.method.encode(), target, b"".join(lines))


def client_head(head: bytes, hops: frozenset[bytes], close: bool) -> bytes:
    """The head of an answer as the client gets it: byte for byte, less the headers in `hops`."""
    lines = head.split(b"\r\n")
    kept = [line for line in lines[1:-2] if line.partition(b":")[0].lower() not in hops]
    if close:
        kept.append(b"Connection: close")
    return b"\r\n".join([b"HTTP/1.1" + lines[0][8:], *kept, b"", b""])


def refusal_head(refusal: Refusal, length: int, keep_alive: bool) -> bytes:
    """The head of one of the gateway's own answers."""
    return b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b%b\r\n" % (
        refusal.status,
        _REASONS[refusal.status],
        length,
        b"".join(b"%b: %b\r\n" % header for header in refusal.headers),
        b"" if keep_alive else b"Connection: close\r\n",
    )


def refusal_body(family: Family, refusal: Refusal) -> bytes:
    """The body of a refusal, in the error shape of the API being spoken."""
    return family.error_body(refusal.status, refusal.message, refusal.kind, refusal.field)
