"""Lanes and steering on one WebSocket, by the official SDK: each response is a span with what is its own. The upstream
says what each test wants, in its order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from fakes.budgets import budget, uses
from fakes.rig import Base, Within
from fakes.tape import Tape
from fakes.waiting import until
from openai import AsyncOpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
)
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from penstock.gateway.model.facts import (
    AGENT_ID,
    COMPACTION,
    PARENT_AGENT,
    STEER_FATE,
    STEER_TARGET,
    STEER_TEXT,
    UNATTRIBUTED,
    WEBSOCKET,
)
from penstock.gateway.model.span import Span
from penstock.gateway.traffic.proxy.websocket.connection import MOST_OPEN

Json = dict[str, Any]
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=128, max_events=512, max_bytes_per_lane=1 << 20, max_bytes=1 << 22
)
CREATE: Json = {"type": "response.create", "model": "gpt-x"}


def response(id: str, status: str, text: str = "", tokens: int = 7, **more: Any) -> Json:
    usage = {"input_tokens": 5, "output_tokens": tokens, "total_tokens": 5 + tokens}
    details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    content: list[Json] = [{"type": "output_text", "text": text, "annotations": []}]
    item: Json = {"type": "message", "id": f"m_{id}", "role": "assistant", "status": "completed", "content": content}
    head: Json = {"id": id, "object": "response", "created_at": 1, "model": "gpt-x-1", "status": status, "tools": []}
    return head | {"output": [item] if text else [], "usage": usage | details if text else None} | more


@dataclass
class Talk:
    """One connection: its agent's lanes, and its end at the upstream."""

    lanes: dict[str, Any]
    connection: ServerConnection
    said: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """By response."""
    known: set[str] = field(default_factory=set[str])
    """Responses of which the agent has heard, as far as it had to: the gateway has, too."""

    async def hear(self) -> Json:
        return json.loads(await self.connection.recv())

    async def say(self, of: str, type: str, lane: str | None = None, **fields: Any) -> None:
        event: Json = {"type": type, "sequence_number": 1, **fields} | ({} if lane is None else {"stream_id": lane})
        self.said.setdefault(of, []).append(json.dumps(event))
        await self.connection.send(self.said[of][-1])

    async def ask(self, said: Any, id: str | None = None, lane: str = "", **more: Any) -> Json:
        """A request of the agent, which is answered from here on; as it comes to the upstream."""
        await self.lanes[lane].send(CREATE | {"input": said} | more)
        heard = await self.hear()
        if id is not None:
            await self.begin(id, lane or None)
        return heard

    async def steer(self, id: str, said: str, lane: str = "") -> Json:
        """Input for a running response, of which the agent has heard; as it comes to the upstream."""
        if id not in self.known:
            while (await self.until("response.created", lane)).response.id != id:
                pass
            self.known.add(id)
        await self.lanes[lane].send({"type": "response.steer", "previous_response_id": id, "input": said})
        return await self.hear()

    async def final(self, lane: str = "") -> Any:
        """The next response that ends."""
        return await self.lanes[lane].get_final_response()

    async def until(self, type: str, lane: str = "") -> Any:
        """The next event of this type that comes to the agent."""
        while (event := await self.lanes[lane].recv()).type != type:
            pass
        return event

    async def begin(self, id: str, lane: str | None = None, **more: Any) -> None:
        await self.say(id, "response.created", lane, response=response(id, "in_progress", **more))

    async def delta(self, id: str, text: str, lane: str | None = None) -> None:
        about: Json = {"item_id": f"m_{id}", "output_index": 0, "content_index": 0, "logprobs": []}
        await self.say(id, "response.output_text.delta", lane, delta=text, **about)

    async def end(self, id: str, text: str, lane: str | None = None, tokens: int = 7, **more: Any) -> None:
        status = more.pop("status", "completed")
        await self.say(id, f"response.{status}", lane, response=response(id, status, text, tokens, **more))


