"""The policy of a release: what it may do by itself. A strict TOML file, all keys with defaults, frozen with the
release.

The error probabilities of the reward, of all guards and of the holdback add up to 0.05 (Bonferroni). So a candidate
that is no worse in anything is rolled back with at most that probability.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from penstock.gateway.model.base import LONGEST_S
from penstock.gateway.model.span import BAGGAGE_NAME
from penstock.gateway.model.toml import ConfigError, Section, explained

MISSING = "missing"
"""The guard on missing outcomes."""
EARLY = "early_error"
"""The guard that is evaluated long before a reward is due."""
ROLLOUT = "rollout"
"""The unit of a release that assigns each rollout by itself."""

_ALWAYS_ON = {"alpha": 0.005}
"""Probability of a false rollback by a guard that is always on."""
HOLDBACK_ALPHA = 0.005
"""Probability of a false rollback in the holdback, shared by reward and guards in the proportions of the stages
before."""
HOLDBACK = "holdback"
"""Name of the last stage."""
QUARTER = 0.0025
"""Error probability of the guards of latency and costs: with both on, all add up to 0.05."""
ODDS_BELOW = 0.6
"""Below this mean reward a share of it is so small beside the noise of single rollouts that few releases would be
decided: there the margin keeps its odds ratio. 10 % is 0.60 to 0.54, and then 0.36 to 0.306, and 0.10 to 0.080."""
LEAST_MARGIN = 0.02
"""Tolerated loss in a guard that hardly ever varies: 1 % of errors may become less than 3 %."""
SPREAD_MARGIN = 0.15
"""Tolerated loss in a guard as a share of the standard deviation. A loss of 10 % of a success rate of 0.70 is as large,
so that guards take about as long as the reward."""
SRM_ALPHA = 0.01
"""Probability per stage of a false alarm about the split of outcomes: a person looks, and nothing is lost by it."""
REPLAY_ALPHA = 0.05
"""Probability that a candidate that is worse by the margin passes in replay. The canary has the last word."""
Gate = Literal["required", "report", "skip"]


class RampStep(NamedTuple):
    """One split of a release: a stage of the ramp, or the holdback."""

    name: str
    split: float
    rollouts: int


class CanaryStage(Section):
    """`[[stages]]`: one step of the canary."""

    split: float = Field(gt=0, lt=1)
    """Share of new rollouts that get the candidate, above 0 and below 1; larger than in the stage before."""
    rollouts: int = Field(default=20, ge=0, le=1_000_000)
    """Rewarded rollouts on the candidate, assigned in this stage, before it may be left, 0 to 1,000,000."""
    seconds: float = Field(default=0.0, ge=0, le=LONGEST_S)
    """Seconds from its first rollout before it may be left, at least 0."""
    approval: bool = False
    """Whether a person must approve before it is left; in the last stage that is before the promotion."""

    @property
    def name(self) -> str:
        """The stage's split in percent."""
        return f"{self.split * 100:g}%"


class Holdback(Section):
    """`[holdback]`: the last stage, after a loss is excluded: nearly all new rollouts get the candidate, and harm still
    takes it back."""

    rollouts: int = Field(default=4000, ge=0, le=10_000_000)
    """Rollouts that are assigned in it and counted before the promotion is final, 0 to 10,000,000; 0 is no holdback."""


class LatencyGuard(Section):
    """`[guards.latency]`: the share of rollouts within a time; off unless given."""

    alpha: ClassVar[float] = QUARTER
    slo_s: float = Field(gt=0, le=LONGEST_S)
    """Seconds within which a rollout counts as fast enough, above 0."""

    def goodness(self, seconds: float) -> float:
        """1 within the time, else 0."""
        return 1.0 if seconds <= self.slo_s else 0.0


class CostGuard(Section):
    """`[guards.cost]`: what a rollout costs; off unless given."""

    alpha: ClassVar[float] = QUARTER
    cap: float = Field(gt=0)
    """Cost of a rollout from which it counts as worst, above 0, in the unit in which costs are given; about four times
    what one usually costs."""

    def goodness(self, cost: float) -> float:
        """1 for no cost, 0 from the cap on."""
        return max(0.0, 1.0 - cost / self.cap)


