"""Agents as Kubernetes Jobs: the runner stays where it is, and each attempt is a Job in the cluster.

The runner watches the pod, follows its log, and deletes the Job when the attempt ends before the Job does. When a
cluster or a watch is away for a while, the runner asks again. As long as it lives it extends the Job's deadline; when
it dies, the cluster ends the Job within the lease. Pods have no stdin here, and their log does not tell stderr from
stdout: all output counts as stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from copy import deepcopy
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import aiohttp
from kubernetes.aio import config as _config
from kubernetes.aio.client import ApiClient, Configuration

from penstock.gateway.model.queue import Claim
from penstock.sidecar.intercept.rules import HINTS
from penstock.sidecar.run.agent.environment import PLACEHOLDER_CLAIM, LaunchPlan, launch_plan, without_templates
from penstock.sidecar.run.agent.process import AgentHandle, ExitStatus, Sink
from penstock.sidecar.run.settings import RunnerSettings, UsageError

Json = dict[str, Any]
config: Any = _config
"""As `Any`, because its annotations are too incomplete to type-check against."""


class KubernetesEngine:
    """The engine: runs agents as Jobs of one cluster. `engine` makes it."""

    def __init__(self, settings: RunnerSettings, template: Json, cluster: Cluster) -> None:
        self._settings, self._template, self._cluster = settings, template, cluster

    @asynccontextmanager
    async def running(self, claim: Claim, sink: Sink) -> AsyncGenerator[AgentHandle]:
        made = launch_plan(claim, self._settings.gateway, self._settings.agents, Path("input.json"))
        manifest = job(self._template, self._settings, claim, made)
        await self._make(manifest)
        agent = KubernetesJob(self._cluster, manifest, self._settings, sink)
        finished = False
        try:
            yield agent
            finished = True
        finally:
            if not finished:
                agent.terminate()
            await agent.wait_for_deletions()

    async def _make(self, manifest: Json) -> None:
        """Create a Job. A cluster that is away for a moment is asked again, so that it costs the rollout no try."""
        until, asked = time.monotonic() + MAKE_S, False
        while True:
            try:
                _ = await self._cluster.ask("POST", self._cluster.jobs(), manifest)
                return
            except ClusterError as e:
                if asked and e.status == CONFLICT:
                    return  # the request before succeeded, and its answer was lost
                if not e.temporary or time.monotonic() > until:
                    raise OSError(str(e)) from None
            asked = True
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def engine(settings: RunnerSettings, template: Path | None) -> AsyncGenerator[KubernetesEngine]:
    """Connect to the cluster and yield the engine; raises `UsageError` when there is no cluster, no template or no
    image, or when the cluster rejects such a Job.
    """
    checked = validate_template(read_template(template), settings.agents.image)
    async with connect() as cluster:
        await _try_out(cluster, checked, settings)
        yield KubernetesEngine(settings, checked, cluster)


async def _try_out(cluster: Cluster, template: Json, settings: RunnerSettings) -> None:
    """Check by a dry run that the cluster would accept a Job: it validates the template, the runner's permissions, and
    quotas.
    """
    made = launch_plan(PLACEHOLDER_CLAIM, settings.gateway, without_templates(settings.agents), Path("input.json"))
    manifest = job(template, settings, PLACEHOLDER_CLAIM, made)
    try:
        _ = await cluster.ask("POST", cluster.jobs(), manifest, {"dryRun": "All"})
    except ClusterError as e:
        raise UsageError(f"--on kubernetes: no Job can be made in namespace {cluster.namespace!r}: {e}") from None


def read_template(path: Path | None) -> Json:
    """The template in a YAML or JSON file, or the default one; raises `UsageError`."""
    import yaml

    if path is None:
        return TEMPLATE
    try:
        found: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as e:
        raise UsageError(f"--job-template: {e}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--job-template: {path} holds no object")
    return cast(Json, found)


# An attempt as a Job.

PAUSE_S = 1.0
WATCH_S = 240
LOG_S = 10.0
"""The time for which the rest of a log is read after its container has ended; s."""
MAKE_S = 20.0
"""The longest time that a cluster may be away when a Job is created; s."""
CONFLICT = 409
LEAVE_S = 30.0
"""The longest time that a deleted pod may take beyond its grace; s."""


class KubernetesJob:
    """An attempt in the cluster."""

    pid = None

    def __init__(self, cluster: Cluster, manifest: Json, settings: RunnerSettings, sink: Sink) -> None:
        self._cluster, self._settings, self._sink = cluster, settings, sink
        self._name: str = manifest["metadata"]["name"]
        self._container = container_name(manifest)
        self._pod: str | None = None
        self._log: asyncio.Future[None] | None = None
        self._orders: set[asyncio.Future[None]] = set()
        self._deleted: float | None = None
        self._ended = asyncio.Event()
        """Set when its container has ended."""

    def terminate(self) -> None:
        """Delete the Job: its pod gets TERM, and KILL after the grace."""
        if self._deleted is None:
            self._deleted = time.monotonic()
            self._order(self._cluster.jobs(self._name), {"propagationPolicy": "Background"})

    def kill(self) -> None:
        """Delete the Job, and its pod without a grace."""
        self.terminate()
        if self._pod is not None:
            self._order(self._cluster.pods(self._pod), {"gracePeriodSeconds": 0})

    def _order(self, path: str, options: Json) -> None:
        order = asyncio.ensure_future(self._delete(path, options))
        self._orders.add(order)
        order.add_done_callback(self._orders.discard)

    async def _delete(self, path: str, options: Json) -> None:
        while True:
            try:
                _ = await self._cluster.ask("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1"} | options)
            except ClusterError as e:
                if e.temporary:
                    await asyncio.sleep(PAUSE_S)
                    continue
            return

    async def wait(self) -> ExitStatus:
        """Wait until the agent has ended and its log is read; return its end."""
        keeping = asyncio.ensure_future(self._keep())
        try:
            ending = await self._follow()
            self._ended.set()
            if self._log is not None:
                _ = await asyncio.wait({self._log}, timeout=LOG_S)
            return ending
        finally:
            _ = keeping.cancel()
            if self._log is not None:
                _ = self._log.cancel()

    async def _keep(self) -> None:
        """Extend the Job's deadline again and again, as heartbeats extend the lease."""
        began, lease = time.monotonic(), self._settings.lease_s
        while True:
            await asyncio.sleep(lease / 3)
            moved = {"spec": {"activeDeadlineSeconds": deadline(time.monotonic() - began, lease)}}
            try:
                _ = await self._cluster.ask("PATCH", self._cluster.jobs(self._name), moved)
            except ClusterError:
                continue  # the next request comes in time

    async def _follow(self) -> ExitStatus:
        while True:
            try:
                async with aclosing(self._states()) as states:
                    async for gone, pod in states:
                        if (ending := self._note(gone, pod)) is not None:
                            return ending
            except ClusterError as e:
                if not e.temporary and e.status != 410:
                    return ExitStatus(error=str(e))
            if self._overdue():
                return ExitStatus(error="the pod did not leave in time")
            await asyncio.sleep(PAUSE_S)

    def _overdue(self) -> bool:
        patience = self._settings.agents.grace_s + LEAVE_S
        return self._deleted is not None and time.monotonic() - self._deleted > patience

    def _note(self, gone: bool, pod: Json) -> ExitStatus | None:
        name = str(pod["metadata"]["name"])
        self._pod = name
        if self._log is None and has_started(pod, self._container):
            self._log = asyncio.ensure_future(self._read_log(name))
        ending = exit_status(pod, self._container)
        return ending or (ExitStatus(error="the pod was deleted") if gone else None)

    async def _states(self) -> AsyncGenerator[tuple[bool, Json]]:
        """Yield (True if the pod is gone, the pod) for each change of the pod, until the watch ends."""
        selector = {"labelSelector": f"job-name={self._name}"}
        listed = await self._cluster.ask("GET", self._cluster.pods(), query=selector)
        if not listed["items"] and self._deleted is not None:
            yield True, {"metadata": {"name": ""}}
        for pod in listed["items"]:
            yield False, pod
        version = str(listed["metadata"].get("resourceVersion", ""))
        query = selector | {"watch": "true", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        # Without a timeout, a connection that was lost silently would be waited for forever.
        patience = WATCH_S + REQUEST_S
        async with self._cluster.open_response(
            "GET", self._cluster.pods(), query=query, timeout_s=patience
        ) as response:
            async for line in _lines(response.content.iter_any()):
                event = document(line)
                if event["type"] == "ERROR":
                    raise ClusterError(str(event["object"].get("message")), event["object"].get("code"))
                if event["type"] != "BOOKMARK":
                    yield event["type"] == "DELETED", event["object"]

    async def _read_log(self, pod: str) -> None:
        """Read the whole log: a connection that ends before the container does is made again, and bytes that were read
        are skipped.
        """
        query, read, whole = {"container": self._container, "follow": "true"}, 0, False
        try:
            while not whole:
                skip = read
                try:
                    async with self._cluster.open_response(
                        "GET", f"{self._cluster.pods(pod)}/log", query=query
                    ) as answer:
                        async for data in answer.content.iter_any():
                            new, skip = data[skip:], max(0, skip - len(data))
                            read += len(new)
                            if new:
                                self._sink("stdout", new)
                    whole = True
                except ClusterError as e:
                    if not e.temporary:
                        self._sink("stderr", f"the log ended early: {e}\n".encode())
                        return
                with suppress(TimeoutError):
                    async with asyncio.timeout(PAUSE_S):
                        _ = await self._ended.wait()
                whole = whole and self._ended.is_set()
        finally:
            self._sink("stdout", b"")

    async def wait_for_deletions(self) -> None:
        """Wait until pending deletions have reached the cluster."""
        if self._orders:
            _ = await asyncio.wait(self._orders, timeout=LEAVE_S)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    waiting = b""
    async for piece in pieces:
        *lines, waiting = (waiting + piece).split(b"\n")
        for line in lines:
            yield line


# A Kubernetes API server, by its REST API. The official client finds it, authenticates to it (kubeconfig with all its
# plug-ins, or a pod's service account) and sends the requests: plain JSON documents, as `kubectl` sends them. Its
# `BatchV1Api` and `watch` are not used: they refuse a template with a field that is newer than they are, need 146 MB
# and 1.7 s of CPU for their models, and take a proxy's page for an event.

Query = Mapping[str, str]
KUBECONFIG = os.path.expanduser("~/.kube/config")
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
REQUEST_S, STREAM_S = 30, 7 * 86400


class ClusterError(Exception):
    """Raised when the API server refused, or could not be reached (`status` is None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def temporary(self) -> bool:
        """True if the same request may succeed later."""
        return self.status is None or self.status >= 500 or self.status == 429


class Cluster:
    """A connection to an API server. `connect` makes it."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._api = api
        self.namespace = namespace

    async def ask(self, method: str, path: str, body: Json | None = None, query: Query | None = None) -> Json:
        """Send a request; return the JSON document that answers it. Raises `ClusterError`."""
        async with self.open_response(method, path, body, query, REQUEST_S) as response:
            return document(await response.read())

    @asynccontextmanager
    async def open_response(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        query: Query | None = None,
        timeout_s: float = STREAM_S,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Yield a successful response. Any failure, also while the response is read, is raised as a `ClusterError`."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": kind}
        try:
            asked = await self._api.param_serialize(
                method, path, None, [*(query or {}).items()], headers, body, auth_settings=["BearerToken"]
            )
            raw = await self._api.call_api(*asked, _request_timeout=timeout_s)
            async with cast(aiohttp.ClientResponse, raw.response) as response:
                if response.status >= 400:
                    raise ClusterError(f"{method} {path}: {await _message(response)}", response.status)
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError, _config.ConfigException) as e:
            raise ClusterError(f"cannot reach the API server at {self._api.configuration.host}: {e}") from e

    def jobs(self, name: str = "") -> str:
        """Path of the Jobs, or of one."""
        return f"/apis/batch/v1/namespaces/{self.namespace}/jobs" + (f"/{name}" if name else "")

    def pods(self, name: str = "") -> str:
        """Path of the pods, or of one."""
        return f"/api/v1/namespaces/{self.namespace}/pods" + (f"/{name}" if name else "")


