"""Keeps secrets off the tape: header values and query parameters that carry credentials become `***`.

By name, because a key's value looks like anything. A name is secret when one of its words is, however the words are
put together (`x-api-key`, `access_token`, `clientSecret`); words that only count tokens
(`x-ratelimit-remaining-tokens`) or identify a request (`idempotency-key`) are not. Headers that hold a URL are masked
like one: a presigned link is a credential. Agent tokens are masked wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

MASK = b"***"

_SECRET = re.compile(
    rb"(^|[-_.])(authorization|authentication|auth|cookie2?|[a-z]*token|[a-z]*secret|[a-z]*password|passwd|credentials?"
    rb"|signature|sig|jwt|(session|api|access|private)?key)($|[-_.])"
)
_CAMEL = re.compile(rb"(?<=[a-z0-9])(?=[A-Z])")
_LOCATIONS = frozenset(
    {b"location", b"content-location", b"operation-location", b"azure-asyncoperation", b"referer", b"link"}
)
_HARMLESS = frozenset(
    {b"idempotency-key", b"x-idempotency-key", b"sec-websocket-key", b"prompt-cache-key", b"www-authenticate"}
)
_PARAMETER = re.compile(r"(?:^|[?&;#])([^=&;?#]+)=")
_VALUE = re.compile(r"[^&#>]*")
_USER = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]*://)[^/?#\s]*@")
_AGENT_TOKEN = re.compile(r"pst_[A-Za-z0-9._~-]+")
_KEEP, _HIDE, _URL = range(3)


class Redactor:
    """Remembers which header names are secret: a call has thirty headers and they are always the same."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def secret(self, name: bytes) -> bool:
        """True when values of this header must not be kept."""
        return self._treatment(name) == _HIDE

    def _treatment(self, name: bytes) -> int:
        known = self._known.get(name)
        if known is None:
            known = _HIDE if is_secret(name) else _URL if name.lower() in _LOCATIONS else _KEEP
            if len(self._known) < 4096:
                self._known[name] = known
        return known

    def block(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """`name: value CRLF` lines with secrets masked."""
        lines = self._lines(headers)
        # Looking into every value costs more than all else here, and almost never finds a token.
        return lines if b"pst_" not in lines else self._lines([(name, _without_tokens(it)) for name, it in headers])

    def _lines(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        parts: list[bytes] = []
        for name, value in headers:
            if self._known.get(name) != _KEEP:
                value = self._masked(name, value)
            parts += (name, b": ", value, b"\r\n")
        return b"".join(parts)

    def _masked(self, name: bytes, value: bytes) -> bytes:
        treatment = self._treatment(name)
        if treatment == _URL:
            return url(value.decode("latin-1")).encode("latin-1")
        return MASK if treatment == _HIDE else value


def _without_tokens(value: bytes) -> bytes:
    return _AGENT_TOKEN.sub("***", value.decode("latin-1")).encode("latin-1")


def is_secret(name: bytes) -> bool:
    """True when a header or parameter of this name carries a credential."""
    return name.lower() not in _HARMLESS and _SECRET.search(_CAMEL.sub(b"-", name).lower()) is not None


def url(text: str) -> str:
    """A URL or path with secret query parameters, user info and agent tokens masked."""
    if "@" in text or "=" in text or "pst_" in text:
        text = _USER.sub(r"\1***@", text)
        head, mark, query = text.partition("?")
        text = head + mark + _masked_query(query)
        text = _AGENT_TOKEN.sub("***", text)
    return text


def _masked_query(query: str) -> str:
    """Values of secret parameters masked, also those of a URL inside another parameter."""
    parts: list[str] = []
    at = 0
    for found in _PARAMETER.finditer(query):
        if found.start() >= at and is_secret(unquote(found[1]).encode("utf-8", "replace")):
            parts += query[at : found.end()], "***"
            at = next(_VALUE.finditer(query, found.end())).end()
    return "".join((*parts, query[at:]))
