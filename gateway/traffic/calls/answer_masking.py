"""Takes the gateway's own keys out of error answers on their way to the agent. Sans-I/O.

Providers repeat a key that they refuse, and the agent must not learn the gateway's. In the head and the body of an
answer of 300 and above, a key becomes as many asterisks; lengths, chunks and their boundaries stay. The end of a read
is held back only if it may be the beginning of a key. An encoded answer is held until it is complete, and goes without
its encoding if a key was found in it; one that cannot be decoded, or is too large, passes unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from penstock.gateway.model.known_secrets import BodyContext, Secrets
from penstock.gateway.reading.turns import CUT, LARGER, MEMBERS, IncompleteDecodeError, decode_body, decoded_pieces
from penstock.gateway.wire.dialects.base import Dialect, Facts
from penstock.gateway.wire.http.headers import client_head
from penstock.gateway.wire.http.upstream_connection import UpstreamConnection
from penstock.gateway.wire.rewriting import IDENTITY, Framing, HeldFraming, client_bytes

HELD: Final = 256 << 10
"""The most bytes of an encoded answer that are held."""
_DECODED: Final = 4 << 20
"""The most bytes of its decoded form that are searched."""
SEARCHED: Final = 8
"""A body that is too large to be decoded as a whole is searched up to so many times its encoded size; text and images
hardly come near it. A body that is packed more tightly is kept as far as it was decoded, without its encoding."""
_ENCODING: Final = frozenset({b"content-encoding"})
_UNREAD: Final = (LARGER, MEMBERS)
"""Ends of the problems of bodies that were not decoded to their end."""


def masking_framing(own: Secrets, connection: UpstreamConnection, chunked: bool) -> Framing:
    """The framing of an error answer. `chunked`: the client gets it in chunks."""
    return (
        IdentityMaskingFraming(own, chunked) if connection.encoding in IDENTITY else EncodedMaskingFraming(own, chunked)
    )


class IdentityMaskingFraming:
    """An answer without content encoding, searched as it comes."""

    ids = False

    def __init__(self, own: Secrets, chunked: bool) -> None:
        self._own = own
        self._chunks = ChunkedBodyParser() if chunked else None
        self._raw = bytearray()
        """Bytes that are held back, framing included."""
        self._places: list[tuple[int, int]] = []
        """(start, end) of the payload's parts in them."""

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Return the head at once."""
        return self._own.hide(head) + self.go_on(connection, raw)

    def go_on(self, connection: UpstreamConnection, raw: bytes) -> bytes:
        """Return all bytes but those that may be the beginning of a key."""
        raw = client_bytes(connection, raw, self._chunks is not None)
        before = len(self._raw)
        places = [(0, len(raw))] if self._chunks is None else self._chunks.payload(raw)
        self._places += [(before + start, before + end) for start, end in places]
        self._raw += raw
        return self._let_go(connection.done)

    def broken(self) -> bytes:
        """Return the bytes that were held back."""
        return self._let_go(True)

    def _let_go(self, ended: bool) -> bytes:
        raw, payload = self._raw, b"".join([self._raw[start:end] for start, end in self._places])
        hidden = self._own.hide(payload, ended)
        at = 0
        for start, end in self._places if hidden is not payload else ():
            raw[start:end] = hidden[at : at + end - start]
            at += end - start
        cut = self._cut(0 if ended else self._own.partial_match_length(payload))
        after = self._places[-1][1] if self._places else 0
        if ended:
            raw[after:] = self._own.hide(bytes(raw[after:]))
        elif self._chunks is not None and self._chunks.over:
            # Trailers wait for the end.
            cut = min(cut, after)
        self._raw = raw[cut:]
        self._places = [(max(start - cut, 0), end - cut) for start, end in self._places if end > cut]
        return bytes(raw[:cut])

    def _cut(self, kept: int) -> int:
        """The offset at which the last `kept` bytes of the payload begin."""
        for start, end in reversed(self._places if kept else ()):
            if kept <= end - start:
                return end - kept
            kept -= end - start
        return len(self._raw)


class EncodedMaskingFraming(HeldFraming):
    """An answer with a content encoding, searched when it is complete."""

    def __init__(self, own: Secrets, chunked: bool) -> None:
        super().__init__(chunked, HELD)
        self._own = own

    def begin(self, connection: UpstreamConnection, head: bytes, raw: bytes) -> bytes:
        """Hold the head, because the length may change."""
        return super().begin(connection, self._own.hide(head), raw)

    def finish(self, connection: UpstreamConnection, body: bytes) -> tuple[bytes, bytes] | None:
        """Return the answer without its encoding, if a key was found in it."""
        kept = mask_recorded_body(self._own, body, (connection.encoding or b"").decode("latin-1"), _DECODED)
        return (client_head(self._head, _ENCODING, close=False), kept.body) if kept.decoded else None


class ChunkedBodyParser:
    """Finds the payload in a chunked body that comes in reads."""

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the chunk that have not come yet."""
        self._line = b""
        self.over = False
        """True once only trailers can follow."""

    def payload(self, raw: bytes) -> list[tuple[int, int]]:
        """(start, end) of the payload's parts in a read."""
        places: list[tuple[int, int]] = []
        at = 0
        while at < len(raw) and not self.over:
            if self._left:
                end = min(at + self._left, len(raw))
                places.append((at, end))
                self._left -= end - at
            else:
                end = raw.find(b"\n", at) + 1 or len(raw)
                self._size(raw[at:end])
            at = end
        return places

    def _size(self, part: bytes) -> None:
        """Read the size in a chunk's head line; an empty line ends the chunk before."""
        self._line += part
        if self._line.endswith(b"\n"):
            line, self._line = self._line.partition(b";")[0].strip(), b""
            if line:
                self._left = int(line, 16)
                self.over = not self._left


