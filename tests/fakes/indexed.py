"""The index of a gateway has all that is on the tape."""

from __future__ import annotations

from fakes.process import Gateway, children, command, state
from fakes.tape import Tape
from fakes.waiting import until


async def until_indexed(gateway: Gateway, tape: Tape, least: int = 0) -> None:
    """Returns when it has, and the tape so much. Who reads something large does not answer, and who does not answer
    for a while is started again: so it is asked when it does nothing."""

    async def is_all_there() -> bool:
        processes = [pid for pid in children(gateway.pid) if b"index" in command(pid)]
        if any(state(pid) != "S" for pid in processes):
            return False
        index = await tape.get("/api/index")
        return index["status"] == "ready" and index["cursor"] == index["newest"] >= least

    await until(is_all_there)
