"""What is taken out of arguments and results, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.policy.pointer import Unreadable
from penstock.gateway.policy.redaction import redacted
from penstock.gateway.policy.rules import Redaction

RESULT: dict[str, Any] = {
    "content": [{"type": "text", "text": "mail a@b.de or c@d.de"}, {"type": "image", "data": "xx"}],
    "structuredContent": {"mail": "a@b.de", "card": 4111111111111111, "ok": True, "none": None},
}


def test_whole_values() -> None:
    made = redacted(RESULT, ["/structuredContent/mail", "/content/*/data"], Redaction(results=[""]))
    assert made["structuredContent"] == RESULT["structuredContent"] | {"mail": "[redacted]"}
    assert made["content"] == [RESULT["content"][0], {"type": "image", "data": "[redacted]"}]


def test_what_a_pattern_finds_anywhere_below() -> None:
    made = redacted(RESULT, [""], Redaction(results=[""], pattern=r"[\w.]+@[\w.]+|4[0-9]{15}"))
    assert made["content"][0]["text"] == "mail [redacted] or [redacted]"
    assert made["structuredContent"] == {"mail": "[redacted]", "card": "[redacted]", "ok": True, "none": None}


def test_nothing_to_take_out_is_the_same_object() -> None:
    for pointers, rule in (
        (["/nothing"], Redaction(results=[""])),
        ([""], Redaction(results=[""], pattern="zzz")),
    ):
        assert redacted(RESULT, pointers, rule) is RESULT


def test_what_cannot_be_told_is_an_error() -> None:
    with pytest.raises(Unreadable, match="some servers read as 'mail'"):
        _ = redacted({"Mail": 1}, ["/mail"], Redaction(results=[""]))
    deep: Any = "a@b.de"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Unreadable, match="too deep"):
        _ = redacted(deep, [""], Redaction(results=[""], pattern="@"))
