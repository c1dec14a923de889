"""Calls that nobody can count: which they are, and what becomes of them behind a budget."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.background import BackgroundHost, background_host
from fakes.budgets import budget, spans_of, toml, uses
from fakes.local import locally
from fakes.process import Gateway, upstream
from fakes.raw import connect
from fakes.shell import Shell
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.state import Budget
from penstock.gateway.traffic.budgets.claims import FREE as FREE_PATHS
from penstock.gateway.traffic.budgets.claims import is_free, is_read, known_model, uses_nothing
from penstock.gateway.traffic.budgets.operations import Limit
from penstock.gateway.wire.dialects import DIALECTS, find
from penstock.gateway.wire.dialects.loose_json import peek

GENERATES = (
    "completions", "messages", "responses", "compact", "invoke", "invoke-with-response-stream", "converse", "predict",
    "generateContent", "interactions", "speech", "transcriptions", "generations", "edits", "sessions", "events",
    "runs", "batches", "decisions", "rerank", "jobs", "client_secrets", "moderations", "async-invoke", "search",
)  # fmt: skip
UNREAD = (
    "/v1/audio/voices", "/v1/realtime/calls", "/v1/batches", "/v1/rerank", "/v1/responses/compact/x",
    "/v1/conversations/c/runs",
    "/v1/realtime/client_secrets", "/v1/fine_tuning/jobs", "/v1/threads/t/runs", "/v1/messages/batches",
    "/v1/sessions/s/events", "/v1/sessions/s/%65vents", "/v1/sessions/s/events/", "/v1/sessions/s/x/../events",
    "/v1/sessions/s/chat", "/anthropic/v1/sessions/s/events", "/v1/agents/sessions/s/turns",
    "/v1beta/interactions/i/more", "/v1beta/models/m:batchGenerateContent",
    "/openai/deployments/gpt/brand/new?api-version=2025-01-01",
    "/model/gpt-5/invoke", "/model/gpt-5/invoke-with-response-stream",
    "/v1/projects/p/locations/l/publishers/meta/models/llama:rawPredict", "/async-invoke",
    "/v1/projects/p/locations/l/endpoints/1:rawPredict", "/openai/mcp/chat/completions", "/anthropic/v1/responses",
    "/v1internal:generateCode", "//v1/chat/completions", "/v1/chat%2Fcompletions", "/v1/chat/completions/",
    "/v1/files/../x:generateContent",
    "/api/oauth/v1/messages", "/v1/organizations/v1/messages", "/v1/Chat/Completions", "/v2/brand/new", "/",
)  # fmt: skip
FREE = (
    "POST /v1/messages/count_tokens", "POST /v1/responses/input_tokens", "POST /v1beta/models/m:countTokens",
    "POST /v1/projects/p/locations/l/publishers/google/models/m:countTokens", "POST /model/a.b:0/count-tokens",
    "POST /v1/projects/p/locations/l/publishers/anthropic/models/count-tokens:rawPredict", "GET /v1/models",
    "GET /v1/responses/resp_1", "POST /v1/responses/resp_1/cancel", "DELETE /v1/responses/resp_1",
    "POST /v1/files", "GET /v1/files/f/content", "POST /v1/uploads/u/parts", "POST /upload/v1beta/files",
    "POST /v1/conversations", "POST /v1/conversations/c/items", "POST /v1/oauth/token", "POST /api/oauth/x",
    "POST /v1/organizations/o/invites", "POST /v1/traces", "POST /v1/logs", "POST /v1/metrics", "HEAD /v1/x",
    "POST /api/event_logging/batch", "POST /v1internal:loadCodeAssist", "POST /v1internal:onboardUser",
    "POST /v1internal:countTokens", "POST /v1internal:retrieveUserQuota", "POST /v1internal:recordCodeAssistMetrics",
    "POST /v1/moderations", "GET /v1beta/interactions/i", "GET /v1/conversations/c/items", "GET /v1/batches/b",
    "POST /v1/agents", "POST /v1/agents/agent_1/archive", "POST /v1/environments/env_1/work/w/ack",
    "POST /v1/sessions/s/archive", "POST /anthropic/v1/sessions/s/archive",
    "POST /v1/sessions/s/resources/r", "POST /v1/sessions/s/threads/t/archive",
    "POST /v1/sessions/s", "POST /v1/agents/sessions/s", "GET /v1/sessions/s/events",
    "POST /v1/vaults", "POST /v1/vaults/vlt_1/credentials", "POST /v1/skills",
    "POST /v1/batches/b/cancel", "POST /v1beta/interactions/i/cancel", "OPTIONS /v1/x",
    "POST /openai/v1/files", "POST /openai/responses/input_tokens", "POST /anthropic/v1/files",
    "POST /v1/projects/p/locations/l/workspaces/w/invoke/v1/messages/count_tokens",
    "POST /v1beta1/projects/p/locations/l/interactions/i/cancel",
    "POST /v1beta1/projects/p/locations/l/publishers/google/models/veo-3.1:fetchPredictOperation",
)  # fmt: skip


@pytest.mark.parametrize("path", UNREAD)
def test_what_may_generate_is_not_free(path: str) -> None:
    dialect = find("POST", path.partition("?")[0])
    assert not uses_nothing(dialect, "POST", path)
    assert not is_read(dialect, peek(b"{}"), b"{}", packed=False)


@pytest.mark.parametrize("name", [b"x-http-method-override", b"x-http-method", b"x-method-override"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_a_method_that_another_one_overrides_is_not_free(name: bytes, method: str) -> None:
    path, headers = "/v1beta/models/m:generateContent", [(name, name, b"POST")]
    assert uses_nothing(find(method, path), method, path)
    assert not uses_nothing(find(method, path), method, path, headers)
    assert uses_nothing(find(method, "/v1/files"), method, "/v1/files", headers)


@pytest.mark.parametrize("call", FREE)
def test_what_uses_nothing_is_never_counted(call: str) -> None:
    method, path = call.split()
    assert uses_nothing(find(method, path), method, path)


def test_the_docs_show_the_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "budgets.md").read_text()
    rows = [f"| `{row.form}` | {row.why} |\n" for row in FREE_PATHS]
    assert f"| path | such a call |\n|---|---|\n{''.join(rows)}\n" in page


@given(
    st.lists(
        st.sampled_from([*GENERATES, "v1", "openai", "anthropic", "files", "health", "traces", "uploads", "..", ""]),
        max_size=5,
    ),
    st.sampled_from(GENERATES), st.sampled_from(["/", ":"]), st.sampled_from(["POST", "PUT", "PATCH", "QUERY"]),
)  # fmt: skip
def test_nothing_that_ends_like_a_generation_is_free(before: list[str], last: str, mark: str, method: str) -> None:
    path = "".join(f"/{part}" for part in before) + mark + last
    assert not is_free(method, path)


@given(st.sampled_from(DIALECTS), st.binary(max_size=30) | st.sampled_from([b"[]", b"\xff{}", b'{"a":', b'{"a": NaN}']))
def test_a_body_that_is_no_object_is_not_read(dialect: Any, body: bytes) -> None:
    try:
        readable = isinstance(json.loads(body), dict)
    except ValueError:
        readable = False
    assert is_read(dialect, peek(body), body, packed=False) <= (dialect.uses_tokens and readable)
    assert not is_read(dialect, peek(b"{}"), b"{}", packed=True)


@pytest.mark.parametrize(
    ("path", "named", "known"),
    [
        ("/openai/deployments/opus/brand/new?api-version=1", "free", False),
        ("/openai/deployments/gpt/brand/new?api-version=1", "gpt", True),
        ("/openai/deploy%6Dents/opus/images/edits", "free", False),
        ("/v1/projects/p/locations/l/publishers/meta/models/llama-opus:rawPredict", "free", False),
        ("/v1beta/models/gemini:batchGenerateContent", "free", False),
        ("/v1/messages/batches", "free", False),
        ("/v1/batches", "free", False),
        ("/v1/agents/sessions", "free", False),
        ("/async-invoke", "free", False),
        ("/brand/new", "free", False),
        ("/v1/audio/transcriptions", "free", True),
        ("/v1/responses/compact", "free", True),
        ("//v1/chat/completions/", "free", True),
        ("/models/chat/completions?api-version=1", "free", True),
        ("/v1/chat/completions", "free", True),
    ],
)
def test_the_model_of_a_body_is_believed_where_it_counts(path: str, named: str, known: bool) -> None:
    dialect = find("POST", path.partition("?")[0])
    assert known_model(named, dialect, path) == (named if known else None)


@pytest.mark.parametrize(
    ("model", "about"),
    [
        (None, True), ("claude-opus-4", True), ("claude-haiku-4", False),
        ("arn:aws:bedrock:us-east-1:1:application-inference-profile/x", True),
        ("arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude-haiku-4", False),
    ],
)  # fmt: skip
def test_a_model_that_nobody_knows_may_be_any(model: str | None, about: bool) -> None:
    assert Limit(Budget(name="b", unit="calls", limit=1, model="*opus*")).is_about(model) is about


@asynccontextmanager
async def world(home: Path, *budgets: dict[str, Any]) -> AsyncGenerator[tuple[Gateway, BackgroundHost]]:
    """A provider that answers to everything."""
    async with background_host() as host:
        root = host.url.removesuffix("/v1")
        names = ("openai", "anthropic", "gemini", "bedrock")
        config = "".join(upstream(name, host.url if name == "openai" else root, name) for name in names)
        async with locally(home, config + toml(*budgets)) as gateway:
            yield gateway, host


async def ask(http: aiohttp.ClientSession, gateway: Gateway, path: str, **said: Any) -> tuple[int, str]:
    options: dict[str, Any] = {"json": {"model": "m", "input": "x"}, **said}
    url = f"{gateway.address('r')}{path}"
    async with http.post(url, **options) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("unit", ["tokens", "usd"])
async def test_no_such_call_passes_a_budget_of_tokens_or_money(
    tmp_path: Path, http: aiohttp.ClientSession, unit: str
) -> None:
    """Also where the budget is about another model: nobody knows which one such a call is for."""
    async with world(tmp_path, budget(name="cap", unit=unit, limit=10**6, model="gpt-5*")) as (gateway, host):
        counted = 0
        for path in UNREAD:
            status, said = await ask(http, gateway, path.replace("..", "x"), json={"input": "x"})
            assert status in (403, 404), (path, status, said)
            if status == 403 and "cap" in said:
                assert "unknown" in said
                counted += 1
        assert counted > len(UNREAD) / 2
        for body in (b"no JSON", b"[]", b'{"model": "gpt-5", "messages": ['):
            status, said = await ask(http, gateway, "/v1/chat/completions", data=body, json=None)
            # A budget of a model, as a route, has it refused as a body that names none.
            assert (status, "unreadable" in said) == (400, True)
        packed: dict[str, Any] = {"headers": {"content-encoding": "x-own"}, "data": b"{packed}", "json": None}
        assert (await ask(http, gateway, "/v1/chat/completions", **packed))[0] == 400
        status, said = await ask(http, gateway, "/v1/chat/completions", **packed | {"data": b'{"model": "gpt-5"}'})
        assert (status, "cap" in said) == (403, True), "an encoding that nobody knows may mean anything"
        counted += 1
        assert not host.posts, "what is refused goes nowhere"
        for call in FREE:
            method, path = call.split()
            if "/v1/" in path and method in ("POST", "GET") and "responses/resp" not in path:
                async with http.request(method, gateway.address("r") + path, json={"model": "gpt-5"}) as answer:
                    assert answer.status != 403, path
        _ = await spans_of(http, gateway, "error:budget_unread", counted)


async def test_a_sidecar_s_calls_are_counted_too(tmp_path: Path) -> None:
    async with world(tmp_path, budget(name="cap", unit="tokens", limit=10**6)) as (gateway, host):
        where = host.url.removeprefix("http://").removesuffix("/v1")
        async with connect(gateway.url) as wire:
            wire.send(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\nx-rollout-id: r\r\n\r\n".encode())
            await wire.until(b"HTTP/1.1 200 OK\r\n\r\n")
            wire.send(b"POST /v1/rerank HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}")
            assert (await wire.message()).startswith(b"HTTP/1.1 403")
        assert not host.posts


@pytest.mark.slow
async def test_a_budget_says_what_becomes_of_them(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    budgets = (
        budget(name="calls", limit=3), budget(name="passed", unit="tokens", limit=1, unknown="pass"),
        budget(name="free", unit="usd", limit=0.000001, unknown="pass"),
    )  # fmt: skip
    async with world(tmp_path, *budgets) as (gateway, host):
        answers = [(await ask(http, gateway, "/v1/rerank"))[0] for _ in range(4)]
        assert (answers, len(host.posts)) == ([200, 200, 200, 429], 3)
        assert await uses(http, gateway.url) == [("calls", "", 3, 0), ("free", "", 0, 0), ("passed", "", 0, 0)]
        async with http.get(gateway.url + "/api/budgets") as answer:
            found = {one["budget"]: one["unread"] for one in (await answer.json())["budgets"]}
        assert found == {"calls": 3, "passed": 3, "free": 3}
        async with http.get(gateway.url + "/metrics") as page:
            assert 'penstock_budget_unread_total{became="pass",budget="free"} 4.0' in (await page.text()).replace(
                '{budget="free",became="pass"}', '{became="pass",budget="free"}'
            )
        assert "unread" in (await Shell(gateway.url, tmp_path).run("budgets", COLUMNS="160")).text


async def test_tokens_refuse_them(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(name="tokens", unit="tokens")) as (gateway, host):
        assert (await ask(http, gateway, "/v1/rerank"))[0] == 403
        assert not host.posts
