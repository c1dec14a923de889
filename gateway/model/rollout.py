"""Rollouts and their attempts, with states, outcomes, rewards and sums; and the workers that run them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from penstock.gateway.model.base import LONGEST_S, Id, Mode, Noun, Origin
from penstock.gateway.model.span import Span

REWARD_PREFIX: Final = "penstock.reward."
"""Beginning of the names of attributes that hold a reward."""


class RolloutStatus(StrEnum):
    """The state of a rollout; `ROLLOUT_MOVES` has the legal moves."""

    QUEUING = "queuing"
    """Waits for its first attempt."""
    PREPARING = "preparing"
    """A worker has claimed it; nothing has been heard of the agent yet."""
    RUNNING = "running"
    """Its agent is at work."""
    SUCCEEDED = "succeeded"
    """An attempt succeeded: its worker, or somebody else, has said so."""
    FAILED = "failed"
    """Its last attempt did not succeed, or went quiet after a call that failed."""
    CANCELLED = "cancelled"
    """Somebody did not want it any more."""
    REQUEUING = "requeuing"
    """Waits for another attempt."""
    ENDED = "ended"
    """Its agent went quiet and nobody said how it ended; its last call had not failed."""


class AttemptStatus(StrEnum):
    """The state of one attempt at a rollout."""

    PREPARING = "preparing"
    """Claimed; nothing has been heard of the agent yet."""
    RUNNING = "running"
    """The agent is at work."""
    SUCCEEDED = "succeeded"
    """The agent ended well."""
    FAILED = "failed"
    """The agent ended badly, or went quiet after a call that failed."""
    TIMEOUT = "timeout"
    """It took longer than `config.timeout_s`."""
    UNRESPONSIVE = "unresponsive"
    """Its worker's lease ran out, or nothing was heard of it for `config.unresponsive_s`."""
    CANCELLED = "cancelled"
    """Its rollout was cancelled."""
    ENVIRONMENT = "environment"
    """It was handed back: the agent could not work where it was run. It does not count as a try."""
    ENDED = "ended"
    """It went quiet and nobody said how it ended; its last call had not failed."""


Retry = Literal["failed", "timeout", "unresponsive"]
"""Ends of an attempt after which another may be made."""


RewardSource = Literal["runner", "judge", "user", "agent", "rule"]
"""The source of a reward; `rule` is `reward_on_failure`."""


COMPUTED: Final = ("cost", "unpriced", "reported", "told")
"""Sums that the tape does not keep, because they are of the prices as they are now."""


class Totals(Noun):
    """Sums over the model calls of an attempt or a rollout."""

    calls: int = 0
    """Finished model calls."""
    errors: int = 0
    """Those that ended neither ok nor cancelled. A refusal after which the agent asked otherwise and was answered is
    none (`gateway.model.span`)."""
    cancelled: int = 0
    """Those whose client went away."""
    input_tokens: int | None = 0
    """Prompt tokens that were counted; None when there are calls and none was."""
    output_tokens: int | None = 0
    """Generated tokens that were counted; None when there are calls and none was."""
    tool_calls: int = 0
    """Tool calls asked for."""
    gaps: int = 0
    """Calls that were answered but could not be recorded (the tape failed)."""
    uncounted: int = 0
    """Calls that used tokens which nobody counted: where there are any, the sums of tokens are lower bounds."""
    ambiguous: int = 0
    """Calls without an address that could be another rollout's as well: two agents have done exactly the same."""
    refused: int = 0
    """Those errors that were refusals of the gateway to translate, and no call was answered since."""
    cost: float | None = None
    """US dollars that its calls cost, as their providers say, or by the list of prices; None where none of them has a
    price. Computed when it is read (`COMPUTED`): not in the change feed."""
    unpriced: int = 0
    """Calls whose tokens were counted and for whose model there is no price: where there are any, or `uncounted` ones,
    the cost is a lower bound."""
    reported: int = 0
    """Calls whose cost is what their provider says, and not what the list does."""
    told: int = 0
    """Model calls that only an agent's telemetry tells of: their tokens and costs are in these sums, they are not in
    `calls`. Computed when it is read."""

    @model_validator(mode="after")
    def _unknown_is_not_zero(self) -> Self:
        if self.uncounted:
            self.input_tokens, self.output_tokens = self.input_tokens or None, self.output_tokens or None
        return self


