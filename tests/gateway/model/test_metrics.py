"""The figures: every row of the table is rendered, and what is counted is what Prometheus reads."""

from __future__ import annotations

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.model.metrics import BOUNDS, METRICS, Metrics, MetricsSnapshot, render

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(metrics: Metrics) -> Samples:
    families = text_string_to_metric_families(render(MetricsSnapshot(metrics)).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def filled() -> Metrics:
    metrics = Metrics()
    metrics.call_ended("chat", "ok", 0.3)
    metrics.call_ended("chat", "ok", 400.0)
    metrics.call_ended("chat", "error", 0.3)
    metrics.call_ended("messages", "ok", 0.00001)
    metrics.first_byte_seconds.observe(0.05)
    metrics.committed(3, 0.004)
    metrics.connections("openai", "idle", 4)
    metrics.connections("openai", "idle", 2)
    metrics.inflight_calls += 2
    metrics.recorder_wait_seconds += 0.5
    return metrics


def test_calls_are_counted_by_dialect_and_status() -> None:
    found = scrape(filled())
    assert found["penstock_calls_total", (("dialect", "chat"), ("status", "ok"))] == 2
    assert found["penstock_calls_total", (("dialect", "chat"), ("status", "error"))] == 1
    assert found["penstock_calls_total", (("dialect", "messages"), ("status", "ok"))] == 1


def test_histograms_are_cumulative_and_complete() -> None:
    found = scrape(filled())
    chat = {dict(labels)["le"]: n for (name, labels), n in found.items()
            if name == "penstock_call_seconds_bucket" and dict(labels)["dialect"] == "chat"}  # fmt: skip
    assert len(chat) == len(BOUNDS) + 1
    assert (chat["0.25"], chat["0.5"], chat["300.0"], chat["+Inf"]) == (0, 2, 2, 3)
    assert found["penstock_call_seconds_sum", (("dialect", "chat"),)] == 400.6
    assert found["penstock_first_byte_seconds_bucket", (("le", "0.05"),)] == 1
    assert found["penstock_first_byte_seconds_bucket", (("le", "0.025"),)] == 0


def test_plain_figures_are_read_as_they_stand() -> None:
    found = scrape(filled())
    assert found["penstock_commits_total", ()] == 1
    assert found["penstock_commit_spans_total", ()] == 3
    assert found["penstock_commit_seconds_count", ()] == 1
    assert found["penstock_upstream_connections", (("state", "idle"), ("upstream", "openai"))] == 2
    assert found["penstock_inflight_calls", ()] == 2
    assert found["penstock_recorder_wait_seconds_total", ()] == 0.5


def test_calls_by_arm_are_counted_while_their_release_is_shown() -> None:
    metrics = Metrics()
    metrics.release_stage = {("travel-1", "canary"): 1, ("trains-2", "held"): 1}
    metrics.arm_call_ended("travel-1:candidate", "ok", 0.3)
    metrics.arm_call_ended("travel-1:candidate", "error", 0.04)
    metrics.arm_call_ended("travel-1:candidate,trains-2:stable", "ok", 2.0)
    metrics.arm_call_ended("old-1:candidate", "ok", 2.0)
    metrics.forget_arms()
    found = scrape(metrics)
    mine = (("arm", "candidate"), ("release", "travel-1"))
    assert found["penstock_release_calls_total", (*mine, ("status", "ok"))] == 2
    assert found["penstock_release_calls_total", (*mine, ("status", "error"))] == 1
    assert found["penstock_release_calls_total", (("arm", "stable"), ("release", "trains-2"), ("status", "ok"))] == 1
    assert found["penstock_release_call_seconds_count", mine] == 3
    assert found["penstock_release_call_seconds_sum", mine] == 0.3 + 0.04 + 2.0
    assert not any("old-1" in dict(labels).values() for _, labels in found)


def test_the_table_is_what_is_rendered() -> None:
    families = {f.name: f for f in text_string_to_metric_families(render(MetricsSnapshot(filled())).decode())}
    assert {name.removesuffix("_total") for name in METRICS} == {name.removesuffix("_total") for name in families}
    for name, figure in METRICS.items():
        family = families.get(name) or families[name.removesuffix("_total")]
        assert (family.type, family.documentation) == (figure.kind, figure.help)
        assert name.endswith("_total") == (figure.kind == "counter")
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(figure.labels)


def test_the_registry_of_the_process_is_left_alone() -> None:
    render(MetricsSnapshot(filled()))
    assert not [m for m in REGISTRY.collect() if m.name.startswith("penstock")]
