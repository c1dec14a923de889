"""Who changed what, asked of a real gateway process: each change is there once, with who and why, also after a kill."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from conftest import StartGateway
from fakes.experiment import policy
from fakes.local import Local, locally
from fakes.process import upstream
from fakes.shell import Shell

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.client.sync import SyncClient
from penstock.gateway.model.answers import AuditEntry
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import ClaimRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease
from penstock.gateway.model.resource import NewVersion
from penstock.gateway.tape.store.environment import DATABASES

UPSTREAM = upstream("up", "http://127.0.0.1:9/v1", "openai")
ANN = ActionRequest(who="ann", why="a test")


async def log_of(client: Client) -> list[AuditEntry]:
    return [entry async for entry in client.audit_log()]


def told(entries: list[AuditEntry]) -> list[tuple[str, str, str, str]]:
    return [(one.who, one.action, one.target, one.why) for one in reversed(entries)]


async def test_each_change_is_kept_with_who_and_why(start_gateway: StartGateway) -> None:
    gateway = await start_gateway(UPSTREAM)
    async with Client(gateway.url) as client:
        _ = await client.enqueue([RolloutSpec(id="r1"), RolloutSpec(id="r2")])
        _ = await client.cancel("r1", ANN)
        _ = await client.requeue("r1", ActionRequest(who="bob"))
        _ = await client.cancel("r2")
        for state in ("paused", "draining", "open"):
            _ = await client.set_queue(state, ActionRequest(who="ann", why=state))
        assert (await client.pause_upstream("up", 30.0, ANN)).paused
        # A trainer renews its hold all the time.
        assert (await client.pause_upstream("up", 30.0, ANN)).bound_s == 30.0
        assert [(one.name, one.paused) for one in await client.upstreams() if one.paused] == [("up", True)]
        assert not (await client.open_upstream("up", ActionRequest(why="done"))).paused
        _ = await client.open_upstream("up", ANN)
        # What workers do is not a change that somebody asked for.
        assert len((await client.claim(ClaimRequest(worker="w"))).claims) == 1
        kept = await log_of(client)
        assert told(kept) == [
            ("ann", "cancel_rollout", "r1", "a test"),
            ("bob", "requeue_rollout", "r1", ""),
            ("api", "cancel_rollout", "r2", ""),
            ("ann", "pause_queue", "", "paused"),
            ("ann", "drain_queue", "", "draining"),
            ("ann", "open_queue", "", "open"),
            ("ann", "pause_upstream", "up", "a test"),
            ("api", "open_upstream", "up", "done"),
        ]
        assert [one.number for one in kept] == list(range(8, 0, -1))
        assert [one.at_ns for one in kept] == sorted((one.at_ns for one in kept), reverse=True)
        _ = await gateway.kill()
        await gateway.start(gateway.port)
        assert await log_of(client) == kept
        _ = await client.cancel("r1", ANN)
        assert [one.number for one in await log_of(client)] == list(range(9, 0, -1))
        assert [one.number async for one in client.audit_log(3)] == [9, 8, 7]
    with SyncClient(gateway.url) as waiting:
        assert [one.number for one in waiting.audit_log(2)] == [9, 8]
        assert [one.paused for one in waiting.upstreams() if one.name == "up"] == [False]


async def test_what_was_refused_is_not_in_it(client: Client) -> None:
    for step in (
        client.cancel("nobody", ANN),
        client.requeue("nobody", ANN),
        client.pause_upstream("nowhere", 1.0, ANN),
        client.open_upstream("nowhere", ANN),
    ):
        with pytest.raises(ClientError, match="there is no"):
            _ = await step
    for path, body in (
        ("/api/queue", '{"state":"paused","who":"gateway"}'),
        ("/api/queue", '{"state":"paused","whom":"ann"}'),
        ("/api/upstreams/fake-openai/pause", '{"bound_s":-1,"who":"ann"}'),
    ):
        with pytest.raises(ClientError) as refused:
            _ = await client.read("POST", path, body=body)
        assert refused.value.status == 400
    for params in ({"limit": 0}, {"limit": 1001}, {"cursor": "x"}, {"who": "ann"}):
        with pytest.raises(ClientError) as refused:
            _ = await client.read("GET", "/api/audit", params)
        assert refused.value.status == 400
    assert await log_of(client) == []


async def test_pages_of_it_go_on(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.client.connection.PAGE", 2)
    for n in range(5):
        _ = await client.set_queue("paused" if n % 2 else "draining", ActionRequest(why=str(n)))
    assert [one.why for one in await log_of(client)] == ["4", "3", "2", "1", "0"]


@pytest.mark.slow
async def test_the_command_lists_it(local: Local) -> None:
    shell = Shell(local.url, local.data)
    assert (await shell.run("audit")).text.strip() in ("", "Nobody has changed anything yet.")
    assert (await shell.run("pause", "--who", "ann", "--why", "new weights")).code == 0
    assert (await shell.run("resume", "--who", "bob")).code == 0
    newest, oldest = (await shell.run("audit")).text.splitlines()[1:]
    assert (newest.split()[0], oldest.split()[0]) == ("2", "1")
    assert all(word in oldest for word in ("ann", "pause queue", "new weights"))
    rows = (await shell.run("audit", "--json", "--limit", "1")).text.splitlines()
    assert [AuditEntry.model_validate_json(row).who for row in rows] == ["bob"]


async def checked(data: Path) -> tuple[int, str]:
    done = await Shell("http://127.0.0.1:9", data).run("check", "--data", str(data))
    return done.code, done.text + done.err


@pytest.mark.slow
async def test_a_check_reads_it(tmp_path: Path) -> None:
    async with locally(tmp_path) as made, Client(made.url) as client:
        for state in ("paused", "draining", "open"):
            _ = await client.set_queue(state, ANN)
        assert (await checked(made.data))[0] == 0
    lose(made.data, 2)
    code, said = await checked(made.data)
    assert (code, "change 2 is missing before it" in said) == (1, True)


def lose(data: Path, number: int) -> None:
    with lmdb.open(str(data / "tape"), max_dbs=len(DATABASES)) as env:
        database = env.open_db(b"audit_log", create=False)
        with env.begin(db=database, write=True) as txn:
            assert txn.delete(number.to_bytes(8))


@pytest.mark.slow
async def test_decisions_about_releases_stand_in_it(client: Client, local: Local) -> None:
    """They are read from the release's own chain."""
    for version in ("v1", "v2"):
        text = {"text": f"You plan journeys for customers. {version}"}
        _ = await client.add_version("travel", NewVersion(kind="prompt", version=version, content=text))
    asked = NewRelease(candidate="v2", policy=policy(0.5), author="ann", why="better")
    release = (await client.start_release("travel", asked)).id
    _ = await client.decide(release, "abort", ActionRequest(who="bob", why="worse"))
    chain = await client.audit(release)
    by_people = [(one.who, f"{one.action}_release", release, one.why) for one in chain if one.who != "gateway"]
    assert told(await log_of(client)) == by_people
    assert [one[0] for one in by_people] == ["ann", "bob"]
    assert (await checked(local.data))[0] == 0
