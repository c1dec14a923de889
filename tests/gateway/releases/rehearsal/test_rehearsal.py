"""Rehearsals as their users meet them: a real gateway, `penstock run` to record, `penstock release rehearse` to do it
again, agents with and without the official SDKs. Only the models are scripted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import lmdb
import pytest
from aiohttp import WSServerHandshakeError, web
from anthropic import AsyncAnthropic
from fakes.experiment import CANDIDATE, STABLE, Traffic, policy
from fakes.formats import Failure
from fakes.local import KILLED
from fakes.mistakes import tells
from fakes.preloaded import penstock
from fakes.process import PATIENCE, ROOT, Gateway, gone
from fakes.provider import Provider, Seen
from fakes.releasing import OLD, system_of
from fakes.runs import Run, _kill, written
from fakes.some import some
from openai import AsyncOpenAI

from examples.demo.model import DemoAnswer, DemoToolCall, Json, as_messages, last_text, text_of
from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.base import ActionRequest
from penstock.gateway.model.queue import LONGEST_WAIT_S, Claim, ClaimAnswer, ClaimRequest, FinishRequest, RolloutSpec
from penstock.gateway.model.release import NewRelease, Release
from penstock.gateway.model.release_policy import Replay
from penstock.gateway.model.rollout import Outcome
from penstock.gateway.model.span import Span
from penstock.gateway.traffic.trials.replay import DAMAGED

AGENTS = Path(__file__).parents[1] / "agents"
PLAIN = AGENTS / "plain.py"


def results(asked: Json) -> list[str]:
    """What tools have said in a conversation, of any API."""
    found: list[str] = []
    for message in as_messages(asked):
        if message.get("role") == "tool":
            found.append(text_of(message["content"]))
        elif message.get("type") == "function_call_output":
            found.append(message["output"])
        elif isinstance(message.get("content"), list):
            found += [text_of(it["content"]) for it in message["content"] if it.get("type") == "tool_result"]
    return found


def agent(asked: Json) -> DemoAnswer:
    """A model that looks fares up and says what it was told."""
    told, question = results(asked), last_text(as_messages(asked), "user")
    if question == "Sum up.":
        return DemoAnswer(f"In all: {', '.join(told) or 'I was told nothing'}.")
    if told:
        return DemoAnswer(f"It costs {' and '.join(told)}.")
    flight = question.removeprefix("What does ").removesuffix(" cost?")
    flights = [flight, f"{flight} return"] if "max_tokens" in asked else [flight]
    return DemoAnswer(
        calls=tuple(DemoToolCall(f"call_{n}", "fare", json.dumps({"flight": it})) for n, it in enumerate(flights))
    )


def careful(asked: Json) -> bool:
    """Whether it is asked with the candidate's text."""
    return system_of(asked).startswith("You are a careful")


@dataclass
class Stage:
    """A gateway with recorded rollouts, and the commands of a person."""

    gateway: Gateway
    traffic: Traffic
    provider: Provider
    home: Path
    stack: AsyncExitStack
    http: aiohttp.ClientSession
    trace: Path = field(init=False)
    started: int = 0

    def __post_init__(self) -> None:
        self.trace = self.home / "tools"

    @property
    def client(self) -> Client:
        return self.traffic.client

    async def penstock(self, *words: str, script: Path | None = None) -> Run:
        """A command, with this agent behind it."""
        self.started += 1
        out, err = self.home / f"{self.started}.out", self.home / f"{self.started}.err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = await penstock(
                *(*words, "--gateway", self.gateway.url),
                *(() if script is None else ("--", sys.executable, str(script))),
                env=dict(os.environ) | {"PYTHONPATH": str(ROOT), "TOOL_TRACE": str(self.trace)},
                cwd=self.home,
                stdout=stdout,
                stderr=stderr,
            )
        made = Run(process, out, err)
        self.stack.push_async_callback(_kill, made)
        return made

    async def start(self, number: int) -> Release:
        """A release that rehearses so many rollouts."""
        replay: dict[str, object] = {"calls": 4, "closed_loop": number}
        new = NewRelease(candidate="v2", policy=policy(replayed="required", replay=replay))
        return await self.client.start_release("travel", new)

    async def evidence(self, release: str) -> dict[str, Any]:
        """Of its rehearsal."""
        return next(it.evidence["rehearsal"] for it in await self.client.audit(release) if "rehearsal" in it.evidence)

    async def spans(self, rollout: str) -> list[Span]:
        """The calls of a rollout."""
        return [span async for span in self.client.spans(rollout) if span.kind == "llm"]