@dataclass
class Rig:
    url: str
    tape: Tape
    accepted: asyncio.Queue[ServerConnection] = field(default_factory=asyncio.Queue[ServerConnection])

    @asynccontextmanager
    async def session(self, rollout: str | None) -> AsyncGenerator[Talk]:
        below = "/v1" if rollout is None else f"/rollout/{rollout}/attempt/a1/v1"
        client = AsyncOpenAI(base_url=self.url + below, api_key="sk-not-real")
        async with (
            client,
            client.responses.connect() as connection,
            AsyncResponsesWebSocketSession(connection, limits=LIMITS) as session,
        ):
            lanes = {"": session.default, "a": session.lane("a"), "b": session.lane("b")}
            yield Talk(lanes, await self.accepted.get())

    async def spans(self, rollout: str, count: int) -> list[Span]:
        """Calls, by their response ids, as soon as there are so many."""
        found = [span for span in await self.tape.spans(rollout, count) if span.kind == "llm"]
        return sorted(found, key=lambda span: span.response_id or "")

    async def check(self, span: Span, said: list[str]) -> None:
        """It has exactly these events."""
        events = b"".join(b"data: %b\n\n" % one.encode() for one in said)
        assert await self.tape.raw(span, "response") == events

    async def steers(self, rollout: str, count: int) -> list[Json]:
        """What is noted of steering, beside calls, when there is so much."""
        spans = await self.tape.spans(rollout, count)
        return [span.attributes or {} for span in spans if span.kind == "event"]

    async def said(self, span: Span) -> tuple[list[str], str]:
        """What was asked, and answered."""
        turn = (await self.tape.detail(span)).turn
        assert turn is not None
        asked = [part.text or part.type for message in turn.messages for part in message.parts]
        return asked, "".join(part.text or "" for one in turn.choices for part in one.message.parts)


@asynccontextmanager
async def served(base: Base, http: aiohttp.ClientSession) -> AsyncGenerator[Rig]:
    rig = Rig(base.url, Tape(base.url, http))

    async def talk(connection: ServerConnection) -> None:
        rig.accepted.put_nowait(connection)
        await connection.wait_closed()

    async with serve(talk, sock=base.listener.dup()):
        yield rig


@pytest.fixture
async def rig(base: Base, http: aiohttp.ClientSession) -> AsyncGenerator[Rig]:
    async with served(base, http) as made:
        yield made


async def test_lanes_that_end_in_another_order(rig: Rig) -> None:
    async with rig.session("order") as talk:
        for lane in talk.lanes:
            assert (await talk.ask(f"question {lane}", lane=lane)).get("stream_id", "") == lane
        for id, lane in (("r1", "a"), ("r2", "b"), ("r3", None)):
            await talk.begin(id, lane)
        for text in ("x", "y"):
            for id, lane in (("r3", None), ("r1", "a"), ("r2", "b")):
                await talk.delta(id, f"{text} {id}", lane)
        for id, lane, tokens in (("r3", None, 30), ("r2", "b", 20), ("r1", "a", 10)):
            await talk.end(id, f"answer {id}", lane, tokens)
        answers = [(await talk.final(lane)).output_text for lane in ("a", "b", "")]
        assert answers == ["answer r1", "answer r2", "answer r3"]
    spans = await rig.spans("order", 3)
    for span, id, question, tokens in zip(spans, ("r1", "r2", "r3"), ("a", "b", ""), (10, 20, 30), strict=True):
        assert (span.response_id, span.status, span.attributes) == (id, "ok", {WEBSOCKET: True})
        assert span.usage is not None
        assert span.usage.output_tokens == tokens
        assert await rig.said(span) == ([f"question {question}"], f"answer {id}")
        await rig.check(span, talk.said[id])
    ends = [span.end_ns or 0 for span in spans]
    assert ends[2] < ends[1] < ends[0]
    assert all((span.first_byte_ns or 0) < (span.end_ns or 0) - span.start_ns for span in spans)


