"""How a line that is typed goes on."""

from __future__ import annotations

import pytest
from fakes.tui_world import World

from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import FilterField
from penstock.tui.widgets import complete_command, complete_filter, format_completions

FIELDS = [
    FilterField(name="status", help="", operators=[":", "="], values=["succeeded", "failed"]),
    FilterField(name="started", help="", operators=[">"], values=[]),
    FilterField(name="model", help="", operators=[":"], values=[]),
]


@pytest.mark.parametrize(
    ("typed", "likely"),
    [
        ("", ["status:", "started>", "model:"]),
        ("st", ["status:", "started>"]),
        ("status:", ["status:succeeded", "status:failed"]),
        ("status:f", ["status:failed"]),
        ("status:failed", []),
        ("status:failed mo", ["status:failed model:"]),
        ("-sta", ["-status:", "-started>"]),
        ("model:qw", []),
        ("nothing:x", []),
    ],
)
def test_a_filter_goes_on(typed: str, likely: list[str]) -> None:
    assert complete_filter(typed, FIELDS) == likely


def test_a_command_goes_on() -> None:
    wanted = {"rollouts": (), "rollout": ("r1", "r2"), "theme": ("nord",)}
    assert complete_command("ro", wanted) == ["rollouts", "rollout"]
    assert complete_command("rollout r", wanted) == ["rollout r1", "rollout r2"]
    assert complete_command("rollout r1", wanted) == []
    assert complete_command("unknown x", wanted) == []


def test_what_is_likely_is_named_by_its_last_word() -> None:
    assert format_completions(["a b status:", "a b model:"]) == "status:  model:"


async def test_every_completion_of_the_gateways_fields_is_a_filter_that_it_takes(world: World) -> None:
    async with Client(world.url) as client:
        fields = (await client.filter_fields()).rollouts
        whole = [text for one in fields for text in complete_filter(f"{one.name}{one.operators[0]}", [one])]
        assert len(whole) > 20
        for text in whole:
            _ = await client.rollout_page(text, 1, None)
