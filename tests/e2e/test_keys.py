"""Whose key goes upstream, that no key is on the tape, and that compressed answers are kept as they came."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
from e2e.clients import Endpoint, chat_plain, messages_plain, openai_fails
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.tape import Tape

StartGateway = Callable[..., Awaitable[Gateway]]


async def test_the_gateways_key_replaces_the_agents(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    provider.key = "sk-of-the-gateway"
    config = upstreams(openai=provider.openai_url, anthropic=provider.url, key_env="FAKE_KEY")
    gateway = await start_gateway(config, env={"FAKE_KEY": provider.key})
    at = Endpoint(gateway.openai("keys"), gateway.address("keys"))
    await chat_plain(at)
    await messages_plain(at)
    assert not any("sk-agent" in str(seen.headers) or "sk-ant-agent" in str(seen.headers) for seen in provider.log)
    tape = Tape(gateway.url, http)
    for span in await tape.spans("keys", 2):
        assert "sk-" not in (await tape.detail(span)).model_dump_json()
    assert "sk-" not in gateway.log


async def test_without_one_the_agents_key_passes_and_its_refusal_comes_back(
    gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    provider.key = "sk-another"
    await openai_fails(Endpoint(gateway.openai("keys"), gateway.address("keys")))
    assert provider.log[0].header("authorization") == "Bearer sk-agent"
    assert [span.http_status for span in await tape.spans("keys", 1)] == [401]


async def test_a_compressed_answer_passes_as_it_is_and_is_read(
    gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    at = Endpoint(gateway.openai("gzip"), gateway.address("gzip"))
    provider.encoding = "gzip"
    await chat_plain(at)
    (span,) = await tape.spans("gzip", 1)
    assert await tape.raw(span, "response") == provider.log[0].response
    assert provider.log[0].response.startswith(b"\x1f\x8b")
    turn = (await tape.detail(span)).turn
    assert turn is not None
    assert turn.choices[0].message.parts[0].text == "You said: How much is 19 times 23?"
