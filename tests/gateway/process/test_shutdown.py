"""A part of a gateway that does not end as it should keeps no other from its end."""

from __future__ import annotations

import pytest
from fakes.rig import Within

from penstock.gateway.app import open_store


@pytest.mark.parametrize("part", ["coverage", "retention", "adapter_keeper", "webhooks"])
async def test_calls_are_on_the_tape_all_the_same(within: Within, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    ended = list[str]()

    async def fails() -> None:
        raise RuntimeError(part)

    async def ends() -> None:
        ended.append("dispatcher")
        await stop()

    async with within() as rig:
        stop = rig.gateway.dispatcher.stop
        monkeypatch.setattr(rig.gateway.dispatcher, "stop", ends)
        monkeypatch.setattr(getattr(rig.gateway, part), "stop", fails)
        _ = await rig.passes()
    assert ended == ["dispatcher"]
    with open_store(rig.base.data) as store:
        assert [span.status for span in store.spans(rig.rollout)] == ["ok"]