class RolloutConfig(Noun):
    """The limits of a rollout's attempts, and the ends after which another attempt is made."""

    timeout_s: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False)
    """Seconds from the claim after which an attempt ends as `timeout`; None is no limit."""
    unresponsive_s: float | None = Field(default=None, gt=0, le=LONGEST_S, allow_inf_nan=False)
    """Seconds without a call or another sign of the agent's own after which an attempt is `unresponsive`. While a call
    runs it is not silent."""
    max_attempts: int = Field(default=3, ge=1, le=1000)
    """How many attempts may be made."""
    retry_on: list[Retry] = Field(default_factory=lambda: list[Retry](["unresponsive"]))
    """Ends of an attempt after which another one is made, while there are some left."""
    reward_on_failure: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of the attempt after which the rollout has failed, where it has none; None gives it none."""
    versions: dict[Id, Id] = Field(default_factory=dict[str, str], max_length=20)
    """Versions of resources that its calls get, whatever is released: the version by the resource's name."""


class Outcome(Noun):
    """The end of an attempt, as far as its runner knows it."""

    exit_code: int | None = None
    """What the agent's process exited with."""
    signal: str | None = None
    """Name of the signal that ended it, such as `SIGKILL`."""
    duration_ns: int | None = None
    """How long the agent ran, as its runner measured it; ns."""
    reason: str | None = Field(default=None, max_length=2000)
    """Why it ended like this, for a person."""
    output: Any = None
    """What the agent returned: the last JSON line of its output, or the callable's result."""


class Judgement(Noun):
    """A reward that is given: it judges an attempt, or one call of it."""

    value: float | None = Field(default=None, allow_inf_nan=False)
    """The reward; None when only dimensions are given."""
    dimensions: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(default_factory=dict[str, float])
    """Several named scores."""
    source: RewardSource = "user"
    """Who says so. What comes with an agent's own token is always `agent`."""
    reason: str | None = Field(default=None, max_length=10_000)
    """Why, for a person."""
    span: int | None = Field(default=None, ge=1, lt=2**32)
    """Sequence of the span that it judges; None for the whole attempt."""
    key: str | None = Field(default=None, pattern=r"^[!-~]{1,128}$")
    """Makes it safe to send again: of one attempt's rewards with the same key only the first is kept (those that are
    trusted and those that are not apart). Printable ASCII without spaces."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.value is None and not self.dimensions:
            raise ValueError("a reward needs a value or dimensions")
        return self


class Reward(Judgement):
    """A judgement as it is kept: a span of kind `reward`."""

    trusted: bool = True
    """False for what an agent says of itself, unless `trust_agent_rewards` is set: not trained on."""
    late: bool = False
    """True when it came after the attempt had ended."""

    def attributes(self) -> dict[str, Any]:
        """The reward as attributes of a span."""
        return {REWARD_PREFIX + name: value for name, value in self.model_dump(exclude_defaults=True).items()}

    @classmethod
    def of(cls, span: Span) -> Reward:
        """The reward that a span of kind `reward` holds."""
        said = span.attributes or {}
        return cls(**{name: said[REWARD_PREFIX + name] for name in cls.model_fields if REWARD_PREFIX + name in said})


def missing_rollout(rid: str, is_known: Callable[[str], bool]) -> str:
    """Says that a rollout is not there, and names the first one of the task of that name, if there is one."""
    first = f"{rid}.0"
    way = f"did you mean {first}?" if is_known(first) else "`penstock rollouts` lists them"
    return f"there is no rollout {rid!r}; {way}"


class Attempt(Noun):
    """One try at a rollout."""

    rollout: Id
    """The rollout it is a try at."""
    id: Id
    """Its name within the rollout."""
    sequence: int = 1
    """Its number within the rollout, from 1."""
    status: AttemptStatus = AttemptStatus.RUNNING
    """Where it stands."""
    created_ns: int = 0
    """When it was claimed, or first seen."""
    last_seen_ns: int = 0
    """When it was last heard of: when its newest call began or ended."""
    spans: int = 0
    """The highest span sequence given out."""
    totals: Totals = Field(default_factory=Totals)
    """Sums over its spans."""
    worker: str | None = None
    """The worker that has claimed it; None when it did not come from the queue."""
    lease_ns: int | None = None
    """When its worker loses it unless it is heard of before; ns since the epoch."""
    ended_ns: int | None = None
    """When it ended; None while it has not."""
    outcome: Outcome | None = None
    """What is known of its end."""
    reward: float | None = None
    """Value of the newest trusted reward; late ones count."""
    reward_on_failure: float | None = None
    """What its worker has said for the case that the rollout fails with it; the rollout's configuration is first."""