async def test_requests_wait_while_very_many_are_unanswered(rig: Rig) -> None:
    async with connect(rig.url.replace("http", "ws") + "/rollout/r1/v1/responses", proxy=None) as client:
        talk = Talk({}, await rig.accepted.get())
        for at in range(MOST_OPEN + 2):
            await client.send(json.dumps(CREATE | {"input": "x", "stream_id": f"lane-{at % 2}"}))
        _ = [await talk.hear() for _ in range(MOST_OPEN)]
        for id in ("r1", "r2"):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(talk.hear(), 0.3)
            await talk.begin(id, "lane-0")
            await talk.end(id, "one", "lane-0")
            assert (await talk.hear())["type"] == "response.create"


async def test_steering_makes_a_successor(rig: Rig) -> None:
    steered: Json = {"status": "incomplete", "incomplete_details": {"reason": "steered"}}
    texts = ["do it otherwise", "and be quick"]
    async with rig.session("steer") as talk:
        await talk.ask("question", "r1", "a", max_output_tokens=9)
        await talk.delta("r1", "first pl", "a")
        for said in texts:
            await talk.steer("r1", said, "a")
            await talk.say("r1", "response.steer.accepted", "a", steer={"id": said, "previous_response_id": "r1"})
        await talk.end("r1", "first pl", "a", **steered)
        await talk.begin("r2", "a", previous_response_id="r1")
        await talk.delta("r2", "second", "a")
        await talk.end("r2", "second plan", "a", previous_response_id="r1")
        assert (await talk.final("a")).id == "r1"
        assert (await talk.final("a")).output_text == "second plan"
        await talk.ask("thanks", "r3", "a", previous_response_id="r2")
        await talk.end("r3", "welcome", "a")
        await talk.final("a")
    spans = await rig.spans("steer", 5)
    told = [(span.finish, span.model, span.status) for span in spans]
    assert told == [(finish, "gpt-x", "ok") for finish in ("steered", "completed", "completed")]
    said = [await rig.said(span) for span in spans]
    assert said == [(["question"], "first pl"), (texts, "second plan"), (["thanks"], "welcome")]
    for span in spans:
        await rig.check(span, talk.said[str(span.response_id)])
    used = [{STEER_TEXT: text, STEER_TARGET: "r1", STEER_FATE: "used"} for text in texts]
    assert await rig.steers("steer", 5) == used


async def test_steering_input_that_waits_for_tools_and_such_that_is_not_taken(rig: Rig) -> None:
    async with rig.session("tools") as talk:
        await talk.ask("question", "r1")
        await talk.steer("r1", "be quick")
        steer = {"id": "s1", "previous_response_id": "r1"}
        await talk.say("r1", "response.steer.accepted", steer=steer)
        await talk.end("r1", "a tool, please")
        await talk.say("none", "response.steer.pending", steer=steer, reason="waiting_for_required_input")
        await talk.steer("r1", "too late")
        failed = {"type": "invalid_request_error", "code": "response_already_completed", "message": "m"}
        late = {"previous_response_id": "r1", "input": "too late"}
        await talk.say("none", "response.steer.failed", steer=late, error=failed)
        await talk.final()
        result = {"type": "function_call_output", "call_id": "c", "output": "42"}
        await talk.ask([result], previous_response_id="r1")
        await talk.begin("r2", previous_response_id="r1")
        await talk.end("r2", "quick")
        await talk.until("response.completed")
    one, two = await rig.spans("tools", 4)
    assert (await rig.said(two), two.model) == ((["be quick", "42"], "quick"), "gpt-x")
    for span in (one, two):
        await rig.check(span, talk.said[str(span.response_id)])
    fates = sorted((it[STEER_TEXT], it[STEER_FATE]) for it in await rig.steers("tools", 4))
    assert fates == [("be quick", "used"), ("too late", "failed")]


