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

from penstock.gateway.dialects.bedrock import BEDROCK
from penstock.gateway.dialects.family import (
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


class Owner(NamedTuple):
    """A form of path and its families, the likeliest first."""

    form: str
    families: tuple[Family, ...]


_ONE = "[/v]/projects/PROJECT/locations/PLACE"
_OPENAI, _BOTH = (OPENAI, CHATGPT), (OPENAI, ANTHROPIC, CHATGPT)
_GENERATE = "{generateContent,streamGenerateContent,countTokens,embedContent,batchEmbedContents}"
OWNERS: Final = (
    Owner("[/v1]/agl/...", (GATEWAY,)),
    Owner("[/v1]/{rewards,events,wrapped}", (GATEWAY,)),
    Owner("[/v1]/traces/ingest", _OPENAI),
    Owner("[/v1]/{traces,logs,metrics}/...", (GATEWAY,)),
    Owner(f"{_ONE}/{{models,tunedModels,endpoints}}/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    Owner(f"{_ONE}/publishers/google/models/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    Owner(f"{_ONE}/...", (VERTEX,)),
    Owner(f"[/v]/publishers/google/models/MODEL:{_GENERATE}", (VERTEX, GEMINI)),
    Owner("[/v]/publishers/...", (VERTEX,)),
    Owner("/v1internal*", (CODEASSIST,)),
    Owner("/ws/google.cloud.*", (VERTEX, GEMINI)),
    Owner("/ws/google.*", (GEMINI,)),
    Owner("[/v]/interactions/...", (GEMINI,)),
    Owner("/v1beta1/...", (VERTEX, GEMINI)),
    Owner("/{v1alpha,v1beta,v1beta2,v1beta3}/...", (GEMINI,)),
    Owner("/upload/...", (GEMINI,)),
    Owner(f"[/v]/{{models,tunedModels,endpoints}}/MODEL:{_GENERATE}", (GEMINI, VERTEX)),
    Owner("[/v]/{models,tunedModels}/MODEL:OPERATION", (GEMINI, VERTEX)),
    Owner("[/v]/{cachedContents,tunedModels,corpora,fileSearchStores,operations}/...", (GEMINI,)),
    Owner("[/v1]/{model,async-invoke,guardrail,guardrails}/...", (BEDROCK,)),
    Owner("[/v1]/{foundation-models,inference-profiles,model-invocation-job,model-invocation-jobs}/...", (BEDROCK,)),
    Owner("[/v1]/{knowledgebases,retrieveAndGenerate,retrieveAndGenerateStream,flows}/...", (BEDROCK,)),
    Owner("[/v1]/agents/AGENT/agentAliases/...", (BEDROCK,)),
    Owner("/openai/deployments/...", (AZURE,)),
    Owner("/openai/...", (AZURE, BEDROCK)),
    Owner("/models/{chat/completions,embeddings,images/embeddings,info}", (AZURE,)),
    Owner("/anthropic/...", (AZURE, BEDROCK, ANTHROPIC)),
    Owner("[/v1]/{messages,complete,organizations,environments,memory_stores,dreams}/...", (ANTHROPIC,)),
    Owner("[/v1]/oauth/token", (ANTHROPIC,)),
    Owner("/api/{hello,oauth,event_logging}/...", (ANTHROPIC,)),
    Owner("/api/claude_*", (ANTHROPIC,)),
    Owner("/backend-api/...", (CHATGPT,)),
    Owner("[/v1]/responses/...", _OPENAI),
    Owner("[/v1]/models/...", (*_BOTH, GEMINI)),
    Owner("[/v1]/agents/sessions/...", _BOTH),
    Owner("[/v1]/{agents,files,skills,vaults,sessions}/...", _BOTH),
    Owner("[/v1]/{chat,completions,embeddings}/...", (OPENAI,)),
    Owner("[/v1]/{conversations,batches,uploads,moderations,decisions}/...", _OPENAI),
    Owner("[/v1]/{audio,images,videos,realtime,live}/...", _OPENAI),
    Owner("[/v1]/{fine_tuning,vector_stores,assistants,threads,evals,containers,chatkit}/...", _OPENAI),
    Owner("[/v1]/{organization,projects,engines,edits,usage,dashboard}/...", _OPENAI),
    Owner("[/v]/{rerank,score,pooling,classify}", (OPENAI,)),
    Owner("/{tokenize,detokenize,tokenizer_info,generate,invocations,ping,version,health,load,server_info}", (OPENAI,)),
    Owner("/inference/v1/...", (OPENAI,)),
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
