"""A training run as one page of HTML, in the style of a release's (`console.views.release_page`). Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from penstock.console.views.candidates import ordered
from penstock.console.views.release_page import document, figure, table
from penstock.console.views.run_charts import Runs, charts
from penstock.console.views.svg import text
from penstock.console.views.text import duration, moment, number
from penstock.gateway.model.run import Run, RunEvent


def page(run: Run, curves: Runs, events: Sequence[RunEvent], now_ns: int) -> str:
    """The whole page as of `now_ns`, nanoseconds since the epoch; `events` newest first."""
    body = [*_head(run, now_ns)]
    body += (figure(chart, f"chart{number}") for number, chart in enumerate(charts(curves, run.tree)))
    body += _candidates(run)
    body += _events(events)
    body.append(f"<h2>Configuration</h2><pre>{text(json.dumps(run.config, indent=1, ensure_ascii=False))}</pre>")
    return document(f"{run.id}: {run.status}", body)


def _head(run: Run, now_ns: int) -> Iterator[str]:
    yield f"<header><h1>{text(run.id)}: {text(run.status)}</h1><p>{text(f'{run.kind} {run.name}'.strip())}. "
    yield f"{text(run.message or '')}</p>"
    planned = "" if run.steps is None else f" of {run.steps:,}"
    rows = [
        ("step", "none yet" if run.step is None else f"{run.step:,}{planned}"),
        ("started", f"{moment(run.created_ns)[:19]} UTC"),
        ("took" if run.ended_ns else "runs for", duration((run.ended_ns or now_ns) - run.created_ns)),
        ("resumed", f"{run.resumed:,} times"),
        ("made", ", ".join(f"{made.name}@{made.version}" for made in run.made) or "nothing yet"),
    ]
    yield table("The run", ("", ""), rows)
    yield f'<p class="dim">As of {moment(now_ns)[:19]} UTC.</p></header>'


def _candidates(run: Run) -> Iterator[str]:
    if run.tree is not None:
        rows = [
            (
                f"{'· ' * depth}{one.id}",
                number(one.mean),
                f"{one.rollouts:,}",
                one.state,
                number(one.e_value),
                one.claim,
            )
            for depth, one in ordered(run.tree.candidates)
        ]
        heads = ("candidate", "mean", "rollouts", "state", "e-value", "claim")
        missing = f"; {run.tree.left_out:,} more are left out" if run.tree.left_out else ""
        yield "<h2>Candidates</h2>" + table(f"Each below the one that it was made from{missing}", heads, rows)


def _events(events: Sequence[RunEvent]) -> Iterator[str]:
    if events:
        rows = [
            (moment(event.time_ns or 0)[:19], "" if event.step is None else f"{event.step:,}", event.level, event.text)
            for event in events
        ]
        yield "<h2>Events</h2>" + table("The newest first", ("when (UTC)", "step", "level", "what"), rows)
