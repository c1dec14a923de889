"""The attempts and calls to train on, chosen before tokens are read: the caller's options, the choice, the rewards, and
the report on all others. Free of numpy.

The reasons are those of `penstock doctor`, from the same rules (`gateway.reading.diagnosis.findings`), except those
about tokens; and those of the selection itself: another agent, another attempt, the retries of a client. Nothing is
left out silently: a choice is either in exactly one sample (for conversations: has weight 1 in exactly one) or in
`SampleReport.dropped`.

Rewards are spans: of the whole attempt (terminal), or of one call (per turn). Among several of one kind the newest
trusted one counts, even if it is late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal, TypeVar, get_args

from penstock.adapters.episode import Episode, EpisodeAttempt, EpisodeCall
from penstock.gateway.model.answers import Finding
from penstock.gateway.model.codes import FindingCode, SequenceStart
from penstock.gateway.model.rollout import AttemptStatus, Reward, deciding_attempt
from penstock.gateway.model.span import Span
from penstock.gateway.model.toml import pluralized
from penstock.gateway.reading.diagnosis.findings import RETRIED, of_attempt, of_head, of_unread, recovered_refusals
from penstock.gateway.reading.diagnosis.rows import superseded
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.dialects.loose_json import obj

AttemptChoice = Literal["final", "succeeded", "last", "all"]


@dataclass(frozen=True, slots=True)
class Options:
    """The choice of calls that become samples, and the form of the samples."""

    model: str | None = None
    """Calls of this model only; None is the one that most calls of the rollout ask for."""
    agent: str | None = None
    """Calls of this agent only."""
    attempt: AttemptChoice = "final"
    """Which attempt counts: the newest that succeeded and else the newest (`final`), the newest that `succeeded`, the
    `last`, or `all`."""
    merge: bool = True
    """False: a sample for each choice, the way Agent Lightning's transitions are."""
    forced: Literal["keep", "mask"] = "keep"
    """`mask`: tokens that a grammar forced are not trained on. Their engine log-probabilities were taken after the
    grammar's mask and do not compare with the trainer's."""
    longest_prompt: int | None = None
    """Most tokens of a prompt; None is no limit."""
    longest_response: int | None = None
    """Most tokens of a response. A sample that would be longer is split before a call."""
    weights: Mapping[str, float] | None = None
    """Weights of the reward's dimensions; None takes its value."""
    allow: frozenset[str] = frozenset()
    """Reasons that shall not keep a call out, such as `no_reward`, `no_logprobs` or `mixed_versions`."""


REWARDS = ("no_reward", "untrusted_reward")


def select_attempts(episode: Episode, which: AttemptChoice, report: SampleReport) -> list[EpisodeAttempt]:
    """The attempts that count; the calls of the others are reported."""
    good = [one for one in episode.attempts if one.attempt.status == AttemptStatus.SUCCEEDED][-1:]
    newest, counts = list(episode.attempts[-1:]), deciding_attempt([one.attempt for one in episode.attempts])
    found = {
        "final": [one for one in episode.attempts if one.attempt is counts],
        "succeeded": good,
        "last": newest,
        "all": list(episode.attempts),
    }[which]
    for one in episode.attempts:
        if not any(one is other for other in found):
            _drop(report, one.calls, "other_attempt", f"the attempt that counts is another one ({which})")
    return found


def select_calls(
    episode: Episode,
    one: EpisodeAttempt,
    options: Options,
    readable: Callable[[EpisodeCall], bool],
    report: SampleReport,
) -> tuple[AttemptRewards, list[EpisodeCall]]:
    """The rewards of an attempt, and its calls that may be trained on, by sequence; of a client's retries only one is
    taken. `readable`: True if the answer of a call with bytes can be read.
    """
    judged = collect_rewards(one, options.weights)
    report.notes += judged.notes
    blocked = next((it for it in _about(episode, one, judged) if it[0] not in options.allow), None)
    if blocked is not None:
        _drop(report, one.calls, *blocked)
        return judged, []
    model, found = options.model or main_model(episode), list[EpisodeCall]()
    refused = recovered_refusals([call.span for call in one.calls])
    for call in one.calls:
        blocks = of_head(episode.rollout, one.attempt, call.span, model, refused)
        trouble = next((it for it in _of(call, blocks, options.agent) if it[0] not in options.allow), None)
        if trouble is None and (call.bodies is None or not readable(call)):
            trouble = "unreadable", f"its {'answer cannot be read' if call.bodies else 'bytes are not on the tape'}"
        if trouble is None:
            found.append(call)
        else:
            report.drop(call.span, None, *trouble)
    late = superseded(call.span for call in found)
    lost: dict[int, tuple[Reason, str]] = {sequence: ("retry", RETRIED) for sequence in late}
    for call in found:
        unread = of_unread(episode.rollout, call.span, *(call.bodies or (b"", b"")))
        told = next((it for it in _of(call, unread, None) if it[0] not in options.allow), None)
        if (trouble := lost.get(call.span.sequence, told)) is not None:
            lost[call.span.sequence] = trouble
            report.drop(call.span, None, *trouble)
    return judged, [call for call in found if call.span.sequence not in lost]


