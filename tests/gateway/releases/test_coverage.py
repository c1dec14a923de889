"""Whom a prompt reaches: counted, told when it falls, and canaries of it are held. A real gateway, real calls."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import aiohttp
import pytest
from fakes.experiment import Traffic, faults, policy, prompt
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway
from fakes.provider import Provider
from fakes.releasing import Bench, bench, counting
from fakes.shell import Shell
from fakes.some import some
from fakes.waiting import until

from penstock.console.commands.check import examine
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.known_secrets import NO_SECRETS
from penstock.gateway.model.metrics import Metrics
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.resource import Coverage, LastMiss
from penstock.gateway.releases.catalog import Catalog
from penstock.gateway.releases.coverage import CallNote, CoverageCounter, CoverageMonitor, MissNote
from penstock.gateway.releases.operations import CoverageDelta, CoverageOperations
from penstock.gateway.releases.reader import ReleaseReader
from penstock.gateway.tape.retention import RetentionOperations
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.transaction import QueuedOperation
from penstock.gateway.work.operations import QueueOperations

FROZEN = "You are a travel agent of Acme Air. Today is 2026-11-22. Never refund a basic fare."
"""As discovery took it on one day, when all messages agreed on the date."""
NEXT_DAY = FROZEN.replace("22", "23")
CANDIDATE = "You are a careful travel agent of Acme Air. Ask before you book. Never refund a basic fare."


@pytest.fixture
async def traffic(gateway: Gateway, http: aiohttp.ClientSession, client: Client) -> Traffic:
    """Agents that send the frozen text."""
    await client.add_version("travel", prompt(FROZEN, sent=True))
    await client.add_version("travel", prompt(CANDIDATE))
    return Traffic(gateway.url, http, client, text=FROZEN)


async def calls(traffic: Traffic, prefix: str, count: int, text: str | None = None) -> None:
    """One call of each of so many rollouts."""
    for number in range(count):
        await traffic.call(f"{prefix}{number}", text)
    assert traffic.failures == []


async def reach(client: Client, condition: Callable[[Coverage], bool]) -> Coverage:
    """The coverage of the prompt as soon as a condition holds."""
    found: Coverage | None = None

    async def reached() -> bool:
        nonlocal found
        found = (await client.resource("travel")).coverage
        return found is not None and condition(found)

    await until(reached)
    assert found is not None
    return found


async def metrics(traffic: Traffic) -> set[str]:
    async with traffic.http.get(f"{traffic.url}/metrics") as answer:
        return set((await answer.text()).splitlines())


async def fell(resource: str, coverage: Coverage) -> None:
    raise AssertionError(resource)


def watched(made: Bench, fell: Callable[[str, Coverage], Awaitable[None]] = fell) -> CoverageMonitor:
    context = made.context
    return CoverageMonitor(context.pins, context.recorder, Metrics(), context.now_ns, fell, NO_SECRETS)


async def test_calls_that_match_and_miss_are_counted_with_why(traffic: Traffic, client: Client) -> None:
    assert (await client.resource("travel")).coverage is None
    await calls(traffic, "a", 3)
    await calls(traffic, "a", 2)
    await calls(traffic, "b", 2, NEXT_DAY)
    await calls(traffic, "c", 4, "You translate what users say into French, and say nothing else at all.")
    found = await reach(client, lambda it: it.matched + sum(it.missed.values()) == 7)
    assert (found.matched, found.missed, found.recent) == (5, {"miss": 2}, "+++--")
    last = some(found.last)
    assert (last.rollout, last.why) == ("b1", "miss")
    where = some(last.difference)
    assert (where.version, where.at) == ("v1", FROZEN.index("2026"))
    assert (where.found[:11], where.wanted[:11]) == ("2026-11-23.", "2026-11-22.")
    wanted = {
        'penstock_resource_calls_total{outcome="matched",resource="travel"} 5.0',
        'penstock_resource_calls_total{outcome="miss",resource="travel"} 2.0',
        'penstock_resource_coverage_fell{resource="travel"} 0.0',
    }

    async def are_shown() -> bool:
        return wanted <= await metrics(traffic)

    # They follow what is on the tape.
    await until(are_shown)


@pytest.mark.slow
async def test_a_canary_is_held_when_its_prompt_drifts_away(
    traffic: Traffic, client: Client, gateway: Gateway, shell: Shell
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    await calls(traffic, "day-", 20)
    await calls(traffic, "next-", 12, NEXT_DAY)
    view = await traffic.when(release.id, lambda view: view.release.stage == "held")
    # It is held with the eighth call that misses; the others are counted, too.
    _ = await reach(client, lambda it: it.matched + sum(it.missed.values()) == 32)
    assert view.release.reason.startswith("coverage: travel: ")
    assert view.release.held_in == "canary"
    coverage = view.coverage["travel"]
    assert coverage.fell_ns is not None
    assert "95% or more did before" in coverage.fell
    (held,) = [entry for entry in await client.audit(release.id) if entry.action == "hold"]
    assert (held.who, held.assignment, held.evidence["uncovered"]) == ("gateway", None, "travel")
    assert await faults(client, release.id) == []
    status = await shell.run("release", "status", release.id)
    assert tells(status.text, "travel: 20 of 32 calls matched", "12 no registered text")
    assert "at character 45 '2026-11-23. Never refund" in status.text
    listed = await shell.run("resource", "list")
    assert "62.5% of 32, fell" in listed.text
    assert "the coverage of travel fell" in gateway.log
    assert 'penstock_resource_coverage_fell{resource="travel"} 1.0' in await metrics(traffic)


async def test_a_person_may_go_on_and_a_text_that_matches_again_ends_the_alarm(
    traffic: Traffic, client: Client, gateway: Gateway
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    await calls(traffic, "day-", 10)
    await calls(traffic, "next-", 8, NEXT_DAY)
    await traffic.when(release.id, lambda view: view.release.stage == "held")
    await client.decide(release.id, "resume", ActionRequest(who="ann"))
    await gateway.restart()
    await calls(traffic, "more-", 4, NEXT_DAY)
    await reach(client, lambda it: sum(it.missed.values()) == 12)
    assert (await client.release(release.id)).release.stage == "canary"
    await client.add_version("travel", prompt(NEXT_DAY, sent=True))
    await calls(traffic, "new-", 6, NEXT_DAY)
    found = await reach(client, lambda it: it.matched == 6)
    assert (found.missed, found.fell_ns) == ({}, None)
    await gateway.terminate()
    assert examine(gateway.data)[1] == []


BODY = json.dumps({"model": "m", "messages": [{"role": "system", "content": FROZEN}]}).encode()
UNREAD: dict[str, tuple[bytes, dict[str, str]]] = {
    "encoding": (gzip.compress(BODY), {"content-encoding": "made-up"}),
    "utf8": (BODY.replace(b"Acme", b"Acm\xe9"), {}),
    "depth": (BODY[:-1] + b', "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    "shape": (b'{"model": "m", "messages": "hello"}', {}),
    "json": (b"model=m&messages=hello", {}),
}


@pytest.mark.slow
async def test_requests_that_cannot_be_read_pass_and_are_counted_under_their_reason(
    traffic: Traffic, provider: Provider, gateway: Gateway, http: aiohttp.ClientSession, shell: Shell
) -> None:
    """Also for the prompt that their rollout was given before."""
    await traffic.call("r1")
    for why, (body, headers) in UNREAD.items():
        url = f"{gateway.url}/rollout/r1/v1/chat/completions"
        async with http.post(url, data=body, headers={"content-type": "application/json"} | headers) as answer:
            await answer.read()
        assert provider.log[-1].body == body
        assert f'penstock_prompt_misses_total{{why="{why}"}} 1.0' in await metrics(traffic)
    found = await reach(traffic.client, lambda it: len(it.missed) == len(UNREAD))
    assert (found.matched, found.missed) == (1, dict.fromkeys(UNREAD, 1))
    assert found.recent == "+"
    assert (await traffic.client.resource_list()).unread == dict.fromkeys(UNREAD, 1)
    listed = await shell.run("resource", "list")
    assert tells(listed.text, "5 requests passed unread", "1 content encoding, 1 no UTF-8,")


async def test_a_packed_request_is_read_and_rewritten(
    traffic: Traffic, provider: Provider, gateway: Gateway, http: aiohttp.ClientSession
) -> None:
    release = await traffic.start("travel", "v2", policy(0.5))
    await traffic.client.decide(release.id, "promote", ActionRequest(who="ann"))
    url = f"{gateway.url}/rollout/r1/v1/chat/completions"
    async with http.post(url, data=gzip.compress(BODY), headers={"content-encoding": "gzip"}) as answer:
        assert answer.status == 200
    assert json.loads(provider.log[-1].body)["messages"][0]["content"] == CANDIDATE


async def test_what_is_being_added_up_when_the_gateway_stops_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what calls had meanwhile."""
    loop, began, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    class Slow(CoverageCounter):
        def count(self, calls: Iterable[CallNote], catalog: Catalog, now: int) -> dict[str, CoverageDelta]:
            loop.call_soon_threadsafe(began.set)
            assert go.wait(PATIENCE)
            return super().count(calls, catalog, now)

    monkeypatch.setattr("penstock.gateway.releases.coverage.CoverageCounter", Slow)

    async with counting() as provider, bench(tmp_path, provider) as made:
        context, figures = made.context, Metrics()
        watch = CoverageMonitor(context.pins, context.recorder, figures, context.now_ns, fell, NO_SECRETS)
        await watch.start()
        context.pins.notes.add("r1", ("travel",), ())
        async with asyncio.timeout(PATIENCE):
            await began.wait()
            stopping = asyncio.ensure_future(watch.stop())
            await asyncio.sleep(0)
            context.pins.notes.add("r2", ("travel",), ())
            go.set()
            await stopping
        assert ReleaseReader(context.tape).coverage(["travel"])["travel"].matched == 2
        assert figures.resource_calls["travel", "matched"] == 2


