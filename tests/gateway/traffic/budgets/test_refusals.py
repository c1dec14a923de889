"""What a client is told: which budget, how full it is, when it frees, and how soon to ask again."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fakes.mistakes import tells
from fakes.process import ROOT

from penstock.gateway.model.prices import Price
from penstock.gateway.model.state import Budget
from penstock.gateway.traffic.budgets.claims import TokenBound, budget_refusal, unpriced
from penstock.gateway.traffic.budgets.operations import (
    BudgetClaim,
    BudgetShortfall,
    BudgetSum,
    BudgetWindow,
    Limit,
    nanodollars,
    window_at,
)
from penstock.gateway.wire.http.request import Refusal

DAY = 86_400 * 10**9
NOW = 20_000 * DAY + DAY // 4
ASKED = TokenBound(5_000, 4_000)


def short(
    used: float, reserved: float, needs: float, running: int = 0, of: str = "team-a", **said: Any
) -> BudgetShortfall:
    told: dict[str, Any] = {"name": "day", "per": "key", "unit": "usd", "limit": 20, "window": "1d"} | said
    limit = Limit(Budget(**told))
    part = 10**9 if limit.budget.unit == "usd" else 1
    window = window_at(limit.budget.window, NOW)
    amounts = [round(amount * part) for amount in (used, reserved, needs)]
    return BudgetShortfall(
        BudgetClaim(limit, of, amounts[2]), BudgetSum(window.since_ns, amounts[0], 0, amounts[1], running), window
    )


def headers(made: Refusal) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in made.headers}


def test_it_frees_with_its_window() -> None:
    made = budget_refusal([short(19.95, 0.02, 0.12, running=1)], NOW, ASKED)
    assert (made.status, made.kind) == (429, "budget")
    assert made.message == (
        "budget 'day' has no room for this call until 2024-10-05 00:00:00 UTC (in 64,800 s): key 'team-a' has used "
        "19.95 USD of 20 USD in a window of 1d, and one call that runs may use 0.02 USD more; this call may use up to "
        "0.12 USD (5,000 tokens for its prompt, 4,000 for the answer)."
    )
    assert headers(made) == {
        "RateLimit-Policy": '"day";q=20000000;qu="usd-micros";w=86400;pk=:dGVhbS1h:',
        "RateLimit": '"day";r=30000;t=64800;pk=:dGVhbS1h:',
        "Retry-After": "64800",
        "x-should-retry": "false",
    }


def test_the_page_about_budgets_shows_one() -> None:
    page = (ROOT / "docs" / "budgets.md").read_text(encoding="utf-8")
    december = 1_796_083_200
    told = short(199.7, 0.2, 0.31, 1, name="teams", limit=200, window="month")
    now = (december - 340_512) * 10**9
    made = budget_refusal([told._replace(window=window_at("month", now))], now, TokenBound(14_080, 4_096))
    assert made.message in page.replace("\n", " ")


def test_little_and_much_money_is_said_in_figures() -> None:
    made = budget_refusal([short(1_234_567.5, 0.000_055, 2, running=1, limit=1_234_567.5)], NOW, ASKED)
    assert tells(made.message, "1,234,567.5 USD of 1,234,567.5 USD", "0.000055 USD more", "up to 2 USD (5,000 tokens")


def test_calls_that_run_may_leave_room() -> None:
    made = budget_refusal([short(100, 900, 300, running=2, per="all", of="", unit="tokens", limit=1000)], NOW, ASKED)
    figures = ("used 100 tokens of 1,000 tokens", "2 calls that run", "900 tokens more")
    assert tells(made.message, "budget 'day'", "until calls that run have ended", "all calls", *figures)
    assert headers(made) == {
        "RateLimit-Policy": '"day";q=1000;qu="tokens";w=86400',
        "RateLimit": '"day";r=0;t=1',
        "Retry-After": "1",
    }


def test_a_total_does_not_free() -> None:
    made = budget_refusal([short(3, 0, 1, unit="calls", limit=3, window="total", per="agent", of="x")], NOW, ASKED)
    assert tells(made.message, "for this call: agent 'x'", "3 calls of 3 calls in all", "limit of [[budget]] 'day'")
    assert headers(made) == {
        "RateLimit-Policy": '"day";q=3;pk=:eA==:', "RateLimit": '"day";r=0;pk=:eA==:', "x-should-retry": "false"
    }  # fmt: skip


def test_a_call_that_is_larger_than_a_budget_is_told_so() -> None:
    made = budget_refusal([short(0, 0, 500, unit="tokens", limit=100)], NOW, TokenBound(300, None))
    assert tells(made.message, "300 tokens for its prompt", "8,192 for the answer", "max_tokens")
    assert tells(made.message, "more than the whole budget", "a shorter answer", "raise limit of [[budget]] 'day'")
    assert "Retry-After" not in headers(made)


def test_of_several_the_one_that_frees_last_is_told_of() -> None:
    soon, late = (
        short(0, 3, 1, 3, unit="calls", limit=3, name="soon"),
        short(9, 0, 1, unit="calls", limit=9, name="late"),
    )
    made = budget_refusal([soon, late], NOW, ASKED)
    assert made.message.startswith("budget 'late'")
    assert re.findall('"(.+?)";q=', headers(made)["RateLimit-Policy"]) == ["soon", "late"]
    assert headers(made)["Retry-After"] == "64800"


@pytest.mark.parametrize("model", ["policy", None])
def test_a_model_without_a_price(model: str | None) -> None:
    made = unpriced(Budget(name="day", unit="usd", limit=1.0), model)
    assert (made.status, made.kind, made.field) == (403, "budget_price", "model")
    assert ("'policy'" in made.message) == (model is not None)
    assert "penstock prices --builtin" in made.message


@pytest.mark.parametrize(
    ("window", "since", "ends"),
    [
        ("1h", "2024-10-04 06", "2024-10-04 07"),
        ("1d", "2024-10-04 00", "2024-10-05 00"),
        ("month", "2024-10-01 00", "2024-11-01 00"),
    ],
)
def test_windows_begin_where_people_expect_it(window: str, since: str, ends: str) -> None:
    from datetime import UTC, datetime

    found = window_at(window, NOW)
    assert found.ends_ns is not None
    told = [f"{datetime.fromtimestamp(at // 10**9, UTC):%Y-%m-%d %H}" for at in (found.since_ns, found.ends_ns)]
    assert told == [since, ends]
    assert window_at(window, found.ends_ns - 1) == found
    assert window_at(window, found.ends_ns).since_ns == found.ends_ns


def test_the_years_end_is_a_months_end_and_a_total_has_none() -> None:
    december = window_at("month", 1_735_000_000 * 10**9)
    assert december.ends_ns is not None
    assert window_at("month", december.ends_ns).since_ns == 1_735_689_600 * 10**9
    assert window_at("total", NOW) == BudgetWindow(0, None)


def test_what_a_call_may_cost_is_rounded_up_and_takes_the_dearest_way_to_read() -> None:
    from datetime import date

    price = Price(model="m", since=date(2024, 1, 1), input=3.0, output=15.0, cache_write=3.75)
    assert nanodollars(price.most(1000, 100, b"{}")) == 3_750_000 + 1_500_000
    assert nanodollars(Price(model="m", input=1e-9, output=0.0).most(1, 0, b"{}")) == 1
