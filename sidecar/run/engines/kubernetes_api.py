"""A Kubernetes API server, by its REST API. The official client finds it, authenticates to it (kubeconfig with all its
plug-ins, or a pod's service account) and sends the requests: plain JSON documents, as `kubectl` sends them. Its
`BatchV1Api` and `watch` are not used: they refuse a template with a field that is newer than they are, need 146 MB and
1.7 s of CPU for their models, and take a proxy's page for an event.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
from kubernetes.aio import config as _config
from kubernetes.aio.client import ApiClient, Configuration

from penstock.sidecar.run.settings import UsageError

config: Any = _config
"""As `Any`, because its annotations are too incomplete to type-check against."""
Json = dict[str, Any]
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
