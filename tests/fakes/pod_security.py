"""The Pod Security Standards, level "restricted", as a table: what it asks of a pod, and where.

Written after https://kubernetes.io/docs/concepts/security/pod-security-standards/ (Linux pods). What the level asks of
a container may be said by its pod where that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Json = dict[str, Any]
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip
SYSCTLS = {
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
}  # fmt: skip
SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
HANDLERS = ("startupProbe", "readinessProbe", "livenessProbe")

POD: dict[str, Callable[[Json], bool]] = {
    "hostNetwork": lambda pod: not pod.get("hostNetwork"),
    "hostPID": lambda pod: not pod.get("hostPID"),
    "hostIPC": lambda pod: not pod.get("hostIPC"),
    "volume types": lambda pod: all(set(one) - {"name"} <= VOLUMES for one in pod.get("volumes", [])),
    "sysctls": lambda pod: {one["name"] for one in _context(pod).get("sysctls", [])} <= SYSCTLS,
}
"""What holds for a pod as a whole."""

CONTAINER: dict[str, Callable[[Json], bool]] = {
    "privileged": lambda own: not own["context"].get("privileged"),
    "allowPrivilegeEscalation": lambda own: own["context"].get("allowPrivilegeEscalation") is False,
    "capabilities drop ALL": lambda own: "ALL" in own["context"].get("capabilities", {}).get("drop", []),
    "capabilities add": lambda own: set(own["context"].get("capabilities", {}).get("add", [])) <= {"NET_BIND_SERVICE"},
    "runAsNonRoot": lambda own: own["either"].get("runAsNonRoot") is True,
    "runAsUser": lambda own: own["either"].get("runAsUser") != 0,
    "seccompProfile": lambda own: (
        own["either"].get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"}
    ),
    "appArmorProfile": lambda own: own["either"].get("appArmorProfile", {}).get("type", "") != "Unconfined",
    "seLinuxOptions": lambda own: (
        own["either"].get("seLinuxOptions", {}).get("type", "") in SELINUX
        and not {"user", "role"} & set(own["either"].get("seLinuxOptions", {}))
    ),
    "procMount": lambda own: own["context"].get("procMount", "Default") == "Default",
    "hostPort": lambda own: not any(port.get("hostPort") for port in own["container"].get("ports", [])),
    "host of probes": lambda own: not any(_hosts(own["container"])),
    "hostProcess": lambda own: not own["either"].get("windowsOptions", {}).get("hostProcess"),
}
"""What holds for each container, of every kind."""


def violations(pod: Json) -> list[str]:
    """What the spec of a pod breaks, as `pod: RULE` and `CONTAINER: RULE`."""
    found = [f"pod: {rule}" for rule, holds in POD.items() if not holds(pod)]
    for container in containers(pod):
        context = _context(container)
        own = {"container": container, "context": context, "either": {**_context(pod), **context}}
        found += [f"{container['name']}: {rule}" for rule, holds in CONTAINER.items() if not holds(own)]
    return found


def containers(pod: Json) -> list[Json]:
    """All that a pod has."""
    return [one for kind in ("initContainers", "containers", "ephemeralContainers") for one in pod.get(kind, [])]


def _context(of: Json) -> Json:
    return of.get("securityContext") or {}


def _hosts(container: Json) -> Iterator[str]:
    handlers = [container.get(name, {}) for name in HANDLERS] + list(container.get("lifecycle", {}).values())
    for handler in handlers:
        for way in ("httpGet", "tcpSocket"):
            yield handler.get(way, {}).get("host", "")
