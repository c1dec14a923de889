"""The gateway's metrics, cheap enough for every call: plain integers and lists, no locks, one event loop.

`METRICS` is the single table of names: the collector renders from it, the documentation is compared with it. An
unlabelled counter or gauge is an attribute of `Metrics` named without `penstock_` and `_total`, and its owner adds to
it directly (`metrics.inflight_calls += 1`); metrics with labels or buckets have a method. Labels are few and fixed
(dialect, status, mode, source, names from the configuration or of registered resources; names of releases only for
those that `gateway.releases.reader` shows; as many paths of keys as `calls.call_record` counts): never a model
or a rollout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST
BOUNDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
          0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # fmt: skip
"""Upper bounds of the histograms' buckets, in seconds: from the gateway's own microseconds to a long generation."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """One row of the table `METRICS`."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, MetricDefinition] = {
    "penstock_calls_total": MetricDefinition("counter", "Finished model calls.", ("dialect", "status")),
    "penstock_ambiguous_calls_total": MetricDefinition(
        "counter", "Calls without an address that could be another rollout's as well."
    ),
    "penstock_call_seconds": MetricDefinition(
        "histogram", "From the request's head to the last byte passed on.", ("dialect",)
    ),
    "penstock_first_byte_seconds": MetricDefinition(
        "histogram", "From the request's head to the first byte of the answer."
    ),
    "penstock_overhead_seconds": MetricDefinition("histogram", "The part of a call spent in the gateway itself."),
    "penstock_request_bytes_total": MetricDefinition("counter", "Request bodies passed on, in bytes."),
    "penstock_response_bytes_total": MetricDefinition("counter", "Response bodies passed on, in bytes."),
    "penstock_inflight_calls": MetricDefinition("gauge", "Calls being served."),
    "penstock_recorder_held_bytes": MetricDefinition("gauge", "Bytes of answers that running calls hold for the tape."),
    "penstock_recorder_oldest_seconds": MetricDefinition(
        "gauge", "How long the oldest call that is not on the tape yet has waited for it."
    ),
    "penstock_recorder_queue_bytes": MetricDefinition("gauge", "Bytes that wait to be written to the tape."),
    "penstock_recorder_queue_calls": MetricDefinition("gauge", "Calls that wait to be written to the tape."),
    "penstock_recorder_wait_seconds_total": MetricDefinition(
        "counter", "Time that calls waited for a full recorder queue."
    ),
    "penstock_recording_gaps_total": MetricDefinition("counter", "Calls that were answered but could not be recorded."),
    "penstock_budget_refusals_total": MetricDefinition("counter", "Calls for which a budget had no room.", ("budget",)),
    "penstock_budget_unread_total": MetricDefinition(
        "counter", "Calls that a budget cannot count.", ("budget", "became")
    ),
    "penstock_batch_results_total": MetricDefinition("counter", "Results of batches that were fetched.", ("became",)),
    "penstock_forgotten_rollouts_total": MetricDefinition("counter", "Rollouts that were taken off the tape."),
    "penstock_masked_total": MetricDefinition(
        "counter", "What masking rules have found in what was recorded.", ("rule",)
    ),
    "penstock_masking_failures_total": MetricDefinition(
        "counter", "Bodies and texts that were not kept, since a masking rule could not be applied.", ("rule",)
    ),
    "penstock_unread_total": MetricDefinition(
        "counter", "Answers that hold something which was not read, by what it stands under.", ("dialect", "key")
    ),
    "penstock_commits_total": MetricDefinition("counter", "Commits to the tape."),
    "penstock_commit_seconds": MetricDefinition("histogram", "Length of a commit, fsync included."),
    "penstock_commit_spans_total": MetricDefinition("counter", "Spans written by commits."),
    "penstock_tape_bytes": MetricDefinition("gauge", "Bytes of the tape in use."),
    "penstock_upstream_connections": MetricDefinition("gauge", "Connections to upstreams.", ("upstream", "state")),
    "penstock_upstream_retries_total": MetricDefinition(
        "counter", "Calls not answered, and sent again.", ("upstream", "why")
    ),
    "penstock_credentials_left_out_total": MetricDefinition(
        "counter", "Calls sent without a foreign key.", ("upstream",)
    ),
    "penstock_clients": MetricDefinition("gauge", "Connected clients."),
    "penstock_certificate_expires_timestamp_seconds": MetricDefinition(
        "gauge", "Unix time at which the certificate of [tls] ends; 0 without TLS."
    ),
    "penstock_queue_rollouts": MetricDefinition("gauge", "Rollouts that wait to be claimed.", ("mode",)),
    "penstock_queue_oldest_seconds": MetricDefinition("gauge", "Age of the rollout that has waited longest."),
    "penstock_queue_claimed": MetricDefinition("gauge", "Attempts in workers' hands."),
    "penstock_workers": MetricDefinition("gauge", "Workers that were heard of in the last quarter of an hour."),
    "penstock_claim_seconds": MetricDefinition("histogram", "From asking for work that is there to having it."),
    "penstock_attempts_total": MetricDefinition("counter", "Attempts that have ended.", ("status",)),
    "penstock_rewards_total": MetricDefinition("counter", "Rewards that were kept.", ("source",)),
    "penstock_upstream_waiting": MetricDefinition(
        "gauge", "Calls that wait for an upstream that is paused or has no place.", ("upstream",)
    ),
    "penstock_upstream_checks_total": MetricDefinition(
        "counter", "Checks of upstreams that have a `health_path`, by whether they passed.", ("upstream", "result")
    ),
    "penstock_upstream_health": MetricDefinition(
        "gauge", "How calls to an upstream go: 0 good, 1 probing, 2 resting after it failed.", ("upstream",)
    ),
    "penstock_mcp_waiting": MetricDefinition(
        "gauge", "Requests that wait for a place at a server of tools (max_concurrent).", ("server",)
    ),
    "penstock_mcp_breaker": MetricDefinition(
        "gauge", "The breaker of a server of tools: 0 closed, 1 a probe is under way, 2 open.", ("server",)
    ),
    "penstock_mcp_refused_total": MetricDefinition(
        "counter", "Requests that a server of tools was not given, by why (busy, breaker).", ("server", "why")
    ),
    "penstock_releases": MetricDefinition("gauge", "Releases that are live, by stage.", ("stage",)),
    "penstock_release_stage": MetricDefinition("gauge", "1 for the stage that a release is in.", ("release", "stage")),
    "penstock_release_split": MetricDefinition("gauge", "Share of new rollouts that get the candidate.", ("release",)),
    "penstock_release_assigned": MetricDefinition("gauge", "Rollouts that take part in a release.", ("release",)),
    "penstock_release_counted": MetricDefinition(
        "gauge", "Those whose outcome has been counted or left out.", ("release",)
    ),
    "penstock_release_rollouts": MetricDefinition(
        "gauge", "Counted rollouts of a release, by arm.", ("release", "arm")
    ),
    "penstock_release_missing": MetricDefinition(
        "gauge", "Those of them that had no reward in time.", ("release", "arm")
    ),
    "penstock_release_reward_mean": MetricDefinition(
        "gauge", "Mean goodness of their rewards, 0 to 1.", ("release", "arm")
    ),
    "penstock_release_e_value": MetricDefinition("gauge", "Evidence of each test of a release.", ("release", "test")),
    "penstock_release_calls_total": MetricDefinition(
        "counter", "Finished model calls of rollouts on an arm.", ("release", "arm", "status")
    ),
    "penstock_release_call_seconds": MetricDefinition(
        "histogram", "From the head of such a call to the last byte passed on.", ("release", "arm")
    ),
    "penstock_webhook_deliveries_total": MetricDefinition(
        "counter", "Messages that were sent to a webhook, by what came of it.", ("webhook", "outcome")
    ),
    "penstock_webhook_waiting": MetricDefinition("gauge", "Messages that a webhook has not taken yet.", ("webhook",)),
    "penstock_prompt_rewrites_total": MetricDefinition("counter", "Prompts whose pinned version was sent.", ("way",)),
    "penstock_prompt_misses_total": MetricDefinition(
        "counter", "System texts, and requests that cannot be read, that passed untouched, by why.", ("why",)
    ),
    "penstock_resource_calls_total": MetricDefinition(
        "counter", "Calls with the text of a resource, or nearly: matched, or why not.", ("resource", "outcome")
    ),
    "penstock_resource_coverage_fell": MetricDefinition(
        "gauge", "1 while fewer rollouts match a resource than before, else 0.", ("resource",)
    ),
    "penstock_captured_calls_total": MetricDefinition(
        "counter", "Answers of models that are trained, by whether the engine gave token ids.", ("ids",)
    ),
    "penstock_exact_calls_total": MetricDefinition(
        "counter", "Answers in exact sessions, by how they went on (chat, generate) or why they began.", ("how",)
    ),
    "penstock_mcp_definitions_total": MetricDefinition(
        "counter", "Answers in which a server defines something, by what became of them.", ("server", "what")
    ),
    "penstock_otlp_spans_total": MetricDefinition("counter", "OpenTelemetry spans received.", ("outcome",)),
    "penstock_otlp_logs_total": MetricDefinition("counter", "OpenTelemetry log records received.", ("outcome",)),
    "penstock_otlp_metric_points_total": MetricDefinition(
        "counter", "Points of OpenTelemetry metrics received, and not kept."
    ),
    "penstock_otlp_exported_total": MetricDefinition("counter", "Spans exported as OpenTelemetry."),
    "penstock_otlp_dropped_total": MetricDefinition("counter", "Spans that the receiver of the export refused."),
    "penstock_otlp_retries_total": MetricDefinition("counter", "Export requests that were sent again."),
    "penstock_otlp_lag_changes": MetricDefinition("gauge", "Changes of the tape that the export has not come to."),
}


