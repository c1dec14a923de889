"""The figures of several workers as those of one gateway: counters and most gauges are added up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias, cast

from penstock.gateway.model.metrics import METRICS, Histogram, Metrics

MetricsDump: TypeAlias = "dict[str, Any]"
"""Figures in the form that is sent to another process: a number, (counts, total) of a histogram, or pairs of labels and
these."""
_NOT_ADDED: Final = frozenset(
    {
        "tape_bytes", "certificate_expires_timestamp_seconds", "upstream_health", "resource_coverage_fell",
        "recorder_oldest_seconds",
    }
)  # fmt: skip
"""Gauges of a value that all workers share, or that each finds out by itself: the largest is shown."""
_GAUGES: Final = frozenset(name.removeprefix("penstock_") for name, one in METRICS.items() if one.kind == "gauge")


def dump(metrics: Metrics) -> MetricsDump:
    """Return all figures of this process."""
    return {name: _dumped(getattr(metrics, name)) for name in metrics.__slots__}


def counters_only(of: MetricsDump) -> MetricsDump:
    """Return the counters of a worker that has died; its gauges are emptied."""
    empty = dump(Metrics())
    return {name: empty[name] if name in _GAUGES else value for name, value in of.items()}


def merge_metrics(dumps: Iterable[MetricsDump]) -> Metrics:
    """Return the figures of several processes as those of one."""
    made = Metrics()
    for one in dumps:
        for name in made.__slots__:
            setattr(made, name, _joined(getattr(made, name), one[name], name in _NOT_ADDED))
    return made


def _dumped(value: Any) -> Any:
    if isinstance(value, dict):
        return [(labels, _dumped(one)) for labels, one in cast(dict[Any, Any], value).items()]
    return (value.counts, value.total) if isinstance(value, Histogram) else value


def _joined(value: Any, dumped: Any, largest: bool) -> Any:
    if isinstance(value, Histogram):
        other = Histogram()
        other.counts, other.total = list(dumped[0]), dumped[1]
        value.add(other)
        return value
    if isinstance(value, dict):
        found = cast(dict[Any, Any], value)
        for labels, one in dumped:
            key = tuple(labels)
            empty = Histogram() if isinstance(one, list | tuple) else 0
            found[key] = _joined(found.get(key, empty), one, largest)
        return found
    return max(value, dumped) if largest else value + dumped