def document(data: bytes) -> Json:
    """Parse JSON of the API server; raises `ClusterError` for other text, such as a page of a proxy before it."""
    try:
        return cast(Json, json.loads(data))
    except ValueError:
        said = " ".join(data.decode(errors="replace").split())[:200]
        raise ClusterError(f"the API server answered what is no JSON: {said!r}") from None


async def _message(response: aiohttp.ClientResponse) -> str:
    text = await response.text(errors="replace")
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {' '.join(text.split())[:200]}"


@asynccontextmanager
async def connect() -> AsyncGenerator[Cluster]:
    """Connect to the API server that the kubeconfig or the pod names; raises `UsageError` when neither names one."""
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # every attempt holds a watch and a log
    try:
        found = await _configure(configuration)
    except (_config.ConfigException, OSError) as e:
        raise UsageError(f"--on kubernetes: no cluster is configured: {e}") from None
    async with ApiClient(configuration) as api:
        yield Cluster(api, found or "default")


async def _configure(configuration: Any) -> str | None:
    """Fill the configuration; return its namespace."""
    file = os.environ.get("KUBECONFIG") or KUBECONFIG
    if (namespace := _own_namespace()) and "KUBECONFIG" not in os.environ:
        config.load_incluster_config(client_configuration=configuration)
        return namespace
    await config.load_kube_config(config_file=file, client_configuration=configuration)
    return cast(Json, config.list_kube_config_contexts(config_file=file)[1])["context"].get("namespace")


