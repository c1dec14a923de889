"""The API of training runs against a real gateway: what a trainer says, what a reader gets, and `kill -9` between."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fakes.experiment import prompt
from fakes.local import Local, locally
from fakes.process import Gateway
from fakes.shell import Shell
from fakes.waiting import until

from penstock.gateway.client import connection
from penstock.gateway.client import resources as runs_client
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.run import (
    NewRun,
    Point,
    Run,
    RunChange,
    RunEnd,
    RunEvent,
    RunHead,
    VersionReference,
    status_at,
)

NAN, INF = float("nan"), float("inf")


def at(step: int, **values: float) -> Point:
    return Point(step=step, time_ns=1000 + step, values=dict(values))


def points(*given: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    return {"points": [{"step": step, "values": values} for step, values in given]}


async def test_a_run_from_its_start_to_its_end(client: Client) -> None:
    await client.add_version("policy-prompt", prompt("Be kind."))
    new = NewRun(id="grpo-7", kind="grpo", name="toy", config={"lr": 1e-6, "tags": ["a"]}, steps=40, lease_s=60)
    made = await client.start_run(new)
    assert await client.start_run(new) == made
    assert (made.status, made.config, made.step, made.metrics) == ("running", {"lr": 1e-6, "tags": ["a"]}, None, [])
    with pytest.raises(ClientError, match="there is a run 'grpo-7' with another config; choose another id"):
        await client.start_run(new.model_copy(update={"config": {"lr": 2e-6}}))
    points = [at(0, reward=0.25, kl=NAN), at(1, reward=0.5, kl=INF), at(2, kl=0.125)]
    head = await client.add_points("grpo-7", points)
    assert (head.step, head.metrics) == (2, ["reward", "kl"])
    again = await client.add_points("grpo-7", points)
    assert again.model_copy(update={"last_seen_ns": head.last_seen_ns}) == head
    kept = [point async for point in client.points("grpo-7")]
    assert [point.model_dump() for point in kept] == [
        {"step": 0, "time_ns": 1000, "values": {"reward": 0.25, "kl": None}},
        {"step": 1, "time_ns": 1001, "values": {"reward": 0.5, "kl": None}},
        {"step": 2, "time_ns": 1002, "values": {"kl": 0.125}},
    ]
    reward, kl = await client.curves("grpo-7")
    assert (reward.exact, reward.first_step, reward.mean, reward.last) == (True, [0, 1], [0.25, 0.5], 0.5)
    assert (kl.nulls, kl.count, kl.mean) == (2, 3, [None, None, 0.125])
    event = RunEvent(time_ns=5, step=2, level="warning", text="dropped 3 groups")
    assert [await client.add_run_events("grpo-7", [event]) for _ in range(2)] == [1, 0]
    said = RunChange(message="half way", made=[VersionReference(name="policy-prompt", version="v1")])
    assert (await client.change_run("grpo-7", said)).made == (await client.change_run("grpo-7", said)).made == said.made
    with pytest.raises(ClientError, match="made: there is no policy-prompt@v9; register it first"):
        await client.change_run("grpo-7", RunChange(made=[VersionReference(name="policy-prompt", version="v9")]))
    ended = await client.finish_run("grpo-7", RunEnd(status="succeeded"))
    assert (ended.status, ended.message) == ("succeeded", "half way")
    assert ended.ended_ns is not None
    found = await client.run("grpo-7")
    assert found == Run(**dict(ended), config=new.config)
    assert [event async for event in client.run_events("grpo-7")] == [event]


async def test_curves_are_cut_out_and_thinned(client: Client) -> None:
    await client.start_run(NewRun(id="r", kind="sft"))
    await client.add_points("r", [at(step, loss=float(step), other=1.0) for step in range(100)])
    (loss,) = await client.curves("r", ["lo*"], since_step=10, until_step=89, max_points=8)
    assert (loss.metric, loss.count, loss.exact) == ("loss", 80, False)
    assert loss.first_step == list(range(10, 90, 10))
    assert loss.low == loss.first_step
    assert loss.high == loss.last_step == list(range(19, 99, 10))
    assert loss.mean == [step + 4.5 for step in range(10, 90, 10)]
    (nothing,) = await client.curves("r", ["loss"], since_step=500)
    assert (nothing.count, nothing.exact, nothing.last, nothing.first_step, nothing.mean) == (0, True, None, [], [])
    with pytest.raises(ClientError, match="run 'r' has no metric 'reward'") as raised:
        await client.curves("r", ["loss", "reward"])
    assert raised.value.status == 404


async def test_lists_turn_their_pages(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate(("grpo", "sft", "grpo", "dpo", "grpo")):
        await client.start_run(NewRun(id=f"r{number}", kind=kind))
    await client.finish_run("r2", RunEnd(status="stopped"))
    for module in (connection, runs_client):
        monkeypatch.setattr(module, "PAGE", 2)
    assert [run.id async for run in client.runs()] == ["r4", "r3", "r2", "r1", "r0"]
    assert [run.id async for run in client.runs(limit=3)] == ["r4", "r3", "r2"]
    assert [run.id async for run in client.runs(kind="grpo")] == ["r4", "r2", "r0"]
    assert [run.id async for run in client.runs(kind="grpo", status="running")] == ["r4", "r0"]
    assert (await client.start_run(NewRun(kind="grpo"))).id == "grpo-1"
    assert (await client.start_run(NewRun(kind="grpo"))).id == "grpo-2"
    await client.add_points("r0", [at(step, loss=step) for step in range(5)])
    assert [point.step async for point in client.points("r0", since_step=1)] == [1, 2, 3, 4]
    await client.add_run_events("r0", [RunEvent(time_ns=n, text=f"{n}") for n in range(5)])
    assert [event.text async for event in client.run_events("r0")] == ["4", "3", "2", "1", "0"]
    assert [event.text async for event in client.run_events("r0", limit=3)] == ["4", "3", "2"]


async def test_what_changes_is_told(client: Client) -> None:
    since = (await client.stats(spans=0)).cursor
    await client.start_run(NewRun(id="r", kind="apo"))
    await client.add_points("r", [at(0, loss=1)])
    await client.add_run_events("r", [RunEvent(text="hello")])
    await client.finish_run("r", RunEnd(status="failed"))
    page = await client.change_page(since)
    assert [(change.kind, change.name) for change in page.changes] == [("run", "r")] * 4


def test_a_run_falls_silent_when_it_is_read() -> None:
    run = RunHead(id="r", kind="sft", last_seen_ns=10**9, lease_s=2)
    assert [status_at(run, second * 10**9) for second in (1, 3, 4)] == ["running", "running", "silent"]
    assert status_at(run.model_copy(update={"status": "stopped"}), 10**18) == "stopped"


async def test_a_silent_run_speaks_again(client: Client) -> None:
    await client.start_run(NewRun(id="r", kind="sft", lease_s=1))

    async def is_silent() -> bool:
        return (await client.run("r")).status == "silent"

    await until(is_silent)
    assert [run.id async for run in client.runs(status="silent")] == ["r"]
    assert (await client.add_points("r", [])).status == "running"


R, METRICS = "/api/runs", "/api/runs/r/metrics"
WRONG: list[tuple[str, Any, int, str]] = [
    (R, {"kind": "ppo"}, 400, "kind: 'ppo' is not 'grpo', 'sft', 'dpo', 'apo' or 'custom'"),
    (R, {"kind": "sft", "id": "a b"}, 400, "id: 'a b' is not an id"),
    (R, {"kind": "sft", "step": 3}, 400, "did you mean 'steps'?"),
    (R, {"kind": "sft", "config": "x" * 262_143}, 400, "config: 262,145 bytes of JSON; at most 262,144"),
    (f"{R}/none/metrics", {}, 404, "there is no run 'none'; `penstock runs list`"),
    (f"{R}/none/finish", {"status": "failed"}, 404, "there is no run 'none'"),
    (f"{R}/r/finish", {"status": "silent"}, 400, "status: 'silent' is not"),
    (f"{R}/a%20b/finish", {"status": "failed"}, 400, "run: 'a b' is not an id"),
    (METRICS, points((-1, {"a": 1})), 400, "points.0.step: -1 is not"),
    (METRICS, points((1, {})), 400, "points.0.values: it has 0 items, not 1 or more"),
    (METRICS, points((1, {"a": "x"})), 400, "points.0.values.a: 'x' is not a number"),
    (METRICS, points((1, {"a b": 1})), 400, "points.0.values.a b"),
    (METRICS, points(*[(1, {"a": 1})] * 10_001), 400, "it has 10,001 items, not 10,000 or less"),
    (METRICS, points(*[(1, dict.fromkeys(map(str, range(500)), 1))] * 41), 400, "20,500 values; at most 20,000"),
    (METRICS, {"since_step": 1, "resumed": 0}, 400, "resumed: the first resume is 1"),
    (f"{R}/r/events", {"events": [{"text": ""}]}, 400, "events.0.text: '' is not text of 1 character or more"),
    (f"{R}/r/events", {"events": [{"text": "x", "level": "fatal"}]}, 400, "events.0.level: 'fatal' is not 'info'"),
]


async def test_what_is_wrong_is_said(client: Client, local: Local, http: aiohttp.ClientSession) -> None:
    await client.start_run(NewRun(id="r", kind="sft"))
    for path, body, status, said in WRONG:
        async with http.post(local.url + path, json=body) as response:
            found = (await response.json())["error"]["message"]
            assert (response.status, said in found) == (status, True), (path, found)
    for query, said in (("cursor=x", "cursor is not a cursor"), ("status=lost", "status: 'lost' is not")):
        async with http.get(f"{local.url}/api/runs?{query}") as response:
            assert said in (await response.json())["error"]["message"]
    async with http.get(f"{local.url}/api/runs/r/events?cursor=WyJydW5zIiwgM10") as response:
        assert "cursor is a cursor of another list" in (await response.json())["error"]["message"]
    await client.add_points("r", [Point(step=0, values={f"m{n}": 1.0 for n in range(100)})])
    with pytest.raises(ClientError, match="100 metrics of up to 10,000 points; ask for 500,000 at most"):
        await client.curves("r", max_points=10_000)


async def test_numbers_that_json_does_not_know_are_null(
    client: Client, local: Local, http: aiohttp.ClientSession
) -> None:
    await client.start_run(NewRun(id="r", kind="sft"))
    body = json.dumps({"points": [{"step": 0, "values": {"a": NAN, "b": INF, "c": None, "d": 1e308}}]})
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{local.url}/api/runs/r/metrics", data=body, headers=headers) as response:
        assert response.status == 200
    (point,) = [point async for point in client.points("r")]
    assert point.values == {"a": None, "b": None, "c": None, "d": 1e308}


async def test_the_admin_key_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", "a long admin key")
    async with (
        locally(tmp_path) as made,
        Client(made.url, "") as stranger,
        Client(made.url, "a long admin key") as owner,
    ):
        for step in (stranger.start_run(NewRun(kind="sft")), stranger.run("r")):
            with pytest.raises(ClientError, match="the admin key is missing"):
                await step
        assert (await owner.start_run(NewRun(kind="sft"))).id == "sft-1"


# -- kill -9 -----------------------------------------------------------------------------------------------------------

LIVES, STEPS = 3, 20


async def test_what_was_answered_survives_kill_9_and_nothing_is_doubled(gateway: Gateway) -> None:
    """A trainer sends step after step and events with them; the gateway is killed under it, started again, and the
    trainer sends again what was not answered. In every second life the trainer dies too, and goes five steps back."""
    step, told, resumed, port = 0, 0, 0, gateway.port
    since: int | None = None
    async with Client(gateway.url) as client:
        await client.start_run(NewRun(id="r", kind="grpo"))
        for life in range(LIVES):
            last, killing, back = (life + 1) * STEPS, None, False
            while step < last:
                if step == last - 10 and killing is None:
                    # It dies while the next requests are on their way.
                    killing = asyncio.ensure_future(gateway.kill())
                point = Point(step=step, time_ns=step, values={"reward": step + life / 10, "kl": -step})
                try:
                    head = await client.add_points("r", [point], since_step=since, resumed=resumed)
                    told += await client.add_run_events("r", [RunEvent(time_ns=step, step=step, text=f"step {step}")])
                except ClientError:
                    assert killing is not None
                    await killing
                    if not back:
                        await gateway.start(port)
                    back = True
                    continue
                assert head.step == step
                since, step = None, step + 1
            assert back
            if life % 2:
                step, resumed, since = step - 5, resumed + 1, step - 5
        if since is not None:
            await client.add_points("r", [], since_step=since, resumed=resumed)
        points = [point async for point in client.points("r")]
        assert [point.step for point in points] == list(range(step))
        assert all(point.values["kl"] == -point.step for point in points)
        found = [event.text async for event in client.run_events("r")]
        assert sorted(found) == sorted([*(f"step {n}" for n in range(LIVES * STEPS)), *resumes(found)])
        assert len(resumes(found)) == resumed
    checked = await Shell(gateway.url, gateway.data).run("check", "--data", str(gateway.data))
    assert checked.code == 0, checked.text


def resumes(events: list[str]) -> list[str]:
    return [text for text in events if text.startswith("resumed")]
