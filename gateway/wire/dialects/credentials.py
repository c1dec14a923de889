"""The owner of an API key. A key is recognised by its form (`sk-ant-…`), else by the header that it stands in. Pure.

`KeyFilter` holds the kinds of keys that an upstream is sent: those of the API that it speaks, or, on a known host,
those of the host's owner. A bearer without a known form tells nothing: the path of the call then tells whose it is. A
`jwt` is a login, and a login of one API goes to no other; any other bearer may be issued by the user's own engine or
proxy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from penstock.gateway.wire.dialects.family import OPENAI, Family

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
"""The header in which browsers put an OpenAI key, behind `_INSECURE`."""
_INSECURE: Final = b"openai-insecure-api-key."
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
    if name == SUBPROTOCOL and _INSECURE in value:
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
