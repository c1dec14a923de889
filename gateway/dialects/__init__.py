"""The wire formats, in the order in which they are asked whether a call is theirs. A new one is a
file and a line here: what others want to know of it they ask it (`base.Dialect`), none by its name."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, TypeAlias

from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.bedrock import Converse
from penstock.gateway.dialects.chat import Chat
from penstock.gateway.dialects.completions import Completions
from penstock.gateway.dialects.embeddings import Embeddings
from penstock.gateway.dialects.family import Family
from penstock.gateway.dialects.gemini import Gemini, GeminiCount, GeminiEmbeddings
from penstock.gateway.dialects.mcp_dialect import Mcp
from penstock.gateway.dialects.messages import CountTokens, Messages
from penstock.gateway.dialects.models import Models
from penstock.gateway.dialects.opaque import Opaque
from penstock.gateway.dialects.responses import Responses

Headers: TypeAlias = Iterable[tuple[bytes, bytes, bytes]]
OPAQUE: Dialect = Opaque()
DIALECTS: tuple[Dialect, ...] = (
    Chat(),
    Messages(),
    Responses(),
    Completions(),
    Embeddings(),
    CountTokens(),
    Gemini(),
    GeminiCount(),
    GeminiEmbeddings(),
    Converse(),
    Models(),
    Mcp(),
    OPAQUE,
)
FAMILIES: Final[dict[str, Family]] = {
    family.name: family for dialect in DIALECTS for family in (dialect.family, *dialect.families)
}
"""By name."""
_NAMED: Final = {dialect.name: dialect for dialect in DIALECTS}


@lru_cache(maxsize=8192)
def find(method: str, path: str) -> Dialect:
    """The dialect of a call; `path` has no query and is below the rollout's address. Remembered: paths repeat."""
    return next(dialect for dialect in DIALECTS if dialect.matches(method, path))


def by_name(name: str) -> Dialect:
    """The dialect that a span names; opaque if this version knows none of that name."""
    return _NAMED.get(name, OPAQUE)


def family(dialect: Dialect, path: str, headers: Headers) -> Family:
    """Whose API a call speaks; that of OpenAI, which most servers speak, where nothing tells."""
    return told(dialect, path, headers) or dialect.family


def told(dialect: Dialect, path: str, headers: Headers) -> Family | None:
    """Whose API a call speaks, if its format tells, its headers (name in lower case, name, value), or its path."""
    if not dialect.unknown and not dialect.families:
        return dialect.family
    asked = FAMILIES.values() if dialect.unknown else dialect.families
    sent = (one for low, _, value in headers for one in asked if one.sends(low, value))
    return next(sent, None) or next((one for one in asked if path.startswith(one.paths)), None)
