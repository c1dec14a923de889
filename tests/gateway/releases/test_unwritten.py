"""What rollouts were given while the tape took no pin, where the tape does not take one of them."""

from __future__ import annotations

from pathlib import Path

from fakes.releasing import bench, counting
from fakes.waiting import until

from penstock.gateway.model.release import Pin
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.releases.unwritten import Unwritten
from penstock.gateway.store import keys


async def test_one_that_cannot_be_written_takes_no_other_with_it(tmp_path: Path) -> None:
    given = (Pin(resource="travel", version="v1"),)
    async with counting() as provider, bench(tmp_path, provider) as made:
        await made.do(lambda tape: tape.put("pins", keys.rollout_key("r1"), b"damaged"))
        unwritten = Unwritten(made.context.recorder)
        for name in ("r0", "r1", "r2", "r3"):
            unwritten.add(name, given)
        reader = ReleaseReader(made.context.tape)
        await until(lambda: [name for name in ("r0", "r2", "r3") if reader.pins(name)] == ["r0", "r2", "r3"])
