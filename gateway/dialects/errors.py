"""The gateway's own errors, phrased as the API being spoken would, so that the official SDKs raise what they should."""

from __future__ import annotations

import orjson

OPENAI = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}

GEMINI = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}


def error_body(family: str, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
    """The body of an error. `kind` is its machine-readable name, `field` the part of the request that is at fault.

    Anthropic's and Google's shapes have no place for either: the field is put before the message, as Anthropic itself
    does.
    """
    said = f"{field}: {message}" if field else message
    if family == "gemini":
        name = GEMINI.get(status, "INVALID_ARGUMENT" if status < 500 else "UNAVAILABLE")
        return orjson.dumps({"error": {"code": status, "message": said, "status": name}})
    if family == "anthropic":
        kind = ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": said}})
    of = OPENAI.get(status, "invalid_request_error" if status < 500 else "server_error")
    return orjson.dumps({"error": {"message": message, "type": of, "param": field, "code": kind}})
