"""The table of known paths and of the families that have them (docs/dialects.md).

The first row that fits counts, so the special ones come first. Where a row has several families, the call's credential
tells which is meant, then a header that only one family has; else the first of them that is configured. In a row

    [/v]     is any version, or none: /v1, /v1beta, /v1beta1, /v1alpha
    [/v1]    is /v1, or nothing
    NAME     is one segment
    {a,b}    is one of these
    /...     is everything below, or nothing
    *        is anything, in this segment and below
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from penstock.gateway.wire.dialects.bedrock import BEDROCK
from penstock.gateway.wire.dialects.family import (
    ANTHROPIC,
    AZURE,
    CHATGPT,
    CODEASSIST,
    GATEWAY,
    GEMINI,
    OPENAI,
    VERTEX,
    Family,
)


class PathOwner(NamedTuple):
    """A form of path and its families, the likeliest first."""

    form: str
    families: tuple[Family, ...]


_ONE = "[/v]/projects/PROJECT/locations/PLACE"
_OPENAI, _BOTH = (OPENAI, CHATGPT), (OPENAI, ANTHROPIC, CHATGPT)
_GENERATE = "{generateContent,streamGenerateContent,countTokens,embedContent,batchEmbedContents}"
OWNERS: Final = (
    PathOwner("[/v1]/agl/...", (GATEWAY,)),
    PathOwner("[/v1]/{rewards,events,wrapped}", (GATEWAY,)),
    PathOwner("[/v1]/traces/ingest", _OPENAI),
    PathOwner("[/v1]/{traces,logs,metrics}/...", (GATEWAY,)),
    PathOwner(f"{_ONE}/{{models,tunedModels,endpoints}}/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    PathOwner(f"{_ONE}/publishers/google/models/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    PathOwner(f"{_ONE}/...", (VERTEX,)),
    PathOwner(f"[/v]/publishers/google/models/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    PathOwner("[/v]/publishers/...", (VERTEX,)),
    PathOwner("/v1internal*", (CODEASSIST,)),
    PathOwner("/ws/google.cloud.*", (VERTEX, GEMINI)),
    PathOwner("/ws/google.*", (GEMINI,)),
    PathOwner("[/v]/interactions/...", (GEMINI,)),
    PathOwner("/v1beta1/...", (VERTEX, GEMINI)),
    PathOwner("/{v1alpha,v1beta,v1beta2,v1beta3}/...", (GEMINI,)),
    PathOwner("/upload/...", (GEMINI,)),
    PathOwner(f"[/v]/{{models,tunedModels,endpoints}}/MODEL:{_GENERATE}", (GEMINI, VERTEX)),
    PathOwner("[/v]/{models,tunedModels}/MODEL:OPERATION", (GEMINI, VERTEX)),
    PathOwner("[/v]/{cachedContents,tunedModels,corpora,fileSearchStores,operations}/...", (GEMINI,)),
    PathOwner("[/v1]/{model,async-invoke,guardrail,guardrails}/...", (BEDROCK,)),
    PathOwner(
        "[/v1]/{foundation-models,inference-profiles,model-invocation-job,model-invocation-jobs}/...", (BEDROCK,)
    ),
    PathOwner("[/v1]/{knowledgebases,retrieveAndGenerate,retrieveAndGenerateStream,flows}/...", (BEDROCK,)),
    PathOwner("[/v1]/agents/AGENT/agentAliases/...", (BEDROCK,)),
    PathOwner("/openai/deployments/...", (AZURE,)),
    PathOwner("/openai/...", (AZURE, BEDROCK)),
    PathOwner("/models/{chat/completions,embeddings,images/embeddings,info}", (AZURE,)),
    PathOwner("/anthropic/...", (AZURE, BEDROCK, ANTHROPIC)),
    PathOwner("[/v1]/{messages,complete,organizations,environments,memory_stores,dreams}/...", (ANTHROPIC,)),
    PathOwner("[/v1]/oauth/token", (ANTHROPIC,)),
    PathOwner("/api/{hello,oauth,event_logging}/...", (ANTHROPIC,)),
    PathOwner("/api/claude_*", (ANTHROPIC,)),
    PathOwner("/backend-api/...", (CHATGPT,)),
    PathOwner("[/v1]/responses/...", _OPENAI),
    PathOwner("[/v1]/models/...", (*_BOTH, GEMINI)),
    PathOwner("[/v1]/agents/sessions/...", _BOTH),
    PathOwner("[/v1]/{agents,files,skills,vaults,sessions}/...", _BOTH),
    PathOwner("[/v1]/{chat,completions,embeddings}/...", (OPENAI,)),
    PathOwner("[/v1]/{conversations,batches,uploads,moderations,decisions}/...", _OPENAI),
    PathOwner("[/v1]/{audio,images,videos,realtime,live}/...", _OPENAI),
    PathOwner("[/v1]/{fine_tuning,vector_stores,assistants,threads,evals,containers,chatkit}/...", _OPENAI),
    PathOwner("[/v1]/{organization,projects,engines,edits,usage,dashboard}/...", _OPENAI),
    PathOwner("[/v]/{rerank,score,pooling,classify}", (OPENAI,)),
    PathOwner(
        "/{tokenize,detokenize,tokenizer_info,generate,invocations,ping,version,health,load,server_info}", (OPENAI,)
    ),
    PathOwner("/inference/v1/...", (OPENAI,)),
)
_WORDS: Final = {
    "[/v]": r"(?:/v\d+(?:(?:alpha|beta)\d*)?)*",
    "[/v1]": "(?:/v1)*",
    "/...": "(?:/.*)?",
    "*": ".*",
    "{": "(?:",
    "}": ")",
    ",": "|",
    "MODEL": "[^/:]+",
    "OPERATION": "[A-Za-z]+",
}
_WORD: Final = re.compile(r"\[/v1?\]|/\.\.\.|[*{},]|\b[A-Z]{5,}\b")


def _pattern(form: str) -> str:
    parts: list[str] = []
    at = 0
    for word in _WORD.finditer(form):
        parts += re.escape(form[at : word.start()]), _WORDS.get(word[0], "[^/]+")
        at = word.end()
    return "".join(parts) + re.escape(form[at:])


_ROWS: Final = [(re.compile(_pattern(row.form)), row.families) for row in OWNERS]
_SLASHES: Final = re.compile("//+")


@lru_cache(maxsize=8192)
def owners(path: str) -> tuple[Family, ...]:
    """The families that have a path (no query, below the rollout's address), the likeliest first; none where it is not
    known. A `/v1` before it is taken for the end of a base URL that was meant for another API. Remembered: paths
    repeat."""
    path = _SLASHES.sub("/", unquote(path)).rstrip("/")
    found = next((families for row, families in _ROWS if row.fullmatch(path)), None)
    if found is None and path.startswith("/v1/"):
        found = owners(path[3:])
    return found or ()
