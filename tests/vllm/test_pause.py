"""An engine that is stopped to be changed: agents wait, nothing fails, and it gets its versions again.

One test, because it costs a start of vLLM.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from fakes.rig import inside

from penstock.gateway.releases.adapter_server import ServingError, VllmClient, settle

from .conftest import Vllm
from .test_adapters import PROMPTS, ask, published

pytestmark = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(900)]


async def test_calls_wait_while_the_engine_is_started_again(
    vllm: Vllm, engine: VllmClient, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    residency = published(vllm, {"policy@v1": "v1"})
    assert (await settle(engine, residency, ["policy@v1"])).done == ["policy@v1"]
    check = await engine.check("policy@v1")
    upstream = [{"name": "vllm", "base_url": vllm.url + "/v1"}]
    async with inside(tmp_path, http, upstream=upstream) as rig:
        url = f"{rig.base.url}/rollout/inside/attempt/a1/v1"
        gate = rig.gateway.pools["vllm"].gate
        before = [await ask(http, url, "policy@v1", prompt) for prompt in PROMPTS]
        gate.pause(600)
        waiting = [asyncio.ensure_future(ask(http, url, "policy@v1", prompt)) for prompt in PROMPTS]
        await rig.tape.when("inside", "a1", lambda _: gate.waiting == len(PROMPTS))
        await asyncio.to_thread(vllm.stop)
        with pytest.raises(ServingError, match="could not be asked") as error:
            await engine.load("policy@v1", vllm.adapter("v1"))
        assert error.value.kind == "unreachable"
        await asyncio.to_thread(vllm.start)
        assert await engine.adapters() == {"base": None}
        assert (await settle(engine, residency, ["policy@v1"])).done == ["policy@v1"]
        assert (await engine.check("policy@v1")).text == check.text
        assert gate.waiting == len(PROMPTS)
        gate.open()
        assert await asyncio.gather(*waiting) == before
        spans = await rig.tape.spans("inside", 2 * len(PROMPTS))
        assert {span.status for span in spans} == {"ok"}