def _own_namespace() -> str | None:
    """The namespace of the pod that this process runs in; None outside a pod."""
    return IN_CLUSTER.read_text().strip() if IN_CLUSTER.exists() else None


# The Kubernetes Job of an attempt, and the state of its pod. Pure: JSON in, JSON out.
#
# A Job is a template filled with the attempt: its name, labels, image, command and variables. The template cannot
# change the settings that make a Job one attempt: one pod, never restarted, because the gateway decides about another
# try. The Job ends by itself when its runner does not extend its deadline (`activeDeadlineSeconds`), like an
# attempt's lease.

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
    labels = {LABEL: worker_label(settings.name)}
    _merge(made.setdefault("metadata", {}), job_name(settings.name, claim), labels, claim)
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


def job_name(worker: str, claim: Claim) -> str:
    """The Job's name: a DNS label that no other attempt has."""
    whole = f"{worker}\0{claim.rollout.id}\0{claim.attempt.id}".encode()
    readable = re.sub(r"[^a-z0-9]+", "-", f"{claim.rollout.id}-{claim.attempt.id}".lower())[:36].strip("-")
    return f"penstock-{readable}-{blake2b(whole, digest_size=5).hexdigest()}"


def worker_label(text: str) -> str:
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
    hints = {name: value for name, value in HINTS.items() if name not in {variable["name"] for variable in kept}}
    container["env"] = kept + [{"name": name, "value": value} for name, value in {**hints, **plan.own}.items()]


def container_name(template: Json) -> str:
    """The name of the agent's container."""
    return str(_container(template)["name"])


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