class Rollout(Noun):
    """One task given to one agent."""

    id: Id
    """Its name, unique on the tape."""
    origin: Origin = "header"
    """Made by the queue, by an address in a request, or guessed from the conversation."""
    mode: Mode = "online"
    """What it is for."""
    status: RolloutStatus = RolloutStatus.RUNNING
    """Where it stands."""
    created_ns: int = 0
    """When it was first seen."""
    input: Any = None
    """The task, any JSON."""
    group: str | None = None
    """The task it repeats, for group-relative advantage."""
    metadata: dict[str, Any] | None = None
    """Anything its maker wants to find again."""
    priority: int = 0
    """The highest is handed out first; within one priority the oldest."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """How its attempts are watched and repeated."""
    tries: int = 0
    """Attempts that the queue has handed out, less those that were handed back."""
    attempt: str | None = None
    """The attempt that the queue handed out last."""
    place: int | None = None
    """Its place in the queue: of one priority the lowest is handed out first. None when it was never queued."""
    ended_ns: int | None = None
    """When it came into its final state; None while it has not."""


class RolloutSummary(Rollout):
    """A rollout with what became of it."""

    attempts: list[Attempt] = Field(default_factory=list[Attempt])
    """Its attempts, oldest first."""
    totals: Totals = Field(default_factory=Totals)
    """Sums over its attempts."""
    last_seen_ns: int = 0
    """When it was last heard of: when its newest call began or ended."""
    reward: float | None = None
    """The reward of its newest attempt that has one."""
    tool_runs: int = 0
    """Calls of tools of servers behind the gateway (MCP); `tool_calls` are those that models asked for."""


class WorkerUsage(Noun):
    """The load of a worker's machine and of its agents."""

    cpu_percent: float | None = None
    """CPU of its agents; 100 is one core."""
    memory_bytes: int | None = None
    """Resident memory of its agents."""
    gpu_percent: float | None = None
    """Busiest GPU of its machine."""
    gpu_memory_bytes: int | None = None
    """Memory in use on all its GPUs."""


class Worker(Noun):
    """A process that claims and runs rollouts."""

    id: Id
    """Its name."""
    first_seen_ns: int = 0
    """When it was first heard of."""
    last_seen_ns: int = 0
    """When it was last heard of."""
    figures: WorkerUsage = Field(default_factory=WorkerUsage)
    """As of its last heartbeat."""
    attempts: list[str] = Field(default_factory=list[str])
    """What it is working on: ROLLOUT/ATTEMPT."""
    finished: int = 0
    """Attempts that it has finished."""


def deciding_attempt(attempts: Sequence[Attempt]) -> Attempt | None:
    """The attempt that counts: the newest that succeeded, else the newest; None if there is none."""
    good = [one for one in attempts if one.status == AttemptStatus.SUCCEEDED]
    return next(reversed(good or attempts), None)


# A rollout together with the sums of its attempts.


def summarised(rollout: Rollout, attempts: Sequence[Attempt]) -> RolloutSummary:
    """A rollout with its attempts, oldest first, and their sums."""
    return RolloutSummary(
        **dict(rollout),
        attempts=list(attempts),
        totals=sum_totals(attempt.totals for attempt in attempts),
        last_seen_ns=last_seen_ns(rollout, attempts),
        reward=reward(attempts),
    )


def last_seen_ns(rollout: Rollout, attempts: Sequence[Attempt]) -> int:
    """The time of the rollout's last sign of life; ns since the epoch."""
    return max((attempt.last_seen_ns for attempt in attempts), default=rollout.created_ns)


def reward(attempts: Sequence[Attempt]) -> float | None:
    """The reward of the newest attempt that has one; None if none has."""
    return next((attempt.reward for attempt in reversed(attempts) if attempt.reward is not None), None)


def sum_totals(parts: Iterable[Totals]) -> Totals:
    """The sum of totals, field by field."""
    rows = [dict(one) for one in parts]
    sums: dict[str, Any] = {name: sum(row[name] or 0 for row in rows) for name in Totals.model_fields}
    if all(row["cost"] is None for row in rows):
        sums["cost"] = None
    return Totals(**sums)


