"""Replaces known secret values by as many asterisks, wherever they stand. Pure.

The gateway knows its own keys, and the keys that each call presents. A provider may repeat them, an agent may print
them, in any place. So bodies are searched for the values themselves, each as it is and as JSON and URLs write it.
Lengths stay, and with them offsets, framing and the deltas of the tape; the same body always becomes the same bytes.

Clients send a short value or plain words (`EMPTY`, `sk-test`, `not-needed`) where no key is needed. Hiding these would
remove pieces of the conversation.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple, cast
from urllib.parse import quote

MASK_BYTE: Final = b"*"
SLICE: Final = 1 << 20
"""Bytes searched at a time: the interpreter serves no other thread meanwhile."""
_BLOCK: Final = 64 << 10
"""Bytes of a text in small pieces that are searched at a time."""
_BEGUN: Final = 8
"""Least bytes of the cut-off beginning of a secret that is hidden too."""
_PREFIX: Final = b"pst_"
_TOKEN: Final = re.compile(rb"pst_[A-Za-z0-9._~-]+")
_MARKUP: Final = re.compile(r"[/+&<>'=]")
"""Characters that some JSON writers escape without need."""
_PLAIN: Final = re.compile(rb"[A-Za-z0-9._~-]*")
"""Matches values that are written in one way everywhere, as most tokens are."""
_ESCAPE: Final = re.compile(r"%[0-9A-F]{2}")
_LETTER, _DIGIT = re.compile(rb"[A-Za-z]"), re.compile(rb"[0-9]")


class BodyContext(NamedTuple):
    """Facts about a body that is to be masked."""

    content_type: str = ""
    """The content type in its headers."""
    answer: bool = False
    """True if it may be a stream that has cut texts apart."""
    cut: bool = False
    """True if the gateway has cut off its end."""
    problem: str | None = None
    """Why its content encoding could not be undone; None if it could."""


class Secrets:
    """Values to hide. `wire.masking` extends this class with rules that hide more; the methods that take `about` are
    for it."""

    __slots__ = ("_forms", "_longest", "_starts", "values")
    notes: ClassVar[bool] = False
    """True if it hides more than the values, and notes it: a call then takes one of its own (`for_call`)."""

    def __init__(self, values: Iterable[bytes]) -> None:
        self.values = frozenset(values)
        self._forms = tuple({form for value in self.values for form in _forms(value)})
        self._starts = [(form, form[:_BEGUN]) for form in self._forms]
        self._longest = max(map(len, self._forms), default=0)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def hide(self, body: bytes, ended: bool = True) -> bytes:
        """A body with the secrets hidden, of the same length; the same object where it has none. `ended`: nothing
        follows, so that the beginning of a secret at the body's end is one that was cut off: it is hidden too."""
        if not self._forms:
            return body
        large, tail = len(body) > SLICE, body[-self._longest :] if ended else b""
        found: list[tuple[int, int]] = []
        begins = False
        for form, start in self._starts:
            if large or form in body:
                found += _places(body, form)
            begins = begins or start in tail
        if begins and (begun := self._cut_off(body)):
            found.append((len(body) - begun, len(body)))
        if not found:
            return body
        hidden = bytearray(body)
        for start, end in found:
            hidden[start:end] = MASK_BYTE * (end - start)
        return bytes(hidden)

    def absent(self, pieces: Iterable[bytes], most: int) -> bool:
        """True if a text that comes in pieces has none of the secrets, and no more than `most` bytes."""
        seen, text = 0, b""
        for piece in pieces:
            seen, text = seen + len(piece), text + piece
            if seen > most:
                return False
            if len(text) > _BLOCK + self._longest:
                if self.hide(text, ended=False) is not text:
                    return False
                text = text[-self._longest :]
        return self.hide(text) is text

    def _cut_off(self, body: bytes) -> int:
        """Length of the beginning of a secret with which a body ends; 0 where it is too short to be told from other
        text."""
        most = max([_begun(body, form) for form in self._forms])
        return most if most >= _BEGUN else 0

    def partial_match_length(self, body: bytes) -> int:
        """Length of the longest end of a body that is the beginning of a secret, and not all of it."""
        return max((_begun(body, form) for form in self._forms), default=0)

    def text(self, text: str) -> str:
        """A short text without secrets and agent tokens; the same object where it has none."""
        if not self._forms and "pst_" not in text:
            return text
        body = text.encode("utf-8", "surrogatepass")
        hidden = self.hide(body, ended=False)
        if _PREFIX in hidden:
            hidden = _TOKEN.sub(lambda found: MASK_BYTE * len(found[0]), hidden)
        return text if hidden is body else hidden.decode("utf-8", "replace")

    def texts(self, texts: Sequence[str | None]) -> Sequence[str | None]:
        """Short texts without secrets; the same object where none has any."""
        together = "\0".join(filter(None, texts))
        if (not self._forms and "pst_" not in together) or self.text(together) is together:
            return texts
        return [None if text is None else self.text(text) for text in texts]

    def json(self, value: Any) -> Any:
        """A JSON value without secrets, in its strings and its keys."""
        return _mapped(value, lambda text: Secrets.text(self, text))

    def body(self, body: bytes, about: BodyContext, ended: bool = True) -> bytes:
        """The same as `hide`, for a body of which more is known."""
        return self.hide(body, ended)

    def block(self, block: bytes) -> bytes:
        """Header lines with the secrets hidden."""
        return self.hide(block, ended=False) if self.values else block

    def without_tokens(self, body: bytes, about: BodyContext) -> bytes:
        """A body without tokens and their ids, which would spell its text, where something was `masked` in the same
        call."""
        return body

    def with_values(self, values: Iterable[bytes]) -> Secrets:
        """These secrets and further ones."""
        return Secrets(self.values | frozenset(values))

    def for_call(self) -> Secrets:
        """The same secrets, for one call: the result notes what it masks from now on."""
        return self

    @property
    def by_place(self) -> bool:
        """True if values are also hidden by their place, which a text alone does not tell."""
        return False

    @property
    def masked(self) -> bool:
        """True if a rule has masked something, or failed, since the notes began."""
        return False

    @property
    def span_attributes(self) -> dict[str, Any]:
        """The notes, as attributes of a span."""
        return {}


