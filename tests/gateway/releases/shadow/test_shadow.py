"""Shadows: live calls mirrored to a candidate, in a real gateway with a provider that can be made to wait."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import Traffic, policy
from fakes.formats import Failure
from fakes.process import PATIENCE, Gateway
from fakes.releasing import CHAT, NEW, OLD, Bench, Counting, bench, counting, request_of, system_of
from fakes.shell import Shell
from fakes.tape import Tape

from examples.demo.model import DemoAnswer, Json, chat
from penstock.console.commands import inspection
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.facts import LEG, SHADOW_OF
from penstock.gateway.model.release import AuditTrailEntry, NewRelease, Pin, Release, ReleaseView
from penstock.gateway.model.release_policy import Shadow
from penstock.gateway.model.resource import Audience
from penstock.gateway.model.span import Span
from penstock.gateway.releases.catalog import find_resources
from penstock.gateway.releases.driver import JobProgress, JobReport
from penstock.gateway.traffic.calls.call_record import BufferUsage, CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.traffic.trials.sender import ReleaseSender
from penstock.gateway.traffic.trials.shadow import ShadowJob
from penstock.gateway.traffic.versions import ResourceUse
from penstock.gateway.wire.dialects import by_name
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import HttpRequest

WAITS: Any = {"shadowed": "required", "shadow": {"share": 1.0, "calls": 5}}


@pytest.fixture
async def provider() -> AsyncGenerator[Counting]:
    async with counting() as made:
        made.script = lambda asked: DemoAnswer("Hello")
        yield made


def mirrored(provider: Counting) -> list[Json]:
    """What was asked of the candidate."""
    return [asked for seen in provider.log if system_of(asked := json.loads(seen.body)) == NEW]


def reply_fails(asked: Json) -> DemoAnswer | Failure:
    """The candidate's calls fail."""
    return Failure(400, "too long") if system_of(asked) == NEW else DemoAnswer("Hello")


# -- in a gateway ------------------------------------------------------------------------------------------------------


@dataclass
class Rig:
    """A gateway in front of the provider, and its agents."""

    gateway: Gateway
    provider: Counting
    traffic: Traffic
    client: Client
    tape: Tape

    async def start(self, **more: Any) -> Release:
        """A release that mirrors."""
        shadow = WAITS["shadow"] | more.pop("shadow", {})
        how = policy(0.5, **(WAITS | {"shadow": shadow} | more))
        release = await self.client.start_release("travel", NewRelease(candidate="v2", policy=how))
        await self.until(release, lambda view: view.doing == "shadow" and view.total == how.shadow.calls)
        return release

    async def until(self, release: Release, condition: Callable[[ReleaseView], bool]) -> ReleaseView:
        """The release as soon as the condition holds."""
        return await self.traffic.when(release.id, condition)

    async def calls(self, release: Release, count: int) -> None:
        """Calls, each of which is mirrored before the next one, unless the stage is over."""
        for number in range(count):
            with suppress(aiohttp.ClientError):  # where an answer breaks off
                await self.traffic.call(f"r{number}")
            await self.until(release, lambda view, number=number: view.done > number or view.doing is None)

    async def entry(self, release: Release) -> AuditTrailEntry:
        """What the stage ended with."""
        audit = await self.client.audit(release.id)
        return next(one for one in audit if one.evidence.get("requests") is not None)


@pytest.fixture
def rig(gateway: Gateway, provider: Counting, traffic: Traffic, tape: Tape) -> Rig:
    return Rig(gateway, provider, traffic, traffic.client, tape)


async def test_live_calls_are_mirrored_and_their_agreement_told(rig: Rig) -> None:
    release = await rig.start()
    await rig.calls(release, 5)
    view = await rig.until(release, lambda view: view.release.stage == "canary")
    assert "100.0% of 5" in (await rig.entry(release)).why
    found = (await rig.entry(release)).evidence
    assert (found["calls"], found["candidate_errors"], found["live_errors"], found["agreement"]) == (5, 0, 0, 1)
    assert found["candidate_p50_s"] > 0
    assert found["live_p50_s"] > 0
    assert len(mirrored(rig.provider)) == 5
    name, _, attempt = found["spans"].partition("/")
    assert name == f"{release.id}-shadow"
    spans = await rig.tape.spans(name, 5, attempt)
    assert {(span.attributes or {})[SHADOW_OF] for span in spans} == {f"r{number}/a1#1" for number in range(5)}
    assert {(span.attributes or {})[LEG] for span in spans} == {"candidate"}
    assert {json.dumps(span.versions) for span in spans} == {'{"travel": "v2"}'}
    rollout = await rig.client.rollout(f"{release.id}-shadow")
    assert (rollout.mode, rollout.reward) == ("test", None)
    assert view.release.assigned == 0
    await rig.traffic.call("later")
    assert rig.provider.log[-1].body in (rig.provider.log[0].body, json.dumps(mirrored(rig.provider)[0]).encode())
    assert len(rig.provider.log) == 11, "nothing is mirrored any more"


