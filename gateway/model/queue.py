"""Messages of clients that queue work, of workers and of judges, and the gateway's answers.

A worker *claims* attempts, keeps them by *heartbeats*, and *finishes* them. A worker that has lost the lease of a claim
learns so with its next heartbeat and can no longer finish the attempt. Every request may be sent again after a lost
answer: rollouts are known by the caller's ids, ends by the attempt, rewards by their key.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from penstock.gateway.model.base import ActionRequest, Id, Mode, Noun
from penstock.gateway.model.rollout import (
    Attempt,
    AttemptStatus,
    Judgement,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    WorkerUsage,
)

MOST_ROLLOUTS = 10_000
MOST_EVENTS = 1_000
LONGEST_WAIT_S = 60.0
QueueState = Literal["open", "paused", "draining"]
"""`paused` and `draining` hand out nothing; workers stay when it is paused and leave when it is draining."""
AttemptEnd = Literal["succeeded", "failed", "timeout", "cancelled", "environment"]
"""The ends of an attempt that a worker may report. With `environment` it hands the attempt back: the agent could not
work where it was run, so it was no try at the task. An attempt that the worker has finished as `failed` can be handed
back too."""
Scalar = str | bool | float | Annotated[int, Field(ge=-(2**63), lt=2**63)] | None
T = TypeVar("T")


def finite(value: T) -> T:
    """The value itself; raises `ValueError` if it has a number that JSON cannot hold: one such as 1e999 is read as
    infinity, and would be kept as null."""
    with suppress(TypeError, RecursionError):
        try:
            _ = json.dumps(value, allow_nan=False)
        except ValueError:
            raise ValueError("a number in it is larger than 1.8e308, or is none") from None
    return value


class RolloutSpec(Noun):
    """A task to be queued."""

    id: Id | None = None
    """Its name; made up when not given. A name that is queued already is not queued again."""
    input: Annotated[Any, AfterValidator(finite)] = None
    """The task, any JSON."""
    mode: Mode = "train"
    """What it is for."""
    group: str | None = Field(default=None, max_length=256)
    """The task it repeats, for group-relative advantage."""
    priority: int = Field(default=0, ge=-1000, le=1000)
    """The highest is handed out first."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    """How its attempts are watched and repeated."""
    metadata: Annotated[dict[str, Any] | None, AfterValidator(finite)] = None
    """Anything its maker wants to find again."""


class EnqueueRequest(Noun):
    """Tasks to be queued, all of them or none."""

    rollouts: list[RolloutSpec] = Field(min_length=1, max_length=MOST_ROLLOUTS)
    """In the order in which they are to be handed out."""


class EnqueueResult(Noun):
    """The rollout of one task that was queued: new, or found under the same name."""

    id: Id
    """Its name."""
    status: RolloutStatus
    """Where it stands."""
    created: bool
    """False when a rollout of this name was there already."""


class EnqueueAnswer(Noun):
    """The rollouts of the tasks that were queued."""

    rollouts: list[EnqueueResult]
    """In the order of the request."""


class ClaimRequest(Noun):
    """A worker asks for work."""

    worker: Id
    """Its name."""
    limit: int = Field(default=1, ge=1, le=100)
    """Attempts that it takes at most."""
    wait_s: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_S)
    """How long the answer may wait for work when there is none; s."""
    lease_s: float = Field(default=30.0, ge=1, le=3600)
    """How long the attempts are its own unless it is heard of; s."""
    modes: list[Mode] | None = Field(default=None, min_length=1)
    """What it takes; everything when not given."""
    reward_on_failure: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of what it takes where the rollout fails without one; the rollout's own configuration is first."""


class Claim(Noun):
    """An attempt to be run."""

    rollout: Rollout
    """The task."""
    attempt: Attempt
    """The attempt, `preparing`."""
    address: str
    """Path of the agent's calls below the gateway's URL: base URLs are this and `/v1`, or this alone for Anthropic."""
    token: str
    """The agent's API key: it opens this rollout and nothing else."""


class ClaimAnswer(Noun):
    """The attempts that a worker has claimed; none when no rollout came in time."""

    claims: list[Claim]
    """Empty when there was none in time."""
    queue: QueueState
    """A worker leaves when it is `draining`."""
    waiting: int
    """Rollouts that are still in the queue, of all modes."""


class HeldAttempt(Noun):
    """An attempt that a worker believes to hold."""

    rollout: Id
    """Its rollout."""
    attempt: Id
    """Its name."""
    running: bool = False
    """True once the agent is at work."""


