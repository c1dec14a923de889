"""Decides what to do after each rollout, in assignment order. Pure.

The first rule that applies counts. Hard violations and harm (reward, then guards) roll back. A split or outcomes that
cannot be trusted hold. A complete stage is left, the last one once a loss of the margin or more is excluded, of the
reward and in every guard. The horizon holds. Then comes the holdback: nearly all new rollouts get the candidate, harm
is tested anew with what is left of the error probability, and after a number of rollouts without harm the candidate is
promoted; without a holdback it is promoted at once. The live driver, `penstock release verify` and the simulations all
step the same `Canary`, so the same observations give the same verdict at the same rollout with the same figures, bit
for bit.

Early errors are seen by `step_early`, which runs ahead of `step`: a candidate that fails all its calls is rolled back
while its rewards are still awaited.

A verdict other than `continue` and `advance` ends the stepping until a person acts: `approve` where a stage asks for
it, or `resume` after a hold, which sets that cause of holding aside for good (the e-values need no correction: they
allow any looking, stopping and going on). Both take effect at the rollout that was looked at last.

A canary is replayed from the tape when a gateway starts, and to verify one that ran (`canary.verification`).

The moves between stages, and a fall of a resource's coverage, are decided here too. `interval` and `warnings` are for
people.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import ENDED, Assignment, AssignmentEvidence, AuditTrailEntry, Release, ReleaseStage
from penstock.gateway.model.release_policy import EARLY, HOLDBACK, MISSING, SRM_ALPHA, CanaryStage, ReleasePolicy
from penstock.gateway.model.resource import Coverage
from penstock.gateway.releases.canary.evidence import CanaryEvidence, CanaryObservation, RewardTest, StageCount
from penstock.gateway.releases.canary.outcomes import observation

CanaryAction = Literal["continue", "advance", "promote", "roll_back", "hold"]
BY_RULE = ("advance", "promote", "roll_back", "hold")
"""Verdicts that move a release; the chain's actions have the same names."""
FEW = 50
"""With fewer rollouts than this, missing rewards are no reason to hold."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a release after a rollout, and its reason."""

    action: CanaryAction
    cause: str = ""
    """The rule that decided: `violations`, `harm`, `guard:NAME`, `srm:STAGE`, `missing`, `stage`, `approval`,
    `non-inferiority`, `horizon`, `holdback`; empty while nothing is decided.
    """
    reason: str = "the evidence does not decide yet"
    """One sentence with figures."""
    number: int = -1
    """The rollout after which it was decided."""
    figures: dict[str, float] = field(default_factory=dict[str, float])
    """All evidence at that moment, by name; the same bits wherever it is recomputed. Empty while nothing is decided."""


CONTINUE = Verdict("continue")


def decide(
    policy: ReleasePolicy,
    stage: int,
    evidence: CanaryEvidence,
    *,
    approved: bool = False,
    waived: Collection[str] = (),
    srm_alpha: float = SRM_ALPHA,
) -> Verdict:
    """The verdict on all that has been seen. `stage`: index in `ReleasePolicy.ramp` of the stage that new rollouts are
    assigned in.

    `approved`: whether a person lets this stage be left. `waived`: causes of holding that a person has set aside.
    """
    if violated := hard_stop(sum(book.violations[1] for book in evidence.books)):
        return _verdict("roll_back", "violations", violated, evidence)
    for found in (_harm(policy, evidence), _mistrust(policy, evidence, waived, srm_alpha)):
        if found is not None:
            return found
    if stage == len(policy.stages):
        return _watched(policy, evidence) or CONTINUE
    found = None
    if _complete(policy.stages[stage], evidence):
        found = _move(policy, stage, evidence, approved)
    if found is None and evidence.seen >= policy.horizon and "horizon" not in waived:
        return _verdict("hold", "horizon", _undecided(policy, evidence), evidence)
    return found or CONTINUE


def hard_stop(violations: int) -> str | None:
    """The reason why a release with so many hard violations on the candidate ends at once; None if it does not. For
    a driver that sees one before the outcomes of earlier rollouts are known; `decide` says the same when its turn
    comes."""
    return f"violations: {violations} hard violations on the candidate, none is allowed" if violations else None