class MaskedBody(NamedTuple):
    """A body without the secrets in it."""

    body: bytes
    """The same object if it holds no secret."""
    plain: bytes
    """Without its content encoding, as far as it could be undone."""
    decoded: bool
    """True if the body had to be taken out of its encoding."""
    problem: str | None = None
    """Why its encoding could not be undone completely."""

    @property
    def in_part(self) -> bool:
        """True if only the beginning of the body is kept."""
        return self.decoded and self.problem is not None and self.problem.endswith(_UNREAD)


_UNKNOWN: Final = BodyContext()


def mask_recorded_body(
    secrets: Secrets, body: bytes, encoding: str | None, limit: int | None = None, about: BodyContext = _UNKNOWN
) -> MaskedBody:
    """The body as it may be kept. `limit`: the most bytes of its decoded form that are searched. Without a limit, a
    body that is too large to be decoded as a whole is searched on, and kept whole only if that finds nothing."""
    if not encoding or encoding == "identity":
        hidden = secrets.body(body, about)
        return MaskedBody(hidden, hidden, False)
    plain, problem = decode_body(body, encoding) if limit is None else decode_body(body, encoding, limit)
    cut = problem is not None and problem.endswith(CUT)
    hidden = secrets.body(plain, about._replace(cut=about.cut or cut, problem=None if cut else problem))
    if problem is not None and not plain:
        # There was nothing to search here, but another reader may decode the body.
        hidden = secrets.body(body, about._replace(problem=problem))
    unchanged = hidden is plain or hidden is body
    if unchanged and limit is None and problem is not None and problem.endswith(_UNREAD) and secrets:
        unchanged = _absent(secrets, body, encoding)
    return MaskedBody(body, plain, False, problem) if unchanged else MaskedBody(hidden, hidden, True, problem)


def _absent(secrets: Secrets, body: bytes, encoding: str) -> bool:
    """True if no secret is in a body that is too large to be decoded as a whole."""
    most = SEARCHED * len(body)
    try:
        return secrets.absent(decoded_pieces(body, encoding, most), most)
    except IncompleteDecodeError:
        return False


def without_tokens(secrets: Secrets, kept: MaskedBody, about: BodyContext) -> MaskedBody:
    """A body of a masked call, without the token ids that repeat the masked text."""
    plain = secrets.without_tokens(kept.plain, about)
    return (
        kept
        if plain is kept.plain
        else MaskedBody(plain, plain, kept.decoded or kept.body is not kept.plain, kept.problem)
    )


def masked_facts(dialect: Dialect, request: bytes, response: bytes, stream: bool, seen: Facts) -> Facts:
    """The facts of a masked call: its texts as they are kept, and all other facts from `seen`, read before masking. So
    its outcome and cost stay true."""
    gone = not response.strip(b"*")
    said = Facts(seen.model, finish=seen.finish) if gone else dialect.facts(request, response, stream)
    counts = {"tool_calls": seen.tool_calls, "choices": seen.choices, "failed": seen.failed, "answers": seen.answers}
    return replace(said, usage=seen.usage, **counts)


def unencoded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of a body that was taken out of its encoding."""
    return [(name, b"identity" if name.lower() in _ENCODING else value) for name, value in headers]


def rescaled(marks: list[int], size: int) -> list[int]:
    """The arrivals of a body (time, size, in turn), fitted to its new size."""
    made, before = marks.copy(), sum(marks[1::2])
    ended = done = 0
    for at in range(1, len(marks), 2):
        ended += marks[at]
        made[at], done = ended * size // before - done, ended * size // before
    return made
