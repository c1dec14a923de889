"""Whose key goes upstream."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from e2e.clients import Endpoint, chat_plain, messages_plain
from fakes.local import locally
from fakes.process import upstreams
from fakes.provider import Provider
from fakes.tape import Tape


async def test_the_gateways_key_replaces_the_agents(
    provider: Provider, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.key = "sk-of-the-gateway"
    monkeypatch.setenv("FAKE_KEY", provider.key)
    config = upstreams(openai=provider.openai_url, anthropic=provider.url, key_env="FAKE_KEY")
    async with locally(tmp_path, config) as gateway:
        at = Endpoint(gateway.openai("keys"), gateway.address("keys"))
        await chat_plain(at)
        await messages_plain(at)
        assert not any("sk-agent" in str(seen.headers) or "sk-ant-agent" in str(seen.headers) for seen in provider.log)
        tape = Tape(gateway.url, http)
        for span in await tape.spans("keys", 2):
            assert "sk-" not in (await tape.detail(span)).model_dump_json()
        assert "sk-" not in gateway.log
