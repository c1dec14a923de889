"""The tool that compares two versions by the rollouts that each has served.

The newest spans tell which version served which rollout; the rollouts tell the outcome. Rollouts that have seen both
versions are left out, and so are calls that were made to try a release (replays, mirrored calls, rehearsals).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from statistics import NormalDist, median, variance
from typing import Annotated, NamedTuple

from pydantic import Field
from rich.text import Text

from penstock.console.mcp_server.rollouts import Filter
from penstock.console.mcp_server.tool import (
    ToolAnswer,
    ToolArguments,
    ToolContext,
    ToolDefinition,
    ToolError,
    ToolResult,
    moment,
    plain,
)
from penstock.console.mcp_server.versions import resource_of, version_of
from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.table import plain as cell
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import Id
from penstock.gateway.model.facts import is_release_call
from penstock.gateway.model.rollout import FINAL, Reward, RolloutSummary
from penstock.gateway.model.span import Span
from penstock.gateway.reading.policy.report import mean

# Compares two small samples of rewards: an interval for the difference of their means, or None if it is too early.
# Pure.
#
# Welch's interval with Student's t. It is right for one look at independent rollouts; it is not the anytime-valid
# test of releases, which is valid however often one looks.

FEWEST = 10
"""Fewest rewards of each version for an interval."""


class MeanDifference(NamedTuple):
    """Mean of the other less mean of the one, with its 95 % interval."""

    value: float
    low: float
    high: float


def difference(one: Sequence[float], other: Sequence[float]) -> MeanDifference | None:
    """The difference of the means. None with too few rewards, without variance, or if it cannot be computed."""
    if min(len(one), len(other)) < FEWEST:
        return None
    try:
        parts = [variance(values) / len(values) for values in (one, other)]
        error = sum(parts)
        if not 0 < error**2 < inf:
            return None
    except OverflowError:
        return None
    freedom = error**2 / sum(part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True))
    value, reach = mean(other) - mean(one), student(0.975, freedom) * sqrt(error)
    return MeanDifference(value, value - reach, value + reach)


def student(probability: float, freedom: float) -> float:
    """Quantile of Student's t by its expansion around the normal one: right to 0.1 % from 9 degrees of freedom on."""
    z = NormalDist().inv_cdf(probability)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


SPANS, ROLLOUTS = 20_000, 5_000
"""Most spans and rollouts that are read, the newest."""
SEVERAL = 5
"""Most rollouts of each version that are named."""


class CompareVersionsArguments(ToolArguments):
    name: Id
    """The resource."""
    one: Id
    """A version, such as the stable one."""
    other: Id
    """Another version."""
    filter: Filter = ""
    """Only rollouts that match, such as `mode:val` or `started>7d group:q*`."""
    spans: Annotated[int, Field(ge=100, le=SPANS)] = SPANS
    """How many of the newest spans to look at."""


class VersionFigures(ToolAnswer):
    """The outcomes of the rollouts that one version served."""

    version: str
    rollouts: int
    """Rollouts that it served, and it alone."""
    ended: int
    """Those that have ended."""
    failed: int
    """Those that ended as failed."""
    rewarded: int
    """Those with a reward."""
    mean_reward: float | None
    calls: float | None
    """Model calls of a rollout, on average."""
    errors: float | None
    """Failed calls of a rollout, on average."""
    input_tokens: float | None
    """Of a rollout, on average; of those whose tokens were counted."""
    output_tokens: float | None
    """Of a rollout, on average; of those whose tokens were counted."""
    median_call_ms: float | None
    """Half of its calls took no longer."""
    cost: float | None
    """Mean of the rewards' dimension `cost`; none where nobody gives it."""
    first: str | None
    """When the first of them began."""
    last: str | None
    """When the last of them began."""
    lowest: list[str]
    """Some of its rollouts, those with the lowest rewards first: read these."""


class ComparisonAnswer(ToolAnswer):
    """Two versions side by side."""

    name: str
    versions: list[VersionFigures]
    difference: float | None
    """Mean reward of the other less that of the one."""
    interval: list[float] | None
    """95 % interval of the difference; none where there is too little to tell."""
    verdict: str
    cautions: list[str]
    """What to keep in mind."""
    looked_at: int
    """Spans that were looked at."""
    complete: bool
    """Whether these are all spans of the tape."""


