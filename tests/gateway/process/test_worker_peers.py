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

from penstock.gateway.model.metrics import Metrics
from penstock.gateway.process import worker_peers
from penstock.gateway.process.handover import WorkerSlot
from penstock.gateway.process.leader_rpc import Handler, LeaderClient, WorkerLink
from penstock.gateway.process.worker_peers import (
    CallFailure,
    ConversationClient,
    ConversationQuery,
    ConversationServer,
    WorkerPeers,
    WorkerServices,
    dump,
)
from penstock.gateway.traffic.calls.call_request import RETRY_COUNT, CallAddress, CallRequest
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher
from penstock.gateway.traffic.calls.conversations import RepeatableRequest
from penstock.gateway.wire.dialects import find as dialect_of
from penstock.gateway.wire.http.client_connection import ConnectionHints
from penstock.gateway.work.queue import MemoryQueue


class First:
    """The first worker, and those that have a link with it."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "links")
        listeners = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for listener, name in zip(listeners, ("relay", "links"), strict=True):
            listener.bind(str(folder / name))
        relays, links = (listener.detach() for listener in listeners)
        self.work = WorkerPeers(WorkerSlot(0, 3, inside=(relays, links)))
        self.metrics = Metrics()

    async def start(self) -> None:
        waiting, nothing = MemoryQueue(), cast(dict[str, Any], {})

        def follower(kind: type[MemoryQueue]) -> MemoryQueue:
            return waiting

        budgets = SimpleNamespace(peer_handlers=lambda: (nothing, lambda: None), recheck_writers=lambda: None)
        parts: Any = SimpleNamespace(
            store=SimpleNamespace(follower=follower), metrics=lambda: self.metrics, budgets=budgets, pools={},
            pins=None, wrote=lambda: None,
        )  # fmt: skip
        self.work.adapter_repair(cast(Any, SimpleNamespace(repair=None)))
        await self.work.start(cast(WorkerServices, parts), asyncio.Protocol)

    async def join(self, name: str, figures: Handler) -> WorkerLink:
        """Another worker comes, and answers so when it is asked for its figures."""
        link = WorkerLink(lambda _: None, lambda _: None, {"figures": figures, "past": lambda *_: None})
        await asyncio.get_running_loop().create_unix_connection(lambda: link, self.path)
        link.notify("hello", {"process": name, "past": (0.0, []), "paused": {}})
        await until(lambda: name in self.work.peer_processes())
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
    await first.work.leader.links[0].request("figures")
    dies.close()
    await until(lambda: first.work.peer_processes() == {"lives"})
    late.set_result(counts(2))
    assert (await asking).otlp_spans[("stored",)] == 7
    assert (await first.work.figures()).otlp_spans[("stored",)] == 7
    lives.close()


async def test_a_call_that_failed_in_one_worker_may_be_repeated_in_another() -> None:
    keeper = ConversationServer(ConversationMatcher())
    one, other = (keeper.handlers(cast(WorkerLink, None)) for _ in range(2))
    failed = CallFailure(RepeatableRequest(7, 0), 1, "peer", "r1")
    one["failed"](msgspec.to_builtins(failed))
    for tries, expected in ((2, False), (1, True), (1, False)):
        repeats = RepeatableRequest(7, tries)
        asked = ConversationQuery(1, "peer", None, b"", b"", None, answers=True, repeats=repeats)
        rollout, ambiguous, _, retry = await other["find"](msgspec.to_builtins(asked))
        assert (rollout == "r1", ambiguous, retry) == (expected, False, expected)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", b'{"input": "hi"}'), ("/v1/responses", b'{"input": "hi", "previous_response_id": "r-0"}')],
)
@pytest.mark.parametrize("counts", [True, False])
async def test_calls_without_a_conversation_are_repeated_in_another_worker_too(
    path: str, body: bytes, counts: bool
) -> None:
    handlers = ConversationServer(ConversationMatcher()).handlers(cast(WorkerLink, None))

    async def ask(kind: str, said: Any) -> Any:
        return await handlers[kind](msgspec.to_builtins(said))

    def tell(kind: str, *said: Any) -> None:
        _ = handlers[kind](*map(msgspec.to_builtins, said))

    leader = cast(LeaderClient, SimpleNamespace(request=ask, notify=tell))
    one, other = (ConversationMatcher(ConversationClient(leader)) for _ in range(2))
    rollouts, here = list[str](), ConnectionHints("peer")
    for tries, worker in enumerate([one, other] if counts else [one, one]):
        call, found = CallRequest(CallAddress("?"), dialect_of("POST", path), path, body), asyncio.Event()
        hints = ConnectionHints("peer") if counts else here
        headers = [(RETRY_COUNT, RETRY_COUNT, b"%d" % tries)] if counts else []
        call.address = worker.match(call, hints, headers)
        if call.waits:
            worker.follow(call, hints, found.set)
            await asyncio.wait_for(found.wait(), 30)
        worker.remember(call, hints, None, failed=True)
        rollouts.append(call.address.rollout)
    assert rollouts[0] == rollouts[1]


async def test_calls_of_which_nothing_is_heard_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients leave while their conversation is looked for, and calls fail that name a response."""
    monkeypatch.setattr(worker_peers, "_UNDER_WAY", 10)
    keeper = ConversationServer(ConversationMatcher())
    find = keeper.handlers(cast(WorkerLink, None))["find"]
    for number in range(50):
        asked = ConversationQuery(number, "peer", None, b"", b"", f"resp-{number}", answers=True)
        await find(msgspec.to_builtins(asked))
    held = [cell.cell_contents for cell in cast(Any, find).__closure__]
    (worker,) = [one for one in held if isinstance(one, worker_peers._PeerState)]
    assert len(worker.under_way) == 10