class AgentFailed(Exception):
    """What it asked was refused."""


@dataclass
class Bare:
    """An agent without an SDK, and the worker that runs it, in this process."""

    stage: Stage
    name: str = "bare"
    executed: list[str] = field(default_factory=list[str])
    """Calls of its tool that it has run."""
    refused: list[Json] = field(default_factory=list[Json])
    stubborn: bool = False
    """Asks again what was refused, and ends well."""
    flights: tuple[str, ...] = ("AC0",)
    """What its tool is called with, of one rollout."""
    more: tuple[str, ...] = ()
    """What is asked after that."""

    async def post(self, claim: Claim, asked: Json, path: str = "/v1/chat/completions") -> tuple[int, bytes]:
        """A call of the agent's."""
        key = {"Authorization": f"Bearer {claim.token}"}
        url = self.stage.gateway.url + claim.address + path
        async with self.stage.http.post(url, json=asked, headers=key) as answer:
            return answer.status, await answer.read()

    async def step(self, claim: Claim, messages: list[Json]) -> Json:
        """The model's next message."""
        status, body = await self.post(claim, {"model": "m", "messages": messages, "tools": []})
        answer = json.loads(body)
        if status != 200:
            self.refused.append(answer["error"])
            raise AgentFailed(answer)
        return answer["choices"][0]["message"]

    async def run(self, claim: Claim) -> None:
        """The task."""
        messages: list[Json] = [{"role": "system", "content": OLD}]
        for question in (f"What does {claim.rollout.input['flight']} cost?", *self.more):
            messages.append({"role": "user", "content": question})
            while calls := (message := await self.step(claim, messages)).get("tool_calls"):
                messages.append(message)
                for call in calls:
                    told = self.fare(**json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
            messages.append(message)

    def fare(self, flight: str) -> str:
        """Its tool."""
        self.executed.append(flight)
        return f"7 EUR for {flight}"

    async def do(self, claim: Claim) -> None:
        """A claim, to its end."""
        end = "succeeded"
        try:
            await self.run(claim)
        except AgentFailed:
            with suppress(AgentFailed):
                await self.run(claim)
            end = "succeeded" if self.stubborn else "failed"
        asked = FinishRequest(worker=self.name, status=cast(Any, end))
        with suppress(ClientError):
            # It was cancelled: the release has seen enough.
            await self.stage.client.finish(claim.rollout.id, claim.attempt.id, asked)

    async def record(self, number: int) -> None:
        """Rollouts from the queue."""
        specs = [RolloutSpec(id=f"r{n}", input={"flight": f"AC{n}"}) for n in range(number)]
        await self.stage.client.enqueue(specs)
        claimed = await self.stage.client.claim(ClaimRequest(worker=self.name, limit=number))
        await asyncio.gather(*map(self.do, claimed.claims))
        assert len(self.executed) == number * len(self.flights)
        self.executed.clear()

    async def claims(self, release: str, limit: int = 2) -> ClaimAnswer:
        """Runs of a rehearsal."""
        return await self.stage.client.claim_rehearsals(
            release, ClaimRequest(worker=self.name, limit=limit, wait_s=LONGEST_WAIT_S)
        )

    async def rehearse(self, release: str) -> dict[str, Any]:
        """All runs of a rehearsal, until the release has seen enough; its evidence."""
        while (answer := await self.claims(release, 4)).queue == "open":
            await asyncio.gather(*map(self.do, answer.claims))
        return await self.stage.evidence(release)


class Flat(Bare):
    """The same on the responses API."""

    async def step(self, claim: Claim, messages: list[Json]) -> Json:
        """Items of the answer are put behind the input here; what is left to do is said as chat says it."""
        system, *told = messages
        asked = {"model": "m", "instructions": system["content"], "input": self._items(told), "tools": []}
        status, body = await self.post(claim, asked, "/v1/responses")
        assert status == 200, body
        items = json.loads(body)["output"]
        calls = [
            {"id": it["call_id"], "function": {"arguments": it["arguments"]}, "item": it}
            for it in items
            if it["type"] == "function_call"
        ]
        return {"role": "assistant", "tool_calls": calls}

    def _items(self, told: list[Json]) -> list[Json]:
        made: list[Json] = []
        for message in told:
            if message["role"] == "tool":
                output = {"call_id": message["tool_call_id"], "output": message["content"]}
                made.append({"type": "function_call_output"} | output)
            elif message["role"] == "assistant":
                made += [call["item"] for call in message["tool_calls"]]
            else:
                made.append(message)
        return made


@dataclass
class Streaming(Bare):
    """On the official openai SDK, streaming, with two questions."""

    more: tuple[str, ...] = ("Sum up.",)

    async def step(self, claim: Claim, messages: list[Json]) -> Json:
        address, told = f"{self.stage.gateway.url}{claim.address}/v1", cast(Any, messages)
        async with (
            AsyncOpenAI(base_url=address, api_key=claim.token, max_retries=0) as sdk,
            sdk.chat.completions.stream(model="m", messages=told) as stream,
        ):
            message = (await stream.get_final_completion()).choices[0].message
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls or ()]
        return {"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {})


@dataclass
class Blocks(Bare):
    """On the official anthropic SDK, with two calls of its tool at once."""

    flights: tuple[str, ...] = ("AC0", "AC0 return")

    async def run(self, claim: Claim) -> None:
        address = self.stage.gateway.url + claim.address
        messages: list[Any] = [{"role": "user", "content": f"What does {claim.rollout.input['flight']} cost?"}]
        async with AsyncAnthropic(base_url=address, api_key=claim.token, max_retries=0) as sdk:
            while True:
                answer = await sdk.messages.create(model="m", max_tokens=99, system=OLD, messages=messages)
                messages.append({"role": "assistant", "content": answer.content})
                results = [
                    {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": self.fare(**dict[str, Any](block.input)),
                    }
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                if not results:
                    return
                messages.append({"role": "user", "content": results})


@pytest.fixture
async def stage(
    gateway: Gateway, traffic: Traffic, provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> AsyncGenerator[Stage]:
    provider.script = agent
    async with AsyncExitStack() as stack:
        yield Stage(gateway, traffic, provider, tmp_path, stack, http)


@pytest.fixture
def bare(stage: Stage) -> Bare:
    return Bare(stage)


POLICY = """
margin_absolute = 0.1
checked = "skip"
shadowed = "skip"

[replay]
calls = 4
closed_loop = 5
"""


@pytest.mark.slow
async def test_a_candidate_that_does_the_same_passes_and_no_tool_is_run(stage: Stage) -> None:
    await stage.client.enqueue([RolloutSpec(id="r0", input={"flight": "AC0"}, mode="val")])
    recorded = await stage.penstock("run", "--workers", "2", script=PLAIN)
    assert await recorded.process.wait() == 0, recorded.stderr
    assert stage.trace.read_text() == "AC0\n"
    stage.trace.unlink()
    (stage.home / "policy.toml").write_text(POLICY)
    words = ("release", "start", "travel", "--candidate", "v2", "--policy", "policy.toml", "--workers", "2")
    run = await stage.penstock(*words, script=PLAIN)
    assert await run.process.wait() == 0, run.stderr
    assert "travel-1 is started" in run.stdout
    assert "2 succeeded" in run.stdout
    assert tells(run.stdout, "candidate's last answer agrees", "100.0% of 1 rehearsed runs")
    assert not stage.trace.exists()
    evidence = await stage.evidence("travel-1")
    assert (evidence["pairs"], evidence["scored"], evidence["candidate"]) == (1, 1, 1.0)
    assert evidence["diverged"] == evidence["failed"] == {"candidate": 0, "incumbent": 0}


@pytest.mark.slow
async def test_the_status_says_what_is_to_be_done_and_the_command_what_it_came_to(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    view = await stage.traffic.when(release.id, lambda view: view.doing == "rehearsal")
    assert (view.done, view.total) == (0, 2)
    shown = await stage.penstock("release", "status", "travel")
    assert await shown.process.wait() == 0
    # A narrow terminal breaks lines.
    words = " ".join(shown.stdout.split())
    assert tells(words, "its rehearsal: 0 of 2", "your agent", "penstock release rehearse travel-1 -- COMMAND")
    failing = await stage.penstock("release", "rehearse", "travel", script=AGENTS / "failing.py")
    assert await failing.process.wait() == 1
    assert "0 succeeded, 2 failed" in failing.stdout
    assert tells(failing.stderr, "travel-1 is rolled back", "incumbent", "1 of 1 runs", "exit code 3", "I do not feel")


@pytest.mark.slow
async def test_a_wrong_command_says_so(stage: Stage) -> None:
    await stage.client.start_release("travel", NewRelease(candidate="v2", policy=policy()))
    for words, message in (
        (("release", "rehearse", "nothing"), "there is no release 'nothing'"),
        (("release", "rehearse", "travel"), "its policy has replay.closed_loop = 0"),
        (("release", "start", "travel", "--candidate", "v2"), "the policy rehearses nothing"),
    ):
        run = await stage.penstock(*words, script=AGENTS / "failing.py")
        assert await run.process.wait() in (1, 2)
        assert message in run.stderr


def wrong(asked: Json) -> DemoAnswer:
    """The candidate does the same and says something else."""
    answer = agent(asked)
    return DemoAnswer("It is free.") if careful(asked) and answer.text else answer


def strays(asked: Json) -> DemoAnswer:
    """The candidate looks something else up."""
    return DemoAnswer(calls=(DemoToolCall("c", "fare", '{"flight": "XX"}'),)) if careful(asked) else agent(asked)


async def test_a_candidate_that_tells_its_users_something_else_is_rolled_back(stage: Stage, bare: Bare) -> None:
    await bare.record(12)
    stage.provider.script = wrong
    release = await stage.start(12)
    evidence = await bare.rehearse(release.id)
    assert evidence["verdict"] == "fail"
    assert (evidence["candidate"], evidence["incumbent"]) == (0.0, 1.0)
    assert evidence["pairs"] < 12, "it goes on although it is decided"
    assert len(evidence["worse"]) == evidence["pairs"]
    view = await stage.client.release(release.id)
    assert view.release.stage == "rolled_back"
    assert "rehearsed: the candidate's last answer agrees" in view.release.reason
    assert bare.executed == []


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_call_that_was_not_recorded_is_a_miss_and_every_further_one_is_refused(
    stage: Stage, bare: Bare, stubborn: bool
) -> None:
    """Such a run has no score, also when its agent ends well."""
    await bare.record(3)
    stage.provider.script, bare.stubborn = strays, stubborn
    release = await stage.start(3)
    evidence = await bare.rehearse(release.id)
    assert evidence["diverged"] == {"candidate": 3, "incumbent": 0}
    assert (evidence["pairs"], evidence["scored"], evidence["verdict"]) == (3, 0, "undecided")
    assert evidence["diverges_more"] > 1
    assert bare.executed == []
    assert len(bare.refused) == 6, "each asks twice"
    assert {(one["code"], one["type"]) for one in bare.refused} == {("diverged", "invalid_request_error")}
    assert 'fare({"flight":"XX"})' in bare.refused[0]["message"]
    (reason,) = {text for text in evidence["unknown"] if "r0/a1" in text}
    assert "no result to go on with" in reason
    view = await stage.client.release(release.id)
    assert view.release.stage != "rolled_back"


async def test_an_incumbent_that_diverges_itself_tells_nothing(stage: Stage, bare: Bare) -> None:
    await bare.record(3)
    stage.provider.script = lambda asked: DemoAnswer(calls=(DemoToolCall("c", "fare", '{"flight": "XX"}'),))
    release = await stage.start(3)
    evidence = await bare.rehearse(release.id)
    assert evidence["diverged"] == {"candidate": 3, "incumbent": 3}
    view = await stage.client.release(release.id)
    assert view.release.stage == "rolled_back"
    assert tells(view.release.reason, "nothing is known", "the incumbent", "3 of 3 runs")


async def test_agents_that_fail_are_counted_by_leg(stage: Stage, bare: Bare) -> None:
    await bare.record(3)
    release = await stage.start(3)
    while (answer := await bare.claims(release.id, 4)).queue == "open":
        for claim in answer.claims:
            if claim.rollout.id.endswith("candidate"):
                asked = FinishRequest(worker=bare.name, status="failed", outcome=Outcome(reason="it crashed"))
                await stage.client.finish(claim.rollout.id, claim.attempt.id, asked)
            else:
                await bare.do(claim)
    evidence = await stage.evidence(release.id)
    assert evidence["failed"] == {"candidate": 3, "incumbent": 0}
    assert (evidence["candidate"], evidence["incumbent"]) == (0.0, 1.0)


async def test_runs_that_are_forgotten_at_once_have_failed(stage: Stage, bare: Bare) -> None:
    await bare.record(3)
    release = await stage.start(3)

    async def forget(rollout: str) -> None:
        while True:
            with suppress(ClientError):
                _ = await stage.client.forget(rollout, ActionRequest(who="ann"))
                return

    while (answer := await bare.claims(release.id, 4)).queue == "open":
        for claim in answer.claims:
            asked = FinishRequest(worker=bare.name, status="failed", outcome=Outcome(reason="it crashed"))
            finishing = stage.client.finish(claim.rollout.id, claim.attempt.id, asked)
            _ = await asyncio.gather(finishing, forget(claim.rollout.id))
    evidence = await stage.evidence(release.id)
    assert evidence["failed"] == {"candidate": 3, "incumbent": 3}


async def test_without_rollouts_to_rehearse_it_does_not_pass(stage: Stage, bare: Bare) -> None:
    await stage.traffic.rollout("header", lambda arm: None)
    await stage.client.finish("header", "a1", FinishRequest(status="succeeded"))
    release = await stage.start(3)
    view = await stage.traffic.when(release.id, lambda view: view.release.stage == "rolled_back")
    assert tells(view.release.reason, "no recorded rollouts of travel", "1 were passed over", "no input")


async def test_a_rollout_that_is_damaged_is_passed_over(stage: Stage, bare: Bare) -> None:
    await bare.record(2)
    await stage.gateway.terminate()
    with lmdb.open(str(stage.gateway.data / "tape"), max_dbs=64) as tape, tape.begin(write=True) as txn:
        attempts = tape.open_db(b"attempts", txn)
        cursor = txn.cursor(attempts)
        assert cursor.first()
        assert txn.put(cursor.key(), b"\xff\xff", db=attempts)
    await stage.gateway.start(stage.gateway.port)
    release = await stage.start(2)
    evidence = await bare.rehearse(release.id)
    assert (evidence["pairs"], evidence["scored"], evidence["passed_over"]) == (1, 1, {DAMAGED: 1})


async def test_its_spans_stand_apart_and_no_pin_is_made(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    _ = await bare.rehearse(release.id)
    asked = await stage.spans(f"{release.id}-rehearsal")
    legs = [f"{release.id}-rehearsal-a2-1-{leg}" for leg in ("candidate", "incumbent")]
    for rollout, version, text in zip(legs, ("v2", "v1"), (CANDIDATE, STABLE), strict=True):
        leg = rollout.rpartition("-")[2]
        tags = {"penstock.replay_of": "r0/a1", "penstock.leg": leg}
        (own,) = await stage.spans(rollout)
        assert own.attributes == tags
        assert (own.status, own.versions, own.arm, own.upstream) == ("ok", None, None, None)
        mine = [span for span in asked if (span.attributes or {})["penstock.leg"] == leg]
        assert [span.attributes for span in mine] == [tags | {"penstock.rehearsal": f"{rollout}/a1"}] * 2
        assert {json.dumps(span.versions) for span in mine} == {json.dumps({"travel": version})}
        turn = some((await stage.client.span(mine[1].rollout, mine[1].attempt, mine[1].sequence)).turn)
        assert turn.messages[0].parts[0].text == text.replace("{date}", "Tuesday")
        assert turn.messages[-1].parts[0].text == "7 EUR for AC0"
        assert await stage.client.pins(rollout) == []
        found = await stage.client.rollout(rollout)
        assert (found.mode, found.status, found.input) == ("test", "succeeded", {"flight": "AC0"})
        assert found.attempts[0].reward is None
    assert stage.provider.log[-1].header("authorization") is None, "the agent's token is nobody else's business"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_the_agent_gets_the_last_answer_as_it_came(stage: Stage, bare: Bare, stream: bool) -> None:
    await bare.record(1)
    release = await stage.start(1)
    for claim in (await bare.claims(release.id)).claims:
        messages = [{"role": "system", "content": OLD}, {"role": "user", "content": "What does AC0 cost?"}]
        asked = {"model": "m", "messages": messages, "stream": stream}
        status, body = await bare.post(claim, asked)
        seen = stage.provider.log[-1]
        assert (status, body) == (200, seen.response)
        assert seen.streamed == stream
        (own,) = await stage.spans(claim.rollout.id)
        place = own.rollout, own.attempt, own.sequence
        assert await stage.client.response_body(*place) == body
        assert json.loads(await stage.client.request_body(*place)) == asked


@pytest.mark.parametrize("kind", [Flat, Streaming, Blocks])
async def test_agents_of_every_api_are_rehearsed(stage: Stage, kind: type[Bare]) -> None:
    agent = kind(stage)
    await agent.record(1)
    evidence = await agent.rehearse((await stage.start(1)).id)
    assert (evidence["scored"], evidence["candidate"], evidence["incumbent"]) == (1, 1.0, 1.0)
    assert agent.executed == []
    assert set(results(json.loads(stage.provider.log[-1].body))) == {f"7 EUR for {it}" for it in agent.flights}


async def test_what_fails_on_the_way_may_be_asked_again(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    answer = await bare.claims(release.id)
    failing = [True, True]

    def flaky(asked: Json) -> DemoAnswer | Failure:
        return Failure(503, "busy") if results(asked) and failing and failing.pop() else agent(asked)

    stage.provider.script, bare.stubborn = flaky, True
    await asyncio.gather(*map(bare.do, answer.claims))
    evidence = await bare.rehearse(release.id)
    assert evidence["scored"] == 1
    assert [one["message"] for one in bare.refused] == ["busy", "busy"]


async def test_of_requests_at_once_each_gets_its_own_result_also_when_one_is_asked_again(
    stage: Stage, bare: Bare, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Json] = [{"role": "system", "content": OLD}, {"role": "user", "content": "What does AC0 cost?"}]

    async def ask(claim: Claim, *more: Json) -> tuple[int, Json]:
        status, body = await bare.post(claim, {"model": "m", "messages": [*asked, *more], "tools": []})
        return status, json.loads(body)["choices"][0]["message"] if status == 200 else {}

    async def tell_fares(claim: Claim) -> None:
        for fare in ("1 EUR", "2 EUR"):
            _, called = await ask(claim)
            _ = await ask(claim, called, {"role": "tool", "tool_call_id": "call_0", "content": fare})

    monkeypatch.setattr(bare, "run", tell_fares)
    await stage.client.enqueue([RolloutSpec(id="r0", input={"flight": "AC0"})])
    (recorded,) = (await stage.client.claim(ClaimRequest(worker=bare.name))).claims
    await bare.do(recorded)
    claim = (await bare.claims((await stage.start(1)).id)).claims[0]
    reached, go, generate = asyncio.Event(), asyncio.Event(), stage.provider._generate

    async def hold(request: web.Request, seen: Seen) -> web.StreamResponse:
        if results(json.loads(seen.body)) != ["1 EUR"] or go.is_set():
            return await generate(request, seen)
        reached.set()
        await go.wait()
        return await stage.provider._fail(request, seen, Failure(503, "busy"))

    monkeypatch.setattr(stage.provider, "_generate", hold)
    first = asyncio.ensure_future(ask(claim))
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
    assert (await ask(claim))[1]["content"] == "It costs 2 EUR."
    go.set()
    assert (await first)[0] == 503
    assert (await ask(claim))[1]["content"] == "It costs 1 EUR."


async def test_a_run_without_end_is_ended(stage: Stage, bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(asked: Json) -> DemoAnswer:
        return agent(asked) if not results(asked) or careful(asked) is False else DemoAnswer(calls=agent_call)

    agent_call = (DemoToolCall("call_0", "fare", '{"flight": "AC0"}'),)
    await bare.record(1)
    stage.provider.script = again
    monkeypatch.setattr(Replay, "steps", 1)
    release = await stage.start(1)
    evidence = await bare.rehearse(release.id)
    assert evidence["failed"] == {"candidate": 1, "incumbent": 1}
    assert "made 1 requests to the model;" in bare.refused[0]["message"]


async def test_nobody_else_gets_its_runs_and_its_address_leads_nowhere_else(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    answer = await bare.claims(release.id)
    assert len(answer.claims) == 2
    assert (await stage.client.claim(ClaimRequest(worker="runner", limit=9))).claims == []
    assert (await stage.client.queue()).waiting == {}
    for claim in answer.claims:
        status, body = await bare.post(claim, {"x": 1}, "/v1/files")
        assert (status, json.loads(body)["error"]["code"]) == (400, "rehearsal")
        await bare.do(claim)
    await stage.traffic.when(release.id, lambda view: view.release.stage == "canary")
    asked = len(stage.provider.log)
    status, body = await bare.post(answer.claims[0], {"model": "m", "messages": []})
    assert (status, json.loads(body)["error"]["code"]) == (400, "rehearsal")
    assert len(stage.provider.log) == asked
    assert (await bare.claims(release.id)).queue == "draining"


async def test_an_agent_may_bring_its_own_key_and_what_is_no_generation_passes(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    (claim, *_) = (await bare.claims(release.id)).claims
    stage.provider.key = "sk-own"
    own = claim.model_copy(update={"token": "sk-own"})
    status, _ = await bare.post(own, {"model": "m", "messages": [{"role": "user", "content": "What does AC0 cost?"}]})
    assert status == 200
    status, body = await bare.post(own, {"model": "m", "input": "AC0"}, "/v1/embeddings")
    assert (status, json.loads(body)["object"]) == (200, "list")
    status, body = await bare.post(own, {"model": "tts-1", "input": "AC0"}, "/v1/audio/speech")
    assert (status, b"not passed on" in body) == (400, True)
    for path in ("/v1/realtime?model=m", "/v1/responses", "/my/own/socket"):
        with pytest.raises(WSServerHandshakeError) as refused:
            await stage.http.ws_connect(stage.gateway.url + claim.address + path, headers={"Authorization": "Bearer x"})
        assert refused.value.status == 400, path
    assert await stage.client.pins(claim.rollout.id) == []


async def test_workers_that_claim_at_once_get_different_runs(stage: Stage, bare: Bare) -> None:
    await bare.record(4)
    release = await stage.start(4)
    await stage.traffic.when(release.id, lambda view: view.doing == "rehearsal")
    answers = await asyncio.gather(*(bare.claims(release.id, 3) for _ in range(3)))
    claimed = [claim for answer in answers for claim in answer.claims]
    assert sorted(claim.rollout.id for claim in claimed) == sorted({claim.rollout.id for claim in claimed})
    assert len(claimed) == 8
    await asyncio.gather(*map(bare.do, claimed))
    evidence = await bare.rehearse(release.id)
    assert evidence["failed"] == {"candidate": 0, "incumbent": 0}


@pytest.mark.slow
async def test_the_runs_of_a_command_that_was_killed_are_done_by_another(stage: Stage, bare: Bare) -> None:
    await bare.record(1)
    release = await stage.start(1)
    words = ("release", "rehearse", release.id, "--workers", "2", "--lease", "6s")
    first = await stage.penstock(*words, script=AGENTS / "stuck.py")
    agents = await written(stage.home / "stuck")
    first.process.kill()
    await first.ended()
    for pid in agents:
        await gone(pid)
    second = await stage.penstock(*words, script=PLAIN)
    assert await second.process.wait() == 0, second.stderr
    assert not stage.trace.exists()
    found = await stage.client.rollout(f"{release.id}-rehearsal-a2-1-candidate")
    assert [attempt.status for attempt in found.attempts] == ["unresponsive", "succeeded"]


async def test_a_rollout_that_is_forgotten_leaves_the_runs_of_others_theirs(stage: Stage, bare: Bare) -> None:
    await bare.record(4)
    release = await stage.start(4)
    claims = (await bare.claims(release.id, 8)).claims
    first, *others = claims[::2]
    for claim in claims[:-1]:
        await bare.do(claim)
    await stage.gateway.restart()
    await stage.traffic.when(release.id, lambda view: view.doing == "rehearsal" and view.done == 7)
    await stage.client.forget(f"r{first.rollout.input['flight'][2:]}", ActionRequest(who="ann"))
    await stage.gateway.restart()
    await stage.traffic.when(release.id, lambda view: view.doing == "rehearsal" and view.total == 6)
    await bare.do(claims[-1])
    evidence = await bare.rehearse(release.id)
    assert (evidence["scored"], evidence["candidate"], evidence["incumbent"]) == (len(others), 1.0, 1.0)


@pytest.mark.slow
@KILLED
async def test_a_gateway_that_was_killed_goes_on_and_what_it_forgot_is_done_again(stage: Stage, bare: Bare) -> None:
    await bare.record(2)
    release = await stage.start(2)
    done, half = (await bare.claims(release.id)).claims
    await bare.do(done)
    question = f"What does {half.rollout.input['flight']} cost?"
    messages = [{"role": "system", "content": OLD}, {"role": "user", "content": question}]
    status, _ = await bare.post(half, {"model": "m", "messages": messages})
    assert status == 200
    await stage.gateway.kill()
    await stage.gateway.start(stage.gateway.port)
    await stage.traffic.when(release.id, lambda view: view.doing == "rehearsal" and view.done == 1)
    await bare.do(half)
    assert [one["code"] for one in bare.refused] == ["restarted"] * 2
    evidence = await bare.rehearse(release.id)
    assert (evidence["pairs"], evidence["scored"]) == (2, 2)
    assert evidence["failed"] == {"candidate": 0, "incumbent": 0}
    found = await stage.client.rollout(half.rollout.id)
    assert [attempt.status for attempt in found.attempts] == ["failed", "succeeded"]
