"""vLLM keeps what it has computed of a prompt and uses it again: a version must never be given another one's."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from penstock.gateway.releases.adapter_server import VllmClient, settle

from .conftest import Vllm
from .test_adapters import body, published

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]

PROMPT = "the gate holds the water and the wheel turns the mill by the river in the valley below " * 20
"""Several blocks of 128 tokens: only whole ones are kept."""


async def told(http: aiohttp.ClientSession, vllm: Vllm, model: str, **more: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of an answer."""
    asked = body(model, PROMPT, 24, **more)
    async with http.post(f"{vllm.url}/v1/chat/completions", json=asked) as response:
        answer = await response.json()
        assert response.status == 200, answer
    assert len(answer["prompt_token_ids"]) > 256
    (choice,) = answer["choices"]
    return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


async def hits(http: aiohttp.ClientSession, vllm: Vllm) -> float:
    """Tokens of prompts that were not computed again, since the start."""
    async with http.get(f"{vllm.url}/metrics") as response:
        return sum(map(float, re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", await response.text(), re.M)))


async def test_a_version_never_answers_from_what_another_has_cached(
    vllm: Vllm, engine: VllmClient, http: aiohttp.ClientSession
) -> None:
    """Versions come and go, one is unloaded and loaded again, as on a server that was restarted; each is asked the same
    long prompt. With a salt of its own a call is computed anew, which is what it must say without one, too."""
    residency = published(vllm, {"policy@v1": "v1", "policy@v2": "v2", "other@v1": "v1"})
    found: dict[str, tuple[list[int], list[float]]] = {}
    before = await hits(http, vllm)
    for name in ("policy@v1", "policy@v2", "policy@v1", "other@v1"):
        assert not (await settle(engine, residency, [name])).failed
        anew = await told(http, vllm, name, cache_salt=uuid4().hex)
        for _ in range(2):
            ids, logprobs = await told(http, vllm, name)
            assert ids == anew[0]
            assert logprobs == pytest.approx(anew[1], abs=1e-4)
        found[name] = anew
    await settle(engine, residency, [])
    assert await hits(http, vllm) - before >= 4 * 128
    assert found["policy@v1"] == found["other@v1"]
    assert found["policy@v1"] != found["policy@v2"]
