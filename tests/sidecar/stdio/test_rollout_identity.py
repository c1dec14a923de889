"""Which rollout a session belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.sidecar.stdio import command as module
from penstock.sidecar.stdio.command import find_destination, inherited
from penstock.sidecar.stdio.delivery import Destination, destination_record

RUN = {"PENSTOCK_URL": "http://g/rollout/q1/attempt/a1", "PENSTOCK_TOKEN": "pst_1"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody above has any variables."""

    def nobody(pid: int) -> dict[str, str]:
        return {}

    monkeypatch.setattr(module, "inherited", nobody)


@pytest.mark.parametrize(
    ("rollout", "attempt", "own", "found"),
    [
        (None, None, RUN, Destination("http://g/rollout/q1/attempt/a1", "pst_1")),
        ("r2", None, RUN, Destination("http://gate/rollout/r2/attempt/a1", "pst_1")),
        ("r2", "a3", {"PENSTOCK_ADMIN_KEY": "k"}, Destination("http://gate/rollout/r2/attempt/a3", "k")),
        (None, None, {}, Destination("http://gate", None)),
        (None, None, {"PENSTOCK_ADMIN_KEY": "k", "PENSTOCK_TOKEN": "pst_2"}, Destination("http://gate", "pst_2")),
    ],
)
def test_what_is_said_comes_first(
    rollout: str | None, attempt: str | None, own: dict[str, str], found: Destination
) -> None:
    assert find_destination("http://gate/", rollout, attempt, own) == found


def test_the_variables_of_an_agent_are_found_above_its_servers(tmp_path: Path) -> None:
    above = {
        20: (10, b"HOME=/root\0"),
        10: (5, b"PENSTOCK_URL=http://g/rollout/q1\0PENSTOCK_TOKEN=pst_1\0"),
        5: (1, b""),
    }
    for pid, (parent, variables) in above.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(variables)
        (tmp_path / str(pid) / "stat").write_bytes(f"{pid} (a ) name) S {parent} 1 1 0".encode())
    assert inherited(20, tmp_path)["PENSTOCK_TOKEN"] == "pst_1"
    assert inherited(5, tmp_path) == {}, "init is somebody else's"


def test_only_an_agents_token_is_written_down() -> None:
    assert destination_record(Destination("u", "pst_1"), "s") == {"url": "u", "server": "s", "key": "pst_1"}
    assert destination_record(Destination("u", "an-admin-key"), "s")["key"] is None
