"""The Kubernetes Job of an attempt, and the state of its pod. Pure: JSON in, JSON out.

A Job is a template filled with the attempt: its name, labels, image, command and variables. The template cannot change
the settings that make a Job one attempt: one pod, never restarted, because the gateway decides about another try. The
Job ends by itself when its runner does not extend its deadline (`activeDeadlineSeconds`), like an attempt's lease.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from datetime import datetime
from hashlib import blake2b
from typing import Any, cast

from penstock.gateway.model.queue import Claim
from penstock.sidecar.run.agent.environment import LaunchPlan
from penstock.sidecar.run.agent.process import ExitStatus
from penstock.sidecar.run.settings import RunnerSettings, UsageError

Json = dict[str, Any]
CONTAINER = "agent"
LABEL = "penstock.dev/worker"
TEMPLATE: Json = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "spec": {
        "ttlSecondsAfterFinished": 300,
        "template": {
            "spec": {
                "automountServiceAccountToken": False,
                "containers": [{"name": CONTAINER}],
            }
        },
    },
}
"""The default template."""
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "ImagePullBackOff", "CreateContainerConfigError"})
"""Reasons of a container that would wait forever."""


def validate_template(template: Json, agents_image: str | None) -> Json:
    """The template, if attempts can be filled into it; else raises `UsageError`."""
    if template.get("kind") != "Job" or template.get("apiVersion") != "batch/v1":
        raise UsageError("--job-template: it must be of apiVersion batch/v1 and kind Job")
    try:
        container = _container(template)
    except (KeyError, IndexError, TypeError):
        raise UsageError("--job-template: it has no spec.template.spec.containers") from None
    if not (agents_image or container.get("image")):
        raise UsageError("--on kubernetes needs an image: --image IMAGE, or one in --job-template")
    return template


def job(template: Json, settings: RunnerSettings, claim: Claim, plan: LaunchPlan) -> Json:
    """The Job of an attempt; raises ValueError when its task is too large."""
    if plan.file is not None:
        raise ValueError(f"a task of {len(plan.task):,} characters is too large for a Job: queue a reference to it")
    made = deepcopy(template)
    labels = {LABEL: label(settings.name)}
    _merge(made.setdefault("metadata", {}), name(settings.name, claim), labels, claim)
    spec: Json = made["spec"]
    spec["backoffLimit"], spec["completions"], spec["parallelism"] = 0, 1, 1
    spec["activeDeadlineSeconds"] = deadline(0.0, settings.lease_s)
    _merge(spec["template"].setdefault("metadata", {}), None, labels, claim)
    pod: Json = spec["template"]["spec"]
    pod["restartPolicy"] = "Never"
    pod["terminationGracePeriodSeconds"] = max(1, round(settings.agents.grace_s))
    _fill(_container(made), settings, plan)
    return made


def deadline(elapsed_s: float, lease_s: float) -> int:
    """`activeDeadlineSeconds` of a Job that was created `elapsed_s` ago and whose runner is alive now; s."""
    return int(elapsed_s + lease_s) + 1


def name(worker: str, claim: Claim) -> str:
    """The Job's name: a DNS label that no other attempt has."""
    whole = f"{worker}\0{claim.rollout.id}\0{claim.attempt.id}".encode()
    readable = re.sub(r"[^a-z0-9]+", "-", f"{claim.rollout.id}-{claim.attempt.id}".lower())[:36].strip("-")
    return f"penstock-{readable}-{blake2b(whole, digest_size=5).hexdigest()}"


def label(text: str) -> str:
    """The text in a form that is a valid value of a label."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:63].strip("-_.")


def _merge(metadata: Json, name: str | None, labels: Mapping[str, str], claim: Claim) -> None:
    if name is not None:
        metadata["name"] = name
        _ = metadata.pop("generateName", None)
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    ids = {"penstock.dev/rollout": claim.rollout.id, "penstock.dev/attempt": claim.attempt.id}
    metadata["annotations"] = {**metadata.get("annotations", {}), **ids}


def _container(template: Json) -> Json:
    """The agent's container: the one named `agent`, else the first."""
    containers = cast("list[Json]", template["spec"]["template"]["spec"]["containers"])
    return next((container for container in containers if container.get("name") == CONTAINER), containers[0])


def _fill(container: Json, settings: RunnerSettings, plan: LaunchPlan) -> None:
    agents = settings.agents
    if agents.image:
        container["image"] = agents.image
    if agents.command or agents.callable:
        container["command"] = list(plan.argv)
        _ = container.pop("args", None)
    elif plan.argv:
        container["args"] = list(plan.argv)
    kept = [variable for variable in container.get("env", []) if variable["name"] not in plan.own]
    container["env"] = kept + [{"name": name, "value": value} for name, value in plan.own.items()]


def container_name(template: Json) -> str:
    """The name of the agent's container."""
    return str(_container(template)["name"])


# -- the state of a pod ------------------------------------------------------------------------------------------------


def state(pod: Json, container: str) -> Json:
    """The state of a container: an object with `waiting`, `running` or `terminated`; empty before there is any."""
    statuses = cast("list[Json]", pod.get("status", {}).get("containerStatuses") or [])
    found = next((status for status in statuses if status.get("name") == container), Json())
    return cast(Json, found.get("state") or {})


def has_started(pod: Json, container: str) -> bool:
    """True if the container has started, so that it has a log."""
    return bool(state(pod, container).keys() & {"running", "terminated"})


def exit_status(pod: Json, container: str) -> ExitStatus | None:
    """The end of the agent; None while it has not ended."""
    found = state(pod, container)
    if "terminated" in found:
        return _terminated(found["terminated"])
    waiting = found.get("waiting", {})
    if waiting.get("reason") in HOPELESS:
        return ExitStatus(error=f"{waiting['reason']}: {waiting.get('message', '')}"[:500])
    status: Json = pod.get("status", {})
    if status.get("phase") == "Failed":
        return ExitStatus(error=f"the pod failed: {status.get('reason', '')} {status.get('message', '')}"[:500])
    return None


def _terminated(found: Json) -> ExitStatus:
    code, signal = int(found.get("exitCode", 0)), found.get("signal")
    if not signal and 128 < code < 160:
        signal = code - 128  # the shell's way, and the kubelet's for most ends by a signal
    named = _SIGNALS.get(signal, f"SIG{signal}") if signal else None
    took = _ns(found.get("finishedAt")) - _ns(found.get("startedAt"))
    return ExitStatus(None if named else code, named, max(0, took))


_SIGNALS = {2: "SIGINT", 6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def _ns(text: str | None) -> int:
    return 0 if text is None else int(datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() * 1e9)
