"""How many tokens a request may use at most: what is reserved for it. Pure.

A token stands for a byte of text at least, so a prompt has no more of them than its request has bytes; names and braces
in it make up for what templates add. Images are counted apart, because their tokens do not follow from their bytes, and
so is what a request only names: a file, a URL, an earlier response. An answer has as many as its request allows.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.loose_json import UNREADABLE, arr, count, lenient, loads

ADDED: Final = 1024
"""Tokens that a provider may add to any prompt, such as what it says of tools."""
IMAGE: Final = 8192
"""Tokens of an image, or of something that is only named."""
_NAMES: Final = (
    "file_url", "file_id", "fileUri", "file_uri", "previous_response_id", "conversation", "cachedContent",
    "cached_content",
)  # fmt: skip
_APART = re.compile(
    rb'"(?:((?:data:[^"]{0,80}base64,)?(?:iVBORw0KGgo|R0lGOD|UklGR|\\?/9j\\?/)[A-Za-z0-9+/=\\]{64,}+)'
    + rb'|(?:%b)"\s*:\s*"(?!data:)' % "|".join(_NAMES).encode()
    + rb'|image_url"\s*:\s*(?:\{\s*(?:"detail"\s*:\s*"\w*"\s*,\s*)?"url"\s*:\s*)?"(?!data:)'
    + rb'|type"\s*:\s*"url"|s3Location"\s*:\s*\{)'
)
"""What is counted apart, found in one pass: images in base64 as PNG, GIF, WebP and JPEG begin (the group), and
where a request only names what the provider reads. What agents give to tools may have a `url` too."""
_LONG: Final = 16 << 10
"""Bytes of a prompt that is kept."""
_KEPT: Final = 32 << 20
"""Bytes of all that are."""
_SHARES: Final = (0.5, 0.75, 0.95)
"""Of a prompt: where it is looked whether the next one begins like it. Behind the messages there may be many tools."""


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


class _Asked(msgspec.Struct):
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    generationConfig: msgspec.Raw = msgspec.Raw()
    generation_config: msgspec.Raw = msgspec.Raw()
    inferenceConfig: msgspec.Raw = msgspec.Raw()


_asked = lenient(_Asked)
_config = msgspec.json.Decoder(_Config).decode


def bound(dialect: Dialect, body: bytes, prompt: int) -> Bound:
    """Of a request, whose prompt has at most so many tokens."""
    if not dialect.generates:
        return Bound(prompt, 0)
    asked = _asked(body)
    limits = [asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens]
    many = [asked.n, asked.best_of]
    for raw in filter(bytes, (asked.generationConfig, asked.generation_config, asked.inferenceConfig)):
        config = _read(raw)
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
        same = (mark for mark in known if body.startswith(memoryview(before)[: mark.at]))
        *marks, end = _marks(body, next(same, _START))
        if len(body) <= _KEPT:
            self._kept[whose] = body, marks[::-1]
            self._bytes += len(body)
        while self._bytes > _KEPT:
            oldest, _ = self._kept.pop(next(iter(self._kept)))
            self._bytes -= len(oldest)
        return end.tokens


def _marks(body: bytes, start: Mark) -> Iterator[Mark]:
    """Some places from `start` on, and the end."""
    apart, images = start.apart, start.images
    places = [at for share in _SHARES if (at := int(len(body) * share)) > start.at]
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


def _read(raw: msgspec.Raw) -> _Config:
    try:
        return _config(raw)
    except UNREADABLE:
        return _Config()


def _highest(values: Iterable[Any]) -> int | None:
    return max((found for value in values if (found := _whole(value)) is not None), default=None)


def _whole(value: Any) -> int | None:
    """A count, as servers take it that are not strict: 100.0 and "100" are ones too."""
    if isinstance(value, float) and value.is_integer():
        return count(int(value))
    if isinstance(value, str) and re.fullmatch("[0-9]{1,15}", value):
        return int(value)
    return count(value)


def _prompts(raw: msgspec.Raw) -> int:
    """How many prompts a completion has: each is answered."""
    said = bytes(raw)
    found = arr(loads(said)) if said.startswith(b"[") else []
    return len(found) if any(isinstance(one, str | list) for one in found) else 1