@dataclass(slots=True)
class VersionRollouts:
    """The rollouts of one version, with call durations in ns and costs."""

    version: str
    rollouts: list[RolloutSummary] = field(default_factory=list[RolloutSummary])
    durations: list[int] = field(default_factory=list[int])
    costs: list[float] = field(default_factory=list[float])

    @property
    def rewards(self) -> list[float]:
        """The rewards of the rollouts that have one."""
        return [one.reward for one in self.rollouts if one.reward is not None]

    def figures(self) -> VersionFigures:
        ended = [one for one in self.rollouts if one.status in FINAL]
        times = [one.created_ns for one in self.rollouts]
        worst = sorted((one for one in self.rollouts if one.reward is not None), key=lambda one: one.reward or 0.0)
        totals = [one.totals for one in self.rollouts]
        return VersionFigures(
            version=self.version,
            rollouts=len(self.rollouts),
            ended=len(ended),
            failed=sum(one.status == "failed" for one in ended),
            rewarded=len(self.rewards),
            mean_reward=_mean(self.rewards),
            calls=_mean(t.calls for t in totals),
            errors=_mean(t.errors for t in totals),
            input_tokens=_mean(t.input_tokens for t in totals if t.input_tokens is not None and not t.uncounted),
            output_tokens=_mean(t.output_tokens for t in totals if t.output_tokens is not None and not t.uncounted),
            median_call_ms=round(median(self.durations) / 1e6, 1) if self.durations else None,
            cost=_mean(self.costs),
            first=moment(min(times, default=None)),
            last=moment(max(times, default=None)),
            lowest=[one.id for one in worst[:SEVERAL]],
        )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(mean(found), 4) if found else None


async def compare(context: ToolContext, asked: CompareVersionsArguments) -> ToolResult:
    """Two versions by their rollouts."""
    if asked.one == asked.other:
        raise ToolError("these are one and the same version: name two, such as one='v1' other='v2'")
    found = await resource_of(context.client, asked.name)
    names = (version_of(found, asked.one).version, version_of(found, asked.other).version)
    spans, rollouts = await asyncio.gather(_spans(context.client, asked.spans), _rollouts(context.client, asked.filter))
    one, other, mixed = split_by_version(asked.name, names, spans, rollouts)
    told = difference(one.rewards, other.rewards)
    means = [_mean(side.rewards) for side in (one, other)]
    apart = (means[1] or 0.0) - (means[0] or 0.0)
    answer = ComparisonAnswer(
        name=asked.name,
        versions=[one.figures(), other.figures()],
        difference=round(apart, 4) if None not in means and isfinite(apart) else None,
        interval=None if told is None else [round(told.low, 4), round(told.high, 4)],
        verdict=_verdict(one, other),
        cautions=list(_cautions(one, other, mixed, randomised(asked.name, names, spans))),
        looked_at=len(spans),
        complete=len(spans) < asked.spans,
    )
    return ToolResult(answer, _text(answer))


async def _spans(client: Client, most: int) -> list[Span]:
    found = client.recent_spans("kind:llm,reward", most)
    return [span async for span in found if not is_release_call(span)]


async def _rollouts(client: Client, filter: str) -> list[RolloutSummary]:
    return [one async for one in client.rollouts(filter, ROLLOUTS)]


def split_by_version(
    name: str, versions: tuple[str, str], spans: Sequence[Span], rollouts: Sequence[RolloutSummary]
) -> tuple[VersionRollouts, VersionRollouts, int]:
    """Returns the rollouts of each version, and the number of rollouts that have seen more than one version."""
    served = dict[str, set[str]]()
    for span in spans:
        if name in (span.versions or {}):
            served.setdefault(span.rollout, set()).add((span.versions or {})[name])
    both = (VersionRollouts(versions[0]), VersionRollouts(versions[1]))
    by_version = {side.version: side for side in both}
    mixed, mine = 0, dict[str, VersionRollouts]()
    for one in rollouts:
        seen = served.get(one.id, set())
        if len(seen) > 1:
            mixed += bool(seen & set(versions))
        elif seen and (side := by_version.get(next(iter(seen)))) is not None:
            side.rollouts.append(one)
            mine[one.id] = side
    _calls(mine, name, spans)
    return (*both, mixed)


def _calls(mine: dict[str, VersionRollouts], name: str, spans: Sequence[Span]) -> None:
    """Adds the durations of the calls that a version served, and the newest cost of each rollout."""
    priced = set[str]()
    for span in spans:
        side = mine.get(span.rollout)
        if side is None:
            continue
        if span.kind == "llm" and name in (span.versions or {}) and span.duration_ns is not None:
            side.durations.append(span.duration_ns)
        if span.kind == "reward" and span.rollout not in priced:
            given = Reward.of(span)
            if given.trusted and "cost" in given.dimensions:
                priced.add(span.rollout)
                side.costs.append(given.dimensions["cost"])


