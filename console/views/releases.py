"""Releases for readers: their state in words and numbers, and drawn for a terminal. Pure.

The page (`console.views.pages`) shows the same things. Colours only repeat what words and signs say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.noun import NounRows, NounSelection, NounView
from penstock.console.views.table import (
    Column,
    Indented,
    Line,
    Listing,
    age,
    ago,
    asked_by,
    clean,
    duration,
    figure,
    joined,
    moment,
    plain,
)
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import ENDED, Arm, AuditTrailEntry, Forecast, Release, ReleaseStage, ReleaseView
from penstock.gateway.model.release_policy import EARLY, HOLDBACK, SRM_ALPHA, ReleasePolicy
from penstock.gateway.model.resource import Audience, Coverage, LastMiss, audience_terms
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.canary.decision import NEXT, harm_limit, margins_of

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Mark = Literal["done", "skipped", "failed", "now", "ahead"]
Figures = Mapping[str, float]
PREPARATION: tuple[ReleaseStage, ...] = ("draft", "checked", "replayed", "shadowed")
"""Stages before the canary, in order."""
ARMS = ("stable", "candidate")
GOOD = {
    EARLY: "without an early error",
    "error": "without an error",
    "violation": "without a violation",
    "latency": "in time",
    "cost": "cheapness",
}
"""The meaning of a guard's goodness for the rollouts of an arm, in words. Missing rewards are shown as a number
instead."""
SHARES = ("split", "share", "before", "agreement", "candidate", "incumbent", "candidate_errors", "live_errors")
"""Figures of the audit trail that are shares of 1."""
FIGURES = {
    "number": "last assignment",
    "seen": "counted",
    "d": "margin",
    "harm": "e-value of harm",
    "non_inferiority": "e-value of no loss",
    "early": "last early look",
    "answer_s": "seconds to answer",
    "until_ns": "calls before (ns)",
}
ARM_FIGURES = {"reward": "mean reward", "missing": "without a reward", "early": "early looks"}
"""Figures of the audit trail in words, and those of an arm."""
BAR = 20
"""Characters of a full bar, which stands for the limit."""
LAST = 5
"""Number of the chain's last entries that a status shows."""
SMALL_MARGIN = 0.01
"""Margin below which a share of the mean reward is too little to be seen."""
SIGNS = {"done": "✓", "skipped": "skipped", "failed": "✗", "now": "", "ahead": ""}
EVIDENCE = (
    Column("evidence"),
    Column("how far", 1),
    figure("e-value"),
    figure("limit", 2),
    Column("then"),
)
COLOURS = {"promoted": "green", "rolled_back": "red", "aborted": "yellow", "held": "magenta", "canary": "cyan"}


class ReleaseSelection(NounSelection):
    """The options of the list of releases."""

    live: bool = False
    """Only those that can still change what an agent gets."""


async def _fetch(client: Client, selection: ReleaseSelection) -> NounRows[Release]:
    none = "There are no releases yet: `penstock release start NAME --candidate VERSION` starts one."
    return NounRows(await client.releases(live=selection.live), "No release is live." if selection.live else none)


def _stage(release: Release) -> Text:
    waiting = f" ({release.waits})" if release.waits else ""
    return Text(clean(stage_name(release.stage) + waiting), style=COLOURS.get(release.stage, ""))


RELEASES = NounView[ReleaseSelection, Release](
    "releases",
    Release,
    _fetch,
    selection=ReleaseSelection,
    key=lambda one: one.id,
    columns={
        Column("release"): lambda one, _: plain(one.id),
        Column("stage"): lambda one, _: _stage(one),
        Column("from", 6): lambda one, _: plain(versions(one, "stable")),
        Column("to"): lambda one, _: plain(versions(one, "candidate")),
        figure("split", 4): lambda one, _: percent(share(one.stage, one.split)),
        figure("assigned", 2): lambda one, _: f"{one.assigned:,}",
        figure("counted", 1): lambda one, _: f"{one.counted:,}",
        figure("age", 3): lambda one, now_ns: age(one.created_ns, now_ns),
        Column("why", 5, narrows="fold", least=24): lambda one, _: plain(one.reason),
    },
    concerns=frozenset({"releases", "rollouts"}),
    every_s=5.0,
)


# -- for a terminal ----


