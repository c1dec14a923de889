"""The screen of upstreams: their state, running and waiting calls, and recent errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text

from penstock.console.views import rollouts
from penstock.console.views.administration import UPSTREAMS
from penstock.console.views.noun import NounRows
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.span import Span
from penstock.gateway.model.state import UpstreamView
from penstock.gateway.model.toml import pluralized
from penstock.tui.screens.noun import NounScreen
from penstock.tui.view import Pane, ViewAction, pane

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client

HELD_S: Final = 60.0
"""The longest time of a pause; s."""
NEWEST: Final = 20


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
        found = [span async for span in client.recent_spans(terms, NEWEST)]
        newest = (
            [span async for span in client.recent_spans(f'upstream="{id}"', NEWEST)] if self.pane is None else found
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
