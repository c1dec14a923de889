"""What `penstock budgets` says where there is nothing to show."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.budgets import budget, call, world
from fakes.shell import Shell

from penstock.gateway.display.budgets import none
from penstock.gateway.model.budget import BudgetPage


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


async def test_a_budget_of_which_nothing_was_counted_is_named(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(name="day", per="rollout")) as (gateway, _):
        shell = Shell(gateway.url, tmp_path)
        assert (await shell.run("budgets")).err == "No call was counted yet of day.\n"
        unknown = await shell.run("budgets", "night")
        assert (unknown.code, unknown.err) == (1, "penstock: there is no budget 'night'; penstock.toml has day\n")
        await call(http, gateway, "anna")
        assert "rollout anna" in (await shell.run("budgets")).text
