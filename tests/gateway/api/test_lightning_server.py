"""Agent Lightning 1.0's server API, asked of a real gateway as its controllers, its trainer and its agents ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fakes.engine import CHAT, COMPLETIONS, FORMATS, FakeEngine, Planned
from fakes.local import Local, locally
from fakes.vllm_wire import chat, chat_events, completion, completion_events, prompt_ids, token_id
from fakes.waiting import when

from examples.demo.model import pieces
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import ClaimRequest, FinishRequest
from penstock.gateway.model.rollout import Judgement

Json = Any


def logprob_of(id: int) -> float:
    """What the engine says of a token."""
    return -(id % 1000) / 256


SAID: Json = [{"role": "user", "content": "hi"}]


def settings(vllm: FakeEngine) -> str:
    """An engine in training, whatever model an agent names."""
    return (
        f'[[upstream]]\nname = "engine"\nbase_url = "{vllm.openai_url}"\ndialect = "openai"\n'
        '[[route]]\nmodel = "*"\nupstream = "engine"\nalias = "base"\ntrain = true\n'
    )


@pytest.fixture(autouse=True)
def token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine gives token ids where they are asked for."""
    monkeypatch.setitem(FORMATS, CHAT, (chat, chat_events))
    monkeypatch.setitem(FORMATS, COMPLETIONS, (completion, completion_events))


@pytest.fixture
async def local(tmp_path: Path, vllm: FakeEngine) -> AsyncGenerator[Local]:
    async with locally(tmp_path / "local", settings(vllm)) as made:
        yield made


@pytest.fixture
async def agl(local: Local) -> AsyncGenerator[httpx.AsyncClient]:
    """Its own client is one of httpx with a base URL."""
    async with httpx.AsyncClient(base_url=f"{local.url}/agl1", timeout=60) as made:
        yield made


async def ask(agl: httpx.AsyncClient, method: str, path: str, status: int = 200, **asked: Json) -> Json:
    answer = await agl.request(method, path, **asked)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


async def queued(agl: httpx.AsyncClient, **task: Json) -> str:
    [made] = await ask(agl, "POST", "/api/rollouts", 201, json=[{"input": {"data_id": "d1"}, **task}])
    return made["rollout_id"]


async def patched(agl: httpx.AsyncClient, name: str, state: str, **more: Json) -> Json:
    return await ask(agl, "PATCH", f"/api/rollouts/{name}", json={"status": {"state": state, **more}})


async def events(agl: httpx.AsyncClient, name: str, **asked: Json) -> list[Json]:
    return await ask(agl, "GET", f"/api/rollouts/{name}/events", params=asked)


async def post(agl: httpx.AsyncClient, name: str, kind: str, data: Json) -> Json:
    body = {"event_type": kind, "data": data}
    return await ask(agl, "POST", f"/api/rollouts/{name}/attempt/0/events", json=body)


def agent(agl: httpx.AsyncClient, name: str, mode: str = "train") -> openai.AsyncOpenAI:
    """What `AGL_OPENAI_BASE_URL` and `AGL_KEY` make of the SDK."""
    url = f"{str(agl.base_url).rstrip('/')}/proxy/rollout/{name}/attempt/0/mode/{mode}/openai/v1"
    return openai.AsyncOpenAI(base_url=url, api_key="empty", max_retries=0)


async def call(agl: httpx.AsyncClient, name: str) -> str | None:
    async with agent(agl, name) as client:
        found = await client.chat.completions.create(model="any", messages=SAID)
    return found.choices[0].message.content