class Canary:
    """A release under way: policy, evidence and stage. Steps until a verdict ends it."""

    def __init__(
        self, policy: ReleasePolicy, d: float, srm_alpha: float = SRM_ALPHA, margins: Mapping[str, float] | None = None
    ) -> None:
        """`d`: the margin as a difference in [0, 1], as `ReleasePolicy.d` gave it at the start; `margins`: those of
        guards, as `ReleasePolicy.guard_margins` gave them then; the least ones unless given."""
        self.policy = policy
        self._srm_alpha = srm_alpha
        every = policy.guard_margins({}) if margins is None else margins
        last = policy.ramp[-1].split if policy.has_holdback else None
        self.evidence = CanaryEvidence(
            d, tuple(policy.guard_alphas), every, policy.missing == "worst", last, policy.observation_noun
        )
        self.stage = 0
        self.verdict = CONTINUE
        self._approved = False
        self._waived: set[str] = set()

    @classmethod
    def of(cls, release: Release) -> Canary:
        """The canary of a release, before its first rollout."""
        return cls(release.policy, release.margin, margins=margins_of(release))

    @property
    def ended(self) -> bool:
        """True after a promotion or a rollback, and while held."""
        return self.verdict.action in ("promote", "roll_back", "hold")

    def step(self, observation: CanaryObservation) -> Verdict:
        """Takes the next rollout in assignment order. Raises `ValueError` when it is ended or out of order."""
        self._refuse_more(observation.number)
        self.evidence.add(observation)
        return self._decide()

    def _refuse_more(self, number: int) -> None:
        if self.ended:
            raise ValueError(f"rollout {number}: the release has ended: {self.verdict.reason}")

    def step_early(self, number: int, arm: int, probability: float, good: float) -> Verdict | None:
        """Takes the early look at the next rollout in assignment order, which may be far ahead of `step`. Returns the
        verdict if it rolls back; None while it changes nothing. Raises `ValueError` when ended or out of order."""
        self._refuse_more(number)
        self.evidence.add_early(number, arm, probability, good)
        watch = self.evidence.watch
        book = watch if watch is not None and watch.early == number else self.evidence
        found = _guard_harm(self.policy, self.evidence, book, EARLY)
        if found is not None:
            self.verdict = found
        return found

    def approve(self) -> Verdict:
        """Records that a person lets the present stage be left, now or when it is complete. Raises `ValueError` when
        ended."""
        if self.ended:
            raise ValueError(f"nothing is left to approve: {self.verdict.reason}")
        self._approved = True
        return self._decide()

    def resume(self) -> Verdict:
        """Records that a person sets aside the cause of holding. Raises `ValueError` when the release is not held."""
        if self.verdict.action != "hold":
            raise ValueError(f"only a release that is held can be resumed; this one: {self.verdict.action}")
        self._waived.add(self.verdict.cause)
        return self._decide()

    def _decide(self) -> Verdict:
        self.verdict = decide(
            self.policy,
            self.stage,
            self.evidence,
            approved=self._approved,
            waived=self._waived,
            srm_alpha=self._srm_alpha,
        )
        if self.verdict.action == "advance":
            self.stage += 1
            self._approved = False
        return self.verdict


def margins_of(release: Release) -> dict[str, float]:
    """The margins of all guards of a release, also of a guard for which its start has recorded none."""
    return release.policy.guard_margins({}) | release.guard_margins


def stage_progress(release: Release, evidence: CanaryEvidence) -> int:
    """The number of rollouts that count for leaving the present stage: those with a reward on the candidate, or, in the
    holdback, all."""
    stage = release.policy.ramp[release.step]
    if stage.name == HOLDBACK:
        return 0 if evidence.watch is None else evidence.watch.seen
    count = evidence.stages.get(stage.name)
    return 0 if count is None else count.outcomes[1]


