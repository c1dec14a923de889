"""`python -m examples.demo.record_demo FILE` records a showcase for `penstock tui --demo`: five minutes.

It asks the gateway what the screens ask, again and again while agents work, and all rows and panes at last. What is
recorded goes to FILE, as `penstock tui --record` writes it. Times and the arms of rollouts differ each time, so the
goldens and pictures of `tests/tui/test_demo.py` are made anew with it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from examples.demo.showcase import NIGHT, run_traffic, showcase
from examples.demo.showcase_parts import TASKS, Showcase
from penstock.gateway.client.client import ClientError
from penstock.tui.main_screen import RANGES
from penstock.tui.screens.registry import SCREENS, STANDING, make_view
from penstock.tui.session_recording import RecordingClient, SessionRecorder
from penstock.tui.view import ScreenView

BEFORE_S, RECORDED_S, EVERY_S = 160.0, 22.0, 3.0
"""The time of calls before the recording, that of the recording, and the pauses between two looks at all screens."""
OPENED: Final = ("refund-1002.1", "refund-1002.2", "with-helper", "broken-off", "busy", "canary-03", "held", "asks")
"""The rollouts that are opened."""
COMPARED: Final = (
    ("group", "refund-1002"), ("group", "refund-1006"), ("group", "where-1001"),
    ("rollouts", "refund-1002.1", "refund-1002.2"), ("versions", "desk", "v1", "v2"), ("runs", "grpo-1", "grpo-2"),
)  # fmt: skip
FILTERS: Final = ("status:failed", "status:running", "reward<0.5", *(f'group="{name}"' for name in TASKS))
SEARCHES: Final = ("refund", "order", "chair")
ROWS: Final = 400
"""The most rows of which all panes are asked for."""


async def work_before(made: Showcase) -> None:
    """Calls for some minutes, so that there is a course of them."""
    draw, number, end = random.Random(3), 0, time.monotonic() + BEFORE_S
    while (left := end - time.monotonic()) > 0:
        number += 1
        agent = made.agent(f"morning-{number}", prompt=NIGHT)
        await agent.answer(draw.choice(list(TASKS.values())), draw.choice((1, 3, 4)), stream=True)
        await asyncio.sleep(min(left, draw.uniform(0.2, 2.5)))


async def look(client: RecordingClient, words: Sequence[str], since: str = "", rows: int = 1) -> None:
    """Ask what a screen asks, with the panes of its first rows."""
    view = make_view(words)
    view.since = since
    data = await view.load(client)
    table = view.table(data, time.time_ns())
    ids = [] if table is None else list(table.ids)
    for at in range(0, len(ids), 50):
        await view.fill(client, data, ids[at : at + 50])
    for id in ids[:rows]:
        await look_closer(client, view, data, id)


async def look_closer(client: RecordingClient, view: ScreenView[Any, Any], data: Any, id: str) -> None:
    """Ask for all panes of a row: at once, as `--plain` does, and one by one."""
    view.pane = None
    closer = await view.load_details(client, data, id)
    for title in ("", *(pane.title for pane in view.panes(data, id, closer, time.time_ns()))):
        view.pane = title
        await view.load_details(client, data, id)


async def look_at_all(client: RecordingClient) -> None:
    """Ask for every screen, all its rows, and what can be gone to from there."""
    for words in STANDING:
        for since in RANGES if make_view(words).ranged else ("",):
            await look(client, words, since, ROWS if not since else 0)
    for rollout in OPENED:
        await look(client, ("rollout", rollout), rows=ROWS)
    for words in COMPARED:
        await look(client, ("compare", *words), rows=ROWS)
    for terms in FILTERS:
        await look(client, ("rollouts", terms), rows=0)
    for text in SEARCHES:
        await look(client, ("search", text), rows=0)
    for name, screen in SCREENS.items():
        if screen.wants in ("", "[FILTER]") and (name,) not in STANDING:
            await look(client, (name,), rows=0)


async def record(made: Showcase, path: Path) -> None:
    """Record the screens while agents work."""

    async def follow() -> None:
        async for _ in client.digests(every_s=0.5):
            pass

    await work_before(made)
    recorder = SessionRecorder(path, time.time_ns())
    async with RecordingClient(recorder, made.url, None, False) as client:
        working = [asyncio.ensure_future(run_traffic(made)), asyncio.ensure_future(follow())]
        await asyncio.gather(client.whoami(), client.filter_fields())
        end = time.monotonic() + RECORDED_S
        while time.monotonic() < end:
            # The log once, at last: a screen that is opened asks for all of it.
            for words in STANDING:
                if words != ("log",):
                    await look(client, words, rows=3)
            await asyncio.sleep(EVERY_S)
        working[0].cancel()
        await asyncio.gather(working[0], return_exceptions=True)
        await look_at_all(client)
        working[1].cancel()
        await asyncio.gather(working[1], return_exceptions=True)
    recorder.close()


async def run(path: Path) -> None:
    """Run a showcase, and record it."""
    with TemporaryDirectory(prefix="penstock-showcase-") as home:
        async with showcase(Path(home)) as made:
            await record(made, path)


def main() -> int:
    """Record to the file that the first argument names; return the exit status."""
    if len(sys.argv) != 2:
        print("python -m examples.demo.record_demo FILE", file=sys.stderr)
        return 2
    try:
        asyncio.run(run(Path(sys.argv[1])))
    except ClientError as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
