"""What `penstock budgets` says where there is nothing to show."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import aiohttp
import pytest
from fakes.budgets import budget, call, world
from fakes.shell import Shell
from rich.console import Console

from penstock.gateway.display.budgets import budgets, none
from penstock.gateway.model.budget import BudgetPage, BudgetUse


@pytest.mark.parametrize(
    ("configured", "name", "said"),
    [
        ([], None, "penstock.toml has no [[budget]]."),
        ([], "day", "penstock.toml has no [[budget]]."),
        (["day", "team"], None, "No call was counted yet of day, team."),
        (["day", "team"], "team", "No call was counted yet of team."),
        (["day", "team"], "night", "there is no budget 'night'; penstock.toml has day, team"),
    ],
)
def test_why_there_is_no_row(configured: list[str], name: str | None, said: str) -> None:
    assert none(BudgetPage(budgets=[], total=0, configured=configured), name) == said


@pytest.mark.parametrize(
    ("frees_ns", "said"),
    [(None, "never"), (61 * 10**9, "1 m 01 s"), (1_999_999_999, "1 s"), (999_999_999, "now"), (0, "now"), (-5, "now")],
)
def test_when_it_frees(frees_ns: int | None, said: str) -> None:
    use = BudgetUse(
        budget="day", per="all", unit="calls", limit=10, used=1, reserved=0, running=0, window="1d", since_ns=0,
        frees_ns=frees_ns,
    )  # fmt: skip
    console = Console(width=120, file=StringIO())
    console.print(budgets(BudgetPage(budgets=[use], total=1, configured=["day"]), now_ns=0))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().rstrip().endswith(said)


async def test_a_budget_of_which_nothing_was_counted_is_named(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(name="day", per="rollout")) as (gateway, _):
        shell = Shell(gateway.url, tmp_path)
        assert (await shell.run("budgets")).err == "No call was counted yet of day.\n"
        unknown = await shell.run("budgets", "night")
        assert (unknown.code, unknown.err) == (1, "penstock: there is no budget 'night'; penstock.toml has day\n")
        await call(http, gateway, "anna")
        assert "rollout anna" in (await shell.run("budgets")).text
