"""Loading, checking, warming and unloading, against a scripted vLLM: above all what goes wrong.

What a real one does is in tests/vllm.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

import aiohttp
import pytest
from fakes.engine import CHAT, LOAD, MODELS, UNLOAD, FakeEngine, Planned

from penstock.gateway.model.resource import ModelVersion, Residency
from penstock.gateway.releases import adapter_server
from penstock.gateway.releases.adapter_server import ServingError, VllmClient, settle

V1 = ("policy@v1", "/a/v1")


@pytest.fixture
def client(vllm: FakeEngine, http: aiohttp.ClientSession) -> VllmClient:
    return VllmClient(http, vllm.openai_url)


@contextmanager
def refused(kind: str, match: str | None = None) -> Generator[None]:
    with pytest.raises(ServingError, match=match) as error:
        yield
    assert error.value.kind == kind
    assert "wrong-secret" not in str(error.value)


def asked(vllm: FakeEngine, path: str) -> int:
    return sum(one == path for one, _ in vllm.asked)


async def test_a_version_is_loaded_once_and_unloaded_once(vllm: FakeEngine, client: VllmClient) -> None:
    assert await client.load(*V1)
    assert not await client.load(*V1)
    assert await client.adapters() == {"base": None, "policy@v1": "/a/v1"}
    assert asked(vllm, LOAD) == 1
    assert await client.unload("policy@v1")
    assert not await client.unload("policy@v1")
    assert await client.adapters() == {"base": None}


async def test_a_restarted_server_gets_its_versions_again(vllm: FakeEngine, client: VllmClient) -> None:
    await client.load(*V1)
    vllm.restart()
    assert await client.load(*V1)


async def test_two_that_load_at_once_both_succeed(vllm: FakeEngine, client: VllmClient) -> None:
    """Both have seen that it is not there."""
    go = asyncio.Event()
    vllm.plan(LOAD, Planned(before=go), Planned(before=go))
    both = asyncio.gather(client.load(*V1), client.load(*V1))
    await vllm.until(LOAD, 2)
    go.set()
    assert sorted(await both) == [False, True]


async def test_a_name_is_never_given_to_other_weights(vllm: FakeEngine, client: VllmClient) -> None:
    await client.load(*V1)
    with refused("mismatch", "policy@v1' from the adapter in /a/v1, not the one in /a/other"):
        await client.load("policy@v1", "/a/other")
    with refused("mismatch", "serves 'base' from a base model"):
        await client.load("base", "/a/v1")
    assert asked(vllm, LOAD) == 1
    assert all("load_inplace" not in body for _, body in vllm.asked)


async def test_an_adapter_is_not_put_on_another_base(vllm: FakeEngine, client: VllmClient) -> None:
    assert await client.load(*V1, base="base")
    for name, path in (V1, ("policy@v2", "/a/v2")):
        with refused("mismatch", f"serves base, not 'other', for which adapter '{name}' was made"):
            await client.load(name, path, base="other")
    wrong = ModelVersion(upstream="vllm", base="other", adapter="/a/v2")
    settled = await settle(client, Residency({"policy@v2": wrong}), ["policy@v2"])
    assert settled.failed["policy@v2"].kind == "mismatch"
    assert "policy@v2" not in vllm.adapters


async def test_other_weights_that_came_first_are_a_mismatch(vllm: FakeEngine, client: VllmClient) -> None:
    """Between our look and our load."""
    go = asyncio.Event()
    vllm.plan(LOAD, Planned(before=go))
    late = asyncio.ensure_future(client.load(*V1))
    await vllm.until(LOAD)
    vllm.adapters["policy@v1"] = "/a/other"
    go.set()
    with pytest.raises(ServingError, match="not the one in /a/v1"):
        await late


async def test_a_path_that_the_server_does_not_have(vllm: FakeEngine, client: VllmClient) -> None:
    vllm.files = set()
    with refused("not_found", r"'policy@v1' from /a/v1: .*No adapter found.*; the path must exist on the server"):
        await client.load(*V1)


async def test_a_server_that_does_not_load_at_run_time(vllm: FakeEngine, client: VllmClient) -> None:
    vllm.updates = False
    for attempt in (client.load(*V1), client.unload("policy@v1")):
        with refused("refused", r"policy@v1.*--enable-lora and VLLM_ALLOW_RUNTIME_LORA_U"):
            await attempt


async def test_a_server_that_says_no(vllm: FakeEngine, client: VllmClient) -> None:
    vllm.plan(LOAD, Planned(500, '{"error": {"message": "LoRA rank 64 is greater than max_lora_rank 8."}}'))
    with refused("refused", r"load adapter 'policy@v1' from /a/v1: LoRA rank 64 .* 8\. \(500\)"):
        await client.load(*V1)
    vllm.plan(UNLOAD, Planned(503, "<html>\n  busy </html>"))
    with pytest.raises(ServingError, match=r"unload adapter 'policy@v1': <html> busy </html> \(503\)"):
        await client.unload("policy@v1")
    vllm.plan(MODELS, Planned(500, ""))
    with pytest.raises(ServingError, match=r"list its models: it gave no reason \(500\)"):
        await client.adapters()


async def test_a_key_is_sent_as_a_bearer_and_never_shown(vllm: FakeEngine, http: aiohttp.ClientSession) -> None:
    vllm.key = "sesame"
    assert await VllmClient(http, vllm.url, "sesame").load(*V1)
    for key in (None, "wrong-secret"):
        with refused("refused", r"Unauthorized \(401\); set key_env of the upstream"):
            await VllmClient(http, vllm.url, key).adapters()


async def test_nobody_answers(http: aiohttp.ClientSession, client: VllmClient, vllm: FakeEngine) -> None:
    vllm.plan(MODELS, Planned(hang_up=True), Planned(hang_up=True))
    with refused("unreachable", f"the server at {vllm.url} could not be asked"):
        await client.load(*V1)
    with refused("unreachable", r"could not be asked \(GET /v1/models\)"):
        await VllmClient(http, "http://127.0.0.1:1/v1").load(*V1)


async def test_an_answer_that_takes_too_long(
    vllm: FakeEngine, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may still be loaded afterwards: the next load finds it."""
    monkeypatch.setattr(adapter_server, "LOAD_S", 0.05)
    go = asyncio.Event()
    vllm.plan(LOAD, Planned(before=go))
    with refused("timeout", r"POST /v1/load_lora_adapter within 0\.05 s"):
        await client.load(*V1)
    vllm.adapters["policy@v1"] = "/a/v1"
    assert not await client.load(*V1)