def figures(evidence: CanaryEvidence) -> dict[str, float]:
    """All figures of the evidence, by name; means of arms without rewards are left out. Those of the holdback are named
    `holdback.NAME`."""
    found: dict[str, float] = {
        "number": evidence.number,
        "seen": evidence.seen,
        "d": evidence.reward.d,
        "harm": evidence.harm,
        "non_inferiority": evidence.non_inferiority,
    }
    for name, guard in evidence.guards.items():
        found[f"guard.{name}"] = guard.harm
        if guard.has_margin:
            found[f"guard.{name}.non_inferiority"] = guard.non_inferiority
    found |= {f"srm.{name}": count.bayes for name, count in evidence.stages.items()}
    if EARLY in evidence.guards:
        found["early"] = evidence.early
    for arm, name in enumerate(("stable", "candidate")):
        found |= {f"{name}.assigned": evidence.assigned[arm], f"{name}.missing": evidence.missing[arm]}
        found |= {f"{name}.violations": evidence.violations[arm]}
        if EARLY in evidence.guards:
            found[f"{name}.early"] = evidence.guards[EARLY].arms[arm].count
        if (mean := evidence.reward.arms[arm].mean) is not None:
            found[f"{name}.reward"] = mean
        found |= {
            f"{name}.{key}": mean
            for key, one in evidence.guards.items()
            if key != MISSING and (mean := one.arms[arm].mean) is not None
        }
    if evidence.watch is not None and max(evidence.watch.number, evidence.watch.early) >= 0:
        found |= {f"{HOLDBACK}.{name}": value for name, value in figures(evidence.watch).items()}
    return found


def harm_limit(policy: ReleasePolicy, alpha: float, *, held_back: bool) -> float:
    """The e-value at which a test with this error probability rolls back: in the ramp, or in the holdback."""
    return 1 / (alpha * policy.holdback_scale if held_back else alpha)


def _harm(policy: ReleasePolicy, evidence: CanaryEvidence) -> Verdict | None:
    for book in evidence.books:
        limit = harm_limit(policy, policy.alpha, held_back=book is not evidence)
        if (harm := book.harm) >= limit:
            reason = f"harm: e = {harm:.4g} >= {limit:.4g} {_after(evidence, book)}"
            return _verdict("roll_back", "harm", reason, evidence)
        for name in book.guards:
            if found := _guard_harm(policy, evidence, book, name):
                return found
    return None


def _guard_harm(policy: ReleasePolicy, evidence: CanaryEvidence, book: CanaryEvidence, name: str) -> Verdict | None:
    harm, limit = book.guards[name].harm, harm_limit(policy, policy.guard_alphas[name], held_back=book is not evidence)
    if harm < limit:
        return None
    after = _after_early(evidence, book) if name == EARLY else _after(evidence, book)
    return _verdict("roll_back", f"guard:{name}", f"guard {name}: e = {harm:.4g} >= {limit:.4g} {after}", evidence)


def _mistrust(
    policy: ReleasePolicy, evidence: CanaryEvidence, waived: Collection[str], srm_alpha: float
) -> Verdict | None:
    limit = 1 / srm_alpha
    for book in evidence.books:
        for name, count in book.stages.items():
            if count.bayes >= limit and f"srm:{name}" not in waived:
                return _verdict("hold", f"srm:{name}", _lopsided(name, count, limit, book.counts), evidence)
        missing = book.seen - book.rewarded
        if book.seen >= FEW and missing > policy.missing_limit * book.seen and "missing" not in waived:
            of = f"{book.seen} {book.counts}"
            reason = f"missing: {missing} of {of} have no reward, more than {policy.missing_limit:.0%}"
            return _verdict("hold", "missing", reason, evidence)
    return None


def _watched(policy: ReleasePolicy, evidence: CanaryEvidence) -> Verdict | None:
    """The verdict at the end of the holdback; None before."""
    watch = evidence.watch
    if watch is None or watch.seen < policy.holdback.rollouts:
        return None
    return _verdict("promote", HOLDBACK, f"{HOLDBACK}: no harm {_after(evidence, watch)}", evidence)


def _complete(stage: CanaryStage, evidence: CanaryEvidence) -> bool:
    count = evidence.stages.get(stage.name)
    if count is None:
        return False
    long_enough = evidence.assigned_ns - count.began_ns >= stage.seconds * 1e9
    return count.outcomes[1] >= stage.rollouts and long_enough


