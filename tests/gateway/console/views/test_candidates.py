"""The tree of a run's candidates: how it looks, and that no tree of a stranger breaks it."""

from __future__ import annotations

import random

from fakes.goldens import check_golden, check_widths, text_of
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.views import runs
from penstock.console.views.pages import run_charts, run_page
from penstock.console.views.runs import candidates_chart, candidates_tree, needed_e_value, ordered_candidates
from penstock.gateway.model.run import CandidateTree, Curve, Run, RunCandidate
from penstock.gateway.work.curves import Series, curve

T0 = 1_790_000_000_000_000_000
TREE = CandidateTree(
    candidates=[
        RunCandidate(id="648de9ca0023", state="seed", rollouts=32, mean=0.38, length=111),
        RunCandidate(
            id="d9eb44170aae", parent="648de9ca0023", claim="the answer has no closing", step=24, rollouts=8, mean=0.79,
            length=238,
        ),
        RunCandidate(
            id="462302b8b266", parent="d9eb44170aae", claim="the answer has no price\x1b[31m", state="racing", step=96,
            rollouts=4, mean=1.0, length=320, pairs=12, gain=0.41, e_value=7.25, needed=40,
        ),
        RunCandidate(
            id="e2b00e5ae64e", parent="648de9ca0023", claim="answers are long", state="out", step=96, rollouts=24,
            mean=0.4, length=90, pairs=64, gain=-0.02, e_value=0.4, needed=40,
        ),
        RunCandidate(id="0000aaaa1111", parent="648de9ca0023", step=120),
    ],
    left_out=37,
)  # fmt: skip
RUN = Run(
    id="shop", kind="apo", created_ns=T0, last_seen_ns=T0 + 10**9, step=256, steps=320, tree=TREE,
    message="waits for 48 rollouts, and nobody runs one: is there a runner?", config={"engine": "ours"},
)  # fmt: skip


def curves() -> list[Curve]:
    steps = [200, 216, 232]
    found = {"reward": [0.4, 0.6, 0.9], "race/1/e_value": [1.0, 3.5, 7.25]}
    return [curve(name, Series(steps, values), 0, None, 32) for name, values in found.items()]


def test_a_search_looks_as_it_did() -> None:
    check_widths("run-candidates", candidates_tree(TREE))
    check_golden("run-searches", runs.watched(RUN, curves(), [], T0 + 60 * 10**9))
    check_golden("run-searched", runs.show(RUN, curves(), [], T0 + 60 * 10**9))


def test_a_tree_is_cut_with_a_note_of_what_is_missing() -> None:
    shown = text_of(candidates_tree(TREE, 2))
    assert "0000aaaa1111" not in shown
    assert shown.endswith("40 more candidates are not shown\n")


def test_e_values_are_drawn_by_their_size_against_their_bound() -> None:
    ((race, reward, first),) = run_charts({"shop": curves()}, TREE).values()
    assert [line.name for line in first.lines] == ["candidates", "highest so far"]
    assert first.lines[1].points == [(0.0, 0.38), (24.0, 0.79), (96.0, 0.79), (96.0, 1.0)]
    assert (reward.log, reward.limits) == (False, [])
    assert (race.log, race.limits) == (True, [("better at 40", 40.0)])
    html = run_page(RUN, "", {"shop": curves()}, [], T0)
    assert html.count("<figure>") == 3
    assert "\x1b" not in html


def test_what_the_search_began_with_is_a_level_in_the_chart_of_the_best() -> None:
    one, other = (
        curve(name, Series([8], [value]), 0, None, 9) for name, value in (("best/reward", 0.8), ("seed/reward", 0.4))
    )
    (best,) = run_charts({"shop": [one, other]})["Result"]
    assert (best.title, best.limits) == ("best/reward", [("seed/reward: 0.4", 0.4)])
    assert [chart.title for charts in run_charts({"shop": [other]}).values() for chart in charts] == ["seed/reward"]


def test_a_tree_without_means_has_no_chart() -> None:
    assert candidates_chart(CandidateTree(candidates=[RunCandidate(id="a")])) is None
    assert needed_e_value(None) is None


NAMES = st.sampled_from("abcdef")


@given(st.dictionaries(NAMES, st.none() | NAMES, min_size=1))
def test_every_candidate_is_shown_once_even_where_one_is_its_own_ancestor(parents: dict[str, str | None]) -> None:
    found = [RunCandidate(id=name, parent=parent) for name, parent in parents.items()]
    shown = [one.id for _, one in ordered_candidates(found)]
    assert sorted(shown) == sorted(parents)
    assert shown[0] == found[0].id


@given(st.lists(st.tuples(NAMES, st.none() | NAMES), min_size=1, max_size=40))
def test_every_candidate_is_shown_once_even_where_several_have_one_name(told: list[tuple[str, str | None]]) -> None:
    found = [RunCandidate(id=name, parent=parent, step=at) for at, (name, parent) in enumerate(told)]
    shown = [one.step for _, one in ordered_candidates(found)]
    assert sorted(shown) == list(range(len(told)))
    assert shown[0] == 0


def test_candidates_may_come_from_each_other_without_end() -> None:
    found = [RunCandidate(id=f"n{at}", parent=f"n{at - 1}" if at else None) for at in range(3000)]
    assert [depth for depth, _ in ordered_candidates(found)] == list(range(3000))


@given(st.integers(0, 40), st.randoms())
def test_what_was_made_from_one_stands_below_it(count: int, draw: random.Random) -> None:
    found = [RunCandidate(id="n0")]
    for at in range(1, count + 1):
        found.append(RunCandidate(id=f"n{at}", parent=f"n{draw.randrange(at)}", mean=draw.random()))
    above: list[str] = []
    for depth, one in ordered_candidates(found):
        above[depth:] = [one.id]
        assert one.parent is None or above[depth - 1] == one.parent