class Guards(Section):
    """`[guards]`: goodness besides the reward; each is tested for harm, and before a promotion for no loss.

    Always on are `early_error` (failed rollouts and calls soon after the assignment, without waiting for rewards),
    `error` (the same up to the outcome), `violation` (of a rule on tool calls) and `missing` (no reward at the
    deadline)."""

    margin: float | None = Field(default=None, gt=0, lt=1)
    """How much worse a candidate may be in each guard and still be promoted, as a difference of shares, above 0 to
    below 1. Unless given it is 0.02, or more for a guard that varied much before the start: 0.15 of the standard
    deviation that the stable version had."""
    latency: LatencyGuard | None = None
    """Slow rollouts."""
    cost: CostGuard | None = None
    """Dear rollouts."""


class Replay(Section):
    """`[replay]`: recorded calls asked again, of the candidate and of the incumbent."""

    requests: ClassVar[int] = 2
    """Requests to models for each call: one of both legs. A judge that is a model takes from those of later calls."""
    concurrency: ClassVar[int] = 8
    """Requests at the same time."""
    margin: ClassVar[float] = 0.1
    """How much lower than the incumbent's own the candidate's agreement may be."""
    steps: ClassVar[int] = 100
    """Requests to models in one rehearsed run at most."""
    calls: int = Field(default=200, ge=1, le=100_000)
    """Recorded calls to take, 1 to 100,000."""
    closed_loop: int = Field(default=0, ge=0, le=10_000)
    """Recorded rollouts to rehearse with the agent itself and recorded tool results, 0 to 10,000; 0 is none."""

    @property
    def budget(self) -> int:
        """Requests to models at most, both legs and the judge counted."""
        return self.requests * self.calls


class Shadow(Section):
    """`[shadow]`: live calls sent to the candidate too, after the answer went out."""

    requests: ClassVar[int] = 5
    """Requests to models for each call that is to be mirrored, the judge's and those that failed counted."""
    concurrency: ClassVar[int] = 2
    """Requests at the same time; a call that finds none free is not mirrored."""
    share: float = Field(default=0.05, gt=0, le=1)
    """Share of calls that are mirrored, above 0 to 1."""
    calls: int = Field(default=100, ge=1, le=100_000)
    """Mirrored calls after which the stage is done, 1 to 100,000."""

    @property
    def budget(self) -> int:
        """Requests to models at most, the judge's counted."""
        return self.requests * self.calls