def status(
    view: ReleaseView, audit: Sequence[AuditTrailEntry], awaited: tuple[int, int] | None, now_ns: int, last: int = LAST
) -> Group:
    """The state of a release, to fit a screen. `awaited`: assigned rollouts of each arm that are not counted yet."""
    release = view.release
    pieces: list[RenderableType] = [_head(release, now_ns), _way(path(release, audit)), plain(release.reason)]
    if release.assigned:
        found = decision_thresholds(release, view.figures)
        pieces += [Text(), _arms(view, awaited), *_notes(view), Text(), _evidence(found)]
    reach = [line for name, one in view.coverage.items() for line in coverage_lines(name, one, now_ns)]
    pieces += [Text(), *(joined("coverage", line) for line in reach)]
    pieces += [joined("waits for", clean(one)) for one in wait_conditions(view)]
    if len(audit) > last:
        pieces.append(
            Text(f"the last {last} of {len(audit)} changes; all: penstock release history {release.id}", "dim")
        )
    return Group(*pieces, *(entry(one, release) for one in audit[-last:]))


def _head(release: Release, now_ns: int) -> Text:
    only = audience(release.only)
    split = of_new(release.split, release) if release.stage == "canary" else ""
    change = f"{version_changes(release)}{f' for {only}' if only else ''}"
    since = f"for {age(release.changed_ns, now_ns)}"
    return joined(Text(clean(release.id), style="bold"), _stage(release), split, change, since)


def _way(steps: Iterable[StageStatus]) -> Text:
    """The path of a release: `draft ✓ → checked skipped → ▶ 5% → promoted`."""
    words = [
        Text(
            f"{'▶ ' if step.mark == 'now' else ''}{clean(step.name)} {SIGNS[step.mark]}".strip(),
            style="bold" if step.mark == "now" else "",
        )
        for step in steps
    ]
    return Text(" → ").join(words)


def _arms(view: ReleaseView, awaited: tuple[int, int] | None) -> Listing:
    release = view.release
    heads = (f"stable {clean(versions(release, 'stable'))}", f"candidate {clean(versions(release, 'candidate'))}")
    made = Listing(Column(" ", narrows="fold", least=12), *map(figure, heads))
    for row in arms(release, view.figures, awaited):
        made.add_row(*map(plain, row))
    return made


def _notes(view: ReleaseView) -> Iterator[Text]:
    for warning in view.warnings:
        yield joined(Text("warning", "bold yellow"), clean(warning))
    if (shown := difference(view)) is not None:
        yield joined("difference", shown)
    if left := left_out(view.release, view.figures):
        yield Text(
            f"{pluralized(left, view.release.policy.observation_noun[:-1])} left out: cancelled, or on both versions"
        )
    if (shown := units(view.release)) is not None:
        yield joined("units", clean(shown))


def _evidence(found: Iterable[EValueThreshold]) -> Listing:
    made = Listing(*EVIDENCE)
    for one in found:
        then = Text(one.follows)
        if one.crossed:
            then = Text(
                f"{one.follows} (reached)", "bold green" if one.follows in ("promotes", "passes") else "bold red"
            )
        made.add_row(plain(one.name), bar(one.value, one.limit), f"{one.value:.3g}", f"{one.limit:g}", then)
    return made


def bar(value: float, limit: float, size: int = BAR) -> str:
    """A bar for an e-value between 1 and its limit, on a logarithmic scale."""
    share = math.log(value) / math.log(limit) if value > 1 else 0.0
    full = min(size, int(share * size + 1e-9))
    return "█" * full + "·" * (size - full)


def entry(one: AuditTrailEntry, release: Release) -> Text:
    """An entry of the chain on a line."""
    who = "by the rules" if one.who == GATEWAY else f"by {clean(asked_by(one.who, one.key))}"
    what = f"{one.action.replace('_', ' ')} → {stage_name(one.after)}"
    at = Text(moment(one.at_ns)[:19], style="dim")
    return joined(at, clean(what), canary_share(one, release), who, clean(one.why))


def history(release: Release, entries: Sequence[AuditTrailEntry]) -> Group:
    """The whole chain with its evidence."""
    lines: list[RenderableType] = [joined(Text(clean(release.id), style="bold"), _stage(release))]
    for one in entries:
        lines.append(Text(f"{one.number:>3}  ").append_text(entry(one, release)))
        if found := [Text(clean(it), style="dim") for it in _evidence_words(one.evidence)]:
            lines.append(Indented(Line(*found), 5))
    return Group(*lines)


