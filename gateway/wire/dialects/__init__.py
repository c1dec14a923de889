"""The wire formats, in the order in which they are asked whether a call is theirs. A new one is a file and a line here:
others ask it what they need to know of it (`base.Dialect`), and never go by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import chain
from typing import Final, TypeAlias

from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.bedrock import ConverseDialect
from penstock.gateway.wire.dialects.bedrock_invoke import BedrockCountDialect, InvokeDialect, TextCompletionsDialect
from penstock.gateway.wire.dialects.chat import ChatDialect, CompletionsDialect
from penstock.gateway.wire.dialects.clouds import cloud_path, in_path
from penstock.gateway.wire.dialects.codeassist import CodeAssistCountDialect, CodeAssistDialect
from penstock.gateway.wire.dialects.family import (
    ANTHROPIC,
    AZURE,
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
from penstock.gateway.wire.dialects.hosted import SessionDialect, SessionToolDialect, SessionTurnDialect
from penstock.gateway.wire.dialects.interactions import RETRIEVAL, InteractionsDialect
from penstock.gateway.wire.dialects.mcp import McpDialect
from penstock.gateway.wire.dialects.media import ImagesDialect, SpeechDialect, TranscriptionDialect, VideosDialect
from penstock.gateway.wire.dialects.messages import CountTokensDialect, MessagesDialect
from penstock.gateway.wire.dialects.opaque import EmbeddingsDialect, ModelsDialect, OpaqueDialect, SocketDialect
from penstock.gateway.wire.dialects.openai_operations import (
    CompactionDialect,
    ConversationsDialect,
    DecisionsDialect,
    InputTokensDialect,
    ModerationsDialect,
)
from penstock.gateway.wire.dialects.realtime import LiveDialect, RealtimeDialect
from penstock.gateway.wire.dialects.responses import ID, ResponsesDialect, RetrievalDialect

Headers: TypeAlias = Iterable[tuple[bytes, bytes, bytes]]
OPAQUE: Dialect = OpaqueDialect()
_SOCKET: Final = SocketDialect()
DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    MessagesDialect(),
    ResponsesDialect(),
    CompletionsDialect(),
    EmbeddingsDialect(),
    CountTokensDialect(),
    TextCompletionsDialect(),
    CompactionDialect(),
    InputTokensDialect(),
    DecisionsDialect(),
    ModerationsDialect(),
    ConversationsDialect(),
    GeminiDialect(),
    GeminiCountDialect(),
    GeminiEmbeddingsDialect(),
    InteractionsDialect(),
    CodeAssistDialect(),
    CodeAssistCountDialect(),
    ConverseDialect(),
    TranscriptionDialect(),
    SpeechDialect(),
    ImagesDialect(),
    VideosDialect(),
    InvokeDialect(),
    BedrockCountDialect(),
    ModelsDialect(),
    RetrievalDialect("retrieval", ResponsesDialect(), f"(?:/v1)?/responses/{ID}"),
    RetrievalDialect("interaction_retrieval", InteractionsDialect(), RETRIEVAL),
    SessionDialect("managed", ANTHROPIC, "/sessions", "threads"),
    SessionTurnDialect("managed_turn", ANTHROPIC),
    SessionToolDialect("managed_tool", ANTHROPIC),
    SessionDialect("agent", OPENAI, "/agents/sessions", "subagents"),
    SessionTurnDialect("agent_turn", OPENAI),
    SessionToolDialect("agent_tool", OPENAI),
    McpDialect(),
    RealtimeDialect(),
    GeminiLiveDialect(),
    LiveDialect(),
    _SOCKET,
    OPAQUE,
)
_IN_PATH: Final = {it.name: in_path(it) for it in DIALECTS if it.family in (OPENAI, ANTHROPIC) and not it.unknown}
"""Dialects of clouds' paths that name the model, by name."""
_PUBLIC: Final = (OPENAI, ANTHROPIC, CHATGPT, GEMINI)
FAMILIES: Final[dict[str, Family]] = {
    family.name: family
    for family in (*_PUBLIC, *(it.family for it in DIALECTS), *chain.from_iterable(row.families for row in OWNERS))
}
"""Families by name; those with a public endpoint first."""


@lru_cache(maxsize=8192)
def find(method: str, path: str) -> Dialect:
    """The dialect of a call; `path` has no query and is below the rollout's address. Remembered: paths repeat."""
    if (cloud := cloud_path(path)) is None:
        return next(dialect for dialect in DIALECTS if dialect.matches(method, path))
    found = next(dialect for dialect in DIALECTS if dialect.matches(method, cloud.path))
    if found.family is cloud.api and (known := found if cloud.model is None else _IN_PATH.get(found.name)) is not None:
        return known
    return _SOCKET if method == "WEBSOCKET" else OPAQUE


class _DialectsByName(dict[str, Dialect]):
    def __missing__(self, name: str) -> Dialect:
        return OPAQUE


by_name: Final[Callable[[str], Dialect]] = _DialectsByName({dialect.name: dialect for dialect in DIALECTS}).__getitem__
"""Returns the dialect that a span names; opaque if this version knows none of that name."""


def family(dialect: Dialect, path: str, headers: Headers) -> Family:
    """Return the family in whose shape a call's client reads errors; OpenAI's, which most servers speak, where nothing
    tells."""
    if not dialect.unknown:
        return dialect.family
    cloud = cloud_path(path.partition("?")[0])
    return next(iter(candidate_families(dialect, path, headers)), dialect.family) if cloud is None else cloud.api


def candidate_families(dialect: Dialect, path: str, headers: Headers) -> tuple[Family, ...]:
    """The families that a call may be of, the likeliest first; none where nothing tells. Its path tells, or its format;
    where several families have the path, the call's key, or its headers (name in lower case, name, value)."""
    path, _, query = path.partition("?")
    found = owners(path) or (() if dialect.unknown else (dialect.family,))
    return found if len(found) == 1 else _families_by_key(found or tuple(FAMILIES.values()), headers, query) or found


_NAMES: Final = {b"anthropic-": ANTHROPIC, b"openai-": OPENAI, b"x-goog-": GEMINI, b"amz-sdk-": BEDROCK}
"""Beginnings of headers that only one family's clients send."""


def _families_by_key(families: tuple[Family, ...], headers: Headers, query: str) -> tuple[Family, ...]:
    """The families to which the call's keys belong; else those that its headers name. A login (ChatGPT's) counts before
    both."""
    keys, names = set[str](), set[str]()
    clouds = families[0] is AZURE
    for low, _, value in headers:
        found = key_kind(low, value)
        if clouds and (found == "x-api-key" or low.startswith(b"anthropic-")):
            # Azure's and Bedrock's clients send these too, where they speak Anthropic's format.
            continue
        keys.update(FAMILIES_OF.get(found, ()) if found else ())
        names.update(one.name for start, one in _NAMES.items() if low.startswith(start))
    for part in query.encode("latin-1").split(b"&"):
        keys.update(FAMILIES_OF.get(query_parameter_kind(part)[1] or "", ()))
    for told in (keys & {CHATGPT.name}, keys, names):
        if some := tuple(one for one in families if one.name in told):
            return some
    return ()
