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


OPENAI_ERRORS: dict[int, tuple[str, type[openai.APIStatusError]]] = {
    400: ("invalid_request_error", openai.BadRequestError),
    401: ("authentication_error", openai.AuthenticationError),
    403: ("permission_error", openai.PermissionDeniedError),
    404: ("not_found_error", openai.NotFoundError),
    413: ("invalid_request_error", openai.APIStatusError),
    429: ("rate_limit_error", openai.RateLimitError),
    503: ("server_error", openai.InternalServerError),
}


@pytest.mark.parametrize("status", OPENAI_ERRORS)
def test_openai(status: int) -> None:
    kind, raised = OPENAI_ERRORS[status]
    with transport(OPENAI, status) as http:
        client = openai.OpenAI(api_key="k", base_url="http://gateway/v1", max_retries=0, http_client=http)
        with pytest.raises(raised) as caught:
            client.chat.completions.create(model="m", messages=[])
    assert (caught.value.type, caught.value.code, caught.value.param) == (kind, "odd_model", "model")
    assert "Not so." in caught.value.message


ANTHROPIC_ERRORS: dict[int, tuple[str, type[anthropic.APIStatusError]]] = {
    400: ("invalid_request_error", anthropic.BadRequestError),
    401: ("authentication_error", anthropic.AuthenticationError),
    403: ("permission_error", anthropic.PermissionDeniedError),
    404: ("not_found_error", anthropic.NotFoundError),
    409: ("invalid_request_error", anthropic.ConflictError),
    413: ("request_too_large", anthropic.APIStatusError),
    429: ("rate_limit_error", anthropic.RateLimitError),
    **dict.fromkeys((500, 502), ("api_error", anthropic.InternalServerError)),
    503: ("api_error", anthropic.APIStatusError),
    504: ("timeout_error", anthropic.APIStatusError),
    529: ("overloaded_error", anthropic.APIStatusError),
}


@pytest.mark.parametrize("status", ANTHROPIC_ERRORS)
def test_anthropic(status: int) -> None:
    kind, raised = ANTHROPIC_ERRORS[status]
    with transport(ANTHROPIC, status) as http:
        client = anthropic.Anthropic(api_key="k", base_url="http://gateway", max_retries=0, http_client=http)
        with pytest.raises(raised) as caught:
            client.messages.create(model="m", messages=[], max_tokens=1)
    assert caught.value.status_code == status
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "model: Not so."}}


def test_neither_kind_nor_field() -> None:
    said = {"message": "Oh.", "type": "server_error", "param": None, "code": None}
    assert json.loads(OPENAI.error_body(500, "Oh.")) == {"error": said}
    assert json.loads(ANTHROPIC.error_body(500, "Oh."))["error"]["message"] == "Oh."