def canary_share(one: AuditTrailEntry, release: Release) -> str:
    """The share that gets the candidate after an entry that leads to the canary; else empty."""
    return of_new(one.split, release) if one.after == "canary" else ""


def _evidence_words(evidence: Mapping[str, Any]) -> Iterator[str]:
    """The evidence of an entry in words; what is empty, and what the entry says already, is left out."""
    for name, value in evidence.items():
        if name == "ok":
            yield "passed" if value else "not passed"
        elif name != "skipped" and value not in ({}, [], None):
            yield f"{_figure_name(name)} {_figure_value(name, value)}"


def _figure_name(name: str) -> str:
    """The name of a figure in words; an arm's goodness (`stable.error`) in those of `GOOD`."""
    if name.startswith(f"{HOLDBACK}."):
        return f"{HOLDBACK}: {_figure_name(name.removeprefix(f'{HOLDBACK}.'))}"
    arm, _, last = name.partition(".")
    if arm == "guard":
        guard, _, test = last.partition(".")
        return f"e-value of {'no loss in ' if test else ''}guard {guard.replace('_', ' ')}"
    if arm == "srm":
        return f"e-value of the split in {last}"
    if arm in ARMS and last:
        return f"{arm} {ARM_FIGURES.get(last) or GOOD.get(last) or last.replace('_', ' ')}"
    return FIGURES.get(name) or name.replace("_", " ")


