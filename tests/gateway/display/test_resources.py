"""What two versions of a prompt say differently."""

from __future__ import annotations

import pytest

from penstock.gateway.display.resources import difference
from penstock.gateway.model.resource import Resource


def version(name: str, text: str) -> Resource:
    return Resource(name="planner", version=name, kind="prompt", content={"text": text}, sha256=text, created_ns=0)


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("Plan.\nBe brief.\n", "Plan.\r\nBe brief.\n", "-Plan.\n+Plan.␍\n Be brief."),
        ("Plan.\x0cBe brief.", "Plan.\nBe brief.", "-Plan.␌Be brief.\n+Plan.\n+Be brief."),
        ("Plan.\u2028Be brief.\n", "Plan.\nBe brief.\n", "-Plan.\u2028Be brief.\n+Plan.\n+Be brief."),
        ("Plan.\n", "Plan.\n\n", " Plan.\n+"),
        ("Plan.", "", "-Plan.\n-\\ no line break at the end"),
    ],
)
def test_texts_that_differ_in_line_breaks_only_do_not_say_the_same(before: str, after: str, shown: str) -> None:
    found = difference(version("v1", before), version("v2", after)).plain
    assert shown in found
    assert "say the same" not in found


def test_a_version_says_the_same_as_itself() -> None:
    assert difference(version("v1", "Plan.\r\n"), version("v1", "Plan.\r\n")).plain.endswith("say the same.")