class HeartbeatRequest(Noun):
    """A worker says that it is alive and what it is doing."""

    attempts: list[HeldAttempt] = Field(default_factory=list[HeldAttempt], max_length=1000)
    """What it is working on; their leases begin anew."""
    complete: bool = True
    """True when `attempts` is all that it is working on: what it no longer names is over there."""
    lease_s: float = Field(default=30.0, ge=1, le=3600)
    """How long they are its own from now; s."""
    figures: WorkerUsage = Field(default_factory=WorkerUsage)
    """What its machine and agents use."""


class LeaseAnswer(Noun):
    """The state of a worker's lease on an attempt after a heartbeat."""

    rollout: Id
    """Its rollout."""
    attempt: Id
    """Its name."""
    held: bool
    """False: kill the agent, its result is not wanted any more."""
    status: AttemptStatus | None
    """Where the attempt stands; None when there is none."""


class HeartbeatAnswer(Noun):
    """The state of each lease that a worker has asked to renew."""

    attempts: list[LeaseAnswer]
    """In the order of the request."""
    queue: QueueState
    """Whether there will be more work."""


class Event(Noun):
    """Something that happened in an attempt: a line of output, a state, a figure."""

    name: str = Field(min_length=1, max_length=256)
    """What it is, such as `stdout`."""
    time_ns: int | None = Field(default=None, ge=0, lt=2**63)
    """When; ns since the epoch. Now when not given."""
    parent_id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """Span id of the agent's span that it stands in."""
    attributes: dict[str, Scalar] = Field(default_factory=dict[str, Scalar])
    """The rest of it."""


class FinishRequest(Noun):
    """A worker says how an attempt ended. Its rewards are kept with it, in one transaction."""

    worker: Id | None = None
    """Its name; an attempt that a worker has claimed is finished by that worker or, without a name, by anybody."""
    status: AttemptEnd
    """How it ended."""
    outcome: Outcome = Field(default_factory=Outcome)
    """What is known of it."""
    events: list[Event] = Field(default_factory=list[Event], max_length=MOST_EVENTS)
    """What happened last in it; kept before its rewards, as those that are added for themselves. Of an end that is
    known already they are kept only if its `outcome.duration_ns` is not, so that none is kept twice."""
    rewards: list[Judgement] = Field(default_factory=list[Judgement], max_length=100)
    """How well it went."""


class FinishAnswer(Noun):
    """The rollout and the attempt after the attempt was finished."""

    rollout: Rollout
    """The rollout as it is now: ended, or queued for another attempt."""
    attempt: Attempt
    """The attempt as it is now. Every earlier call of it is durable."""


class RewardAnswer(Noun):
    """A reward that was kept."""

    sequence: int
    """Its span within the attempt."""
    trusted: bool
    """Whether it is trained on."""
    late: bool
    """Whether the attempt had ended before."""
    reward: float | None
    """The attempt's reward now."""


class EventsRequest(Noun):
    """Events of an attempt, in the order in which they happened."""

    events: list[Event] = Field(min_length=1, max_length=MOST_EVENTS)
    """Each becomes a span of kind `event`."""


class EventsAnswer(Noun):
    """The spans that posted events became."""

    sequences: list[int]
    """Their spans within the attempt."""


class FeedbackRequest(Judgement):
    """A reward for a response, found by the id that the provider gave it."""

    response_id: str = Field(min_length=1, max_length=256)
    """Such as `chatcmpl-...`, `resp_...` or `msg_...`."""


class FeedbackAnswer(RewardAnswer):
    """A reward that was kept, and where."""

    rollout: Id
    """The rollout that the response belongs to."""
    attempt: Id
    """The attempt that it belongs to."""


class QueueRequest(ActionRequest):
    """Opens or closes the queue."""

    state: QueueState
    """`open` hands out work, `paused` does not, `draining` does not and sends workers home."""


class QueueStatus(Noun):
    """The state of the queue, and how many rollouts wait in it or are claimed."""

    state: QueueState
    """Whether it is handed out."""
    waiting: dict[Mode, int]
    """Rollouts in the queue, by mode; modes without any are left out."""
    claimed: int
    """Attempts in workers' hands."""
    oldest_ns: int | None
    """When the rollout that has waited longest was made; ns since the epoch."""


class WorkerList(Noun):
    """The workers that the gateway has heard of lately."""

    workers: list[Worker]
    """By name."""
