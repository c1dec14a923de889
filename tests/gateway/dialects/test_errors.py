"""The gateway's errors, as the unmodified official SDKs understand them."""

from __future__ import annotations

import json

import anthropic
import httpx2
import openai
import pytest

from penstock.gateway.dialects.family import ANTHROPIC, OPENAI, Family


def transport(family: Family, status: int) -> httpx2.Client:
    def handle(request: httpx2.Request) -> httpx2.Response:
        body = family.error_body(status, "Not so.", "odd_model", "model")
        return httpx2.Response(status, content=body, headers={"content-type": "application/json"})

    return httpx2.Client(transport=httpx2.MockTransport(handle))


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", openai.BadRequestError),
        (401, "authentication_error", openai.AuthenticationError),
        (403, "permission_error", openai.PermissionDeniedError),
        (404, "not_found_error", openai.NotFoundError),
        (413, "invalid_request_error", openai.APIStatusError),
        (429, "rate_limit_error", openai.RateLimitError),
        (503, "server_error", openai.InternalServerError),
    ],
)
def test_openai(status: int, kind: str, raised: type[openai.APIStatusError]) -> None:
    with transport(OPENAI, status) as http:
        client = openai.OpenAI(api_key="k", base_url="http://gateway/v1", max_retries=0, http_client=http)
        with pytest.raises(raised) as caught:
            client.chat.completions.create(model="m", messages=[])
    assert (caught.value.type, caught.value.code, caught.value.param) == (kind, "odd_model", "model")
    assert "Not so." in caught.value.message


@pytest.mark.parametrize(
    ("status", "kind", "raised"),
    [
        (400, "invalid_request_error", anthropic.BadRequestError),
        (401, "authentication_error", anthropic.AuthenticationError),
        (403, "permission_error", anthropic.PermissionDeniedError),
        (404, "not_found_error", anthropic.NotFoundError),
        (409, "invalid_request_error", anthropic.ConflictError),
        (413, "request_too_large", anthropic.APIStatusError),
        (429, "rate_limit_error", anthropic.RateLimitError),
        (500, "api_error", anthropic.InternalServerError),
        (502, "api_error", anthropic.InternalServerError),
        (503, "api_error", anthropic.InternalServerError),
        (504, "timeout_error", anthropic.InternalServerError),
        (529, "overloaded_error", anthropic.InternalServerError),
    ],
)
def test_anthropic(status: int, kind: str, raised: type[anthropic.APIStatusError]) -> None:
    with transport(ANTHROPIC, status) as http:
        client = anthropic.Anthropic(api_key="k", base_url="http://gateway", max_retries=0, http_client=http)
        with pytest.raises(anthropic.APIStatusError) as caught:
            client.messages.create(model="m", messages=[], max_tokens=1)
    assert isinstance(caught.value, raised) or status in (503, 504, 529)
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "model: Not so."}}


def test_neither_kind_nor_field() -> None:
    assert json.loads(OPENAI.error_body(500, "Oh.")) == {
        "error": {"message": "Oh.", "type": "server_error", "param": None, "code": None}
    }
    assert json.loads(ANTHROPIC.error_body(500, "Oh."))["error"]["message"] == "Oh."
