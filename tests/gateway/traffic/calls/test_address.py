"""The address grammar: every form, its inverse, and every refusal."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.base import ID_PATTERN, Mode
from penstock.gateway.traffic.calls.call_request import (
    SESSION_HEADERS,
    AddressError,
    CallAddress,
    check_id,
    from_headers,
    from_path,
    path_of,
)

ids = st.from_regex(ID_PATTERN, fullmatch=True).filter(lambda one: one not in (".", ".."))
modes = st.sampled_from(get_args(Mode))
addresses = st.builds(CallAddress, ids, ids, st.none() | ids, modes)
belows = st.sampled_from(["/", "/v1/chat/completions", "/v1/models/rollout/x", "/openai/v1/responses"])

BAD = ["", ".", "..", "%2e%2e", "a\0b", "a\n", "a b", "ä", "a%2Fb", "x" * 129, "a\\b", "a,b"]


@given(addresses, belows)
def test_a_path_comes_back(address: CallAddress, below: str) -> None:
    assert from_path(path_of(address) + below) == (address, below)
    assert from_path(path_of(address)) == (address, "/"), "a bare prefix addresses its root"


@pytest.mark.parametrize(
    ("path", "address", "below"),
    [
        ("/rollout/r/v1/x", CallAddress("r"), "/v1/x"),
        ("/rollout/r/agent/planner/v1/x", CallAddress("r", agent="planner"), "/v1/x"),
        ("/rollout/r/attempt/a/prompt/travel/v1/x", CallAddress("r", "a", prompt="travel"), "/v1/x"),
        ("/proxy/rollout/r/attempt/0/mode/val/openai/v1/x", CallAddress("r", "0", mode="val"), "/v1/x"),
        ("/proxy/rollout/r/attempt/0/mode/train/openai", CallAddress("r", "0", mode="train"), "/openai"),
        ("/agl1/proxy/rollout/r/attempt/0/mode/val/openai/v1/x", CallAddress("r", "0", mode="val"), "/v1/x"),
        ("/agl1/rollout/r/v1/x", None, "/agl1/rollout/r/v1/x"),
        ("/rollout/r/attempt/a/v1/rollout/z", CallAddress("r", "a"), "/v1/rollout/z"),
    ],
)
def test_forms(path: str, address: CallAddress, below: str) -> None:
    assert from_path(path) == (address, below)


def test_a_path_without_a_rollout_stays_as_it_is() -> None:
    for path in ("/v1/x", "/", "", "/rollouts/r/v1", "/proxy/v1", "/V1/rollout/r/v1"):
        assert from_path(path) == (None, path)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("part", ["rollout", "attempt", "agent"])
def test_bad_ids_are_refused_with_their_part(part: str, bad: str) -> None:
    name = f"x-{part}-id".encode()
    with pytest.raises(AddressError, match=name.decode()):
        from_headers({b"x-rollout-id": b"r", name: bad.encode("latin-1")})
    parts = {"rollout": "r", "attempt": "a", "agent": "g"} | {part: bad}
    path = "".join(f"/{name}/{value}" for name, value in parts.items()) + "/v1/x"
    with pytest.raises(AddressError, match=part) as caught:
        from_path(path)
    assert caught.value.part == part
    assert "A-Z a-z 0-9" in str(caught.value)


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AddressError, match="train, val, test or online"):
        from_path("/proxy/rollout/r/attempt/0/mode/eval/openai/v1/x")


def test_a_long_path_is_parsed_and_not_remembered() -> None:
    path = "/rollout/r/v1/" + "x" * 60_000
    assert from_path(path) == (CallAddress("r"), "/v1/" + "x" * 60_000)
    assert from_path(path)[0] is not from_path(path)[0]
    assert from_path("/rollout/r/v1/x")[0] is from_path("/rollout/r/v1/x")[0]


def test_headers() -> None:
    assert from_headers({b"x-rollout-id": b"r"}) == CallAddress("r")
    named = {b"x-rollout-id": b"r", b"x-attempt-id": b"a", b"x-agent-id": b"g"}
    assert from_headers(named) == CallAddress("r", "a", "g")
    assert from_headers({b"host": b"x"}) is None
    assert from_headers({b"x-attempt-id": b"a", b"baggage": b"other=1"}) is None
    with pytest.raises(AddressError, match="x-agent-id"):
        from_headers({b"session-id": b"s", b"x-agent-id": b"a b"})


def test_baggage() -> None:
    header = b"user=1, penstock.rollout_id=r%2D1;ttl=3 ,penstock.attempt_id = a2,penstock.agent_id=g,penstock.x=1"
    assert from_headers({b"baggage": header}) == CallAddress("r-1", "a2", "g")
    assert from_headers({b"baggage": header, b"x-attempt-id": b"mine"}) == CallAddress("r-1", "mine", "g")
    with pytest.raises(AddressError, match="x-rollout-id"):
        from_headers({b"baggage": b"penstock.rollout_id=..%2Fx"})


@pytest.mark.parametrize(("header", "kind"), SESSION_HEADERS.items())
def test_sessions(header: bytes, kind: str) -> None:
    found = from_headers({header: b"0198-\xe9/x"})
    assert found == CallAddress(f"{kind}-0198---x", origin="implicit", session=True)
    assert from_headers({header: b"s", b"x-rollout-id": b"r"}) == CallAddress("r")
    assert from_headers({header: b""}) is None


@given(st.binary(min_size=1, max_size=300))
def test_any_session_makes_a_valid_id(session: bytes) -> None:
    found = from_headers({b"session-id": session})
    assert found is not None
    assert check_id("rollout", found.rollout)


def test_a_session_that_is_a_key_does_not_name_its_rollout() -> None:
    """Rollouts are shown everywhere; the same session is still the same rollout."""
    keyed, again, other = (
        from_headers({b"x-session-id": b"sk-proj-0123456789abcde" + end}) for end in (b"f", b"f", b"g")
    )
    assert keyed is not None
    assert other is not None
    assert "0123456789" not in keyed.rollout
    assert keyed == again
    assert keyed.rollout != other.rollout
