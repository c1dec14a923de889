"""The list of rollouts: what changes while it asks is asked for again, and a burst of changes does not shorten it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.answers import Digest, RewardStats, RolloutPage, Stats
from penstock.gateway.model.rollout import RolloutStatus, RolloutSummary, Totals
from penstock.tui.screens.rollouts import FIRST_PAGE, RolloutsView


class Scripted(Client):
    """A tape of rollouts, the newest first; `meanwhile` happens while an answer is on its way."""

    def __init__(self, count: int) -> None:
        super().__init__("http://127.0.0.1")
        self.status = {f"r{at}": RolloutStatus.RUNNING for at in range(count)}
        self.meanwhile: Callable[[], None] = lambda: None
        self.fails = False

    def row(self, id: str) -> RolloutSummary:
        at = int(id[1:])
        return RolloutSummary(
            id=id, origin="queued", mode="train", status=self.status[id], created_ns=at, last_seen_ns=at
        )

    async def _answer(self, ids: Sequence[str]) -> list[RolloutSummary]:
        rows = [self.row(id) for id in ids]
        await asyncio.sleep(0)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        if self.fails:
            raise ClientError("away")
        return rows

    async def rollout_page(self, filter: str, limit: int, cursor: str | None) -> RolloutPage:
        newest = sorted(self.status, key=lambda id: -int(id[1:]))
        begin = int(cursor or 0)
        ids = newest[begin : begin + limit]
        more = begin + limit < len(newest)
        return RolloutPage(rollouts=await self._answer(ids), next=str(begin + limit) if more else None)

    async def rollouts_by_id(self, ids: Sequence[str], filter: str = "") -> list[RolloutSummary]:
        return await self._answer([id for id in ids if id in self.status])

    async def stats(self, spans: int | None = None) -> Stats:
        return Stats(
            counted_spans=0, complete=True, since_ns=None, totals=Totals(), by_model={}, by_status={}, by_kind={},
            rewards=RewardStats(), tape={"rollouts": len(self.status)}, cursor=1, gaps=0,
        )  # fmt: skip

    def ends(self, view: RolloutsView, id: str) -> Callable[[], None]:
        """A rollout ends, and the feed says so."""

        def happen() -> None:
            self.status[id] = RolloutStatus.SUCCEEDED
            view.observe(Digest(cursor=1, rollouts=[id]))

        return happen


async def current(view: RolloutsView, client: Scripted, visible: Sequence[str]) -> dict[str, RolloutStatus]:
    """What the list says of rows in sight when it has nothing more to ask."""
    for _ in range(5):
        data = await view.load(client)
        if view.needs_fill(data, visible):
            await view.fill(client, data, visible)
    data = await view.load(client)
    return {id: data.rows[id].status for id in visible}


async def test_what_changes_while_rows_are_asked_for() -> None:
    client, view = Scripted(3), RolloutsView()
    client.meanwhile = client.ends(view, "r1")  # while the first page comes
    assert await current(view, client, ["r1"]) == {"r1": "succeeded"}
    view.observe(Digest(cursor=1, rollouts=["r2"]))
    client.meanwhile = client.ends(view, "r2")  # while the row comes
    assert await current(view, client, ["r2"]) == {"r2": "succeeded"}
    client.status["r9"] = RolloutStatus.RUNNING
    view.observe(Digest(cursor=1, rollouts=["r9"]))
    client.meanwhile = client.ends(view, "r9")  # while a new row comes
    assert await current(view, client, ["r9"]) == {"r9": "succeeded"}


async def test_what_could_not_be_asked_is_asked_again() -> None:
    client, view = Scripted(3), RolloutsView()
    data = await view.load(client)
    client.ends(view, "r1")()
    client.status["r9"] = RolloutStatus.RUNNING
    view.observe(Digest(cursor=1, rollouts=["r9"]))
    client.fails = True
    with pytest.raises(ClientError):
        await view.load(client)
    with pytest.raises(ClientError):
        await view.fill(client, data, ["r1"])
    client.fails = False
    assert await current(view, client, ["r1", "r9"]) == {"r1": "succeeded", "r9": "running"}


async def test_changes_that_the_feed_does_not_name_do_not_shorten_the_list() -> None:
    client, view = Scripted(5 * FIRST_PAGE), RolloutsView()
    data = await view.load(client)
    while not data.complete:
        await view.fill(client, data, data.order[-1:])
    client.status |= {"r1": RolloutStatus.SUCCEEDED, "r900": RolloutStatus.RUNNING}
    view.observe(Digest(cursor=1, more=300))
    data = await view.load(client)
    assert len(data.order) == 5 * FIRST_PAGE + 1
    assert data.order[0] == "r900"
    assert await current(view, client, ["r1", "r900"]) == {"r1": "succeeded", "r900": "running"}
    # More are new than a page holds: what is between is not known, so the list begins anew.
    client.status |= {f"r{at}": RolloutStatus.RUNNING for at in range(1000, 1000 + FIRST_PAGE)}
    view.observe(Digest(cursor=1, more=300))
    assert len((await view.load(client)).order) == FIRST_PAGE
