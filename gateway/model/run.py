"""The nouns of training runs, for trainers that report and readers that ask.

A trainer is another process. It starts a *run*, reports *points* (the values of its metrics at a step) and *events*
(lines for a person), and finishes it. Every request may be sent again after a lost answer: runs are known by their
name, points by their step, events by their time.

A value that is no finite number is kept as null, because a run that diverges must show it: JSON has no NaN, and
refusing the batch would lose its other values. At one step a metric has one value, the one that was reported last.

A trainer that is started again gives the step at which it continues (`since_step`): points of that step and later are
superseded. The number of the resume (`resumed`) makes that request safe to send again, and a trainer that was replaced
is refused.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from penstock.gateway.model.answers import Page
from penstock.gateway.model.base import Id, Noun

RunKind = Literal["grpo", "sft", "dpo", "apo", "custom"]
RunEndStatus = Literal["succeeded", "failed", "stopped"]
RunStatus = Literal["running", "succeeded", "failed", "stopped", "silent"]
EventLevel = Literal["info", "warning", "error"]
ENDS: tuple[RunEndStatus, ...] = get_args(RunEndStatus)

MOST_POINTS = 10_000
"""Most points of one request."""
MOST_VALUES = 20_000
"""Most values in the points of one request."""
MOST_METRICS = 512
"""Most metrics of a run."""
MOST_CONFIG = 256 << 10
"""Most bytes of a run's configuration, as JSON."""
MOST_EVENTS = 1_000
"""Most events of one request."""
LONGEST_TEXT = 4_000
"""Most characters of an event or a message."""
MOST_READ = 500_000
"""Most buckets of one answer."""
MOST_CANDIDATES = 100
"""Most candidates of a run that are reported."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


METRIC = r"^[A-Za-z0-9_][A-Za-z0-9_./:@%-]{0,127}$"
Metric = Annotated[str, StringConstraints(pattern=METRIC)]
Value = Annotated[float | None, AfterValidator(_finite)]
Step = Annotated[int, Field(ge=0, lt=2**53)]
Time = Annotated[int, Field(ge=0, lt=2**62)]


class VersionReference(Noun):
    """A version of a resource that a run has made."""

    name: Id
    """The resource."""
    version: Id
    """Its version."""


CandidateState = Literal["seed", "tried", "racing", "better", "out", "winner"]


class RunCandidate(Noun):
    """A candidate of a run that searches, such as one that optimises prompts."""

    id: Id
    """Its name within the run."""
    parent: Id | None = None
    """The candidate that it was made from; None for the one that the run began with."""
    claim: str = Field(default="", max_length=400)
    """The failure that it is to mend, for a person."""
    state: CandidateState = "tried"
    """Where it stands: `tried` in the search; a finalist is `racing`, then `better` or `out`; `winner` at the end."""
    step: Step = 0
    """The step at which it came."""
    rollouts: int = Field(default=0, ge=0)
    """Rollouts of the search that have a reward."""
    mean: Value = None
    """Their mean reward."""
    length: int = Field(default=0, ge=0)
    """Characters of its texts."""
    pairs: int = Field(default=0, ge=0)
    """Tasks of the race that it was compared on."""
    gain: Value = None
    """Mean of its rewards less those of the candidate that the run began with, in the race."""
    e_value: Value = None
    """Evidence against "it is no better"."""
    needed: Value = None
    """The e-value at which it is better."""


class CandidateTree(Noun):
    """The candidates of a run, each below the one that it was made from."""

    candidates: list[RunCandidate] = Field(default_factory=list[RunCandidate], max_length=MOST_CANDIDATES)
    """In the order in which they came."""
    left_out: int = Field(default=0, ge=0)
    """How many more there are; a trainer leaves out the worst."""


class RunHead(Noun):
    """The fields of a training run that a list shows."""

    id: Id
    """Its name, unique on the tape."""
    kind: RunKind
    """How it learns."""
    name: str = ""
    """What it is called, for a person."""
    status: RunStatus = "running"
    """Where it stands. `silent` is a running one that has not been heard of for its lease: found when it is read."""
    created_ns: int = 0
    """When it was started; ns since the epoch."""
    ended_ns: int | None = None
    """When it ended; None while it has not."""
    last_seen_ns: int = 0
    """When its trainer was last heard of."""
    lease_s: float = 300.0
    """After how long without a word of its trainer it is silent; s."""
    step: int | None = None
    """The highest step that has a point; None before the first."""
    steps: int | None = None
    """How many steps are planned; None when that is not known."""
    resumed: int = 0
    """How often its trainer was started again."""
    since_step: int | None = None
    """The step from which it went on when it was last resumed."""
    metrics: list[str] = Field(default_factory=list[str])
    """Names of its metrics, in the order in which they first came."""
    made: list[VersionReference] = Field(default_factory=list[VersionReference])
    """Versions of resources that it has made."""
    message: str | None = None
    """How it stands, or why it ended, for a person."""


class Run(RunHead):
    """One training run, with its configuration and its candidates."""

    config: Any = None
    """What it was started with, any JSON."""
    tree: CandidateTree | None = None
    """Its candidates; None for a run that does not search, or has none yet."""


def status_at(run: RunHead, now_ns: int) -> RunStatus:
    """The status of a run at a time: a running one whose trainer is not heard of is silent."""
    silent = run.status == "running" and now_ns - run.last_seen_ns > run.lease_s * 1e9
    return "silent" if silent else run.status


# -- reports of trainers -----------------------------------------------------------------------------------------------


class NewRun(Noun):
    """A run that is started."""

    id: Id | None = None
    """Its name; the kind and a number when not given. The same run may be sent again under its name."""
    kind: RunKind
    """How it learns."""
    name: str = Field(default="", max_length=256)
    """What it is called, for a person."""
    config: Any = None
    """What it is started with, any JSON of up to 256 KiB."""
    steps: int | None = Field(default=None, ge=1, lt=2**53)
    """How many steps are planned."""
    lease_s: float = Field(default=300.0, ge=1, le=7 * 86400, allow_inf_nan=False)
    """After how long without a word of its trainer it is silent; s."""


class RunChange(Noun):
    """The news of a run that are neither points nor events; fields that are not given stay as they are."""

    message: str | None = Field(default=None, max_length=LONGEST_TEXT)
    """How it stands, for a person."""
    steps: int | None = Field(default=None, ge=1, lt=2**53)
    """How many steps are planned now."""
    made: list[VersionReference] = Field(default_factory=list[VersionReference], max_length=100)
    """Versions that it has made, which must be registered; those that are known already are not doubled."""
    tree: CandidateTree | None = None
    """Its candidates as they stand now, in place of those that it told of before."""


class RunEnd(Noun):
    """The end of a run, as its trainer reports it."""

    status: RunEndStatus
    """How."""
    message: str | None = Field(default=None, max_length=LONGEST_TEXT)
    """Why, for a person."""
    resumed: int | None = Field(default=None, ge=0, lt=2**31)
    """How often the trainer that says so was started again: one that has been replaced is refused. The run's own when
    not given."""


class Point(Noun):
    """The values of metrics at a step."""

    step: Step
    """The step of the trainer, from 0."""
    time_ns: Time | None = None
    """When; ns since the epoch. Now when not given."""
    values: dict[Metric, Value] = Field(min_length=1, max_length=MOST_METRICS)
    """Value by metric. What is no finite number is kept as null."""


class PointsRequest(Noun):
    """Points to be kept; without any it is a sign of life."""

    points: list[Point] = Field(default_factory=list[Point], max_length=MOST_POINTS)
    """In any order. Where a metric has a value at a step already, the new one replaces it."""
    since_step: Step | None = None
    """The trainer was started again and goes on from here: points of this step and later are superseded, and a run that
    had ended runs again."""
    resumed: int | None = Field(default=None, ge=0, lt=2**31)
    """How often the trainer was started again, this time included. With it, `since_step` may be sent again and does
    nothing more, and whoever has been replaced is refused. The run's own when not given, and one more with
    `since_step`."""

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        if (count := sum(len(point.values) for point in self.points)) > MOST_VALUES:
            raise ValueError(f"points: {count:,} values; at most {MOST_VALUES:,} go into one request, send several")
        if self.since_step is not None and self.resumed == 0:
            raise ValueError("resumed: the first resume is 1")
        return self


class RunEvent(Noun):
    """Something that happened in a run, for a person."""

    time_ns: Time | None = None
    """When; ns since the epoch. Now when not given; with it an event may be sent again and is kept once."""
    step: Step | None = None
    """At which step."""
    level: EventLevel = "info"
    """How grave it is."""
    text: str = Field(min_length=1, max_length=LONGEST_TEXT)
    """What happened, such as `published policy v12`."""


class RunEventsRequest(Noun):
    """Events of a run that its trainer posts."""

    events: list[RunEvent] = Field(min_length=1, max_length=MOST_EVENTS)
    """In any order."""


class RunEventsAnswer(Noun):
    """The number of posted events that were kept; events that the run has already are not doubled."""

    kept: int
    """How many were new."""


# -- answers -----------------------------------------------------------------------------------------------------------


class RunPage(Page):
    """A page of training runs, newest first."""

    runs: list[RunHead]
    """Those that match, without their configurations."""


class RunEventPage(Page):
    """Events of a run, newest first."""

    events: list[RunEvent]
    """Those of this page."""


class PointPage(Noun):
    """Points of a run exactly as they were reported, by step."""

    points: list[Point]
    """One for each step that has any."""
    next: int | None
    """Ask for `since_step=next` to go on; None at the end."""


class Curve(Noun):
    """A metric over the steps, in buckets: lists of equal length, an entry for each bucket that has points.

    While there are no more points than were asked for, each is a bucket of its own. Otherwise buckets are of equal
    width in steps, and say the lowest, the highest and the mean of what is in them: no spike is lost.
    """

    metric: str
    """Its name."""
    count: int
    """Points in the range."""
    nulls: int
    """Those whose value was no finite number."""
    exact: bool
    """True when each bucket is one point."""
    last: float | None
    """The value at the highest step of the range; None when there is no point, or when it was no finite number."""
    first_step: list[int]
    """The lowest step with a point in the bucket."""
    last_step: list[int]
    """The highest."""
    finite: list[int]
    """How many of the bucket's points are finite."""
    low: list[float | None]
    """The lowest value; None when none is finite."""
    high: list[float | None]
    """The highest value."""
    mean: list[float | None]
    """The mean of the finite values."""


class CurveList(Noun):
    """Metrics of a run over its steps."""

    run: Id
    """The run."""
    curves: list[Curve]
    """In the order in which the metrics first came."""
