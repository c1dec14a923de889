"""A Kubernetes API server as far as Jobs go: speaks the wire format, and runs each Job's container as a local process.

What it does is what the API reference says of Jobs, pods, logs, watches and deletion; a Job that is not restarted, one
pod, no scheduler. Nothing is believed: a Job that the published schema refuses is refused here too (422).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from aiohttp import web
from fakes.waiting import News
from fakes.web_site import site

Json = dict[str, Any]
TOKEN = "let-me-in"
NAMESPACE = "agents"
SCHEMA = "1.37"
validate: Any = import_module("kubernetes_validate")
"""It has no annotations."""


@dataclass(slots=True)
class Pod:
    """A pod, its process and its log."""

    document: Json
    log: bytes = b""
    process: asyncio.subprocess.Process | None = None
    logged: bool = False

    def says_more_than(self, sent: int) -> bool:
        """Whether a reader of so many bytes has something to hear."""
        return self.logged or len(self.log) > sent


@dataclass(slots=True)
class Kubernetes:
    """The server and what it holds."""

    url: str = ""
    jobs: dict[str, Json] = field(default_factory=dict[str, Json])
    pods: dict[str, Pod] = field(default_factory=dict[str, Pod])
    deadlines: list[int] = field(default_factory=list[int])
    events: list[Json] = field(default_factory=list[Json])
    changed: News = field(default_factory=News)
    tasks: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])
    odd: list[str] = field(default_factory=list[str])
    """Methods whose next request a proxy answers in its place."""
    lost: bool = False
    """Whether what was asked is done nevertheless."""
    silent_watches: int = 0
    """Watches whose connection is lost without a word."""
    cut_logs: list[bool] = field(default_factory=list[bool])
    """Logs that end after their first piece: with an error, or as if they were whole."""

    def kubeconfig(self, home: Path) -> Path:
        """A file that leads a client here."""
        path = home / "kubeconfig"
        found = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": NAMESPACE}}],
        }
        _ = path.write_text(json.dumps(found))
        return path

    async def make_job(self, request: web.Request) -> web.Response:
        """Create a Job and its pod."""
        document: Json = await request.json()
        try:
            validate.validate(document, SCHEMA, strict=True)
        except validate.ValidationError as e:
            return _failure(422, f"{list(e.path)}: {e.message}")
        name: str = document["metadata"]["name"]
        if name in self.jobs:
            return _failure(409, f'jobs.batch "{name}" already exists')
        if request.query.get("dryRun") == "All":
            return web.json_response(document, status=201)
        self.jobs[name] = document
        labels = document["spec"]["template"]["metadata"].get("labels", {}) | {"job-name": name}
        metadata = {"name": f"{name}-x1", "labels": labels}
        pod = Pod({"kind": "Pod", "metadata": metadata, "spec": document["spec"]["template"]["spec"], "status": {}})
        self.pods[metadata["name"]] = pod
        self._tell("ADDED", pod)
        task = asyncio.ensure_future(self._run(pod))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return web.json_response(document, status=201)

    async def _run(self, pod: Pod) -> None:
        (container,) = pod.document["spec"]["containers"]
        began = datetime.now(UTC).isoformat()
        if container["image"] == "no/such:image":
            self._state(pod, {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}})
            return
        pod.process = await asyncio.create_subprocess_exec(
            *container["command"],
            *container.get("args", []),
            env={"PATH": os.environ["PATH"]} | {one["name"]: one["value"] for one in container["env"]},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._state(pod, {"running": {"startedAt": began}})
        assert pod.process.stdout is not None
        while data := await pod.process.stdout.read(1000):
            pod.log += data
            self.changed.tell()
        code = await pod.process.wait()
        pod.logged = True
        ended = {"startedAt": began, "finishedAt": datetime.now(UTC).isoformat()}
        self._state(pod, {"terminated": ended | {"exitCode": code if code >= 0 else 128 - code}})

    def _state(self, pod: Pod, state: Json) -> None:
        (container,) = pod.document["spec"]["containers"]
        pod.document["status"] = {"containerStatuses": [{"name": container["name"], "state": state}]}
        self._tell("MODIFIED", pod)

    def _tell(self, kind: str, pod: Pod) -> None:
        pod.document["metadata"]["resourceVersion"] = str(len(self.events) + 1)
        self.events.append({"type": kind, "object": json.loads(json.dumps(pod.document))})
        self.changed.tell()

    async def move_job(self, request: web.Request) -> web.Response:
        """Change a Job."""
        if request.headers["Content-Type"] != "application/merge-patch+json":
            return _failure(415, "unsupported media type")
        job = self.jobs.get(request.match_info["name"])
        if job is None:
            return _failure(404, "no such job")
        spec = (await request.json())["spec"]
        assert list(spec) == ["activeDeadlineSeconds"]
        job["spec"] |= spec
        self.deadlines.append(spec["activeDeadlineSeconds"])
        return web.json_response(job)

    async def delete_job(self, request: web.Request) -> web.Response:
        """Delete a Job, and with it its pod."""
        name, options = request.match_info["name"], cast(Json, await request.json())
        if self.jobs.pop(name, None) is None:
            return _failure(404, "no such job")
        assert options["propagationPolicy"] == "Background"
        await self._delete(f"{name}-x1", signal.SIGTERM)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def delete_pod(self, request: web.Request) -> web.Response:
        """Delete a pod at once."""
        assert (await request.json())["gracePeriodSeconds"] == 0
        await self._delete(request.match_info["name"], signal.SIGKILL)
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _delete(self, name: str, number: signal.Signals) -> None:
        pod = self.pods[name]
        if pod.process is not None and pod.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(pod.process.pid, number)
            _ = await pod.process.wait()
        self._tell("DELETED", pod)

    def _longer_than(self, sent: int) -> bool:
        return len(self.events) > sent

    async def list_pods(self, request: web.Request) -> web.StreamResponse:
        """Pods of a Job, or what becomes of them."""
        job = request.query["labelSelector"].removeprefix("job-name=")
        if request.query.get("watch") != "true":
            items = [pod.document for pod in self.pods.values() if _of(pod.document, job) and job in self.jobs]
            return web.json_response(
                {"kind": "PodList", "metadata": {"resourceVersion": str(len(self.events))}, "items": items}
            )
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if self.silent_watches:
            self.silent_watches -= 1
            await asyncio.Event().wait()
        sent = int(request.query["resourceVersion"])
        while True:
            await self.changed.until(partial(self._longer_than, sent), patience_s=None)
            for event in self.events[sent:]:
                sent += 1
                if _of(event["object"], job):
                    await response.write(json.dumps(event).encode() + b"\n")

    async def read_log(self, request: web.Request) -> web.StreamResponse:
        """The log of a pod, to its end."""
        pod = self.pods[request.match_info["name"]]
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        sent = 0
        while sent < len(pod.log) or not pod.logged:
            await self.changed.until(partial(pod.says_more_than, sent), patience_s=None)
            await response.write(pod.log[sent:])
            sent = len(pod.log)
            if self.cut_logs and sent:
                if self.cut_logs.pop() and request.transport is not None:
                    request.transport.abort()
                return response
        return response

    @web.middleware
    async def proxied(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Something before it, which says what it wants."""
        if request.method in self.odd:
            self.odd.remove(request.method)
            if self.lost:
                _ = await handler(request)
            return web.Response(text="<html>try again</html>", content_type="text/html")
        return await handler(request)


def _of(pod: Json, job: str) -> bool:
    return pod["metadata"]["labels"]["job-name"] == job


def _failure(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


@web.middleware
async def _admit(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {TOKEN}":
        return _failure(401, "Unauthorized")
    return await handler(request)


@asynccontextmanager
async def serving() -> AsyncGenerator[Kubernetes]:
    """A running API server."""
    made = Kubernetes()
    app = web.Application(middlewares=[made.proxied, _admit])
    jobs, pods = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs", f"/api/v1/namespaces/{NAMESPACE}/pods"
    app.add_routes(
        [
            web.post(jobs, made.make_job),
            web.patch(jobs + "/{name}", made.move_job),
            web.delete(jobs + "/{name}", made.delete_job),
            web.get(pods, made.list_pods),
            web.delete(pods + "/{name}", made.delete_pod),
            web.get(pods + "/{name}/log", made.read_log),
        ]
    )
    async with site(app) as made.url:
        try:
            yield made
        finally:
            for pod in made.pods.values():
                if pod.process is not None and pod.process.returncode is None:
                    pod.process.kill()
            if made.tasks:
                _ = await asyncio.wait(made.tasks)
