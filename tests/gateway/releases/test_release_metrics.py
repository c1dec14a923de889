"""The figures of releases for Prometheus: those of the evidence, of so many releases at most, and gone when over."""

from __future__ import annotations

import aiohttp
import pytest
from fakes.experiment import Traffic, policy
from fakes.process import Gateway
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.releases.canary.decision import Canary
from penstock.gateway.releases.reader import RECENT_NS, SHOWN, ReleaseMetrics

NOW = 100 * RECENT_NS
Samples = dict[tuple[str, frozenset[str]], float]


async def scrape(gateway: Gateway, http: aiohttp.ClientSession) -> Samples:
    """Values by name and by the values of the labels, of releases only."""
    async with http.get(f"{gateway.url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    return {(s.name, frozenset(s.labels.values())): s.value for one in families for s in one.samples if s.labels}


async def test_a_release_has_the_figures_of_its_evidence(
    traffic: Traffic, client: Client, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5, rollouts=500))
    arms = await traffic.run([f"r{number}" for number in range(24)], lambda arm: 0.75 if arm == "candidate" else 0.5)
    candidates = arms.count("candidate")
    assert 0 < candidates < 24
    await traffic.when(release.id, lambda view: view.release.counted == 24)
    found = await scrape(gateway, http)
    name = release.id
    assert found["penstock_release_stage", frozenset({name, "canary"})] == 1
    assert found["penstock_release_split", frozenset({name})] == 0.5
    assert found["penstock_release_assigned", frozenset({name})] == 24
    assert found["penstock_release_counted", frozenset({name})] == 24
    assert found["penstock_release_reward_mean", frozenset({name, "candidate"})] == 0.75
    assert found["penstock_release_rollouts", frozenset({name, "candidate"})] == candidates
    assert found["penstock_release_calls_total", frozenset({name, "candidate", "ok"})] == 2 * candidates
    assert found["penstock_release_call_seconds_count", frozenset({name, "stable"})] == 2 * (24 - candidates)
    figures = (await client.release(name)).figures
    for test in ("harm", "non_inferiority", "guard.error"):
        assert found["penstock_release_e_value", frozenset({name, test})] == figures[test]
    for arm in ("stable", "candidate"):
        key = frozenset({name, arm})
        assert found["penstock_release_rollouts", key] == figures[f"{arm}.assigned"]
        assert found["penstock_release_missing", key] == figures[f"{arm}.missing"]
        assert found["penstock_release_reward_mean", key] == figures[f"{arm}.reward"]
    await client.decide(name, "rollback", ActionRequest(who="ann"))
    ended = await scrape(gateway, http)
    assert ended["penstock_release_stage", frozenset({name, "rolled_back"})] == 1
    assert ("penstock_release_stage", frozenset({name, "canary"})) not in ended
    # Also in another process, which has never stepped its canary.
    await gateway.restart()
    again = await scrape(gateway, http)
    evidence = (await client.audit(name))[-1].evidence
    assert again["penstock_release_e_value", frozenset({name, "harm"})] == evidence["harm"]


def release(number: int, stage: str, changed_ns: int = NOW) -> Release:
    fields = {"id": f"p-{number}", "resource": "p", "kind": "prompt", "stable": "v1", "candidate": "v2"}
    return Release.model_validate(fields | {"stage": stage, "changed_ns": changed_ns, "revision": 4})


def never(name: str) -> Canary | None:
    return None


def no_links(name: str) -> list[AuditTrailEntry]:
    return []


def shown(releases: list[Release]) -> Metrics:
    metrics = Metrics()
    ReleaseMetrics(no_links, never).update(releases, metrics, NOW)
    return metrics


def test_no_more_releases_are_shown_than_the_bound() -> None:
    ended = [release(number, "promoted") for number in range(80)]
    live = [release(number, "held") for number in range(80, 90)]
    found = {name for name, _ in shown([*ended, *live]).release_stage}
    assert len(found) == SHOWN
    assert {one.id for one in live} <= found
    assert {f"p-{number}" for number in range(SHOWN - 10)} <= found


@pytest.mark.parametrize(("stage", "ago", "there"), [
    ("canary", 10 * RECENT_NS, True), ("aborted", RECENT_NS - 1, True), ("rolled_back", RECENT_NS, False),
])  # fmt: skip
def test_what_has_ended_goes_after_a_day(stage: str, ago: int, there: bool) -> None:
    assert (len(shown([release(1, stage, NOW - ago)]).release_split) == 1) is there


def test_the_chain_of_a_release_is_read_once() -> None:
    read: list[str] = []
    link = AuditTrailEntry(number=1, at_ns=0, who="gateway", action="promote", before="canary", after="promoted")
    link.evidence = {"harm": 2.5, "stable.reward": 0.5, "srm.5%": 0.1, "number": 9}

    def audit(name: str) -> list[AuditTrailEntry]:
        read.append(name)
        return [link, AuditTrailEntry(number=2, at_ns=0, who="ann", action="abort", before="canary", after="aborted")]

    measure, metrics = ReleaseMetrics(audit, never), Metrics()
    for _ in range(3):
        measure.update([release(1, "promoted")], metrics, NOW)
    assert read == ["p-1"]
    assert metrics.release_e_value == {("p-1", "harm"): 2.5, ("p-1", "srm.5%"): 0.1}
    assert metrics.release_reward_mean == {("p-1", "stable"): 0.5}
