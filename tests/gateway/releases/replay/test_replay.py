"""Replays: recorded calls asked again of both versions, on a real tape and against a real server."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fakes.experiment import Traffic, policy, prompt
from fakes.formats import Failure
from fakes.mistakes import tells
from fakes.releasing import CHAT, NEW, OLD, Bench, Counting, bench, counting, lookup, question_of, request_of, system_of
from fakes.some import some
from fakes.waiting import PATIENCE_S, until

from bench.trajectories import DATA, calls_of
from examples.demo.model import DemoAnswer, DemoToolCall, Json
from penstock.gateway.client.client import Client
from penstock.gateway.model.facts import CAPTURED, LEG, REPLAY_OF, is_release_call
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.release_policy import Replay
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span
from penstock.gateway.reading.turns import read_exchange
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.trials import replay, sender
from penstock.gateway.traffic.trials.judges import HOPELESS
from penstock.gateway.traffic.trials.replay import DAMAGED, FEW, CallReplay, ReplaySource
from penstock.gateway.traffic.trials.sender import without_masked_values
from penstock.gateway.wire.capture import add_capture_fields
from penstock.gateway.wire.dialects import by_name

MODULES = count()


@pytest.fixture
async def provider() -> AsyncGenerator[Counting]:
    async with counting() as made:
        made.script = lookup
        yield made


@pytest.fixture
async def rig(tmp_path: Path, provider: Counting) -> AsyncGenerator[Bench]:
    async with bench(tmp_path, provider) as made:
        yield made


def other(asked: Json) -> DemoAnswer:
    """The candidate does something else."""
    return DemoAnswer("Which flight?") if system_of(asked) == NEW else lookup(asked)


async def replayed(
    rig: Bench, calls: int, script: Callable[[Json], DemoAnswer | Failure] | None = None, **release: Any
) -> JobReport:
    """The report of a replay of so many recorded calls. `script`: what answers then."""
    await rig.record_many(calls)
    if script is not None:
        rig.provider.script = script
    return await rig.replay(await rig.release(**release))


async def test_a_candidate_that_acts_alike_passes(rig: Bench) -> None:
    report = await replayed(rig, 80)
    assert report.ok, report.why
    assert report.evidence["verdict"] == "pass"
    assert report.evidence["candidate"] == report.evidence["incumbent"] == 1.0
    assert report.evidence["calls"] < 80, "it goes on although it is decided"
    assert rig.progress.total == 80
    assert rig.progress.done == report.evidence["calls"]
    assert json.loads(json.dumps(report.evidence)) == report.evidence


async def test_one_that_acts_otherwise_fails_at_once(rig: Bench) -> None:
    report = await replayed(rig, 80, other)
    assert not report.ok
    assert "0.0% of" in report.why
    assert 'put replayed = "skip" or another judge' in report.why, "a prompt that shall change answers has no way out"
    assert report.evidence["verdict"] == "fail"
    assert report.evidence["calls"] < 20
    assert len(report.evidence["worse"]) == report.evidence["calls"]
    assert len(rig.provider.log) < 60


async def test_noise_that_the_incumbent_has_too_is_no_harm(rig: Bench) -> None:
    rng = random.Random(5)

    def moody(asked: Json) -> DemoAnswer:
        return lookup(asked) if rng.random() < 0.6 else DemoAnswer(f"Hm {rng.random()}")

    report = await replayed(rig, 100, moody)
    assert report.ok, report.why
    assert 0.4 < report.evidence["incumbent"] < 0.8


async def test_an_incumbent_that_never_agrees_with_itself_is_said(rig: Bench) -> None:
    numbers = iter(range(10_000))
    report = await replayed(rig, 70, lambda asked: DemoAnswer(f"{next(numbers)} is a number"))
    assert report.ok
    assert report.evidence["verdict"] == "undecided"
    assert "use another judge" in report.why


async def test_few_calls_are_undecided_and_pass(rig: Bench) -> None:
    report = await replayed(rig, 4)
    assert report.ok
    assert "undecided" in report.why
    assert report.evidence["calls"] == 4


async def test_both_versions_get_the_recorded_request_and_nothing_is_executed(rig: Bench) -> None:
    _ = await replayed(rig, 6)
    asked = rig.asked()
    wanted = [request_of(CHAT, text, f"flight {number}.0") for number in range(6) for text in (OLD, NEW)]
    assert sorted(map(json.dumps, asked)) == sorted(map(json.dumps, wanted))
    assert all(message["role"] != "tool" for body in asked for message in body["messages"])
    seen = rig.provider.log[0]
    assert seen.header("authorization") is None
    assert seen.header("content-type") == "application/json"


async def test_a_header_is_sent_byte_for_byte(rig: Bench) -> None:
    value = "Caf\u00e9".encode()
    headers = b"Content-Type: application/json\r\nX-Title: %b\r\n" % value
    await rig.record("r1", request_of(CHAT, OLD, "flight 1"), headers=headers)
    _ = await rig.replay(await rig.release())
    assert [seen.header("x-title") for seen in rig.provider.log] == [value.decode("latin-1")] * 2


async def test_what_was_added_for_training_is_not_asked_again(rig: Bench) -> None:
    asked = request_of(CHAT, OLD, "flight 1")
    more = some(add_capture_fields(by_name("chat"), json.dumps(asked).encode()))
    await rig.record("r1", asked, sent=more.body, attributes={CAPTURED: list(more.added)})
    await rig.replay(await rig.release())
    assert [one.keys() for one in rig.asked()] == [asked.keys()] * 2


async def test_its_spans_stand_apart_and_say_what_they_repeat(rig: Bench) -> None:
    await rig.record_many(3)
    release = await rig.release()
    report = await rig.replay(release)
    spans = rig.spans(f"{release.id}-replay")
    assert report.evidence["spans"] == f"{release.id}-replay/a1"
    told = Counter((span.attributes or {})[REPLAY_OF] + " " + (span.attributes or {})[LEG] for span in spans)
    assert told == Counter(f"r{n}/a1#1 {leg}" for n in range(3) for leg in ("candidate", "incumbent"))
    for span in spans:
        version = "v2" if (span.attributes or {})[LEG] == "candidate" else "v1"
        assert (span.versions, span.arm, span.status) == ({"travel": version}, None, "ok")
        exchange = rig.exchange(span)
        turn = read_exchange(span.dialect, exchange, span)
        assert turn.messages[0].parts[0].text == (NEW if version == "v2" else OLD)
        assert turn.choices[0].message.parts[0].name == "lookup"
        assert span.usage is not None
        assert exchange.url == rig.provider.openai_url + "/chat/completions"
        assert (span.first_byte_ns or 0) > 0
    rollout = some(rig.context.tape.rollout(f"{release.id}-replay"))
    assert (rollout.mode, rollout.origin, rollout.status) == ("test", "header", "succeeded")
    for number in range(3):
        assert [span.sequence for span in rig.spans(f"r{number}")] == [1]


async def test_a_replay_is_never_replayed(rig: Bench) -> None:
    await rig.record_many(3)
    release = await rig.release()
    _ = await rig.replay(release)
    later = release.model_copy(update={"changed_ns": rig.context.now_ns(), "revision": 9})
    report = await rig.replay(later)
    assert report.evidence["calls"] == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_every_dialect_is_replayed_streamed_or_not(rig: Bench, path: str, stream: bool) -> None:
    for number in range(8):
        await rig.record(f"r{number}", request_of(path, OLD, f"flight {number}", stream), path=path)
    rig.provider.script = other
    report = await rig.replay(await rig.release())
    assert report.evidence["incumbent"] == 1.0
    assert report.evidence["candidate"] == 0.0
    assert {seen.path for seen in rig.provider.log} == {path}
    assert {seen.streamed for seen in rig.provider.log} == {stream}


async def test_an_answer_that_is_compressed_is_read(rig: Bench) -> None:
    await rig.record_many(3)
    rig.provider.encoding = "gzip"
    release = await rig.release()
    report = await rig.replay(release)
    assert report.evidence["candidate"] == 1.0
    exchange = rig.exchange(rig.spans(f"{release.id}-replay")[0])
    assert json.loads(gzip.decompress(exchange.response_body))["object"] == "chat.completion"


async def test_a_version_that_was_recorded_is_replaced_where_agents_do_not_send_it(rig: Bench) -> None:
    """The incumbent may be a version that no agent sends by itself."""
    for number in range(4):
        asked = request_of(CHAT, NEW, f"flight {number}")
        await rig.record(f"r{number}", asked, versions={"travel": "v2"})
    await rig.add("travel", prompt("Fly, {date}, with Acme Air and nobody else.", version="v3"))
    report = await rig.replay(await rig.release(candidate="v3"))
    assert report.evidence["calls"] == 4
    assert {system_of(asked) for asked in rig.asked()} == {OLD, "Fly, Tuesday, with Acme Air and nobody else."}


async def test_weights_are_asked_by_the_names_that_they_are_served_under(rig: Bench) -> None:
    for version in ("v1", "v2"):
        content = {"upstream": "openai", "base": "base", "adapter": f"/adapters/{version}"}
        await rig.add("policy", NewVersion.model_validate({"kind": "model", "content": content, "version": version}))
    for number in range(3):
        asked = request_of(CHAT, "Be brief.", f"flight {number}", model="policy@v1")
        await rig.record(f"r{number}", asked, model="policy", versions={"policy": "v1"})
    await rig.record_many(3)
    release = await rig.release("policy")
    report = await rig.replay(release.model_copy(update={"kind": "model"}))
    assert report.evidence["calls"] == 3
    assert Counter(asked["model"] for asked in rig.asked()) == {"policy@v1": 3, "policy@v2": 3}


async def test_a_description_of_a_tool_is_replaced(rig: Bench) -> None:
    for text in ("Looks things up.", "Looks up what it is told to."):
        content = {"tool": "lookup", "text": text, "sent": text.startswith("Looks things")}
        await rig.add("lookup-text", NewVersion.model_validate({"kind": "tool-text", "content": content}))
    report = await replayed(rig, 3, resource="lookup-text")
    assert report.evidence["calls"] == 3
    told = Counter(asked["tools"][0]["function"]["description"] for asked in rig.asked())
    assert told == {"Looks things up.": 3, "Looks up what it is told to.": 3}


async def test_what_the_candidate_itself_has_answered_is_no_reference(rig: Bench) -> None:
    await rig.record("theirs", request_of(CHAT, NEW, "theirs"), versions={"travel": "v2"})
    await rig.record("mine", request_of(CHAT, OLD, "mine"))
    _ = await rig.replay(await rig.release())
    assert {question_of(asked) for asked in rig.asked()} == {"mine"}


async def test_only_calls_of_the_audience_are_asked_again(rig: Bench) -> None:
    for number, agent in enumerate(["planner", "writer", None]):
        await rig.record(f"r{number}", request_of(CHAT, OLD, agent or "nobody"), agent=agent)
    _ = await rig.replay(await rig.release(only={"agents": ["plan*"]}))
    assert {question_of(asked) for asked in rig.asked()} == {"planner"}


async def test_failed_and_foreign_calls_are_not_asked_again(rig: Bench) -> None:
    await rig.record("failed", request_of(CHAT, OLD, "failed"), status="error")
    await rig.record("cut", request_of(CHAT, OLD, "cut"), truncated=True)
    await rig.record("foreign", request_of(CHAT, "You are a poet.", "foreign"))
    await rig.record("mine", request_of(CHAT, OLD, "mine"))
    _ = await rig.replay(await rig.release())
    assert {question_of(asked) for asked in rig.asked()} == {"mine"}


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        (CHAT, {"web_search_options": {"size": 1}}, "web_search_options"),
        ("/v1/responses", {"tools": [{"type": "mcp", "server_url": "https://x"}]}, "mcp"),
        ("/v1/responses", {"conversation": "conv_1"}, "conversation"),
        ("/v1/messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ],
)
async def test_what_the_provider_would_do_by_itself_is_not_done_again(
    rig: Bench, path: str, more: dict[str, Any], why: str
) -> None:
    asked = request_of(path, OLD, "look it up", **more)
    await rig.record("r1", asked, DemoAnswer("Found."), path=path)
    report = await rig.replay(await rig.release())
    assert not report.ok
    assert rig.provider.log == []
    assert why in report.why


async def test_a_long_rollout_does_not_speak_for_all(rig: Bench) -> None:
    for number in range(40):
        await rig.record("long", request_of(CHAT, OLD, f"long {number}"))
    await rig.record_many(6, 2)
    release = await rig.release()
    drawn = ReplaySource(rig.context, release).draw(100, "s", lambda: False)
    assert Counter(span.rollout for span in drawn.spans) == {"long": FEW} | {f"r{number}": 2 for number in range(6)}
    again = ReplaySource(rig.context, release).draw(100, "s", lambda: False)
    assert again.spans == drawn.spans
    few = ReplaySource(rig.context, release).draw(7, "s", lambda: False)
    assert Counter(span.rollout for span in few.spans) == {"long": 1} | {f"r{number}": 1 for number in range(6)}


@pytest.mark.parametrize("what", ["attempts", "bodies"])
async def test_what_is_damaged_is_passed_over(rig: Bench, what: str) -> None:
    await rig.record_many(4)
    release = await rig.release()

    def damage(tape: Transaction) -> None:
        (key, _), *_ = tape.scan(what)
        tape.put(what, key, b"\xc1")

    await rig.do(damage)
    report = await rig.replay(release)
    assert report.ok, report.why
    assert (report.evidence["calls"], report.evidence["passed_over"]) == (3, {DAMAGED: 1})


async def test_without_recorded_calls_it_does_not_pass(rig: Bench) -> None:
    report = await rig.replay(await rig.release())
    assert not report.ok
    assert tells(report.why, "no recorded calls of travel", "replayed = 'skip'")


async def test_many_long_versions_do_not_hold_up_the_gateway(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """249 of 400 slots each stopped the event loop for a second: a thread reads them."""
    threads: list[threading.Thread] = []

    def reading(*given: Any) -> ReplaySource:
        threads.append(threading.current_thread())
        return ReplaySource(*given)

    monkeypatch.setattr(replay, "ReplaySource", reading)
    assert "there are no recorded calls of travel" in (await rig.replay(await rig.release())).why
    (thread,) = threads
    assert thread is not threading.main_thread()


async def test_a_leg_that_fails_scores_nothing(rig: Bench) -> None:
    await rig.record_many(40)
    rig.provider.script = lambda asked: Failure(400, "too long") if system_of(asked) == NEW else lookup(asked)
    release = await rig.release()
    report = await rig.replay(release)
    assert not report.ok
    assert report.evidence["verdict"] == "fail"
    assert report.evidence["failed"] == {"candidate": report.evidence["calls"]}
    asked = [span for span in rig.spans(f"{release.id}-replay") if span.status != "cancelled"]
    failed = [span for span in asked if (span.attributes or {})[LEG] == "candidate"]
    assert {(span.status, span.error, span.http_status) for span in failed} == {("error", "http_400", 400)}


async def test_when_nobody_answers_nothing_is_known(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replay, "concurrency", 1)
    report = await replayed(rig, 60, lambda asked: Failure(500, "down for today"))
    assert not report.ok
    assert "down for today" in report.why
    assert len(rig.provider.log) == 2 * HOPELESS


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
async def test_a_stream_that_only_stays_alive_holds_its_slot_for_so_long(
    rig: Bench, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(sender, "LONGEST_S", 1.0)
    for pool in rig.context.pools.values():
        pool.config = pool.config.model_copy(update={"read_timeout": 1.0})
    await rig.record("r1", request_of(path, OLD, "x", stream=True), path=path)
    rig.provider.only_pings = lambda asked: True
    release = await rig.release()
    async with asyncio.timeout(PATIENCE_S):
        report = await rig.replay(release)
    assert tells(report.why, "nothing is known of 1 of 1 calls", "within 1 s")
    assert [(one.status, one.error) for one in rig.spans(f"{release.id}-replay")] == [("error", "timeout")] * 2
    await rig.provider.until(lambda: rig.provider.running == 0)


async def test_a_long_error_is_told_in_part(rig: Bench) -> None:
    """Some servers repeat the whole request in it."""
    said = f"not understood: {{{' and so on' * 10_000}"
    report = await replayed(rig, 12, lambda asked: Failure(400, said))
    assert "HTTP 400: not understood: {" in report.why
    assert len(json.dumps([report.why, report.evidence])) < 10_000


async def test_a_missing_key_is_explained(rig: Bench) -> None:
    rig.provider.key = "sk-real"
    report = await replayed(rig, 12)
    assert not report.ok
    assert "key_env" in report.why


async def test_the_upstreams_own_key_is_sent_and_kept_secret(
    tmp_path: Path, provider: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-real")
    provider.key = "sk-real"
    upstream = [{"name": "openai", "base_url": provider.openai_url, "key_env": "UPSTREAM_KEY"}]
    async with bench(tmp_path, provider, {"upstream": upstream}) as rig:
        await rig.record_many(3)
        release = await rig.release()
        report = await rig.replay(release)
        assert report.evidence["candidate"] == 1.0
        for span in rig.spans(f"{release.id}-replay"):
            assert ("Authorization", "***") in rig.exchange(span).request_headers


@pytest.mark.parametrize("origin", ["http://127.0.0.1:9", f"http://{'a' * 70}.example"])
async def test_an_upstream_that_is_gone_is_an_answer_that_failed(
    rig: Bench, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    await rig.record_many(12)
    monkeypatch.setattr(Replay, "concurrency", 1)
    release = await rig.release()
    pool = rig.context.pools["openai"]
    pool.origin = origin
    report = await rig.replay(release)
    assert not report.ok
    assert {span.error for span in rig.spans(f"{release.id}-replay")} == {"connect"}


async def test_budget_and_concurrency_are_kept(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.record_many(60)
    rig.provider.held = lambda asked: True
    monkeypatch.setattr(Replay, "budget", 31)
    monkeypatch.setattr(Replay, "concurrency", 3)
    release = await rig.release()
    replaying = asyncio.ensure_future(rig.replay(release))
    await rig.provider.until(lambda: rig.provider.running == 3)
    rig.provider.go.set()
    report = await replaying
    assert rig.provider.most == 3
    assert len(rig.provider.log) == report.evidence["requests"] == 30
    assert report.evidence["calls"] == 15
    assert report.evidence["verdict"] == "undecided"


async def test_a_replay_that_is_stopped_leaves_nothing_running(rig: Bench) -> None:
    await rig.record_many(20)
    rig.provider.held = lambda asked: True
    release = await rig.release()
    before = asyncio.all_tasks()
    replaying = asyncio.ensure_future(rig.replay(release))
    await rig.provider.until(lambda: rig.provider.running == 8)
    replaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await replaying
    assert asyncio.all_tasks() - before <= {asyncio.current_task()} | _served(rig)
    await rig.provider.until(lambda: rig.provider.running == 0)
    assert await rig.context.recorder.flush()
    assert [span.status for span in rig.spans(f"{release.id}-replay")] == ["cancelled"] * 8


def _served(rig: Bench) -> set[asyncio.Task[Any]]:
    """Tasks of the provider's own server."""
    return {task for task in asyncio.all_tasks() if "RequestHandler" in repr(task)}


