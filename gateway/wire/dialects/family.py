"""The API of a provider: the common parts of its formats, and the errors that the gateway itself sends to its clients.

An upstream speaks one family (`dialect` in penstock.toml). A family has an error shape, so that the official SDKs raise
the right exceptions, a header for keys, and a public endpoint if all its users share one. `owners` tells which family a
path or a key belongs to. A format of another provider may bring its family in its own file.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, Literal

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

    def credential(self, key: str) -> tuple[bytes, bytes]:
        """Return the header (name, value) that presents a key."""
        return self.credential_header, self.credential_scheme + key.encode()

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
        return orjson.dumps({"type": "error", "error": {"type": of, "message": prefix_field(field, message)}})


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
GATEWAY: Final[Family] = _Gateway()


# Tells whether an answer with a good HTTP status is a good answer. Providers that fail late say so in an event of the
# stream, or not at all: the stream just ends. Some give an error as the body of a 200.
#
# All events of a stream are looked at (`stream_events`). An answer that ends at its limit of tokens is complete.

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