async def test_only_calls_of_the_audience_are_mirrored(rig: Rig) -> None:
    how = policy(0.5, **WAITS)
    only = Audience(agents=["planner"])
    release = await rig.client.start_release("travel", NewRelease(candidate="v2", policy=how, only=only))
    await rig.until(release, lambda view: view.doing == "shadow" and view.total == how.shadow.calls)
    # A call that comes while enough are under way is not offered: there are as many as it takes.
    while (await rig.client.release(release.id)).doing == "shadow":
        for agent in ("critic", "planner"):
            await rig.traffic.call(f"{agent}-{len(rig.provider.log)}/agent/{agent}")
    await rig.until(release, lambda view: view.release.stage == "canary")
    _, _, attempt = (await rig.entry(release)).evidence["spans"].partition("/")
    spans = await rig.tape.spans(f"{release.id}-shadow", 5, attempt)
    assert {(span.attributes or {})[SHADOW_OF].partition("-")[0] for span in spans} == {"planner"}


@pytest.mark.slow
async def test_mirrors_are_no_agents_cost_data_or_training(rig: Rig, tmp_path: Path) -> None:
    release = await rig.start()
    await rig.calls(release, 5)
    await rig.until(release, lambda view: view.release.stage == "canary")
    stats = await rig.client.stats()
    assert (stats.by_kind["llm"], stats.totals.calls, stats.by_status) == (10, 5, {"ok": 5})
    assert {name: one.calls for name, one in stats.by_model.items()} == {"m": 5}
    agents = {f"r{number}" for number in range(5)}
    for what in ("spans", "messages"):
        rows = [row.model_dump() async for row in inspection._rows(rig.client, what, "")]
        assert {row["rollout"] for row in rows} == agents
    modes = {rollout.id: rollout.mode async for rollout in rig.client.rollouts("")}
    assert modes == dict.fromkeys(agents, "online") | {f"{release.id}-shadow": "test"}
    shell = Shell(rig.gateway.url, tmp_path)
    doctor = await shell.run("doctor", f"{release.id}-shadow")
    assert "for_release" in doctor.text
    assert "made it to try a release" in doctor.text
    samples = await shell.run("samples", "--form", "chat", f"rollout:{release.id}-shadow")
    assert samples.out == b""
    assert "for_release" in samples.err


async def test_no_answer_waits_for_its_mirror(rig: Rig) -> None:
    rig.provider.held = lambda asked: system_of(asked) == NEW
    release = await rig.start()
    for number in range(2):
        assert await rig.traffic.call(f"r{number}")
    await rig.provider.until(lambda: rig.provider.running == 2)
    async with asyncio.timeout(PATIENCE):  # no mirror ends meanwhile
        for number in range(6):
            assert await rig.traffic.call(f"more-{number}")
    assert (await rig.client.release(release.id)).done == 0
    rig.provider.go.set()
    for number in range(2, 5):
        await rig.until(release, lambda view, number=number: view.done == number)
        await rig.traffic.call(f"last-{number}")
    await rig.until(release, lambda view: view.release.stage == "canary")
    found = (await rig.entry(release)).evidence
    assert found["left_out"] == {"no slot was free": 6}
    assert rig.provider.most <= 3


async def test_a_mirror_begins_when_its_call_is_over(rig: Rig) -> None:
    rig.provider.held = lambda asked: system_of(asked) == OLD
    release = await rig.start()
    calling = asyncio.ensure_future(rig.traffic.call("r1"))
    await rig.provider.until(lambda: rig.provider.running == 1)
    assert mirrored(rig.provider) == []
    rig.provider.go.set()
    assert await calling
    await rig.until(release, lambda view: view.done == 1)
    assert [system_of(json.loads(seen.body)) for seen in rig.provider.log] == [OLD, NEW]


async def test_a_candidate_that_fails_more_often_is_rolled_back(rig: Rig) -> None:
    rig.provider.script = reply_fails
    release = await rig.start(shadow={"calls": 100})
    await rig.calls(release, 15)
    view = await rig.until(release, lambda view: not view.release.live)
    assert view.release.stage == "rolled_back"
    assert "it fails more often" in view.release.reason
    found = (await rig.entry(release)).evidence
    assert (found["candidate_errors"], found["live_errors"]) == (1.0, 0.0)
    assert found["calls"] < 15
    assert rig.traffic.failures == []