class ReleasePolicy(Section):
    """The rules of one release: its stages, its gates and its tests; a whole policy file."""

    _earlier: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    """Values that a release on the tape began with when they could be set, where they are not those of `CONSTANTS`."""

    stages: list[CanaryStage] = Field(
        default=[CanaryStage(split=0.05, rollouts=20), CanaryStage(split=0.2, rollouts=80), CanaryStage(split=0.5)],
        min_length=1,
        max_length=20,
    )
    """The ramp, 1 to 20 stages."""
    checked: Gate = "required"
    """Static checks: `required`, `report` (done, but a failure does not stop the release) or `skip`."""
    replayed: Gate | None = None
    """Replay of recorded calls: `required`, `report` or `skip`. Unless given it is `report` for prompts and tool texts
    that the judge `exact` compares without `closed_loop`, since a new text is meant to change answers; else
    `required`."""
    shadowed: Gate = "required"
    """Mirrored live calls: `required`, `report` or `skip`."""
    reward: str | None = Field(default=None, min_length=1, max_length=128)
    """Dimension of the reward that decides; the rollout's reward itself unless given."""
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0), strict=False)
    """Rewards that count as worst and as best; what is beyond counts as these."""
    unit: str = Field(default=ROLLOUT, pattern=BAGGAGE_NAME)
    """What is assigned to an arm and is one observation: `rollout`, or the entry of the calls' `baggage` header (or of
    the rollout's metadata) that names it, such as `user.id`. Stages, holdback and horizon count units then."""
    margin: float = Field(default=0.1, ge=0, lt=1)
    """How much worse a candidate may be and still be promoted, as a share of the stable's mean reward before the start,
    0 to below 1. Where that mean is below 0.6, the loss with the same odds ratio as this share of 0.6."""
    margin_absolute: float | None = Field(default=None, ge=0)
    """The same as a difference of rewards, at least 0 and less than the range; it replaces `margin`."""
    guards: Guards = Guards()
    """What is watched besides the reward."""
    holdback: Holdback = Holdback()
    """How long the stable version is kept beside the candidate after no loss was found."""
    missing: Literal["leave_out", "worst"] = "leave_out"
    """What a rollout without a reward at its deadline counts as: `leave_out`, nothing is concluded about the reward;
    `worst`, as if the worst reward had come. Take `worst` where failures are what gives no reward."""
    missing_limit: float = Field(default=0.5, gt=0, le=1)
    """Share of rollouts without a reward, of the first 50 or more, above which the release is held; 1 turns it off."""
    outcome_deadline_s: float = Field(default=3600.0, gt=0, le=LONGEST_S)
    """Seconds from its assignment after which a rollout without a reward counts as missing. Decisions wait that long
    for the slowest, so that quick failures are not seen first."""
    horizon: int = Field(default=6000, ge=10, le=10_000_000)
    """Rollouts after which an undecided release is held, 10 to 10,000,000."""
    hold_split: bool = False
    """Whether it is a plain experiment: never promoted, the margin is 0; harm still rolls back."""
    judge: str = Field(default="exact", pattern=r"^\S{1,200}$")
    """Who says whether an answer of replay or shadow agrees: `exact`, `module:function`, or the name of a model."""
    replay: Replay = Replay()
    """How recorded calls are asked again."""
    shadow: Shadow = Shadow()
    """How live calls are mirrored."""

    @model_validator(mode="after")
    def _ramp_rises(self) -> Self:
        splits = [stage.split for stage in self.stages]
        if self.has_holdback and splits[-1] >= self.ramp[-1].split:
            raise ValueError(
                f"stages: the last split, {splits[-1]:g}, must be below {self.ramp[-1].split:g}, that of the holdback; "
                "lower it, or turn the holdback off with holdback.rollouts = 0"
            )
        if any(later <= earlier for earlier, later in pairwise(splits)):
            raise ValueError(f"stages: splits must rise, since no rollout may change its arm; found {_listed(splits)}")
        needed = sum(stage.rollouts / stage.split for stage in self.stages)
        if needed >= self.horizon + 1:
            raise ValueError(
                f"horizon: {self.horizon} rollouts, but the stages take about {needed:.0f} (their rollouts divided by "
                "their splits); raise horizon or lower stages.rollouts"
            )
        return self

    @model_validator(mode="after")
    def _margin_has_a_unit(self) -> Self:
        low, high = self.reward_range
        if low >= high:
            raise ValueError(f"reward_range: the worst, {low:g}, must be below the best, {high:g}")
        if self.margin_absolute is not None and self.margin_absolute >= high - low:
            raise ValueError(
                f"margin_absolute: {self.margin_absolute:g} must be below {high - low:g}, the width of reward_range: "
                "nothing could be worse than that"
            )
        if self.margin_absolute is None and low != 0 and not self.hold_split:
            raise ValueError(
                "margin: a share of the stable's reward needs rewards that start at 0, and reward_range starts at "
                f"{low:g}; give margin_absolute"
            )
        return self

    @classmethod
    def load(cls, text: str, where: str = "policy") -> ReleasePolicy:
        """Read the policy in a TOML text. Raises `ConfigError`, which names `where` and every wrong key."""
        tree = dict[str, Any]()
        try:
            tree = tomllib.loads(text)
            return cls.model_validate(tree)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{where} cannot be read as TOML: {error}") from None
        except ValidationError as error:
            raise ConfigError(
                f"{where}: " + "; ".join(explained(cls, tree, one, "") for one in error.errors())
            ) from None

    def default_replay(self, kind: str) -> Gate:
        """The gate of the replay for a policy that names none. `kind`: of the resource (`ResourceKind`)."""
        compares_texts = self.judge == "exact" and not self.replay.closed_loop
        return "report" if kind != "model" and compares_texts else "required"

    @cached_property
    def alpha(self) -> float:
        """Probability of rolling back by the reward a candidate that is not worse."""
        return self._constant("alpha")

    @cached_property
    def alpha_promote(self) -> float:
        """Probability of promoting a candidate that is worse by the margin."""
        return self._constant("alpha_promote")

    @property
    def early_deadline_s(self) -> float:
        """Seconds from its assignment after which a rollout counts as free of early errors. It counts sooner when a
        call has failed, when it has ended or when its reward has come. Later errors are left to the guard `error`."""
        return self._constant("guards", EARLY, "deadline_s")

    @cached_property
    def guard_alphas(self) -> dict[str, float]:
        """Error probability of every guard that is on."""
        given = {"latency": self.guards.latency, "cost": self.guards.cost}
        found = {name: self._constant("guards", name, "alpha") for name in (EARLY, "error", "violation")}
        found |= {name: one.alpha for name, one in given.items() if one is not None}
        found[MISSING] = self._constant("guards", MISSING, "alpha")
        return {name: alpha for name, alpha in found.items() if alpha}

    def _constant(self, *path: str) -> float:
        """The value of `CONSTANTS` at this path, or the one that the release began with."""
        value: Any = CONSTANTS
        earlier: Any = self._earlier
        for name in path:
            value, earlier = value[name], earlier.get(name, {})
        return value if earlier == {} else earlier

    def with_guards(self, names: Collection[str]) -> Self:
        """The policy with no guards but these, to be played without a tape."""
        kept = {name: alpha for name, alpha in self.guard_alphas.items() if name in names}
        return self.model_copy(update={"guard_alphas": kept})

    @property
    def has_holdback(self) -> bool:
        """True if a holdback follows before the promotion is final."""
        return self.holdback.rollouts > 0 and not self.hold_split

    @property
    def holdback_scale(self) -> float:
        """The factor of every error probability in the holdback."""
        total = self.alpha
        for alpha in self.guard_alphas.values():
            # Not `sum`, which rounds otherwise from Python 3.12 on.
            total += alpha
        return HOLDBACK_ALPHA / total

    @property
    def ramp(self) -> tuple[RampStep, ...]:
        """All splits in their order: those of the stages, then that of the holdback. They rise, so that a rollout's
        probability tells the split in which it was assigned."""
        stages = tuple(RampStep(one.name, one.split, one.rollouts) for one in self.stages)
        last = RampStep(HOLDBACK, 1.0 - self._constant("holdback", "share"), self.holdback.rollouts)
        return (*stages, last) if self.has_holdback else stages

    def guard_margins(self, spreads: Mapping[str, float]) -> dict[str, float]:
        """The loss that each guard tolerates in a promoted candidate, fixed when a release starts and stored with it.

        `spreads`: standard deviation of the stable's goodness before the start, by guard. `early_error` has no margin:
        `error` covers the same errors, and more.
        """
        if self.hold_split:
            return {}
        return {
            name: self.guards.margin or max(LEAST_MARGIN, SPREAD_MARGIN * spreads.get(name, 0.0))
            for name in self.guard_alphas
            if name != EARLY
        }

    @property
    def by_unit(self) -> bool:
        """True if rollouts of one unit share an arm and are one observation."""
        return self.unit != ROLLOUT

    @property
    def observation_noun(self) -> str:
        """The name of its observations: `rollouts` or `units`."""
        return "units" if self.by_unit else "rollouts"

    @property
    def needs_baseline(self) -> bool:
        """True if one of its margins depends on the stable version's results before the start."""
        return not self.hold_split and (self.margin_absolute is None or self.guards.margin is None)

    def goodness(self, reward: float) -> float:
        """A reward scaled to [0, 1]."""
        low, high = self.reward_range
        share = (reward - low) / (high - low)
        return min(1.0, max(0.0, share))

    def d(self, baseline: float | None) -> float:
        """The margin as a difference in [0, 1], fixed when a release starts and stored with it.

        `baseline`: mean `goodness` of the stable's rewards before the start; it must not see the release. Raises
        `ConfigError` when it is needed and there is none.
        """
        if self.hold_split:
            return 0.0
        if self.margin_absolute is not None:
            return self.margin_absolute / (self.reward_range[1] - self.reward_range[0])
        if baseline is None:
            raise ConfigError(
                f"margin: {self.margin:g} of the stable's mean reward, but no reward of it has been recorded; give "
                "margin_absolute, or start when there are some"
            )
        return max(self.margin * baseline, _same_odds(self.margin, baseline))


