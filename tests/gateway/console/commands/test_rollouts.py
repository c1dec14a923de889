"""The commands that give work, judge it and hand it on, as people run them, against a real gateway."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import aiohttp
import pytest
from fakes.local import Local
from fakes.mistakes import tells
from fakes.process import PATIENCE, Gateway, limit_files, running, upstreams
from fakes.provider import serving
from fakes.shell import Shell
from fakes.tape import Tape
from fakes.waiting import until

from penstock.console.main import main
from penstock.console.views.queue import RUN_THEM
from penstock.gateway.client.client import Client
from penstock.gateway.model.queue import (
    LONGEST_WAIT_S,
    Claim,
    ClaimRequest,
    Event,
    FinishRequest,
    HeartbeatRequest,
    HeldAttempt,
    RolloutSpec,
)
from penstock.gateway.model.rollout import AttemptStatus, WorkerUsage

TASKS = b'{"id": "q1", "question": "2+2?", "topic": "sums"}\n{"id": "q2", "question": "3*3?", "topic": "products"}\n'


@pytest.fixture(autouse=True)
def tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(TASKS)


def without_age(text: str) -> str:
    return re.sub(r", the oldest for [0-9]+ [sm]", "", text)


async def claimed(client: Client, worker: str = "w1") -> Claim:
    (claim,) = (await client.claim(ClaimRequest(worker=worker))).claims
    return claim


async def finished(client: Client, claim: Claim) -> None:
    _ = await client.finish(claim.rollout.id, claim.attempt.id, FinishRequest(worker="w1", status="succeeded"))


async def statuses(client: Client) -> dict[str, str]:
    return {rollout.id: str(rollout.status) async for rollout in client.rollouts()}


# --- giving work ---


@pytest.mark.slow
async def test_a_file_is_queued_once(shell: Shell, client: Client) -> None:
    options = ("--repeat", "2", "--group-by", "topic", "--priority", "-3", "--timeout", "10m", "--unresponsive", "90s",
               "--max-attempts", "4", "--retry-on", "failed,timeout", "--mode", "val",
               "--metadata", "from=tests", "--metadata", "x=y=z")  # fmt: skip
    first = await shell.run("enqueue", "tasks.jsonl", *options)
    assert (first.code, first.text) == (0, f"4 rollouts queued: q1.0 … q2.1. {RUN_THEM}\n")
    one = await client.rollout("q1.1")
    assert (one.input["question"], one.group, one.mode, one.priority) == ("2+2?", "sums", "val", -3)
    assert one.metadata == {"from": "tests", "x": "y=z"}
    assert (one.config.timeout_s, one.config.unresponsive_s, one.config.max_attempts) == (600, 90, 4)
    assert one.config.retry_on == ["failed", "timeout"]
    again = await shell.run("enqueue", "tasks.jsonl", *options, "--repeat", "3")
    assert again.code == 2
    again = await shell.run("enqueue", "-", *("3" if o == "2" else o for o in options), stdin=TASKS)
    assert tells(again.text, "2 rollouts queued", "4 were there already (4 queuing)")
    assert (await client.queue()).waiting == {"val": 6}


@pytest.mark.slow
async def test_the_same_names_for_other_tasks_are_refused(shell: Shell, client: Client) -> None:
    _ = (await shell.run("enqueue", "tasks.jsonl", "--json")).rows
    other = await shell.run("enqueue", "-", stdin=TASKS.replace(b"2+2", b"4+4"))
    assert (other.code, tells(other.err, "nothing was queued", "'q1.0'")) == (1, True), other.err
    assert other.err.endswith("; choose another\n")
    assert (await client.queue()).waiting == {"train": 2}


@pytest.mark.slow
async def test_tasks_may_be_repeated_later(shell: Shell, client: Client) -> None:
    _ = (await shell.run("enqueue", "tasks.jsonl", "--json")).rows
    more = await shell.run("enqueue", "tasks.jsonl", "--repeat", "3")
    said = f"4 rollouts queued; 2 were there already (2 queuing): q1.0 … q2.2. {RUN_THEM}\n"
    assert (more.err, more.text) == ("", said)
    commands = ("show q1", "spans q1", "reward q1 1", "requeue q1", "doctor q1", "forget q1", "hold q1", "hold q3")
    *by_task, none = await asyncio.gather(*(shell.run(*command.split()) for command in commands))
    assert {tells(done.err, "there is no rollout 'q1'; did you mean q1.0?") for done in by_task} == {True}
    assert tells(none.err, "there is no rollout 'q3'; `penstock rollouts` lists them")
    assert {rollout.group async for rollout in client.rollouts("rollout:q1.*")} == {"q1"}


@pytest.mark.slow
async def test_a_file_with_a_flaw_queues_nothing(shell: Shell, client: Client) -> None:
    flawed = await shell.run("enqueue", "-", "--group-by", "topic", stdin=TASKS + b'\n{"id": "q3"}\n{"id"\n')
    line = "line 4: topic: is missing; there are: id (and 1 more line)"
    assert (flawed.code, flawed.text, flawed.err) == (1, "", f"penstock: nothing was queued: -: {line}\n")
    assert await statuses(client) == {}


@pytest.mark.slow
async def test_thousands_are_queued_in_batches(shell: Shell, client: Client) -> None:
    tasks = b"\n".join(b'{"id": "t%d", "text": "%s"}' % (n, b"x" * 300) for n in range(1250))
    done = await shell.run("enqueue", "-", "--repeat", "2", stdin=tasks)
    assert (done.err, done.text) == ("", f"2,500 rollouts queued: t0.0 … t1249.1. {RUN_THEM}\n")
    assert (await client.queue()).waiting == {"train": 2500}
    first = (await client.claim(ClaimRequest(worker="w1", limit=3))).claims
    assert [claim.rollout.id for claim in first] == ["t0.0", "t0.1", "t1.0"]


# --- the queue ---


@pytest.mark.slow
async def test_the_queue_is_shown_paused_and_opened(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1"), RolloutSpec(id="r2", mode="val")])
    paused = await shell.run("pause")
    assert without_age(paused.text) == "Queue paused: 2 waiting (1 train, 1 val); 0 claimed.\n"
    assert (await client.claim(ClaimRequest(worker="w1"))).claims == []
    (opened,) = (await shell.run("resume", "--json")).rows
    assert (opened["state"], opened["waiting"]) == ("open", {"train": 1, "val": 1})
    _ = await claimed(client)
    assert (await shell.run("queue")).text.endswith("1 claimed.\n")
    assert "1 claimed.\n" in (await shell.run("stats")).text


@pytest.mark.slow
async def test_draining_waits_for_what_runs(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id=f"r{n}") for n in (1, 2, 3)])
    one, two = await claimed(client), await claimed(client)
    draining = await shell.start("drain")
    told = await client.claim(
        ClaimRequest(worker="w2", modes=["val"], wait_s=LONGEST_WAIT_S)
    )  # ends when the queue is drained
    assert told.queue == "draining"
    assert draining.stderr is not None
    waiting = await asyncio.wait_for(draining.stderr.readline(), PATIENCE)
    assert tells(waiting.decode(), "2 attempts", "`penstock workers`")
    await finished(client, one)
    ended = asyncio.ensure_future(shell.end_of(draining))
    await asyncio.sleep(0)
    assert not ended.done()
    await finished(client, two)
    out, err = await ended
    assert err == b""
    assert tells(out.decode(), "Queue draining", "1 waiting", "(1 train)", "0 claimed")


@pytest.mark.slow
async def test_workers_are_listed(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1")])
    claim = await claimed(client, "host-1")
    held = HeldAttempt(rollout="r1", attempt=claim.attempt.id, running=True)
    _ = await client.heartbeat("host-1", HeartbeatRequest(attempts=[held], figures=WorkerUsage(cpu_percent=50)))
    rows = [line.split() for line in (await shell.run("workers")).text.splitlines()]
    assert rows[1][0] == "host-1"
    assert f"r1/{claim.attempt.id}" in rows[1]
    assert (await shell.run("workers", "--json")).rows[0]["figures"] == {"cpu_percent": 50.0, "own": {}}
    assert (await shell.run("rollouts", "worker:host-?", "status:claimed", "--json")).rows[0]["id"] == "r1"


# --- single rollouts ---


@pytest.mark.slow
async def test_rollouts_are_cancelled_and_queued_again(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id=f"r{n}", group="g" if n < 3 else None) for n in (1, 2, 3)])
    one = await shell.run("cancel", "r1", "r3")
    assert [line.split() for line in one.text.splitlines()] == [
        ["rollout", "status"],
        ["r1", "cancelled"],
        ["r3", "cancelled"],
    ]
    assert await statuses(client) == {"r1": "cancelled", "r2": "queuing", "r3": "cancelled"}
    (again,) = (await shell.run("requeue", "group:g", "--json")).rows
    assert (again["id"], again["status"]) == ("r1", "requeuing")
    both = (await shell.run("cancel", "group:g", "--json")).rows
    assert sorted(one["id"] for one in both) == ["r1", "r2"]


@pytest.mark.slow
async def test_what_cannot_be_done_is_said_at_the_end(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1"), RolloutSpec(id="r2")])
    await finished(client, await claimed(client))
    done = await shell.run("cancel", "r1", "none", "r2")
    assert done.code == 1
    assert [line.split()[0] for line in done.text.splitlines()] == ["rollout", "r2"]
    assert tells(done.err, "2 of 3 rollouts", "rollout 'r1' has succeeded")
    one = await shell.run("requeue", "none")
    assert (one.code, one.text) == (1, "")
    assert tells(one.err, "no rollout 'none'", "`penstock rollouts`")


@pytest.mark.slow
async def test_rewards_are_given_by_hand(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1")])
    claim = await claimed(client)
    aid = claim.attempt.id
    first = await shell.run(
        "reward", "r1", "-0.5", "--reason", "wrong", "--dimension", "style=1", "--dimension", "x=-2"
    )
    assert first.text == f"Kept as #1: r1/{aid} has the reward -0.5.\n"
    await finished(client, claim)
    keyed = ("reward", f"r1/{aid}#1", "0.7", "--key", "k1", "--source", "judge", "--json")
    (late,), (repeated,) = [done.rows for done in await asyncio.gather(shell.run(*keyed), shell.run(*keyed))]
    assert (late["trusted"], late["late"], late["reward"]) == (True, True, 0.7)
    assert repeated["sequence"] == late["sequence"]
    rows, found, high, higher, stats = await asyncio.gather(
        shell.run("spans", "r1", "kind:reward", "--json"),
        shell.run("show", "r1"),
        shell.run("rollouts", "reward>0.5", "--json"),
        shell.run("rollouts", "reward>0.7", "--json"),
        shell.run("stats", "--json"),
    )
    assert len(rows.rows) == 2
    assert tells(found.text, "#1  reward  -0.5", "style 1  x -2", "by user  wrong")
    assert "by judge  of #1  late" in found.text
    assert high.rows[0]["reward"] == 0.7
    assert higher.rows == []
    assert stats.rows[0]["rewards"]["mean"] == pytest.approx(0.1)


@pytest.mark.slow
async def test_events_stand_in_the_tree(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1", input={"question": "2+2?"})])
    claim = await claimed(client)
    _ = await client.add_events("r1", claim.attempt.id, [Event(name="stdout", attributes={"line": "hello"})])
    text = (await shell.run("show", "r1")).text
    assert 'task  {"question":"2+2?"}' in text
    assert "#1  event  stdout  hello" in text
    found = await shell.run("spans", "r1", "name:std*", "--json")
    assert [row["name"] for row in found.rows] == ["stdout"]


# --- looking at it ---


async def called(http: aiohttp.ClientSession, local: Local, rid: str, aid: str = "a1") -> None:
    await local.ask(http, rid, aid, "What is 2+2?")
    await Tape(local.url, http).written()


@pytest.mark.slow
async def test_exports_take_filters(
    shell: Shell, client: Client, local: Local, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    _ = await client.enqueue([RolloutSpec(id=f"r{n}", group=f"g{n}") for n in (1, 2)])
    for reward in (1.0, 0.25):
        claim = await claimed(client)
        await called(http, local, claim.rollout.id, claim.attempt.id)
        await called(http, local, claim.rollout.id, claim.attempt.id)
        judged = FinishRequest.model_validate({"worker": "w1", "status": "succeeded", "rewards": [{"value": reward}]})
        _ = await client.finish(claim.rollout.id, claim.attempt.id, judged)
    good, said, done, odd = await asyncio.gather(
        shell.run("export", "reward>0.5"),
        shell.run("export", "--what", "messages", "group:g2"),
        shell.run("export", "--what", "spans", "--format", "parquet", "-o", "out.parquet", "kind:llm"),
        shell.run("export", "statsu:x", "-o", "never.jsonl"),
    )
    assert [(row["id"], row["group"], row["reward"], row["calls"]) for row in good.rows] == [("r1", "g1", 1.0, 2)]
    assert [(row["rollout"], row["sequence"]) for row in said.rows] == [("r2", 2), ("r2", 1)]
    assert said.rows[0]["messages"][0]["parts"][0]["text"] == "What is 2+2?"
    assert (done.code, done.text, done.err) == (0, "", "out.parquet: 4 rows\n")
    table = import_module("pyarrow.parquet").read_table(tmp_path / "out.parquet")
    assert sorted(zip(table["rollout"].to_pylist(), table["sequence"].to_pylist(), strict=True)) == [
        ("r1", 1), ("r1", 2), ("r2", 1), ("r2", 2),
    ]  # fmt: skip
    assert (odd.code, "did you mean 'status'?" in odd.err) == (1, True)
    assert [name for name in os.listdir(tmp_path) if "never" in name] == []


@pytest.mark.slow
async def test_the_doctor_says_what_is_missing(
    shell: Shell, client: Client, local: Local, http: aiohttp.ClientSession
) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1")])
    claim = await claimed(client)
    await called(http, local, "r1", claim.attempt.id)
    await finished(client, claim)
    assert (await client.attempts("r1"))[0].status == AttemptStatus.SUCCEEDED
    told = await shell.run("doctor", "r1")
    assert told.text.endswith(f"r1 cannot be trained on: {claim.attempt.id}: nobody said how well it went.\n")
    assert f"no_reward     penstock reward r1/{claim.attempt.id} VALUE" in told.text
    _ = await shell.run("reward", "r1", "1")
    (found,) = (await shell.run("doctor", "r1", "--json")).rows
    assert (found["trainable"], found["verdict"]) == (
        False, f"r1 cannot be trained on: {claim.attempt.id}: no_token_ids in 1 of 1 calls.",
    )  # fmt: skip
    (other,) = (await shell.run("doctor", "r1", "--model", "other", "--json")).rows
    assert other["attempts"][0]["calls"][0]["findings"][0]["code"] == "other_model"
    assert (await shell.run("doctor", "none")).err.startswith("penstock: there is no rollout 'none'")


@pytest.mark.slow
async def test_the_doctor_takes_a_filter(
    shell: Shell, client: Client, local: Local, http: aiohttp.ClientSession
) -> None:
    for rid in ("r1", "r2", "other"):
        await called(http, local, rid)
    some, whole, each, none = await asyncio.gather(
        shell.run("doctor", "rollout:r?"),
        shell.run("doctor", "rollout:other"),
        shell.run("doctor", "r2", "other", "--json"),
        shell.run("doctor", "rollout:nobody"),
    )
    assert [line.split()[0] for line in some.text.splitlines()[:3]] == ["rollout", "r2", "r1"]
    assert tells(some.text, "0 of 2 rollouts")
    assert "penstock reward r2/a1 VALUE" in some.text
    assert whole.text.startswith("other  running")
    assert [found["rollout"] for found in each.rows] == ["r2", "other"]
    assert (none.code, none.text, none.err) == (0, "", "No rollout matches.\n")


# --- when nothing happens ---

NOTHING = [
    ("rollouts", "The tape has no rollouts yet: "),
    ("rollouts status:failed", "No rollout matches."),
    ("workers", "No worker was heard of in the last quarter of an hour: `penstock run -- COMMAND` starts one."),
    ("cancel group:g", "No rollout matches that has not ended."),
    ("requeue group:g", "No rollout matches that came from the queue and has ended."),
    ("doctor group:g", "No rollout matches."),
    ("export", "Nothing was written: nothing matches."),
    ("export --what spans kind:llm", "Nothing was written: nothing matches."),
    ("resource list", "There are no resources yet: `penstock resource add NAME --file FILE` registers a prompt, "),
    ("release list", "There are no releases yet: `penstock release start NAME --candidate VERSION` starts one."),
    ("release list --live", "No release is live."),
    ("runs list", "There are no training runs yet; `penstock train` starts one."),
    ("runs list --kind sft", "No run matches."),
]


@pytest.mark.parametrize("named", [True, False])
async def test_an_empty_gateway_is_told(
    named: bool, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On stderr, so that nothing comes out of a pipe; with its address where nobody named it."""
    monkeypatch.chdir(tmp_path)
    _ = (tmp_path / "penstock.toml").write_text(f"port = {local.url.rpartition(':')[2]}")
    monkeypatch.setenv("PENSTOCK_GATEWAY", local.url)
    if not named:
        monkeypatch.delenv("PENSTOCK_GATEWAY")
    for words, said in NOTHING:
        await asyncio.to_thread(main, words.split())
        out, err = capsys.readouterr()
        assert (words, out, err.count("\n")) == (words, "", 1)
        assert err.startswith(said)
        assert (f"(asked: {local.url}, which penstock.toml names)" in err) != named
    monkeypatch.setattr("penstock.gateway.client.console.LOCAL", local.url)
    for words, changes in (("sql", False), ("queue", False), ("pause", True), ("token r1", False)):
        with suppress(SystemExit):
            await asyncio.to_thread(main, words.split())
        assert (f"Changed at {local.url}, the default; --gateway, " in capsys.readouterr().err) == (
            changes and not named
        )


