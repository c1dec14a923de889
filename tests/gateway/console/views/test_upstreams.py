"""Upstreams, as a terminal shows them."""

from __future__ import annotations

import pytest
from rich.console import Console

from penstock.console.views.administration import UPSTREAMS
from penstock.gateway.model.state import UpstreamView


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({}, "open"),
        ({"check": "passed", "checked_s": 2.0}, "open, check passed"),
        ({"health": "resting", "failing": "timeout"}, "resting: timeout"),
        ({"health": "resting", "failing": "x", "check": "http_503"}, "resting: x, check failed: http_503"),
        ({"paused": True, "paused_s": 1.0, "bound_s": 60.0, "check": "passed"}, "paused"),
    ],
)
def test_its_state_says_how_calls_and_checks_go(said: dict[str, object], shown: str) -> None:
    known = {"name": "up", "paused": False, "paused_s": None, "bound_s": None}
    counts = dict.fromkeys(("waiting", "running", "waited", "refused"), 0)
    assert shown == _state(UpstreamView.model_validate(known | counts | said))


def test_how_long_one_is_paused_at_most_is_not_taken_for_its_number_of_calls() -> None:
    """`at most` beside `running` reads as `max_concurrent` where nothing is paused."""
    console = Console(width=80)
    for pause, named in ((None, False), (60.0, True)):
        known = {"name": "up", "paused": pause is not None, "paused_s": pause, "bound_s": pause}
        counts = dict.fromkeys(("waiting", "running", "waited", "refused"), 0)
        with console.capture() as capture:
            console.print(UPSTREAMS.table([UpstreamView.model_validate(known | counts)], 0))
        assert ("at most" in capture.get()) is named, capture.get()


def _state(one: UpstreamView) -> str:
    (row,) = UPSTREAMS.table([one], 0).rows
    return str(row[1])