# The states as tables of legal moves, and the state that follows from an event. The caller supplies the time and writes
# the result.
#
#     a rollout is enqueued     queuing
#     a worker claims it        preparing        a new attempt: preparing, with a lease
#     its agent is heard of     running          the attempt: running (a first call, a heartbeat that says so)
#     the attempt ends          the attempt: succeeded, failed, timeout, unresponsive or cancelled; the rollout follows:
#                               succeeded; cancelled; requeuing if `retry_on` names the end and attempts are left;
#                               failed
#     it is handed back         the attempt: environment, also after it had failed; the rollout: requeuing. No try at
#                               the task was made: the agent could not work where it was run
#
# An attempt that is `unresponsive` while its rollout waits for another one is revived by a sign of life: the rollout
# leaves the queue again and nothing runs twice. Once another worker has claimed the rollout the old attempt is
# superseded for good. A queued rollout leaves its final state only by `requeue`, which must be requested, or when it
# is handed back.
#
# An attempt that no worker has claimed (an agent that was given an address by hand, a client without an address) has
# no worker that reports its end. It ends when it was silent for a *quiet time*: `failed` if its last call failed, else
# `ended`. Its rollout ends like the attempt that was heard of last. The next call or event makes both run again. A
# reported end stays. Agent Lightning's clients (`work.lightning`) may say how a rollout or an attempt stands, whatever
# the clock has said before, and may begin an attempt beside one that lives; a worker that is asked for neither never
# does. Gateways before there was `ended` have called every quiet end `succeeded`: it stays so on their
# tapes, until the next call.