def main_model(episode: Episode) -> str | None:
    """The model that most calls of a rollout request, by the same rule as `penstock doctor`."""
    heads = [call.span for one in episode.attempts for call in one.calls]
    counts = Counter(head.model for head in heads if head.model and by_name(head.dialect).makes_samples)
    return counts.most_common(1)[0][0] if counts else None


def _about(episode: Episode, one: EpisodeAttempt, judged: AttemptRewards) -> Iterator[tuple[Reason, str]]:
    """Findings that exclude a whole attempt."""
    for finding in of_attempt(episode.rollout, one.attempt, [call.span for call in one.calls]):
        if finding.blocks and finding.code not in REWARDS:
            yield finding.code, finding.reason
    if judged.trouble is not None:
        yield judged.trouble


def _of(call: EpisodeCall, about: Iterable[Finding], agent: str | None) -> Iterator[tuple[Reason, str]]:
    """Findings that exclude a call. `about`: those from its head."""
    for finding in about:
        if finding.blocks:
            yield finding.code, finding.reason
    if agent is not None and call.span.agent != agent:
        yield "other_agent", f"it is of agent {call.span.agent}, not of {agent}"


def _drop(report: SampleReport, calls: Iterable[EpisodeCall], reason: Reason, detail: str) -> None:
    for call in calls:
        report.drop(call.span, None, reason, detail)


# -- the report -------------------------------------------------------------------------------------------------------

SamplingReason = Literal[
    "other_agent",
    "other_attempt",
    "empty",
    "nan_reward",
    "prompt_too_long",
    "response_too_long",
]
Reason = FindingCode | SamplingReason
"""The reason why a choice is in no sample."""
REASONS: Final = frozenset({*get_args(FindingCode), *get_args(SamplingReason)})

Start = Literal[SequenceStart, "too_long"]
"""The reason why a call begins a sample, and does not continue another."""

Unpaired = Literal["alone", "no_reward", "equal", "too_close", "branch"]
"""The reason why a group has no pair: one rollout only, fewer than two rewards, equal or too close rewards; or why a
conversation is in none: its rollout has a longer one (`branch`).
"""

Note = Literal["late_reward", "odd_reward", "turn_rewards_only"]
"""Oddities of rewards that exclude nothing."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A choice, or a whole call, that is in no sample."""

    rollout: str
    attempt: str
    sequence: int
    """Sequence of the call's span."""
    choice: int | None
    """Index of the choice; None for the whole call, with all its choices."""
    reason: Reason
    detail: str
    """The reason in words."""


@dataclass(slots=True)
class SampleReport:
    """Counts, and everything that was left out. `add` sums the reports of several rollouts."""

    rollouts: int = 0
    """Rollouts that were read."""
    calls: int = 0
    """Recorded calls of these rollouts."""
    samples: int = 0
    """Samples or conversations that were made."""
    choices: int = 0
    """Choices in these samples."""
    tokens: int = 0
    """Sampled tokens in these samples."""
    starts: Counter[Start] = field(default_factory=Counter[Start])
    """Samples by the reason why they begin; ideally only `first`."""
    notes: Counter[Note] = field(default_factory=Counter[Note])
    """Odd rewards by kind."""
    pairs: int = 0
    """Pairs of conversations, for preferences."""
    unpaired: Counter[Unpaired] = field(default_factory=Counter[Unpaired])
    """Groups and conversations that are in no pair."""
    hints: list[str] = field(default_factory=list[str])
    """Advice for more pairs."""
    dropped: list[Exclusion] = field(default_factory=list[Exclusion])
    """Choices and calls in no sample, of this report alone."""
    elsewhere: Counter[Reason] = field(default_factory=Counter[Reason])
    """Choices and calls in no sample, by reason, of reports that were added."""

    @property
    def reasons(self) -> Counter[Reason]:
        """Choices and calls in no sample, by reason, with those of added reports."""
        return self.elsewhere + Counter[Reason](one.reason for one in self.dropped)

    def drop(self, span: Span, choice: int | None, reason: Reason, detail: str) -> None:
        """Record that a choice is left out, or a whole call."""
        self.dropped.append(Exclusion(span.rollout, span.attempt, span.sequence, choice, reason, detail))

    def add(self, other: SampleReport) -> None:
        """Add the counts of another report. Of what it left out only the reasons are counted, because a tape has no
        bound.
        """
        for count in fields(self):
            if count.name != "dropped":
                mine = getattr(self, count.name)
                mine += other.reasons if count.name == "elsewhere" else getattr(other, count.name)
                setattr(self, count.name, mine)

    def lines(self) -> list[str]:
        """The report for a person: one line of sums, and one for each kind of count."""
        asked = f"{pluralized(self.rollouts, 'rollout')}, {pluralized(self.calls, 'call')}"
        made = f"{pluralized(self.samples, 'row')} of {pluralized(self.choices, 'answer')}"
        counts = (("rows begin", self.starts), ("left out", self.reasons), ("rewards", self.notes))
        counts = (*counts, (f"{pluralized(self.pairs, 'pair')}, not in one", self.unpaired))
        return [
            f"{asked}: {made}, {pluralized(self.tokens, 'sampled token')}",
            *(f"{title}: " + ", ".join(f"{name} {n:,}" for name, n in c.most_common()) for title, c in counts if c),
            *self.hints,
        ]


