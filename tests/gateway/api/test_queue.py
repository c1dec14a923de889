"""The queue over HTTP: what every endpoint accepts, refuses and answers again, asked of a real gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Coroutine
from contextlib import AsyncExitStack, aclosing
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from conftest import StartGateway
from fakes.local import Local, locally
from fakes.process import PATIENCE, upstreams
from fakes.provider import Provider
from fakes.raw import body_of, connect, post
from fakes.waiting import until

from penstock.gateway.client.client import Client, ClientError
from penstock.gateway.model.queue import (
    LONGEST_WAIT_S,
    MOST_ROLLOUTS,
    Claim,
    ClaimRequest,
    Event,
    FeedbackRequest,
    FinishRequest,
    HeartbeatRequest,
    HeldAttempt,
    RolloutSpec,
)
from penstock.gateway.model.rollout import (
    Attempt,
    AttemptStatus,
    Judgement,
    Outcome,
    Reward,
    RolloutConfig,
    RolloutStatus,
    WorkerUsage,
)
from penstock.gateway.model.span import Span

T = TypeVar("T")
JSON = {"Content-Type": "application/json"}
"""Seconds; a claim that waits so long has no work at their end."""


async def queued(client: Client, count: int = 1, **spec: Any) -> list[str]:
    return [one.id for one in await client.enqueue([RolloutSpec(**spec) for _ in range(count)])]


async def take(client: Client, worker: str = "w1", **asked: Any) -> list[Claim]:
    return (await client.claim(ClaimRequest(worker=worker, **asked))).claims


async def taken(client: Client, **spec: Any) -> Attempt:
    """An attempt in the hands of worker w1."""
    _ = await queued(client, **spec)
    [claim] = await take(client, modes=["train"])
    return claim.attempt


async def refused(step: Awaitable[Any], status: int, field: str = "") -> str:
    with pytest.raises(ClientError) as caught:
        _ = await step
    assert (caught.value.status, field in str(caught.value)) == (status, True), caught.value
    return str(caught.value)


async def spans(client: Client, attempt: Attempt) -> list[Span]:
    return [span async for span in client.spans(attempt.rollout, attempt.id)]


async def rewards(client: Client, attempt: Attempt) -> list[Reward]:
    return [Reward.of(span) for span in await spans(client, attempt) if span.kind == "reward"]


# -- giving work -------------------------------------------------------------------------------------------------------


async def test_tasks_come_back_as_they_were_given(client: Client) -> None:
    task: Any = {"text": "é \U0001f600 \u2028", "n": [1, 2.5, None, True, 2**80, -0.0], "deep": {"a": {"b": []}}}
    config = RolloutConfig(timeout_s=5, unresponsive_s=4, max_attempts=7, retry_on=["failed"])
    spec = RolloutSpec(
        id="q1", input=task, mode="val", group="g 1", priority=-3, config=config, metadata={"from": ["here"]}
    )
    [made] = await client.enqueue([spec])
    assert (made.id, made.status, made.created) == ("q1", RolloutStatus.QUEUING, True)
    [claim] = await take(client, modes=["val"])
    for rollout in (claim.rollout, await client.rollout(made.id)):
        assert (rollout.input, rollout.mode, rollout.group, rollout.priority) == (task, "val", "g 1", -3)
        assert (rollout.config, rollout.metadata, rollout.origin) == (config, {"from": ["here"]}, "queued")
    assert claim.attempt.worker == "w1"
    assert claim.address == f"/rollout/{made.id}/attempt/a1/mode/val"


async def test_the_same_again_queues_nothing_twice(client: Client) -> None:
    spec = RolloutSpec(id="q1", input={"q": 1})
    both = await client.enqueue([spec, spec])
    assert [one.created for one in both] == [True, False]
    assert [one.created for one in await client.enqueue([spec])] == [False]
    assert (await client.queue()).waiting == {"train": 1}
    [claim] = await take(client)
    [again] = await client.enqueue([spec])
    assert (again.created, again.status) == (False, RolloutStatus.PREPARING)
    _ = await client.finish(claim.rollout.id, "a1", FinishRequest(worker="w1", status="succeeded"))
    [again] = await client.enqueue([spec])
    assert (again.created, again.status) == (False, RolloutStatus.SUCCEEDED)
    assert (await client.queue()).waiting == {}


async def test_all_are_queued_or_none(client: Client) -> None:
    known, new = {"id": "known", "input": 1}, RolloutSpec(id="new")
    _ = await client.enqueue([RolloutSpec.model_validate(known)])
    others: dict[str, Any] = {
        "input": 2,
        "mode": "val",
        "group": "g",
        "metadata": {"topic": "sums"},
        "priority": 7,
        "config": {"timeout_s": 60},
    }
    for differs, value in others.items():
        wrong = RolloutSpec.model_validate(known | {differs: value})
        said = await refused(client.enqueue([new, wrong]), 409, "rollouts[1].id")
        assert f"another {differs}" in said
        assert "known" in said
    _ = await refused(client.enqueue([new, RolloutSpec(id="new", input=3)]), 409, "rollouts[1].id")
    assert await refused(client.rollout("new"), 404)


async def test_names_are_made_up_for_those_that_have_none(client: Client) -> None:
    made = await client.enqueue([RolloutSpec(), RolloutSpec()])
    assert len({one.id for one in made}) == 2
    assert all(one.created for one in made)


async def test_a_name_that_agents_have_used_is_not_queued(client: Client, local: Local) -> None:
    async with connect(local.url) as wire:
        wire.send(post("/rollout/r1/attempt/a1/events", b'{"events":[{"name":"hello"}]}'))
        assert b" 200 " in await wire.message()
    for step in (client.enqueue([RolloutSpec(id="r1")]), client.requeue("r1")):
        assert "did not come from the queue" in await refused(step, 409)


async def test_wrong_tasks_are_named(client: Client, http: aiohttp.ClientSession) -> None:
    wrong = [
        ("{", "the body"),
        ('{"rollouts":[]}', "rollouts"),
        ('{"rollouts":[{"id":"a b"}]}', "rollouts.0.id"),
        ('{"rollouts":[{"id":"..","input":1}]}', "rollouts.0.id"),
        ('{"rollouts":[{},{"id":""}]}', "rollouts.1.id"),
        ('{"rollouts":[{"mode":"trian"}]}', "rollouts.0.mode"),
        ('{"rollouts":[{"priority":1001}]}', "rollouts.0.priority"),
        ('{"rollouts":[{"input":{"x":[1e999]}}]}', "rollouts.0.input"),
        ('{"rollouts":[{"metadata":{"x":-1e999}}]}', "rollouts.0.metadata"),
        ('{"rollouts":[{"prioritty":1}]}', "prioritty"),
        ('{"rollouts":[{"config":{"timeout_s":0}}]}', "timeout_s"),
        ('{"rollouts":[{"config":{"timeout_s":1e300}}]}', "timeout_s"),
        ('{"rollouts":[{"config":{"timeout_s":Infinity}}]}', "timeout_s"),
        ('{"rollouts":[{"config":{"max_attempts":0}}]}', "max_attempts"),
        ('{"rollouts":[{"config":{"retry_on":["boredom"]}}]}', "retry_on"),
        ('{"rollouts":[{"metadata":[]}]}', "metadata"),
        ('{"rollouts":[{"input":"\\ud800"}]}', "the body"),
        ('{"rollouts":[{"input":' + "[" * 5000 + "]" * 5000 + "}]}", "the body"),
        ('{"rollouts":[{"input":' + "9" * 5000 + "}]}", "the body"),
        ('{"rollouts":[' + ",".join(["{}"] * (MOST_ROLLOUTS + 1)) + "]}", "rollouts"),
    ]
    await refuses(http, f"{client.url}/api/rollouts", wrong)
    assert (await client.queue()).waiting == {}
    async with http.post(f"{client.url}/api/rollouts", data=b'{"rollouts":[{}]}') as response:
        assert response.status == 415, "it is not said to be JSON"


async def refuses(http: aiohttp.ClientSession, url: str, wrong: list[tuple[str, str]]) -> None:
    """Each body with a 400 that names what is wrong in it."""
    for body, field in wrong:
        async with http.post(url, data=body.encode(), headers=JSON) as response:
            said: Any = await response.json()
        assert (response.status, field in said["error"]["message"]) == (400, True), (body[:100], said)


async def test_thousands_of_tasks_of_some_size_in_one_request(client: Client) -> None:
    """Ten thousand at a time is what the API promises, and tasks are longer than a hundred bytes."""
    made = await client.enqueue([RolloutSpec(input="x" * 1000) for _ in range(MOST_ROLLOUTS)])
    assert len({one.id for one in made}) == MOST_ROLLOUTS
    assert (await client.queue()).waiting == {"train": MOST_ROLLOUTS}
    [claim] = await take(client)
    assert claim.rollout.id == made[0].id


async def test_a_task_of_several_megabytes(client: Client) -> None:
    text = "x" * (5 << 20)
    _ = await queued(client, input=text)
    [claim] = await take(client)
    assert claim.rollout.input == text


async def test_what_is_too_large_is_told_how_large_it_may_be(client: Client, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{client.url}/api/rollouts", data=BytesIO(b" " * (300 << 20)), headers=JSON) as response:
        assert response.status == 413, await response.text()


# -- doing it ----------------------------------------------------------------------------------------------------------


async def test_wrong_claims_are_named(client: Client, http: aiohttp.ClientSession) -> None:
    wrong = [
        ('{"worker":"w","limit":0}', "limit"),
        ('{"worker":"w","limit":101}', "limit"),
        ('{"worker":"w","wait_s":61}', "wait_s"),
        ('{"worker":"w","wait_s":NaN}', "wait_s"),
        ('{"worker":"w","lease_s":0.5}', "lease_s"),
        ('{"worker":"w","modes":[]}', "modes"),
        ('{"worker":"w","modes":["all"]}', "modes"),
        ('{"worker":""}', "worker"),
        ("{}", "worker"),
        ("[]", "the body"),
    ]
    await refuses(http, f"{client.url}/api/claims", wrong)


async def test_a_claim_waits_for_work_and_no_longer(client: Client, local: Local) -> None:
    answer = await client.claim(ClaimRequest(worker="w1", wait_s=0.1))
    assert (answer.claims, answer.queue, answer.waiting) == ([], "open", 0)
    waiting = await begun(local, take(client, wait_s=LONGEST_WAIT_S))
    [rollout] = await queued(client)
    [claim] = await asyncio.wait_for(waiting, PATIENCE)
    assert claim.rollout.id == rollout


async def begun(local: Local, asked: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """What waits in the gateway for work."""
    waiting = asyncio.ensure_future(asked)

    async def waits() -> bool:
        return local.gateway.operations.running == 1

    await until(waits)
    return waiting


async def test_a_worker_that_hangs_up_while_it_waits_gets_nothing(client: Client, local: Local) -> None:
    asked = post("/api/claims", b'{"worker":"gone","wait_s":30}', host="localhost")
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connect(local.url)) for _ in range(20)]
        for wire in wires:
            wire.send(asked)
        waiting = asyncio.ensure_future(take(client, "stays", wait_s=LONGEST_WAIT_S))
        for wire in wires:
            wire.abort()
        rollouts = await queued(client, 3)
        [claim] = await asyncio.wait_for(waiting, PATIENCE)
        others = await take(client, "stays", limit=9, wait_s=LONGEST_WAIT_S)
        while len(others) < 2:
            others += await take(client, "stays", limit=9, wait_s=LONGEST_WAIT_S)
        assert {claim.rollout.id, *(one.rollout.id for one in others)} == set(rollouts)
        assert {one.rollout.tries for one in [claim, *others]} == {1}


async def test_a_paused_queue_and_one_that_is_draining(client: Client, local: Local) -> None:
    [rollout] = await queued(client)
    assert (await client.set_queue("paused")).state == "paused"
    answer = await client.claim(ClaimRequest(worker="w1"))
    assert (answer.claims, answer.queue, answer.waiting) == ([], "paused", 1)
    waiting = await begun(local, client.claim(ClaimRequest(worker="w1", wait_s=60)))
    _ = await client.set_queue("draining")
    answer = await asyncio.wait_for(waiting, PATIENCE)
    assert (answer.claims, answer.queue) == ([], "draining")
    assert (await client.heartbeat("w1", HeartbeatRequest())).queue == "draining"
    _ = await client.set_queue("open")
    assert [one.rollout.id for one in await take(client)] == [rollout]


async def test_what_the_queue_says_of_itself(client: Client) -> None:
    assert (await client.queue()).oldest_ns is None
    [first, _] = [*await queued(client, 1, mode="val"), *await queued(client, 1)]
    found = await client.queue()
    assert found.waiting == {"val": 1, "train": 1}
    assert found.oldest_ns == (await client.rollout(first)).created_ns
    _ = await take(client, modes=["val"])
    found = await client.queue()
    assert (found.waiting, found.claimed) == ({"train": 1}, 1)


async def test_heartbeats_tell_what_is_held_and_by_whom(client: Client) -> None:
    attempt = await taken(client)
    mine = HeldAttempt(rollout=attempt.rollout, attempt=attempt.id, running=True)
    nobodys = HeldAttempt(rollout=attempt.rollout, attempt="a9")
    unknown = HeldAttempt(rollout="nobody", attempt="a1")
    asked = HeartbeatRequest(attempts=[mine, nobodys, unknown], figures=WorkerUsage(cpu_percent=12.5, memory_bytes=7))
    answer = await client.heartbeat("w1", asked)
    told = [(one.held, one.status) for one in answer.attempts]
    assert told == [(True, AttemptStatus.RUNNING), (False, None), (False, None)]
    assert (await client.rollout(attempt.rollout)).status == RolloutStatus.RUNNING
    stolen = await client.heartbeat("w2", HeartbeatRequest(attempts=[mine]))
    assert [(one.held, one.status) for one in stolen.attempts] == [(False, AttemptStatus.RUNNING)]
    workers = {worker.id: worker for worker in await client.workers()}
    assert workers["w1"].figures.cpu_percent == 12.5
    assert workers["w1"].first_seen_ns <= workers["w1"].last_seen_ns
    _ = await client.cancel(attempt.rollout)
    answer = await client.heartbeat("w1", HeartbeatRequest(attempts=[mine]))
    assert [(one.held, one.status) for one in answer.attempts] == [(False, AttemptStatus.CANCELLED)]


async def test_an_end_and_what_it_brings_may_be_said_again_and_no_other(client: Client) -> None:
    attempt = await taken(client)
    outcome = Outcome(exit_code=0, duration_ns=9, output={"answer": [1, None, "é"]})
    events = [Event(name="stdout", attributes={"text": "done"}), Event(name="exit", time_ns=5)]
    brings: Any = {"outcome": outcome, "events": events, "rewards": [Judgement(value=0.5)]}
    asked, strange = (FinishRequest(worker=worker, status="succeeded", **brings) for worker in ("w1", "w2"))
    _ = await refused(client.finish(attempt.rollout, attempt.id, strange), 409, "is held by worker 'w1'")
    assert await spans(client, attempt) == []
    for _ in range(3):
        done = await client.finish(attempt.rollout, attempt.id, asked)
        assert (done.rollout.status, done.attempt.status) == (RolloutStatus.SUCCEEDED, AttemptStatus.SUCCEEDED)
        assert (done.attempt.outcome, done.attempt.reward) == (outcome, 0.5)
    kept = [(span.kind, span.name) for span in await spans(client, attempt)]
    assert kept == [("event", "stdout"), ("event", "exit"), ("reward", "reward")]
    for other in (strange, FinishRequest(worker="w1", status="failed"), FinishRequest(status="failed")):
        _ = await refused(client.finish(attempt.rollout, attempt.id, other), 409, attempt.rollout)
    assert (await client.rollout(attempt.rollout)).reward == 0.5


async def test_a_worker_brings_the_events_of_an_attempt_that_the_clock_has_ended(client: Client) -> None:
    attempt = await taken(client, config=RolloutConfig(timeout_s=0.05))
    held = HeldAttempt(rollout=attempt.rollout, attempt=attempt.id, running=True)
    _ = await client.heartbeat("w1", HeartbeatRequest(attempts=[held]))
    async with aclosing(client.changes(0, ["rollout"], [attempt.rollout], [RolloutStatus.FAILED])) as changes:
        _ = await anext(changes)
    outcome = Outcome(reason="killed", duration_ns=9)
    asked = FinishRequest(worker="w1", status="timeout", outcome=outcome, events=[Event(name="exit")])
    for _ in range(2):
        assert (await client.finish(attempt.rollout, attempt.id, asked)).attempt.outcome == outcome
    assert [span.name for span in await spans(client, attempt)] == ["exit"]


async def test_what_is_not_there_cannot_end(client: Client) -> None:
    attempt = await taken(client)
    asked = FinishRequest(status="succeeded")
    missing = [("nobody", "a1", 404), (attempt.rollout, "a2", 404), ("a b", "a1", 400), ("x" * 200, "a1", 400)]
    for rollout, one, status in missing:
        _ = await refused(client.finish(rollout, one, asked), status)
        _ = await refused(client.reward(rollout, one, Judgement(value=1)), status)
        _ = await refused(client.add_events(rollout, one, [Event(name="e")]), status)
    for rollout, status in (("nobody", 404), ("a b", 400)):
        _ = await refused(client.cancel(rollout), status)
        _ = await refused(client.requeue(rollout), status)


# -- judging it --------------------------------------------------------------------------------------------------------


async def test_rewards_are_kept_with_everything_that_was_said(client: Client) -> None:
    attempt = await taken(client)
    said = Judgement(value=0.25, dimensions={"style": 1.0, "é": -2}, source="judge", reason="well\nmade", key="k-1")
    first = await client.reward(attempt.rollout, attempt.id, said)
    assert (first.trusted, first.late, first.reward) == (True, False, 0.25)
    again = await client.reward(attempt.rollout, attempt.id, said.model_copy(update={"value": 0.9}))
    assert (again.sequence, again.reward) == (first.sequence, 0.25)
    [kept] = await rewards(client, attempt)
    assert kept == Reward(**said.model_dump(), trusted=True, late=False)
    newer = await client.reward(attempt.rollout, attempt.id, Judgement(value=-1, source="user"))
    assert newer.reward == -1
    only_dimensions = await client.reward(attempt.rollout, attempt.id, Judgement(dimensions={"x": 3}))
    assert only_dimensions.reward == -1
    _ = await client.finish(attempt.rollout, attempt.id, FinishRequest(status="failed"))
    late = await client.reward(attempt.rollout, attempt.id, Judgement(value=0.75))
    assert (late.late, late.reward) == (True, 0.75)
    assert (await client.rollout(attempt.rollout)).reward == 0.75
    untrusted = await client.reward(attempt.rollout, attempt.id, Judgement(value=9, source="agent"))
    assert (untrusted.trusted, untrusted.reward) == (False, 0.75)


async def test_wrong_rewards_are_named(client: Client, http: aiohttp.ClientSession) -> None:
    attempt = await taken(client)
    wrong = [
        ("{}", "a reward needs a value or dimensions"),
        ('{"value":NaN}', "value"),
        ('{"value":Infinity}', "value"),
        ('{"value":"high"}', "value"),
        ('{"value":1,"dimensions":{"a":NaN}}', "dimensions"),
        ('{"value":1,"source":"god"}', "source"),
        ('{"value":1,"span":0}', "span"),
        ('{"value":1,"span":5}', "no span 5"),
        ('{"value":1,"key":""}', "key"),
        ('{"value":1,"key":"' + "é" * 128 + '"}', "key"),
        ('{"value":1,"key":"' + "k" * 129 + '"}', "key"),
        ('{"value":1,"reason":"' + "r" * 10001 + '"}', "reason"),
    ]
    await refuses(http, f"{client.url}/api/rollouts/{attempt.rollout}/attempts/{attempt.id}/rewards", wrong)
    assert await spans(client, attempt) == []


async def test_an_end_with_a_wrong_reward_ends_nothing(client: Client) -> None:
    attempt = await taken(client)
    asked = FinishRequest(status="succeeded", rewards=[Judgement(value=1), Judgement(value=1, span=7)])
    assert "no span 7" in await refused(client.finish(attempt.rollout, attempt.id, asked), 400)
    assert (await client.rollout(attempt.rollout)).status == RolloutStatus.PREPARING
    assert await rewards(client, attempt) == []


async def test_events_are_kept_in_order(client: Client) -> None:
    attempt = await taken(client)
    said: list[Event] = [
        Event(name="stdout", attributes={"text": "line 1\nline 2", "n": 3, "f": 0.5, "yes": True, "none": None}),
        Event(name="state", time_ns=5, parent_id="00f067aa0ba902b7"),
    ]
    assert await client.add_events(attempt.rollout, attempt.id, said) == [1, 2]
    first, second = await spans(client, attempt)
    assert (first.kind, first.name, first.attributes) == ("event", "stdout", said[0].attributes)
    assert (second.name, second.start_ns, second.parent_id) == ("state", 5, "00f067aa0ba902b7")
    assert (await client.rollout(attempt.rollout)).totals.calls == 0


async def test_the_time_of_an_event_is_not_the_time_of_a_sign_of_life(client: Client) -> None:
    attempt = await taken(client)
    _ = await client.add_events(attempt.rollout, attempt.id, [Event(name="future", time_ns=2**62)])
    [known] = await client.attempts(attempt.rollout)
    assert known.last_seen_ns < 2**62
    assert (known.lease_ns or 0) < 2**62


# -- agents ------------------------------------------------------------------------------------------------------------


async def said_by_agent(local: Local, path: str, body: Any, token: str | None) -> tuple[int, Any]:
    headers = [] if token is None else [("Authorization", f"Bearer {token}")]
    async with connect(local.url) as wire:
        wire.send(post(path, json.dumps(body).encode(), headers))
        message = await wire.message()
    return int(message.split(b" ")[1]), json.loads(body_of(message))


async def test_an_agent_judges_itself_and_is_not_believed(client: Client, local: Local) -> None:
    _ = await queued(client, 2)
    mine, other = await take(client, limit=2)
    said = {"value": 1.0, "source": "runner", "key": "runner-output"}
    status, answer = await said_by_agent(local, f"{mine.address}/rewards", said, mine.token)
    assert (status, answer["trusted"], answer["reward"]) == (200, False, None)
    # What it says does not stand in the way of what its runner says under the same key.
    runners = Judgement(value=0.1, source="runner", key="runner-output")
    asked = FinishRequest(worker="w1", status="succeeded", rewards=[runners])
    assert (await client.finish(mine.rollout.id, mine.attempt.id, asked)).attempt.reward == 0.1
    kept = [(one.source, one.trusted) for one in await rewards(client, mine.attempt)]
    assert kept == [("agent", False), ("runner", True)]
    for path in ("rewards", "events"):
        body = {"value": 1.0} if path == "rewards" else {"events": [{"name": "e"}]}
        status, answer = await said_by_agent(local, f"{other.address}/{path}", body, mine.token)
        assert status == 403, answer
        status, answer = await said_by_agent(local, f"{mine.address}/{path}", body, mine.token[:-3] + "xyz")
        assert status == 401, answer
    assert await spans(client, other.attempt) == []


async def test_an_agents_token_opens_nothing_else(client: Client, local: Local) -> None:
    _ = await queued(client)
    [claim] = await take(client)
    own = f"/api/rollouts/{claim.rollout.id}/attempts/a1"
    for path in (f"{own}/rewards", f"{own}/finish", "/api/claims", "/api/rollouts", "/api/queue", "/api/feedback"):
        status, answer = await said_by_agent(local, path, {"value": 1}, claim.token)
        assert status == 403, (path, answer)
    assert (await client.rollout(claim.rollout.id)).status == RolloutStatus.PREPARING


async def test_an_agent_is_told_what_is_wrong(client: Client, local: Local) -> None:
    _ = await queued(client)
    [claim] = await take(client)
    status, answer = await said_by_agent(local, f"{claim.address}/rewards", {"valeu": 1}, claim.token)
    assert (status, answer["error"]["field"]) == (400, "valeu")
    status, answer = await said_by_agent(local, f"{claim.address}/events", {"events": []}, claim.token)
    assert (status, answer["error"]["field"]) == (400, "events")
    status, answer = await said_by_agent(local, f"{claim.address}/events", {"events": [{"name": "e"}]}, claim.token)
    assert status == 200
    assert (await client.rollout(claim.rollout.id)).status == RolloutStatus.RUNNING


# -- feedback, and another life ----------------------------------------------------------------------------------------


async def test_feedback_finds_the_rollout_of_a_response_also_after_a_restart(
    provider: Provider, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    config, ids = upstreams(openai=provider.openai_url) + '[tape]\nrecord = "strict"\n', list[str]()
    async with locally(tmp_path, config) as gateway:
        for number, url in enumerate((gateway.url + "/v1", gateway.openai("r1"))):
            body = {"model": "m", "messages": [{"role": "user", "content": f"Hello {number}"}]}
            async with http.post(url + "/chat/completions", json=body) as response:
                ids.append((await response.json())["id"])
    for life in range(2):
        async with locally(tmp_path, config) as gateway, Client(gateway.url) as client:
            for number, response_id in enumerate(ids):
                asked = FeedbackRequest(response_id=response_id, value=number + life, key="thumb")
                answer = await client.feedback(asked)
                assert (answer.rollout == "r1", answer.reward) == (number == 1, number)
                spans = [span async for span in client.spans(answer.rollout, answer.attempt, "kind:reward")]
                assert [(one.span, one.source) for one in map(Reward.of, spans)] == [(1, "user")]
            asked = FeedbackRequest(response_id="chatcmpl-none", value=1)
            _ = await refused(client.feedback(asked), 404, "chatcmpl-none")


async def test_a_queue_outlives_kill_9(start_gateway: StartGateway) -> None:
    gateway = await start_gateway("")
    async with Client(gateway.url) as client:
        waiting = await queued(client, 3, mode="val")
        attempt = await taken(client)
        _ = await client.reward(attempt.rollout, attempt.id, Judgement(value=1, key="k"))
        _ = await client.set_queue("paused")
        _ = await gateway.kill()
        await gateway.start(gateway.port)
        found = await client.queue()
        assert (found.state, found.waiting, found.claimed) == ("paused", {"val": 3}, 1)
        held = HeldAttempt(rollout=attempt.rollout, attempt=attempt.id, running=True)
        assert (await client.heartbeat("w1", HeartbeatRequest(attempts=[held]))).attempts[0].held
        again = await client.reward(attempt.rollout, attempt.id, Judgement(value=2, key="k"))
        assert (again.reward, again.sequence) == (1, 1)
        done = await client.finish(attempt.rollout, attempt.id, FinishRequest(worker="w1", status="succeeded"))
        assert done.rollout.status == RolloutStatus.SUCCEEDED
        _ = await client.set_queue("open")
        assert [one.rollout.id for one in await take(client, limit=9)] == waiting


async def test_who_waits_for_work_does_not_hold_up_the_end(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        async with locally(tmp_path, "[limits]\ndrain_seconds = 600\n") as made:
            client = await stack.enter_async_context(Client(made.url))
            waiting = await begun(made, client.claim(ClaimRequest(worker="w1", wait_s=60)))
        assert (await waiting).claims == []


async def test_an_admin_key_guards_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "correct horse battery staple"
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", key)
    async with locally(tmp_path) as made, Client(made.url, "wrong") as stranger, Client(made.url, key) as owner:
        for step in (stranger.queue(), stranger.enqueue([RolloutSpec()]), stranger.claim(ClaimRequest(worker="w"))):
            _ = await refused(step, 401)
        _ = await owner.enqueue([RolloutSpec()])
        assert len(await take(owner)) == 1