async def test_after_a_restart_nothing_is_asked_or_paid_for_twice(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.record_many(30)
    rig.provider.held = lambda asked: len(rig.provider.log) >= 20
    monkeypatch.setattr(Replay, "budget", 60)
    monkeypatch.setattr(Replay, "concurrency", 2)
    release = await rig.release()
    replaying = asyncio.ensure_future(rig.replay(release))
    await rig.provider.until(lambda: rig.provider.waiting == 2)
    replaying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await replaying
    assert await rig.context.recorder.flush()
    answered = len([span for span in rig.spans(f"{release.id}-replay") if span.status == "ok"])
    assert answered == 20
    await rig.record("later", request_of(CHAT, OLD, "later"))
    rig.provider.held = lambda asked: False
    report = await rig.replay(release)
    assert len(rig.provider.log) <= 60
    assert report.evidence["requests"] <= 60
    assert report.evidence["calls"] == 29, "the two that were cancelled were paid for"
    told = Counter(map(json.dumps, rig.asked()))
    assert set(told.values()) == {1}
    assert all(question_of(asked) != "later" for asked in rig.asked()), "the draw has changed"


async def test_a_judge_model_is_asked_twice_with_the_answers_exchanged(tmp_path: Path, provider: Counting) -> None:
    route = [{"model": "judge", "upstream": "anthropic", "alias": "claude-judge"}]

    def script(asked: Json) -> DemoAnswer:
        if asked["model"] == "claude-judge":
            said: str = asked["messages"][0]["content"]
            first = said.index('"says"') < said.index('"calls"')
            return DemoAnswer(json.dumps({"agreement": 0.8 if first else 0.4}))
        return other(asked)

    provider.script = script
    async with bench(tmp_path, provider, {"route": route, "upstream": _both(provider)}) as rig:
        await rig.record_many(5)
        release = await rig.release(judge="judge")
        report = await rig.replay(release)
        judged = [seen for seen in provider.log if seen.path == "/v1/messages"]
        assert len(judged) == 10, "what agrees exactly needs no judge"
        assert report.evidence["candidate"] == pytest.approx(0.6)
        assert report.evidence["incumbent"] == 1.0
        assert report.evidence["requests"] == len(provider.log) == 20
        spans = [span for span in rig.spans(f"{release.id}-replay") if (span.attributes or {})[LEG] == "judge"]
        assert len(spans) == 10
        assert {span.model for span in spans} == {"claude-judge"}


def _both(provider: Counting) -> list[dict[str, str]]:
    return [
        {"name": "openai", "base_url": provider.openai_url, "dialect": "openai"},
        {"name": "anthropic", "base_url": provider.url, "dialect": "anthropic"},
    ]


async def test_a_judge_that_gives_no_number_leaves_nothing_known(rig: Bench) -> None:
    dumb = DemoAnswer("Hard to say.")
    report = await replayed(rig, 20, lambda asked: dumb if asked["model"] == "judge" else other(asked), judge="judge")
    assert not report.ok
    assert "the judge gave no score" in report.why


async def test_the_judges_requests_are_of_the_budget(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = DemoAnswer('{"agreement": 0.5}')
    rig.provider.script = lambda asked: agreed if asked["model"] == "judge" else other(asked)
    await rig.record_many(40)
    monkeypatch.setattr(Replay, "budget", 21)
    monkeypatch.setattr(Replay, "concurrency", 2)
    report = await rig.replay(await rig.release(judge="judge"))
    assert len(rig.provider.log) == report.evidence["requests"] <= 21
    assert report.evidence["calls"] >= 3


VERIFIER = """
import asyncio
def tools(recorded, answered):
    calls = lambda turn: [p["name"] for p in turn["choices"][0]["message"]["parts"] if p["type"] == "tool_call"]
    assert recorded["messages"][1]["parts"][0]["text"].startswith("flight")
    return calls(recorded) == calls(answered)
def broken(recorded, answered):
    raise ZeroDivisionError("planted")
def large(recorded, answered):
    return 7
async def later(recorded, answered):
    return 1
number = 3
"""


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules the gateway can import."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def verifier(importable: Path) -> str:
    (importable / "my_verifier.py").write_text(VERIFIER)
    return "my_verifier"


async def test_a_verifier_function_says_what_agrees(rig: Bench, verifier: str) -> None:
    await rig.record_many(70)
    calls = (DemoToolCall("call_2", "lookup", '{"what": "other"}'),)
    rig.provider.script = lambda asked: DemoAnswer(calls=calls) if system_of(asked) == NEW else lookup(asked)
    report = await rig.replay(await rig.release(judge=f"{verifier}:tools"))
    assert report.ok
    assert report.evidence["verdict"] == "pass"


@pytest.mark.parametrize(
    ("judge", "why"),
    [
        ("my_verifier:broken", "failed on r"),
        ("my_verifier:large", "returned 7"),
        ("my_verifier:later", "is a coroutine function"),
        ("my_verifier:number", "is no function"),
        ("my_verifier:missing", "cannot be loaded"),
        ("no_such_module:tools", "cannot be loaded"),
    ],
)
async def test_a_verifier_that_does_not_work_is_a_clear_report(rig: Bench, verifier: str, judge: str, why: str) -> None:
    report = await replayed(rig, 3, judge=judge)
    assert not report.ok
    assert judge in report.why
    assert why in report.why


@pytest.mark.parametrize(
    ("alike", "gate", "stage"),
    [(True, "required", "canary"), (False, "required", "rolled_back"), (False, None, "canary")],
)
async def test_a_release_is_replayed_before_any_rollout_is_assigned(
    traffic: Traffic, provider: Counting, client: Client, alike: bool, gate: str | None, stage: str
) -> None:
    """A new prompt may change answers unless its policy says otherwise: by default the replay only reports."""
    provider.script = lambda asked: DemoAnswer("Hello") if alike or system_of(asked) == OLD else DemoAnswer("Go away")
    for number in range(12):
        await traffic.call(f"before-{number}")
        await client.reward(f"before-{number}", "a1", Judgement(value=1.0))
    how = policy(0.5, replayed=gate, replay={"calls": 12})
    release = await client.start_release("travel", NewRelease(candidate="v2", policy=how))
    view = await traffic.when(release.id, lambda view: view.release.stage in ("canary", "rolled_back"))
    assert view.release.stage == stage, view
    entry = next(one for one in await client.audit(release.id) if one.action in ("replay", "roll_back"))
    assert entry.evidence["incumbent"] == 1.0
    assert entry.evidence["candidate"] == (1.0 if alike else 0.0)
    found = await client.rollout(f"{release.id}-replay")
    assert (found.mode, found.reward, found.status) == ("test", None, "succeeded")
    assert [(await client.rollout(f"before-{n}")).totals.calls for n in range(12)] == [1] * 12


async def judged(traffic: Traffic, folder: Path, code: str) -> Release:
    """A release whose replay of one call a verifier judges; `code`: of its module."""
    name = f"verifier_{next(MODULES)}"
    (folder / f"{name}.py").write_text(code)
    await traffic.call("before")
    how = policy(0.5, replayed="required", judge=f"{name}:judge")
    return await traffic.client.start_release("travel", NewRelease(candidate="v2", policy=how))


@pytest.mark.parametrize(
    "code", ["raise SystemExit('usage')", "def judge(recorded, answered):\n    raise SystemExit(2)"]
)
async def test_a_verifier_that_exits_ends_its_stage_and_not_the_gateway(
    traffic: Traffic, importable: Path, code: str
) -> None:
    release = await judged(traffic, importable, code)
    view = await traffic.when(release.id, lambda view: not view.release.live)
    assert tells(view.release.reason, f"verifier {release.policy.judge}", "SystemExit")


SLOW = """
import time
from pathlib import Path
here = Path(__file__).parent
(here / "begun").touch()
while not (here / "go").exists():
    time.sleep(0.01)
def judge(recorded, answered):
    return 1
"""


async def test_calls_go_on_while_a_verifier_is_imported(traffic: Traffic, importable: Path) -> None:
    begun, go = importable / "begun", importable / "go"
    starting = asyncio.ensure_future(judged(traffic, importable, SLOW))
    try:
        await until(begun.exists)
        async with asyncio.timeout(PATIENCE_S):
            assert await traffic.call("meanwhile")
    finally:
        go.touch()
    release = await starting
    await traffic.when(release.id, lambda view: view.release.stage == "canary")


@pytest.mark.skipif(not DATA.exists(), reason="the real trajectories are not there")
async def test_on_real_trajectories_an_identical_candidate_agrees_with_the_incumbent(rig: Bench) -> None:
    with gzip.open(DATA) as lines:
        found = [list(calls_of(json.loads(next(lines))["messages"])) for _ in range(15)]
    answers = {json.dumps(json.loads(body)["messages"][1:]): message for calls in found for body, message in calls}

    def recorded(asked: Json) -> DemoAnswer:
        message = answers[json.dumps(asked["messages"][1:])]
        calls = [
            DemoToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        return DemoAnswer(message["content"] or "", tuple(calls))

    text: str = json.loads(found[0][0][0])["messages"][0]["content"]
    literal = text.replace("{", "{{").replace("}", "}}")
    await rig.add("airline", prompt(literal, sent=True))
    await rig.add("airline", prompt(literal + "\n"))
    for number, calls in enumerate(found):
        for body, _ in calls:
            await rig.record(f"t{number}", json.loads(body), recorded(json.loads(body)))
    rig.provider.script = recorded
    release = await rig.release("airline")
    report = await CallReplay(rig.context, release, JobProgress("replay")).report()
    assert report.ok
    assert report.evidence["verdict"] == "pass"
    assert report.evidence["candidate"] == report.evidence["incumbent"] == 1.0


def test_masked_keys_are_no_part_of_a_path() -> None:
    assert without_masked_values("/v1/x?key=***&alt=sse") == "/v1/x?alt=sse"
    assert without_masked_values("/v1/x?key=***") == without_masked_values("/v1/x") == "/v1/x"


def test_spans_of_replays_are_told_by_their_attributes() -> None:
    assert is_release_call(Span(rollout="r", attempt="a", sequence=1, attributes={REPLAY_OF: "r/a#1"}))
    assert not is_release_call(Span(rollout="r", attempt="a", sequence=1))
