"""Reserving in memory while one process alone writes the tape, and what happens when it does not any more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.gateway.budgets.here import Here
from penstock.gateway.budgets.limits import Limit
from penstock.gateway.budgets.operations import BudgetOperations, Claim, Reservation, Short, Used
from penstock.gateway.budgets.reader import BudgetReader
from penstock.gateway.budgets.together import Calls, ForOthers
from penstock.gateway.budgets.windows import window_at
from penstock.gateway.model.budget import Budget
from penstock.gateway.store import Store, keys
from penstock.gateway.store.operation import Task

HOUR = 3600 * 10**9
NOW = 500_000 * HOUR
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 1), st.integers(0, 60)),
        st.tuples(st.just("end"), st.integers(0, 30), st.integers(0, 70)),
        st.tuples(st.just("lose"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 90)),
        st.tuples(st.just("forget"), st.just(0), st.just(0)),
        st.tuples(st.just("share"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("budgets")) as made:
        yield made


class _Noted(Reservation):
    """With the window in which it was made."""

    since_at: int = 0


@example([("call", 0, 1), ("share", 0, 0), ("wait", 0, 1), ("call", 0, 1)], 1)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 150))
def test_it_decides_as_one_would_who_knows_everything(
    store: Store, steps: list[tuple[str, int, int]], most: int
) -> None:
    """Two budgets of windows of an hour; in the middle another process may take over, from when on all is on the
    tape."""
    limit = Limit(Budget(name=f"b{os.urandom(4).hex()}", unit="tokens", per="agent", window="1h", limit=most))
    here, reader, shared, now = Here(store), BudgetReader(store, [limit]), False, NOW
    running: list[_Noted] = []
    used = dict[tuple[str, int], int]()
    newest = dict[str | None, int]()
    """The window of the sum on the tape."""

    def since() -> int:
        return window_at("1h", now).since_ns

    def reserved(whose: str) -> tuple[int, int]:
        found = [one.claims[0] for one in running if one.claims[0].of == whose and one.since_at == since()]
        return sum(claim.amount for claim in found), len(found)

    for number, (what, which, amount) in enumerate(steps):
        if what == "call":
            whose = "ab"[which]
            asked = _Noted([Claim(limit, whose, amount)], "r", now, bytes(8) + keys.number(number))
            asked.since_at = since()
            room = used.get((whose, since()), 0) + reserved(whose)[0] + amount <= most
            if shared:
                task = Task(lambda tape, a=asked, n=now: BudgetOperations(tape).reserve(a, n))  # type: ignore[misc]
                store.write([task])
                short = task.result
                newest[whose] = max(newest.get(whose, 0), 0 if short else since())
            else:
                short = here.reserve(asked, now)
            assert (not short) == room
            running += [asked] if room else []
        elif what in ("end", "lose") and running:
            over = running.pop(which % len(running))
            took = amount if what == "end" else 0
            store.write([Task(lambda tape, o=over, u=took: BudgetOperations(tape).settle(o, [Used(u)]))])  # type: ignore[misc]
            if what == "end":
                here.settled(over, [Used(took)])
            else:
                here.lost(over)
            whose, at = over.claims[0].of or "", over.since_at
            if at >= newest.get(whose, 0):
                used[whose, at] = used.get((whose, at), 0) + took
                newest[whose] = at if took or shared else newest.get(whose, 0)
        elif what == "wait":
            now += amount * 60 * 10**9
            # As the service does all the time.
            store.write([Task(lambda tape, n=now: BudgetOperations(tape).renew(bytes(8), n))])  # type: ignore[misc]
        elif what == "forget":
            here.forget_sums()
        elif what == "share" and not shared:
            shared, calls = True, here.leave()
            for one in running:
                whose = one.claims[0].of
                newest[whose] = max(newest.get(whose, 0), one.since_at)
            store.write([Task(lambda tape, c=calls, n=now: BudgetOperations(tape).keep(c, n))])  # type: ignore[misc]
        told = {use.of: use for use in reader.uses(now, reserved=here.reserved())}
        for whose in "ab":
            if whose in told and told[whose].since_ns == since():
                use = told[whose]
                assert (use.reserved, use.running) == reserved(whose)
                assert use.used == used.get((whose, since()), 0)


async def test_a_call_that_another_worker_ends_in_the_breath_in_which_it_asks_reserves_nothing(store: Store) -> None:
    """A first worker that was busy for a moment reads both at once, and hears the end before it has reserved."""
    limit = Limit(Budget(name="both", unit="calls", window="total", limit=1))
    here, asked = Here(store), Reservation([Claim(limit, "", 1)], "r", NOW, b"another process1")
    others, told = ForOthers([limit], here), Calls([limit]).told(asked)
    kept = others.asked(told)
    assert kept is not None

    async def reserve(asked: Reservation) -> list[Short]:
        return here.reserve(asked, NOW)

    reserving = others.reserve(kept, reserve)
    others.settled(told, [(0, False, False)])
    _ = await reserving
    assert here.reserved() == {}
    assert others._open == {}