class Histogram:
    """Counts by bucket; the last bucket holds all values above the highest bound."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def add(self, other: Histogram) -> None:
        """Adds the counts of another histogram."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


Labelled: TypeAlias = "dict[tuple[str, ...], int] | dict[tuple[str, ...], float] | dict[tuple[str, ...], Histogram]"
Value: TypeAlias = "int | float | Histogram | Labelled"
"""One value, or a value for each combination of labels."""


class Metrics:
    """The metrics of one process."""

    __slots__ = (
        "_arms", "_ended", "ambiguous_calls",
        "attempts", "batch_results",
        "budget_refusals", "budget_unread",
        "captured_calls",
        "certificate_expires_timestamp_seconds",
        "claim_seconds",
        "clients",
        "commit_seconds",
        "commit_spans",
        "commits", "credentials_left_out",
        "exact_calls",
        "first_byte_seconds",
        "forgotten_rollouts",
        "inflight_calls",
        "masked",
        "masking_failures",
        "mcp_breaker", "mcp_definitions", "mcp_refused", "mcp_waiting",
        "otlp_dropped", "otlp_exported", "otlp_lag_changes", "otlp_logs", "otlp_metric_points", "otlp_retries",
        "otlp_spans",
        "overhead_seconds",
        "prompt_misses",
        "prompt_rewrites",
        "queue_claimed",
        "queue_oldest_seconds",
        "queue_rollouts",
        "recorder_held_bytes",
        "recorder_oldest_seconds",
        "recorder_queue_bytes",
        "recorder_queue_calls",
        "recorder_wait_seconds",
        "recording_gaps",
        "release_assigned",
        "release_counted",
        "release_e_value",
        "release_missing",
        "release_reward_mean",
        "release_rollouts",
        "release_split",
        "release_stage",
        "releases",
        "request_bytes",
        "resource_calls",
        "resource_coverage_fell",
        "response_bytes",
        "rewards",
        "tape_bytes",
        "unread",
        "upstream_checks",
        "upstream_connections",
        "upstream_health",
        "upstream_retries",
        "upstream_waiting",
        "webhook_deliveries",
        "webhook_waiting",
        "workers",
    )  # fmt: skip

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], Histogram] = {}
        self._arms: dict[tuple[str, str], Histogram] = {}
        self.first_byte_seconds, self.overhead_seconds, self.commit_seconds = Histogram(), Histogram(), Histogram()
        self.upstream_connections: dict[tuple[str, ...], int] = {}
        self.request_bytes = self.response_bytes = self.inflight_calls = self.clients = self.ambiguous_calls = 0
        self.recorder_held_bytes = self.recorder_queue_bytes = self.recorder_queue_calls = self.queue_claimed = 0
        self.recording_gaps = self.forgotten_rollouts = self.commits = self.commit_spans = self.tape_bytes = 0
        self.recorder_oldest_seconds = self.recorder_wait_seconds = self.queue_oldest_seconds = 0.0
        self.certificate_expires_timestamp_seconds, self.workers, self.claim_seconds = 0.0, 0, Histogram()
        self.queue_rollouts: dict[tuple[str, ...], int] = {}
        self.attempts: Counter[tuple[str, ...]] = Counter()
        self.rewards: Counter[tuple[str, ...]] = Counter()
        self.captured_calls: Counter[tuple[str, ...]] = Counter()
        self.exact_calls: Counter[tuple[str, ...]] = Counter()
        self.budget_refusals: Counter[tuple[str, ...]] = Counter()
        self.batch_results: Counter[tuple[str, ...]] = Counter()
        self.budget_unread: Counter[tuple[str, ...]] = Counter()
        self.masked: Counter[tuple[str, ...]] = Counter()
        self.unread: Counter[tuple[str, ...]] = Counter()
        self.masking_failures: Counter[tuple[str, ...]] = Counter()
        self.mcp_definitions: Counter[tuple[str, ...]] = Counter()
        self.otlp_spans: Counter[tuple[str, ...]] = Counter()
        self.otlp_logs: Counter[tuple[str, ...]] = Counter()
        self.upstream_retries: Counter[tuple[str, ...]] = Counter()
        self.credentials_left_out: Counter[tuple[str, ...]] = Counter()
        self.upstream_checks: Counter[tuple[str, ...]] = Counter()
        self.upstream_health: dict[tuple[str, ...], int] = {}
        self.upstream_waiting: dict[tuple[str, ...], int] = {}
        self.mcp_waiting: dict[tuple[str, ...], int] = {}
        self.mcp_breaker: dict[tuple[str, ...], int] = {}
        self.mcp_refused: dict[tuple[str, ...], int] = {}
        self.releases: dict[tuple[str, ...], int] = {}
        self.release_stage: dict[tuple[str, ...], int] = {}
        self.release_split: dict[tuple[str, ...], float] = {}
        self.release_assigned: dict[tuple[str, ...], int] = {}
        self.release_counted: dict[tuple[str, ...], int] = {}
        self.release_rollouts: dict[tuple[str, ...], float] = {}
        self.release_missing: dict[tuple[str, ...], float] = {}
        self.release_reward_mean: dict[tuple[str, ...], float] = {}
        self.release_e_value: dict[tuple[str, ...], float] = {}
        self.webhook_deliveries: Counter[tuple[str, ...]] = Counter()
        self.webhook_waiting: dict[tuple[str, ...], int] = {}
        self.prompt_rewrites: Counter[tuple[str, ...]] = Counter()
        self.prompt_misses: Counter[tuple[str, ...]] = Counter()
        self.resource_calls: Counter[tuple[str, ...]] = Counter()
        self.resource_coverage_fell: dict[tuple[str, ...], int] = {}
        self.otlp_metric_points = self.otlp_exported = self.otlp_dropped = self.otlp_retries = self.otlp_lag_changes = 0

    def call_answered(self, first_byte_seconds: float, overhead_seconds: float) -> None:
        """Count an answer: its first byte, and the part of the call spent in the gateway."""
        for histogram, seconds in (
            (self.first_byte_seconds, first_byte_seconds),
            (self.overhead_seconds, overhead_seconds),
        ):
            histogram.counts[bisect_left(BOUNDS, seconds)] += 1
            histogram.total += seconds

    def call_ended(self, dialect: str, status: str, seconds: float) -> None:
        ended = self._ended.get((dialect, status))
        if ended is None:
            ended = self._ended[dialect, status] = Histogram()
        ended.counts[bisect_left(BOUNDS, seconds)] += 1
        ended.total += seconds

    @property
    def calls(self) -> dict[tuple[str, ...], int]:
        """Finished calls by dialect and status."""
        return {labels: sum(ended.counts) for labels, ended in self._ended.items()}

    @property
    def call_seconds(self) -> dict[tuple[str, ...], Histogram]:
        """Durations of finished calls by dialect."""
        merged: dict[tuple[str, ...], Histogram] = {}
        for (dialect, _), ended in self._ended.items():
            merged.setdefault((dialect,), Histogram()).add(ended)
        return merged

    def arm_call_ended(self, arms: str, status: str, seconds: float) -> None:
        """Counts a finished call of a rollout that takes part in releases. `arms`: RELEASE:ARM, or several separated by
        commas."""
        ended = self._arms.get((arms, status))
        if ended is None:
            ended = self._arms[arms, status] = Histogram()
        ended.counts[bisect_left(BOUNDS, seconds)] += 1
        ended.total += seconds

    def forget_arms(self) -> None:
        """Drops the calls of releases that are no longer in `release_stage`: the names of releases are unlimited."""
        shown = {release for release, _ in self.release_stage}
        gone = [key for key in self._arms if not any(release in shown for release, _ in _places(key[0]))]
        for key in gone:
            del self._arms[key]

    @property
    def release_calls(self) -> dict[tuple[str, ...], int]:
        """Finished calls by release, arm and status."""
        found: Counter[tuple[str, ...]] = Counter()
        for (arms, status), ended in self._arms.items():
            for release, arm in _places(arms):
                found[release, arm, status] += sum(ended.counts)
        return found

    @property
    def release_call_seconds(self) -> dict[tuple[str, ...], Histogram]:
        """Durations of finished calls by release and arm."""
        merged: dict[tuple[str, ...], Histogram] = {}
        for (arms, _), ended in self._arms.items():
            for place in _places(arms):
                merged.setdefault(place, Histogram()).add(ended)
        return merged

    def committed(self, spans: int, seconds: float) -> None:
        """Counts a commit to the tape."""
        self.commits += 1
        self.commit_spans += spans
        self.commit_seconds.observe(seconds)

    def connections(self, upstream: str, state: str, count: int) -> None:
        """Sets the number of connections to an upstream in a state (`idle`, `busy`)."""
        self.upstream_connections[(upstream, state)] = count

    def value(self, name: str) -> Value:
        """The value of a name in `METRICS`."""
        return getattr(self, name.removeprefix("penstock_").removesuffix("_total"))


