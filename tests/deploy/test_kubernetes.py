"""The manifests for Kubernetes: as kustomize makes them, against published schemas, and against what they promise."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes.commands import unparsed
from fakes.kubernetes import SCHEMA, validate
from fakes.pod_security import containers, violations
from fakes.process import ROOT

from penstock.gateway import config
from penstock.sidecar.intercept import session

Json = dict[str, Any]
HERE = ROOT / "deploy" / "kubernetes"
LAYERS = ("base", "transparent")
LABEL = "pod-security.kubernetes.io/enforce"
MONITOR = {"port", "path", "interval", "authorization"}
"""What an endpoint of our ServiceMonitor may say, of what its definition (monitoring.coreos.com/v1) knows."""

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl to run kustomize")


@cache
def made(layer: str) -> list[Json]:
    """The documents of a layer."""
    done = subprocess.run(["kubectl", "kustomize", HERE / layer], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(layer: str, kind: str, name: str) -> Json:
    (found,) = [it for it in made(layer) if it["kind"] == kind and it["metadata"]["name"] == name]
    return found


def pods(layer: str) -> Iterator[tuple[str, Json]]:
    """(name, spec) of everything that makes pods."""
    for it in made(layer):
        template = it.get("spec", {}).get("template")
        if template is not None:
            yield it["metadata"]["name"], template["spec"]


def container(layer: str, name: str) -> Json:
    (found,) = [it for _, pod in pods(layer) for it in containers(pod) if it["name"] == name]
    return found


def test_yaml_is_as_the_linter_wants_it() -> None:
    paths = [ROOT / ".yamllint.yaml", ROOT / "deploy"]
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", *paths], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_every_file_is_part_of_something() -> None:
    for layer in LAYERS:
        said = yaml.safe_load((HERE / layer / "kustomization.yaml").read_text())
        files = {*said["resources"], *(patch["path"] for patch in said.get("patches", []))}
        files |= {file for made in said.get("configMapGenerator", []) for file in made["files"]}
        assert {path.name for path in (HERE / layer).iterdir()} == {*files, "kustomization.yaml"} - {"../base"}


@needs_kubectl
@pytest.mark.parametrize("layer", LAYERS)
def test_documents_are_what_the_published_schemas_say(layer: str) -> None:
    kinds: list[str] = []
    for document in made(layer):
        kinds.append(document["kind"])
        if document["kind"] != "ServiceMonitor":
            validate.validate(document, SCHEMA, strict=True)
    assert {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy", "Job", "ConfigMap"} < set(kinds)


@needs_kubectl
def test_a_document_that_the_schema_refuses_is_found() -> None:
    wrong = copy.deepcopy(one("base", "Job", "agent"))
    wrong["spec"]["template"]["spec"]["initContainers"][0]["restartpolicy"] = "Always"
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, SCHEMA, strict=True)


@needs_kubectl
def test_the_service_monitor_leads_to_metrics() -> None:
    monitor, service = one("base", "ServiceMonitor", "penstock-gateway"), one("base", "Service", "penstock-gateway")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert set(endpoint) == MONITOR
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert endpoint["authorization"]["credentials"] == key(container("base", "gateway"), "PENSTOCK_ADMIN_KEY")


def key(it: Json, variable: str) -> Json:
    """Where a container's variable comes from."""
    (found,) = [env["valueFrom"]["secretKeyRef"] for env in it["env"] if env["name"] == variable]
    return found


@needs_kubectl
def test_every_pod_of_the_base_is_restricted() -> None:
    assert one("base", "Namespace", "penstock")["metadata"]["labels"][LABEL] == "restricted"
    assert {name for name, _ in pods("base")} == {"penstock-gateway", "agent"}
    assert [violations(pod) for _, pod in pods("base")] == [[], []]


@needs_kubectl
def test_the_overlay_breaks_only_what_it_must() -> None:
    assert one("transparent", "Namespace", "penstock")["metadata"]["labels"][LABEL] == "privileged"
    found = {name: violations(pod) for name, pod in pods("transparent")}
    assert found["penstock-gateway"] == []
    assert found["agent"] == ["redirect: capabilities add", "redirect: runAsNonRoot", "redirect: runAsUser"]
    capabilities = container("transparent", "redirect")["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": ["NET_ADMIN"]}


@needs_kubectl
@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"hostNetwork": True}, "pod: hostNetwork"),
        ({"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}, "pod: volume types"),
        ({"securityContext": {}}, "agent: seccompProfile"),
        ({"containers": [{"name": "agent"}]}, "agent: capabilities drop ALL"),
    ],
)
def test_the_table_of_rules_finds_what_is_wrong(change: Json, broken: str) -> None:
    pod = one("base", "Job", "agent")["spec"]["template"]["spec"]
    assert broken in violations({**pod, **change})


@needs_kubectl
def test_files_are_written_to_volumes_only() -> None:
    for layer in LAYERS:
        for _, pod in pods(layer):
            assert all(it["securityContext"]["readOnlyRootFilesystem"] for it in containers(pod))
            assert pod["automountServiceAccountToken"] is False