def _same_odds(margin: float, mean: float) -> float:
    """The loss from `mean` that has the odds ratio of a loss of `margin`, as a share, from `ODDS_BELOW`."""
    if mean >= ODDS_BELOW:
        return 0.0
    less = ODDS_BELOW * (1 - margin)
    kept = (less / (1 - less)) / (ODDS_BELOW / (1 - ODDS_BELOW))
    odds = kept * mean / (1 - mean)
    return mean - odds / (1 + odds)


def _listed(values: list[Any]) -> str:
    return ", ".join(str(value) for value in values)


# -- the policy's form on the tape ------------------------------------------------------------------------------------

CONSTANTS: dict[str, Any] = {
    "alpha": 0.02,
    "alpha_promote": 0.05,
    "guards": {
        EARLY: _ALWAYS_ON | {"deadline_s": 30.0},
        "error": _ALWAYS_ON,
        "violation": _ALWAYS_ON,
        MISSING: _ALWAYS_ON,
    },
    "holdback": {"share": 0.05},
    "replay": {"margin": Replay.margin, "concurrency": Replay.concurrency, "steps": Replay.steps},
    "shadow": {"concurrency": Shadow.concurrency},
}
"""The values that the tape's policy has and nobody can set any more: a release goes by those that it began with. The
probabilities of the reward, of all guards and of the holdback add up to 0.05; the holdback leaves its share of new
rollouts to the stable version."""
FIXED: dict[str, Any] = {
    "failed": 0.0,
    "hard_violations": 0,
    "srm_alpha": SRM_ALPHA,
    "adaptive": False,
    "replay": {"alpha": REPLAY_ALPHA},
    "guards": {"latency": {"alpha": QUARTER}, "cost": {"alpha": QUARTER}},
}
"""The values that the tape's policy has and nobody can set: decisions are recomputed from all values that they depended
on."""


