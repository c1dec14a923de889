"""The index of a gateway has all that is on the tape."""

from __future__ import annotations

from pathlib import Path

from fakes.process import Gateway, children, command
from fakes.tape import Tape
from fakes.waiting import until


async def until_indexed(gateway: Gateway, tape: Tape, least: int = 0) -> None:
    """Returns when it has, and the tape so much. Who reads something large does not answer, and who does not answer
    for a while is started again: so it is asked when it does nothing."""

    async def is_all_there() -> bool:
        processes = [pid for pid in children(gateway.pid) if b"index" in command(pid)]
        if not all(_sleeps(pid) for pid in processes):
            return False
        state = await tape.get("/api/index")
        return state["status"] == "ready" and state["cursor"] == state["newest"] >= least

    await until(is_all_there)


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except OSError:
        return False