def with_distinct_keys(members: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of these members. Keys that masking has made equal are numbered, so that none is lost."""
    made, number = dict[str, Any](), 1
    for key, item in members:
        name = key
        while name in made:
            number += 1
            name = f"{key} {number}"
        made[name] = item
    return made


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return with_distinct_keys((change(key), _mapped(item, change)) for key, item in items)
    return [_mapped(item, change) for item in cast(list[Any], value)] if isinstance(value, list) else value


NO_SECRETS: Final = Secrets(())


def fingerprint(value: bytes) -> str:
    """A short hash of a value that gives access, such as the id of a session; equal values have equal hashes."""
    return hashlib.sha256(value).hexdigest()[:16]


def own_secrets(values: Iterable[str | None]) -> Secrets:
    """The gateway's own keys. A `dummy` that is configured for a server without keys is no secret."""
    return Secrets(value.encode() for value in values if value is not None and _is_own(value.encode()))


def _is_own(value: bytes) -> bool:
    return len(value) >= 16 or (len(value) >= 8 and _DIGIT.search(value) is not None)


def may_be_secret(value: bytes) -> bool:
    """True if an agent's value can be a key: it is long, and not made of words or of one letter."""
    if len(value) < 16 or len(set(value)) < 8:
        return False
    return len(value) >= 32 or (_DIGIT.search(value) is not None and _LETTER.search(value) is not None)


def presented_secrets(name: bytes, value: bytes) -> Iterator[bytes]:
    """The secrets in the value of a header that carries a credential: `Bearer KEY`, `Basic` user and password, cookies.
    `name`: in lower case."""
    if b"cookie" in name:
        parts = (part.partition(b"=")[2].strip() for part in value.split(b";"))
    else:
        scheme, _, rest = value.strip().partition(b" ")
        parts = (rest.strip() or scheme, *(_basic(rest) if scheme.lower() == b"basic" else ()))
    return filter(may_be_secret, parts)


def _basic(blob: bytes) -> tuple[bytes, ...]:
    """The pair `user:password` and the password alone, of a `Basic` credential; empty if it cannot be read."""
    try:
        both = base64.b64decode(blob.strip(), validate=True)
    except (binascii.Error, ValueError):
        return ()
    return both, both.partition(b":")[2]


def _forms(value: bytes) -> Iterator[bytes]:
    """The forms in which a value may be written: as it is, in a JSON string, in a URL."""
    yield value
    if _PLAIN.fullmatch(value):
        return
    text = value.decode("utf-8", "surrogateescape")
    for form in (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]):
        yield _bytes(form)
        yield _bytes(form.replace("/", "\\/"))
        yield _bytes(_MARKUP.sub(lambda it: f"\\u{ord(it[0]):04x}", form))
        yield _bytes(_MARKUP.sub(lambda it: f"\\u{ord(it[0]):04X}", form))
    once = quote(value, safe="")
    yield from (_bytes(form) for form in (once, _ESCAPE.sub(lambda it: it[0].lower(), once), quote(value)))
    yield _bytes(once.replace("%", "%25"))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _places(body: bytes, form: bytes) -> Iterator[tuple[int, int]]:
    size, length = len(form), len(body)
    for start in range(0, length, SLICE):
        end = start + SLICE + size - 1
        at = body.find(form, start, end)
        while at >= 0:
            yield at, at + size
            at = body.find(form, at + 1, end)


def _begun(body: bytes, form: bytes) -> int:
    tail = body[-(len(form) - 1) :]
    at = tail.find(form[:1])
    while at >= 0:
        if form.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(form[:1], at + 1)
    return 0