async def test_a_controller_runs_a_rollout(local: Local, agl: httpx.AsyncClient, client: Client) -> None:
    config = {"timeout_seconds": 60, "local": {"agent_class": "a.B", "env_map": {"Q": "input.q"}}, "k8s": None}
    name = await queued(agl, config=config, metadata={"batch_idx": 1, "odd": "é"}, is_train=True)
    [found] = await ask(agl, "GET", "/api/rollouts", params={"state_in": ["queuing", "running"]})
    assert (found["rollout_id"], found["config"], found["is_train"]) == (name, config, True)
    assert found["metadata"] == {"batch_idx": 1, "sample_idx_in_batch": None, "odd": "é"}
    assert {"state": "queuing", "version": 1, "last_attempt_id": None, "error_message": None}.items() <= found[
        "status"
    ].items()
    said, count = "", 0
    async with agent(agl, name) as made:
        async for one in await made.chat.completions.create(model="any", messages=SAID, stream=True):
            assert (one.model_extra or {}).get("prompt_token_ids") is None  # its client has not asked for them
            said, count = said + (one.choices[0].delta.content or ""), count + 1
    assert said == "I am base."
    assert count > 1
    # A local controller starts the agent before it says so.
    assert (await patched(agl, name, "running", last_attempt_id="0"))["status"]["version"] == 2
    assert await call(agl, name) == "I am base."
    sent = await post(agl, name, "reward", {"value": 0.7, "source": "agent", "extra": [1]})
    assert (sent["rollout_id"], sent["attempt_id"], sent["data"]["extra"]) == (name, "0", [1])
    _ = await post(agl, name, "step", {"api_key": "sk-proj-abcdefghijklmnop", "n": 1})
    ended = await patched(agl, name, "succeeded")
    assert ended["status"]["updated_at"] >= ended["status"]["created_at"]
    triplets = await events(agl, name, format="triplet")
    assert [one["event_type"] for one in triplets] == ["model_request", "reward", "step"]  # the last of equal prompts
    data, reward, step = (one["data"] for one in triplets)
    prompt = prompt_ids({"messages": SAID})
    assert (data["prompt_token_ids"], len(data["response_log_probs"])) == (prompt, len(data["response_token_ids"]))
    assert (data["server"], data["http_status"], data["status"]) == ({"model": "base", "version": 0}, 200, "ok")
    assert reward == {"value": 0.7, "source": "agent"}
    assert step["api_key"] != "sk-proj-abcdefghijklmnop"
    raw = await events(agl, name, event_type="model_request")
    assert isinstance(raw[0]["data"]["response"], list)
    assert raw[1]["data"]["finish_reason"] == "stop"
    whole = await ask(agl, "GET", f"/api/rollouts/{name}")
    assert whole["attempts"] == ["0"]
    own = await client.rollout(name)
    assert (own.status, own.mode, own.group, own.reward, own.attempt) == ("succeeded", "train", "d1", 0.7, "0")
    assert (own.totals.calls, own.config.timeout_s, own.attempts[0].worker) == (2, 120, "agent-lightning")


async def test_streams_and_plain_answers_have_the_same_tokens(agl: httpx.AsyncClient) -> None:
    name, said = await queued(agl), [token_id(one) for one in pieces("I am base.")]
    assert await call(agl, name) == "I am base."
    async with agent(agl, name) as made:
        _ = [one async for one in await made.completions.create(model="m", prompt="a b", stream=True)]
    found = [one["data"] for one in await events(agl, name, format="triplet")]
    assert [one["prompt_token_ids"] for one in found] == [
        prompt_ids({"messages": SAID}),
        prompt_ids({"prompt": "a b"}),
    ]
    for one in found:  # a stream also has the token that ends it
        assert one["response_token_ids"][: len(said)] == said
        assert one["response_log_probs"] == [logprob_of(id) for id in one["response_token_ids"]]


async def test_a_worker_of_the_gateway_runs_a_rollout(agl: httpx.AsyncClient, client: Client) -> None:
    name = await queued(agl, is_train=False)
    assert (await ask(agl, "GET", "/api/rollouts/terminal"))["total_terminal"] == 0
    [claim] = (await client.claim(ClaimRequest(worker="w1"))).claims
    assert (claim.rollout.id, claim.rollout.mode) == (name, "val")
    [found] = await ask(agl, "GET", "/api/rollouts", params={"state_in": "running"})
    assert found["status"]["last_attempt_id"] == "a1"
    assert not found["is_train"]
    reward = Judgement(value=0.25, source="judge", reason="so so")
    _ = await client.finish(name, "a1", FinishRequest(worker="w1", status="failed", rewards=[reward]))
    page = await ask(agl, "GET", "/api/rollouts/terminal")
    item = {"rollout_id": name, "state": "failed", "data_id": "d1", "is_train": False}
    assert page == {"items": [item], "next_after": 1, "total_terminal": 1}
    [judged] = await events(agl, name, format="triplet")
    assert judged["data"] == {"value": 0.25, "source": "judge", "reason": "so so"}


