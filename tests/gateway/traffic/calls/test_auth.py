"""Tokens open one rollout until they expire; the admin key opens the control API; tokens never do."""

from __future__ import annotations

import pytest
from aiohttp import hdrs
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.traffic.calls.admission import Auth, AuthError, credentials

SECRET = b"0123456789abcdef"
AUTH = Auth(None, SECRET)
KEYED = Auth("the admin key", SECRET)


@given(st.from_regex(ID_PATTERN, fullmatch=True).filter(lambda s: not s.endswith("\n")), st.integers(1, 10**6))
def test_a_token_opens_its_rollout_until_it_expires(rollout: str, expires_s: int) -> None:
    token = AUTH.mint(rollout, expires_s, now=1000.5)
    assert token.startswith("pst_")
    assert AUTH.rollout_of(token, now=1000 + expires_s - 0.001) == rollout
    with pytest.raises(AuthError, match="expired 0 s ago"):
        AUTH.rollout_of(token, now=1000 + expires_s)
    assert AUTH.rollout_of(AUTH.mint(rollout), now=1e12) == rollout


@given(st.data())
def test_a_changed_token_opens_nothing(data: st.DataObject) -> None:
    token = AUTH.mint("r1", 60, now=0)
    # The last character holds bits that base64 ignores.
    at = data.draw(st.integers(4, len(token) - 2))
    letter = data.draw(st.sampled_from("ABCxyz019-_").filter(lambda c: c != token[at]))
    with pytest.raises(AuthError):
        AUTH.rollout_of(token[:at] + letter + token[at + 1 :], now=0)


@given(st.text() | st.text().map("pst_".__add__))
def test_what_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(AuthError):
        AUTH.rollout_of(text, now=0)


def test_a_token_of_another_gateway_or_one_that_was_cut_off_opens_nothing() -> None:
    with pytest.raises(AuthError, match="not one of this gateway's"):
        Auth(None, b"another secret!!").rollout_of(AUTH.mint("r1"), now=0)
    for end in (1, 8, 40):
        with pytest.raises(AuthError):
            AUTH.rollout_of(AUTH.mint("r1")[:-end], now=0)


def test_mint_refuses_what_is_no_rollout_and_no_time() -> None:
    with pytest.raises(ValueError, match="not a rollout id: 'a/b'"):
        AUTH.mint("a/b")
    with pytest.raises(ValueError, match="expires_s must be positive"):
        AUTH.mint("r1", 0)


def test_the_admin_key_opens_and_nothing_else_does() -> None:
    for headers in ({"authorization": "Bearer the admin key"}, {"X-Api-Key": "the admin key"}):
        assert KEYED.is_admin(headers)
    others = [{"Authorization": "Bearer other"}, {"Authorization": "Basic the admin key"}, {"x-api-key": "thé"}]
    # An agent token beside the admin key is still refused.
    others += [{}, {"key": "x"}, {"Authorization": "Bearer the admin key", "x-api-key": "pst_x"}]
    assert [headers for headers in others if KEYED.is_admin(headers)] == []


def test_without_a_key_everybody_is_admin_but_an_agent() -> None:
    assert AUTH.is_admin({})
    assert AUTH.is_admin({"Authorization": "Bearer sk-anything"})
    assert not AUTH.is_admin({"Authorization": f"Bearer {AUTH.mint('r1')}"})
    assert not AUTH.is_admin({"x-api-key": "pst_garbage"})


def test_every_credential_is_seen() -> None:
    headers = CIMultiDict([(hdrs.AUTHORIZATION, "bearer  a "), ("AUTHORIZATION", "Bearer b"), ("x-api-key", " c ")])
    assert list(credentials(headers)) == ["a", "b", "c"]


def test_a_useless_admin_key_or_secret_is_refused() -> None:
    for key in ("", "pst_mine"):
        with pytest.raises(ValueError, match="admin key"):
            Auth(key, SECRET)
    with pytest.raises(ValueError, match="16 bytes"):
        Auth(None, b"short")
