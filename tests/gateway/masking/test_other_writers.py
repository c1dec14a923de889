"""What is no call is masked too: releases, training runs, and how a prompt differs from a registered one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fakes.experiment import policy, prompt

from penstock.gateway.app import open_store
from penstock.gateway.dialects.text_spans import Place
from penstock.gateway.masking.masker import Compiled, Masker, Tally
from penstock.gateway.masking.rules import MaskingRule
from penstock.gateway.model.known_secrets import NONE, Secrets
from penstock.gateway.model.release import Entry, Release
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.run import CandidateTree, NewRun, RunCandidate, RunChange, RunEnd, RunEvent
from penstock.gateway.model.template import Template
from penstock.gateway.prompts.nearest import Sent
from penstock.gateway.queue.span_operations import SpanOperations
from penstock.gateway.releases.catalog import Catalog
from penstock.gateway.releases.coverage.adding import Adding
from penstock.gateway.releases.coverage.noting import Call, Missed
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.runs.operations import RunOperations
from penstock.gateway.store.operation import Task
from penstock.gateway.store.records import Entry as SpanEntry
from penstock.gateway.store.transaction import Transaction

CARD = "4111-1111-1111-1111"


def masker(rule: MaskingRule) -> Masker:
    return Masker((), Compiled([rule]), Tally())


CARDS = masker(MaskingRule(name="cards", pattern=r"\d{4}(-\d{4}){3}"))


def train(tape: Transaction) -> None:
    runs = RunOperations(tape)
    for _ in range(2):
        made = runs.start(NewRun(id="r", kind="custom", name=f"of {CARD}", config={"note": CARD}), 1)
        assert made.config == {"note": "*" * 19}
    tree = CandidateTree(candidates=[RunCandidate(id="c", claim=f"about {CARD}")])
    _ = runs.change("r", RunChange(message=f"now {CARD}", tree=tree), 2)
    _ = runs.add_events("r", [RunEvent(text=f"saw {CARD}")], 3)
    _ = runs.finish("r", RunEnd(status="failed", message=f"on {CARD}"), 4)


def release(tape: Transaction) -> None:
    releases = ReleaseOperations(tape)
    for text in ("one", "two"):
        _ = releases.add_version("travel", prompt(f"Text {text}"), 1)
    new = Release(
        id="new", resource="travel", kind="prompt", stable="v1", candidate="v2", policy=policy(), salt="s",
        author=f"{CARD}!",
    )  # fmt: skip
    link = Entry(number=0, at_ns=0, who=f"ann {CARD}", why=CARD, action="start", before=None, after="draft")
    made = releases.start(new, link, 2)
    assert (made.author, made.reason) == ("*" * 19 + "!", "*" * 19)


def judge(tape: Transaction) -> None:
    spans, said = SpanOperations(tape), Judgement(value=1, key=CARD)
    first, again = [spans.reward(("r1", "a1"), said, True, 2) for _ in range(2)]
    assert (first[1], again[1], first[0].sequence) == (True, False, again[0].sequence)


@pytest.mark.parametrize("write", [train, release, judge])
def test_others_write_it_nowhere(tmp_path: Path, write: Callable[[Transaction], None]) -> None:
    with open_store(tmp_path, secrets=CARDS) as store:
        store.write([Task(lambda tape: tape.record(SpanEntry("r1", "a1", start_ns=1, end_ns=1, status="ok"), 1))])
        task = Task(write)
        store.write([task])
        assert task.refusal is None
    assert [path for path in tmp_path.rglob("*") if path.is_file() and CARD.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("secrets", "shown"), [(CARDS, False), (masker(MaskingRule(name="p", paths=["a"])), False), (NONE, True)]
)
def test_no_piece_of_a_prompt_with_a_secret_is_shown(secrets: Secrets, shown: bool) -> None:
    text = "You help the customer with card {}, be polite and short, and say nothing else at all."
    sent = Sent("travel", "v1", Template.parse(text.format("4222-2222-2222-2222")))
    place = Place(json.dumps(text.format(CARD)).encode(), (), "system", 0)
    catalog = cast(Catalog, SimpleNamespace(sent=[sent]))
    added = Adding(secrets).added([Call("r1", (), [Missed("miss", None, place)])], catalog, 1)
    last = added["travel"].last
    assert last is not None
    assert (last.difference is not None) == shown