@pytest.mark.slow
async def test_a_spans_list_may_be_empty_too(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id="r1")])
    empty, none = await asyncio.gather(shell.run("spans", "r1"), shell.run("spans", "r1", "kind:llm"))
    assert (empty.text, empty.err) == ("", "r1 has no spans yet.\n")
    assert (none.text, none.err) == ("", "No span matches.\n")


@pytest.mark.slow
async def test_a_call_that_a_full_disk_took_says_so(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with serving() as provider, running(tmp_path, upstreams(openai=provider.openai_url)) as gateway:
        limit_files(gateway.pid, 8192)
        async with http.post(f"{gateway.openai('r1')}/chat/completions", json={"model": "m"}) as answer:
            assert answer.status == 200
        await until(said(gateway, "recording stopped"))
        limit_files(gateway.pid, None)
        await until(said(gateway, "recording goes on"))
        shell = Shell(gateway.url, tmp_path)
        listed, tree, screen = await asyncio.gather(
            shell.run("spans", "r1", COLUMNS="80"),
            shell.run("show", "r1"),
            shell.run("tui", "--plain", "rollout", "r1", COLUMNS="80"),
        )
        for done in (listed, tree, screen):
            (line,) = [line for line in done.text.splitlines() if "chat" in line and " m " in line]
            assert "not recorded" in line


def said(gateway: Gateway, words: str) -> Callable[[], Awaitable[bool]]:
    """Whether its log has that."""

    async def has() -> bool:
        return words in gateway.log

    return has


@pytest.mark.slow
async def test_what_a_limit_leaves_out_is_said(shell: Shell, client: Client) -> None:
    _ = await client.enqueue([RolloutSpec(id=f"r{n}") for n in range(3)])
    two, three, lines = await asyncio.gather(
        shell.run("rollouts", "--limit", "2"),
        shell.run("rollouts", "--limit", "3"),
        shell.run("rollouts", "--limit", "2", "--json"),
    )
    assert (len(two.text.splitlines()), tells(two.err, "more than 2", "--limit 20")) == (3, True), two.err
    assert (len(three.text.splitlines()), three.err) == (4, "")
    assert (len(lines.text.splitlines()), lines.err) == (2, two.err)


@pytest.mark.slow
async def test_a_pipe_has_whole_rows(shell: Shell, client: Client) -> None:
    """What `awk -F '  +'` sees is the same, whatever is in the rows."""
    _ = await client.enqueue([RolloutSpec(id="a" * 120, group="a group"), RolloutSpec(id="b")])
    head, *rows = (re.split("  +", line.strip()) for line in (await shell.run("rollouts")).text.splitlines())
    assert [row[:4] for row in rows] == [["b", "-", "train", "queuing"], ["a" * 120, "a group", "train", "queuing"]]
    assert {len(row) for row in rows} == {len(head)}
    assert head[:2] == ["rollout", "group"]
