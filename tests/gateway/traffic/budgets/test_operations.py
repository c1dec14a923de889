"""Reserving and settling on a tape, and in memory while one process alone writes it, against a model that knows
everything: no call passes for which there is no room, none is refused for which there is, whoever dies meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from fakes.some import some
from fakes.transactions import done
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.gateway.model.state import Budget
from penstock.gateway.tape.store import Store, keys
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.traffic.budgets.ledgers import LedgerServer, LocalLedger, RemoteLedger
from penstock.gateway.traffic.budgets.operations import (
    LEASE_NS,
    RESERVATIONS,
    RESERVERS,
    SUMS,
    BudgetCharge,
    BudgetClaim,
    BudgetOperations,
    BudgetReader,
    BudgetReservation,
    BudgetShortfall,
    Limit,
    nanodollars,
    window_at,
)
from penstock.gateway.wire.dialects.loose_json import MOST_TOKENS

T = TypeVar("T")
HOUR = 3600 * 10**9
NOW = 500_000 * HOUR
NAMES = count()
WHO = b"process "


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store(tmp_path_factory.mktemp("budgets")) as made:
        yield made


def limit(most: float, **said: Any) -> Limit:
    """A budget that no other test has."""
    told: dict[str, Any] = {"name": f"b{next(NAMES)}", "unit": "tokens", "per": "agent", "window": "1h"} | said
    return Limit(Budget(limit=most, **told))


def process(number: int) -> bytes:
    return keys.number(number + 1)


def asked(
    of: Limit, amount: int, who: int = 0, call: int | None = None, whose: str = "a", now: int = NOW
) -> BudgetReservation:
    """What a call of a process reserves."""
    return BudgetReservation(
        [BudgetClaim(of, whose, amount)], "r1", now, process(who) + keys.number(next(NAMES) if call is None else call)
    )


def reserve(store: Store, wanted: BudgetReservation, now: int = NOW) -> list[BudgetShortfall]:
    return done(store, lambda tape: BudgetOperations(tape).reserve(wanted, now))


def settle(store: Store, wanted: BudgetReservation, used: int, guessed: bool = False) -> None:
    done(store, lambda tape: BudgetOperations(tape).settle(wanted, [BudgetCharge(used, guessed)] * len(wanted.claims)))


def seen(store: Store, of: Limit, now: int = NOW) -> list[tuple[str, float, float, int]]:
    """(whose, used, reserved, running) of each."""
    return sorted((use.of, use.used, use.reserved, use.running) for use in BudgetReader(store, [of]).uses(now))


def test_what_is_reserved_is_not_there_for_others_until_it_is_settled(store: Store) -> None:
    b = limit(100)
    first, second = asked(b, 60), asked(b, 60)
    assert reserve(store, first) == []
    (short,) = reserve(store, second)
    assert (short.sum.used, short.sum.reserved, short.sum.running) == (0, 60, 1)
    assert short.window == window_at("1h", NOW)
    assert seen(store, b) == [("a", 0, 60, 1)]
    settle(store, first, 25)
    assert reserve(store, second) == []
    settle(store, second, 75)
    assert seen(store, b) == [("a", 100, 0, 0)]
    assert reserve(store, asked(b, 1)) != []
    assert reserve(store, asked(b, 1, whose="b")) == [], "another agent has a budget of its own"


def test_a_call_reserves_of_all_its_budgets_or_of_none(store: Store) -> None:
    wide, narrow = limit(100), limit(10)
    wanted = BudgetReservation(
        [BudgetClaim(wide, "a", 50), BudgetClaim(narrow, "a", 50)], "r1", NOW, process(0) + keys.number(7)
    )
    assert [short.claim.limit for short in reserve(store, wanted)] == [narrow]
    assert seen(store, wide) == seen(store, narrow) == []
    settle(store, wanted, 0)
    assert seen(store, wide) == seen(store, narrow) == []


def test_a_call_counts_in_the_window_in_which_it_began(store: Store) -> None:
    b = limit(100)
    long, later = asked(b, 80), asked(b, 90, now=NOW + HOUR)
    assert reserve(store, long) == []
    assert reserve(store, later, NOW + HOUR) == []
    settle(store, long, 80)
    settle(store, later, 30)
    assert seen(store, b, NOW + HOUR) == [("a", 30, 0, 0)]


def test_a_clock_that_goes_back_frees_nothing(store: Store) -> None:
    b = limit(10)
    assert reserve(store, asked(b, 10, now=NOW), NOW) == []
    (short,) = reserve(store, asked(b, 1, now=NOW - HOUR), NOW - HOUR)
    assert short.window == window_at("1h", NOW)


def test_in_memory_a_window_ends_when_it_ends_on_the_tape(store: Store) -> None:
    b, here = limit(10), LocalLedger(store)
    whole = asked(b, 10)
    assert here.reserve(whole, NOW) == []
    assert here.reserve(asked(b, 1), NOW) != []
    here.settle(whole, [BudgetCharge(10)])
    before, last, next_ = (here.reserve(asked(b, 1), at) for at in (NOW - HOUR, NOW + HOUR - 1, NOW + HOUR))
    assert [short.window for short in before + last] == [window_at("1h", NOW)] * 2
    assert next_ == []


def test_what_the_dead_have_reserved_is_free_when_their_lease_is_over(store: Store) -> None:
    b = limit(10)
    dead = asked(b, 10, who=1)
    assert reserve(store, dead) == []
    assert reserve(store, asked(b, 10, who=2), NOW + LEASE_NS - 1) != []
    assert reserve(store, asked(b, 10, who=2), NOW + LEASE_NS) == []
    assert seen(store, b) == [("a", 0, 10, 1)]
    settle(store, dead, 4)
    assert seen(store, b) == [("a", 4, 10, 1)], "it was not dead after all: what it has used counts"


def test_what_the_dead_have_reserved_is_free_in_all_budgets_of_a_call(store: Store) -> None:
    """Also in one that it has looked at before it found another one full."""
    wide, narrow = limit(100), limit(10)
    dead, wanted = (
        BudgetReservation(
            [BudgetClaim(wide, "a", 10), BudgetClaim(narrow, "a", 10)], "r1", NOW, process(who) + keys.number(1)
        )
        for who in (7, 8)
    )
    assert reserve(store, dead) == []
    assert reserve(store, wanted, NOW + LEASE_NS) == []
    assert seen(store, wide) == seen(store, narrow) == [("a", 0, 10, 1)]


def test_sums_are_written_once_in_a_transaction_with_all_that_changes_them(store: Store) -> None:
    b = limit(1000)
    calls = [asked(b, 10) for _ in range(20)]

    def all_of_them(tape: Transaction) -> None:
        for wanted in calls[:10]:
            assert BudgetOperations(tape).reserve(wanted, NOW) == []
        BudgetOperations(tape).settle(calls[0], [BudgetCharge(7)])

    done(store, all_of_them)
    assert seen(store, b) == [("a", 7, 90, 9)]
    store.write(
        [
            QueuedOperation(lambda tape, w=wanted: BudgetOperations(tape).settle(w, [BudgetCharge(1)]))
            for wanted in calls[1:]
        ]
    )  # type: ignore[misc]
    assert seen(store, b) == [("a", 26, 0, 0)]


def test_a_process_that_is_heard_of_keeps_what_it_has_reserved(store: Store) -> None:
    b = limit(10)
    assert reserve(store, asked(b, 10, who=3)) == []
    for _ in range(3):
        done(store, lambda tape: BudgetOperations(tape).renew(process(3), NOW + LEASE_NS // 2))
    assert reserve(store, asked(b, 10, who=4), NOW + LEASE_NS) != []


def test_what_counts_for_nothing_any_more_is_taken_away(store: Store) -> None:
    hour, rollouts = limit(10), limit(10, per="rollout", window="total")
    limits, later = [hour, rollouts], NOW + HOUR
    for one, whose in ((hour, "a"), (rollouts, "forgotten")):
        over = asked(one, 5, who=5, whose=whose)
        assert reserve(store, over) == []
        settle(store, over, 5)
    assert reserve(store, asked(hour, 5, who=6, whose="crashed")) == []
    reader = BudgetReader(store, limits)
    assert reader.has_expired_lease(later)
    for _ in range(2):
        found = reader.stale_keys(later, 1000)
        done(store, lambda tape, f=found: BudgetOperations(tape).clear(f, limits, later))  # type: ignore[misc]
    assert (reader.stale_keys(later, 1000), reader.has_expired_lease(later)) == ([], False)
    with store.view() as view:
        assert not [key for one in limits for key, _ in view.scan(SUMS, one.prefix)]
        assert [key for key, _ in view.scan(RESERVATIONS) if key.startswith(hour.prefix)] == []
        assert view.get(RESERVERS, process(6)) is None


def test_a_budget_that_is_counted_otherwise_begins_anew(store: Store) -> None:
    tokens = limit(10)
    first = asked(tokens, 10)
    assert reserve(store, first) == []
    settle(store, first, 10)
    money = Limit(Budget(name=tokens.budget.name, unit="usd", per="agent", window="1h", limit=1.0))
    assert reserve(store, asked(money, 10)) == []


def test_the_run_of_a_rollout_is_known_to_the_tape(store: Store) -> None:
    b = limit(10, per="run", only=["grpo*"])
    for rollout, task in (("in", '[null,{"penstock.run":"grpo1"}]'), ("out", '[null,{"penstock.run":"sft1"}]')):
        done(store, lambda tape, r=rollout, t=task: tape.put("tasks", keys.rollout_key(r), t.encode()))  # type: ignore[misc]
    for rollout, counted in (("in", [("grpo1", 0, 4, 1)]), ("out", [("grpo1", 3, 0, 0)]), ("no", [("grpo1", 3, 0, 0)])):
        wanted = BudgetReservation([BudgetClaim(b, None, 4)], rollout, NOW, process(9) + keys.number(next(NAMES)))
        assert reserve(store, wanted) == []
        assert seen(store, b) == counted
        settle(store, wanted, 3)


# -- against a model ---------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """All that a budget and its processes should know."""

    most: int
    used: int = 0
    error: int = 0
    running: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    """Of each call that runs and is not thought dead: its process, and what it has reserved."""
    leases: dict[int, int] = field(default_factory=dict[int, int])

    def takes(self, who: int, call: bytes, amount: int, now: int) -> bool:
        """Whether a call may pass; if so, it runs."""
        if self.used + self.reserved + amount > self.most:
            self.running = {it: one for it, one in self.running.items() if self.leases[one[0]] > now}
        if self.used + self.reserved + amount > self.most:
            return False
        self.running[call] = who, amount
        if self.leases.get(who, 0) < now + LEASE_NS // 2:
            self.leases[who] = now + LEASE_NS
        return True

    @property
    def reserved(self) -> int:
        return sum(amount for _, amount in self.running.values())

    def ends(self, call: bytes, reserved: int, used: int) -> None:
        there = self.running.pop(call, None)
        self.used += used
        self.error += used if there is None else max(0, used - reserved)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 3), st.integers(0, 60)),
        st.tuples(st.just("end"), st.integers(0, 30), st.integers(0, 70)),
        st.tuples(st.just("leave"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("die"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.integers(1, 90)),
        st.tuples(st.just("renew"), st.integers(0, 3), st.just(0)),
    ),
    max_size=40,
)


@example([("call", 0, 0), ("wait", 0, 60), ("call", 1, 2)], 1)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 150))
def test_it_decides_as_one_would_who_knows_everything(
    store: Store, steps: list[tuple[str, int, int]], most: int
) -> None:
    """Processes reserve, settle, leave, die and come back in any order."""
    b, model, now = limit(most, window="total"), Model(most), NOW
    open_: list[BudgetReservation] = []
    first = next(NAMES) << 20
    for number, (what, which, amount) in enumerate(steps):
        if what == "call":
            wanted = asked(b, amount, first + which, number)
            short = reserve(store, wanted, now)
            assert (not short) == model.takes(first + which, wanted.who, amount, now)
            open_ += [] if short else [wanted]
        elif what in ("end", "leave") and open_:
            over = open_.pop(which % len(open_))
            settle(store, over, amount)
            model.ends(over.who, over.claims[0].amount, amount)
        elif what == "die" and open_:
            open_.pop(which % len(open_))
        elif what == "wait":
            now += amount * 10**9
        elif what == "renew":
            done(store, lambda tape, w=which, n=now: BudgetOperations(tape).renew(process(first + w), n))  # type: ignore[misc]
            model.leases[first + which] = now + LEASE_NS
        (found,) = seen(store, b, now) or [("a", 0, 0, 0)]
        assert found[1:] == (model.used, model.reserved, len(model.running))
        assert model.used + model.reserved <= most + model.error


def test_twenty_thousand_calls_of_four_processes(store: Store) -> None:
    """Each of four processes has up to 25 calls under way; what a call uses is at most what it has reserved. None is
    refused for which there is room, and no window ends above its limit."""
    chance, most, calls = random.Random(4), 1_200_000, 20_000
    b = limit(most, window="1m")
    used = dict[int, int]()
    under_way: list[tuple[BudgetReservation, int]] = []
    refused = made = 0
    now = NOW
    while made < calls:
        tasks: list[QueuedOperation[Any]] = []
        plan: list[tuple[BudgetReservation, int, QueuedOperation[Any]]] = []
        reserved = {it: sum(r.claims[0].amount for r, w in under_way if w == it) for it in {w for _, w in under_way}}
        for _ in range(chance.randrange(1, 800)):
            now += chance.randrange(10**7)
            window = window_at("1m", now).since_ns
            if len(under_way) >= 100 or (under_way and chance.random() < 0.45):
                over, at = under_way.pop(chance.randrange(len(under_way)))
                amount, took = over.claims[0].amount, 0
                took = chance.choice((0, amount, chance.randrange(amount + 1)))
                reserved[at] = reserved.get(at, 0) - amount
                used[at] = used.get(at, 0) + took
                tasks.append(
                    QueuedOperation(lambda tape, r=over, u=took: BudgetOperations(tape).settle(r, [BudgetCharge(u)]))
                )  # type: ignore[misc]
                continue
            made += 1
            wanted = asked(b, chance.randrange(1, 1000), chance.randrange(4) + (1 << 40), now=now)
            room = used.get(window, 0) + reserved.get(window, 0) + wanted.claims[0].amount <= most
            task = QueuedOperation(lambda tape, r=wanted, n=now: BudgetOperations(tape).reserve(r, n))  # type: ignore[misc]
            tasks.append(task)
            plan.append((wanted, room, task))
            if room:
                reserved[window] = reserved.get(window, 0) + wanted.claims[0].amount
                under_way.append((wanted, window))
        for number in range(4):
            tasks.append(
                QueuedOperation(lambda tape, w=number, n=now: BudgetOperations(tape).renew(process(w + (1 << 40)), n))
            )  # type: ignore[misc]
        store.write(tasks)
        for _, room, task in plan:
            assert (task.result == []) == bool(room)
            refused += not room
    assert max(used.values()) <= most
    assert 200 < refused < calls / 2, "the test itself: there were refusals, and most calls passed"


def test_more_than_a_record_holds_is_as_much_as_it_holds(store: Store) -> None:
    """What an upstream reports of tokens may be any number: the span of its call is written all the same."""
    dear = limit(1, unit="usd", window="total")
    reported = nanodollars(float("inf")), nanodollars(MOST_TOKENS * 15e-6)
    for number in range(10):
        asked = BudgetReservation([BudgetClaim(dear, "a", 1)], "r", NOW, WHO + keys.number(number))
        used = BudgetCharge(reported[number % 2], guessed=True)
        done(store, lambda tape, asked=asked, used=used: BudgetOperations(tape).settle(asked, [used]))
    (use,) = BudgetReader(store, [dear]).uses(NOW)
    assert use.used == use.guessed == (2**64 - 1) / 1e9


# -- in memory --


MEMORY_STEPS = st.lists(
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


class _Noted(BudgetReservation):
    """With the window in which it was made."""

    since_at: int = 0


@example([("call", 0, 1), ("share", 0, 0), ("wait", 0, 1), ("call", 0, 1)], 1)
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MEMORY_STEPS, st.integers(1, 150))
def test_memory_decides_as_one_would_who_knows_everything(
    store: Store, steps: list[tuple[str, int, int]], most: int
) -> None:
    """Two budgets of windows of an hour; in the middle another process may take over, from when on all is on the
    tape."""
    b = limit(most)
    here, reader, shared, now = LocalLedger(store), BudgetReader(store, [b]), False, NOW
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
            asked = _Noted([BudgetClaim(b, whose, amount)], "r", now, bytes(8) + keys.number(number))
            asked.since_at = since()
            room = used.get((whose, since()), 0) + reserved(whose)[0] + amount <= most
            if shared:
                task = QueuedOperation(lambda tape, a=asked, n=now: BudgetOperations(tape).reserve(a, n))  # type: ignore[misc]
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
            done(store, lambda tape, o=over, u=took: BudgetOperations(tape).settle(o, [BudgetCharge(u)]))  # type: ignore[misc]
            if what == "end":
                here.settle(over, [BudgetCharge(took)])
            else:
                here.discard(over)
            whose, at = over.claims[0].of or "", over.since_at
            if at >= newest.get(whose, 0):
                used[whose, at] = used.get((whose, at), 0) + took
                newest[whose] = at if took or shared else newest.get(whose, 0)
        elif what == "wait":
            now += amount * 60 * 10**9
            # As the service does all the time.
            store.write([QueuedOperation(lambda tape, n=now: BudgetOperations(tape).renew(bytes(8), n))])  # type: ignore[misc]
        elif what == "forget":
            here.forget_sums()
        elif what == "share" and not shared:
            shared, calls = True, here.drain()
            for one in running:
                whose = one.claims[0].of
                newest[whose] = max(newest.get(whose, 0), one.since_at)
            store.write([QueuedOperation(lambda tape, c=calls, n=now: BudgetOperations(tape).persist(c, n))])  # type: ignore[misc]
        told = {use.of: use for use in reader.uses(now, reserved=here.reserved())}
        for whose in "ab":
            if whose in told and told[whose].since_ns == since():
                use = told[whose]
                assert (use.reserved, use.running) == reserved(whose)
                assert use.used == used.get((whose, since()), 0)


async def test_a_call_that_another_worker_ends_in_the_breath_in_which_it_asks_reserves_nothing(store: Store) -> None:
    """A first worker that was busy for a moment reads both at once, and hears the end before it has reserved."""
    b = limit(1, unit="calls", per="all", window="total")
    here, asked = LocalLedger(store), BudgetReservation([BudgetClaim(b, "", 1)], "r", NOW, b"another process1")
    others, told = LedgerServer([b], here), RemoteLedger([b]).request(asked)
    kept = some(others.parse(told))

    async def reserve(asked: BudgetReservation) -> list[BudgetShortfall]:
        return here.reserve(asked, NOW)

    reserving = others.reserve(kept, reserve)
    others.settle(told, [(0, False, False)])
    _ = await reserving
    assert here.reserved() == {}
    assert others._open == {}