async def test_an_error_is_of_its_lane(rig: Rig) -> None:
    async with rig.session("error") as talk:
        await talk.ask("a", lane="a")
        await talk.ask("b", "r2", "b")
        error = {"type": "invalid_request_error", "code": "bad", "message": "no"}
        await talk.say("r0", "error", "a", status=400, error=error)
        with pytest.raises(ResponsesWebSocketError):
            await talk.final("a")
        await talk.ask("again", "r1", "a")
        await talk.end("r1", "well", "a")
        await talk.end("r2", "good", "b")
        assert (await talk.final("b")).output_text == "good"
    failed, one, two = await rig.spans("error", 3)
    assert (failed.status, failed.error, failed.http_status) == ("error", "http_400", 400)
    for span, id in ((failed, "r0"), (one, "r1"), (two, "r2")):
        await rig.check(span, talk.said[id])
    assert (await rig.said(failed))[0] == ["a"]


@pytest.mark.parametrize("who", ["client", "upstream"])
async def test_the_end_of_the_connection_ends_all(rig: Rig, who: str) -> None:
    async with rig.session(f"{who}-leaves") as talk:
        await talk.ask("a", lane="a")
        await talk.ask("b", lane="b")
        await talk.begin("r1", "a")
        await talk.steer("r1", "stop", "a")
        if who == "upstream":
            await talk.connection.close()
    spans = await rig.spans(f"{who}-leaves", 3)
    ends = ("error", "upstream_closed") if who == "upstream" else ("cancelled", "client_gone")
    assert [(span.status, span.error) for span in spans] == [ends] * 2
    assert [one[STEER_FATE] for one in await rig.steers(f"{who}-leaves", 3)] == ["unknown"]


async def test_what_nobody_has_asked_for_is_no_other_answer(rig: Rig) -> None:
    async with rig.session("strays") as talk:
        await talk.ask("question", "r1", "a")
        await talk.begin("r9", "nobody")
        await talk.delta("r9", "x", "nobody")
        await talk.delta("r1", "y", "a")
        await talk.end("r9", "stray", "nobody")
        await talk.say("r9", "response.some.afterthought", "nobody")
        await talk.end("r1", "answer", "a")
        assert (await talk.final("a")).output_text == "answer"
    one, stray = await rig.spans("strays", 2)
    assert one.attributes == {WEBSOCKET: True}
    assert stray.attributes == {WEBSOCKET: True, UNATTRIBUTED: True}
    await rig.check(one, talk.said["r1"])
    await rig.check(stray, talk.said["r9"][:-1])
    doctor = await rig.tape.get("/api/rollouts/strays/diagnosis")
    codes = {call["sequence"]: [one["code"] for one in call["findings"]] for call in doctor["attempts"][0]["calls"]}
    assert ["unattributed" in codes[span.sequence] for span in (stray, one)] == [True, False]


async def test_a_successor_is_of_the_same_rollout_where_none_is_named(rig: Rig) -> None:
    async with rig.session(None) as talk:
        await talk.ask("a question without an address", "implicit-1")
        await talk.steer("implicit-1", "no")
        steer = {"id": "s", "previous_response_id": "implicit-1"}
        await talk.say("implicit-1", "response.steer.accepted", steer=steer)
        await talk.end("implicit-1", "x", status="incomplete", incomplete_details={"reason": "steered"})
        await talk.begin("implicit-2", previous_response_id="implicit-1")
        await talk.end("implicit-2", "y")
        await talk.until("response.completed")
        await talk.ask("on", "implicit-3", "b", previous_response_id="implicit-2")
        await talk.end("implicit-3", "z", "b")
        await talk.final("b")
    found: list[Json] = []

    async def there() -> bool:
        nonlocal found
        page = (await rig.tape.get("/api/spans?limit=1000"))["spans"]
        found = [one for one in page if str(one.get("response_id")).startswith("implicit-") and one["end_ns"]]
        return len(found) == 3

    await until(there)
    assert len({one["rollout"] for one in found}) == 1


