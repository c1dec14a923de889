"""Computes how many tokens a request may use at most, which is reserved for it. Pure.

A token stands for at least one byte of text, so a prompt has no more tokens than its request has bytes; field names and
braces make up for the text that templates add. Images are counted apart, because their tokens do not follow from their
bytes, and so is content that a request only names: a file, a URL, an earlier response. An answer has as many tokens as
its request allows.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from math import ceil, isfinite
from typing import Any, Final, NamedTuple

import msgspec

from penstock.gateway.tape.store.codec import common_prefix
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import RequestFields, arr, count, lenient, loads

ADDED: Final = 1024
"""Tokens that a provider may add to any prompt, such as its instructions for tools."""
IMAGE: Final = 8192
"""Tokens of an image, or of content that is only named."""
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
"""Finds the content that is counted apart in one pass: images in base64, by the beginnings of PNG, GIF, WebP and JPEG
(the group), and names of content that the provider reads. Arguments of tools may have a `url` too. The lookahead on the
first characters makes it three times as fast."""
_LONG: Final = 16 << 10
"""Least bytes of a prompt that is kept."""
_KEPT: Final = 32 << 20
"""Most bytes of all kept prompts."""
_SHARES: Final = (0.5, 0.75, 0.95)
"""Parts of a prompt after which a mark is set, besides the one where it goes on from the prompt before: behind the
messages there may be many tools."""


class TokenBound(NamedTuple):
    """Most tokens that a call may use."""

    prompt: int
    answer: int | None
    """None if the request sets no limit."""
    answers: int = 1
    """Number of answers that it asks for."""

    def answer_tokens(self, otherwise: int) -> int:
        """Tokens of all its answers. `otherwise`: tokens of one answer if the request sets no limit."""
        return self.answers * (otherwise if self.answer is None else self.answer)


class _GenerationConfig(msgspec.Struct):
    """The generation config of Gemini and Bedrock."""

    maxOutputTokens: Any = None
    max_output_tokens: Any = None
    maxTokens: Any = None
    candidateCount: Any = None
    candidate_count: Any = None


_config = lenient(_GenerationConfig)


def bound(dialect: Dialect, asked: RequestFields, prompt: int) -> TokenBound:
    """The bound of a request. `asked`: the fields that were read of it; `prompt`: most tokens of its prompt."""
    if not dialect.generates:
        return TokenBound(prompt, 0)
    limits = [asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens]
    many = [asked.n, asked.best_of]
    for raw in filter(None, (asked.generationConfig, asked.generation_config, asked.inferenceConfig)):
        config = _config(bytes(raw))
        limits += [config.maxOutputTokens, config.max_output_tokens, config.maxTokens]
        many += [config.candidateCount, config.candidate_count]
    return TokenBound(prompt, _highest(limits), (_highest(many) or 1) * _prompts(asked.prompt))


class Mark(NamedTuple):
    """A place in a prompt, with the content before it that is counted apart."""

    at: int
    apart: int
    images: int
    """Bytes of images."""

    @property
    def tokens(self) -> int:
        """Most tokens of a prompt that ends here."""
        return self.at - self.images + ADDED + self.apart * IMAGE


_START: Final = Mark(0, 0, 0)


class PromptCounter:
    """Counts prompts. It keeps some long ones, so that only the new part of a growing conversation is read."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[bytes, list[Mark]]] = {}
        """The last prompt of a conversation, and marks in it, the last one first."""
        self._bytes = 0

    def tokens(self, whose: Hashable, body: bytes) -> int:
        """Most tokens of a prompt; images and named content are guessed. `whose`: its conversation."""
        if len(body) < _LONG:
            found = _APART.findall(body)  # for each match, the bytes of its image
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
    """Yield some places from `start` on, and the end. `same`: bytes that the prompt shares with the one before."""
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
    """The last place up to `at` that is certainly outside of content counted apart, whatever follows: no such content
    has a `}` or a dot."""
    return max(body.rfind(b"}", 0, at), body.rfind(b".", 0, at)) + 1


_LONGEST: Final = 40
"""Most characters of a string that is read as a number."""


def _highest(values: Iterable[Any]) -> int | None:
    found = [it for value in values if value is not None and (it := _whole(value)) is not None]
    return max(found) if found else None


def _whole(value: Any) -> int | None:
    """A count, read as leniently as servers read it: 100.0, "100", " 1e2 " and 99.5 count, rounded up; None for
    others."""
    if isinstance(value, str) and len(value) <= _LONGEST:
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, float):
        value = ceil(value) if isfinite(value) else None
    return count(value)


def _prompts(raw: msgspec.Raw) -> int:
    """The number of prompts of a completion; each gets an answer."""
    found = arr(loads(bytes(raw))) if raw and bytes(memoryview(raw)[:1]) == b"[" else []
    return len(found) if any(isinstance(one, str | list) for one in found) else 1
