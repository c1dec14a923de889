"""How many tokens a request may use at most: what is reserved for it. Pure.

A token stands for a byte of text at least, so a prompt has no more of them than its request has bytes; names and braces
in it make up for what templates add. Images are counted apart, because their tokens do not follow from their bytes, and
so is what a request only names: a file, a URL, an earlier response. An answer has as many as its request allows.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from math import ceil, isfinite
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.loose_json import Peek, arr, count, lenient, loads
from penstock.gateway.store.codec import common_prefix

ADDED: Final = 1024
"""Tokens that a provider may add to any prompt, such as what it says of tools."""
IMAGE: Final = 8192
"""Tokens of an image, or of something that is only named."""
_NAMES: Final = (
    "file_url", "file_id", "fileUri", "file_uri", "previous_response_id", "conversation", "cachedContent",
    "cached_content",
)  # fmt: skip
_APART = re.compile(
    rb'"(?=[dfiprctsUR/\\])(?=data:|file|iVB|ima|prev|R0l|conve|cached|type"|s3L|Ukl|/9j|\\/9j)'
    + rb'(?:((?:data:[^"]{0,80}base64,)?(?:iVBORw0KGgo|R0lGOD|UklGR|\\?/9j\\?/)[A-Za-z0-9+/=\\]{64,}+)'
    + rb'|(?:%b)"\s*:\s*"(?!data:)' % "|".join(_NAMES).encode()
    + rb'|image_url"\s*:\s*(?:\{\s*(?:"detail"\s*:\s*"\w*"\s*,\s*)?"url"\s*:\s*)?"(?!data:)'
    + rb'|type"\s*:\s*"url"|s3Location"\s*:\s*\{)'
)
"""What is counted apart, found in one pass: images in base64 as PNG, GIF, WebP and JPEG begin (the group), and
where a request only names what the provider reads. What agents give to tools may have a `url` too. How one may begin
is looked at first, which makes it three times as fast."""
_LONG: Final = 16 << 10
"""Bytes of a prompt that is kept."""
_KEPT: Final = 32 << 20
"""Bytes of all that are."""
_SHARES: Final = (0.5, 0.75, 0.95)
"""Of a prompt: about where it is noted what was found so far, besides where it goes on from the one before. Behind the
messages there may be many tools."""


class Bound(NamedTuple):
    """Tokens that a call may use at most."""

    prompt: int
    answer: int | None
    """None where the request sets no limit."""
    answers: int = 1
    """How many answers it asks for."""

    def answered(self, otherwise: int) -> int:
        """Tokens of all its answers. `otherwise`: of one whose request sets no limit."""
        return self.answers * (otherwise if self.answer is None else self.answer)


class _Config(msgspec.Struct):
    """Gemini's and Bedrock's."""

    maxOutputTokens: Any = None
    max_output_tokens: Any = None
    maxTokens: Any = None
    candidateCount: Any = None
    candidate_count: Any = None


_config = lenient(_Config)


def bound(dialect: Dialect, asked: Peek, prompt: int) -> Bound:
    """Of a request, whose prompt has at most so many tokens. `asked`: what was read of it."""
    if not dialect.generates:
        return Bound(prompt, 0)
    limits = [asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens]
    many = [asked.n, asked.best_of]
    for raw in filter(None, (asked.generationConfig, asked.generation_config, asked.inferenceConfig)):
        config = _config(bytes(raw))
        limits += [config.maxOutputTokens, config.max_output_tokens, config.maxTokens]
        many += [config.candidateCount, config.candidate_count]
    return Bound(prompt, _highest(limits), (_highest(many) or 1) * _prompts(asked.prompt))


class Mark(NamedTuple):
    """A place in a prompt, and what is counted apart before it."""

    at: int
    apart: int
    images: int
    """Bytes of images."""

    @property
    def tokens(self) -> int:
        """Of a prompt that ends here."""
        return self.at - self.images + ADDED + self.apart * IMAGE


_START: Final = Mark(0, 0, 0)


class Prompts:
    """Counts prompts. It keeps some long ones, so that of a conversation that has grown only what is new is read."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[bytes, list[Mark]]] = {}
        """The last prompt of a conversation, and places in it, the last one first."""
        self._bytes = 0

    def tokens(self, whose: Hashable, body: bytes) -> int:
        """At most so many, images and what is only named being guessed. `whose`: the conversation."""
        if len(body) < _LONG:
            found = _APART.findall(body)  # of each the bytes of its image
            return Mark(len(body), len(found), sum(map(len, found))).tokens
        before, known = self._kept.pop(whose, (b"", ()))
        self._bytes -= len(before)
        same = common_prefix(before, body)
        *marks, end = _marks(body, next((mark for mark in known if mark.at <= same), _START), same)
        if len(body) <= _KEPT:
            self._kept[whose] = body, marks[::-1]
            self._bytes += len(body)
        while self._bytes > _KEPT:
            oldest, _ = self._kept.pop(next(iter(self._kept)))
            self._bytes -= len(oldest)
        return end.tokens


def _marks(body: bytes, start: Mark, same: int) -> Iterator[Mark]:
    """Some places from `start` on, and the end. `same`: up to where it is the prompt before."""
    apart, images = start.apart, start.images
    looked = {same, *(int(len(body) * share) for share in _SHARES)}
    places = sorted(place for place in {_gap(body, at) for at in looked} if place > start.at)
    yield start

    def mark(at: int) -> Mark:
        return Mark(at, apart, images)

    for found in _APART.finditer(body, start.at):
        while places and places[0] <= found.start():
            yield mark(places.pop(0))
        while places and places[0] < found.end():
            del places[0]
        apart += 1
        images += len(found[1] or b"")
    yield from map(mark, [*places, len(body)])


def _gap(body: bytes, at: int) -> int:
    """The last place up to there that is in nothing which is counted apart, whatever comes behind it: that has none of
    these."""
    return max(body.rfind(b"}", 0, at), body.rfind(b".", 0, at)) + 1


_LONGEST: Final = 40
"""Characters of a number that is read from a string."""


def _highest(values: Iterable[Any]) -> int | None:
    found = [it for value in values if value is not None and (it := _whole(value)) is not None]
    return max(found) if found else None


def _whole(value: Any) -> int | None:
    """A count, as servers take it that are not strict: 100.0, "100", " 1e2 " and 99.5 are ones too."""
    if isinstance(value, str) and len(value) <= _LONGEST:
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float):
        value = ceil(value) if isfinite(value) else None
    return count(value)


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a completion has: each is answered."""
    found = arr(loads(bytes(raw))) if raw and bytes(memoryview(raw)[:1]) == b"[" else []
    return len(found) if any(isinstance(one, str | list) for one in found) else 1