def _move(policy: ReleasePolicy, index: int, evidence: CanaryEvidence, approved: bool) -> Verdict | None:
    """The move out of a complete stage; None while the evidence is not there yet."""
    stage, last = policy.stages[index], index == len(policy.stages) - 1
    if last and policy.hold_split:
        return None
    if last and not _no_worse(policy, evidence):
        return None
    reason = _passed(evidence) if last else f"stage {stage.name} is complete"
    if stage.approval and not approved:
        return _verdict("continue", "approval", f"{reason}; a person must approve {_after(evidence)}", evidence)
    cause = "non-inferiority" if last else "stage"
    promoted = last and not policy.has_holdback
    return _verdict("promote" if promoted else "advance", cause, f"{reason} {_after(evidence)}", evidence)


def _no_worse(policy: ReleasePolicy, evidence: CanaryEvidence) -> bool:
    """True if a loss of the margin or more is excluded, of the reward and in every guard."""
    limit = 1 / policy.alpha_promote
    return evidence.non_inferiority >= limit and not _lagging(evidence, limit)


def _lagging(evidence: CanaryEvidence, limit: float) -> list[str]:
    """The guards in which a loss of the margin or more is not excluded."""
    return [name for name, one in evidence.guards.items() if one.has_margin and one.non_inferiority < limit]


def _passed(evidence: CanaryEvidence) -> str:
    """Without e-values and margins, which are among the figures."""
    d, held = evidence.reward.d, sum(one.has_margin for one in evidence.guards.values())
    guards = f"all {held} guards hold" if held > 1 else "the guard holds" if held else ""
    return f"{f'no worse (margin {d:.4g})' if d else 'better'}: {_means(evidence)}{guards}".rstrip(":; ")


def _means(evidence: CanaryEvidence) -> str:
    stable, candidate = (arm.mean for arm in evidence.reward.arms)
    return "" if stable is None or candidate is None else f"mean reward {candidate:.3f} against {stable:.3f}; "


def _verdict(action: CanaryAction, cause: str, reason: str, evidence: CanaryEvidence) -> Verdict:
    return Verdict(action, cause, reason, evidence.number, figures(evidence))


def _after(evidence: CanaryEvidence, book: CanaryEvidence | None = None) -> str:
    of = evidence if book is None else book
    return f"after {of.seen} {of.counts} ({of.assigned[1]} on the candidate){_in(evidence, of)}"


def _after_early(evidence: CanaryEvidence, book: CanaryEvidence) -> str:
    stable, candidate = (arm.count for arm in book.guards[EARLY].arms)
    looks = f"{stable + candidate} {book.counts} ({candidate} on the candidate)"
    return f"after an early look at {looks}{_in(evidence, book)}"


def _in(evidence: CanaryEvidence, book: CanaryEvidence) -> str:
    return "" if book is evidence else f" in the {HOLDBACK}"


def _lopsided(name: str, count: StageCount, limit: float, counts: str) -> str:
    stable, candidate = count.outcomes
    return (
        f"sample ratio: Bayes factor {count.bayes:.4g} >= {limit:.4g} in stage {name}: {candidate} of "
        f"{stable + candidate} {counts} with a reward are on the candidate"
    )


def _undecided(policy: ReleasePolicy, evidence: CanaryEvidence) -> str:
    limit, d = 1 / policy.alpha_promote, evidence.reward.d
    lagging = [f"guard {name} e = {evidence.guards[name].non_inferiority:.4g}" for name in _lagging(evidence, limit)]
    found = ", ".join([f"e = {evidence.non_inferiority:.4g}", *lagging])
    return (
        f"undecided at the horizon, after {evidence.seen} {evidence.counts}: {_means(evidence)}neither harm is shown "
        f"(e = {evidence.harm:.4g} of {1 / policy.alpha:.4g}) nor a loss of {d:.4g} or more excluded ({found} of "
        f"{limit:.4g})"
    )


# -- a canary's form on the tape --------------------------------------------------------------------------------------


class CanaryDecision(NamedTuple):
    """A verdict that moves a release, or makes it wait for a person."""

    counted: int
    """Number of the assignment that was counted last."""
    action: str
    verdict: Verdict
    early: int = 0
    """Number of the assignment with the latest early look."""


def decision_of(verdict: Verdict, counted: int, early: int = 0) -> CanaryDecision | None:
    """The decision in a verdict; None while the release continues as it is."""
    if verdict.action in BY_RULE:
        return CanaryDecision(counted, verdict.action, verdict, early)
    return CanaryDecision(counted, "wait", verdict, early) if verdict.cause == "approval" else None


