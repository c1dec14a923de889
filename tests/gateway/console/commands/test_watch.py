"""Calls without an address through a real gateway: whose they are, what is said where that is not certain, and that
reading large ones holds nobody up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fakes.odd import Script, request, send
from fakes.raw import Wire, get, post, reply
from fakes.rig import CHAT, Rig

from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.facts import AMBIGUOUS
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import Span

LARGE = 700 << 10
"""Bytes of a message that make its request one that is read aside."""


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def answer(content: str) -> bytes:
    return reply(
        200, json.dumps({"id": "c", "choices": [{"index": 0, "message": said("assistant", content)}]}).encode()
    )


def streamed(content: str) -> bytes:
    pieces: list[tuple[dict[str, str], str | None]] = [*(({"content": it}, None) for it in content), ({}, "stop")]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in pieces]
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    return head + body


def answering(answers: Sequence[bytes]) -> Script:
    return [step for each in answers for step in (request(), send(each))]


async def call(rig: Rig, client: Wire, messages: list[Any], path: str = CHAT) -> None:
    """A call of the test's own, answered."""
    client.send(post(f"{path}?{rig.rollout}", json.dumps({"model": "m", "messages": messages}).encode()))
    await client.message()


async def summary(rig: Rig, rollout: str) -> RolloutSummary:
    return RolloutSummary.model_validate(await rig.tape.get(f"/api/rollouts/{rollout}"))


def script(rig: Rig, calls: int) -> list[Any]:
    """The messages of an agent's call that has had so many answers."""
    turns = [turn for at in range(calls) for turn in (said("assistant", f"answer {at}"), said("user", f"then {at}"))]
    return [said("system", "Be brief."), said("user", f"task {rig.rollout}"), *turns]


async def test_equal_agents_on_their_own_connections_have_their_own_rollouts(rig: Rig) -> None:
    answers = [answer(f"answer {at}") for at in range(4) for _ in range(2)]
    async with rig.upstream(answering(answers)), rig.client() as mine, rig.client() as yours:
        for at in range(4):
            for client in (mine, yours) if at % 2 else (yours, mine):
                await call(rig, client, script(rig, at))
    spans = await rig.unaddressed(8)
    whose = [spans[at].rollout for at in (1, 2, 5, 6)]
    assert len(set(whose)) == 1
    others = {spans[at].rollout for at in (0, 3, 4, 7)}
    assert len(others) == 1
    assert {whose[0]} != others
    assert not any(AMBIGUOUS in (span.attributes or {}) for span in spans)


async def test_equal_agents_on_one_connection_are_said_to_be_ambiguous(rig: Rig) -> None:
    answers = [answer(f"answer {at}") for at in range(2) for _ in range(2)]
    async with rig.upstream(answering(answers)), rig.client() as client:
        for at in range(2):
            for _ in range(2):
                await call(rig, client, script(rig, at))
        client.send(get("/metrics", host="127.0.0.1"))
        counted = (await client.message()).partition(b"\npenstock_ambiguous_calls_total ")[2]
    assert float(counted.split()[0]) >= 2
    spans = await rig.unaddressed(4)
    first, second = spans[0].rollout, spans[1].rollout
    assert first != second
    assert sorted(span.rollout for span in spans[2:]) == sorted([first, second])
    assert [AMBIGUOUS in (span.attributes or {}) for span in spans] == [False, False, True, True]
    await said_everywhere(rig, first, spans)


async def said_everywhere(rig: Rig, rollout: str, spans: list[Span]) -> None:
    """On the rollout, in lists by the filter, and by the doctor."""
    assert (await summary(rig, rollout)).totals.ambiguous == 1
    listed = await rig.tape.get("/api/rollouts?filter=ambiguous:true&limit=1000")
    assert rollout in {one["id"] for one in listed["rollouts"]}
    listed = await rig.tape.get("/api/rollouts?filter=ambiguous:false&limit=1000")
    assert rollout not in {one["id"] for one in listed["rollouts"]}
    listed = await rig.tape.get(f"/api/spans?filter=rollout:{rollout}+ambiguous:true")
    assert [one["sequence"] for one in listed["spans"]] == [2]
    found = Diagnosis.model_validate(await rig.tape.get(f"/api/rollouts/{rollout}/diagnosis"))
    (finding,) = [one for one in found.attempts[0].findings if one.code == "ambiguous"]
    assert not finding.blocks
    assert "1 of its calls may be" in finding.reason
    assert "address of its own" in finding.fix