async def test_the_order_of_ends_outlives_a_restart_and_deleted_rollouts(local: Local, client: Client) -> None:
    async with httpx.AsyncClient(base_url=f"{local.url}/agl1") as agl:
        names = [await queued(agl, input={"instance_id": str(n)}, rollout_id=f"r{n}") for n in range(4)]
        assert (await ask(agl, "GET", "/api/rollouts/terminal"))["items"] == []
        for name, state in ((names[2], "failed"), (names[0], "failed"), (names[3], "running")):
            _ = await patched(agl, name, state, error_message="why")
        assert await ask(agl, "DELETE", f"/api/rollouts/{names[0]}", 204) is None
        assert await ask(agl, "DELETE", "/api/rollouts/r9", 204) is None
        assert await ask(agl, "DELETE", f"/api/rollouts/{names[1]}", 204) is None
        for path in (names[0], f"{names[0]}/events"):
            _ = await ask(agl, "GET", f"/api/rollouts/{path}", 404)
        refused = await ask(agl, "POST", "/api/rollouts", 409, json=[{"input": 1, "rollout_id": names[0]}])
        assert "choose another" in refused["detail"]
        before = await ask(agl, "GET", "/api/rollouts/terminal")
    assert (await client.rollout(names[0])).status == "failed"
    assert (await client.rollout(names[1])).status == "cancelled"
    _ = await local.terminate()
    await local.start()
    async with httpx.AsyncClient(base_url=f"{local.url}/agl1") as agl:
        assert await ask(agl, "GET", "/api/rollouts/terminal") == before
        assert [one["rollout_id"] for one in before["items"]] == [names[2]]
        assert before["total_terminal"] == 3
        [kept] = await ask(agl, "GET", "/api/rollouts", params={"state_in": "failed"})
        assert (kept["rollout_id"], kept["status"]["error_message"]) == (names[2], "why")
        [again] = await ask(agl, "POST", "/api/rollouts", 201, json=[{"input": 1, "rollout_id": names[3]}])
        assert (again["input"], again["status"]["state"]) == ({"instance_id": "3"}, "running")


async def test_agents_wait_while_weights_change(agl: httpx.AsyncClient, vllm: FakeEngine, client: Client) -> None:
    name, going = await queued(agl), asyncio.Event()
    vllm.plan(CHAT, Planned(before=going))
    running = asyncio.ensure_future(call(agl, name))
    await vllm.until(CHAT)
    try:
        paused = await ask(agl, "POST", "/proxy/pause", json={"reason": "weights"})
    finally:
        going.set()
    assert paused == {"paused": True, "retry_after_seconds": 5, "reason": "weights", "inflight": 1}
    waiting = [asyncio.ensure_future(call(agl, name)) for _ in range(20)]
    _ = await when(client.upstreams, lambda found: any(one.waiting == 20 for one in found))
    going.set()
    assert await running == "I am base."
    _ = await when(lambda: ask(agl, "GET", "/proxy/state"), lambda found: found["inflight"] == 0)
    assert sum(path == CHAT for path, _ in vllm.asked) == 1
    assert (await ask(agl, "POST", "/proxy/resume"))["paused"] is False
    assert await asyncio.gather(*waiting) == ["I am base."] * 20
    assert [one.action async for one in client.audit_log(2)] == ["open_upstream", "pause_upstream"]


async def test_engines_are_upstreams_and_versions_are_those_of_the_time(
    agl: httpx.AsyncClient, vllm: FakeEngine
) -> None:
    models = [{"model": "base", "endpoint": vllm.openai_url, "version": 3}]
    for at, ours in enumerate((None, models, models, [models[0] | {"version": 4}])):
        if ours is not None:
            assert await ask(agl, "DELETE", "/api/models") == {"status": "ok"}
            assert await call(agl, "first") == "I am base."  # nothing fails between the two
            assert await ask(agl, "POST", "/api/models", 201, json=ours) == ours
        name = await queued(agl)
        assert await call(agl, name) == "I am base."
        [data] = [one["data"] for one in await events(agl, name)]
        assert data["server"]["version"] == (0, 3, 3, 4)[at]
    wrong = [models[0] | {"endpoint": "http://127.0.0.1:9/v1"}]
    refused = await ask(agl, "POST", "/api/models", 422, json=wrong)
    assert f"engine ({vllm.openai_url})" in refused["detail"]
    assert "[[upstream]]" in refused["detail"]


