"""What is masked, and what must not be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import redact
from gateway.redact import MASK, Redactor

# fmt: off
SECRET = [
    "Authorization", "PROXY-AUTHORIZATION", "x-api-key", "X-API-Key", "api-key", "x-goog-api-key",
    "Ocp-Apim-Subscription-Key", "cookie", "Set-Cookie", "x-amz-security-token", "X-Amz-Signature",
    "X-Amz-Credential", "x-auth-token", "X-AuthToken", "authtoken", "accessToken", "access_token", "refreshToken",
    "client_secret", "clientSecret", "password", "userPassword", "sig", "jwt", "key", "apikey", "apiKey",
    "x-session-key", "sessionKey", "x-private-key", "x-csrf-token", "private_key",
]
HARMLESS = [
    "content-type", "x-ratelimit-remaining-tokens", "x-ratelimit-limit-tokens", "max_tokens", "idempotency-key",
    "Idempotency-Key", "X-Request-Id", "openai-organization", "traceparent", "sec-websocket-key", "Sec-WebSocket-Key",
    "prompt-cache-key", "www-authenticate", "x-stainless-lang", "monkey", "keyboard", "authority", "tokenizer",
    "date", "signal", "x-session-id",
]
# fmt: on


@pytest.mark.parametrize("name", SECRET)
def test_secret_names(name: str) -> None:
    assert redact.is_secret(name.encode())
    assert Redactor().secret(name.encode())
    assert redact.url(f"/v1/x?a=1&{name}=hunter2&b=2") == f"/v1/x?a=1&{name}=***&b=2"


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_names(name: str) -> None:
    assert not redact.is_secret(name.encode())
    assert Redactor().block([(name.encode(), b"kept")]) == name.encode() + b": kept\r\n"


def test_a_block_keeps_order_case_and_repetition() -> None:
    headers = [(b"B", b"1"), (b"Set-Cookie", b"x=1"), (b"a", b""), (b"Set-Cookie", b"y=2"), (b"B", b"2")]
    wanted = b"B: 1\r\nSet-Cookie: ***\r\na: \r\nSet-Cookie: ***\r\nB: 2\r\n"
    redactor = Redactor()
    assert redactor.block(headers) == redactor.block(headers) == wanted


def test_agent_tokens_are_masked_in_any_header() -> None:
    assert Redactor().block([(b"x-note", b"use pst_r1.a-b_C~9, please")]) == b"x-note: use ***, please\r\n"


def test_headers_that_hold_urls_are_masked_as_urls() -> None:
    block = Redactor().block(
        [
            (b"Location", b"https://files.example/a?X-Amz-Signature=abc&part=2"),
            (b"Link", b'<https://a.example/?page=2&sig=abc>; rel="next", <https://b.example/?token=xyz>; rel="last"'),
            (b"Referer", b"https://user:secret@a.example/\xe9"),
        ]
    )
    assert b"abc" not in block
    assert b"xyz" not in block
    assert b"secret" not in block
    assert b"part=2" in block
    assert b"page=2" in block
    assert b"/\xe9" in block


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/v1/chat", "/v1/chat"),
        ("/v1?key=", "/v1?key=***"),
        ("https://me:pa@ss@host/v1?x=1", "https://***@host/v1?x=1"),
        ("HTTPS://me@host/", "HTTPS://***@host/"),
        ("/v1?mail=a@b.example", "/v1?mail=a@b.example"),
        ("/v1?to=https://h/?token=t&x=1", "/v1?to=https://h/?token=***&x=1"),
        ("/v1?key=ab?cd;ef=1&x=2", "/v1?key=***&x=2"),
        ("/v1?api%5Fkey=1&%6Bey=2&x", "/v1?api%5Fkey=***&%6Bey=***&x"),
        ("/v1?KEY=1;Key=2", "/v1?KEY=***"),
        ("/t/pst_abc.def/v1", "/t/***/v1"),
    ],
)
def test_urls(text: str, wanted: str) -> None:
    assert redact.url(text) == wanted


@given(st.text(alphabet=st.characters(codec="latin-1"), max_size=60))
def test_masking_twice_is_masking_once(text: str) -> None:
    once = redact.url("/v1?" + text)
    assert redact.url(once) == once


@given(st.text(alphabet="abc=&?#;%/@:", max_size=20), st.text(alphabet="abc=&;%/@:", max_size=20))
def test_a_key_never_shows(before: str, after: str) -> None:
    assert "S3CRET" not in redact.url(f"/v1?{before}&api_key=S3CRET&{after}")


def test_what_is_remembered_is_bounded() -> None:
    redactor = Redactor()
    for number in range(5000):
        assert not redactor.secret(b"x-%d" % number)
    assert redactor.secret(b"x-api-key")
    assert redactor.block([(b"x-api-key", b"1")]) == b"x-api-key: " + MASK + b"\r\n"
