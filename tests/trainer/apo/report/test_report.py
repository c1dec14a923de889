"""The report: its figures, and how it looks on a terminal and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.apo_results import LEAKS, SEED, WINNER, result
from fakes.goldens import GOLDENS, check_golden, check_text, check_widths
from fakes.laboratory import SEED as DESK
from fakes.laboratory import Bench, tasks

from penstock.gateway.client.console import CommandError
from penstock.gateway.model.toml import ConfigError
from penstock.trainer.apo.config import ApoConfig
from penstock.trainer.apo.protocol import Candidate, Evidence, Pool, SearchBudget, TrialSpec
from penstock.trainer.apo.report import aggregate_figures, figures, html_page, terminal_page, wealth
from penstock.trainer.apo.result import RunResult, build_result, changes, results
from penstock.trainer.apo.search import PromptSearch, Splits
from penstock.trainer.commands import report as command

BETTER = result(leaks=LEAKS)
SEEDS = [
    result("shop.s0", draw=0),
    result("shop.s1", ((0.5, 0.0), (0.0, 0.0), (0.0, 0.5), (0.5, 0.0)), draw=1),
    result("shop.s2", won=False, draw=2),
]
PLACEBO = [result("shop.placebo.s0", won=False, placebo=True)]


def test_figures_are_paired_by_task_and_in_units_of_keys() -> None:
    found = figures(BETTER)
    assert [(pair.before, pair.after) for pair in found.pairs] == [(0.5, 0.75), (0.25, 1.0), (0.5, 0.25), (0.25, 1.0)]
    assert found.gain is not None
    assert (found.gain.mean, found.gain.units) == (0.375, 3)
    assert (found.raced, found.gap) == (0.625, 0.25)
    assert found.lengths == (SEED.length, WINNER.length)


def test_a_task_without_a_reward_on_one_side_is_no_pair() -> None:
    found = figures(result(after=((None, None), (1.0, None), (0.5, 0.5), (1.0, 1.0))))
    assert [pair.task for pair in found.pairs] == ["t11", "t12", "t13"]


def test_a_run_whose_seed_stays_counts_as_a_gain_of_nothing() -> None:
    found = aggregate_figures(SEEDS)
    assert [run.gain and run.gain.mean for run in found.runs] == [0.375, pytest.approx(-0.1875), 0.0]
    assert (found.better, found.worse, found.same, found.untested) == (1, 1, 1, 0)
    assert found.gain is not None
    assert (found.gain.mean, found.gain.units) == (pytest.approx(0.0625), 3)


def test_a_winner_that_was_not_tested_is_in_no_figure_of_the_test() -> None:
    untested = BETTER.model_copy(update={"tests": [], "tasks": []})
    found = aggregate_figures([untested, SEEDS[2]])
    assert (found.untested, found.same, found.gap) == (1, 1, None)
    assert found.gain is not None
    assert found.gain.mean == 0.0


def test_every_line_of_the_difference_names_its_rollouts() -> None:
    lines = changes(BETTER)["shop"]
    assert "".join(f"{one.mark}{one.line}\n" for one in lines) == (
        " You answer customers of Acme.\n-Answer with one word only.\n Be kind.\n+Give the price in euros.\n"
        "+For Ann, say what the grader wants.\n"
    )
    # What the engine does not say of a line is what it says of the candidate.
    assert [len(one.causes) for one in lines] == [0, 2, 0, 4, 2]


def test_a_report_looks_as_it_did() -> None:
    check_widths("apo-report", terminal_page([BETTER]))
    check_golden("apo-report-stays", terminal_page([SEEDS[2]]))
    check_widths("apo-report-seeds", terminal_page([*SEEDS, *PLACEBO]))


def test_the_page_is_as_it_was_and_loads_nothing() -> None:
    html = html_page([BETTER, *SEEDS, *PLACEBO])
    assert "<script" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert "\x1b" not in html
    check_text("apo-report.html", html)


@pytest.mark.parametrize("rollouts", [200, 700])
async def test_the_race_is_drawn_as_it_was_run(rollouts: int) -> None:
    """Also where there are more rollouts than tasks: the mean of a task's repeats counts once."""
    good, fair = (Candidate({"desk": f"Answer {how}."}, DESK.id) for how in ("well", "fairly"))

    class Both:
        async def propose(self, pool: Pool, evidence: Evidence) -> list[Candidate]:
            return [] if good.id in pool.candidates else [good, fair]

    def graded(candidate: Candidate, order: TrialSpec) -> float:
        wrong = {good.id: 1, fair.id: 2}.get(candidate.id, 3)
        return float((int(order.task[1:]) + order.number) % 5 >= wrong)

    splits = Splits(tasks(20), tasks(24, first=20), tasks(4, first=50))
    search = PromptSearch(Bench(graded), Both(), DESK, splits.train, splits.validation, SearchBudget(rollouts), 0)
    config = ApoConfig.model_validate({"texts": {"prompts": ["desk"]}, "reflection": {"model": "m"}})
    found = build_result(config, await search.run(), (), splits, {}, placebo=False)
    assert found.race
    for racer in found.race:
        assert wealth(found, racer.candidate, racer.rate)[-1] == (racer.pairs, racer.e_value)


def test_a_page_of_a_hostile_text_is_text() -> None:
    assert BETTER.winner is not None
    evil = "<script>alert(1)</script>"
    winner = BETTER.winner.model_copy(update={"texts": {"shop": evil}})
    html = html_page([BETTER.model_copy(update={"winner": winner})])
    assert evil not in html
    assert "&lt;script&gt;" in html


def test_results_are_found_in_a_directory_and_in_those_within(tmp_path: Path) -> None:
    for one in (*SEEDS, *PLACEBO):
        path = tmp_path / one.run.replace("shop.", "").replace(".", "/")
        path.mkdir(parents=True)
        (path / "result.json").write_text(one.model_dump_json())
    assert results([tmp_path]) == [*PLACEBO, *SEEDS]
    assert results([tmp_path / "s1", tmp_path]) == [SEEDS[1], *PLACEBO, SEEDS[0], SEEDS[2]]


def test_what_is_no_result_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no result\.json, nor has a directory in it: no run has ended there"):
        results([tmp_path])
    (tmp_path / "result.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=r"result\.json is no result of a run that this penstock reads"):
        results([tmp_path])
    with pytest.raises(CommandError):
        command([tmp_path])


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text(BETTER.model_dump_json())
    command([tmp_path], html=tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text() == html_page([BETTER])
    assert "Leak test: 2 found." in capsys.readouterr().out
    command([tmp_path], json=True)
    assert RunResult.model_validate(json.loads(capsys.readouterr().out)) == BETTER


def test_goldens_hold_no_control_characters() -> None:
    assert all("\x1b" not in path.read_text() for path in GOLDENS.glob("apo-report*"))
