"""The list of upstreams, for readers. Pure."""

from __future__ import annotations

from rich.text import Text

from penstock.console.views.noun import NounSelection, NounView, all_rows
from penstock.console.views.table import Column, figure
from penstock.console.views.text import clean, duration, plain
from penstock.gateway.model.upstream import UpstreamView


def _state(one: UpstreamView) -> Text:
    if one.paused:
        return Text("paused", style="yellow")
    made = Text("open", "green") if one.health == "good" else Text(f"{one.health}: {clean(one.failing)}", "red")
    if one.check is not None:
        made.append(f", check {'passed' if one.check == 'passed' else 'failed: ' + clean(one.check)}")
    return made


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(int(value * 1e9))


UPSTREAMS = NounView[NounSelection, UpstreamView](
    "upstreams",
    UpstreamView,
    all_rows(
        lambda client: client.upstreams(), "No upstream is configured: `[[upstream]]` in penstock.toml names one."
    ),
    key=lambda one: one.name,
    columns={
        Column("upstream"): lambda one, _: plain(one.name),
        Column("state"): lambda one, _: _state(one),
        Column("since", 3, right=True, optional=True): lambda one, _: _seconds(one.paused_s),
        # A length of time, not a number of calls: shown while any upstream is paused.
        Column("at most", 2, right=True, optional=True): lambda one, _: _seconds(one.bound_s),
        figure("running"): lambda one, _: f"{one.running:,}",
        figure("waiting"): lambda one, _: f"{one.waiting:,}",
        figure("waited", 1): lambda one, _: f"{one.waited:,}",
        figure("refused", 4): lambda one, _: f"{one.refused:,}",
    },
    concerns=frozenset({"rollouts"}),
    every_s=3.0,
    tool=True,
)
