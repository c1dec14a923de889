"""The breaker's table, and that it holds whatever comes: one probe at a time, and only as many failures as may be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.gateway.tools.servers import MOVES, BreakerState, ServerBreaker

MOST, SECONDS = 3, 10.0


def test_every_position_is_in_the_table_and_can_be_left() -> None:
    assert set(MOVES) == set(BreakerState)
    assert all(moves and all(moves.values()) for moves in MOVES.values())
    assert BreakerState.CLOSED not in MOVES[BreakerState.OPEN], "nothing closes it but a probe"


def opened(breaker: ServerBreaker, now: float = 0.0) -> None:
    for _ in range(MOST):
        period = breaker.admit(now)
        assert period is not None
        breaker.failed(period, now, "connect")
    assert breaker.state is BreakerState.OPEN


def test_so_many_failures_in_a_row_open_it() -> None:
    breaker = ServerBreaker(MOST, SECONDS)
    for _ in range(5):
        for _ in range(MOST - 1):
            period = breaker.admit(0)
            assert period is not None
            breaker.failed(period, 0, "timeout")
        period = breaker.admit(0)
        assert period is not None
        breaker.succeeded(period)
    opened(breaker)
    assert (breaker.admit(SECONDS - 0.01), breaker.last_failure, breaker.probe_at) == (None, "connect", SECONDS)


def test_one_probe_decides() -> None:
    breaker = ServerBreaker(MOST, SECONDS)
    opened(breaker)
    probe = breaker.admit(SECONDS)
    assert probe is not None
    assert [breaker.admit(SECONDS + more) for more in (0, 1, 1000)] == [None] * 3
    breaker.failed(probe, 12, "http_503")
    assert (breaker.state, breaker.probe_at, breaker.last_failure) == (BreakerState.OPEN, 22.0, "http_503")
    probe = breaker.admit(22)
    assert probe is not None
    later = breaker.answered(probe)
    assert breaker.state is BreakerState.CLOSED
    # It has closed; if the rest of its answer does not come, that is the first failure of the new period.
    breaker.failed(later, 30, "upstream_closed")
    assert breaker.state is BreakerState.CLOSED
    for _ in range(MOST - 1):
        breaker.failed(later, 30, "timeout")
    assert breaker.state is BreakerState.OPEN


def test_a_probe_that_leaves_makes_room_for_the_next() -> None:
    breaker = ServerBreaker(MOST, SECONDS)
    opened(breaker)
    probe = breaker.admit(SECONDS)
    assert probe is not None
    breaker.abandoned(probe, 11)
    assert (breaker.state, breaker.admit(11)) == (BreakerState.OPEN, probe + 2)


@given(st.sampled_from(["succeeded", "failed", "left", "answered"]))
def test_what_began_before_it_opened_is_old_news(what: str) -> None:
    breaker = ServerBreaker(MOST, SECONDS)
    old = breaker.admit(0)
    assert old is not None
    opened(breaker)
    probe = breaker.admit(SECONDS)
    assert probe is not None
    match what:
        case "failed":
            breaker.failed(old, 11, "timeout")
        case "left":
            breaker.abandoned(old, 11)
        case "succeeded":
            breaker.succeeded(old)
        case _:
            assert breaker.answered(old) == old
    assert breaker.state is BreakerState.PROBING


def test_an_old_success_is_no_news_for_a_new_period() -> None:
    breaker = ServerBreaker(2, SECONDS)
    old, first, second = (breaker.admit(0) for _ in range(3))
    assert old is not None
    for period in (first, second):
        assert period is not None
        breaker.failed(period, 0, "timeout")
    probe = breaker.admit(SECONDS)
    assert probe is not None
    now = breaker.answered(probe)
    breaker.failed(now, 11, "timeout")
    breaker.succeeded(old)
    breaker.failed(now, 12, "timeout")
    assert breaker.state is BreakerState.OPEN


class Life(RuleBasedStateMachine):
    """Calls that come, are answered, fail and leave in any order, beside a model that counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = ServerBreaker(MOST, SECONDS)
        self.now = 0.0
        self.calls: list[tuple[int, bool]] = []
        """Calls under way: their periods, and whether they are probes."""
        self.row = 0
        """Failures in a row of calls that began since it has closed."""
        self.closed_since = 0
        """The first period since it has closed."""

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.9, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def come(self) -> None:
        position, due = self.breaker.state, self.now >= self.breaker.probe_at
        period = self.breaker.admit(self.now)
        assert (period is not None) == (position is BreakerState.CLOSED or (position is BreakerState.OPEN and due))
        if period is not None:
            self.calls.append((period, position is BreakerState.OPEN))

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), how=st.sampled_from(["answered", "succeeded", "failed", "left"]))
    def end(self, data: st.DataObject, how: str) -> None:
        at = data.draw(st.integers(0, len(self.calls) - 1))
        period, probe = self.calls[at]
        before = self.breaker.state
        current = before is BreakerState.CLOSED and period >= self.closed_since
        if how == "answered":
            again = self.breaker.answered(period)
            self.calls[at] = again, False
            if probe:
                assert self.breaker.state is BreakerState.CLOSED
                self.closed_since, self.row = again, 0
            else:
                assert (again, self.breaker.state) == (period, before)
            return
        del self.calls[at]
        if how == "failed":
            self.breaker.failed(period, self.now, "timeout")
            self.row += current
            opens = probe or (current and self.row == MOST)
            assert self.breaker.state is (BreakerState.OPEN if opens else before)
            assert not opens or self.breaker.probe_at == self.now + SECONDS
        elif how == "left":
            self.breaker.abandoned(period, self.now)
            assert self.breaker.state is (BreakerState.OPEN if probe else before)
        elif not probe:
            self.breaker.succeeded(period)
            self.row = 0 if current else self.row
            assert self.breaker.state is before
        else:
            self.calls.append((period, probe))  # A call that ends well has begun to be answered before.

    @invariant()
    def one_probe_at_most(self) -> None:
        assert sum(probe for _, probe in self.calls) == (self.breaker.state is BreakerState.PROBING)


TestLife = Life.TestCase
