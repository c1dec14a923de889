"""The screens of the gateway itself: its upstreams, its workers and queue, and its log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text

from penstock.console.views import queue, rollouts
from penstock.console.views.administration import AUDIT, UPSTREAMS
from penstock.console.views.noun import NounRows
from penstock.console.views.table import Column, clean, joined
from penstock.gateway.model.answers import AuditEntry, Change
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import QueueState, QueueStatus
from penstock.gateway.model.rollout import Worker
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.toml import pluralized
from penstock.tui.view import NounScreen, Pane, ScreenView, TableModel, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


# -- upstreams: their state, running and waiting calls, and recent errors ----


HELD_S: Final = 60.0
"""The longest time of a pause; s."""
NEWEST_CALLS: Final = 20


@dataclass(frozen=True, slots=True)
class UpstreamDetails:
    """The newest calls of an upstream, and the newest that failed."""

    newest: Sequence[Span]
    failed: Sequence[Span]


def _cannot_pause(data: NounRows[UpstreamView], id: str | None) -> str | None:
    one = UPSTREAMS.find(data, id)
    return "no upstream is chosen" if one is None else f"{one.name} is paused already" if one.paused else None


def _cannot_open(data: NounRows[UpstreamView], id: str | None) -> str | None:
    one = UPSTREAMS.find(data, id)
    return "no upstream is chosen" if one is None else None if one.paused else f"{one.name} is open already"


def _ask_pause(data: NounRows[UpstreamView], id: str | None) -> str:
    one = UPSTREAMS.find(data, id)
    assert one is not None
    return (
        f"Let all calls to {one.name} wait for {HELD_S:.0f} s at most? {one.running:,} that run go on; calls that have "
        f"waited for so long are refused."
    )


def _ask_open(data: NounRows[UpstreamView], id: str | None) -> str:
    one = UPSTREAMS.find(data, id)
    assert one is not None
    return f"Serve the {pluralized(one.waiting, 'call')} waiting for {one.name}, and all from now on?"


async def _pause(client: Client, data: NounRows[UpstreamView], id: str | None, said: ActionRequest) -> str:
    found = await client.pause_upstream(id or "", HELD_S, said)
    return f"{found.name} is paused for {HELD_S:.0f} s at most."


async def _open(client: Client, data: NounRows[UpstreamView], id: str | None, said: ActionRequest) -> str:
    return f"{(await client.open_upstream(id or '', said)).name} is open."


class UpstreamsView(NounScreen[UpstreamView, UpstreamDetails]):
    noun = UPSTREAMS
    help = "what the gateway calls: open or paused, running and waiting calls, errors"
    actions: ClassVar[Sequence[ViewAction[Any]]] = (
        ViewAction("upstream.pause", _cannot_pause, _ask_pause, _pause),
        ViewAction("upstream.open", _cannot_open, _ask_open, _open),
    )

    async def load_details(self, client: Client, data: NounRows[UpstreamView], id: str) -> UpstreamDetails:
        """Ask for its newest calls; for failed ones only when their pane is in sight."""
        failed = self.pane is None or self.pane == "Errors"
        terms = f'upstream="{id}" status:error' if failed else f'upstream="{id}"'
        found = [span async for span in client.recent_spans(terms, NEWEST_CALLS)]
        newest = (
            [span async for span in client.recent_spans(f'upstream="{id}"', NEWEST_CALLS)]
            if self.pane is None
            else found
        )
        return UpstreamDetails(newest, found if failed else ())

    def head(self, data: NounRows[UpstreamView], now_ns: int) -> Text:
        paused = sum(one.paused for one in data.rows)
        running = sum(one.running for one in data.rows)
        return Text(f"{len(data.rows):,} upstreams, {paused:,} paused; {pluralized(running, 'call')} running")

    def panes(
        self, data: NounRows[UpstreamView], id: str | None, closer: UpstreamDetails | None, now_ns: int
    ) -> Sequence[Pane]:
        if id is None or closer is None:
            return ()
        none = Text("No call of it is among the newest spans.")
        fine = Text("None of its newest calls failed.")
        return [
            pane("Calls", rollouts.recent(closer.newest, now_ns) if closer.newest else none),
            pane("Errors", rollouts.recent(closer.failed, now_ns) if closer.failed else fine),
        ]


# -- workers and the queue: keys pause, drain and open it ----


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
    noun = queue.WORKERS
    title = "Workers and queue"
    help = "who runs rollouts, what each is working on, and how much work waits"
    actions: ClassVar[Sequence[ViewAction[Any]]] = (
        _set("paused", "queue.pause", "Hand out no work until it is opened; what runs goes on"),
        _set("draining", "queue.drain", "Hand out no work and send workers home; what runs goes on"),
        _set("open", "queue.open", "Hand out work again"),
    )

    async def load(self, client: Client) -> WorkersData:
        status, found = await asyncio.gather(client.queue(), super().load(client))
        return WorkersData(found.rows, found.none, queue=status)

    def head(self, data: NounRows[Worker], now_ns: int) -> Text:
        assert isinstance(data, WorkersData)
        return queue.queue(data.queue, now_ns)

    def panes(self, data: NounRows[Worker], id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        worker = self.noun.find(data, id)
        if worker is None:
            return ()
        return [pane("At work on", Text("\n".join(worker.attempts) or "nothing; it waits for work."))]


# -- the log: changes of the tape as they come, and decisions of people ----


NEWEST_CHANGES: Final = 500
"""The most changes that are kept."""
PEOPLE: Final = 50
CHANGES = (Column("change", narrows="cut", least=20),)
NONE = "Nothing has happened on this tape yet."


@dataclass(frozen=True, slots=True)
class LogData:
    """The newest changes by cursor, newest first."""

    changes: dict[str, Change]
    entries: Sequence[AuditEntry]
    """The audit log, newest first."""


class LogView(ScreenView[LogData, None]):
    name = "log"
    title = "Log"
    help = "every change on the tape as it happens, and who changed what"
    concerns = frozenset({"rollouts", "releases", "resources", "runs"})
    every_s = 10.0

    def __init__(self) -> None:
        self._changes: dict[str, Change] = {}
        self._since: int | None = None

    def forget(self) -> None:
        self._changes, self._since = {}, None

    async def load(self, client: Client) -> LogData:
        """Ask for the changes since the last look, and for the audit log."""

        async def people() -> list[AuditEntry]:
            return [entry async for entry in client.audit_log(PEOPLE)]

        if self._since is None:
            self._since = max(0, (await client.stats(spans=0)).cursor - NEWEST_CHANGES)
        page, entries = await asyncio.gather(client.change_page(self._since, NEWEST_CHANGES), people())
        new = {str(change.cursor): change for change in reversed(page.changes)}
        # A full page means that the tape is further ahead: the next look begins with the newest changes.
        self._since = None if len(page.changes) == NEWEST_CHANGES else page.next
        kept = list({**new, **self._changes}.items())[:NEWEST_CHANGES]
        self._changes = dict(kept)
        return LogData(self._changes, entries)

    def head(self, data: LogData, now_ns: int) -> Text:
        return Text(f"the newest {len(data.changes):,} changes, newest first")

    def table(self, data: LogData, now_ns: int) -> TableModel:
        return TableModel(CHANGES, list(data.changes), lambda id: [rollouts.change(data.changes[id])], NONE)

    def panes(self, data: LogData, id: str | None, closer: None, now_ns: int) -> Sequence[Pane]:
        none = Text("Nobody has changed anything yet.")
        people = pane("People", AUDIT.table(data.entries, now_ns) if data.entries else none)
        change = data.changes.get(id or "")
        return [people] if change is None else [pane("Change", _whole(change)), people]

    def command(self, id: str | None) -> str:
        return "penstock changes" if id is None else f"penstock changes --since {int(id) - 1}"


def _whole(change: Change) -> Text:
    """One line on the change, then all of it as JSON."""
    told = json.dumps(change.model_dump(mode="json", exclude_none=True), indent=2, ensure_ascii=False)
    return Text("\n").join([joined(rollouts.change(change)), Text(clean(told))])