async def test_equal_openings_are_told_apart_by_streamed_answers(rig: Rig) -> None:
    opening = [said("user", f"go {rig.rollout}")]
    answers = [streamed("left"), streamed("right"), answer("ok"), answer("ok")]
    async with rig.upstream(answering(answers)), rig.client() as client:
        for _ in range(2):
            await call(rig, client, opening)
        for way in ("right", "left"):
            await call(rig, client, [*opening, said("assistant", way), said("user", "and now?")])
    spans = await rig.unaddressed(4)
    assert [spans[3].rollout, spans[2].rollout] == [spans[0].rollout, spans[1].rollout]
    assert spans[0].rollout != spans[1].rollout
    assert not any(AMBIGUOUS in (span.attributes or {}) for span in spans)


async def test_cache_markers_may_move(rig: Rig) -> None:
    """As clients of messages do: the mark stands on the newest message, which was a list for it and is a text again."""

    def marked(text: str) -> list[Any]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    told = [said("user", f"look {rig.rollout}"), said("assistant", "A door."), said("user", "Open it.")]
    more = [*told, said("assistant", "It is open."), said("user", marked("Go."))]
    turns = [[said("user", marked(told[0]["content"]))], [*told[:2], said("user", marked("Open it."))], more]
    made = [reply(200, json.dumps({"role": "assistant", "content": marked("?")}).encode())] * 3
    async with rig.upstream(answering(made)), rig.client() as client:
        for messages in turns:
            await call(rig, client, messages, "/v1/messages")
    assert len({span.rollout for span in await rig.unaddressed(3)}) == 1


async def test_large_conversations_go_on(rig: Rig) -> None:
    opening = [said("user", rig.rollout + '"x\\' * (LARGE // 4)), said("assistant", "a"), said("user", "c")]
    other = [said("user", "other " + rig.rollout + "x" * LARGE)]
    async with rig.upstream(answering([answer("hi")] * 4)), rig.client() as client:
        for messages in (opening, other, [*opening, said("assistant", "hi"), said("user", "b")], opening[:1]):
            await call(rig, client, messages)
    spans = await rig.unaddressed(4)
    assert spans[2].rollout == spans[0].rollout
    assert len({span.rollout for span in spans}) == 3
    assert [(span.model, span.status) for span in spans] == [("m", "ok")] * 4
    assert (await rig.tape.raw(spans[0], "request")) == json.dumps({"model": "m", "messages": opening}).encode()


async def test_who_leaves_while_a_large_call_is_read_leaves_one_span(rig: Rig) -> None:
    body = json.dumps({"model": "m", "messages": [said("user", "x" * (16 << 20))]}).encode()
    async with rig.upstream(answering([answer("hi")])):
        async with rig.client() as client:
            client.send(post(f"{CHAT}?{rig.rollout}", body))
            await client.when(lambda: client.transport.get_write_buffer_size() == 0)
        (span,) = await rig.unaddressed(1)
    assert span.status in ("cancelled", "ok")
    assert (await summary(rig, span.rollout)).totals.calls == 1


async def test_what_has_no_conversation_joins_its_connection(rig: Rig) -> None:
    async with rig.upstream(answering([answer("hi"), reply(200, b"{}")])), rig.client() as client:
        await call(rig, client, [said("user", f"hello {rig.rollout}")])
        client.send(post(f"/v1/rerank?{rig.rollout}", b'{"model":"m"}'))
        await client.message()
    first, second = await rig.unaddressed(2)
    assert first.rollout == second.rollout
