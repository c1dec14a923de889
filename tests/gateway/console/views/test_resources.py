"""Releases, resources and prompts, as a terminal shows them."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.goldens import check_widths, text_of
from fakes.trials import START, Trial, steady
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views import releases, resources
from penstock.console.views.releases import bar
from penstock.gateway.model.release_policy import Guards, ReleasePolicy
from penstock.gateway.model.resource import (
    Audience,
    Coverage,
    LastMiss,
    Resource,
    ResourceList,
    ResourceView,
    StableRule,
    StableVersion,
    Template,
    TextDifference,
)
from penstock.gateway.releases.prompt_induction import PromptProposal
from penstock.gateway.releases.prompt_recogniser import RegisteredText, TextMatch

NOW = START + 9 * 3600 * 10**9


def ramped() -> Trial:
    trial = Trial.of().prepare(replayed={"skipped": True}, shadowed={"ok": False}).run(900, steady(0.7, 0.72))
    for _ in range(40):
        trial.assign()
    return trial


def held_back() -> Trial:
    trial = Trial.of(ReleasePolicy(guards=Guards(margin=0.3)), margin=0.1).prepare()
    while trial.release.split < 0.95:
        trial.run(1, steady(0.7, 0.75, trial.release.assigned))
    return trial.run(812, steady(0.7, 0.65))


def test_a_release_looks_as_it_did() -> None:
    trial = ramped()
    pieces = [releases.status(trial.view, trial.audit, (21, 19), NOW)]
    harmful = Trial.of(only=Audience(agents=["planner"])).prepare().run(3000, steady(0.7, 0.4))
    assert harmful.release.stage == "rolled_back"
    pieces.append(releases.status(harmful.view, harmful.audit, (0, 0), NOW))
    held = Trial.of().prepare().person("hold", "held", "lunch", held_in="canary")
    view = held.view.model_copy(update={"coverage": {"planner": drifted()}})
    pieces.append(releases.status(view, held.audit, (0, 0), NOW))
    early = Trial.of(ReleasePolicy(hold_split=True), margin=0.0)
    checking = early.view.model_copy(update={"doing": "check", "done": 1, "total": 3})
    pieces.append(releases.status(checking, early.audit, (0, 0), NOW))
    back = held_back()
    pieces.append(releases.status(back.view, back.audit, (3, 70), NOW, 1))
    check_widths("release-status", Group(*(one for it in pieces for one in (it, Text()))))


def test_lists_and_chains_look_as_they_did() -> None:
    trial = ramped().person("rollback", "rolled_back", split=0.0)
    rows = [trial.release, Trial.of(id="x-2", resource="x").release]
    trial.audit[1].evidence["slots"] = ["date", "name"]
    shown = [releases.RELEASES.table(rows, NOW), Text(), releases.history(trial.release, trial.audit)]
    check_widths("release-history", Group(*shown))


def test_resources_look_as_they_did() -> None:
    text = "Hi {name}.\nUse {{braces}}.\n"
    one = version("v1", "prompt", {"text": text, "sent": True}, author="ann")
    two = version("v2", "prompt", {"text": "Hello {name}!"}, parent="v1", note="shorter")
    frozen = version("v3", "prompt", {"text": "It is 2026-11-22 10:30. You are in /home/ann.", "sent": True})
    weights = version("v1", "model", {"upstream": "vllm", "base": "m", "adapter": "/a/1"}, name="policy")
    rule = StableRule(only=Audience(agents=["planner"], modes=["val"]), version="v2")
    view = ResourceView(
        name="planner", kind="prompt", stable=StableVersion(version="v1", rules=[rule]), versions=[one, two]
    )
    view.coverage = drifted()
    long = "You are a careful travel agent of Acme Air. Answer in one line. {name} asks. "
    alike = [version(f"v{at}", "prompt", {"text": long + end}) for at, end in ((1, "Ask first."), (2, "Never ask."))]
    model = ResourceView(name="policy", kind="model", stable=StableVersion(version="v1"), versions=[weights])
    pictures = [
        listed(ResourceList(resources=[view, model], unread={"encoding": 2, "nan": 1})),
        resources.resource(view.model_copy(update={"releases": ["planner-3"]}), NOW),
        resources.resource(model, NOW),
        resources.resource(view.model_copy(update={"versions": alike, "coverage": None}), NOW),
        resources.version(one),
        resources.difference(one, two),
        resources.difference(two, two),
        resources.added(two, [one]),
        resources.added(frozen, []),
        resources.added(one, [one]),
        resources.added(two, []),
        listed(ResourceList(resources=[view.model_copy(update={"versions": [two], "coverage": None})])),
    ]
    check_widths("resources", Group(*(piece for it in pictures for piece in (it, Text()))))


def listed(found: ResourceList) -> RenderableType:
    return resources.RESOURCES.picture(resources.listed(found), NOW)


def drifted() -> Coverage:
    where = TextDifference(version="v1", at=45, found="2026-11-23. Never", wanted="2026-11-22. Never")
    last = LastMiss(rollout="r31", at_ns=NOW - 4 * 10**9, why="miss", difference=where)
    return Coverage(
        since_ns=START, matched=1200, missed={"miss": 30, "nan": 4}, recent="+" * 20 + "-" * 12, last=last,
        fell_ns=NOW - 60 * 10**9, fell="20 of the last 32 rollouts matched, 95% or more did before",
    )  # fmt: skip


def test_proposals_look_as_they_did() -> None:
    template = Template.parse("Today is {date}.\nYou are {{careful}}, {name}.")
    one = PromptProposal(
        template, 40, 0.975, {"date": ["Monday", "Tuesday"], "name": ["Ann"]}, "planner", "0123456789abcdef"
    )
    two = PromptProposal(Template.parse("You are a judge."), 20, 1.0, {}, None, "fedcba9876543210")
    told = TextMatch(RegisteredText("planner", template), {"date": "Monday", "name": "A\x1b[31mnn"}, "00")
    pictures = [resources.proposals([(one, "planner"), (two, None)], 60, 0, 60)]
    pictures += [resources.proposals([], 50, 3, 19), resources.recognised(told)]
    check_widths("proposals", Group(*(piece for it in pictures for piece in (it, Text()))))


def version(number: str, kind: Any, content: dict[str, Any], **more: Any) -> Resource:
    given: dict[str, Any] = {"name": "planner", "version": number, "created_ns": START, "sha256": "ab" * 32}
    return Resource.model_validate(given | {"kind": kind, "content": content} | more)


def test_a_bar_is_full_at_the_limit_and_not_before() -> None:
    for value, shown in ((0.0, 0), (1.0, 0), (1e-200, 0), (7.08, 10), (49.9, 19), (50.0, 20), (1e150, 20)):
        assert bar(value, 50.0) == "█" * shown + "·" * (20 - shown)


def test_a_status_fits_its_terminal() -> None:
    trial = ramped()
    for width in (40, 80, 200):
        lines = text_of(releases.status(trial.view, trial.audit, (21, 19), NOW), width).splitlines()
        assert max(map(len, lines)) <= width
        assert "no loss" in "\n".join(lines)


def test_times_are_said_as_people_say_them() -> None:
    for days, said in (
        (12.0, "about 12.0 days"),
        (1.0, "about 1.0 days"),
        (0.5, "about 12.0 hours"),
        (1 / 48, "about 30.0 minutes"),
        (1e-5, "less than a minute"),
        (0.0, "less than a minute"),
    ):
        assert releases.days_in_words(days) == said


def saying(number: str, text: str) -> Resource:
    return version(number, "prompt", {"text": text})


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("Plan.\nBe brief.\n", "Plan.\r\nBe brief.\n", "-Plan.\n+Plan.␍\n Be brief."),
        ("Plan.\x0cBe brief.", "Plan.\nBe brief.", "-Plan.␌Be brief.\n+Plan.\n+Be brief."),
        ("Plan.\u2028Be brief.\n", "Plan.\nBe brief.\n", "-Plan.\u2028Be brief.\n+Plan.\n+Be brief."),
        ("Plan.\n", "Plan.\n\n", " Plan.\n+"),
        ("Plan.", "", "-Plan.\n-\\ no line break at the end"),
    ],
)
def test_texts_that_differ_in_line_breaks_only_do_not_say_the_same(before: str, after: str, shown: str) -> None:
    found = resources.difference(saying("v1", before), saying("v2", after)).plain
    assert shown in found
    assert "say the same" not in found


def test_a_version_says_the_same_as_itself() -> None:
    assert resources.difference(saying("v1", "Plan.\r\n"), saying("v1", "Plan.\r\n")).plain.endswith("say the same.")
