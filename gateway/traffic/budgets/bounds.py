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
from functools import lru_cache
from math import ceil, isfinite
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.gateway.tape.store.codec import common_prefix
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import MOST_OBJECTS, RequestFields, arr, count, is_bulky, lenient, loads
from penstock.gateway.wire.http.redaction import url as redact_url

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


ANSWER_TOKENS: Final = 8192
"""Tokens that are reserved for an answer to which its request sets no limit."""


class TokenBound(NamedTuple):
    """Most tokens that a call may use."""

    prompt: int
    answer: int | None
    """None if the request sets no limit."""
    answers: int = 1
    """Number of answers that it asks for."""

    @property
    def answer_tokens(self) -> int:
        """Tokens of all its answers."""
        return self.answers * (ANSWER_TOKENS if self.answer is None else self.answer)


class _GenerationConfig(msgspec.Struct):
    """The generation config of Gemini and Bedrock."""

    maxOutputTokens: Any = None
    max_output_tokens: Any = None
    maxTokens: Any = None
    candidateCount: Any = None
    candidate_count: Any = None


_config = lenient(_GenerationConfig)
_UNLIMITED: Final = (None,) * 3
_ONE_ANSWER: Final = (None,) * 2


def bound(dialect: Dialect, asked: RequestFields, prompt: int) -> TokenBound:
    """The bound of a request. `asked`: the fields that were read of it; `prompt`: most tokens of its prompt."""
    if not dialect.generates:
        return TokenBound(prompt, 0)
    limits: tuple[Any, ...] = (asked.max_tokens, asked.max_completion_tokens, asked.max_output_tokens)
    many: tuple[Any, ...] = (asked.n, asked.best_of)
    for raw in (asked.generationConfig, asked.generation_config, asked.inferenceConfig):
        if not raw:
            continue
        config = _config(bytes(raw))
        limits += config.maxOutputTokens, config.max_output_tokens, config.maxTokens
        many += config.candidateCount, config.candidate_count
    # Most requests set few of these.
    answer = None if limits == _UNLIMITED else _highest(limits)
    answers = 1 if many == _ONE_ANSWER else _highest(many) or 1
    return TokenBound(prompt, answer, answers * _prompts(asked.prompt) if asked.prompt else answers)


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
            if not found:
                return len(body) + ADDED
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
    most: int | None = None
    for value in values:
        if value is not None and (found := _whole(value)) is not None and (most is None or found > most):
            most = found
    return most


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
    found = arr(loads(bytes(raw))) if bytes(memoryview(raw)[:1]) == b"[" else []
    return len(found) if any(isinstance(one, str | list) for one in found) else 1


# Decides whether a request tells what the call may use. Pure.
#
# No call is free because it was not understood. A call counts as unread unless its format is known and its body could
# be read, or it uses nothing: by its method, or by the form of its path (`_FREE`). Each budget says what happens to
# an unread call (`Budget.unread`).

_ONLY_ASKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_OVERRIDES: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})
"""Headers that name another method than the request's own; Google's servers and some proxies heed one."""
_ONE = r"(?!v[0-9]+(?:/|$))[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
"""A segment of a path: an id or a name, but no version of an API, behind which anything may follow."""
_MANY = f"(?:/{_ONE})*"
_AT = rf"/(?:models|projects/{_ONE}/locations/{_ONE}{_MANY})/{_ONE}"
"""A model of Google's."""
_FORMS = (
    "/messages/count_tokens", "/responses/input_tokens", "/tokenize", "/detokenize", f"{_AT}:(?:count|compute)Tokens",
    f"/(?:responses|interactions|batches|messages/batches)/{_ONE}/cancel", f"/batches/{_ONE}:cancel",
    rf"/projects/{_ONE}/locations/{_ONE}{_MANY}/count-tokens:rawPredict", "/files",
    f"/uploads(?:/{_ONE}/(?:parts|complete|cancel))?", f"/conversations(?:/{_ONE}(?:/items)?)?", f"/oauth{_MANY}",
    f"/organizations?{_MANY}", "/traces", "/logs", "/metrics", "/health", "/ping",
)  # fmt: skip
"""Paths of calls that use nothing, below the version of an API."""
_FREE: Final = re.compile(
    rf"(?:/openai|/anthropic|/upload)?(?:/v[0-9][a-z0-9]*)?(?:{'|'.join(_FORMS)})"
    r"|/model/[^/]+/count-tokens"
    r"|/v1internal:(?:countTokens|onboardUser|retrieveUserQuota|[a-z]+CodeAssist[A-Za-z]*)"
    rf"|/api/(?:hello|oauth|event_logging|claude_code|claude_cli){_MANY}"
)
"""Paths of POST requests that use nothing: counts of tokens, files, conversations, cancellations, logins, settings of
an organisation, telemetry. Any path that is not certainly one of these may be a generation."""
_SHOWN: Final = 200


_PATH_NAMES: Final = re.compile(r"/(?:(?:model|deployments|engines)/([^/]+)/|models/([^/:]+):)")
"""A path that names a model, or a deployment: its server heeds no other name."""
_BODY_NAMES: Final = re.compile(
    r"/(?:(?:chat/)?completions|complete|messages|responses(?:/compact)?|embeddings|interactions|audio/[a-z]+|images/[a-z]+"
    r"|videos|moderations|rerank|score|pooling|classify|generate|invocations|fine_tuning/jobs|cachedContents)/*$"
)
"""Ends of paths with which `model` of the body is certainly the model that answers."""


class UnreadCall(NamedTuple):
    """A call whose use cannot be counted."""

    what: str
    """The part that is not understood."""
    path: str


def uses_nothing(dialect: Dialect, method: str, path: str, headers: Iterable[tuple[bytes, bytes, bytes]] = ()) -> bool:
    """True if a call uses nothing, whatever its body says. `path`: with its query."""
    if dialect.uses_tokens or not dialect.unknown:
        return not dialect.uses_tokens
    overridden = method in _ONLY_ASKS and any(low in _OVERRIDES for low, _, _ in headers)
    return is_free("POST" if overridden else method, path.partition("?")[0])


def known_model(model: str | None, dialect: Dialect, path: str) -> str | None:
    """The model that a call is certainly for; None if that is unknown. `model`: the one that it names."""
    path = path.partition("?")[0]
    if not dialect.unknown or model is None:
        return model
    if (named := _PATH_NAMES.search(unquote(path))) is not None:
        return model if model in named.groups() else None
    return model if _BODY_NAMES.search(path) is not None else None


def is_read(dialect: Dialect, asked: RequestFields | None, body: bytes, packed: bool) -> bool:
    """True if a call that may use something tells what it may use. `asked`: the fields that were read of its body;
    `packed`: the body has a content encoding that cannot be undone."""
    if not dialect.uses_tokens or packed or (len(body) > MOST_OBJECTS and is_bulky(body)):
        return False
    # A body of which fields were read is an object, and is not parsed again.
    return (asked is not None and asked != _NOTHING) or isinstance(loads(body), dict)


@lru_cache(maxsize=8192)
def is_free(method: str, path: str) -> bool:
    """True if a call of no known format uses nothing. Cached: paths repeat."""
    return method in _ONLY_ASKS or _FREE.fullmatch(path) is not None


def unread_call(dialect: Dialect, method: str, path: str) -> UnreadCall:
    """The description of a call that is not read."""
    what = f"the body of a request of format {dialect.name}" if dialect.uses_tokens else "the format of this path"
    return UnreadCall(f"{what} is not understood", f"{method} {redact_url(path.partition('?')[0][:_SHOWN])}")


_NOTHING: Final = RequestFields()
