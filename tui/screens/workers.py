"""The screen of workers and the queue: the rollouts of each worker and the waiting ones; keys pause, drain and open the
queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rich.text import Text

from penstock.console.views import queue as shown
from penstock.console.views.noun import NounRows
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import QueueState, QueueStatus
from penstock.gateway.model.rollout import Worker
from penstock.tui.screens.noun import NounScreen
from penstock.tui.view import Pane, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


@dataclass(frozen=True, kw_only=True)
class WorkersData(NounRows[Worker]):
    """The workers and the queue."""

    queue: QueueStatus


def _set(state: QueueState, id: str, does: str) -> ViewAction[WorkersData]:
    """An action that sets the state of the queue."""

    def unavailable(data: WorkersData, row: str | None) -> str | None:
        return f"the queue is {state} already" if data.queue.state == state else None

    def question(data: WorkersData, row: str | None) -> str:
        return f"The queue is {data.queue.state}. {does}?"

    async def act(client: Client, data: WorkersData, row: str | None, said: ActionRequest) -> str:
        found = await client.set_queue(state, said)
        return f"The queue is {found.state}."

    return ViewAction(id, unavailable, question, act)


class WorkersView(NounScreen[Worker, None]):
    noun = shown.WORKERS
    title = "Workers and queue"
    help = "who runs rollouts, what each is working on, and how much work waits"
    actions: ClassVar[Sequence[ViewAction[Any]]] = (
        _set("paused", "queue.pause", "Hand out no work until it is opened; what runs goes on"),
        _set("draining", "queue.drain", "Hand out no work and send workers home; what runs goes on"),
        _set("open", "queue.open", "Hand out work again"),
    )

    async def load(self, client: Client) -> WorkersData:
        queue, found = await asyncio.gather(client.queue(), super().load(client))
        return WorkersData(found.rows, found.none, queue=queue)

    def head(self, data: NounRows[Worker], now_ns: int) -> Text:
        assert isinstance(data, WorkersData)
        return shown.queue(data.queue, now_ns)

    def panes(self, data: NounRows[Worker], id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        worker = self.noun.find(data, id)
        if worker is None:
            return ()
        return [pane("at work on", Text("\n".join(worker.attempts) or "nothing; it waits for work."))]