async def test_calls_that_fail_anyhow_are_not_held_against_it(rig: Rig) -> None:
    rig.provider.script = lambda asked: Failure(400, "no such model")
    release = await rig.start(shadow={"calls": 20})
    await rig.calls(release, 20)
    await rig.until(release, lambda view: view.release.stage == "canary")
    found = (await rig.entry(release)).evidence
    assert (found["candidate_errors"], found["live_errors"], found["harm"]) == (1.0, 1.0, 1.0)


async def test_answers_that_break_off_on_either_side_are_not_held_against_it(rig: Rig) -> None:
    """A third of all answers breaks off, whoever asks."""
    asked = Counter[str]()

    def breaks(body: Json) -> bool:
        asked[system_of(body)] += 1
        return asked[system_of(body)] % 3 == 0

    rig.provider.breaks = breaks
    release = await rig.start(shadow={"calls": 30})
    await rig.calls(release, 30)
    view = await rig.until(release, lambda view: view.release.stage in ("canary", "rolled_back"))
    assert view.release.stage == "canary", view.release.reason
    found = (await rig.entry(release)).evidence
    assert found["candidate_errors"] == found["live_errors"] == pytest.approx(1 / 3)


async def test_a_release_that_is_taken_back_leaves_no_mirror_running(rig: Rig) -> None:
    rig.provider.held = lambda asked: system_of(asked) == NEW
    release = await rig.start()
    await rig.traffic.call("r1")
    await rig.provider.until(lambda: rig.provider.running == 1)
    await rig.client.decide(release.id, "abort", ActionRequest(who="ann"))
    await rig.provider.until(lambda: rig.provider.running == 0)
    (span,) = await rig.tape.spans(f"{release.id}-shadow", 1, f"a{release.revision + 2}")
    assert span.status == "cancelled"
    rig.provider.go.set()
    await rig.traffic.call("r2")
    assert len(await rig.tape.spans("r2", 1)) == 1
    assert mirrored(rig.provider) == []


async def test_after_a_restart_it_goes_on_where_it_was(rig: Rig) -> None:
    release = await rig.start()
    for number in range(3):
        await rig.traffic.call(f"r{number}")
        await rig.until(release, lambda view, number=number: view.done > number)
    await rig.gateway.restart()
    await rig.until(release, lambda view: view.done == 3 and view.total == 5)
    for number in range(2):
        await rig.traffic.call(f"s{number}")
    await rig.until(release, lambda view: view.release.stage == "canary")
    assert (await rig.entry(release)).evidence["calls"] == 5
    assert len(mirrored(rig.provider)) == 5


# -- one call at a time ------------------------------------------------------------------------------------------------


@dataclass
class Offers:
    """A shadow without a gateway, to which calls are offered by hand."""

    rig: Bench
    shadow: ShadowJob
    release: Release
    progress: JobProgress
    job: asyncio.Future[JobReport]

    def record(self, rollout: str = "r1", agent: str | None = None, **more: Any) -> tuple[CallRecord, ResourceUse]:
        """A call that has been answered."""
        asked = request_of(CHAT, OLD, "Hello", **more)
        dialect, body = by_name("chat"), json.dumps(asked).encode()
        request = HttpRequest()
        request.method, request.started_ns = "POST", self.rig.context.now_ns()
        request.headers = [
            (b"authorization", b"Authorization", b"Bearer sk-agent"),
            (b"idempotency-key", b"Idempotency-Key", b"1"),
            (b"traceparent", b"traceparent", b"00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01"),
        ]
        call = CallRequest(CallAddress(rollout, "a1", agent), dialect, CHAT, body)
        record = CallRecord(call, request, Redactor(), 1 << 20, BufferUsage(1 << 20))
        record.pool = self.rig.context.pools["openai"]
        record.set_own_answer(200, json.dumps(chat(asked, DemoAnswer("Hello"))).encode())
        record.status, record.end_ns = "ok", self.rig.context.now_ns()
        self.rig.context.recorder.put(record)
        return record, ResourceUse(
            ["travel"], find_resources(body, dialect, self.rig.context.pins.catalog.recogniser), None
        )

    def offer(self, record: CallRecord, found: ResourceUse, **pin: Any) -> None:
        pins = {"travel": Pin.model_validate({"resource": "travel", "version": "v1"} | pin)}
        if self.shadow.mirrors:
            self.shadow.offer(record, found, pins)

    async def spans(self, count: int) -> list[Span]:
        await self.rig.provider.until(lambda: len(self.rig.provider.log) >= count)
        while len(found := self.rig.spans(f"{self.release.id}-shadow")) < count:
            await self.rig.context.recorder.flush()
        return found


async def mirroring(rig: Bench, judge: str = "exact", **shadow: Any) -> Offers:
    """A shadow that mirrors."""
    job = ShadowJob(rig.context)
    release, progress = await rig.release(judge=judge, shadow={"share": 1.0} | shadow), JobProgress("shadow")
    made = Offers(rig, job, release, progress, asyncio.ensure_future(job(release, progress)))
    while not job.mirrors:  # noqa: ASYNC110 -- it takes a few turns of this loop
        await asyncio.sleep(0)
    return made


