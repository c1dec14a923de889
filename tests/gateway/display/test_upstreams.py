"""Upstreams, as a terminal shows them."""

from __future__ import annotations

import pytest

from penstock.gateway.display.upstreams import upstreams
from penstock.gateway.model.upstream import UpstreamView


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


def _state(one: UpstreamView) -> str:
    (row,) = upstreams([one]).rows
    return str(row[1])