def freeze_policy(policy: ReleasePolicy) -> dict[str, Any]:
    """A policy as the tape has it, with the values of `FIXED` and `CONSTANTS`."""
    made = policy.model_dump(mode="json")
    _add(made, FIXED)
    _add(made, CONSTANTS)
    made["replay"]["budget"], made["shadow"]["budget"] = policy.replay.budget, policy.shadow.budget
    for name, value in policy._earlier.items():  # pyright: ignore[reportPrivateUsage] # its own module
        made[name] = _merged(made[name], value)
    made["replay"]["judge"] = made["shadow"]["judge"] = made.pop("judge")
    made["reward_low"], made["reward_high"] = made.pop("reward_range")
    for stage, own in zip(made["stages"], policy.stages, strict=True):
        stage["name"] = own.name
    return made


def thaw_policy(value: Any, validate: Callable[[Any], ReleasePolicy]) -> ReleasePolicy:
    """A policy from the tape; a value that is no object is only validated."""
    if not isinstance(value, dict):
        return validate(value)
    made = copy.deepcopy(cast(dict[str, Any], value))
    _ = _take(made, FIXED)
    replay, shadow = made.get("replay", {}), made.get("shadow", {})
    budgets = {"replay": Replay.requests * replay.get("calls", 0), "shadow": Shadow.requests * shadow.get("calls", 0)}
    earlier = _take(made, _merged(CONSTANTS, {name: {"budget": budget} for name, budget in budgets.items()}), True)
    if "judge" in replay and replay["judge"] == shadow.get("judge"):
        made["judge"] = replay.pop("judge")
        del shadow["judge"]
    if "reward_low" in made and "reward_high" in made:
        made["reward_range"] = [made.pop("reward_low"), made.pop("reward_high")]
    for stage in made.get("stages", ()):
        if stage.get("name") == f"{stage['split'] * 100:g}%":
            del stage["name"]
    policy = validate(made)
    policy._earlier = earlier  # pyright: ignore[reportPrivateUsage] # its own module
    return policy


def _add(made: dict[str, Any], fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        if not isinstance(value, dict) or name not in made:
            made[name] = copy.deepcopy(fixed[name])
        elif made.get(name) is not None:
            _add(made[name], cast(dict[str, Any], value))


def _merged(one: Any, other: Any) -> Any:
    """One tree with the values of another in place of its own."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    left, right = cast(dict[str, Any], one), cast(dict[str, Any], other)
    return left | {name: _merged(left.get(name), value) for name, value in right.items()}


def _take(made: dict[str, Any], fixed: dict[str, Any], others_too: bool = False) -> dict[str, Any]:
    """Remove the values that equal the fixed ones. Others stay, and are refused by validation; or they are removed and
    returned."""
    found = dict[str, Any]()
    for name, value in fixed.items():
        if isinstance(value, dict) and isinstance(made.get(name), dict):
            if others := _take(made[name], cast(dict[str, Any], value), others_too):
                found[name] = others
            if not made[name]:
                del made[name]
        elif made.get(name) == value:
            made.pop(name, None)
        elif others_too and name in made:
            found[name] = made.pop(name)
    return found
