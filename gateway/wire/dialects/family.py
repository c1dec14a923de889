"""The API of a provider: the common parts of its formats, the errors that the gateway itself sends to its clients, and
the paths, keys and hosts by which it is known (docs/dialects.md).

An upstream speaks one family (`dialect` in penstock.toml). A family has an error shape, so that the official SDKs raise
the right exceptions, a header for keys, and a public endpoint if all its users share one. A format of another provider
may bring its family in its own file.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal, NamedTuple
from urllib.parse import unquote, unquote_to_bytes

import msgspec
import orjson


class Family(ABC):
    """The API of one provider, which others may serve too."""

    name: ClassVar[str]
    """The name in penstock.toml."""
    base_url: ClassVar[str | None] = None
    """The public endpoint, as the provider's SDK takes it; None where users do not share one."""
    versioned: ClassVar[bool] = False
    """True if base URLs contain the `/v1` with which paths begin."""
    root: ClassVar[str] = ""
    """The beginning of the family's own paths; such a path is below the host, and the base URL's path is not put before
    it again."""
    models: ClassVar[bool] = True
    """True if it serves models, so that an `[[upstream]]` of penstock.toml may speak it."""
    engines: ClassVar[bool] = False
    """True if inference engines speak it: they take chat completions, and give token ids when asked for them."""
    also: ClassVar[frozenset[str]] = frozenset()
    """Families whose formats its servers may also take, if a route leads them there."""
    credential_header: ClassVar[bytes]
    """The header in which clients send their key."""
    credential_scheme: ClassVar[bytes] = b""
    """The text before the key in that header."""

    def credentials(self, key: str) -> tuple[tuple[bytes, bytes], ...]:
        """Return the headers (name, value) that present a key."""
        return ((self.credential_header, self.credential_scheme + key.encode()),)

    @abstractmethod
    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        """The body of an error. `kind` is its machine-readable name, `field` the faulty part of the request. Where the
        shape has no place for the field, it stands before the message, as Anthropic itself writes it."""


def prefix_field(field: str | None, message: str) -> str:
    """Put the field that a message is about before it."""
    return f"{field}: {message}" if field else message


class _OpenAI(Family):
    name = "openai"
    base_url = "https://api.openai.com/v1"
    versioned = True
    engines = True
    also = frozenset({"anthropic", "chatgpt"})
    credential_header = b"Authorization"
    credential_scheme = b"Bearer "
    types: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        of = self.types.get(status, "invalid_request_error" if status < 500 else "server_error")
        return orjson.dumps({"error": {"message": message, "type": of, "param": field, "code": kind}})


class _ChatGpt(_OpenAI):
    """The API that Codex uses with a ChatGPT login: OpenAI's formats, but another host and other keys."""

    name = "chatgpt"
    base_url = "https://chatgpt.com/backend-api/codex"
    root = "/backend-api/"
    engines = False
    also = frozenset[str]()


class _Anthropic(Family):
    name = "anthropic"
    base_url = "https://api.anthropic.com"
    credential_header = b"x-api-key"
    types: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        504: "timeout_error",
        529: "overloaded_error",
    }

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        of = self.types.get(status, "invalid_request_error" if status < 500 else "api_error")
        # Claude Code shows the message of such an error as it is.
        of = "billing_error" if kind == "budget" else of
        error: dict[str, Any] = {"type": of, "message": prefix_field(field, message)}
        if field == "thread":
            # Anthropic's SDK then sends the whole conversation, as it does for requests that cannot have a thread.
            error["details"] = {"error_code": "thread_unsupported_request"}
        return orjson.dumps({"type": "error", "error": error})


class _Gemini(Family):
    name = "gemini"
    base_url = "https://generativelanguage.googleapis.com"
    credential_header = b"x-goog-api-key"
    statuses: ClassVar = {
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        504: "DEADLINE_EXCEEDED",
    }

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        name = self.statuses.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return orjson.dumps({"error": {"code": status, "message": prefix_field(field, message), "status": name}})