@pytest.fixture
async def offers(tmp_path: Path, provider: Counting, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Offers]:
    monkeypatch.setattr(Shadow, "requests", 1)
    async with bench(tmp_path, provider) as rig:
        made = await mirroring(rig, calls=3)
        try:
            yield made
        finally:
            made.job.cancel()
            await asyncio.gather(made.job, return_exceptions=True)
            assert made.shadow.mirrors == {}


@contextmanager
def nothing_asked(provider: Counting) -> Generator[None]:
    """Fails when the provider is asked."""
    before = len(provider.log)
    yield
    assert len(provider.log) == before


async def test_how_many_are_to_be_mirrored_is_shown_as_soon_as_calls_are(
    tmp_path: Path, provider: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that were made on the word of it were not mirrored: it was still read what had been before a restart."""
    reading, go = asyncio.Event(), asyncio.Event()

    async def earlier(sender: ReleaseSender) -> list[Span]:
        reading.set()
        await go.wait()
        return []

    monkeypatch.setattr(ReleaseSender, "earlier_requests", earlier)
    async with bench(tmp_path, provider) as rig:
        job, progress = ShadowJob(rig.context), JobProgress("shadow")
        working = asyncio.ensure_future(job(await rig.release(shadow={"calls": 3}), progress))
        await reading.wait()
        assert (job.mirrors, progress.total) == ({}, 0)
        go.set()
        while not job.mirrors:  # noqa: ASYNC110 -- it takes a few turns of this loop
            await asyncio.sleep(0)
        assert progress.total == 3
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_mirror_has_the_headers_of_its_call_but_none_that_bind_it_to_it(offers: Offers) -> None:
    offers.offer(*offers.record())
    (span,) = await offers.spans(1)
    (seen,) = offers.rig.provider.log
    assert seen.header("authorization") == "Bearer sk-agent"
    assert seen.header("idempotency-key") is None
    assert seen.header("traceparent") is None
    assert b"sk-agent" not in repr(offers.rig.exchange(span)).encode()
    assert json.loads(seen.body) == request_of(CHAT, NEW, "Hello")


async def test_a_rollout_on_a_candidate_is_not_mirrored(offers: Offers, provider: Counting) -> None:
    with nothing_asked(provider):
        offers.offer(*offers.record(), version="v2", arm="candidate", release="travel-1")
        record, found = offers.record()
        found.resources = ["other"]
        offers.offer(record, found)
    offers.offer(*offers.record())
    assert len(await offers.spans(1)) == 1


@pytest.mark.parametrize("changed", [False, True], ids=["", "of a call that is changed on its way"])
async def test_what_the_provider_would_run_itself_is_left_out(
    offers: Offers, provider: Counting, changed: bool
) -> None:
    record, found = offers.record(web_search_options={"size": "low"})
    if changed:
        record.convert = lambda body: body
    offers.offer(record, found)
    offers.offer(*offers.record())
    await offers.spans(1)
    assert len(provider.log) == 1
    (mirror,) = offers.shadow.mirrors.values()
    assert mirror.evidence()["left_out"] == {"the provider would act by itself (web_search_options)": 1}


async def test_it_is_over_when_enough_calls_were_mirrored(offers: Offers, provider: Counting) -> None:
    for number in range(3):
        offers.offer(*offers.record(f"r{number}"))
        await offers.spans(number + 1)
    report = await offers.job
    assert report.ok
    assert offers.progress.done == offers.progress.total == 3
    with nothing_asked(provider):
        offers.offer(*offers.record())


async def test_a_share_of_calls_is_mirrored(
    tmp_path: Path, provider: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path, provider) as rig:
        monkeypatch.setattr(Shadow, "concurrency", 1000)
        offers = await mirroring(rig, share=0.25, calls=1000)
        for number in range(200):
            offers.offer(*offers.record(f"r{number}"))
        (mirror,) = offers.shadow.mirrors.values()
        started = len(mirror.tasks)
        assert 30 < started < 70
        offers.job.cancel()
        await asyncio.gather(offers.job, return_exceptions=True)
        assert not mirror.tasks


async def test_a_verifier_that_fails_ends_the_stage_with_its_reason(
    tmp_path: Path, provider: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shadow_verifier.py").write_text("def judge(recorded, answered):\n    return 'yes'\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    async with bench(tmp_path, provider) as rig:
        offers = await mirroring(rig, judge="shadow_verifier:judge")
        offers.offer(*offers.record())
        report = await offers.job
        assert not report.ok
        assert "returned 'yes'" in report.why
