"""Masking rules in a gateway: nothing of what they find is on the tape, whatever becomes of the gateway."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from conftest import StartGateway
from fakes import mcp_wire
from fakes.experiment import policy, prompt
from fakes.local import locally
from fakes.mcp_wire import config, mcp_server
from fakes.process import Gateway, upstreams
from fakes.provider import Provider
from fakes.tape import Tape

from examples.demo.model import DemoAnswer
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.model.facts import MASKED, MASKING_FAILED
from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.model.release import AuditTrailEntry, Release
from penstock.gateway.model.resource import Template
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.run import CandidateTree, NewRun, RunCandidate, RunChange, RunEnd, RunEvent
from penstock.gateway.releases.catalog import Catalog
from penstock.gateway.releases.coverage import CallNote, CoverageCounter, MissNote
from penstock.gateway.releases.operations import ReleaseOperations
from penstock.gateway.releases.prompt_recogniser import SentVersion
from penstock.gateway.tape.store.records import SpanEntry as SpanEntry
from penstock.gateway.tape.store.transaction import QueuedOperation, Transaction
from penstock.gateway.wire.dialects.request_body import TextLocation
from penstock.gateway.wire.dialects.sse import events
from penstock.gateway.wire.masking.masker import CompiledRules, Masker, MaskingCounts, MaskingRule
from penstock.gateway.work.operations import SpanOperations
from penstock.gateway.work.runs import RunOperations

NEEDLE = "7f3e-91c4-d05b-66a2"
RULES = """
[[masking]]
name = "tickets"
pattern = '\\b[0-9a-f]{4}(-[0-9a-f]{4}){3}\\b'

