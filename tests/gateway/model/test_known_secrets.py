"""Known values are hidden wherever they stand and however they are written; nothing else changes."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.known_secrets import (
    NO_SECRETS,
    SLICE,
    Secrets,
    may_be_secret,
    own_secrets,
    presented_secrets,
)

KEY = "sk-proj/9f+Ab3=xYz_0123456789&qq"
WRITTEN = {
    "as it is": KEY,
    "JSON": json.dumps(KEY)[1:-1],
    "JSON with escaped slashes": KEY.replace("/", "\\/"),
    "JSON for HTML": re.sub("[&/+=]", lambda it: f"\\u{ord(it[0]):04x}", KEY),
    "JSON of .NET": re.sub("[&/+=]", lambda it: f"\\u{ord(it[0]):04X}", KEY),
    "URL": quote(KEY, safe=""),
    "URL in lower case": re.sub("%..", lambda it: it[0].lower(), quote(KEY, safe="")),
    "URL in a URL": quote(quote(KEY, safe=""), safe=""),
}


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_every_way_to_write_it(written: str) -> None:
    body = f'{{"error":"Incorrect API key provided: {written}. Find it"}}'
    hidden = Secrets([KEY.encode()]).hide(body.encode()).decode()
    assert hidden == body.replace(written, "*" * len(written))


@pytest.mark.parametrize("write", [json.dumps, quote, str])
def test_letters_of_other_alphabets_are_written_in_many_ways_too(write: Callable[[str], str]) -> None:
    key = "Schlüssel0123456789"
    body = "the key " + write(key).strip('"') + " is wrong"
    hidden = Secrets([key.encode()]).hide(body.encode()).decode()
    assert hidden.count("*") == len(body.encode()) - len("the key  is wrong")


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from(sorted(WRITTEN.values())))
def test_what_stands_around_it_stays(before: bytes, after: bytes, written: str) -> None:
    body = before + written.encode() + after
    hidden = Secrets([KEY.encode(), b"another-of-0123456789"]).hide(body)
    assert written.encode() not in hidden
    assert len(hidden) == len(body)
    changed = [at for at, (old, new) in enumerate(zip(body, hidden, strict=True)) if old != new]
    assert all(hidden[at] == ord("*") for at in changed)
    if not (before.endswith(b"\\") or KEY.encode()[:1] in after):
        assert (hidden.startswith(before), hidden.endswith(after)) == (True, True)


@given(st.binary(max_size=300))
def test_a_body_without_it_is_the_same_object(body: bytes) -> None:
    secrets = Secrets([KEY.encode()])
    assert secrets.hide(body) is body
    assert NO_SECRETS.hide(body) is body


@pytest.mark.parametrize("at", [0, SLICE - 40, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE - 5])
def test_large_bodies_are_searched_to_their_end(at: int) -> None:
    body = b"a" * at + KEY.encode() + b"b" * SLICE
    assert Secrets([KEY.encode()]).hide(body) == b"a" * at + b"*" * len(KEY) + b"b" * SLICE


@pytest.mark.parametrize("size", range(len(KEY)))
def test_one_that_is_cut_off(size: int) -> None:
    body, secrets = b"the key: " + KEY.encode()[:size], Secrets([KEY.encode()])
    assert secrets.partial_match_length(body) == size
    assert secrets.hide(body, ended=False) is body
    shown = size if size < 8 else 0
    assert secrets.hide(body) == b"the key: " + KEY.encode()[:shown] + b"*" * (size - shown)


# fmt: off
PLACEHOLDERS = [
    "", "x", "test", "EMPTY", "dummy", "none", "sk-test", "sk-1234", "sk-dummy", "not-needed", "no-key", "lm-studio",
    "ollama", "token-abc123", "sk-no-key-required", "your-api-key-here",
    "sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "0000000000000000000000000000000000000000", "placeholder-api-key", "anything",
]
KEYS = [
    "sk-proj-4fKq0ZsW1b", "sk-ant-api03-2a9Xw_0-qqRTs81", "AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "8f14e45fceea167a5a36dedd4bea2543", "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "correct horse battery staple, twice",
]
# fmt: on


@pytest.mark.parametrize("value", PLACEHOLDERS)
def test_what_is_sent_where_no_key_is_needed_is_no_secret(value: str) -> None:
    assert not may_be_secret(value.encode())
    assert list(presented_secrets(b"authorization", f"Bearer {value}".encode())) == []
    assert list(presented_secrets(b"x-api-key", value.encode())) == []


@pytest.mark.parametrize("value", KEYS)
def test_keys_are_secrets(value: str) -> None:
    assert may_be_secret(value.encode())
    assert list(presented_secrets(b"authorization", f"Bearer {value}".encode())) == [value.encode()]


def test_basic_credentials_cookies_and_own_keys() -> None:
    said = b"user:sk-0123456789abcdef"
    blob = base64.b64encode(said)
    assert set(presented_secrets(b"authorization", b"Basic " + blob)) == {blob, said, said.removeprefix(b"user:")}
    assert list(presented_secrets(b"cookie", b"lang=en; sid=s%3Aabcdef0123456789; theme=dark")) == [
        b"s%3Aabcdef0123456789"
    ]
    assert own_secrets([None, "dummy", "EMPTY", "sk-1234"]).values == frozenset()
    assert own_secrets(["sk-of-the-gateway", "hunter22"]).values == {b"sk-of-the-gateway", b"hunter22"}


def test_texts_and_json() -> None:
    secrets = Secrets([KEY.encode()])
    said = {"a": [f"x {KEY} y", 1, None], KEY: True, "t": "pst_" + "A" * 50}
    gone = "*" * len(KEY)
    assert secrets.json(said) == {"a": [f"x {gone} y", 1, None], gone: True, "t": "*" * 54}
    assert secrets.texts(["ü", None, f"ü{KEY}"]) == ["ü", None, f"ü{gone}"]
    kept = ["a", None, "\ud800"]
    assert secrets.texts(kept) is kept
