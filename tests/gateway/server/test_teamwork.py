"""What the first worker keeps of the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fakes.waiting import until

from penstock.gateway.calls.joining import Joining
from penstock.gateway.metrics import Metrics
from penstock.gateway.queue.waiting import Waiting
from penstock.gateway.server import conversing
from penstock.gateway.server.conversing import Asked, Keeper
from penstock.gateway.server.figures import dump
from penstock.gateway.server.handover import Place
from penstock.gateway.server.link import Handler, Link
from penstock.gateway.server.teamwork import Parts, Teamwork


class First:
    """The first worker, and those that have a link with it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "links")
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, name in zip(listeners, ("relay", "links"), strict=True):
            listener.bind(str(folder / name))
        relays, links = (listener.detach() for listener in listeners)
        self.work = Teamwork(Place(0, 3, inside=(relays, links)))
        self.metrics = Metrics()

    async def start(self) -> None:
        waiting, nothing = Waiting(), cast(dict[str, Any], {})

        def follower(kind: type[Waiting]) -> Waiting:
            return waiting

        budgets = SimpleNamespace(for_others=lambda: (nothing, lambda: None), look_again=lambda: None)
        parts: Any = SimpleNamespace(
            store=SimpleNamespace(follower=follower), metrics=self.metrics, budgets=budgets, pools={},
            pins=None, wrote=lambda: None,
        )  # fmt: skip
        self.work.repaired(cast(Any, SimpleNamespace(repaired=None)))
        await self.work.start(cast(Parts, parts), asyncio.Protocol)

    async def join(self, name: str, figures: Handler) -> Link:
        """Another worker comes, and answers so when it is asked for its figures."""
        link = Link(lambda _: None, lambda _: None, {"figures": figures, "past": lambda *_: None})
        await asyncio.get_running_loop().create_unix_connection(lambda: link, self.path)
        link.tell("hello", {"process": name, "past": (0.0, []), "paused": {}})
        await until(lambda: name in self.work.processes())
        return link


@pytest.fixture
async def first(tmp_path: Path) -> AsyncGenerator[First]:
    made = First(tmp_path)
    await made.start()
    yield made
    await made.work.stop()


def counts(calls: int) -> dict[str, Any]:
    metrics = Metrics()
    metrics.otlp_spans[("stored",)] = calls
    return dump(metrics)


async def test_what_a_worker_has_counted_that_died_while_others_were_asked_counts_once(first: First) -> None:
    late: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    answers = iter([counts(2), late])
    dies = await first.join("dies", lambda: counts(5))
    lives = await first.join("lives", lambda: next(answers, counts(2)))
    assert (await first.work.figures()).otlp_spans[("stored",)] == 7
    asking = asyncio.ensure_future(first.work.figures())
    await asyncio.sleep(0)
    # Its answer to that has come when that to the next question has.
    await first.work.leader.links[0].ask("figures")
    dies.close()
    await until(lambda: first.work.processes() == {"lives"})
    late.set_result(counts(2))
    assert (await asking).otlp_spans[("stored",)] == 7
    assert (await first.work.figures()).otlp_spans[("stored",)] == 7
    lives.close()


async def test_calls_of_which_nothing_is_heard_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients leave while their conversation is looked for, and calls fail that name a response."""
    monkeypatch.setattr(conversing, "_UNDER_WAY", 10)
    keeper = Keeper(Joining())
    find = keeper.handlers(cast(Link, None))["find"]
    for number in range(50):
        asked = Asked(number, "peer", None, b"", b"", f"resp-{number}", answers=True)
        await find(msgspec.to_builtins(asked))
    held = [cell.cell_contents for cell in cast(Any, find).__closure__]
    (worker,) = [one for one in held if isinstance(one, conversing._Worker)]
    assert len(worker.under_way) == 10
