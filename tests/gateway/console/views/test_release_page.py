"""The page of a release: its series are those of the decisions, strangers write no markup, and it stands alone."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from fakes.shown import Outline
from fakes.trials import Trial, steady
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.console.views.pages import History, evidence_series, release_charts, release_page
from penstock.console.views.releases import mean_difference
from penstock.console.views.svg import STYLES, WIDTH, Chart, LineSeries, drawn, svg
from penstock.console.views.table import clean
from penstock.gateway.model.release import ReleaseView
from penstock.gateway.model.release_policy import CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import Audience

SHORT = ReleasePolicy(
    stages=[CanaryStage(split=0.2, rollouts=5), CanaryStage(split=0.5, rollouts=5)], margin_absolute=0.1
)
AFTER = 10**9


def ramped() -> Trial:
    trial = Trial.of(SHORT).prepare(replayed={"skipped": True}).run(300, steady(0.7, 0.72))
    assert (trial.release.stage, trial.release.step) == ("canary", 1)
    for _ in range(10):
        trial.assign()
    return trial


def page_of(trial: Trial) -> str:
    return release_page(trial.view, trial.history, trial.now + AFTER)


# --- series ---


def test_a_series_ends_with_the_figures_that_were_decided_from() -> None:
    trial = Trial.of().prepare().run(3000, steady(0.7, 0.4))
    assert trial.release.stage == "rolled_back"
    last = evidence_series(trial.release, trial.history)[-1]
    assert last.counted == trial.release.counted
    assert last.figures == trial.audit[-1].evidence
    assert last.figures["harm"] >= 1 / trial.release.policy.alpha
    assert last.interval == trial.view.interval


def test_a_series_is_thinned_and_keeps_its_end() -> None:
    trial = ramped()
    every = evidence_series(trial.release, trial.history, most=10_000)
    some = evidence_series(trial.release, trial.history, most=7)
    assert [point.counted for point in every] == list(range(1, 301))
    assert [point.counted for point in some] == [43, 86, 129, 172, 215, 258, 300]
    assert all(point in every for point in some)


def test_what_people_did_is_stepped_through() -> None:
    approval = SHORT.model_copy(
        update={"stages": [CanaryStage(split=0.2, rollouts=5, approval=True), CanaryStage(split=0.5)]}
    )
    trial = Trial.of(approval).prepare().run(100, steady(0.7, 0.72))
    assert (trial.release.waits, trial.release.step) == ("approval", 0)
    trial.person("approve", "canary", waits=None).run(100, steady(0.7, 0.72, seed=8))
    assert trial.release.step == 1
    last = evidence_series(trial.release, trial.history)[-1]
    assert last.figures == trial.view.figures
    assert {"srm.20%", "srm.50%"} <= last.figures.keys()


def test_what_was_seen_after_a_hold_is_in_the_series() -> None:
    trial = Trial.of(ReleasePolicy(stages=[CanaryStage(split=0.5)], horizon=60)).prepare().run(100, steady(0.7, 0.7))
    assert (trial.release.stage, trial.release.counted) == ("held", 60)
    trial.person("resume", "canary", held_in=None).run(40, steady(0.7, 0.7, seed=8))
    last = evidence_series(trial.release, trial.history)[-1]
    assert (last.counted, last.figures["seen"], last.figures) == (100, 100, trial.view.figures)


def test_a_rollout_that_is_left_out_is_in_no_figure() -> None:
    trial = ramped()
    before = evidence_series(trial.release, trial.history)[-1].figures
    trial.look_early(None)
    trial.count(steady(0, 0), left_out="it was cancelled")
    after = evidence_series(trial.release, trial.history)[-1]
    assert (after.counted, after.figures) == (301, before)
    assert "Left out of all figures: 1 rollout: " in page_of(trial)


def test_what_was_read_too_late_is_cut_off() -> None:
    trial = ramped()
    view, early = trial.view.model_copy(deep=True), trial.history
    trial.run(50, steady(0.7, 0.1)).person("rollback", "rolled_back")
    late = History.of(view.release, trial.audit, trial.assigned, trial.seen)
    assert late == early
    part = History.of(view.release, trial.audit, trial.assigned[250:], trial.seen[250:], after=250)
    assert (part.seen, part.assigned) == (early.seen[250:], early.assigned[250:])


# --- the page ---


def test_every_chart_says_what_is_along_its_sides_and_no_two_lines_look_alike() -> None:
    made = page_of(ramped())
    charts = re.findall(r'<svg viewBox="0 0 440 240".*?</svg>', made, re.DOTALL)
    assert len(charts) == 5
    for chart in charts:
        assert chart.count("rotate(-90)") == 1
        assert re.search(r'text-anchor="middle">(new rollouts|mean reward|difference of|e-value)', chart)
    styles = re.findall(r"\.s\d \{ stroke: (var\(--c\d\));( stroke-dasharray: [\d ]+;)? \}", made)
    assert len(styles) == len(set(styles)) == len({dashes for _, dashes in styles}) == STYLES


def test_the_page_stands_alone() -> None:
    made = page_of(ramped())
    tags = {tag for tag, _ in Outline(made).tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "input", "a", "image", "use"}
    assert not re.findall(r"https?:|url\(|@import|\bsrc=|\bhref=|\bon[a-z]+=", made)
    assert "default-src 'none'" in made
    assert "prefers-color-scheme: dark" in made


def test_every_chart_has_a_title_a_text_and_a_table() -> None:
    made = page_of(ramped())
    charts = [ElementTree.fromstring(one) for one in re.findall(r'<svg viewBox="0 0 440.*?</svg>', made, re.DOTALL)]
    titles = [chart.findtext("title") for chart in charts]
    assert titles == ["Traffic", "Reward", "Difference", "Evidence", "Guardrails"]
    for chart in charts:
        assert chart.get("role") == "img"
        ids = {one.get("id") for one in chart}
        assert set((chart.get("aria-labelledby") or "").split()) <= ids
        assert chart.findtext("desc")
        assert f"<caption>{chart.findtext('title')}</caption>" in made
    named = re.findall(r' id="([^"]+)"', made)
    assert len(set(named)) == len(named) == 2 * len(charts)


def test_a_chart_shows_the_figures_of_its_caption() -> None:
    trial = ramped()
    points = evidence_series(trial.release, trial.history)
    _, _, shown, evidence, _ = release_charts(trial.view, trial.history, points, 2 * 10**18)
    assert shown.lines[0].points[-1][1] == pytest.approx(mean_difference(trial.view.figures))
    assert f"Now: {shown.lines[0].points[-1][1]:+.3f}, between" in shown.description
    made = drawn(evidence)
    assert made.index('<text class="tick over"') > made.rindex('<path class="line'), "lines cover the names of limits"


def test_equal_rewards_are_drawn_between_worst_and_best() -> None:
    trial = Trial.of(SHORT).prepare().run(30, steady(1.0, 1.0))
    _, rewards, *_ = release_charts(
        trial.view, trial.history, evidence_series(trial.release, trial.history), 2 * 10**18
    )
    assert rewards.bounds == (0, 1)


def test_evidence_is_drawn_on_a_logarithmic_scale() -> None:
    for title in ("Evidence", "Guardrails"):
        chart = page_of(ramped()).split(f">{title}</title>", 1)[1].split("</svg>", 1)[0]
        ticks = re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)</text>', chart)
        places = {float(value): float(y) for y, value in ticks}
        assert places[10.0] - places[100.0] == pytest.approx(places[1.0] - places[10.0], abs=0.2)


def test_every_line_of_a_chart_can_be_told_from_the_others_without_colours() -> None:
    made = page_of(ramped())
    dashes = dict(re.findall(r"\.(s\d) \{ stroke: var\(--c\d\); (stroke-dasharray: [\d ]+)?", made))
    assert len(dashes) == len(set(dashes.values())) == 6
    for legend in re.findall(r'<ul class="legend">(.*?)</ul>', made, re.DOTALL):
        styles = re.findall(r"line (s\d)", legend)
        assert len(set(styles)) == len(styles)


def test_the_page_says_what_the_release_is_and_why() -> None:
    trial = ramped()
    said = " ".join("".join(Outline(page_of(trial)).said).split())
    assert "planner-1: canary" in said
    assert "prompt planner: v12 → v13." in said
    assert "replayed (skipped)" in said
    assert "50 % of new rollouts get v13" in said
    assert "canary 20% of new rollouts: prepare by the rules" in said
    assert "Waits for 10 outcomes, each for 1 h" in said
    assert "harm rolls back at 50" in said
    assert "no loss of 0.07 promotes at 20" in said
    assert "advance by the rules, 2026-" in said
    assert "its hash" not in said


@pytest.mark.parametrize("stage", ["draft", "canary"])
def test_a_release_without_outcomes_has_a_page(stage: str) -> None:
    trial = Trial.of(SHORT)
    if stage == "canary":
        trial.prepare().assign()
    charts = re.findall(r"<title id=.*?>(.*?)</title>", page_of(trial))
    assert charts == ["Traffic"]


def test_a_plain_experiment_has_no_limit_for_its_end() -> None:
    policy = ReleasePolicy(stages=[CanaryStage(split=0.5)], hold_split=True)
    trial = Trial.of(policy, margin=0.0).prepare().run(60, steady(0.5, 0.5))
    made = page_of(trial)
    assert "better than stable" in made
    assert "promotes at" not in made
    assert "nothing else ends it" in made


# --- text of strangers ---

STRANGE = "</desc></svg><script>alert('x')</script>&amp;\"'\x00\x1b[31m\u202e\udc80"


def told(words: str) -> tuple[ReleaseView, History]:
    """A release in which everything that people may write is this."""
    trial = Trial.of(SHORT, only=Audience(agents=[words], metadata={words: words}), author=words).prepare()
    trial.run(30, steady(0.7, 0.7))
    trial.person("hold", "held", why=words, held_in="canary", evidence={words: words})
    trial.audit[-1] = trial.audit[-1].model_copy(update={"who": words, "action": words})
    return trial.view, trial.history


HARMLESS = Outline(release_page(*told("harmless"), 2 * 10**18))


@given(st.text(min_size=1))
@example(STRANGE)
@example("<!-- ")
@example("]]>")
def test_whatever_people_write_is_text(words: str) -> None:
    made = release_page(*told(words), 2 * 10**18)
    found = Outline(made)
    assert found.tags == HARMLESS.tags
    made.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", made)


def test_what_people_write_can_be_read() -> None:
    said = "".join(Outline(release_page(*told("5 < 7 & \"so\" 'on'"), 2 * 10**18)).said)
    assert "5 < 7 & \"so\" 'on'" in said


XML = st.text(st.characters(codec="utf-8", exclude_characters="\ufffe\uffff"))
"""What XML can hold, which the parser here reads; HTML takes more."""


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(XML, XML, FINITE, FINITE, st.booleans())
@example("", "", 1e17, 1e17, False)
@example("", "", -1.7e308, 1.7e308, False)
@example("", "", 0.0, 5e-324, False)
def test_a_chart_is_well_formed(title: str, name: str, one: float, other: float, log: bool) -> None:
    low, high = sorted((one, other))
    steps = [(min(max(x, -1e12), 1e12), y) for x, y in ((low, one), (high, other))]
    chart = Chart(title, name, [LineSeries(name, steps)], name, limits=[(name, high)], log=log)
    found = ElementTree.fromstring(svg(chart, "c"))
    assert (found.findtext("title"), found.findtext("desc")) == (clean(title), clean(name))
    numbers = [float(it) for path in found.iter("path") for it in re.findall(r"-?[\d.]+", path.get("d", ""))]
    assert all(0 <= number <= WIDTH for number in numbers)