async def test_what_cannot_be_added_up_does_not_keep_a_gateway_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(CoverageCounter):
        def count(self, calls: Iterable[CallNote], catalog: Catalog, now: int) -> dict[str, CoverageDelta]:
            raise TapeError("cannot read the tape")

    monkeypatch.setattr("penstock.gateway.releases.coverage.CoverageCounter", Failing)

    async with counting() as provider, bench(tmp_path, provider) as made:
        watch = watched(made)
        made.context.pins.notes.add("r1", ("travel",), ())
        await watch.stop()
    assert "could not be added up" in caplog.text


async def test_a_canary_is_held_although_that_failed_at_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The tape may be full just then; and the resource that comes next is not kept waiting by it."""
    told, held = list[str](), list[str]()

    async def fell(resource: str, coverage: Coverage) -> None:
        told.append(resource)
        if resource == "travel" and told.count(resource) < 3:
            raise TapeError("the disk is full")
        held.append(resource)

    async with counting() as provider, bench(tmp_path, provider) as made:
        await made.add("other", prompt(CANDIDATE))
        context, both = made.context, ("travel", "other")
        watch = watched(made, fell)
        for number in range(20):
            context.pins.notes.add(f"day-{number}", both, ())
        for number in range(12):
            missed = [MissNote("miss", name) for name in both]
            context.pins.notes.calls.append(CallNote(f"next-{number}", (), missed))
        await watch.start()
        await until(lambda: held == ["other", "travel"])
        await watch.stop()
        assert told.count("other") == 1
    assert len([one for one in caplog.records if "not held yet" in one.message]) == 1


async def test_a_coverage_that_cannot_be_told_stops_no_gateway(tmp_path: Path) -> None:
    async def fell(resource: str, coverage: Coverage) -> None:
        raise TapeError("the disk is full")

    async with counting() as provider, bench(tmp_path, provider) as made:
        watch = watched(made, fell)
        for number in range(32):
            missed = [] if number < 20 else [MissNote("miss", "travel")]
            made.context.pins.notes.calls.append(CallNote(f"r{number}", () if missed else ("travel",), missed))
        await watch.stop()


@pytest.fixture
def shell(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return Shell(gateway.url, tmp_path_factory.mktemp("shell"))


def test_a_miss_of_a_forgotten_rollout_does_not_come_back(tmp_path: Path) -> None:
    misses = {name: CoverageDelta(last=LastMiss(rollout=name, at_ns=1, why="miss")) for name in ("gone", "kept")}
    with open_store(tmp_path) as store:
        store.write([QueuedOperation(lambda tape: [tape.put("stable", name.encode(), b"v1") for name in misses])])
        specs = [(name, RolloutSpec()) for name in misses]
        store.write([QueuedOperation(lambda tape: QueueOperations(tape).enqueue(specs, 1))])
        store.write([QueuedOperation(lambda tape: [QueueOperations(tape).cancel(name, None, 2) for name in misses])])
        store.write(
            [QueuedOperation(lambda tape: RetentionOperations(tape).forget("gone", ActionRequest(who="ann"), 3))]
        )
        # What calls had is added up a second after they were made.
        adding = QueuedOperation(lambda tape: CoverageOperations(tape).add(misses, 4))
        store.write([adding])
    assert adding.result is not None
    assert {name: coverage.last and coverage.last.rollout for name, (coverage, _) in adding.result.items()} == {
        "gone": None, "kept": "kept",
    }  # fmt: skip