class _Vertex(_Gemini):
    """Google's Vertex AI: Google's models, other providers' models in their own formats, and chat completions. It has a
    host for each region."""

    name = "vertex"
    base_url = None
    credential_header = b"Authorization"
    credential_scheme = b"Bearer "


class _CodeAssist(_Vertex):
    """The API that Gemini CLI uses with a Google login."""

    name = "codeassist"


class _Azure(_OpenAI):
    """Azure OpenAI and Foundry: OpenAI's formats below paths of its own. Each resource has a host."""

    name = "azure"
    base_url = None
    versioned = engines = False
    also = frozenset[str]()
    credential_header = b"api-key"
    credential_scheme = b""

    def credentials(self, key: str) -> tuple[tuple[bytes, bytes], ...]:
        """Return both headers that Foundry's own client sends: Anthropic's models there look for the second."""
        return *super().credentials(key), (b"x-api-key", key.encode())


class _Bedrock(Family):
    """Amazon Bedrock. It has a host for each region, so no upstream is configured by default."""

    name = "bedrock"
    credential_header = b"Authorization"
    credential_scheme = b"Bearer "
    types: ClassVar = {
        401: "UnrecognizedClientException",
        403: "AccessDeniedException",
        404: "ResourceNotFoundException",
        429: "ThrottlingException",
        500: "InternalServerException",
        504: "ModelTimeoutException",
    }

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        of = self.types.get(status, "ValidationException" if status < 500 else "ServiceUnavailableException")
        return orjson.dumps({"__type": of, "message": prefix_field(field, message)})


class _Gateway(_OpenAI):
    """The gateway's own requests, which are never sent to a provider."""

    name = "gateway"
    base_url = None
    models = False


OPENAI: Final[Family] = _OpenAI()
CHATGPT: Final[Family] = _ChatGpt()
ANTHROPIC: Final[Family] = _Anthropic()
GEMINI: Final[Family] = _Gemini()
VERTEX: Final[Family] = _Vertex()
CODEASSIST: Final[Family] = _CodeAssist()
AZURE: Final[Family] = _Azure()
BEDROCK: Final[Family] = _Bedrock()
GATEWAY: Final[Family] = _Gateway()


# -- answers with a good HTTP status that are no good answers ----------------------------------------------------------

# Providers that fail late say so in an event of the stream, or not at all: the stream just ends. Some give an error as
# the body of a 200. All events of a stream are looked at (`sse.StreamReader`). An answer that ends at its limit of
# tokens is complete.

Failure = Literal["stream_error", "ended_early", "error_body", "rpc_error", "tool_error"]
"""In this order: an error among the events of a stream; a stream without its end; a plain body that is an error; in
MCP, an error of JSON-RPC, whose code is an attribute; in MCP, a tool's result that is an error."""
_DONE = re.compile(rb"(?<![^\r\n])data: ?\[DONE\]\s*\Z")
_TAIL = 64
"""Bytes at the end of a stream that are searched for `[DONE]`."""


class ErrorFields(msgspec.Struct, gc=False):
    """The fields by which a body, or an event's data, says that it is an error, in all shapes that servers use."""

    error: Any = None
    object: Any = None
    type: Any = None
    detail: Any = None
    """The only field that web frameworks send when they refuse a request."""


def is_error(said: ErrorFields) -> bool:
    """True if a body or an event's data is an error."""
    return bool(said.error) or "error" in (said.object, said.type)


def body_failure(said: ErrorFields) -> Failure | None:
    """`error_body` if a plain body is an error or a web framework's refusal; else None."""
    if said.error or said.object == "error" or said.type == "error":
        return "error_body"
    if said.detail is None:
        return None
    return "error_body" if sum([value is not None for value in msgspec.structs.astuple(said)]) == 1 else None


def is_done(body: bytes) -> bool:
    """True if a stream ends with OpenAI's `[DONE]`."""
    return _DONE.search(body, max(0, len(body) - _TAIL)) is not None


# -- paths -------------------------------------------------------------------------------------------------------------

