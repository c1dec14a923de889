"""Interactions through a gateway: streams that are resumed, prompts that a release changes, costs; and Code Assist."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fakes.budgets import budget, spans_of, toml, uses
from fakes.experiment import policy
from fakes.interactions import SAID, InteractionsHost, interactions_host
from fakes.local import locally
from fakes.process import Gateway, upstream
from fakes.waiting import until
from fakes.web_site import event_stream, everywhere, site

KEY = {"x-goog-api-key": "AIzaKey"}
ASK: dict[str, Any] = {"model": "gemini-2.5-pro", "input": "Where is it?", "system_instruction": "Be brief."}


@asynccontextmanager
async def world(home: Path) -> AsyncGenerator[tuple[Gateway, InteractionsHost]]:
    caps = toml(budget(name="cap", unit="tokens", limit=10**6), budget(name="usd", unit="usd", limit=10))
    async with interactions_host() as host, locally(home, upstream("g", host.url, "gemini") + caps) as gateway:
        yield gateway, host


async def turn_of(http: aiohttp.ClientSession, gateway: Gateway, span: dict[str, Any]) -> Any:
    path = f"/api/rollouts/{span['rollout']}/attempts/{span['attempt']}/spans/{span['sequence']}"
    async with http.get(gateway.url + path) as answer:
        return (await answer.json())["turn"]


@pytest.mark.parametrize("whole", [True, False], ids=["all", "the rest"])
@pytest.mark.parametrize("breaks_after", [1, 4, 8])
async def test_a_stream_that_broke_off_is_completed(
    tmp_path: Path, http: aiohttp.ClientSession, breaks_after: int, whole: bool
) -> None:
    """By the whole stream anew, or by what comes after its last event."""
    async with world(tmp_path) as (gateway, host):
        host.breaks_after = breaks_after
        path = gateway.url + "/rollout/r/v1beta/interactions"
        with pytest.raises(aiohttp.ClientPayloadError):
            await (await http.post(path, json=ASK | {"stream": True, "background": True}, headers=KEY)).read()
        query = {"stream": "true"} | ({} if whole else {"last_event_id": f"v1_1-{breaks_after - 1}"})
        async with http.get(path + "/v1_1", params=query, headers=KEY) as answer:
            came = await answer.read()
        assert (b"interaction.created" in came) == whole
        (asked,) = await spans_of(http, gateway, "rollout:r status:ok dialect:interactions", 1)
        assert (asked["finish"], asked["usage"]["output_tokens"]) == ("completed", 30)
        turn = await turn_of(http, gateway, asked)
        assert [part["text"] for part in turn["choices"][0]["message"]["parts"]] == ["Where is it?", SAID]
        assert not turn["problems"]
        assert (await uses(http, gateway.url))[0][:3] == ("cap", "", 100)


async def test_what_does_not_follow_is_not_put_together(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path) as (gateway, host):
        host.breaks_after = 3
        path = gateway.url + "/rollout/r/v1beta/interactions"
        with pytest.raises(aiohttp.ClientPayloadError):
            await (await http.post(path, json=ASK | {"stream": True, "background": True}, headers=KEY)).read()
        query = {"stream": "true", "last_event_id": "v1_1-6"}
        async with http.get(path + "/v1_1", params=query, headers=KEY) as answer:
            await answer.read()
        (asked,) = await spans_of(http, gateway, "rollout:r status:ok dialect:interactions", 1)
        turn = await turn_of(http, gateway, asked)
        assert turn["problems"] == ["response: the stream begins in the middle"]


async def test_a_released_prompt_and_the_cost(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    texts = ("You are an agent that looks for things.", "You are an agent that finds things.")
    async with world(tmp_path) as (gateway, host):
        api = gateway.url + "/api"
        for text in texts:
            content = {"text": text, "sent": text == texts[0]}
            async with http.post(f"{api}/resources/look", json={"kind": "prompt", "content": content}) as made:
                assert made.status < 300
        new = {"candidate": "v2", "policy": policy(0.5).model_dump(mode="json", exclude_unset=True)}
        async with http.post(f"{api}/resources/look/releases", json=new) as made:
            release = (await made.json())["id"]

        async def is_live() -> bool:
            async with http.get(f"{api}/releases/{release}") as found:
                return (await found.json())["release"]["stage"] == "canary"

        await until(is_live)
        async with http.post(f"{api}/releases/{release}/promote", json={"who": "ann"}) as made:
            assert made.status == 200, await made.text()
        asked = ASK | {"system_instruction": texts[0], "service_tier": "flex"}
        async with http.post(gateway.url + "/rollout/r/v1beta/interactions", json=asked, headers=KEY) as answer:
            assert answer.status == 200
        assert host.asked == [asked | {"system_instruction": texts[1]}]
        (span,) = await spans_of(http, gateway, "rollout:r", 1)
        assert span["versions"] == {"look": "v2"}
        # The tier that served it counts, and not the one that was asked for.
        assert (await uses(http, gateway.url))[1][2] == pytest.approx((70 * 1.25 + 30 * 10) / 1e6)


async def test_code_assist_is_counted_and_routed(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Its operations beside generation pass any budget."""
    seen: list[tuple[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((request.path.rpartition(":")[2], await request.json()))
        usage = {"promptTokenCount": 70, "candidatesTokenCount": 20, "thoughtsTokenCount": 10}
        piece = {"content": {"role": "model", "parts": [{"text": SAID}]}, "finishReason": "STOP"}
        told = {"response": {"candidates": [piece], "usageMetadata": usage, "modelVersion": "gemini-2.5-pro"}}
        if not request.path.endswith(":streamGenerateContent"):
            return web.json_response({"totalTokens": 9} if request.path.endswith(":countTokens") else {})
        stream = await event_stream(request)
        await stream.write(b"data: %b\n\n" % json.dumps(told | {"traceId": "t"}).encode())
        return stream

    inside = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "generationConfig": {"maxOutputTokens": 900}}
    body = {"model": "fast", "project": "p", "user_prompt_id": "u", "request": inside}
    route = '[[route]]\nmodel = "fast"\nupstream = "ca"\nalias = "gemini-2.5-pro"\n'
    caps = toml(budget(name="cap", unit="tokens", limit=4000), budget(name="n", limit=10))
    async with (
        site(everywhere(answer)) as url,
        locally(tmp_path, upstream("ca", url, "codeassist") + route + caps) as gateway,
    ):
        for operation in ("loadCodeAssist", "retrieveUserQuota", "countTokens", "streamGenerateContent?alt=sse"):
            path = f"{gateway.url}/v1internal:{operation}"
            async with http.post(path, json=body, headers={"authorization": "Bearer ya29.x"}) as came:
                assert came.status == 200, await came.text()
        (span,) = await spans_of(http, gateway, "dialect:codeassist", 1)
        assert (span["model"], span["finish"], span["usage"]["output_tokens"]) == ("fast", "STOP", 30)
        assert seen[-1] == ("streamGenerateContent", body | {"model": "gemini-2.5-pro"})
        turn = await turn_of(http, gateway, span)
        assert turn["choices"][0]["message"]["parts"][0]["text"] == SAID
        assert not turn["problems"]
        assert [row[:3] for row in await uses(http, gateway.url)] == [("cap", "", 100), ("n", "", 1)]
        # The limit in the envelope is what is reserved.
        inside["generationConfig"] = {"maxOutputTokens": 9000}
        async with http.post(path, json=body, headers={"authorization": "Bearer ya29.x"}) as came:
            assert came.status == 429
            assert "9,000 for the answer" in (await came.json())["error"]["message"]