class MetricsSnapshot(Collector):
    """The metrics at one moment. It must be made on the event loop, which changes them."""

    def __init__(self, metrics: Metrics) -> None:
        self._families = [_family(name, figure, _rows(metrics.value(name))) for name, figure in METRICS.items()]

    def collect(self) -> Iterator[Metric]:
        """Every row of `METRICS`, including zeros."""
        return iter(self._families)


def render(snapshot: MetricsSnapshot) -> bytes:
    """The page for Prometheus, in its text format. It may take some tens of milliseconds, so it belongs on a thread."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(snapshot)
    return generate_latest(registry)


def _rows(value: Value) -> Iterable[tuple[tuple[str, ...], int | float | Histogram]]:
    return value.items() if isinstance(value, dict) else [((), value)]


def _places(arms: str) -> list[tuple[str, str]]:
    """The (release, arm) pairs in `arms`."""
    return [(release, arm) for release, _, arm in (one.partition(":") for one in arms.split(","))]


def _family(
    name: str, figure: MetricDefinition, rows: Iterable[tuple[tuple[str, ...], int | float | Histogram]]
) -> Metric:
    if figure.kind == "histogram":
        histogram = HistogramMetricFamily(name, figure.help, labels=figure.labels)
        for labels, value in rows:
            if isinstance(value, Histogram):
                histogram.add_metric(labels, _buckets(value), value.total)
        return histogram
    family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    simple = family(name, figure.help, labels=figure.labels)
    for labels, value in rows:
        if not isinstance(value, Histogram):
            simple.add_metric(labels, value)
    return simple


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [*map(str, BOUNDS), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