async def test_a_request_names_its_session_in_its_body(rig: Rig) -> None:
    async with rig.session(None) as talk:
        for number, said in enumerate(({"session_id": "one"}, {"x-codex-turn-metadata": '{"thread_id": "two"}'})):
            cut = [{"role": "user", "content": "\ud83d"}]
            await talk.ask(cut, f"s{number}", client_metadata={"x-other": "x", **said})
            await talk.end(f"s{number}", "y")
            await talk.until("response.completed")
    for rollout in ("session-one", "thread-two"):
        (span,) = await rig.tape.spans(rollout, 1)
        assert span.status == "ok"


async def test_a_request_names_its_agent_in_its_body(rig: Rig) -> None:
    """That of one request is not that of the next on the same socket."""
    sub = {"thread_id": "t2", "x-openai-subagent": "review", "x-codex-parent-thread-id": "t1"}
    turn = {"x-codex-turn-metadata": '{"request_kind":"compaction","compaction":{"trigger":"auto"}}'}
    async with rig.session(None) as talk:
        for number, said in enumerate((sub, turn)):
            await talk.ask("x", f"s{number}", client_metadata={"session_id": "agents", **said})
            await talk.end(f"s{number}", "y")
            await talk.until("response.completed")
    spans = sorted(await rig.tape.spans("session-agents", 2), key=lambda span: span.start_ns)
    assert [span.agent for span in spans] == ["review", None]
    told = [
        {name: (span.attributes or {}).get(name) for name in (AGENT_ID, PARENT_AGENT, COMPACTION)} for span in spans
    ]
    assert [list(one.values()) for one in told] == [["t2", "t1", None], [None, None, "auto"]]


async def test_each_lane_has_its_budget(within: Within, http: aiohttp.ClientSession) -> None:
    """The SDK compresses its messages, each with those before it: what is refused has never been at the upstream."""
    question = "question question question"
    async with within(budget=[budget(limit=2)]) as made, served(made.base, http) as rig:
        async with rig.session("r") as talk:
            await talk.ask(question, "r1", "a")
            assert (await talk.steer("r1", "this is question two", "a"))["type"] == "response.steer"
            await talk.lanes["b"].send(CREATE | {"input": question})
            with pytest.raises(ResponsesWebSocketError) as caught:
                await talk.final("b")
            assert caught.value.event.stream_id == "b"
            await talk.lanes["a"].send({"type": "response.steer", "previous_response_id": "r1", "input": "once more"})
            event = await talk.until("response.steer.failed", "a")
            assert (event.error.code, event.steer.input) == ("budget", "once more")
            failed = {"type": "invalid_request_error", "code": "steering_not_supported", "message": "m"}
            about = {"previous_response_id": "r1", "input": "this is question two"}
            await talk.say("r1", "response.steer.failed", "a", steer=about, error=failed)
            await talk.until("response.steer.failed", "a")
            # What it has reserved is free.
            assert (await talk.ask(question, "r2", "b"))["stream_id"] == "b"
            await talk.end("r2", "two", "b")
            await talk.end("r1", "one", "a")
            assert [(await talk.final(lane)).output_text for lane in ("b", "a")] == ["two", "one"]
        refused, one, two = await rig.spans("r", 5)
        assert (refused.status, refused.error, refused.http_status) == ("error", "budget", 429)
        assert (one.status, two.status) == ("ok", "ok")
        assert await uses(http, made.base.url) == [("b", "", 2, 0)]


async def test_a_successor_counts_as_a_call(within: Within, http: aiohttp.ClientSession) -> None:
    async with within(budget=[budget(unit="tokens", limit=500_000)]) as made:
        async with served(made.base, http) as rig, rig.session("r") as talk:
            await talk.ask("question", "r1", max_output_tokens=50)
            await talk.steer("r1", "no")
            await talk.end("r1", "x", tokens=10)
            await talk.begin("r2", previous_response_id="r1")
            await talk.end("r2", "y", tokens=20)
            # Nobody has asked for it, and it has a price all the same.
            await talk.begin("r3", "nobody")
            await talk.end("r3", "z", "nobody", tokens=40)
            await talk.final()
        assert await uses(http, made.base.url) == [("b", "", 3 * 5 + 10 + 20 + 40, 0)]
