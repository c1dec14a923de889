"""Reading and comparing what the suite has written. Needs no suite."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conformance.peers import named
from conformance.suite import UNFINISHED, Check, differences, failed, read

STAMP = "2026-11-23T01-47-35-916Z"
LISTED = Check("tools-list", "tools-list", "ToolsList", "SUCCESS")


def written(folder: Path, scenario: str, *checks: tuple[str, str, str]) -> None:
    place = folder / f"{scenario}-{STAMP}"
    place.mkdir(parents=True)
    found = [{"id": found, "name": name, "status": status, "timestamp": STAMP} for found, name, status in checks]
    (place / "checks.json").write_text(json.dumps(found))


def test_reads_scenarios_of_both_sides(tmp_path: Path) -> None:
    written(tmp_path, "server-tools-list", ("tools-list", "ToolsList", "SUCCESS"))
    written(tmp_path, "auth/basic-cimd", ("token-request", "TokenRequest", "FAILURE"))
    found = read(tmp_path)
    assert found == [Check("auth/basic-cimd", "token-request", "TokenRequest", "FAILURE"), LISTED]
    assert failed(found) == found[:1]


def test_keeps_equal_checks_and_leaves_out_what_only_tells(tmp_path: Path) -> None:
    written(tmp_path, "tools_call", ("request", "R", "INFO"), ("valid", "V", "SUCCESS"), ("valid", "V", "SUCCESS"))
    assert read(tmp_path) == [Check("tools_call", "valid", "V", "SUCCESS")] * 2


def test_a_scenario_that_broke_off_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / f"server-ping-{STAMP}").mkdir()
    assert [(check.scenario, check.id, check.status) for check in read(tmp_path)] == [("ping", UNFINISHED, "FAILURE")]


def test_words_and_order_are_no_difference() -> None:
    told = [Check("ping", "ping", "Ping", "FAILURE", "port 1"), LISTED]
    assert differences(told, [LISTED, Check("ping", "ping", "Ping", "FAILURE", "port 2")]) == []


@pytest.mark.parametrize(
    ("other", "sentences"),
    [
        ([], ["tools-list: tools-list (ToolsList) is SUCCESS 1 times directly, 0 through it"]),
        ([LISTED, LISTED], ["tools-list: tools-list (ToolsList) is SUCCESS 1 times directly, 2 through it"]),
        (
            [Check("tools-list", "tools-list", "ToolsList", "FAILURE", "no tools")],
            [
                "tools-list: tools-list (ToolsList) is FAILURE 0 times directly, 1 through it: no tools",
                "tools-list: tools-list (ToolsList) is SUCCESS 1 times directly, 0 through it",
            ],
        ),
    ],
)
def test_differences_are_told_by_name(other: list[Check], sentences: list[str]) -> None:
    assert differences([LISTED], other) == sentences


def test_names_what_differs_once() -> None:
    ping, called = Check("ping", "ping", "Ping", "SUCCESS"), Check("call", "answered", "Answered", "SUCCESS")
    fails = replace(called, status="FAILURE", message="no answer")
    assert named([LISTED, ping, called], [LISTED, fails]) == {"call": ["answered (Answered)"], "ping": ["ping (Ping)"]}