@needs_kubectl
def test_agents_are_given_the_variables_that_a_sidecar_writes() -> None:
    folder = Path("/run/penstock")
    wanted = session.variables(folder / "ca-bundle.pem", folder / "penstock-ca.pem", 8100, ["api.openai.com"])
    assert given("base") == wanted
    assert given("transparent") == {name: wanted[name] for name in (*session.BUNDLES, *session.ADDED)}


def given(layer: str) -> dict[str, str]:
    """Variables of the agent's container."""
    names = [it["configMapRef"]["name"] for it in container(layer, "agent")["envFrom"]]
    return {name: value for it in names for name, value in one(layer, "ConfigMap", it)["data"].items()}


@needs_kubectl
@pytest.mark.parametrize("layer", LAYERS)
def test_the_agent_has_no_secret_and_another_user_than_its_sidecar(layer: str) -> None:
    agent, sidecar = container(layer, "agent"), container(layer, "sidecar")
    assert "env" not in agent
    assert all(set(it) == {"configMapRef"} for it in agent["envFrom"])
    assert agent["securityContext"]["runAsUser"] != sidecar["securityContext"]["runAsUser"]
    assert [it["readOnly"] for it in agent["volumeMounts"]] == [True]
    assert key(sidecar, "PENSTOCK_SIDECAR_TOKEN")
    pod = one(layer, "Job", "agent")["spec"]["template"]["spec"]
    assert [set(it) & {"secret", "projected"} for it in pod["volumes"]] == [set()]


@needs_kubectl
@pytest.mark.parametrize("layer", LAYERS)
def test_the_agent_waits_for_a_sidecar_that_intercepts(layer: str) -> None:
    job = one(layer, "Job", "agent")["spec"]["template"]["spec"]
    names = ["sidecar"] if layer == "base" else ["redirect", "sidecar"]
    assert [it["name"] for it in job["initContainers"]] == names
    sidecar = container(layer, "sidecar")
    assert sidecar["restartPolicy"] == "Always"
    dockerfile = (ROOT / "Dockerfile").read_text()
    words = ", ".join(f'"{word}"' for word in sidecar["startupProbe"]["exec"]["command"])
    assert f"CMD [{words}]" in dockerfile
    if layer == "transparent":
        redirect = container(layer, "redirect")
        assert redirect["args"][-1] == str(sidecar["securityContext"]["runAsUser"])
        assert redirect["image"] == sidecar["image"]


@needs_kubectl
@pytest.mark.parametrize("layer", LAYERS)
def test_commands_are_real_ones(layer: str) -> None:
    ours = [it for _, pod in pods(layer) for it in containers(pod) if "/penstock-" in it["image"]]
    assert len(ours) == (2 if layer == "base" else 3)
    for it in ours:
        assert "command" not in it
        assert unparsed(it["args"]) == ""


@needs_kubectl
def test_images_have_tags() -> None:
    for _, pod in pods("transparent"):
        for it in containers(pod):
            _, _, tag = it["image"].rpartition("/")[2].partition(":")
            assert tag not in ("", "latest"), it["image"]


@needs_kubectl
def test_names_lead_to_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = one("base", "StatefulSet", "penstock-gateway")["spec"]
    labels = gateway["template"]["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = one("base", kind, "penstock-gateway")["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    (port,) = one("base", "Service", "penstock-gateway")["spec"]["ports"]
    (address,) = [it["value"] for it in container("base", "sidecar")["env"] if it["name"] == "PENSTOCK_GATEWAY"]
    assert address == f"http://penstock-gateway:{port['port']}"
    assert port["targetPort"] in {it["name"] for it in container("base", "gateway")["ports"]}
    for _, pod in pods("base"):
        maps = {it["configMap"]["name"] for it in pod["volumes"] if "configMap" in it}
        assert all(one("base", "ConfigMap", name) for name in maps)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    loaded = config.load(HERE / "base" / "penstock.toml")
    keys = {it.key_env for it in loaded.upstream}
    assert {"PENSTOCK_ADMIN_KEY", *keys} == {it["name"] for it in container("base", "gateway")["env"]}
    assert gateway["template"]["spec"]["terminationGracePeriodSeconds"] > loaded.limits.drain_seconds


@needs_kubectl
def test_agents_get_to_the_gateway_and_nowhere_else() -> None:
    policies = {it["metadata"]["name"]: it["spec"] for it in made("base") if it["kind"] == "NetworkPolicy"}
    assert policies["nothing"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    labels = one("base", "Job", "agent")["spec"]["template"]["metadata"]["labels"]
    assert policies["agents"]["podSelector"]["matchLabels"] == labels
    gateway, names = policies["agents"]["egress"]
    served = one("base", "StatefulSet", "penstock-gateway")["spec"]["template"]["metadata"]["labels"]
    assert gateway["to"] == [{"podSelector": {"matchLabels": served}}]
    assert {it["port"] for it in names["ports"]} == {53}
    callers = policies["penstock-gateway"]["ingress"][0]["from"]
    assert {"podSelector": {"matchLabels": labels}} in callers
