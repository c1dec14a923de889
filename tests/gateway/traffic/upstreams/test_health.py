"""When an upstream is passed over: the table of states, and a model that calls are given to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.traffic.upstreams.health import (
    CHECKED_S,
    COSTLY,
    FAILED_CHECKS,
    IN_A_ROW,
    LONGEST_ASKED_S,
    PROBE_S,
    RESTS,
    UpstreamHealth,
    retry_after_s,
    take_next,
)
from penstock.gateway.traffic.upstreams.pool import ConcurrencyLimit


@dataclass
class Upstream:
    name: str
    health: UpstreamHealth = field(default_factory=UpstreamHealth)
    concurrency_limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit("it", 1))
    slow: bool = False

    def keeps_waiting(self, now: float) -> bool:
        return self.slow


@pytest.mark.parametrize("why", sorted(COSTLY))
def test_what_costs_every_call_time_makes_it_rest_at_once(why: str) -> None:
    health = UpstreamHealth()
    health.failed(why, 100.0)
    assert (health.state(100.0), health.why, health.rests_s(100.0)) == ("resting", why, RESTS.first_s)
    assert (health.state(100.0 + RESTS.first_s), health.rests_s(100.0 + RESTS.first_s)) == ("probing", None)


def test_other_faults_make_it_rest_when_they_come_in_a_row() -> None:
    health = UpstreamHealth()
    for _ in range(IN_A_ROW - 1):
        health.failed("http_500", 0.0)
    assert health.state(0.0) == "good"
    health.answered(0.0)
    for _ in range(IN_A_ROW):
        assert health.state(0.0) == "good"
        health.failed("http_500", 0.0)
    assert health.state(0.0) == "resting"


def test_a_rest_grows_and_is_as_long_as_it_asks() -> None:
    health, now, rests = UpstreamHealth(), 0.0, list[float]()
    for _ in range(9):
        health.failed("connect", now)
        rests.append(health.rests_s(now) or 0.0)
        now += rests[-1]
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    health.answered(now)
    assert (health.state(now), health.why) == ("good", "")
    for asked, given_s in ((7.0, 7.0), (0.0, 0.0), (9e9, LONGEST_ASKED_S)):
        health.failed("http_429", now, asked)
        assert (health.rests_s(now) or 0.0) == given_s
        now += given_s


def test_one_call_probes_and_others_go_elsewhere_meanwhile() -> None:
    one, other = Upstream("one"), Upstream("other")

    def taken(now: float) -> str:
        return take_next([one, other], now).name

    assert taken(0.0) == "one"
    one.health.failed("timeout", 0.0)
    assert [taken(0.5), taken(1.0), taken(1.0), taken(1.0 + PROBE_S)] == ["other", "one", "other", "one"]
    # A probe that failed is over: when the next rest is, another one is sent.
    one.health.failed("http_503", 32.0)
    assert [taken(33.0), taken(34.0), taken(34.0)] == ["other", "one", "other"]
    one.health.answered(40.0)
    assert [taken(40.0), taken(40.0)] == ["one", "one"]


def test_a_call_that_ends_without_showing_how_it_is_lets_another_one_probe() -> None:
    health = UpstreamHealth()
    health.failed("timeout", 0.0)
    health.call_assigned(2.0)
    health.call_left(1.9)
    assert health.passed_over(2.1), "another call's end says nothing of the probe"
    health.call_left(2.0)
    assert not health.passed_over(2.1)
    health.call_assigned(2.2)
    health.failed("timeout", 2.3)
    health.call_left(2.2)
    assert health.state(2.4) == "resting"


def test_one_that_has_a_place_comes_before_one_that_is_full_and_before_one_that_rests() -> None:
    rests, slow, full, free = map(Upstream, ("rests", "slow", "full", "free"))
    rests.health.failed("timeout", 0.0)
    slow.slow = True
    full.concurrency_limit.running = 1
    left, taken = [rests, slow, full, free], list[str]()
    while left:
        taken.append(take_next(left, 0.5).name)
    assert taken == ["free", "full", "rests", "slow"]


def test_checks_that_fail_make_it_rest_until_one_passes() -> None:
    health = UpstreamHealth()
    for at in range(FAILED_CHECKS):
        assert health.state(at) == "good", "one check that fails says little"
        health.checked("http_503", at)
    now = FAILED_CHECKS - 1.0
    assert (health.state(now), health.why, health.rests_s(now)) == ("resting", "check_http_503", CHECKED_S)
    health.answered(now)
    assert health.state(now) == "resting", "a call from before"
    health.checked(None, now + 1)
    assert health.state(now + 1) == "probing"
    health.answered(now + 2)
    assert (health.state(now + 2), health.why) == ("good", "")


@pytest.mark.parametrize(
    ("why", "then"),
    [("connect", "probing"), ("connect_timeout", "probing"), ("timeout", "resting"), ("http_429", "resting")],
)
def test_a_check_that_passes_ends_the_rest_of_what_could_not_be_reached(why: str, then: str) -> None:
    """One that is there may still serve nobody."""
    health = UpstreamHealth()
    health.failed(why, 0.0)
    health.checked(None, 0.5)
    assert health.state(0.5) == then


events = st.one_of(
    st.tuples(st.just("check"), st.sampled_from([None, "connect", "http_503"])),
    st.tuples(st.just("fail"), st.sampled_from([*sorted(COSTLY), "http_500", "upstream_closed"])),
    st.tuples(st.just("ask"), st.floats(0, 1e6)),
    st.tuples(st.just("answer")),
    st.tuples(st.just("take")),
    st.tuples(st.just("wait"), st.floats(0, 120)),
)


@given(st.lists(st.tuples(st.integers(0, 2), events), max_size=60))
def test_a_call_always_goes_somewhere_and_no_rest_is_for_ever(happens: list[tuple[int, tuple[Any, ...]]]) -> None:
    upstreams, now = [Upstream(str(at)) for at in range(3)], 0.0
    for at, (kind, *values) in happens:
        one = upstreams[at]
        if kind == "fail":
            one.health.failed(values[0], now)
        elif kind == "ask":
            one.health.failed("http_429", now, float(values[0]))
        elif kind == "check":
            one.health.checked(values[0], now)
        elif kind == "answer":
            one.health.answered(now)
        elif kind == "wait":
            now += float(values[0])
        else:
            left = list(upstreams)
            over = [it.health.passed_over(now) for it in left]
            found = take_next(left, now)
            assert len(left) == 2
            # Passed over is only who may be, and nobody is where all would be.
            assert found is (upstreams[0] if all(over) else upstreams[over.index(False)])
        for it in upstreams:
            assert (it.health.state(now) == "good") <= (not it.health.passed_over(now))
            assert (it.health.rests_s(now) or 0.0) <= max(RESTS.longest_s, LONGEST_ASKED_S) + 1e-6
            later = now + LONGEST_ASKED_S + PROBE_S
            assert not it.health.passed_over(later)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        (b"7", 7.0),
        (b"0", 0.0),
        (b"-1", None),
        (b"1.5", 1.5),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        (b"9" * 40, 1e40),
        (b"soon", None),
    ],
)
def test_when_to_ask_again(said: bytes, seconds: float | None) -> None:
    assert retry_after_s([(b"Content-Type", b"x"), (b"Retry-After", said)]) == seconds
    assert retry_after_s([(b"Content-Type", b"7")]) is None
