"""Agent Lightning's own client and its adapters on a real gateway, where `agentlightning` can be imported: by this
interpreter, or by the one that `AGL_PYTHON` names."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes.local import locally
from fakes.process import upstreams
from fakes.tokens import answer
from fakes.web_site import site

pytestmark = pytest.mark.slow
PYTHON = os.environ.get("AGL_PYTHON", sys.executable)
LOOK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('agentlightning') is None)"
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}
SCRIPT = """
import asyncio, json, sys, urllib.request
from agentlightning.adapter import LlmProxyTraceToTriplet, TraceToMessages, TracerTraceToTriplet
from agentlightning.store.client_server import LightningStoreClient
from agentlightning.types import LLM, OtelResource, RolloutConfig, Span, TraceStatus

def call(url, body):
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(asked))

async def main(url, asked):
    store = LightningStoreClient(url)
    await store.add_resources({"main": LLM(endpoint=url, model="m")})
    await store.enqueue_rollout({"q": 1}, mode="train", config=RolloutConfig(max_attempts=2))
    had = await store.dequeue_rollout(worker_id="w1")
    rollout, attempt = had.rollout_id, had.attempt.attempt_id
    for _ in range(2):
        call(f"{url}/rollout/{rollout}/attempt/{attempt}/v1/chat/completions", asked)
    reward = Span(
        rollout_id=rollout, attempt_id=attempt, trace_id="a" * 32, span_id="b" * 16, parent_id=None,
        sequence_id=await store.get_next_span_sequence_id(rollout, attempt), name="agentlightning.annotation",
        attributes={"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.5},
        status=TraceStatus(status_code="OK"), events=[], links=[], start_time=2e9, end_time=2e9, context=None,
        parent=None, resource=OtelResource(attributes={}, schema_url=""),
    )
    kept = await store.add_many_spans([reward, reward])
    await store.update_attempt(rollout, attempt, status="succeeded")
    [ended] = await store.wait_for_rollouts(rollout_ids=[rollout], timeout=0.0)
    spans = (await store.query_spans(rollout)).items
    triplets = {
        adapter.__name__: [
            [one.prompt["token_ids"], one.response["token_ids"], one.reward] for one in adapter().adapt(spans)
        ]
        for adapter in (TracerTraceToTriplet, LlmProxyTraceToTriplet)
    }
    said = {"kept": kept == [reward], "same": spans[-1] == reward, "status": ended.status, "triplets": triplets}
    worker = await store.get_worker_by_id("w1")
    print(json.dumps(said | {"messages": TraceToMessages().adapt(spans), "worker": worker.status}))
    await store.close()

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.skipif(subprocess.run([PYTHON, "-c", LOOK], check=False).returncode != 0, reason="no agentlightning")
async def test_its_client_and_its_adapters_work_as_they_are(tmp_path: Path) -> None:
    body: Any = answer([1, 2, 3], [[7, 8]])
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    body["choices"][0]["message"] |= {"content": None, "tool_calls": [call]}
    numbers = iter(range(10))

    async def complete(_: web.Request) -> web.Response:
        return web.json_response(body | {"id": f"chatcmpl-{next(numbers)}"})

    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "return_token_ids": True}
    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    async with site(application) as url, locally(tmp_path, upstreams(openai=f"{url}/v1")) as gateway:
        script = [PYTHON, "-c", SCRIPT, gateway.url, json.dumps(asked)]
        environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        running = await asyncio.create_subprocess_exec(*script, stdout=subprocess.PIPE, env=environment)
        said = json.loads((await running.communicate())[0].splitlines()[-1])
    assert (said["kept"], said["same"], said["status"], said["worker"]) == (True, True, "succeeded", "idle")
    tokens = [[1, 2, 3], [7, 8]]
    assert said["triplets"]["TracerTraceToTriplet"] == [[*tokens, None], [*tokens, 0.5]]
    assert said["triplets"]["LlmProxyTraceToTriplet"] == [[*tokens, None], [*tokens, 0.5]]
    first = said["messages"][0]
    assert [one["role"] for one in first["messages"]] == ["user", "assistant"]
    [made] = first["messages"][1]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert first["tools"][0]["function"]["name"] == "add"