ROLLOUT_MOVES: Final[dict[RolloutStatus, dict[RolloutStatus, str]]] = {
    RolloutStatus.QUEUING: {
        RolloutStatus.PREPARING: "claim",
        RolloutStatus.RUNNING: "a client says so",
        RolloutStatus.SUCCEEDED: "a client says so",
        RolloutStatus.FAILED: "a client says so",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.PREPARING: {
        RolloutStatus.RUNNING: "first sign of the agent",
        RolloutStatus.SUCCEEDED: "finish",
        RolloutStatus.FAILED: "finish, timeout, lost",
        RolloutStatus.REQUEUING: "finish, timeout, lost, hand back",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.RUNNING: {
        RolloutStatus.SUCCEEDED: "finish",
        RolloutStatus.FAILED: "finish, timeout, lost, quiet after a failed call",
        RolloutStatus.ENDED: "quiet",
        RolloutStatus.REQUEUING: "finish, timeout, lost, hand back",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.REQUEUING: {
        RolloutStatus.PREPARING: "claim",
        RolloutStatus.RUNNING: "revive",
        RolloutStatus.SUCCEEDED: "a client says so",
        RolloutStatus.FAILED: "a client says so",
        RolloutStatus.CANCELLED: "cancel",
    },
    RolloutStatus.SUCCEEDED: {
        RolloutStatus.REQUEUING: "requeue",
        RolloutStatus.RUNNING: "heard of after quiet, old tapes",
        RolloutStatus.FAILED: "a client says so",
    },
    RolloutStatus.FAILED: {
        RolloutStatus.REQUEUING: "requeue, hand back",
        RolloutStatus.RUNNING: "heard of after quiet",
        RolloutStatus.SUCCEEDED: "a client says so",
    },
    RolloutStatus.ENDED: {RolloutStatus.RUNNING: "heard of after quiet"},
    RolloutStatus.CANCELLED: {RolloutStatus.REQUEUING: "requeue"},
}
"""From -> to -> the event. Every change of a rollout's status is one of these."""

ATTEMPT_MOVES: Final[dict[AttemptStatus, dict[AttemptStatus, str]]] = {
    AttemptStatus.PREPARING: {
        AttemptStatus.RUNNING: "first sign of the agent",
        AttemptStatus.SUCCEEDED: "finish",
        AttemptStatus.FAILED: "finish",
        AttemptStatus.TIMEOUT: "timeout",
        AttemptStatus.UNRESPONSIVE: "lost",
        AttemptStatus.CANCELLED: "cancel",
        AttemptStatus.ENVIRONMENT: "hand back",
    },
    AttemptStatus.RUNNING: {
        AttemptStatus.SUCCEEDED: "finish",
        AttemptStatus.FAILED: "finish, quiet after a failed call",
        AttemptStatus.ENDED: "quiet",
        AttemptStatus.TIMEOUT: "timeout",
        AttemptStatus.UNRESPONSIVE: "lost",
        AttemptStatus.CANCELLED: "cancel",
        AttemptStatus.ENVIRONMENT: "hand back",
    },
    AttemptStatus.UNRESPONSIVE: {
        AttemptStatus.RUNNING: "revive",
        AttemptStatus.SUCCEEDED: "a client says so",
        AttemptStatus.FAILED: "a client says so",
    },
    AttemptStatus.SUCCEEDED: {
        AttemptStatus.RUNNING: "heard of after quiet, old tapes",
        AttemptStatus.FAILED: "a client says so",
    },
    AttemptStatus.FAILED: {
        AttemptStatus.ENVIRONMENT: "hand back",
        AttemptStatus.RUNNING: "heard of after quiet",
        AttemptStatus.SUCCEEDED: "a client says so",
    },
    AttemptStatus.ENDED: {AttemptStatus.RUNNING: "heard of after quiet"},
    AttemptStatus.TIMEOUT: {AttemptStatus.SUCCEEDED: "a client says so", AttemptStatus.FAILED: "a client says so"},
    AttemptStatus.CANCELLED: {},
    AttemptStatus.ENVIRONMENT: {},
}
"""From -> to -> the event. Every change of an attempt's status is one of these."""

WAITING: Final = frozenset({RolloutStatus.QUEUING, RolloutStatus.REQUEUING})
"""States of a rollout in the queue."""
ACTIVE: Final = frozenset({RolloutStatus.PREPARING, RolloutStatus.RUNNING})
"""States of a rollout that neither waits nor has ended. A rollout from the queue is then held by a worker."""
UNFAILED: Final = frozenset({RolloutStatus.SUCCEEDED, RolloutStatus.ENDED})
"""States of a rollout that is over and has not failed, as far as anybody knows."""
FINAL: Final = UNFAILED | {RolloutStatus.FAILED, RolloutStatus.CANCELLED}
"""States of a rollout that is over."""
LIVE: Final = frozenset({AttemptStatus.PREPARING, AttemptStatus.RUNNING})
"""States of an attempt that has not ended."""

_RETRIES: Final[dict[AttemptStatus, Retry]] = {
    AttemptStatus.FAILED: "failed",
    AttemptStatus.TIMEOUT: "timeout",
    AttemptStatus.UNRESPONSIVE: "unresponsive",
}


class IllegalMove(Exception):
    """A change of status that the tables do not have: a bug of the caller, which must check first."""


def move_rollout(before: RolloutStatus, after: RolloutStatus) -> RolloutStatus:
    """Return `after`; raises `IllegalMove` unless the table has the move."""
    if after not in ROLLOUT_MOVES[before]:
        raise IllegalMove(f"a rollout cannot go from {before} to {after}")
    return after


def move_attempt(before: AttemptStatus, after: AttemptStatus) -> AttemptStatus:
    """Return `after`; raises `IllegalMove` unless the table has the move."""
    if after not in ATTEMPT_MOVES[before]:
        raise IllegalMove(f"an attempt cannot go from {before} to {after}")
    return after


def after_attempt(end: AttemptStatus, tries: int, config: RolloutConfig) -> RolloutStatus:
    """The state of the rollout after its attempt, the `tries`-th, has ended like this."""
    if end == AttemptStatus.SUCCEEDED:
        return RolloutStatus.SUCCEEDED
    if end == AttemptStatus.CANCELLED:
        return RolloutStatus.CANCELLED
    if end == AttemptStatus.ENVIRONMENT:
        return RolloutStatus.REQUEUING
    again = _RETRIES[end] in config.retry_on and tries < config.max_attempts
    return RolloutStatus.REQUEUING if again else RolloutStatus.FAILED


def attempt_deadline(
    config: RolloutConfig, created_ns: int, seen_ns: int, lease_ns: int | None
) -> tuple[int, AttemptStatus] | None:
    """(time, state) of the end of a live attempt without a further sign of life; ns since the epoch. None if it never
    ends so. `created_ns`: when it was claimed. `seen_ns`: its newest sign of life. `lease_ns`: when its worker loses
    it."""
    ends: list[tuple[int, AttemptStatus]] = []
    if config.timeout_s is not None:
        ends.append((created_ns + _ns(config.timeout_s), AttemptStatus.TIMEOUT))
    if config.unresponsive_s is not None:
        ends.append((seen_ns + _ns(config.unresponsive_s), AttemptStatus.UNRESPONSIVE))
    if lease_ns is not None:
        ends.append((lease_ns, AttemptStatus.UNRESPONSIVE))
    return min(ends, default=None)


def is_claimed(origin: Origin, status: RolloutStatus) -> bool:
    """True if a worker holds the rollout; always False for one that did not come from the queue."""
    return origin == "queued" and status in ACTIVE


def quiet_deadline(seen_ns: int, quiet_s: float) -> int:
    """The end of an attempt that nobody has claimed, without a further sign of life; ns since the epoch."""
    return seen_ns + _ns(quiet_s)


def _ns(seconds: float) -> int:
    return int(min(seconds, LONGEST_S) * 1e9)