def _figure_value(name: str, value: Any) -> str:
    last = name.rpartition(".")[2]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        value = cast("dict[str, Any]", value)
        return ", ".join(f"{_figure_name(key)} {_figure_value('', it)}" for key, it in value.items())
    if isinstance(value, list):
        return ", ".join(str(it) for it in cast("list[Any]", value))
    if isinstance(value, int | float) and (name in SHARES or (last in GOOD and last != "cost" and "guard" not in name)):
        return percent(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def of_new(share: float, release: Release) -> str:
    """A share of a release's new rollouts, or units: `20% of new rollouts`."""
    return f"{percent(share)} of new {release.policy.observation_noun}"


def percent(share: float) -> str:
    """A share of 1 in percent, with up to three digits: 2.5%."""
    return f"{share * 100:.3g}%"


def started(release: Release, expected: Forecast | None = None) -> Text:
    """A sentence about a release that was just started, and its forecast."""
    name = clean(release.id)
    said = Text(f"{name} is started: {clean(version_changes(release))}. penstock release watch {name}")
    return said if expected is None else said.append(f"\n{forecast_text(release, expected)}")


def forecast_text(release: Release, expected: Forecast) -> str:
    """The forecast for a release with an equal candidate, in sentences."""
    if expected.rollouts is None and expected.mean is not None:
        return "No forecast: with this policy a release may take more rollouts than are simulated for one."
    if expected.rollouts is None or expected.held is None or expected.mean is None:
        return "No forecast: too few rollouts of the stable version have a reward."
    days = "" if expected.days is None else f", {days_in_words(expected.days)} at {expected.per_day or 0:,.0f} a day"
    taken = f"{expected.rollouts:,} rollouts{', each of another unit' if release.policy.by_unit else ''}"
    margin = "" if release.policy.hold_split else f" and a margin of {release.margin:.3g}"
    held = round(expected.held * expected.played)
    mostly = 2 * held > expected.played
    ends = "held for a person" if mostly else "decided"
    return (
        f"Forecast for an equal candidate, at a mean reward of {expected.mean:.2f}{margin}: "
        f"{ends} after about {taken}{days}; {held} of {expected.played} simulated releases were held."
        f"{_advice(release) if mostly else ''}"
    )


def _advice(release: Release) -> str:
    """The way out of a forecast in which most releases are held."""
    if not release.policy.hold_split and release.margin < SMALL_MARGIN:
        return " The margin is a share of the mean reward, which is near 0: set margin_absolute in the policy."
    return " A larger margin, a longer horizon or a reward that says more would decide more of them."


def days_in_words(days: float) -> str:
    """A length of time in its largest fitting unit: `about 2.5 days`."""
    for unit, size in (("days", 1.0), ("hours", 1 / 24), ("minutes", 1 / 1440)):
        if days >= size:
            return f"about {days / size:.1f} {unit}"
    return "less than a minute"


def decided(release: Release) -> Text:
    """The state of a release after a person's decision, on a line."""
    return joined(clean(release.id), _stage(release), clean(release.reason))


# -- in words and numbers: the path, the arms, the evidence against the limits ----


class StageStatus(NamedTuple):
    """A stage on the path of a release."""

    name: str
    mark: Mark


class ArmRow(NamedTuple):
    """A figure of both arms."""

    name: str
    stable: str
    candidate: str


class EValueThreshold(NamedTuple):
    """An e-value and the limit at which the gateway acts."""

    name: str
    value: float
    limit: float
    follows: str
    """The gateway's action at the limit: `rolls back`, `promotes`, `passes`, `holds`, or `nothing`."""
    figure: str
    """Name of the value among the release's figures."""

    @property
    def crossed(self) -> bool:
        """True if the value has reached its limit."""
        return self.value >= self.limit


def highest_stage(release: Release, audit: Sequence[AuditTrailEntry]) -> tuple[ReleaseStage, int]:
    """(the last stage on the way up, the step of its canary): where it stands, was held, or ended."""
    on_the_way = [entry for entry in audit if entry.after in (*PREPARATION, "canary")]
    return (on_the_way[-1].after, on_the_way[-1].step) if on_the_way else ("draft", 0)


def share(stage: ReleaseStage, split: float) -> float:
    """The share of new rollouts that get the candidate."""
    return split if stage == "canary" else 1.0 if stage == "promoted" else 0.0


def path(release: Release, audit: Sequence[AuditTrailEntry]) -> list[StageStatus]:
    """Every stage on the path, and how far the release has come."""
    stage, step = highest_stage(release, audit)
    passed: dict[ReleaseStage, AuditTrailEntry] = {entry.after: entry for entry in audit if entry.after in PREPARATION}
    current = NEXT.get(stage)
    steps = [StageStatus(name, _preparation(name, passed, name == current and release.live)) for name in PREPARATION]
    steps += [StageStatus(one.name, _canary(at, stage, step, release)) for at, one in enumerate(release.policy.ramp)]
    return [*steps, StageStatus("promoted", "done" if release.stage == "promoted" else "ahead")]


def _preparation(name: ReleaseStage, passed: Mapping[ReleaseStage, AuditTrailEntry], now: bool) -> Mark:
    entry = passed.get(name)
    if entry is None:
        return "now" if now else "ahead"
    if entry.evidence.get("skipped"):
        return "skipped"
    return "failed" if entry.evidence.get("ok") is False else "done"


def _canary(at: int, stage: ReleaseStage, step: int, release: Release) -> Mark:
    if stage != "canary" or at > step:
        return "skipped" if release.stage == "promoted" else "ahead"
    ended_here = at == step and release.stage != "promoted"
    return "now" if ended_here and release.live else "failed" if ended_here else "done"


def arms(release: Release, figures: Figures, awaited: tuple[int, int] | None = None) -> Iterator[ArmRow]:
    """The figures of both arms side by side; of the holdback once it has begun. `awaited`: assigned rollouts of each
    arm that are not counted yet; None if not known."""
    figures, where = latest(figures)
    seen = [int(figures.get(f"{arm}.assigned", 0)) for arm in ARMS]
    missing = [int(figures.get(f"{arm}.missing", 0)) for arm in ARMS]
    if awaited is not None:
        yield _row("assigned", [f"{sum(pair):,}" for pair in zip(seen, awaited, strict=True)])
    if EARLY in release.policy.guard_alphas:
        yield _row("looked at early", [f"{int(figures.get(f'{arm}.early', 0)):,}" for arm in ARMS])
    yield _row(f"counted{where}", [f"{count:,}" for count in seen])
    yield _row("missing", [f"{count:,}" for count in missing])
    lost = [0, 0] if release.policy.missing == "worst" else missing
    rewarded = [count - without for count, without in zip(seen, lost, strict=True)]
    means = [figures.get(f"{arm}.reward") for arm in ARMS]
    shown = [f"{_mean(mean)} ({n:,})" for mean, n in zip(means, rewarded, strict=True)]
    yield _row(reward_name(release.policy), shown)
    for name in filter(GOOD.__contains__, release.policy.guard_alphas):
        yield _row(GOOD[name], [_mean(figures.get(f"{arm}.{name}")) for arm in ARMS])
    yield _row("hard violations", [f"{int(figures.get(f'{arm}.violations', 0)):,}" for arm in ARMS])


def latest(figures: Figures) -> tuple[Figures, str]:
    """(the figures of the holdback if there are any, else all; the place of these figures in words)."""
    begun = f"{HOLDBACK}."
    found = {name.removeprefix(begun): value for name, value in figures.items() if name.startswith(begun)}
    return (found, f" in the {HOLDBACK}") if found else (figures, "")


def _row(name: str, values: Sequence[str]) -> ArmRow:
    return ArmRow(name, values[0], values[1])


def _mean(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def reward_name(policy: ReleasePolicy) -> str:
    """The name of the reward's row: statistics see the reward mapped to 0 (worst) to 1 (best)."""
    dimension = "reward" if policy.reward is None else policy.reward
    mapped = policy.reward_range != (0.0, 1.0)
    return f"mean {dimension} (n)" if not mapped else f"mean {dimension}, as 0 to 1 (n)"


def ramp_thresholds(release: Release, figures: Figures) -> list[EValueThreshold]:
    """The e-values of the ramp against their limits, the reward's first."""
    policy = release.policy
    better, then = (
        ("better than stable", "nothing") if policy.hold_split else (f"no loss of {release.margin:.3g}", "promotes")
    )
    found = [
        _measure("harm", "harm", figures, 1 / policy.alpha, "rolls back"),
        _measure(better, "non_inferiority", figures, 1 / policy.alpha_promote, then),
    ]
    for name, alpha in policy.guard_alphas.items():
        found.append(_measure(f"guard {name}", f"guard.{name}", figures, 1 / alpha, "rolls back"))
    return [*found, *_splits(figures, "srm.")]


def decision_thresholds(release: Release, figures: Figures) -> list[EValueThreshold]:
    """The e-values that the present decisions depend on: those of the ramp, or of the holdback once it has begun."""
    if latest(figures)[1]:
        return list(_held_back(release.policy, figures))
    return [*ramp_thresholds(release, figures), *promotion_thresholds(release, figures)]


def _measure(name: str, figure: str, figures: Figures, limit: float, follows: str) -> EValueThreshold:
    return EValueThreshold(name, figures.get(figure, 1.0), limit, follows, figure)


def _splits(figures: Figures, prefix: str) -> Iterator[EValueThreshold]:
    for name in figures:
        if name.startswith(prefix):
            yield _measure(f"split in {name.removeprefix(prefix)}", name, figures, 1 / SRM_ALPHA, "holds")


def _held_back(policy: ReleasePolicy, figures: Figures) -> Iterator[EValueThreshold]:
    alphas = {"harm": policy.alpha} | {f"guard.{name}": alpha for name, alpha in policy.guard_alphas.items()}
    for name, alpha in alphas.items():
        limit = harm_limit(policy, alpha, held_back=True)
        yield _measure(name.replace(".", " "), f"{HOLDBACK}.{name}", figures, limit, "rolls back")
    yield from _splits(figures, f"{HOLDBACK}.srm.")


def promotion_thresholds(release: Release, figures: Figures) -> list[EValueThreshold]:
    """The e-values of guards that must reach their limit before a promotion."""
    limit = 1 / release.policy.alpha_promote
    return [
        _measure(f"{name} by {d:.2g}", f"guard.{name}.non_inferiority", figures, limit, "passes")
        for name, d in margins_of(release).items()
    ]


def audience(only: Audience) -> str:
    """The audience in words; empty for everybody."""
    return " ".join(audience_terms(only))


def version_changes(release: Release) -> str:
    """The change of versions: `run.0 → run.20, shop v1 → v2`; the release's own resource is not named."""
    before, after = release.arm_versions("stable"), release.arm_versions("candidate")
    return ", ".join(
        f"{'' if name == release.resource else name + ' '}{before[name]} → {after[name]}" for name in release.resources
    )


def versions(release: Release, arm: Arm) -> str:
    """The versions that an arm gets: `run.20 + shop v2`."""
    (_, first), *others = release.arm_versions(arm).items()
    return " + ".join([first, *(f"{name} {version}" for name, version in others)])


def release_result(view: ReleaseView) -> str:
    """A sentence that says in plain words how a release stands, by the tests that decide it."""
    release, policy, name = view.release, view.release.policy, versions(view.release, "candidate")
    found = view.figures if release.stage != "rolled_back" else latest(view.figures)[0]
    means, seen = [found.get(f"{arm}.reward") for arm in ARMS], int(found.get("seen", 0))
    why = f": {release.reason.rstrip('.')}" if release.reason else ""
    against, sound = "", ramp_thresholds(release, view.figures)[1]
    if means[0] is not None and means[1] is not None:
        against = f"{means[1]:.3f} against {means[0]:.3f} in {seen:,} {policy.observation_noun}"
    if release.stage == "rolled_back":
        harmed = against and decision_thresholds(release, view.figures)[0].crossed
        return f"{name} was worse: {against}. It was rolled back." if harmed else f"{name} was rolled back{why}."
    if release.stage == "promoted":
        better = f"no worse: {against}; a loss of {release.margin:.3g} or more is excluded"
        better = better if release.margin else f"better: {against}"
        return f"{name} was {better}." if against and sound.crossed else f"{name} was promoted{why}."
    if release.stage == "held" and against and seen >= policy.horizon and not sound.crossed:
        loss = (
            f"no harm, nor does it exclude a loss of {release.margin:.3g}" if release.margin else "no harm, nor a gain"
        )
        return f"Not decided: {name} has {against}; that shows {loss}."
    if release.stage in ("held", "aborted"):
        return f"Not decided: {name} was {release.stage}{why}."
    if release.stage != "canary":
        return f"Not started: no rollout has had {name} yet."
    if not against:
        rewarded = seen - sum(int(found.get(f"{arm}.missing", 0)) for arm in ARMS)
        return f"Not enough data yet: {rewarded:,} of {release.assigned:,} {policy.observation_noun} have a reward."
    if sound.crossed:
        return f"So far, {name} is {'no worse' if release.margin else 'better'}: {against}."
    return (
        f"Not decided yet: {name} has {against}; {sound.name} has an e-value of {sound.value:.3g} of {sound.limit:g}."
    )


def wait_conditions(view: ReleaseView) -> Iterator[str]:
    """The conditions for the release's next move, a sentence each."""
    release = view.release
    if release.stage in ENDED:
        return
    if release.stage == "held":
        yield "a person: resume, promote, rollback or abort"
        return
    if view.doing is not None:
        of = f": {view.done:,} of {view.total:,}" if view.total else ""
        yield f"its {view.doing}{of}"
    if view.doing == "rehearsal":
        yield f"your agent: penstock release rehearse {release.id} -- COMMAND"
    if release.waits == "approval":
        yield f"a person: penstock release approve {release.id}"
    if release.stage == "canary":
        yield from _outcomes(view)


def _outcomes(view: ReleaseView) -> Iterator[str]:
    release = view.release
    policy, stage = release.policy, release.policy.ramp[release.step]
    if view.waiting:
        outcomes = "outcome" if view.waiting == 1 else "outcomes"
        oldest = (
            "" if view.oldest is None else f": the oldest is {view.oldest}, since {moment(view.oldest_ns or 0)[:19]}"
        )
        # A unit waits until its window ends, and then for the rollouts that began in it.
        longest = duration(int(policy.outcome_deadline_s * (1 + policy.by_unit) * 1e9))
        yield f"{view.waiting:,} {outcomes}, each for {longest} at most{oldest}"
    if view.waiting_early:
        looks = "early look" if view.waiting_early == 1 else "early looks"
        longest = duration(int(policy.early_deadline_s * 1e9))
        yield f"{view.waiting_early:,} {looks} for errors, each for {longest} at most"
    if release.waits is None and stage.name == HOLDBACK:
        there = f"{view.rewarded:,} of {stage.rollouts:,} {policy.observation_noun} in the {HOLDBACK}"
        yield f"{there}; without harm it is promoted then"
    elif release.waits is None:
        yield from _awaited(view, stage.name, stage.rollouts)


def _awaited(view: ReleaseView, stage: str, rollouts: int) -> Iterator[str]:
    """The condition under which a stage of the ramp ends."""
    release, policy = view.release, view.release.policy
    last, seconds = release.step == len(policy.stages) - 1, policy.stages[release.step].seconds
    pieces: list[str] = []
    long = duration(int(seconds * 1e9)) if seconds else ""
    if view.rewarded < rollouts:
        there = f"{view.rewarded:,} of {rollouts:,} rewarded {policy.observation_noun} on the candidate in {stage}"
        pieces.append(f"{there} and {long}" if long else there)
    elif long:
        pieces.append(f"{long} in {stage}")
    if last and policy.hold_split:
        pieces.append("only harm or a person ends it" if pieces else "harm or a person; nothing else ends it")
    elif last:
        sound = "no loss beyond the margin" + (", in no guard either" if margins_of(release) else "")
        pieces.append(f"then {sound}" if pieces else sound)
    if pieces:
        yield "; ".join(pieces)


def units(release: Release) -> str | None:
    """The numbers of units and rollouts, in a sentence; None where each rollout is assigned by itself."""
    if not release.policy.by_unit:
        return None
    unnamed = pluralized(release.unnamed, "rollout")
    each = f"; {unnamed} without it, each a unit of its own" if release.unnamed else ""
    return f"by {release.policy.unit}: {release.assigned:,}, of {release.assigned + release.joined:,} rollouts{each}"


def difference(view: ReleaseView) -> str | None:
    """Candidate less stable with its confidence sequence; None while there is no reward of both."""
    less = mean_difference(view.figures)
    if view.interval is None or less is None:
        return None
    low, high = view.interval
    return f"{less:+.3f}, between {low:+.3f} and {high:+.3f} (95 % confidence sequence)"


def mean_difference(figures: Figures) -> float | None:
    """The candidate's mean reward less the stable's; None while there is no reward of both."""
    stable, candidate = (latest(figures)[0].get(f"{arm}.reward") for arm in ARMS)
    return None if stable is None or candidate is None else candidate - stable


def left_out(release: Release, figures: Figures) -> int:
    """The number of rollouts whose turn has come and that no statistic counts: they have seen both versions, or were
    cancelled."""
    return release.counted - int(figures.get("seen", 0)) - int(figures.get(f"{HOLDBACK}.seen", 0))


def stage_name(stage: ReleaseStage | None) -> str:
    """A stage in words; empty for None."""
    return "" if stage is None else stage.replace("_", " ")


# -- the coverage of prompts: how many calls they match ----


SHOWN = 40
"""Maximum number of characters of a text, and of a version's text, that are shown."""
WORDS = {
    "miss": "no registered text",
    "ambiguous": "two ways to read it",
    "slots": "other slots",
    "unknown": "no version",
    "encoding": "content encoding",
    "utf8": "no UTF-8",
    "nan": "NaN or Infinity",
    "depth": "too deep, or endless numbers",
    "shape": "not this API",
    "json": "no JSON",
}
"""The reasons why a call passed unchanged, in words."""


def coverage_brief(coverage: Coverage | None) -> str:
    """The coverage for a cell: `98.0% of 1,234`, and `fell` if it fell; empty for None."""
    if coverage is None:
        return ""
    share = f"{coverage.matched / _calls(coverage):.1%} of {_calls(coverage):,}"
    return share if coverage.fell_ns is None else f"{share}, fell"


def _calls(coverage: Coverage) -> int:
    return coverage.matched + sum(coverage.missed.values())


def coverage_lines(name: str, coverage: Coverage, now_ns: int) -> Iterator[str]:
    """A resource's coverage: how many matched, how many missed and why, the last miss, and a fall."""
    calls = _calls(coverage)
    missed = f"; {miss_reasons(coverage.missed)}" if coverage.missed else ""
    yield f"{name}: {coverage.matched:,} of {calls:,} calls matched{missed}"
    if coverage.last is not None:
        yield _miss(coverage.last, now_ns)
    if coverage.fell_ns is not None:
        yield f"fell {ago(coverage.fell_ns, now_ns)}: {coverage.fell}"


def miss_reasons(counts: Mapping[str, int]) -> str:
    """The counts by reason, the largest first: `30 no registered text, 4 two ways to read it`."""
    return ", ".join(f"{count:,} {WORDS[why]}" for why, count in sorted(counts.items(), key=lambda it: -it[1]))


def _miss(last: LastMiss, now_ns: int) -> str:
    where = last.difference
    said = f"last miss: rollout {last.rollout}, {ago(last.at_ns, now_ns)}, {WORDS[last.why]}"
    if where is None:
        return said
    there = f"{where.found[:SHOWN]!r} stands" if where.found else "the text ends"
    asked = f"{where.wanted[:SHOWN]!r}" if where.wanted else "its end"
    return f"{said}: at character {where.at:,} {there} where {where.version} has {asked}"
