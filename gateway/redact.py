"""Keeps secrets off the tape: header values and query parameters that carry credentials become `***`.

By name, because a key's value looks like anything. A name is secret when one of its words is; words that only count
tokens (`x-ratelimit-remaining-tokens`) or identify a request (`idempotency-key`) are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = b"***"

_SECRET = re.compile(
    rb"(^|[-_.])(authorization|authentication|auth|cookie2?|token|secret|password|passwd|credentials?|signature|sig|jwt|session-?key"
    rb"|api-?key|apikey|key)($|[-_.])"
)
_HARMLESS = frozenset(
    {b"idempotency-key", b"x-idempotency-key", b"sec-websocket-key", b"prompt-cache-key", b"www-authenticate"}
)
_PARAMETER = re.compile(r"(?i)([?&;]|^)([^=&;?#]+)=([^&;#]*)")
_AGENT_TOKEN = re.compile(rb"pst_[A-Za-z0-9._~-]+")


class Redactor:
    """Remembers which header names are secret: a call has thirty headers and they are always the same."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[bytes, bool] = {}

    def secret(self, name: bytes) -> bool:
        """True when values of this header must not be kept."""
        known = self._known.get(name)
        if known is None:
            known = is_secret(name)
            if len(self._known) < 4096:
                self._known[name] = known
        return known

    def block(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """`name: value CRLF` lines with secrets masked."""
        parts: list[bytes] = []
        for name, value in headers:
            parts += (
                name,
                b": ",
                MASK if self.secret(name) else _AGENT_TOKEN.sub(MASK, value) if b"pst_" in value else value,
                b"\r\n",
            )
        return b"".join(parts)


def is_secret(name: bytes) -> bool:
    """True when a header or parameter of this name carries a credential."""
    low = name.lower()
    return low not in _HARMLESS and _SECRET.search(low) is not None


def url(text: str) -> str:
    """A URL or path with secret query parameters, user info and agent tokens masked."""
    if "@" in text or "=" in text or "pst_" in text:
        text = re.sub(r"^([a-z]+://)[^/@]*@", r"\1***@", text)
        head, mark, query = text.partition("?")
        text = head + mark + (_PARAMETER.sub(_mask_parameter, query) if mark else "")
        text = re.sub(r"pst_[A-Za-z0-9._~-]+", "***", text)
    return text


def _mask_parameter(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}=***" if is_secret(found[2].encode("utf-8", "replace")) else found[0]
