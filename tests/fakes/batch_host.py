"""A provider of batches, as OpenAI's, Anthropic's and Google's APIs are. Its script says what becomes of a request."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from fakes.web_site import site

IN, OUT = 100, 10
"""Tokens of a prompt and of an answer."""
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
_LIMITED = {"type": "error", "error": {"type": "invalid_request_error", "message": "max_tokens is too high"}}
_EXPIRED = {"code": "batch_expired", "message": "The window was over."}


def said(name: str) -> str:
    """What is answered to a request."""
    return f"the answer to {name}"


def _chat(name: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": said(name)}
    usage = {"prompt_tokens": IN, "completion_tokens": OUT, "total_tokens": IN + OUT}
    return {
        "id": f"chatcmpl-{name}", "object": "chat.completion", "created": 1, "model": "gpt-4o-2024-08-06",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage,
        "service_tier": "default",
    }  # fmt: skip


def _response(name: str) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "output_text", "text": said(name), "annotations": []}
    return {
        "id": f"resp_{name}", "object": "response", "created_at": 1, "status": "completed",
        "model": "gpt-4o-2024-08-06",
        "output": [{"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}],
        "usage": {"input_tokens": IN, "output_tokens": OUT, "total_tokens": IN + OUT},
    }  # fmt: skip


def message(name: str) -> dict[str, Any]:
    """An answer of Anthropic's."""
    usage = {"input_tokens": IN, "output_tokens": OUT, "service_tier": "batch"}
    return {
        "id": f"msg_{name}", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5-20250929",
        "content": [{"type": "text", "text": said(name)}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": usage,
    }  # fmt: skip


class BatchHost:
    """The server. A request whose name begins with `bad` fails, with `late` expires, with `stopped` is cancelled."""

    def __init__(self) -> None:
        self.url = ""
        self.results_at = ""
        """Where Anthropic's results are said to be: the gateway's address."""
        self.created = 1
        """When its batches are made; s."""
        self.packed = False
        """Whether results are sent compressed."""
        self.sent: dict[str, bytes] = {}
        """Results as they were sent, by path."""
        self._files: dict[str, list[dict[str, Any]]] = {}
        self._batches: dict[str, dict[str, Any]] = {}
        self._asked: dict[str, list[dict[str, Any]]] = {}

    def restart(self) -> None:
        """Forgets everything, and gives ids from the first one on."""
        self.created += 1
        for known in (self._files, self._batches, self._asked):
            known.clear()

    # -- OpenAI's ----------------------------------------------------------------------------------------------------

    async def upload(self, request: web.Request) -> web.Response:
        """A file of requests."""
        form = await request.post()
        file: Any = form["file"]
        name = f"file-{len(self._files) + 1}"
        self._files[name] = [json.loads(line) for line in file.file.read().splitlines() if line]
        return web.json_response(
            {"id": name, "object": "file", "bytes": 1, "created_at": 1, "filename": "b", "purpose": form["purpose"]}
        )

    async def create(self, request: web.Request) -> web.Response:
        """A batch, done at once."""
        asked = await request.json()
        name = f"batch_{len(self._batches) + 1}"
        self._batches[name] = {
            "id": name, "object": "batch", "endpoint": asked["endpoint"], "input_file_id": asked["input_file_id"],
            "completion_window": "24h", "status": "completed", "created_at": self.created,
        }  # fmt: skip
        return web.json_response(self._batches[name] | {"status": "validating"})

    async def state(self, request: web.Request) -> web.Response:
        """How it stands."""
        name = request.match_info["name"]
        return web.json_response(
            self._batches[name] | {"output_file_id": f"out-{name}", "error_file_id": f"err-{name}"}
        )

    async def content(self, request: web.Request) -> web.Response:
        """A file of results: the last request first."""
        kind, _, name = request.match_info["name"].partition("-")
        lines = [_line(one) for one in reversed(self._files[self._batches[name]["input_file_id"]])]
        return self._results(request, [it for it in lines if (it["response"] is None) == (kind == "err")])

    def _results(self, request: web.Request, lines: Iterable[dict[str, Any]]) -> web.Response:
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.sent[request.path] = body
        if self.packed:
            return web.Response(body=gzip.compress(body), headers={"content-encoding": "gzip"})
        return web.Response(body=body, content_type="application/octet-stream")

    # -- Anthropic's -------------------------------------------------------------------------------------------------

    async def make(self, request: web.Request) -> web.Response:
        """A batch, requests and all."""
        name = f"msgbatch_{len(self._asked) + 1}"
        self._asked[name] = (await request.json())["requests"]
        return web.json_response(self._message_batch(name, "in_progress"))

    def _message_batch(self, name: str, status: str) -> dict[str, Any]:
        times = dict.fromkeys(("archived_at", "cancel_initiated_at", "ended_at"))
        counts = dict.fromkeys(("canceled", "errored", "expired", "processing", "succeeded"), 0)
        url = f"{self.results_at}/v1/messages/batches/{name}/results"
        at = "2026-01-01T00:00:00Z"
        return {
            "id": name, "type": "message_batch", "processing_status": status, "request_counts": counts,
            "created_at": at, "expires_at": at, "results_url": url, **times,
        }  # fmt: skip

    async def message_state(self, request: web.Request) -> web.Response:
        """How it stands."""
        return web.json_response(self._message_batch(request.match_info["name"], "ended"))

    async def message_results(self, request: web.Request) -> web.Response:
        """The last request first."""
        asked = [one["custom_id"] for one in self._asked[request.match_info["name"]]]
        return self._results(request, [{"custom_id": name, "result": _outcome(name)} for name in reversed(asked)])

    # -- Google's ----------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.Response:
        """A batch, requests and all."""
        name = f"b{len(self._asked) + 1}"
        self._asked[name] = (await request.json())["batch"]["inputConfig"]["requests"]["requests"]
        return web.json_response({"name": f"batches/{name}", "metadata": {"state": "BATCH_STATE_PENDING"}})

    async def operation(self, request: web.Request) -> web.Response:
        """Answers in the order of the requests."""
        name = request.match_info["name"]
        found = [_inlined(one.get("metadata"), at) for at, one in enumerate(self._asked[name])]
        answer = {"inlinedResponses": {"inlinedResponses": found}}
        return web.json_response({"name": f"batches/{name}", "done": True, "response": answer})


def _line(asked: dict[str, Any]) -> dict[str, Any]:
    name = asked["custom_id"]
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": name, "response": None, "error": None}
    if name.startswith("late"):
        return line | {"error": _EXPIRED}
    if name.startswith("bad"):
        error = {"message": "no such model", "type": "invalid_request_error"}
        return line | {"response": {"status_code": 400, "request_id": "r", "body": {"error": error}}}
    body = _chat(name) if asked["url"] == CHAT else _response(name)
    return line | {"response": {"status_code": 200, "request_id": "r", "body": body}}


def _outcome(name: str) -> dict[str, Any]:
    if name.startswith("bad"):
        return {"type": "errored", "error": _LIMITED}
    if name.startswith(("late", "stopped")):
        return {"type": "expired" if name.startswith("late") else "canceled"}
    return {"type": "succeeded", "message": message(name)}


def _inlined(metadata: dict[str, Any] | None, at: int) -> dict[str, Any]:
    name = (metadata or {}).get("key", str(at))
    kept = {} if metadata is None else {"metadata": metadata}
    if name.startswith("bad"):
        return {"error": {"code": 3, "message": "no"}} | kept
    content = {"role": "model", "parts": [{"text": said(name)}]}
    usage = {"promptTokenCount": IN, "candidatesTokenCount": OUT, "totalTokenCount": IN + OUT}
    answer = {"candidates": [{"content": content, "finishReason": "STOP"}], "usageMetadata": usage}
    return {"response": answer | {"modelVersion": "gemini-2.5-flash"}} | kept


@asynccontextmanager
async def batch_host() -> AsyncGenerator[BatchHost]:
    """A host on a free port."""
    made, app = BatchHost(), web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/files", made.upload)
    app.router.add_post("/v1/batches", made.create)
    app.router.add_get("/v1/batches/{name:batch_.*}", made.state)
    app.router.add_get("/v1/files/{name}/content", made.content)
    app.router.add_post("/v1/messages/batches", made.make)
    app.router.add_get("/v1/messages/batches/{name}", made.message_state)
    app.router.add_get("/v1/messages/batches/{name}/results", made.message_results)
    app.router.add_post("/{version:v1|v1beta}/models/{model:[^:]+}:batchGenerateContent", made.generate)
    app.router.add_get("/{version:v1|v1beta}/batches/{name}", made.operation)
    async with site(app) as made.url:
        yield made