async def test_experts_of_a_growing_conversation_are_kept_once(agl: httpx.AsyncClient) -> None:
    def told(prompt: list[int], answer: list[int], routes: str | None) -> Json:
        response = {"prompt_token_ids": prompt, "choices": [{"token_ids": answer}]}
        return {"response": response} | ({} if routes is None else {"routed_experts": routes})

    name = await queued(agl)
    for data in (told([1], [2], "A"), told([1, 2, 3], [4], "B"), told([9], [], "C"), told([], [5], None)):
        _ = await post(agl, name, "model_request", data)
    found = [one["data"].get("routed_experts") for one in await events(agl, name, format="triplet")]
    assert found == [None, "B", "C", None]
    bare = await events(agl, name, include_routed_experts="false")
    assert not any("routed_experts" in one["data"] for one in bare)


async def test_retention_forgets_all_of_it(local: Local, agl: httpx.AsyncClient, client: Client) -> None:
    kept, gone = await queued(agl), await queued(agl)
    for name in (kept, gone):
        _ = await post(agl, name, "step", {"n": 1})
        _ = await patched(agl, name, "failed")
    assert (await ask(agl, "GET", "/api/rollouts/terminal"))["next_after"] == 2
    left = len(list(local.gateway.store.records("lightning")))
    _ = await client.forget(gone)
    _ = await when(
        lambda: asyncio.to_thread(list, local.gateway.store.records("lightning")), lambda it: len(it) == left / 2
    )
    _ = await ask(agl, "GET", f"/api/rollouts/{gone}", 404)
    page = await ask(agl, "GET", "/api/rollouts/terminal")
    assert ([one["rollout_id"] for one in page["items"]], page["total_terminal"]) == ([kept], 2)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/healthz", None, 200, "ok"),
        ("GET", "/api/nothing", None, 404, "there is nothing"),
        ("POST", "/v1/chat/completions", {}, 404, "there is nothing at /agl1/v1/chat"),
        ("PUT", "/api/models", None, 405, "Method Not Allowed"),
        ("GET", "/api/rollouts", None, 422, "state_in"),
        ("GET", "/api/rollouts?state_in=cancelled", None, 422, "queuing"),
        ("POST", "/api/rollouts", {"input": 1}, 422, "list"),
        ("POST", "/api/rollouts", [{"input": 1, "rollout_id": "a/b"}], 422, "rollout_id"),
        ("PATCH", "/api/rollouts/ID", {"status": {"cancel": True}}, 422, "cancel"),
        ("PATCH", "/api/rollouts/ID", {"status": {"state": "succeeded"}}, 409, "queuing -> succeeded"),
        ("PATCH", "/api/rollouts/ID", {"status": {"state": None}}, 409, "queuing -> None"),
        ("PATCH", "/api/rollouts/ID", {}, 200, "queuing"),
        ("PATCH", "/api/rollouts/none", {"status": {"state": "running"}}, 404, "Rollout not found"),
        ("POST", "/api/rollouts/none/attempt/0/events", {"event_type": "x"}, 404, "Rollout not found"),
        ("POST", "/api/rollouts/ID/attempt/a%20b/events", {"event_type": "x"}, 400, "attempt"),
        ("POST", "/proxy/rollout/ID/attempt/0/mode/wrong/openai/v1/completions", {}, 400, "train, val, test"),
    ],
)
async def test_what_is_refused(
    agl: httpx.AsyncClient, method: str, path: str, body: Json, status: int, says: str
) -> None:
    name = await queued(agl)
    answer = await agl.request(method, path.replace("ID", name), json=body)
    assert (answer.status_code, says in answer.text) == (status, True), answer.text


async def test_keys(tmp_path: Path, vllm: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "secret-key")
    async with (
        locally(tmp_path / "keyed", settings(vllm)) as local,
        Client(local.url, key="secret-key") as own,
        httpx.AsyncClient(base_url=f"{local.url}/agl1") as agl,
    ):
        assert (await agl.get("/healthz")).status_code == 200
        assert (await agl.post("/api/rollouts", json=[])).status_code == 401
        for header in ({"x-api-key": "secret-key"}, {"Authorization": "Bearer secret-key"}):
            _ = await ask(agl, "POST", "/api/rollouts", 201, json=[], headers=header)
        token = {"Authorization": f"Bearer {(await own.make_token('r1')).token}"}
        assert (await agl.post("/proxy/pause", json={}, headers=token)).status_code == 403