class ReplayStep(NamedTuple):
    """A step of the replay."""

    counted: int
    """Number of the assignment that was counted last."""
    early: int
    """Number of the assignment with the latest early look."""
    verdict: Verdict | None
    """The verdict after the step; None for a rollout that is left out, or that the canary did not see because it had
    ended."""
    person: bool = False
    """Whether a person's action caused the step."""


def replay_decisions(
    canary: Canary, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence], audit: Sequence[AuditTrailEntry]
) -> Iterator[CanaryDecision]:
    """Steps a canary through everything that was counted and every action of a person; yields its decisions as they
    come."""
    waits = False
    for counted, early, verdict, person in replay_steps(canary, assigned, seen, audit):
        if verdict is None:
            continue
        found = decision_of(verdict, counted, early)
        waiting = found is not None and found.action == "wait"
        if found is not None and not (waiting and (waits or person)):
            yield found
        waits = waiting and not person


def replay_steps(
    canary: Canary, assigned: Sequence[Assignment], seen: Sequence[AssignmentEvidence], audit: Sequence[AuditTrailEntry]
) -> Iterator[ReplayStep]:
    """Yields every step of a canary in the order in which it was made. Each early look records how many outcomes had
    been counted before it."""
    people = [entry for entry in audit if entry.who != GATEWAY and entry.action in ("approve", "resume")]
    looks = [one.early for one in assigned if one.early is not None]
    counted = early = 0
    yield from _persons(canary, people, counted, early)
    while counted < len(seen) or early < len(looks):
        if early < len(looks) and looks[early].counted <= counted:
            early += 1
            yield ReplayStep(counted, early, apply_early_look(canary, assigned[early - 1]))
        elif counted < len(seen):
            counted += 1
            one = seen[counted - 1]
            looked_at = one.left_out is None and not canary.ended
            verdict = canary.step(observation(assigned[counted - 1], one)) if looked_at else None
            yield ReplayStep(counted, early, verdict)
        else:
            return
        yield from _persons(canary, people, counted, early)


def apply_early_look(canary: Canary, assignment: Assignment) -> Verdict | None:
    """Gives a canary the early look at an assignment; None when it has no effect on it."""
    seen = assignment.early
    if canary.ended or seen is None or seen.good is None:
        return None
    return canary.step_early(assignment.number, int(assignment.arm == "candidate"), assignment.probability, seen.good)


def _persons(canary: Canary, people: Iterable[AuditTrailEntry], counted: int, early: int) -> Iterator[ReplayStep]:
    for entry in people:
        if (entry.assignment, entry.early) == (counted, early):
            verdict = apply_action(canary, entry.action)
            if verdict is not None:
                yield ReplayStep(counted, early, verdict, person=True)


def apply_action(canary: Canary, action: str) -> Verdict | None:
    """Applies a person's action to a canary; None when it has no effect on it."""
    if action == "approve" and not canary.ended:
        return canary.approve()
    if action == "resume" and canary.verdict.action == "hold":
        return canary.resume()
    return None


def add_outcomes(evidence: CanaryEvidence, counted: Iterable[tuple[Assignment, AssignmentEvidence]]) -> CanaryEvidence:
    """The same evidence, with the rollouts added that were counted since."""
    for assignment, one in counted:
        if one.left_out is None and one.number > evidence.number:
            evidence.add(observation(assignment, one))
    return evidence


def add_early_looks(evidence: CanaryEvidence, assigned: Iterable[Assignment]) -> CanaryEvidence:
    """The same evidence, with the early looks added that were made since."""
    for one in assigned:
        if one.early is not None and one.early.good is not None and one.number > evidence.early:
            evidence.add_early(one.number, int(one.arm == "candidate"), one.probability, one.early.good)
    return evidence


def empty_evidence(release: Release) -> CanaryEvidence:
    """The evidence on a release before anything was counted."""
    return Canary.of(release).evidence


# -- the stages of a release and the moves between them ---------------------------------------------------------------
#
# One table, from which the documentation's diagram is drawn.
#
# `checked`, `replayed` and `shadowed` name the stage that was passed; the next one is under way, unless the release
# waits. A stage that the policy skips is passed without being done, and the audit says so. Nothing leaves `promoted`,
# `rolled_back` and `aborted`.

