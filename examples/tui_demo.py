"""Makes the recording that `penstock tui --demo` plays: `python -m examples.tui_demo FILE`.

It looks at every screen of a showcase gateway (`demo.showcase`), at their rows and panes, while agents go on
calling, and keeps the answers, as `penstock tui --record` does.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
import time
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from examples.demo.showcase import Showcase, run_traffic, showcase
from penstock.gateway.client.client import ClientError
from penstock.tui.screens.registry import STANDING, make_view
from penstock.tui.session_recording import RecordingClient, SessionRecorder
from penstock.tui.view import ScreenView

LIVE_S: Final = 20.0
"""How long it is watched while agents go on calling; s."""
ROWS: Final = 12
"""Rows of a screen that are looked at closely."""
MOVING: Final = (("overview",), ("releases",), ("runs",))
OPENED: Final = ("refund-1002.1", "refund-1002.2", "with-helper", "broken-off", "busy", "canary-03")
COMPARED: Final = (
    ("compare", "group", "refund-1002"), ("compare", "rollouts", "refund-1002.1", "refund-1002.2"),
    ("compare", "versions", "desk", "v1", "v2"), ("compare", "runs", "grpo-1", "grpo-2"),
)  # fmt: skip


async def look_at(view: ScreenView[Any, Any], client: RecordingClient, rows: int = ROWS) -> None:
    """A screen with its rows and panes."""
    data = await view.load(client)
    table = view.table(data, time.time_ns())
    if table is None:
        return
    await view.fill(client, data, table.ids[:100])
    for id in table.ids[:rows]:
        view.pane = None
        closer = await view.load_details(client, data, id)
        for pane in view.panes(data, id, closer, time.time_ns()):
            # The panes as they are asked for one at a time.
            view.pane = pane.title
            await view.load_details(client, data, id)


async def watch(client: RecordingClient) -> None:
    """The feed, the rows that it names, and what else moves."""
    end, turn = time.monotonic() + LIVE_S, 0
    async with aclosing(client.digests(every_s=0.5)) as feed:
        async for digest in feed:
            if digest.rollouts:
                await asyncio.gather(client.rollouts_by_id(digest.rollouts[-200:]), client.stats(spans=0))
            turn += 1
            if turn % 6 == 0:
                for words in MOVING:
                    await look_at(make_view(words), client, rows=1)
            if time.monotonic() > end:
                return


async def record(shown: Showcase, path: Path) -> None:
    """All of it."""
    recorder = SessionRecorder(path, time.time_ns())
    async with RecordingClient(recorder, shown.url, None, compressed=False) as client:
        await asyncio.gather(client.whoami(), client.filter_fields())
        for words in (*STANDING, *(("rollout", id) for id in OPENED), *COMPARED):
            await look_at(make_view(words), client)
        agents = asyncio.ensure_future(run_traffic(shown))
        try:
            await watch(client)
        finally:
            agents.cancel()
            await asyncio.gather(agents, return_exceptions=True)
    recorder.close()
    await asyncio.to_thread(compress, path)


def compress(path: Path) -> None:
    """Once more, whole: a recording is flushed line by line, which costs most of what gzip saves."""
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), mtime=0))


async def make(path: Path) -> None:
    """The file."""
    with TemporaryDirectory(prefix="penstock-showcase-") as home:
        async with showcase(Path(home)) as shown:
            await record(shown, path)


def main() -> int:
    """The exit status says whether it was made."""
    if len(sys.argv) != 2:
        print("usage: python -m examples.tui_demo FILE", file=sys.stderr)
        return 2
    try:
        asyncio.run(make(Path(sys.argv[1])))
    except ClientError as error:
        print(f"tui_demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