# The first row that fits counts, so the special ones come first. Where a row has several families, the call's
# credential tells which is meant, then a header that only one family has; else the first of them that is configured.
# In a row
#
#     [/v]     is any version, or none: /v1, /v1beta, /v1beta1, /v1alpha
#     [/v1]    is /v1, or nothing
#     NAME     is one segment
#     {a,b}    is one of these
#     /...     is everything below, or nothing
#     *        is anything, in this segment and below


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
    PathOwner("[/v1]/files/...", (*_BOTH, GEMINI)),
    PathOwner("[/v1]/{agents,skills,vaults,sessions}/...", _BOTH),
    PathOwner("[/v1]/{chat,completions,embeddings}/...", (OPENAI,)),
    PathOwner("[/v1]/batches/...", (*_OPENAI, GEMINI)),
    PathOwner("[/v1]/{conversations,uploads,moderations,decisions}/...", _OPENAI),
    PathOwner("[/v1]/{audio,images,videos,realtime,live}/...", _OPENAI),
    PathOwner("[/v1]/{fine_tuning,vector_stores,assistants,threads,evals,containers,chatkit}/...", _OPENAI),
    PathOwner("[/v1]/{organization,projects,engines,edits,usage,dashboard}/...", _OPENAI),
    PathOwner("[/v]/{rerank,score,pooling,classify}", (OPENAI,)),
    PathOwner(
        "/{tokenize,detokenize,tokenizer_info,generate,invocations,ping,version,health,load,server_info}", (OPENAI,)
    ),
    PathOwner("/inference/v1/...", (OPENAI,)),
)
CHOICE: Final = {"{": "(?:", "}": ")", ",": "|"}
_WORDS: Final = CHOICE | {
    "[/v]": r"(?:/v\d+(?:(?:alpha|beta)\d*)?)*",
    "[/v1]": "(?:/v1)*",
    "/...": "(?:/.*)?",
    "*": ".*",
    "MODEL": "[^/:]+",
    "OPERATION": "[A-Za-z]+",
}
_WORD: Final = re.compile(r"\[/v1?\]|/\.\.\.|[*{},]|\b[A-Z]{5,}\b")


def path_pattern(form: str, words: Mapping[str, str], segment: str = "[^/]+") -> str:
    """The pattern of a form of path. `words`: patterns of its words; `segment`: that of a segment that is named."""
    parts: list[str] = []
    at = 0
    for word in _WORD.finditer(form):
        parts += re.escape(form[at : word.start()]), words.get(word[0], segment)
        at = word.end()
    return "".join(parts) + re.escape(form[at:])


_ROWS: Final = [(re.compile(path_pattern(row.form, _WORDS)), row.families) for row in OWNERS]
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


# -- keys and hosts ----------------------------------------------------------------------------------------------------

# A key is recognised by its form (`sk-ant-…`), else by the header that it stands in. `KeyFilter` holds the kinds of
# keys that an upstream is sent: those of the API that it speaks, or, on a known host, those of the host's owner. A
# bearer without a known form tells nothing: the path of the call then tells whose it is. A `jwt` is a login, and a
# login of one API goes to no other; any other bearer may be issued by the user's own engine or proxy.

