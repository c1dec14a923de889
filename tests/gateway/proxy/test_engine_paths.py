"""What operates a model server is not for agents, who would have the gateway's own key for it."""

from __future__ import annotations

import aiohttp
from conftest import StartGateway
from fakes.engine import engine
from fakes.process import upstream

PATHS = [
    "/v1/load_lora_adapter",
    "/v1//load_lora_adapter",
    "/v1/v1/load_lora_adapter",
    "/inference//v1/sleep",
    "/v1/load%5Flora_adapter/",
    "/adapters/x",
    "/pause?mode=abort",
    "/v1/reset_prefix_cache",
]


async def test_an_agent_cannot_operate_the_server(start_gateway: StartGateway, http: aiohttp.ClientSession) -> None:
    async with engine() as vllm:
        vllm.key = "sesame"
        gateway = await start_gateway(upstream("vllm", vllm.openai_url, "openai", "KEY"), env={"KEY": "sesame"})
        for path in PATHS:
            async with http.post(
                gateway.address("r1") + path, json={"lora_name": "x@v1", "lora_path": "/x"}
            ) as refused:
                assert refused.status == 403, await refused.text()
                assert "operates the model server" in (await refused.json())["error"]["message"]
        assert vllm.asked == []
        async with http.post(gateway.openai("r1") + "/fine_tuning/jobs/x/pause", json={}) as passed:
            assert passed.status == 404
        async with http.get(gateway.openai("r1") + "/models") as listed:
            assert [card["id"] for card in (await listed.json())["data"]] == ["base"]