def randomised(name: str, versions: tuple[str, str], spans: Sequence[Span]) -> bool:
    """True if one release has assigned all of these rollouts their version."""
    served = [span for span in spans if (span.versions or {}).get(name) in versions]
    releases = {frozenset(arm.partition(":")[0] for arm in (span.arm or "").split(",")) for span in served}
    return len(releases) == 1 and releases != {frozenset({""})}


def _verdict(one: VersionRollouts, other: VersionRollouts) -> str:
    counts = [(side.version, len(side.rewards)) for side in (one, other)]
    few = [f"{version} has {count}" for version, count in counts if count < FEWEST]
    if few:
        return f"Too little to tell: it takes {FEWEST} rewarded rollouts of each version, and {' and '.join(few)}."
    told = difference(one.rewards, other.rewards)
    if told is None:
        pairs = [f"every reward of {side.version} is {side.rewards[0]:.6g}" for side in (one, other)]
        return f"Nothing varies: {' and '.join(pairs)}."
    interval = f"{told.value:+.3f} (95 % interval {told.low:+.3f} to {told.high:+.3f})"
    if told.low > 0:
        return f"{other.version} has the higher rewards than {one.version}: {interval}."
    if told.high < 0:
        return f"{other.version} has the lower rewards than {one.version}: {interval}."
    return f"No difference is shown: {other.version} less {one.version} is {interval}, which includes 0."


def _cautions(one: VersionRollouts, other: VersionRollouts, mixed: int, shared_release: bool) -> Iterator[str]:
    if not shared_release:
        yield (
            "The rollouts were not shared out by one release: other tasks, or another time, may be what makes the "
            "difference. Compare the same tasks with `filter`, or let a release decide."
        )
    groups = [{rollout.group for rollout in side.rollouts if rollout.group} for side in (one, other)]
    if all(groups) and groups[0] != groups[1]:
        yield f"{len(groups[0] & groups[1])} of {len(groups[0] | groups[1])} groups (tasks) have rollouts of both."
    for side in (one, other):
        missing = len(side.rollouts) - len(side.rewards)
        if missing and side.rewards:
            yield f"{missing} of {len(side.rollouts)} rollouts of {side.version} have no reward and are in no mean."
    if mixed:
        yield f"{mixed} rollouts have seen several versions and are left out."
    if min(len(one.rewards), len(other.rewards)) >= FEWEST:
        yield "The interval is right for one look. Looking until it pleases is not: a release may be looked at always."


ROWS = (
    ("rollouts", "rollouts"), ("ended", "ended"), ("failed", "failed"), ("rewarded", "rewarded"),
    ("mean reward", "mean_reward"), ("calls a rollout", "calls"), ("failed calls a rollout", "errors"),
    ("input tokens a rollout", "input_tokens"), ("output tokens a rollout", "output_tokens"),
    ("median call, ms", "median_call_ms"), ("mean cost", "cost"), ("first began", "first"), ("last began", "last"),
)  # fmt: skip


def _figure(value: object) -> Text:
    return cell(f"{value:,.6g}" if isinstance(value, float) else value)


def _text(told: ComparisonAnswer) -> str:
    table = Listing(Column(told.name), *(figure(one.version) for one in told.versions))
    for title, name in ROWS:
        table.add_row(cell(title), *(_figure(getattr(one, name)) for one in told.versions))
    whole = "all spans of the tape" if told.complete else f"the newest {told.looked_at:,} spans"
    lines = [told.verdict, "", plain(table), "", f"Of {whole}, and of the newest {ROLLOUTS:,} rollouts that match."]
    for one in told.versions:
        if one.lowest:
            lines.append(f"Lowest rewards of {one.version}: {', '.join(one.lowest)}.")
    return "\n".join([*lines, *(f"Note: {caution}" for caution in told.cautions)])


TOOLS = (
    ToolDefinition(
        "compare_versions",
        "Compare two versions",
        "Compare two versions of a prompt or model by the rollouts that each has served: rewards with a 95 % interval "
        "of their difference, failures, calls, tokens, latency, cost where rewards have a dimension `cost`. Says when "
        f"there is too little to tell (fewer than {FEWEST} rewarded rollouts of a version) and what else to beware of. "
        f"Looks at the newest {SPANS:,} spans and {ROLLOUTS:,} rollouts at most; narrow it with `filter`, such as "
        "`mode:val started>7d`.",
        CompareVersionsArguments,
        ComparisonAnswer,
        compare,
    ),
)
