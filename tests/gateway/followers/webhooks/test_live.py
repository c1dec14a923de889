"""Webhooks of a real gateway, to a real receiver: signed, in order, at least once, recorded, and nothing secret."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import aiohttp
import pytest
from conftest import StartGateway
from fakes.experiment import CANDIDATE, STABLE, policy, prompt
from fakes.hook import SECRET, Failing, Hook, documented, hooked
from fakes.local import Local, locally
from fakes.mistakes import tells
from fakes.ports import steady_ports
from fakes.shell import Shell
from fakes.waiting import until, when

from penstock.console.commands.check import examine
from penstock.gateway.client.client import Client
from penstock.gateway.client.sync import SyncClient
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.release import NewRelease, Release, WebhookView

ENV = {"PAGER_SECRET": SECRET}
OTHER = "whsec_b3RoZXItc2VjcmV0LW9mLWEtcmVjZWl2ZXItaW4tdGVzdHM="


def configured(*hooks: Hook, events: str = "", env: str = "PAGER_SECRET") -> str:
    """Configuration text: `pager`, `pager2` and so on."""
    names = ["pager", *(f"pager{number}" for number in range(2, len(hooks) + 1))]
    return "".join(
        f'[[webhook]]\nname = "{name}"\nurl = "{hook.url}"\nsecret_env = "{env}"\n{events}\n'
        for name, hook in zip(names, hooks, strict=True)
    )


@pytest.fixture
async def other() -> AsyncGenerator[Hook]:
    async with hooked() as made:
        yield made


async def start(client: Client, resource: str = "travel") -> Release:
    if resource not in [one.name for one in await client.resources()]:
        await client.add_version(resource, prompt(STABLE, sent=resource == "travel"))
        await client.add_version(resource, prompt(CANDIDATE))
    release = await client.start_release(resource, NewRelease(candidate="v2", policy=policy(0.5), author="ann"))
    return (await when(lambda: client.release(release.id), lambda view: view.release.stage == "canary")).release


async def decide(client: Client, release: str, *actions: str) -> None:
    for action in actions:
        await client.decide(release, action, ActionRequest(who="ann", why=f"it is time to {action}"))


async def view(client: Client, condition: Callable[[WebhookView], bool], name: str = "pager") -> WebhookView:
    async def look() -> WebhookView:
        return next(one for one in await client.webhooks() if one.name == name)

    return await when(look, condition, name)


async def metrics(gateway: Local) -> list[str]:
    async with aiohttp.ClientSession() as http, http.get(f"{gateway.url}/metrics") as answer:
        return (await answer.text()).splitlines()


@pytest.mark.slow
async def test_each_change_is_told_signed_in_order_and_written_down(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with locally(tmp_path, configured(hook)) as gateway, Client(gateway.url) as client:
        release = await start(client)
        await decide(client, release.id, "hold", "resume", "rollback")
        await hook.until(lambda: len(hook.taken) == 3)
        assert hook.types == ["release.start", "release.hold", "release.roll_back"]
        links = {entry.number: entry for entry in await client.audit(release.id)}
        verified = documented()
        for sent in hook.taken:
            data = verified(SECRET, sent.headers, sent.body)["data"]
            entry = links[data["number"]]
            assert (data["hash"], data["who"], data["why"]) == (entry.hash, entry.who, entry.why)
            assert (data["before"], data["after"], data["split"]) == (entry.before, entry.after, entry.split)
            assert (data["release"], data["stable"], data["candidate"]) == (release.id, "v1", "v2")
            assert sent.headers["content-type"] == "application/json"
            assert sent.path == "/hook?token=t0ken-of-the-receiver"
        assert len({sent.id for sent in hook.taken}) == 3
        seen = await view(client, lambda it: it.waiting == 0 and it.last is not None)
        assert seen.last is not None
        last = (seen.last.event, seen.last.status, seen.last.attempts, seen.last.answer)
        assert last == ("roll_back", "delivered", 1, 204)
        where = f"http://127.0.0.1:{hook.port}"
        assert (seen.url, seen.failing_ns, seen.error, seen.given_up) == (where, None, "", 0)
        with SyncClient(gateway.url) as waiting:
            told = [one.event for one in await asyncio.to_thread(waiting.deliveries, "pager")]
        assert told == ["roll_back", "hold", "start"]

        async def nothing_waits() -> bool:
            return 'penstock_webhook_waiting{webhook="pager"} 0.0' in await metrics(gateway)

        await until(nothing_waits)
        counted = 'penstock_webhook_deliveries_total{outcome="delivered",webhook="pager"} 3.0'
        assert counted in await metrics(gateway)
        shell = Shell(gateway.url, tmp_path)
        listed = await shell.run("webhook", "list")
        assert "roll back of travel-1" in listed.text
        assert "pager" in listed.text
        shown = await shell.run("webhook", "deliveries", "pager", "--json")
        assert [json.loads(line)["event"] for line in shown.text.splitlines()] == told
    assert examine(gateway.data)[1] == []
    files = [path.read_bytes() for path in gateway.data.rglob("*") if path.is_file()]
    written = b"".join([*files, caplog.text.encode(), listed.out, shown.out])
    for hidden in (SECRET, SECRET.removeprefix("whsec_"), "t0ken-of-the-receiver"):
        assert hidden.encode() not in written
    assert b"it is time to rollback" in written


@pytest.mark.smoke
async def test_what_was_not_told_when_the_gateway_was_killed_is_told_later(start_gateway: StartGateway) -> None:
    (port,) = steady_ports(1)
    async with hooked(port) as first:
        config = configured(first, events='events = ["hold", "resume", "abort"]')
    # Nobody listens now.
    gateway = await start_gateway(config, env=ENV)
    async with Client(gateway.url) as client:
        release = await start(client)
        await decide(client, release.id, "hold")
        failing = await view(client, lambda it: it.failing_ns is not None)
        assert failing.error.startswith("no connection: ")
        await decide(client, release.id, "resume")
        await gateway.kill()
        async with hooked(port) as hook:
            await gateway.start(gateway.port)
            await decide(client, release.id, "abort")
            await hook.until(lambda: len(hook.taken) == 3)
            assert hook.types == ["release.hold", "release.resume", "release.abort"]
            done = await view(client, lambda it: it.waiting == 0)
            assert (done.failing_ns, done.given_up) == (None, 0)
            first_told = next(one for one in await client.deliveries("pager") if one.event == "hold")
            assert first_told.attempts > 1
    assert sum(tells(line, "webhook pager", "hold of release travel-1") for line in gateway.log.splitlines()) == 1


async def test_an_acknowledged_message_that_was_not_written_down_comes_again_with_its_id(
    start_gateway: StartGateway, hook: Hook
) -> None:
    """The gateway dies while the receiver answers."""
    hook.hold = asyncio.Event()
    gateway = await start_gateway(configured(hook, events='events = ["start"]'), env=ENV)
    async with Client(gateway.url) as client:
        await start(client)
        await hook.until(lambda: len(hook.log) == 1)
        await gateway.kill()
        hook.hold.set()
        await gateway.start(gateway.port)
        await hook.until(lambda: len(hook.log) == 2)
        assert hook.log[0].id == hook.log[1].id
        assert hook.log[0].body == hook.log[1].body
        await view(client, lambda it: it.waiting == 0)


async def test_a_message_is_sent_again_until_it_is_taken_and_others_wait_for_it(hook: Hook, tmp_path: Path) -> None:
    hook.script = [Failing(500), Failing(302, {"Location": hook.url}), Failing(429, {"Retry-After": "3"})]
    async with locally(tmp_path, configured(hook)) as gateway, Client(gateway.url) as client:
        release = await start(client)
        await decide(client, release.id, "hold", "abort")
        await hook.until(lambda: len(hook.taken) == 3)
        assert hook.types == ["release.start", "release.hold", "release.abort"]
        assert len(hook.log) == 6
        assert len({sent.id for sent in hook.log[:4]}) == 1
        assert hook.log[3].at - hook.log[2].at >= 3.0
        done = await view(client, lambda it: it.waiting == 0)
        assert done.failing_ns is None
        told = {one.event: one for one in await client.deliveries("pager")}
        assert {event: one.attempts for event, one in told.items()} == {"start": 4, "hold": 1, "abort": 1}
        assert 'penstock_webhook_deliveries_total{outcome="failed",webhook="pager"} 3.0' in await metrics(gateway)
    verified = documented()
    for sent in hook.log:
        verified(SECRET, sent.headers, sent.body)


@pytest.mark.slow
async def test_a_receiver_that_is_gone_is_left_alone_until_it_takes_a_test(
    hook: Hook, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook.script = [Failing(410)]
    async with locally(tmp_path, configured(hook)) as gateway, Client(gateway.url) as client:
        shell = Shell(gateway.url, tmp_path)
        release = await start(client)
        gone = await view(client, lambda it: it.given_up == 1)
        assert gone.error == "410 Gone: it wants no more messages"
        await decide(client, release.id, "hold")
        await view(client, lambda it: it.given_up == 2)
        assert len(hook.log) == 1
        assert "410 Gone" in (await shell.run("webhook", "list")).text
        tried = await shell.run("webhook", "test", "pager")
        assert (tried.code, hook.types) == (0, ["webhook.test"])
        assert "answer 204" in tried.text
        assert documented()(SECRET, hook.log[1].headers, hook.log[1].body)["data"] == {"webhook": "pager"}
        await decide(client, release.id, "abort")
        await hook.until(lambda: hook.types == ["webhook.test", "release.abort"])
        hook.script = [Failing(500)]
        failed = await shell.run("webhook", "test", "pager")
        assert (failed.code, tells(failed.err, "pager", "500 Internal Server Error")) == (1, True), failed.err
        unknown = await shell.run("webhook", "test", "nobody")
        assert tells(unknown.err, "no webhook 'nobody'", "`[[webhook]]` in penstock.toml")
    assert tells(caplog.text, "not told of start of release travel-1", "given up: 410 Gone")


async def test_a_slow_receiver_holds_up_neither_others_nor_releases_nor_the_end(
    hook: Hook, other: Hook, tmp_path: Path
) -> None:
    hook.hold = asyncio.Event()
    async with locally(tmp_path, configured(hook, other)) as gateway, Client(gateway.url) as client:
        for resource in ("travel", "trains"):
            release = await start(client, resource)
            await decide(client, release.id, "hold", "promote")
        await other.until(lambda: len(other.taken) == 6)
        # What is told of one release waits for what was told before; another release does not. What is not answered
        # in time is sent again.
        await hook.until(lambda: {one.message["data"]["release"] for one in hook.log} == {"travel-1", "trains-1"})
        assert {one.message["type"] for one in hook.log} == {"release.start"}
        assert (await view(client, lambda it: it.waiting == 0, "pager2")).failing_ns is None
        assert (await client.webhooks())[0].waiting == 6
        for resource in ("travel", "trains"):
            told = [one.message["type"] for one in other.taken if one.message["data"]["resource"] == resource]
            assert told == ["release.start", "release.hold", "release.promote"]
    assert examine(gateway.data)[1] == []


async def test_a_webhook_that_comes_later_is_told_nothing_of_the_past(hook: Hook, other: Hook, tmp_path: Path) -> None:
    async with locally(tmp_path) as gateway, Client(gateway.url) as client:
        release = await start(client)
    async with locally(tmp_path, configured(hook)) as gateway, Client(gateway.url) as client:
        await decide(client, release.id, "hold")
        await hook.until(lambda: len(hook.taken) == 1)
    async with locally(tmp_path, configured(hook, other)) as gateway, Client(gateway.url) as client:
        await decide(client, release.id, "promote")
        await other.until(lambda: len(other.taken) == 1)
        await hook.until(lambda: "release.promote" in hook.types)
    # The first may have been stopped before it had written down that the hold was taken.
    assert list(dict.fromkeys(one.id for one in hook.taken))[1:] == [one.id for one in other.taken]
    assert other.types == ["release.promote"]


async def test_while_a_secret_is_changed_both_sign(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGER_SECRET", f"{SECRET} {OTHER}")
    async with locally(tmp_path, configured(hook)) as gateway, Client(gateway.url) as client:
        tried = await client.test_webhook("pager")
        assert (tried.answer, tried.error, tried.id) == (204, "", hook.log[0].id)
    verified = documented()
    for secret in (SECRET, OTHER):
        assert verified(secret, hook.log[0].headers, hook.log[0].body)["type"] == "webhook.test"
    with pytest.raises(ValueError, match="signature"):
        verified(SECRET, hook.log[0].headers, hook.log[0].body + b" ")
    late = hook.log[0].headers | {"webhook-timestamp": "1614265330"}
    with pytest.raises(ValueError, match="time"):
        verified(SECRET, late, hook.log[0].body)
