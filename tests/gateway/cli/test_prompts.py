"""What `penstock prompts discover` registers."""

from __future__ import annotations

import io
import sys

import pytest

from penstock.gateway.cli import prompts
from penstock.gateway.client.console import Failure
from penstock.gateway.model.template import Template
from penstock.gateway.prompts.induce import Proposal

FOUND: list[tuple[Proposal, str | None]] = [
    (Proposal(Template((f"You are {who}. ", ""), ("rest",)), 20, 1.0, {}, None, who), None) for who in ("one", "two")
]


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_number_that_is_not_shown_registers_nothing(number: int) -> None:
    assert prompts._chosen(FOUND, 2) is FOUND[1][0]
    with pytest.raises(Failure, match=f"--number: {number} is not 1 to 2"):
        prompts._chosen(FOUND, number)


def test_who_ends_the_questions_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    prompts._offer("http://127.0.0.1:9", FOUND, "ann")