_STOPPED: Mapping[ReleaseStage, str] = {
    "rolled_back": "harm, a guard, a hard violation, a failed check, or a person",
    "aborted": "a person",
    "held": "a person, no decision, or figures that cannot be trusted",
}
MOVES: Final[Mapping[ReleaseStage, Mapping[ReleaseStage, str]]] = {
    "draft": {"checked": "slots, size, rendering, weights that load", **_STOPPED},
    "checked": {"replayed": "recorded calls were asked again", **_STOPPED},
    "replayed": {"shadowed": "live calls were mirrored", **_STOPPED},
    "shadowed": {"canary": "new rollouts are assigned", **_STOPPED},
    "canary": {
        "canary": "the next split, and then the holdback",
        "promoted": "no loss beyond the margin and no harm in the holdback, or a person",
        **_STOPPED,
    },
    "held": {
        "draft": "resumed",
        "checked": "resumed",
        "replayed": "resumed",
        "shadowed": "resumed",
        "canary": "resumed",
        "promoted": "a person",
        "rolled_back": "a person",
        "aborted": "a person",
    },
    "promoted": {},
    "rolled_back": {},
    "aborted": {},
}
"""For every stage the stages that may follow it, and why."""
NEXT: Final[Mapping[ReleaseStage, ReleaseStage]] = {
    "draft": "checked", "checked": "replayed", "replayed": "shadowed", "shadowed": "canary"
}  # fmt: skip
"""The stage after each one on the way up to the canary."""


class MoveError(ValueError):
    """A release cannot move from its stage to the requested one."""


def check_move(before: ReleaseStage, after: ReleaseStage) -> None:
    """Raises `MoveError`, which names the stages that may follow, if `after` is none of them."""
    if before in ENDED:
        raise MoveError(f"a release that is {before} has ended; start another one")
    if after not in MOVES[before]:
        raise MoveError(f"a release that is {before} cannot become {after}; it may become {', '.join(MOVES[before])}")


# -- coverage ---------------------------------------------------------------------------------------------------------
#
# Whether the coverage of a resource has fallen is decided after each rollout that had its text, or one nearly its own.
#
# The last `WINDOW` rollouts are compared with those before them. The coverage has fallen when so few matches are less
# likely than `UNLIKELY` if each rollout still matched as often as before. The earlier rate counts as at most `MOST`,
# and as `MOST` while little is known, so a few strange calls are no alarm: it takes four misses among no others, or
# ten among forty. While the coverage is down, the earlier rate stays as it was; it is up again when the last rollouts
# are likely once more.

CoverageChange: TypeAlias = Literal["fell", "back"]
WINDOW: Final = 40
"""Number of the last rollouts that are compared."""
UNLIKELY: Final = 1e-4
"""Probability below which the coverage has fallen."""
LIKELY: Final = 0.05
"""Probability from which the coverage is up again."""
MOST: Final = 0.95
KNOWN: Final = 20
"""Number of rollouts that the initial assumption (`MOST`) weighs as much as."""
FADES: Final = 1 - 1 / 500
"""Factor on the weight of the earlier rollouts with each rollout that joins them."""


def baseline_rate(coverage: Coverage) -> float:
    """The share of rollouts that matched before the window; at most `MOST`."""
    return min(MOST, (coverage.before_matched + MOST * KNOWN) / (coverage.before + KNOWN))


def likelihood(matched: int, rollouts: int, before: float) -> float:
    """The probability that `matched` or fewer of `rollouts` match, if each does with the probability `before`."""
    return sum([comb(rollouts, k) * before**k * (1 - before) ** (rollouts - k) for k in range(matched + 1)])


def observe(coverage: Coverage, matched: bool) -> None:
    """Adds a rollout to the window; the rollout that leaves it joins the earlier ones unless the coverage is down."""
    coverage.recent += "+" if matched else "-"
    leaves, coverage.recent = coverage.recent[:-WINDOW], coverage.recent[-WINDOW:]
    if leaves and coverage.fell_ns is None:
        coverage.before = coverage.before * FADES + 1
        coverage.before_matched = coverage.before_matched * FADES + (leaves == "+")


