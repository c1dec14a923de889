"""The page, as people read it."""

from __future__ import annotations

import pytest

pytest.importorskip("numpy", reason="the trainer needs numpy: `make install` or `make install-train`")

from fakes.goldens import check_widths, text_of
from fakes.process import ROOT

from penstock.gateway.model.toml import validated
from penstock.trainer.apo.advice.decision import Advice, advice, derive_findings
from penstock.trainer.apo.advice.estimates import Arm, Observation, Stance
from penstock.trainer.apo.advice.session import count, page
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.protocol import Candidate, SearchBudget

CONFIG = validated(
    ApoConfig, {"run": {"name": "desk"}, "texts": {"prompts": ["desk"]}, "reflection": {"model": "m"}}, "apo.toml"
)
STANCES: tuple[Stance, ...] = ("seed", "terse", "steps", "checklist", "mended")
ARMS = [Arm(Candidate({"desk": f"{stance} " * 30}), stance) for stance in STANCES]
LEVELS = {"seed": 0.4, "terse": 0.4, "steps": 0.3, "checklist": 0.6, "mended": 0.8}


def observations() -> list[Observation]:
    """Rewards in fifths, that go up and down with task and repeat."""
    found: list[Observation] = []
    for arm in ARMS:
        for at in range(12):
            task, wave = at % 6, (at * 7 % 5 - 2) / 10
            reward = round(min(1.0, max(0.0, LEVELS[arm.stance] + wave + 0.04 * task - 0.1)), 2)
            judged = (reward, round(max(0.0, reward - 0.1 * (at % 2)), 2)) if at % 3 == 0 else ()
            found.append(
                Observation(
                    arm.candidate.id, f"t{task}", reward, judged=judged, tools=2, misused=at % 4 == 0, tokens=812
                )
            )
    return found


def made(seen: list[Observation], failures: list[str] | None = None, problems: list[str] | None = None) -> Advice:
    spent = SearchBudget(60, used_rollouts=len(seen), used_reflections=27, used_tokens=81_000, used_money=0.243)
    return advice(CONFIG, derive_findings(ARMS, seen, 500), spent, 0, failures or [], problems or [])


def test_the_page_of_advice() -> None:
    found = made(observations(), ["the answer has no date", "the price is missing"], ["terse: a slot is lost"] * 2)
    assert found.verdict == "prompts"
    check_widths("apo-advice", page(found))
    shown = text_of(page(found), 80)
    assert max(map(len, shown.splitlines())) <= 80
    # The documentation shows this page, less what a problem would look like.
    kept = "".join(line for line in shown.splitlines(keepends=True) if not line.startswith("problem"))
    assert kept in (ROOT / "docs" / "apo-advise.md").read_text(encoding="utf-8")


def test_the_page_without_rewards() -> None:
    check_widths("apo-advice-none", page(made([Observation(ARMS[0].candidate.id, "t0", None)] * 4)))


def test_json_has_every_figure() -> None:
    found = made(observations())
    assert Advice.model_validate_json(found.model_dump_json(exclude_none=True)) == found
    assert found.needs is not None
    assert found.needs.rollouts >= 40
    assert found.needs.agent_tokens == 812 * found.needs.rollouts
    assert found.needs.money == pytest.approx(0.243 * found.needs.reflections / 27)


def test_large_numbers_are_short() -> None:
    assert [count(one) for one in (812, 9_999, 81_000, 1_234_567)] == ["812", "9,999", "81k", "1.2M"]