@pytest.mark.parametrize("text", ["<html>", "[]", '{"data": [1]}', '{"data": [{"id": "x", "parent": "y"}]}'])
async def test_something_else_listens_there(vllm: FakeEngine, client: VllmClient, text: str) -> None:
    vllm.plan(MODELS, Planned(200, text))
    with pytest.raises(ServingError, match=r"list its models"):
        await client.adapters()


async def test_a_version_that_answers(vllm: FakeEngine, client: VllmClient) -> None:
    await client.load(*V1)
    check = await client.check("policy@v1")
    assert check.text == "I am policy@v1."
    assert 0 < check.seconds < 60
    path, body = vllm.asked[-1]
    assert (path, body["temperature"], body["messages"][0]["content"]) == (CHAT, 0, "Say hello.")


async def test_a_version_of_damaged_weights(vllm: FakeEngine, client: VllmClient) -> None:
    await client.load(*V1)
    vllm.damaged = {"policy@v1"}
    with refused("unusable", "as 'policy@v1' with log-probabilities that are not numbers"):
        await client.check("policy@v1")
    assert (await client.check("policy@v1", numbers=False)).text


def chat_with(logprobs: str) -> str:
    return f'{{"choices": [{{"message": {{"content": null}}, "logprobs": {logprobs}}}]}}'


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (chat_with('{"content": [{"logprob": NaN}]}'), "not numbers"),
        (chat_with('{"content": [{"logprob": null}]}'), "not numbers"),
        (chat_with('{"content": []}'), "not numbers"),
        (chat_with("null"), "as a chat model does"),
        ('{"choices": []}', "as a chat model does"),
        ("event: odd", "as a chat model does"),
        ("[1]", "as a chat model does"),
    ],
)
async def test_an_answer_that_is_none(vllm: FakeEngine, client: VllmClient, answer: str, said: str) -> None:
    vllm.plan(CHAT, Planned(200, answer))
    with pytest.raises(ServingError, match=said) as raised:
        await client.check("base")
    assert raised.value.kind == "unusable"


async def test_special_tokens_alone_are_an_answer(vllm: FakeEngine, client: VllmClient) -> None:
    vllm.plan(CHAT, Planned(200, chat_with('{"content": [{"logprob": -1}]}')))
    assert (await client.check("base")).text == ""


async def test_a_version_that_is_not_there_or_too_slow(
    vllm: FakeEngine, client: VllmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("not_found", "would not answer as 'policy@v1': The model `policy@v1` does not exist"):
        await client.check("policy@v1")
    vllm.plan(CHAT, Planned(before=asyncio.Event()))
    monkeypatch.setattr(adapter_server, "CHECK_S", 0.05)
    with refused("timeout"):
        await client.check("base")


async def test_warming_asks_many_times_at_once(vllm: FakeEngine, client: VllmClient) -> None:
    go = asyncio.Event()
    vllm.plan(CHAT, *[Planned(before=go)] * 5)
    warming = asyncio.ensure_future(client.warm("base", 5))
    await vllm.until(CHAT, 5)
    go.set()
    assert await warming > 0
    with pytest.raises(ServingError, match="would not answer as 'policy@v1'"):
        await client.warm("policy@v1", 2)


async def test_a_server_is_settled(vllm: FakeEngine, client: VllmClient) -> None:
    """One version that will not load does not stop the others."""
    known = {f"policy@v{n}": ModelVersion(upstream="vllm", base="base", adapter=f"/a/v{n}") for n in range(4)}
    vllm.adapters = {"policy@v0": "/a/v0", "theirs@v1": "/b/v1"}
    vllm.files = {"/a/v1", "/a/v3"}
    residency = Residency(known, await client.slots())
    settled = await settle(client, residency, ["policy@v1", "policy@v2", "policy@v3"])
    assert settled.done == ["policy@v0", "policy@v1", "policy@v3"]
    assert settled.failed["policy@v2"].kind == "not_found"
    assert vllm.adapters == {"theirs@v1": "/b/v1", "policy@v1": "/a/v1", "policy@v3": "/a/v3"}
    vllm.files.add("/a/v2")
    again = await settle(client, residency, ["policy@v2", "policy@v3"])
    assert (again.done, again.failed) == (["policy@v1", "policy@v2"], {})


async def test_a_server_that_cannot_be_asked_is_not_settled(vllm: FakeEngine, client: VllmClient) -> None:
    vllm.plan(MODELS, Planned(500))
    with pytest.raises(ServingError, match="would not list its models"):
        await settle(client, Residency({}), [])


async def test_slots(vllm: FakeEngine, client: VllmClient) -> None:
    assert await client.slots() == 4
    vllm.plan("/metrics", Planned(404, "no"))
    assert await client.slots() is None
