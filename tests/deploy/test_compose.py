"""compose.yaml and what stands beside it: images, mounts, secrets, commands, alerts and the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import promql_parser
import pytest
import yaml
from fakes.commands import unparsed
from fakes.process import ROOT, Gateway

from penstock.gateway import config
from penstock.gateway.model.metrics import METRICS
from penstock.gateway.model.rollout import AttemptStatus
from penstock.gateway.model.span import SpanStatus
from penstock.sidecar.intercept import session

Json = dict[str, Any]
HERE = ROOT / "deploy"
COMPOSE: Json = yaml.safe_load((HERE / "compose.yaml").read_text())
SERVICES: dict[str, Json] = COMPOSE["services"]
OURS = ("gateway", "sidecar")
KEYS = {
    "image", "build", "command", "environment", "env_file", "ports", "networks", "network_mode", "volumes", "secrets",
    "depends_on", "profiles", "restart", "user", "read_only", "cap_drop", "security_opt", "stop_grace_period", "tmpfs",
}  # fmt: skip
"""Keys of a service in the Compose specification, as far as we use them."""
VALUES = {"penstock_calls_total": set(map(str, SpanStatus)), "penstock_attempts_total": set(map(str, AttemptStatus))}
"""What a label `status` may be."""


def mounts(service: Json) -> Iterator[tuple[str, str]]:
    """(what, where) of each."""
    for mount in service.get("volumes", []):
        what, where = mount.split(":")[:2]
        yield what, where


def mounted(name: str, path: str) -> Path:
    """The file of this tree that a service finds at a path."""
    (found,) = [HERE / what for what, where in mounts(SERVICES[name]) if where == path]
    return found


def document(name: str) -> Any:
    return yaml.safe_load((HERE / "compose" / name).read_text())


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_pinned_and_confined(name: str) -> None:
    service = SERVICES[name]
    assert set(service) <= KEYS
    assert re.fullmatch(r"(docker\.io/)?[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_mounted_is_there(name: str) -> None:
    for what, _ in mounts(SERVICES[name]):
        assert (HERE / what).is_file() if what.startswith(".") else what in COMPOSE["volumes"], what
    assert set(SERVICES[name].get("networks", [])) <= set(COMPOSE["networks"])
    assert set(SERVICES[name].get("secrets", [])) <= set(COMPOSE["secrets"])
    assert set(SERVICES[name].get("depends_on", {})) <= set(SERVICES)


def test_every_file_is_used() -> None:
    used = {HERE / what for service in SERVICES.values() for what, _ in mounts(service)}
    used |= {HERE / what for service in SERVICES.values() for what in service.get("env_file", [])}
    assert {path for path in (HERE / "compose").iterdir()} <= {path.resolve() for path in used}


def test_secrets_have_no_defaults() -> None:
    text = (HERE / "compose.yaml").read_text()
    asked = re.findall(r"\$\{(\w+)(.*?)\}", text)
    assert {how for _, how in asked} == {":?"}
    given = {name for name, _ in asked} | {secret["environment"] for secret in COMPOSE["secrets"].values()}
    said = text.split("\n#\n")[1].replace("#", " ").replace(",", " ").split()
    assert set(said) == given


def test_commands_are_real_ones() -> None:
    for name in OURS:
        service = SERVICES[name]
        assert service["build"]["target"] == name
        if "command" in service:
            assert unparsed(service["command"]) == ""


def test_the_agent_gets_nowhere_but_through_its_sidecar() -> None:
    agent, sidecar = SERVICES["agent"], SERVICES["sidecar"]
    assert agent["network_mode"] == "service:sidecar"
    assert sidecar["networks"] == ["agents"]
    assert COMPOSE["networks"]["agents"] == {"internal": True}
    assert "environment" not in agent
    assert "secrets" not in agent
    assert agent["user"] == "10002:10002"
    assert agent["volumes"] == [sidecar["volumes"][0] + ":ro"]
    (path,) = agent["env_file"]
    lines = [line for line in (HERE / path).read_text().splitlines() if not line.startswith("#")]
    folder = Path("/run/penstock")
    wanted = session.variables(folder / "ca-bundle.pem", folder / "penstock-ca.pem", 8100, ["api.openai.com"])
    assert dict(line.split("=", 1) for line in lines) == wanted


def test_the_gateway_s_configuration_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    loaded = config.load(mounted("gateway", "/etc/penstock/penstock.toml"))
    assert {one.key_env for one in loaded.upstream} | {"PENSTOCK_ADMIN_KEY"} == set(SERVICES["gateway"]["environment"])
    collector = document("collector.yaml")
    port = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert loaded.otlp.endpoint == f"http://collector:{port}"
    assert set(SERVICES["gateway"]["networks"]) & set(SERVICES["collector"]["networks"])
    pipeline = collector["service"]["pipelines"]["traces"]
    assert all(set(pipeline[kind]) <= set(collector[kind]) for kind in ("receivers", "processors", "exporters"))


def test_prometheus_asks_the_gateway_with_its_key() -> None:
    said = document("prometheus.yaml")
    (job,) = said["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gateway:4747"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/admin_key"
    assert SERVICES["prometheus"]["secrets"] == ["admin_key"]
    assert COMPOSE["secrets"]["admin_key"]["environment"] == "PENSTOCK_ADMIN_KEY"
    assert "--config.file=/etc/prometheus/prometheus.yaml" in SERVICES["prometheus"]["command"]
    assert [mounted("prometheus", f"/etc/prometheus/{name}").name for name in said["rule_files"]] == ["alerts.yaml"]


def test_grafana_finds_its_dashboard_and_the_dashboard_its_data() -> None:
    (source,) = document("grafana-sources.yaml")["datasources"]
    (provider,) = document("grafana-dashboards.yaml")["providers"]
    dashboard = mounted("grafana", provider["options"]["path"] + "/dashboard.json")
    said = json.loads(dashboard.read_text())
    assert source["url"] == "http://prometheus:9090"
    found = {json.dumps(it["datasource"]) for panel in said["panels"] for it in (panel, *panel["targets"])}
    assert found == {json.dumps({"type": source["type"], "uid": source["uid"]})}
    assert len({panel["id"] for panel in said["panels"]}) == len(said["panels"])


def alerts() -> list[Json]:
    (group,) = document("alerts.yaml")["groups"]
    return group["rules"]


def expressions() -> Iterator[tuple[str, str]]:
    """(whose, expression) of alerts and panels."""
    for alert in alerts():
        yield alert["alert"], alert["expr"]
    for panel in json.loads((HERE / "compose" / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def metric(name: str) -> str:
    """Whose series it is: those of a histogram have names of their own."""
    own = re.sub(r"_(bucket|sum|count)$", "", name)
    return own if own in METRICS and METRICS[own].kind == "histogram" else name


def flaws(expression: str, known: set[str]) -> list[str]:
    """What is wrong with an expression: its grammar, a metric that is not there, a label that the metric has not."""
    written = expression.replace("$__rate_interval", "5m")
    try:
        promql_parser.parse(written)
    except ValueError as problem:
        return [str(problem)]
    names = {metric(name) for name in re.findall(r"penstock_\w+", written)}
    found = [f"there is no {name}" for name in sorted(names - known)]
    labels = {label.strip() for by in re.findall(r"by \(([^)]*)\)", written) for label in by.split(",")}
    own = {label for name in names & set(METRICS) for label in METRICS[name].labels}
    found += [f"no label {label}" for label in sorted(labels - own - {"le"})]
    for name, label, value in re.findall(r'(penstock_\w+)\{(\w+)=~?"([^"]*)"\}', written):
        found += [f"no label {label}"] if label not in METRICS[name].labels else []
        found += [f"{label} is never {one}" for one in value.split("|") if one not in VALUES.get(name, {one})]
    return found


async def test_alerts_and_panels_ask_for_what_the_gateway_gives(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with http.get(gateway.url + "/metrics") as answer:
        text = await answer.text()
    kinds = re.findall(r"^# TYPE (penstock_\w+) (\w+)$", text, re.MULTILINE)
    known = {name for name, _ in kinds}
    assert known == set(METRICS)
    asked = list(expressions())
    assert len(asked) > 30
    assert {whose: wrong for whose, expression in asked if (wrong := flaws(expression, known))} == {}


@pytest.mark.parametrize(
    ("expression", "flaw"),
    [
        ("rate(penstock_calls_total[5m)", "unexpected"),
        ("penstock_nonesuch", "there is no penstock_nonesuch"),
        ("sum by (model) (penstock_calls_total)", "no label model"),
        ('penstock_calls_total{status="bad"}', "status is never bad"),
        ("penstock_calls_total_bucket", "there is no penstock_calls_total_bucket"),
    ],
)
def test_a_wrong_expression_is_found(expression: str, flaw: str) -> None:
    (found, *_) = flaws(expression, set(METRICS))
    assert flaw in found


def test_every_alert_says_what_it_means_here_and_in_the_documentation() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(Penstock\w+)` \|", page, re.MULTILINE) == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        assert alert["annotations"]["summary"].endswith(".")
        assert alert["labels"]["severity"] in ("critical", "warning")