BEARER, JWT = "bearer", "jwt"
_FORM: Final = re.compile(
    rb"(?:(?<![A-Za-z0-9_.-])|(?<=insecure-api-key\.))(?:"
    rb"(?P<anthropic>sk-ant-)|(?P<openrouter>sk-or-)|(?P<openai>sk-)"
    rb"|(?P<gemini>AIza|auth_tokens/)|(?P<google>ya29\.)"
    rb"|(?P<bedrock>ABSK|bedrock-api-key-)|(?P<aws>AWS4-|AKIA[A-Z0-9]{12}|ASIA[A-Z0-9]{12})"
    rb"|(?P<other>gsk_|csk-|xai-|pplx-|nvapi-|hf_|r8_|fw_|tgp_v1_)|(?P<jwt>eyJ[A-Za-z0-9_-]+\.)"
    rb")"
)
"""Matches a key; the group's name is its kind. The key may follow a scheme (`Bearer`, `Token`) or stand among other
values."""
_SERVICE: Final = re.compile(rb"/([a-z0-9-]+)/aws4_request")
"""The AWS service that a signature is for."""
_SIGNED_FOR: Final[Mapping[bytes, str]] = {
    b"bedrock": "aws", b"bedrock-mantle": "aws", b"aws-external-anthropic": "aws-anthropic",
}  # fmt: skip
HEADERS: Final[Mapping[bytes, str]] = {
    b"authorization": BEARER,
    b"x-api-key": "x-api-key",
    b"api-key": "api-key",
    b"x-goog-api-key": "gemini",
    b"chatgpt-account-id": "chatgpt",
    b"x-amz-security-token": "aws",
    b"ocp-apim-subscription-key": "api-key",
}
"""The kind of key in a header whose value has no known form."""
SUBPROTOCOL: Final = b"sec-websocket-protocol"
"""The header in which browsers put an OpenAI key, behind `INSECURE`."""
INSECURE: Final = b"openai-insecure-api-key."
_PARAMETERS: Final[Mapping[bytes, str]] = {
    b"key": "gemini",
    b"access_token": BEARER,
    b"api_key": BEARER,
    b"apikey": BEARER,
    b"api-key": "api-key",
    b"subscription-key": "api-key",
    b"x-amz-credential": "aws",
    b"x-amz-signature": "aws",
    b"x-amz-security-token": "aws",
}
"""The kind of key in a query's parameter whose value has no known form."""
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~/+=-]+")
_SHORTEST: Final = 16
"""Least bytes of a key of the kinds `_ALIKE` in an unexpected place: a shorter value may be a language (`sk-SK`) or a
name."""
_ALIKE: Final = frozenset({"openai", "other"})


def key_kind(name: bytes, value: bytes) -> str | None:
    """The kind of key in a header, its name in lower case, or in a parameter of a query. None where there is no key. A
    header that is not listed in `HEADERS` holds one if its value has a known form."""
    found, place = _FORM.search(value), HEADERS.get(name) or _PARAMETERS.get(name.lower())
    if name == SUBPROTOCOL and INSECURE in value:
        place = "openai"
    if found is not None and place is None and found.lastgroup in _ALIKE:
        token = _TOKEN.match(value, found.start())
        found = found if token is not None and len(token[0]) >= _SHORTEST else None
    if found is None or name == b"chatgpt-account-id" or (found.lastgroup == JWT and place not in (None, BEARER)):
        return place
    if found.lastgroup != "aws":
        return found.lastgroup
    service = _SERVICE.search(value.replace(b"%2F", b"/").replace(b"%2f", b"/"))
    return "aws" if service is None else _SIGNED_FOR.get(service[1], "aws-other")


def query_parameter_kind(part: bytes) -> tuple[bytes, str | None]:
    """(name, kind of the key) of one `name=value` of a query; the kind is None where it holds no key."""
    name, _, value = part.partition(b"=")
    name = unquote_to_bytes(name)
    return name, key_kind(name, unquote_to_bytes(value)) if value else None


FAMILIES_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "openai": ("openai",),
    "openrouter": ("openai",),
    "other": ("openai",),
    "chatgpt": ("chatgpt",),
    "anthropic": ("anthropic",),
    "x-api-key": ("anthropic",),
    "aws-anthropic": ("anthropic",),
    "gemini": ("gemini", "vertex"),
    "google": ("gemini", "vertex", "codeassist"),
    "aws": ("bedrock",),
    "bedrock": ("bedrock",),
    "api-key": ("azure",),
}
"""The families that a kind of key may belong to, used where the path does not tell."""
_GOOGLE: Final = {BEARER, JWT, "gemini", "google"}
_TAKEN: Final[Mapping[str, frozenset[str]]] = {
    family: frozenset(kinds)
    for family, kinds in {
        "openai": {BEARER, JWT, "openai", "openrouter", "other", "x-api-key"},
        "chatgpt": {BEARER, JWT, "chatgpt"},
        "anthropic": {BEARER, JWT, "anthropic", "x-api-key", "api-key", "aws-anthropic"},
        "gemini": _GOOGLE,
        "vertex": _GOOGLE,
        "codeassist": _GOOGLE - {"gemini"},
        "bedrock": {BEARER, JWT, "aws", "bedrock"},
        "azure": {BEARER, JWT, "api-key", "x-api-key"},
    }.items()
}
"""The kinds of keys that servers of a family take on an unknown host."""


