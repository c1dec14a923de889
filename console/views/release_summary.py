"""The state of a release in words and numbers: its path, its arms, its evidence against the limits. Pure.

The terminal (`console.views.releases`) and the page (`console.views.release_page`) show the same things, so these
are computed here, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from penstock.console.views.table import duration, moment
from penstock.gateway.model.release import ENDED, Arm, AuditTrailEntry, Release, ReleaseStage, ReleaseView
from penstock.gateway.model.release_policy import EARLY, HOLDBACK, SRM_ALPHA, ReleasePolicy
from penstock.gateway.model.resource import Audience, audience_terms
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.canary.decision import NEXT, harm_limit, margins_of

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
    """The gateway's action at the limit: `rolls back`, `promotes`, `promotion_thresholds`, `holds`, or `nothing`."""
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
    stable, candidate = (latest(view.figures)[0].get(f"{arm}.reward") for arm in ARMS)
    if view.interval is None or stable is None or candidate is None:
        return None
    low, high = view.interval
    return f"{candidate - stable:+.3f}, between {low:+.3f} and {high:+.3f} (95 % confidence sequence)"


def left_out(release: Release, figures: Figures) -> int:
    """The number of rollouts whose turn has come and that no statistic counts: they have seen both versions, or were
    cancelled."""
    return release.counted - int(figures.get("seen", 0)) - int(figures.get(f"{HOLDBACK}.seen", 0))


def stage_name(stage: ReleaseStage | None) -> str:
    """A stage in words; empty for None."""
    return "" if stage is None else stage.replace("_", " ")
