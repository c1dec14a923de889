"""Whose API it is: what the formats of one provider share, and what the gateway says itself to a client of it.

A family is what an upstream speaks (`dialect` in penstock.toml). It has an error shape, so that the official SDKs raise
what they should, a header for keys, and where there is one for everybody, a public endpoint. Those three that most
servers speak are here; a format of another provider brings its family in its own file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import orjson


class Family(ABC):
    """The API of one provider, as others may serve it too."""

    name: ClassVar[str]
    """What penstock.toml calls it."""
    base_url: ClassVar[str | None] = None
    """The public endpoint, as its SDK takes it; None where there is none for everybody."""
    versioned: ClassVar[bool] = False
    """Whether base URLs hold the `/v1` that paths begin with."""
    root: ClassVar[str] = ""
    """What its own paths begin with; such a path is below the host, and not below the base URL once more."""
    paths: ClassVar[tuple[str, ...]] = ()
    """Beginnings of paths that no other API has: they tell whose a call is that nothing else is known of."""
    models: ClassVar[bool] = True
    """Whether models are served: what an `[[upstream]]` of penstock.toml may speak."""
    engines: ClassVar[bool] = False
    """Whether inference engines speak it: they take chat completions, and give token ids when asked for them."""
    credential_header: ClassVar[bytes]
    """Where its clients put their key."""
    credential_scheme: ClassVar[bytes] = b""
    """What stands before the key there."""

    def credential(self, key: str) -> tuple[bytes, bytes]:
        """The header that presents a key."""
        return self.credential_header, self.credential_scheme + key.encode()

    def sends(self, header: bytes, value: bytes) -> bool:
        """Whether this header, its name in lower case, is one that only its clients send. That tells whose a call is
        where its path does not."""
        return False

    @abstractmethod
    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        """The body of an error. `kind` is its machine-readable name, `field` the part of the request that is at fault.
        Where the shape has no place for the field, it stands before the message, as Anthropic itself writes it."""


def named(field: str | None, message: str) -> str:
    """A message with the field that it is about."""
    return f"{field}: {message}" if field else message


class _OpenAI(Family):
    name = "openai"
    base_url = "https://api.openai.com/v1"
    versioned = True
    engines = True
    credential_header = b"Authorization"
    credential_scheme = b"Bearer "
    types: ClassVar = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
    }

    def sends(self, header: bytes, value: bytes) -> bool:
        if header == b"authorization":
            return value.startswith(b"Bearer sk-") and not value.startswith((b"Bearer sk-ant-", b"Bearer sk-or-"))
        return header.startswith(b"openai-") or (header == b"user-agent" and b"OpenAI/" in value)

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        of = self.types.get(status, "invalid_request_error" if status < 500 else "server_error")
        return orjson.dumps({"error": {"message": message, "type": of, "param": field, "code": kind}})


class _ChatGpt(_OpenAI):
    """What Codex speaks with a ChatGPT login: OpenAI's formats, but another host, and other keys."""

    name = "chatgpt"
    base_url = "https://chatgpt.com/backend-api/codex"
    root = "/backend-api/"
    paths = (root,)
    engines = False

    def sends(self, header: bytes, value: bytes) -> bool:
        return header == b"chatgpt-account-id"


class _Anthropic(Family):
    name = "anthropic"
    base_url = "https://api.anthropic.com"
    paths = ("/api/hello", "/api/claude_", "/api/oauth/", "/api/event_logging/")
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

    def sends(self, header: bytes, value: bytes) -> bool:
        # They name their version, or at least themselves.
        own = header.startswith(b"anthropic-") or header == b"x-api-key"
        named = header == b"user-agent" and b"claude" in value.lower()
        return own or named or (header == b"authorization" and b"sk-ant-" in value)

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        of = self.types.get(status, "invalid_request_error" if status < 500 else "api_error")
        return orjson.dumps({"type": "error", "error": {"type": of, "message": named(field, message)}})


class _Gemini(Family):
    name = "gemini"
    base_url = "https://generativelanguage.googleapis.com"
    paths = ("/v1beta/", "/upload/v1beta/")
    credential_header = b"x-goog-api-key"
    statuses: ClassVar = {
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        429: "RESOURCE_EXHAUSTED",
        500: "INTERNAL",
        504: "DEADLINE_EXCEEDED",
    }

    def sends(self, header: bytes, value: bytes) -> bool:
        return header.startswith(b"x-goog-api-")

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        name = self.statuses.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return orjson.dumps({"error": {"code": status, "message": named(field, message), "status": name}})


OPENAI: Final[Family] = _OpenAI()
CHATGPT: Final[Family] = _ChatGpt()
ANTHROPIC: Final[Family] = _Anthropic()
GEMINI: Final[Family] = _Gemini()