def detect_change(coverage: Coverage, now_ns: int) -> CoverageChange | None:
    """Records in `coverage` that it has fallen, or is up again, and returns which; None where nothing changes."""
    matched, rollouts, before = coverage.recent.count("+"), len(coverage.recent), baseline_rate(coverage)
    likely = likelihood(matched, rollouts, before)
    if coverage.fell_ns is None and likely < UNLIKELY:
        coverage.fell_ns = now_ns
        coverage.fell = f"{matched} of the last {rollouts} rollouts matched, {before:.0%} or more did before"
        return "fell"
    if coverage.fell_ns is not None and likely >= LIKELY:
        coverage.fell_ns, coverage.fell = None, ""
        return "back"
    return None


# -- shown beside the figures of a release; no decision reads it ------------------------------------------------------

TUNED_FOR: Final = 50.0
"""V*: the sum of psi^2 at which the interval is narrowest; about 1,000 rollouts at 50 % with a success rate of 0.7."""
MANY: Final = 0.1
"""Share of missing rewards from which they may hide a loss as large as a usual margin."""
GAP_LIMIT: Final = 12.0
"""Square of the difference between the arms in standard errors, from which a warning is given: about 3.5 of them,
because one looks often."""


def interval(reward: RewardTest, coverage: float = 0.95) -> tuple[float, float] | None:
    """(low, high) of candidate minus stable, in units of the reward mapped to [0, 1]; None before the first rollout.

    It is an asymptotic confidence sequence (Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas, "Time-uniform central limit
    theory and asymptotic confidence sequences", 2021) over the scores psi of `gateway.releases.canary.evidence`; one
    side each:

        [S +- sqrt(2 (V r2 + 1) / r2 * ln(1 + sqrt(V r2 + 1) / (2 a)))] / W       S = sum psi, V = sum psi^2, W = sum w
        r2 = (-2 ln(2 a) + ln(-2 ln(2 a) + 1)) / V*                                a: error of one side

    It may be looked at at any time, but it relies on a central limit: if successes or failures are rare, it is too
    narrow. The betting tests do not have this weakness, so they decide. It uses `math.log`, whose last place differs
    between machines, so it never enters an audit.
    """
    if not reward.weights:
        return None
    side = (1.0 - coverage) / 2
    tuning = (-2 * math.log(2 * side) + math.log(-2 * math.log(2 * side) + 1)) / TUNED_FOR
    spread = reward.squares * tuning + 1
    reach = math.sqrt(2 * spread / tuning * math.log(1 + math.sqrt(spread) / (2 * side)))
    low, high = (reward.scores - reach) / reward.weights, (reward.scores + reach) / reward.weights
    return max(-1.0, low), min(1.0, high)


def warnings(policy: ReleasePolicy, evidence: CanaryEvidence) -> Iterator[str]:
    """The warnings, a sentence each, without a full stop, from `FEW` counted rollouts on. Missing rewards are the weak
    point of every canary: a candidate may look equal because its failures are silent."""
    if evidence.seen < FEW:
        return
    missing = evidence.seen - evidence.rewarded
    if policy.missing != "worst" and missing > MANY * evidence.seen:
        yield (
            f"{missing:,} of {evidence.seen:,} counted {policy.observation_noun} ({missing / evidence.seen:.0%}) "
            "have no reward, "
            'and it is not known how they went: if they are failures, start it with missing = "worst"; if their '
            "rewards come later, with a longer outcome_deadline_s"
        )
    if missing_reward_gap(evidence) > GAP_LIMIT:
        stable, candidate = (lost / max(1, n) for lost, n in zip(evidence.missing, evidence.assigned, strict=True))
        more = "more" if candidate > stable else "less"
        yield f"rewards are missing {more} often on the candidate: {candidate:.0%}, on the stable version {stable:.0%}"


def missing_reward_gap(evidence: CanaryEvidence) -> float:
    """Square of the difference between the shares of missing rewards, in standard errors; 0 while an arm is empty."""
    (n0, n1), (lost0, lost1) = evidence.assigned, evidence.missing
    share = (lost0 + lost1) / max(1, n0 + n1)
    if not n0 or not n1 or not 0.0 < share < 1.0:
        return 0.0
    return (lost1 / n1 - lost0 / n0) ** 2 / (share * (1 - share) * (1 / n0 + 1 / n1))