# -- rewards ----------------------------------------------------------------------------------------------------------

K = TypeVar("K")

PREFIX = "penstock.reward."
VALUE = "reward"
"""Name that stands for a reward's value among its dimensions, unless a dimension has that name."""


@dataclass(frozen=True, slots=True)
class AttemptRewards:
    """The rewards of an attempt."""

    reward: float | None
    """The terminal reward; None when there is none, see `trouble`."""
    dimensions: Mapping[str, float]
    """Named scores of the whole attempt."""
    turns: Mapping[int, float]
    """Rewards of calls, by the call's sequence."""
    trouble: tuple[Reason, str] | None = None
    """The reason why there is no reward, as a code and in words; None when there is one."""
    notes: Counter[Note] = field(default_factory=Counter[Note])
    """Counts of odd rewards."""


def collect_rewards(one: EpisodeAttempt, weights: Mapping[str, float] | None = None) -> AttemptRewards:
    """The rewards of an attempt. With `weights` the terminal reward is the weighted sum of dimensions; the name
    `reward` stands for the value. If a dimension is missing, there is no reward yet.
    """
    given = [_reward(span) for span in one.spans if span.kind == "reward"]
    trusted = [reward for reward in given if reward.trusted]
    whole = [reward for reward in trusted if reward.span is None]
    value = next((reward.value for reward in reversed(whole) if reward.value is not None), None)
    turns = {reward.span: reward.value for reward in trusted if reward.span is not None and reward.value is not None}
    named: dict[str, float] = {}
    for reward in whole:
        named |= reward.dimensions
    scores = ({} if value is None else {VALUE: value}) | named
    terminal, trouble = _terminal(one, given, value, scores, turns, weights)
    notes: Counter[Note] = Counter({"late_reward": sum(reward.late for reward in trusted)})
    notes["turn_rewards_only"] = int(weights is None and value is None and bool(turns) and terminal is not None)
    notes["odd_reward"] = sum(not math.isfinite(it) for it in (*turns.values(), *named.values()))
    return AttemptRewards(terminal, _finite(named), _finite(turns), trouble, +notes)


def _finite(scores: Mapping[K, float]) -> dict[K, float]:
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _terminal(
    one: EpisodeAttempt,
    given: Sequence[Reward],
    value: float | None,
    scores: Mapping[str, float],
    turns: Mapping[int, float],
    weights: Mapping[str, float] | None,
) -> tuple[float | None, tuple[Reason, str] | None]:
    if weights is not None:
        missing = sorted(weights.keys() - scores.keys())
        if missing:
            return None, ("no_reward", f"nobody said anything of {', '.join(missing)}")
        reward: float | None = sum(weight * scores[name] for name, weight in weights.items())
    elif value is None and turns:
        # Only calls have rewards: the attempt's own field holds the newest of these, which is no terminal reward.
        reward = 0.0
    else:
        reward = value if given else one.attempt.reward
    if reward is None:
        untrusted = any(reward.value is not None and not reward.trusted for reward in given)
        found: Reason = "untrusted_reward" if untrusted else "no_reward"
        return None, (found, "only the agent says how well it went" if untrusted else "nobody said how well it went")
    return (reward, None) if math.isfinite(reward) else (None, ("nan_reward", f"its reward is {reward}"))


def _reward(span: Span) -> Reward:
    """The reward as it is stored, unchecked: one that did not come through the control API may be odd."""
    found: dict[str, Any] = {
        name.removeprefix(PREFIX): value for name, value in (span.attributes or {}).items() if name.startswith(PREFIX)
    }
    scores = obj(found.get("dimensions")).items()
    return Reward.model_construct(
        value=_number(found.get("value")),
        dimensions={name: number for name, score in scores if (number := _number(score)) is not None},
        trusted=found.get("trusted", True) is True,
        late=found.get("late", False) is True,
        span=found["span"] if isinstance(found.get("span"), int) else None,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