[[masking]]
name = "people"
paths = ["**.email"]
"""


async def say(http: aiohttp.ClientSession, gateway: Gateway, rollout: str, stream: bool = False) -> bytes:
    said = [{"role": "user", "content": f"my ticket is {NEEDLE}", "email": "ann@example.org"}]
    asked = {"model": "m", "stream": stream, "messages": said} | (
        {"stream_options": {"include_usage": True}} if stream else {}
    )
    url = gateway.openai(rollout) + "/chat/completions"
    async with http.post(url, json=asked, headers={"Authorization": "Bearer x"}) as response:
        assert response.status == 200
        return await response.read()


async def test_no_call_leaves_it_on_the_tape(tmp_path: Path, provider: Provider, http: aiohttp.ClientSession) -> None:
    provider.script = [DemoAnswer(f"it is {NEEDLE}, I see"), DemoAnswer(f"it is {NEEDLE}, I see")]
    async with locally(tmp_path, upstreams(openai=provider.openai_url) + RULES) as gateway:
        plain, stream = await say(http, gateway, "r1"), await say(http, gateway, "r2", True)
        assert NEEDLE in json.loads(plain)["choices"][0]["message"]["content"]
        assert provider.log[1].response == stream
        tape = Tape(gateway.url, http)
        for rollout in ("r1", "r2"):
            (span,) = await tape.spans(rollout, 1)
            assert (span.attributes or {})[MASKED] == {"tickets": 2, "people": 1}
            assert MASKING_FAILED not in (span.attributes or {})
            for kept in (await tape.raw(span, "request"), await tape.raw(span, "response")):
                assert not any(one in kept for one in (NEEDLE.encode(), NEEDLE[:9].encode(), b"ann@example.org"))
        async with Client(gateway.url) as client:
            _ = await client.reward("r1", "a1", Judgement(value=1.0, reason=f"about {NEEDLE}"))
            figures = (await (await http.get(gateway.url + "/metrics")).text()).splitlines()
            _ = await client.reward("r1", "a1", Judgement(value=1.0, key=NEEDLE, dimensions={NEEDLE: 0.5}))
        assert (await tape.get("/api/stats"))["rewards"]["count"] == 2
        assert 'penstock_masked_total{rule="tickets"} 5.0' in figures
        assert 'penstock_masking_failures_total{rule="people"} 0.0' in figures
    assert_gone(gateway.data)


async def test_a_call_whose_body_is_not_kept_is_still_ok_and_counted(
    tmp_path: Path, provider: Provider, http: aiohttp.ClientSession
) -> None:
    deep = '{"email": "ann@example.org"}'
    for _ in range(8):
        deep = json.dumps({"in": deep})
    provider.script = [DemoAnswer(deep)]
    async with locally(tmp_path, upstreams(openai=provider.openai_url) + RULES) as gateway:
        answer = await say(http, gateway, "r1")
        assert json.loads(answer)["choices"][0]["message"]["content"] == deep
        tape = Tape(gateway.url, http)
        (span,) = await tape.spans("r1", 1)
        assert (span.status, span.error, span.response_bytes) == ("ok", None, len(answer))
        assert span.usage is not None
        assert span.usage.output_tokens == json.loads(answer)["usage"]["completion_tokens"]
        why = "failed: tickets: JSON in JSON is nested deeper than 6 levels"
        assert (span.attributes or {})[MASKING_FAILED] == why
        assert await tape.raw(span, "response") == b"*" * len(answer)
    assert_gone(gateway.data)


async def test_what_a_call_has_cost_is_no_text(tmp_path: Path, provider: Provider, http: aiohttp.ClientSession) -> None:
    numbers = "[[masking]]\nname = \"numbers\"\npattern = '\\b\\d{1,6}\\b'\n"
    provider.script = [DemoAnswer("it is 12345"), DemoAnswer("it is 12345")]
    async with locally(tmp_path, upstreams(openai=provider.openai_url) + numbers) as gateway:
        plain, stream = await say(http, gateway, "r1"), await say(http, gateway, "r2", True)
        last = next(event for event in events(stream) if '"prompt_tokens"' in event.data)
        for rollout, answer in (("r1", plain), ("r2", last.data)):
            usage = json.loads(answer)["usage"]
            (span,) = await Tape(gateway.url, http).spans(rollout, 1)
            assert span.usage is not None
            found = (span.usage.input_tokens, span.usage.output_tokens)
            assert found == (usage["prompt_tokens"], usage["completion_tokens"]), rollout
            assert (span.choices, span.finish, "numbers" in (span.attributes or {})[MASKED]) == (1, "stop", True)


async def test_calls_of_tools_are_masked(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with mcp_server(sessions=False) as server, locally(tmp_path, config(server) + RULES) as gateway:
        client = mcp_wire.Client(f"{gateway.address('r1')}/mcp/tools", http, {})
        said = {"path": f"/tickets/{NEEDLE}", "email": "ann@example.org"}
        status, answer = (await client.say(mcp_wire.call("echo", said)))[:2]
        assert (status, NEEDLE in str(answer)) == (200, True)
        ask = {"jsonrpc": "2.0", "id": 2, "method": "resources/read", "params": {"uri": f"crm://tickets/{NEEDLE}"}}
        _ = await client.say(ask)
        span, read = await Tape(gateway.url, http).spans("r1", 2)
        assert set((span.attributes or {})[MASKED]) == {"tickets", "people"}
        assert read.name == "resources/read crm://tickets/" + "*" * len(NEEDLE)
    assert_gone(gateway.data)


async def test_the_announcement_of_a_call_is_masked_too(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    strict = '[tape]\nrecord = "strict"\n'
    gateway = await start_gateway(upstreams(openai=provider.openai_url) + RULES + strict)

    def die(_: object) -> DemoAnswer:
        # The call is on the tape by now: with `strict` it is written before it is sent.
        assert gateway.process is not None
        gateway.process.kill()
        return DemoAnswer("too late")

    provider.script = die
    with pytest.raises(aiohttp.ClientError):
        _ = await say(http, gateway, "r1")
    assert_gone(gateway.data)
    await gateway.restart()
    (span,) = await Tape(gateway.url, http).spans("r1", 1)
    assert (span.status, (span.attributes or {})[MASKED]) == ("interrupted", {"tickets": 1, "people": 1})
    assert_gone(gateway.data)


def assert_gone(data: Path) -> None:
    """It is in no file as it is, and no part of one can be unpacked to it."""
    for path in [one for one in data.rglob("*") if one.is_file()]:
        raw = path.read_bytes()
        for secret in (NEEDLE.encode(), b"ann@example.org"):
            assert secret not in raw, path
        at = raw.find(b"\x78")
        while at >= 0:
            with suppress(zlib.error):
                assert NEEDLE.encode() not in zlib.decompressobj().decompress(raw[at : at + 65536])
            at = raw.find(b"\x78", at + 1)


# -- what is no call is masked too: releases, training runs, differences of prompts ------------------------------------


CARD = "4111-1111-1111-1111"


def masker(rule: MaskingRule) -> Masker:
    return Masker((), CompiledRules([rule]), MaskingCounts())


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
    link = AuditTrailEntry(number=0, at_ns=0, who=f"ann {CARD}", why=CARD, action="start", before=None, after="draft")
    made = releases.start(new, link, 2)
    assert (made.author, made.reason) == ("*" * 19 + "!", "*" * 19)


def judge(tape: Transaction) -> None:
    spans, said = SpanOperations(tape), Judgement(value=1, key=CARD)
    first, again = [spans.reward(("r1", "a1"), said, True, 2) for _ in range(2)]
    assert (first[1], again[1], first[0].sequence) == (True, False, again[0].sequence)


@pytest.mark.parametrize("write", [train, release, judge])
def test_others_write_it_nowhere(tmp_path: Path, write: Callable[[Transaction], None]) -> None:
    with open_store(tmp_path, secrets=CARDS) as store:
        store.write(
            [QueuedOperation(lambda tape: tape.record(SpanEntry("r1", "a1", start_ns=1, end_ns=1, status="ok"), 1))]
        )
        task = QueuedOperation(write)
        store.write([task])
        assert task.refusal is None
    assert [path for path in tmp_path.rglob("*") if path.is_file() and CARD.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("secrets", "shown"), [(CARDS, False), (masker(MaskingRule(name="p", paths=["a"])), False), (NO_SECRETS, True)]
)
def test_no_piece_of_a_prompt_with_a_secret_is_shown(secrets: Secrets, shown: bool) -> None:
    text = "You help the customer with card {}, be polite and short, and say nothing else at all."
    sent = SentVersion("travel", "v1", Template.parse(text.format("4222-2222-2222-2222")))
    place = TextLocation(json.dumps(text.format(CARD)).encode(), (), "system", 0)
    catalog = cast(Catalog, SimpleNamespace(sent=[sent]))
    added = CoverageCounter(secrets).count([CallNote("r1", (), [MissNote("miss", None, place)])], catalog, 1)
    last = added["travel"].last
    assert last is not None
    assert (last.difference is not None) == shown