class ProviderHost(NamedTuple):
    """A public host and the keys that it takes."""

    end: str
    """The host's name, or the domain above it; if it begins with a hyphen, the end of the name."""
    kinds: frozenset[str]
    serves: tuple[str, ...] = ()
    """Families that the host serves whatever is configured."""


_AZURE, _AMAZON = _TAKEN["azure"], frozenset({BEARER, JWT, "aws", "aws-anthropic", "aws-other", "bedrock", "x-api-key"})
_SEVERAL: Final = frozenset({BEARER, JWT, "openai", "x-api-key"})
HOSTS: Final = (
    ProviderHost("api.openai.com", frozenset({BEARER, JWT, "openai"})),
    ProviderHost("chatgpt.com", _TAKEN["chatgpt"]),
    ProviderHost("anthropic.com", frozenset({BEARER, JWT, "anthropic", "x-api-key"})),
    ProviderHost("openrouter.ai", frozenset({BEARER, JWT, "openrouter", "x-api-key"})),
    ProviderHost("cloudcode-pa.googleapis.com", _TAKEN["codeassist"], ("codeassist",)),
    ProviderHost("aiplatform.googleapis.com", frozenset(_GOOGLE), ("vertex",)),
    ProviderHost("-aiplatform.googleapis.com", frozenset(_GOOGLE), ("vertex",)),
    ProviderHost("rep.googleapis.com", frozenset(_GOOGLE), ("vertex",)),
    ProviderHost("googleapis.com", frozenset(_GOOGLE)),
    ProviderHost("amazonaws.com", _AMAZON),
    ProviderHost("amazonaws.com.cn", _AMAZON),
    ProviderHost("api.aws", _AMAZON),
    ProviderHost("azure.com", _AZURE),
    ProviderHost("azure.us", _AZURE),
    ProviderHost("azure.cn", _AZURE),
    ProviderHost("azure-api.net", _AZURE),
    ProviderHost("api.deepseek.com", _SEVERAL),
    ProviderHost("moonshot.ai", _SEVERAL),
    ProviderHost("moonshot.cn", _SEVERAL),
    ProviderHost("aliyuncs.com", _SEVERAL),
)
"""The first host whose `end` fits counts. The last four speak other families' formats, with keys that begin as OpenAI's
do."""


def host_of(name: str) -> ProviderHost | None:
    """The public host of this name; None if it is not known."""
    name = name.lower().rstrip(".")
    ends = ((host, host.end if host.end.startswith("-") else f".{host.end}") for host in HOSTS)
    return next((host for host, end in ends if f".{name}".endswith(end)), None)


@dataclass(frozen=True, slots=True)
class KeyFilter:
    """The kinds of keys that an upstream is sent."""

    kinds: frozenset[str]
    shared: bool
    """True if the upstream is sent bearers of other families' calls, as the user's own engine or proxy is by a
    route."""

    @classmethod
    def of(cls, family: Family, host: str) -> KeyFilter | None:
        """The keys for an upstream of this family on this host; None, which stands for all keys, for servers of
        tools."""
        known = host_of(host)
        if not family.models:
            return None
        return cls(_TAKEN[family.name] if known is None else known.kinds, known is None and family is OPENAI)

    def accepts(self, kind: str | None, own: bool) -> bool:
        """True if a key of this kind is sent to the upstream. `own`: the call is of a family that the upstream
        serves."""
        if kind is None:
            return True
        return kind in self.kinds and (own or (kind != JWT and self.shared) or kind not in (BEARER, JWT, "x-api-key"))
