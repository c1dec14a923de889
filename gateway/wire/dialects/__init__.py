"""The wire formats, in the order in which they are asked whether a call is theirs. A new one is a file and a line here:
others ask it what they need to know of it (`base.Dialect`), and never go by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.bedrock import ConverseDialect
from penstock.gateway.wire.dialects.chat import ChatDialect, CompletionsDialect
from penstock.gateway.wire.dialects.family import (
    ANTHROPIC,
    BEDROCK,
    CHATGPT,
    FAMILIES_OF,
    GEMINI,
    OPENAI,
    OWNERS,
    Family,
    key_kind,
    owners,
    query_parameter_kind,
)
from penstock.gateway.wire.dialects.gemini import GeminiCountDialect, GeminiDialect, GeminiEmbeddingsDialect
from penstock.gateway.wire.dialects.gemini_live import GeminiLiveDialect
from penstock.gateway.wire.dialects.mcp import McpDialect
from penstock.gateway.wire.dialects.messages import CountTokensDialect, MessagesDialect
from penstock.gateway.wire.dialects.opaque import EmbeddingsDialect, ModelsDialect, OpaqueDialect, SocketDialect
from penstock.gateway.wire.dialects.realtime import LiveDialect, RealtimeDialect
from penstock.gateway.wire.dialects.responses import ID, ResponsesDialect, RetrievalDialect

Headers: TypeAlias = Iterable[tuple[bytes, bytes, bytes]]
OPAQUE: Dialect = OpaqueDialect()
DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    MessagesDialect(),
    ResponsesDialect(),
    CompletionsDialect(),
    EmbeddingsDialect(),
    CountTokensDialect(),
    GeminiDialect(),
    GeminiCountDialect(),
    GeminiEmbeddingsDialect(),
    ConverseDialect(),
    ModelsDialect(),
    RetrievalDialect("retrieval", ResponsesDialect(), f"(?:/openai)?(?:/v1)?/responses/{ID}"),
    McpDialect(),
    RealtimeDialect(),
    GeminiLiveDialect(),
    LiveDialect(),
    SocketDialect(),
    OPAQUE,
)
FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for families in (*((it.family, *it.families) for it in DIALECTS), *(row.families for row in OWNERS))
    for family in families
}
"""Families by name."""


@lru_cache(maxsize=8192)
def find(method: str, path: str) -> Dialect:
    """The dialect of a call; `path` has no query and is below the rollout's address. Remembered: paths repeat."""
    return next(dialect for dialect in DIALECTS if dialect.matches(method, path))


class _DialectsByName(dict[str, Dialect]):
    def __missing__(self, name: str) -> Dialect:
        return OPAQUE


by_name: Final[Callable[[str], Dialect]] = _DialectsByName({dialect.name: dialect for dialect in DIALECTS}).__getitem__
"""Returns the dialect that a span names; opaque if this version knows none of that name."""


def family(dialect: Dialect, path: str, headers: Headers) -> Family:
    """Return the family whose API a call speaks; OpenAI's, which most servers speak, where nothing tells."""
    return next(iter(candidate_families(dialect, path, headers)), dialect.family)


def candidate_families(dialect: Dialect, path: str, headers: Headers) -> tuple[Family, ...]:
    """The families that a call may be of, the likeliest first; none where nothing tells. Its format tells, or its path;
    where several families have the path, the call's key, or its headers (name in lower case, name, value)."""
    if not dialect.unknown and not dialect.families:
        return (dialect.family,)
    path, _, query = path.partition("?")
    found = owners(path) or (() if dialect.unknown else (dialect.family,))
    return found if len(found) == 1 else _families_by_key(found or tuple(FAMILIES.values()), headers, query) or found


_NAMES: Final = {b"anthropic-": ANTHROPIC, b"openai-": OPENAI, b"x-goog-": GEMINI, b"amz-sdk-": BEDROCK}
"""Beginnings of headers that only one family's clients send."""


def _families_by_key(families: tuple[Family, ...], headers: Headers, query: str) -> tuple[Family, ...]:
    """The families to which the call's keys belong; else those that its headers name. A login (ChatGPT's) counts before
    both."""
    keys, names = set[str](), set[str]()
    for low, _, value in headers:
        found = key_kind(low, value)
        keys.update(FAMILIES_OF.get(found, ()) if found else ())
        names.update(one.name for start, one in _NAMES.items() if low.startswith(start))
    for part in query.encode("latin-1").split(b"&"):
        keys.update(FAMILIES_OF.get(query_parameter_kind(part)[1] or "", ()))
    for told in (keys & {CHATGPT.name}, keys, names):
        if some := tuple(one for one in families if one.name in told):
            return some
    return ()
