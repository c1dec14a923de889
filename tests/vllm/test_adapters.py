"""Versions of weights on a real vLLM: loaded, checked, served side by side through a gateway, taken away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import pytest_asyncio
from fakes.process import Gateway, running, upstream

from penstock.gateway.model.resource import ModelVersion, Residency
from penstock.gateway.releases.adapter_server import ServingError, VllmClient, settle

from .conftest import SLOTS, Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]

PROMPTS = ["Where does the water go?", "the mill", "Who turns the wheel, and when, and why?", "7"]
VERSIONS = ["policy@v0", "policy@v1", "policy@v2"]


def published(vllm: Vllm, adapters: dict[str, str]) -> Residency:
    """Versions, by the name each is served under and that of its adapter."""
    made = {
        name: ModelVersion(upstream="vllm", base="base", adapter=vllm.adapter(one)) for name, one in adapters.items()
    }
    return Residency(made)


@pytest.fixture
async def loaded(vllm: Vllm, engine: VllmClient) -> AsyncGenerator[Residency]:
    """Three versions are served; afterwards none."""
    residency = published(vllm, {name: name.partition("@")[2] for name in VERSIONS})
    assert (await settle(engine, residency, VERSIONS)).done == VERSIONS
    yield residency
    assert not (await settle(engine, residency, [])).failed
    assert await engine.adapters() == {"base": None}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway]:
    """A gateway in front of it."""
    async with running(tmp_path_factory.mktemp("gateway"), upstream("vllm", vllm.url + "/v1", "openai")) as made:
        yield made


def body(model: str, prompt: str, tokens: int = 48, **more: Any) -> dict[str, Any]:
    asked = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    return asked | {"ignore_eos": True, "logprobs": True, "top_logprobs": 0, "return_token_ids": True} | more


async def ask(http: aiohttp.ClientSession, url: str, model: str, prompt: str) -> Any:
    """What a version answers: text, token ids and log-probabilities."""
    async with http.post(url + "/chat/completions", json=body(model, prompt)) as response:
        answer = await response.json()
        assert response.status == 200, answer
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]


class Stream:
    """A streamed answer that is being read."""

    def __init__(self, http: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> None:
        self._request = http.post(url + "/chat/completions", json=asked | {"stream": True})
        self.tokens: list[int] = []

    async def begin(self) -> None:
        """Until its first tokens are here."""
        self.response = await self._request
        assert self.response.status == 200
        await self.read(1)

    async def read(self, tokens: int) -> None:
        """Until so many tokens are here, or it ends."""
        while len(self.tokens) < tokens and (line := await self.response.content.readline()):
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    self.tokens += choice.get("token_ids") or []


async def test_a_version_is_loaded_checked_and_warmed(vllm: Vllm, engine: VllmClient) -> None:
    path = vllm.adapter("v1")
    assert await engine.load("policy@v1", path)
    assert not await engine.load("policy@v1", path)
    assert await engine.adapters() == {"base": None, "policy@v1": path}
    assert (await engine.check("policy@v1")).text != (await engine.check("base")).text
    assert await engine.warm("policy@v1", 8) > 0
    assert await engine.slots() == SLOTS
    with pytest.raises(ServingError, match="A name is never given to other weights") as error:
        await engine.load("policy@v1", vllm.adapter("v2"))
    assert error.value.kind == "mismatch"
    assert await engine.unload("policy@v1")
    assert not await engine.unload("policy@v1")
    with pytest.raises(ServingError) as error:
        await engine.check("policy@v1")
    assert error.value.kind == "not_found"


async def test_two_that_load_at_once_both_succeed(vllm: Vllm, engine: VllmClient) -> None:
    path = vllm.adapter("v1")
    done = await asyncio.gather(*(engine.load("policy@v1", path) for _ in range(4)))
    assert sorted(done) == [False, False, False, True]
    assert await engine.unload("policy@v1")


@pytest.mark.parametrize(
    ("adapter", "kind", "said"),
    [
        ("nowhere", "not_found", "the path must exist on the server"),
        ("wide", "refused", "LoRA rank 64 is greater than max_lora_rank 8"),
        ("alien", "refused", "size of tensor"),
    ],
)
async def test_an_adapter_that_will_not_load_is_a_clear_failure(
    vllm: Vllm, engine: VllmClient, adapter: str, kind: str, said: str
) -> None:
    with pytest.raises(ServingError, match="would not load adapter 'policy@v9'") as error:
        await engine.load("policy@v9", vllm.adapter(adapter))
    assert error.value.kind == kind
    assert said in str(error.value)
    assert vllm.adapter(adapter) in str(error.value)
    assert "policy@v9" not in await engine.adapters()
    await engine.check("base")


async def test_damaged_weights_load_and_are_found_out(vllm: Vllm, engine: VllmClient) -> None:
    await engine.load("policy@nan", vllm.adapter("nan"))
    with pytest.raises(ServingError, match="log-probabilities that are not numbers"):
        await engine.check("policy@nan")
    await engine.unload("policy@nan")


async def test_versions_side_by_side_answer_as_they_do_alone(
    loaded: Residency, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    """Bit for bit, text, tokens and log-probabilities. The zero adapter stands for the base model."""
    url = gateway.openai(f"r-{uuid4().hex[:8]}")
    solo = {(name, prompt): await ask(http, url, name, prompt) for name in VERSIONS for prompt in PROMPTS}
    for prompt in PROMPTS:
        assert len({solo[name, prompt][0] for name in VERSIONS}) == 3
        assert await ask(http, url, "base", prompt) == solo["policy@v0", prompt]
    keys = [key for _ in range(2) for key in solo]
    together = await asyncio.gather(*(ask(http, url, name, prompt) for name, prompt in keys))
    for key, answer in zip(keys, together, strict=True):
        assert answer == solo[key], key


@pytest.mark.xfail(
    raises=AssertionError, strict=False, reason="vLLM 0.32 on a CPU may give it an adapter of its batch (0.33 does not)"
)
async def test_the_base_itself_beside_adapters_answers_as_it_does_alone(
    vllm: Vllm, engine: VllmClient, http: aiohttp.ClientSession
) -> None:
    """Why the base is published as a zero adapter (docs/weights.md). It shows when every slot is taken."""
    url = vllm.url + "/v1"
    names = {f"beside@{n}": f"v{1 + n % 2}" for n in range(SLOTS)}
    residency = published(vllm, names)
    assert not (await settle(engine, residency, names)).failed
    solo = await ask(http, url, "base", PROMPTS[0])
    streams = [Stream(http, url, body(name, PROMPTS[1], 800)) for name in names]
    await asyncio.gather(*(stream.begin() for stream in streams))
    beside = await ask(http, url, "base", PROMPTS[0])
    for stream in streams:
        stream.response.close()
    await settle(engine, residency, [])
    assert beside == solo


async def test_an_answer_that_has_begun_is_finished_by_a_version_that_is_taken_away(
    loaded: Residency, engine: VllmClient, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    url = gateway.openai(f"r-{uuid4().hex[:8]}")
    asked = body("policy@v2", PROMPTS[0], 300)
    alone, cut = Stream(http, url, asked), Stream(http, url, asked)
    await alone.begin()
    await alone.read(1000)
    assert len(alone.tokens) == 300
    await cut.begin()
    assert await engine.unload("policy@v2")
    assert len(cut.tokens) < 300
    async with http.post(url + "/chat/completions", json=asked) as refused:
        assert refused.status == 404
    await cut.read(1000)
    assert cut.tokens == alone.tokens
