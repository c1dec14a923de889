"""A part of a gateway that does not end as it should keeps no other from its end."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from fakes.odd import request, send
from fakes.raw import reply
from fakes.rig import inside

from penstock.gateway.app import open_store

GOOD = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]}'


@pytest.mark.parametrize("part", ["coverage", "retention", "adapter_keeper", "webhooks"])
async def test_calls_are_on_the_tape_all_the_same(
    tmp_path: Path, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    ended = list[str]()

    async def fails() -> None:
        raise RuntimeError(part)

    async def ends() -> None:
        ended.append("dispatcher")
        await stop()

    async with inside(tmp_path, http) as rig:
        stop = rig.gateway.dispatcher.stop
        monkeypatch.setattr(rig.gateway.dispatcher, "stop", ends)
        monkeypatch.setattr(getattr(rig.gateway, part), "stop", fails)
        async with rig.upstream([request(), send(reply(200, GOOD))]), rig.client() as client:
            client.send(rig.call())
            await client.message()
    assert ended == ["dispatcher"]
    with open_store(rig.base.data) as store:
        (span,) = store.spans(rig.rollout)
        assert span.status == "ok"
