"""Hashes in place of media on the tape (`media = "hash"` of `[tape]`). Pure; nothing here raises.

Sound, images and video are large, and a voice is personal. With this setting the tape holds a `parts.MediaHash` in
place of their bytes: their SHA-256, size and type, so that a recording can still be told by its hash. What passes is
never changed. Media are

* a body whose content type is that of media, or which is no text;
* in a form, a file of which the same holds; other files and fields are looked through;
* in JSON, events of a stream and JSON lines: a text in base64 at a place of media (`_is_media`);
* in any text, a `data:` URL in base64;
* in JSON of more objects or values than are read, any text in base64.

Vectors, signatures and encrypted reasoning are base64 too; they stay. Frames of AWS stay as they are.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.json_scan import BodyFormatError, JsonNode, Path, plain, walk
from penstock.gateway.wire.dialects.loose_json import is_bulky, is_text
from penstock.gateway.wire.dialects.parts import MEDIA, MediaHash, media_type
from penstock.gateway.wire.dialects.request_body import MULTIPART, form_fields
from penstock.gateway.wire.dialects.sse import begins_event_stream

LEAST: Final = 64
"""Least characters of base64 that are taken for media."""
_SLICE: Final = 1 << 20
"""Characters of base64 that are decoded at a time, in which other threads wait; a multiple of 4."""
_AWS: Final = "application/vnd.amazon.eventstream"
_UNTOLD: Final = ("", "application/octet-stream", "binary/octet-stream")
_MEDIA_TYPE: Final = re.compile(r"(?:audio|image|video|font)/|application/pdf\Z")
_URL: Final = re.compile(
    rb"data:([\w.+/-]{0,100}+)(?:;[\w.+/=-]{0,100}+){0,3}?;base64,([A-Za-z0-9+/_\\-]{%d,}+=*)" % LEAST
)
_LONG: Final = re.compile(rb'"[A-Za-z0-9+/_\\-]{%d}' % LEAST)
"""The beginning of a JSON string that may be base64."""
_WHOLE: Final = re.compile(rb'(?<=")[A-Za-z0-9+/_\\-]{%d,}+=*+(?:\Z|(?="\s*+(?!:)))' % LEAST)
"""A JSON string that may be base64, without its quotes; no key."""
_LINE: Final = re.compile(rb"[^\r\n]+")
_DATA: Final = re.compile(rb"data: ?")
_UNSAFE: Final = bytes.maketrans(b"-_", b"+/")
_LINE_ENDS: Final = b"\r\n"
_ALWAYS: Final = frozenset({"b64_json", "partial_image_b64", "audio", "file_data"})
"""Members that hold nothing but media if they hold base64."""
_BYTES: Final = frozenset({"data", "bytes", "blob"})
"""Members that hold media if what stands around them says so."""
_TYPES: Final = ("media_type", "mimeType", "mime_type", "format")
_ABOUT: Final = frozenset({*_TYPES, "type", "transcript", "expires_at"})
"""Members beside such a one that tell; only media have others of them than `type`."""
_AROUND: Final = frozenset(
    {"audio", "image", "video", "document", "inlineData", "inline_data", "input_audio", "source"}
)
"""Members whose object holds media."""


class HashedBody(NamedTuple):
    """A body with hashes in place of its media."""

    body: bytes
    """The same object if it has no media."""
    replaced: int
    """Number of media that became hashes."""


def hash_media(body: bytes, content_type: str = "application/json") -> HashedBody:
    """A body, or a message of a WebSocket, without its media. `content_type`: that of its headers; of a WebSocket
    `application/json` for a message of text, `application/octet-stream` for a binary one."""
    kind = content_type.partition(";")[0].strip().lower()
    if len(body) < LEAST or kind == _AWS:
        return HashedBody(body, 0)
    if _MEDIA_TYPE.match(kind) is not None or (kind in _UNTOLD and not is_text(body)):
        return HashedBody(_hash_of([body], kind), 1)
    places = _files(body, content_type) if kind == MULTIPART else _texts(body, kind)
    return _replaced(body, places)


class _Place(NamedTuple):
    start: int
    end: int
    hash: bytes


def _replaced(body: bytes, places: Iterable[_Place]) -> HashedBody:
    pieces, view, done, count = list[bytes | memoryview](), memoryview(body), 0, 0
    for one in places:
        pieces += (view[done : one.start], one.hash)
        done, count = one.end, count + 1
    return HashedBody(b"".join([*pieces, view[done:]]), count) if count else HashedBody(body, 0)


def _hash_of(pieces: Iterable[bytes], kind: str) -> bytes:
    """`kind`: its type as far as that is told; else the first bytes tell."""
    made, size, begin = hashlib.sha256(), 0, b""
    for piece in pieces:
        begin, size = begin or piece[:12], size + len(piece)
        made.update(piece)
    kind = media_type(begin, kind) or kind
    return str(MediaHash(made.hexdigest(), size, kind or _UNTOLD[1])).encode()


# -- forms -------------------------------------------------------------------------------------------------------------


def _files(body: bytes, content_type: str) -> Iterator[_Place]:
    """The files of a form that are media. What cannot be read of a form is taken for one."""
    at = 0
    try:
        for one in form_fields(body, content_type):
            said, at = body[one.start : one.end], one.end
            if len(said) < LEAST:
                continue
            if _MEDIA_TYPE.match(one.kind) is not None or not is_text(said):
                yield _Place(one.start, one.end, _hash_of([said], one.kind))
            else:
                yield from (_Place(it.start + one.start, it.end + one.start, it.hash) for it in _texts(said, one.kind))
    except ValueError:
        if not is_text(body[at:]):
            yield _Place(at, len(body), _hash_of([body[at:]], ""))


# -- JSON, streams and other text --------------------------------------------------------------------------------------


def _texts(body: bytes, kind: str) -> Iterator[_Place]:
    if _LONG.search(body) is None:
        # Only a URL can be media.
        return _urls(body, 0, len(body))
    events = kind == EVENT_STREAM.decode() or begins_event_stream(body)
    lines = ((one.start(), one.end()) for one in _LINE.finditer(body)) if events else [(0, len(body))]
    return (place for start, end in lines if end - start >= LEAST for place in _document(body, start, end))


def _document(body: bytes, start: int, end: int) -> Iterator[_Place]:
    """The media of a body of JSON, or of a line of a stream."""
    data = _DATA.match(body, start, end)
    start = start if data is None else data.end()
    text = body if end - start == len(body) else body[start:end]
    if is_bulky(text):
        # Nobody looks for the places in it, so any base64 may be media.
        for one in sorted((*_strings(text), *_urls(text, 0, len(text)))):
            yield _Place(one.start + start, one.end + start, one.hash)
        return
    try:
        found = walk(text)
    except BodyFormatError:
        found = []
    if not found:
        yield from _urls(body, start, end)
    for one in (place for document in found for place in _members(text, document)):
        yield _Place(one.start + start, one.end + start, one.hash)


def _strings(text: bytes) -> Iterator[_Place]:
    """All base64 of a text that is no part of a longer string of JSON."""
    for one in _WHOLE.finditer(text):
        if (pieces := _decoded(one[0])) is not None:
            yield _Place(*one.span(), _hash_of(pieces, ""))


def _urls(body: bytes, start: int, end: int) -> Iterator[_Place]:
    """The `data:` URLs of a text."""
    for one in _URL.finditer(body, start, end):
        if (pieces := _decoded(one[2])) is not None:
            yield _Place(*one.span(), _hash_of(pieces, one[1].decode()))


def _members(text: bytes, document: Sequence[JsonNode]) -> Iterator[_Place]:
    """The media of one document."""
    beside: dict[Path, dict[str | int, str]] = {}
    long: list[JsonNode] = []
    for one in document:
        if not one.path or one.kind not in ("key", "text"):
            continue
        if one.kind == "text" and one.end - one.start >= LEAST:
            long.append(one)
        elif one.path[-1] in _ABOUT:
            said = text[one.start : one.end].decode("utf-8", "replace") if one.kind == "text" else ""
            beside.setdefault(one.path[:-1], {})[one.path[-1]] = said
    for one in long:
        about = beside.get(one.path[:-1], {})
        pieces = _decoded(text[one.start : one.end]) if _is_media(one.path, about) else None
        if pieces is None:
            yield from _urls(text, one.start, one.end)
        else:
            kind = next((it for name in _TYPES if (it := about.get(name))), "")
            yield _Place(one.start, one.end, _hash_of(pieces, kind))


def _is_media(path: Path, about: Mapping[str | int, str]) -> bool:
    """True if base64 at a path is media. `about`: members beside it, with their texts if these are short."""
    name, kind = path[-1], about.get("type", "")
    if name in _ALWAYS:
        return True
    if name == "delta":
        return kind.endswith("audio.delta")
    if name == "result":
        return kind == "image_generation_call"
    around = next((it for it in reversed(path[:-1]) if isinstance(it, str)), "")
    return name in _BYTES and (kind in MEDIA or around in _AROUND or bool(about.keys() - {"type"}))


def _decoded(text: bytes) -> list[bytes] | None:
    """The bytes of a text in base64, in any of its alphabets, in pieces; None if it is none. A text that was cut off
    counts as far as it goes."""
    text = (plain(text) if b"\\" in text else text).translate(_UNSAFE, _LINE_ENDS).rstrip(b"=")
    rest = len(text) % 4
    text = text[:-1] if rest == 1 else text + b"=" * (-rest % 4)
    starts = range(0, len(text), _SLICE)
    try:
        return [binascii.a2b_base64(text[at : at + _SLICE], strict_mode=True) for at in starts] or None
    except binascii.Error:
        return None
