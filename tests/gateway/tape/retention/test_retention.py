"""Rollouts that must go, as people see it: commands, rules, space, holds, and gateways that are killed meanwhile."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from fakes.local import locally
from fakes.mistakes import tells
from fakes.process import Gateway, running, upstreams
from fakes.provider import serving
from fakes.shell import Shell
from fakes.waiting import until
from fakes.web_site import everywhere, site

from examples.demo.model import DemoAnswer
from penstock.console.commands.check import problems
from penstock.gateway.app import open_store
from penstock.gateway.client.client import Client
from penstock.gateway.client.connection import ClientError
from penstock.gateway.config import load as load_config
from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.rollout import Outcome
from penstock.gateway.model.state import SqlRequest
from penstock.gateway.model.toml import ConfigError
from penstock.gateway.tape.retention import parse_rule
from penstock.gateway.tape.store.view import TapeView

INDEXED = '[index]\nwhen = "always"\n'


@asynccontextmanager
async def world(home: Path, more: str = "", process: bool = False) -> AsyncGenerator[tuple[Gateway, Client]]:
    """A gateway in front of a model that says what it is told."""
    start = running if process else locally
    async with (
        serving() as provider,
        start(home / "gateway", upstreams(provider.openai_url) + more) as gateway,
        Client(gateway.url) as client,
    ):
        provider.script = lambda request: DemoAnswer(request["messages"][0]["content"])
        yield gateway, client


def needles(count: int) -> dict[str, str]:
    """Texts of rollouts that are found where they are."""
    return {f"r{at:02d}": f"needle-{secrets.token_hex(16)}" for at in range(count)}


async def call(client: Client, rollout: str, text: str) -> None:
    """A call of a rollout that says something."""
    request = {"model": "m-1", "messages": [{"role": "user", "content": text}]}
    url = f"{client.url}/rollout/{rollout}/attempt/a1/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=request) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def ended(client: Client, rollout: str, said: str, mode: Mode = "train", calls: int = 1) -> None:
    """A rollout that has ended, and says something everywhere."""
    await client.enqueue([RolloutSpec(id=rollout, mode=mode, input={"task": said}, metadata={"customer": said})])
    (claim,) = (await client.claim(ClaimRequest(worker="w1", limit=1, modes=[mode]))).claims
    assert (claim.rollout.id, claim.attempt.id) == (rollout, "a1")
    for turn in range(calls):
        await call(client, rollout, f"{said} {turn}")
    outcome = Outcome(output={"said": said})
    await client.finish(rollout, "a1", FinishRequest(worker="w1", status="succeeded", outcome=outcome))


async def names(client: Client) -> list[str]:
    return sorted([one.id async for one in client.rollouts("")])


def found(path: Path, text: str) -> list[str]:
    """Files that hold a text as it is."""
    return [file.name for file in path.rglob("*") if file.is_file() and text.encode() in file.read_bytes()]


def said_on_tape(path: Path) -> str:
    """All that the tape of a gateway that has ended holds of bodies, tasks and outcomes."""
    pieces: list[str] = []
    with open_store(path) as store:
        assert list(problems(store)) == []
        for _, rollout in store.rollouts():
            pieces.append(rollout.model_dump_json())
            pieces += [attempt.model_dump_json() for attempt in store.attempts(rollout.id)]
            for _, exchange in store.exchanges(store.spans(rollout.id)):
                pieces += [] if exchange is None else [exchange.request_body.decode(), exchange.response_body.decode()]
        with store.view() as view:
            pieces += [
                view.body(number)[0].request.decode()
                for number in range(1, view.last("bodies"))
                if _is_kept(view, number)
            ]
    return "\n".join(pieces)


def _is_kept(view: TapeView, number: int) -> bool:
    return view.hole("bodies", number) is None and view.body_record(number) != b""


@pytest.mark.slow
async def test_a_person_forgets_a_rollout(tmp_path: Path) -> None:
    texts = needles(4)
    async with world(tmp_path, INDEXED) as (gateway, client):
        for rollout, text in texts.items():
            await ended(client, rollout, text, calls=2)
        shell = Shell(gateway.url, tmp_path)
        assert found(gateway.data, texts["r02"]) != []
        done = await shell.run("forget", "r02", "--who", "ann", "--why", "she asked for it")
        assert (done.code, done.text) == (0, "forgotten: r02\nleft: nothing of what was forgotten\n"), done.err
        assert found(gateway.data, texts["r02"]) == []
        assert await names(client) == ["r00", "r01", "r03"]

        with pytest.raises(ClientError, match="there is no rollout 'r02': it was forgotten already"):
            await client.forget("r02")
        assert [(one.rollout, one.why) async for one in client.forgotten()] == [("r02", "she asked for it")]
        told = [(one.action, one.target, one.who, one.why) async for one in client.audit_log()]
        assert ("forget_rollout", "r02", "ann", "she asked for it") in told
        for rollout, spans in (("r02", 0), ("r03", 2)):
            assert len([row async for row in client.search(texts[rollout])]) == spans
        assert (await client.sql(SqlRequest(query="select count(*) as n from rollouts"))).rows == [[3]]

        asked = await shell.run("forget", "mode:train")
        assert (asked.code, tells(asked.err, "3 rollouts", "r03", "--yes")) == (2, True), asked.err
        done = await shell.run("forget", "mode:train", "--yes")
        assert done.text.startswith("forgotten: r03, r01, r00\nleft: nothing ")
        await gateway.terminate()
        said = said_on_tape(gateway.data)
        assert not any(text in said for text in texts.values())
        assert not any(found(gateway.data, text) for text in texts.values())


@pytest.mark.slow
async def test_what_may_not_go_says_why(tmp_path: Path) -> None:
    async with world(tmp_path) as (gateway, client):
        await ended(client, "r1", "x")
        shell = Shell(gateway.url, tmp_path)
        kept = await shell.run("hold", "r1", "--who", "ann", "--why", "court order 7")
        assert tells(kept.text, "r1", "`penstock hold --lift r1`"), kept.err
        with pytest.raises(ClientError, match=r"ann keeps rollout r1 \(court order 7\).*penstock hold --lift r1"):
            await client.forget("r1")
        assert "court order 7" in (await shell.run("hold")).text
        assert (await shell.run("hold", "--lift", "r1")).text == "r1 is not kept any more\n"
        assert (await shell.run("hold")).err == "Nobody keeps a rollout.\n"
        with pytest.raises(ClientError):
            await client.lift_hold("r1")
        await client.enqueue([RolloutSpec(id="r2", input=1)])
        with pytest.raises(ClientError, match="rollout r2 is queuing: `penstock cancel` it, or wait until it has"):
            await client.forget("r2")
        with pytest.raises(ClientError, match="there is no rollout 'r9'; `penstock rollouts`"):
            await client.hold_rollout("r9")
        await client.forget("r1")
        shown = (await shell.run("retention")).text
        assert tells(shown.splitlines()[0], "forget", "nothing by itself", "[[retention]]", "tape.keep_bytes")
        assert "forgotten 1 rollout\n" in shown


@pytest.mark.slow
async def test_one_that_may_not_go_keeps_no_other_from_it(tmp_path: Path) -> None:
    async with world(tmp_path) as (gateway, client):
        for rollout in ("r1", "r2", "r3"):
            await ended(client, rollout, "x")
        shell = Shell(gateway.url, tmp_path)
        kept = await shell.run("hold", "r9", "r2", "--who", "ann")
        assert (kept.code, kept.text) == (1, "r2 is kept until `penstock hold --lift r2`\n")
        assert tells(kept.err, "1 of 2 rollouts", "no rollout 'r9'")
        done = await shell.run("forget", "mode:train", "--yes", "--no-wait")
        assert (done.code, done.text) == (1, "forgotten: r3, r1\n")
        assert tells(done.err, "1 of 3 rollouts", "ann keeps rollout r2")
        assert await names(client) == ["r2"]


async def test_a_rollout_stays_while_a_call_of_it_is_served(tmp_path: Path) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if "last" in await request.text():
            reached.set()
            await go_on.wait()
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": "ok"}}]})

    async with (
        site(everywhere(answer)) as url,
        locally(tmp_path, upstreams(f"{url}/v1")) as gateway,
        Client(gateway.url) as client,
    ):
        await client.enqueue([RolloutSpec(id="r1", input=1)])
        await client.claim(ClaimRequest(worker="w1", limit=1))
        await call(client, "r1", "first")
        last = asyncio.ensure_future(call(client, "r1", "last"))
        await reached.wait()
        await client.finish("r1", "a1", FinishRequest(worker="w1", status="succeeded"))
        with pytest.raises(ClientError, match="a call of rollout r1 still runs; forget it when that has ended"):
            await client.forget("r1")
        go_on.set()
        await last
        await client.forget("r1")
        assert await names(client) == []


async def test_a_rule_takes_what_it_names_when_its_time_is_over(tmp_path: Path) -> None:
    rules = '[[retention]]\nfilter = "mode:val"\nafter = "1ms"\n[[retention]]\nafter = "30d"\n'
    texts = needles(6)
    async with world(tmp_path, rules) as (gateway, client):
        for at, (rollout, text) in enumerate(texts.items()):
            await ended(client, rollout, text, "val" if at % 2 else "train")
        await client.hold_rollout("r03")
        await gateway.restart()

        async def gone() -> bool:
            view = await client.retention()
            return view.retired == 2 and view.done

        await until(gone)
        assert await names(client) == ["r00", "r02", "r03", "r04"]
        assert [str(rule) for rule in (await client.retention()).rules] == ["after 1ms: mode:val", "after 30d"]
        assert [rollout for rollout, text in texts.items() if found(gateway.data, text) == []] == ["r01", "r05"]
        (entry,) = [one async for one in client.audit_log() if one.action == "retire_rollouts"]
        assert (entry.who, entry.target, entry.why) == ("gateway", "2 rollouts", "after 1ms: mode:val")


async def test_the_oldest_make_room(tmp_path: Path) -> None:
    async with world(tmp_path, "[tape]\nkeep_bytes = 3000000\n") as (gateway, client):
        rng = random.Random(1)
        for at in range(40):
            await ended(client, f"r{at:02d}", rng.randbytes(30_000).hex())
        await gateway.restart()

        async def small() -> bool:
            view = await client.retention()
            return view.used_bytes <= 3_000_000 and view.done and view.retired > 0

        await until(small)
        left = await names(client)
        assert left == [f"r{at:02d}" for at in range(40 - len(left), 40)]
        assert 5 < len(left) < 40
        before = (await client.retention()).file_bytes
        for at in range(40, 50):
            await ended(client, f"r{at:02d}", rng.randbytes(30_000).hex())
        assert (await client.retention()).file_bytes == before  # the space is used again
        await gateway.terminate()
        said_on_tape(gateway.data)


@pytest.mark.slow
async def test_nothing_comes_back_and_nothing_is_lost_when_gateways_are_killed(tmp_path: Path) -> None:
    rng, texts, gone = random.Random(3), needles(16), set[str]()
    async with world(tmp_path, INDEXED, process=True) as (gateway, client):
        for rollout, text in texts.items():
            await ended(client, rollout, text)
        for life in range(3):
            loading = asyncio.ensure_future(load(client, life))
            for rollout in rng.sample(sorted(texts.keys() - gone), 4):
                await client.forget(rollout)
                gone.add(rollout)
            await asyncio.sleep(rng.random() * 0.3)  # some way into what follows
            await gateway.kill()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await gateway.start(gateway.port)

        async def done() -> bool:
            return (await client.retention()).done

        await until(done)
        assert [rollout for rollout in await names(client) if rollout in texts] == sorted(texts.keys() - gone)
        assert {rollout for rollout, text in texts.items() if found(gateway.data, text) == []} == gone
        await gateway.terminate()
        said = said_on_tape(gateway.data)
        assert {rollout for rollout, text in texts.items() if text not in said} == gone


async def load(client: Client, life: int) -> None:
    """Calls, until it is cancelled."""
    at = 0
    while True:
        at += 1
        await call(client, f"load-{life}-{at}", f"load {at}")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ('after = "soon"', "retention 1: after: 'soon' is not a time"),
        ('filter = "latency>2s"\nafter = "1d"', "retention 1: filter: 'latency>2s' is about calls"),
        ('filter = "cost>1"\nafter = "1d"', "retention 1: filter: 'cost>1' is about costs"),
        ('filter = "moed:val"\nafter = "1d"', "retention 1: filter: 'moed:val' cannot be understood"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(tmp_path: Path, rule: str, said: str) -> None:
    (tmp_path / "penstock.toml").write_text(f"[[retention]]\n{rule}\n")
    with pytest.raises(ConfigError, match=said):
        _ = [parse_rule(place, one) for place, one in enumerate(load_config(tmp_path / "penstock.toml").retention, 1)]


@pytest.mark.slow
async def test_such_a_rule_keeps_a_gateway_from_starting(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").write_text('[[retention]]\nfilter = "latency>2s"\nafter = "1d"\n')
    done = await Shell("", tmp_path).run("serve", "--config", "penstock.toml", "--port", "0")
    assert (done.code, "retention 1: filter: 'latency>2s' is about calls" in done.err) == (1, True), done.err
