"""The account of a soak by itself: what is as it should be passes, and every planted fault is found."""

from __future__ import annotations

import pytest

from bench.soak.account import MOMENT_S, Account, Kill, Recorded, settle
from bench.soak.calls import Calls
from bench.soak.kinds import BY_NAME, KINDS, Seen

KILL = Kill(100.0, 100.5)


def one(kind: str, seen: Seen, began: float, ended: float) -> Calls:
    """A soak of one call."""
    calls = Calls(7)
    number = calls.begin(BY_NAME[kind])
    calls.seen[number], calls.began[number], calls.ended[number] = seen, began, ended
    return calls


def span(calls: Calls, status: str, number: int = 0) -> Recorded:
    """As it is on the tape."""
    name = calls.name(number).decode()
    return Recorded(name, status, name if status == "ok" else None, f"r1/a1#{number}")


def held(kind: str, seen: Seen, times: tuple[float, float], *statuses: str) -> Account:
    """One call against a tape that has it with each of these statuses, and one kill."""
    calls = one(kind, seen, *times)
    return settle(calls, [KILL], [span(calls, status) for status in statuses])


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_a_call_that_went_as_planned_is_right(kind: str) -> None:
    plan = KINDS[BY_NAME[kind]]
    assert held(kind, plan.sees, (1.0, 1.1), plan.ends).problems == []


def test_all_calls_are_looked_at() -> None:
    calls = Calls(7)
    for number in range(1000):
        assert calls.begin(BY_NAME["chat"]) == number
        calls.end(number, Seen.ANSWERED)
    tape = [span(calls, "ok", number) for number in range(1000) if number != 613]
    account = settle(calls, [], tape)
    assert account.ends == {("chat", "ok"): 999, ("chat", "absent"): 1}
    assert account.wrong == 1
    assert account.problems[0].startswith("lost: call 613, chat, ")


FOUND: list[tuple[str, Seen, tuple[float, float], list[str], str]] = [
    ("chat", Seen.ANSWERED, (1.0, 1.1), [], "lost: call 0, chat, which its client saw answered after 0.100 s"),
    ("chat", Seen.ANSWERED, (1.0, 1.1), ["ok", "ok"], "on the tape 2 times"),
    ("chat", Seen.ANSWERED, (1.0, 1.1), ["error"], "error on the tape"),
    ("chat", Seen.ANSWERED, (1.0, 1.1), ["open"], "open on the tape"),
    ("chat", Seen.ANSWERED, (1.0, 1.1), ["interrupted"], "interrupted on the tape"),
    ("chat", Seen.REFUSED, (1.0, 1.1), ["error"], "not what was to come"),
    ("chat", Seen.WRONG, (1.0, 1.1), ["ok"], "not what was to come"),
    ("chat", Seen.BROKEN, (1.0, 1.1), ["cancelled"], "not what was to come"),
    ("chat", Seen.PENDING, (1.0, 0.0), ["ok"], "not what was to come"),
    ("refused_500", Seen.REFUSED, (1.0, 1.1), ["ok"], "ok on the tape"),
    ("broken", Seen.BROKEN, (1.0, 1.1), ["ok"], "ok on the tape"),
    ("leaves_middle", Seen.LEFT, (1.0, 1.1), ["ok"], "ok on the tape"),
    ("leaves_before", Seen.LEFT, (1.0, 1.1), [], "lost"),
    ("chat", Seen.UNSENT, (1.0, 1.1), ["cancelled"], "cancelled on the tape"),
    # What a kill does not excuse: a call that began long before it, and one that came after it.
    ("chat", Seen.BROKEN, (KILL.begin - MOMENT_S - 1, KILL.begin + 0.1), [], "lost"),
    ("chat", Seen.BROKEN, (KILL.begin - 1, KILL.begin + 0.1), ["open"], "open on the tape"),
    ("chat", Seen.ANSWERED, (KILL.begin - MOMENT_S - 2, KILL.begin - MOMENT_S - 1), ["interrupted"], "interrupted on"),
    ("chat", Seen.ANSWERED, (KILL.end + 0.1, KILL.end + 0.2), [], "lost"),
    ("chat", Seen.REFUSED, (KILL.begin - 0.2, KILL.begin - 0.1), ["error"], "not what was to come"),
]


@pytest.mark.parametrize(("kind", "seen", "times", "statuses", "problem"), FOUND)
def test_what_is_wrong_is_found(
    kind: str, seen: Seen, times: tuple[float, float], statuses: list[str], problem: str
) -> None:
    account = held(kind, seen, times, *statuses)
    assert account.wrong
    assert any(said.startswith(problem) for said in account.problems), account.problems


def test_calls_that_nobody_made_and_answers_of_others_are_found() -> None:
    calls = one("chat", Seen.ANSWERED, 1.0, 1.1)
    for name in (None, "00000008" + "0" * 8, "00000007" + "00000001", "no name at all!!"):
        account = settle(calls, [], [span(calls, "ok"), Recorded(name, "ok", name, "r9/a1#1")])
        assert account.problems == ["r9/a1#1 (ok) was never asked for"]
    other = span(calls, "ok")._replace(response="0000000700000001")
    (problem,) = settle(calls, [], [other]).problems
    assert problem.startswith("r1/a1#0 has the answer 0000000700000001")


def test_what_a_kill_may_take_is_counted() -> None:
    young = held("chat", Seen.BROKEN, (KILL.begin - 0.2, KILL.begin + 0.1))
    assert (young.problems, young.absent, round(young.absent_s, 3)) == ([], 1, 0.2)
    told = held("chat", Seen.ANSWERED, (KILL.begin - 0.02, KILL.begin - 0.01))
    assert (told.problems, told.absent) == ([], 1)
    longer = held("slow_tokens", Seen.BROKEN, (KILL.begin - 20, KILL.begin + 0.1), "interrupted")
    assert (longer.problems, longer.interrupted, longer.unended) == ([], 1, 0)
    ended = held("slow_tokens", Seen.ANSWERED, (KILL.begin - 20, KILL.begin - 0.01), "interrupted")
    assert (ended.problems, ended.interrupted, ended.unended, round(ended.unended_s, 3)) == ([], 1, 1, 0.01)
    done = held("chat", Seen.BROKEN, (KILL.begin - 0.1, KILL.begin + 0.1), "ok")
    assert (done.problems, done.cut) == ([], 1)
    away = held("chat", Seen.UNSENT, (KILL.begin + 0.1, KILL.begin + 0.1))
    assert (away.problems, away.unsent) == ([], 1)
