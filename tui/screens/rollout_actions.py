"""The actions on a rollout, for every screen that shows one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.rollout import FINAL, RolloutSummary
from penstock.tui.view import ViewAction

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

Find = Callable[[Any, str | None], RolloutSummary | None]
"""The rollout of a row."""
UNKNOWN = "no rollout is chosen, or it is not loaded yet"


def rollout_actions(find: Find) -> Sequence[ViewAction[Any]]:
    """The actions that cancel and requeue a rollout."""

    def why_not_cancel(data: Any, id: str | None) -> str | None:
        found = find(data, id)
        if found is None:
            return UNKNOWN
        return f"{found.id} has ended already: it is {found.status}" if found.status in FINAL else None

    def why_not_requeue(data: Any, id: str | None) -> str | None:
        found = find(data, id)
        if found is None:
            return UNKNOWN
        if found.origin != "queued":
            return f"{found.id} did not come from the queue"
        return None if found.status in FINAL else f"{found.id} has not ended: it is {found.status}"

    def ask_cancel(data: Any, id: str | None) -> str:
        found = _found(find, data, id)
        running = "Its agent is told to stop at its next heartbeat" if found.attempt else "Nobody works on it yet"
        return (
            f"Cancel rollout {found.id}, which is {found.status}? {running}. It stays cancelled unless it is requeued."
        )

    def ask_requeue(data: Any, id: str | None) -> str:
        found = _found(find, data, id)
        return f"Queue rollout {found.id} again, which has {found.status}? A worker makes another attempt at it."

    async def cancel(client: Client, data: Any, id: str | None, said: ActionRequest) -> str:
        moved = await client.cancel(_found(find, data, id).id, said)
        return f"{moved.id} is {moved.status}."

    async def requeue(client: Client, data: Any, id: str | None, said: ActionRequest) -> str:
        moved = await client.requeue(_found(find, data, id).id, said)
        return f"{moved.id} is {moved.status}."

    return (
        ViewAction("rollout.cancel", why_not_cancel, ask_cancel, cancel),
        ViewAction("rollout.requeue", why_not_requeue, ask_requeue, requeue),
    )


def _found(find: Find, data: Any, id: str | None) -> RolloutSummary:
    found = find(data, id)
    if found is None:
        raise ValueError(UNKNOWN)
    return found
