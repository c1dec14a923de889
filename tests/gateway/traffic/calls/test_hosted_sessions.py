"""What a hosted agent does is a rollout's model turns, runs of tools and events, each once, whoever reads of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import anthropic
import openai
import pytest
from fakes.budgets import budget, toml, uses
from fakes.local import locally
from fakes.process import Gateway, running, upstream
from fakes.session_host import MODEL, SMALL, AgentSessionHost, Event, SessionHost, agent_session_host, session_host
from fakes.tape import Tape
from fakes.transactions import done
from fakes.waiting import until
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.gateway.config import UpstreamSettings
from penstock.gateway.model.span import Span, span_tree
from penstock.gateway.tape.hosted_sessions import forget_rollout, record_events
from penstock.gateway.tape.store import Store
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.traffic.calls.call_record import BufferUsage, CallRecord
from penstock.gateway.traffic.calls.call_request import CallAddress, CallRequest
from penstock.gateway.traffic.upstreams.pool import ConnectionPool
from penstock.gateway.traffic.upstreams.routes import DirectPool
from penstock.gateway.wire.dialects import by_name, find
from penstock.gateway.wire.dialects.hosted import SessionDialect, session_facts
from penstock.gateway.wire.http.redaction import Redactor
from penstock.gateway.wire.http.request import HttpRequest

HOME, KEY = "session-sesn_1", "sk-ant-api03-abcdefghijklmnopqrstuvwxyz0123456789"
SPANS = {"llm": 5, "tool": 2, "event": 6}
"""Of the session, by kind; 5 model turns, one of them of its sub-agent."""


class World(NamedTuple):
    host: Any
    """A `SessionHost` or an `AgentSessionHost`."""
    gateway: Gateway
    tape: Tape

    def client(self, rollout: str | None = None) -> anthropic.AsyncAnthropic:
        base = self.gateway.url if rollout is None else self.gateway.address(rollout)
        return anthropic.AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0)

    async def spans(self, rollout: str = HOME) -> list[Span]:
        """Those of the session, once all calls have ended."""
        await self.tape.written()
        return await self.spans_so_far(rollout)

    async def spans_so_far(self, rollout: str = HOME) -> list[Span]:
        found = (await self.tape.get(f"/api/rollouts/{rollout}/spans?limit=1000"))["spans"]
        spans = [Span.model_validate(one) for one in found]
        return [one for one in spans if "penstock.hosted.event" in (one.attributes or {})]


@asynccontextmanager
async def world(home: Path, http: aiohttp.ClientSession, more: str = "") -> AsyncGenerator[World]:
    async with session_host() as (host, url), locally(home, more + upstream("a", url, "anthropic")) as gateway:
        yield World(host, gateway, Tape(gateway.url, http))


async def worked(client: anthropic.AsyncAnthropic) -> None:
    """A session from its beginning to its end, as a client with a tool of its own leads it."""
    session = await client.beta.sessions.create(agent="agent_1", environment_id="env_1")
    async with await client.beta.sessions.events.stream(session.id) as stream:
        said: Any = {"type": "user.message", "content": [{"type": "text", "text": "the weather?"}]}
        await client.beta.sessions.events.send(session.id, events=[said])
        async for event in stream:
            if event.type == "agent.custom_tool_use":
                result: Any = {
                    "type": "user.custom_tool_result", "custom_tool_use_id": event.id,
                    "content": [{"type": "text", "text": "sunny"}],
                }  # fmt: skip
                await client.beta.sessions.events.send(session.id, events=[result])
            if event.type == "session.status_idle" and event.stop_reason.type == "end_turn":
                break
    _ = [one async for one in await client.beta.sessions.threads.events.list("sthr_2", session_id=session.id)]


def counted(spans: list[Span]) -> dict[str, int]:
    return {kind: sum(one.kind == kind for one in spans) for kind in SPANS}


async def test_a_session_is_a_rollout(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as here, here.client() as client:
        await worked(client)
        spans = await here.spans()
        assert counted(spans) == SPANS
        turns = [one for one in spans if one.kind == "llm"]
        assert [(one.model, one.agent) for one in turns] == [
            (MODEL, "main"), (MODEL, "main"), (MODEL, "main"), (MODEL, "main"), (SMALL, "helper"),
        ]  # fmt: skip
        assert all(one.usage and (one.usage.input_tokens, one.usage.output_tokens) == (120, 10) for one in turns)
        assert all(one.cost for one in turns)
        weather, bash = [one for one in spans if one.kind == "tool"]
        assert (weather.name, weather.duration_ns, bash.name) == ("weather", 3 * 10**9, "bash")
        created = next(one for one in spans if one.name == "session.thread_created")
        assert turns[-1].parent_id == created.span_id
        assert [one.status for one in spans if one.name == "session.error"] == ["error"]
        read = await here.tape.get(f"/api/rollouts/{HOME}/attempts/a1/spans/{turns[1].sequence}")
        asked, answer = read["turn"]["messages"][-1], read["turn"]["choices"][0]["message"]
        assert (asked["role"], asked["parts"][0]["text"]) == ("tool", "sunny")
        assert answer["parts"][0]["arguments"] == '{"command":"ls"}'
        rollout = await here.tape.get(f"/api/rollouts/{HOME}")
        assert rollout["totals"]["input_tokens"] == 5 * 120
        assert rollout["totals"]["uncounted"] == 0
        tools = (await here.tape.get(f"/api/rollouts/{HOME}/attempts/a1/tools"))["tools"]
        assert [(one["tool"], one["grade"], one["asked_by"]) for one in tools] == [
            ("weather", "certain", turns[0].sequence), ("bash", "certain", turns[1].sequence),
        ]  # fmt: skip
        calls = (await here.tape.get(f"/api/rollouts/{HOME}/spans?limit=1000"))["spans"]
        assert "/v1/sessions" in [one["path"] for one in calls], "it belongs to the session that it has made"


async def test_events_are_taken_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Other readers, other pages, another order, and a gateway that began anew, change nothing."""
    async with world(tmp_path, http) as here, here.client() as client, here.client("other") as other:
        await worked(client)
        before = await here.spans()
        for reader in (client, other):
            for order in ("asc", "desc"):
                page = await reader.beta.sessions.events.list("sesn_1", limit=3, order=order)
                assert len([one async for one in page]) == len(here.host.events)
        await here.gateway.terminate()
        await here.gateway.start()
        again = here._replace(tape=Tape(here.gateway.url, http))
        async with again.client() as later:
            _ = [one async for one in await later.beta.sessions.events.list("sesn_1")]
            assert await again.spans() == before
            assert await again.spans("other") == []


async def test_events_are_spans_while_their_stream_runs(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also events beyond the bytes that are kept of an answer. What the list tells again is known."""
    more = "[limits]\nrecorded_bytes = 300\n"
    async with world(tmp_path, http, more) as here, here.client("r1") as client:
        await streaming(here, client, "r1")
        _ = [one async for one in await client.beta.sessions.threads.events.list("sthr_2", session_id="sesn_1")]
        before = await here.spans("r1")
        assert counted(before)["event"] == SPANS["event"]
        _ = [one async for one in await client.beta.sessions.events.list("sesn_1")]
        assert await here.spans("r1") == before
        streams = [one for one in await calls(here, "r1") if one["stream"]]
        assert [(one["status"], one["truncated"]) for one in streams] == [("cancelled", True)]


async def streaming(here: World, client: anthropic.AsyncAnthropic, rollout: str = HOME) -> None:
    """Leads a session, and awaits each time the spans of a stream that has not ended."""
    _ = await client.beta.sessions.create(agent="agent_1", environment_id="env_1")

    async def told(count: dict[str, int]) -> bool:
        return counted(await here.spans_so_far(rollout)) == count

    await here.tape.written()
    async with await client.beta.sessions.events.stream("sesn_1"):
        said: Any = {"type": "user.message", "content": [{"type": "text", "text": "the weather?"}]}
        await client.beta.sessions.events.send("sesn_1", events=[said])
        await until(partial(told, {"llm": 1, "tool": 0, "event": 2}))
        result: Any = {
            "type": "user.custom_tool_result", "custom_tool_use_id": here.host.events[4]["id"],
            "content": [{"type": "text", "text": "sunny"}],
        }  # fmt: skip
        await client.beta.sessions.events.send("sesn_1", events=[result])
        await until(partial(told, {"llm": 4, "tool": 2, "event": 6}))
        assert [one["status"] for one in await calls(here, rollout)].count("open") == 1


async def calls(here: World, rollout: str) -> list[Any]:
    """The calls of a rollout."""
    found = (await here.tape.get(f"/api/rollouts/{rollout}/spans?limit=1000"))["spans"]
    return [one for one in found if one["dialect"] == "managed_sessions"]


async def test_an_address_is_the_session_s_home(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as here, here.client("r1") as client:
        await worked(client)
        assert counted(await here.spans("r1")) == SPANS


async def test_budgets_count_turns(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    more = toml(budget(name="t", unit="tokens", limit=500), budget(name="usd", unit="usd", limit=10))
    async with world(tmp_path, http, more) as here, here.client() as client:
        await worked(client)
        await here.tape.written()
        used = {name: amount for name, _, amount, _ in await uses(http, here.gateway.url)}
        assert used["t"] == 5 * 130
        spans = await here.spans()
        assert used["usd"] == pytest.approx(sum(one.cost or 0 for one in spans))
        with pytest.raises(anthropic.RateLimitError, match="budget 't'"):
            await client.beta.sessions.create(agent="agent_1", environment_id="env_1")
        _ = await client.beta.sessions.retrieve("sesn_1")  # uses nothing


async def test_a_worker_of_ones_own_answers_tools(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """The SDK's runner of tools streams, lists and answers: all of that belongs to the session."""

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: The place.
        """
        return f"sunny in {city}"

    async with world(tmp_path, http) as here, here.client() as client:
        session = await client.beta.sessions.create(agent="agent_1", environment_id="env_1")
        events = client.beta.sessions.events
        runner = events.tool_runner(session_id=session.id, tools=[weather], max_idle=0.1)

        async def answered() -> list[Any]:
            return [one async for one in runner]  # until the session rests

        asked = asyncio.ensure_future(answered())
        await when_streamed(here)
        said: Any = {"type": "user.message", "content": [{"type": "text", "text": "the weather?"}]}
        await events.send(session.id, events=[said])
        assert (await asked)[0].posted
        _ = [one async for one in await events.list(session.id)]
        run = next(one for one in await here.spans() if one.name == "weather")
        read = await here.tape.get(f"/api/rollouts/{HOME}/attempts/a1/spans/{run.sequence}")
        assert read["turn"]["choices"][0]["message"]["parts"][0]["text"] == "sunny in Bern"


async def when_streamed(here: World) -> None:
    async def streams() -> bool:
        return here.host.streams > 0

    await until(streams)


def test_the_provider_s_cost_counts_where_no_model_is_known(stores: Any) -> None:
    store, events = stores(), story()[0]
    costs = [_used(events[6], "100"), _used(events[-1], "250")]
    done(store, lambda tape: told(tape, [*events[:7], costs[0]]))
    done(store, lambda tape: told(tape, [*events[7:], costs[1], costs[0]]))
    spans = [*store.spans("home", "a1")]
    billed = [one.usage.billed for one in spans if one.name == "session.usage" and one.usage]
    assert billed == [{"cost": 1.0}, {"cost": 1.5}]
    assert not any(one.model for one in spans)


def _used(after: Event, cents: str) -> Event:
    """A snapshot of what the session has cost, just after an event."""
    usage = {"list_cost": {"amount": cents, "currency": "USD"}}
    at = after["processed_at"].replace("Z", ".5Z")
    return {"id": f"cost_{cents}", "type": "session.usage", "processed_at": at, "usage": usage}


async def test_openai_s_sessions(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """A turn is a span, with what it has used; what is streamed and then listed is taken once."""
    async with (
        agent_session_host() as (host, url), locally(tmp_path, upstream("o", url, "openai")) as gateway,
        AsyncExitStack() as closing,
    ):  # fmt: skip
        here = World(host, gateway, Tape(gateway.url, http))
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="sk-test", max_retries=0)
        closing.push_async_callback(client.close)
        sessions = client.beta.agents.sessions
        session = await sessions.create(environment={"type": "none"}, agent_id="agent_1")  # type: ignore[arg-type]
        said: Any = {"type": "agent.session.input.message", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "the weather?"}]}]}  # fmt: skip
        async with await sessions.events.stream(session.id) as stream:
            await sessions.events.create(session.id, events=[said])
            async for event in stream:
                if event.type == "agent.session.requires_action":
                    result: Any = {
                        "type": "agent.session.input.tool_result", "call_id": "call_1", "turn_id": "turn_1",
                        "success": True, "output": "sunny",
                    }  # fmt: skip
                    await sessions.events.create(session.id, events=[result])
                if event.type == "agent.session.idle":
                    break
        home = "session-as_1"
        before = await here.spans(home)
        assert counted(before) == {"llm": 1, "tool": 2, "event": 3}
        turn = next(one for one in before if one.kind == "llm")
        assert (turn.dialect, turn.model, turn.agent, turn.duration_ns) == (
            "agent_turn", "gpt-5.4-mini", "main", 8 * 10**9,
        )  # fmt: skip
        assert turn.usage is not None
        assert (turn.usage.input_tokens, turn.usage.cached_tokens, turn.usage.output_tokens) == (300, 50, 30)
        assert turn.cost
        read = (await here.tape.get(f"/api/rollouts/{home}/attempts/a1/spans/{turn.sequence}"))["turn"]
        assert [one["role"] for one in read["messages"]] == ["user", "assistant", "tool", "assistant", "tool"]
        assert read["choices"][0]["message"]["parts"][0]["text"] == "It is sunny."
        weather, command = [one for one in before if one.kind == "tool"]
        assert (weather.name, command.name, command.duration_ns) == ("weather", "command_execution", 2 * 10**9)
        _ = [one async for one in await sessions.turns.list(session.id)]
        _ = [one async for one in await sessions.items.list(session.id)]
        assert await here.spans(home) == before
        await traced(here, sessions.traces, home)


async def traced(here: World, traces: Any, home: str) -> None:
    """The trace of the turn is below it, and counts nothing."""

    async def all_spans() -> list[Span]:
        found = (await here.tape.get(f"/api/rollouts/{home}/spans?limit=1000"))["spans"]
        return [Span.model_validate(one) for one in found]

    async def there() -> bool:
        return len([one for one in await all_spans() if one.kind == "otel"]) == 2

    assert [one.id async for one in await traces.list("as_1")] == ["turn_1"]
    await until(there)
    _ = [one async for one in await traces.list("as_1")]
    tail: Any = {"traceId": "ab" * 16, "spanId": "03" * 8, "name": "late", "startTimeUnixNano": 1}
    group = here.host.traces[0]["otlp"]["resourceSpans"][0]["scopeSpans"][0]
    group["spans"] += [tail, {"traceId": "odd"}]
    _ = [one async for one in await traces.list("as_1")]
    await until(lambda: _has_late(all_spans))
    spans = await all_spans()
    assert [one.name for one in spans if one.kind == "otel"] == ["agent", "chat gpt-5.4-mini", "late"]
    tree, turn = span_tree(spans), next(one for one in spans if one.dialect == "agent_turn")
    assert [one.name for one in tree[turn.sequence] if one.kind == "otel"] == ["late", "agent"]
    totals = (await here.tape.get(f"/api/rollouts/{home}"))["totals"]
    assert (totals["input_tokens"], totals["told"]) == (300, 0)


async def _has_late(all_spans: Any) -> bool:
    return any(one.name == "late" for one in await all_spans())


def test_a_cloud_s_path_names_the_session_too() -> None:
    path = "/anthropic/v1/sessions/sesn_1/threads/sthr_2/events"
    dialect = find("GET", path)
    assert isinstance(dialect, SessionDialect)
    assert (dialect.place(path), dialect.session_id(path)) == (("sesn_1", "sthr_2"), "sesn_1")
    assert dialect.gives_work("POST", "/anthropic/v1/sessions/sesn_1/events")


# -- any order -------------------------------------------------------------------------------------------------------


def story() -> tuple[list[Event], list[Event]]:
    """The events of a session, and of its sub-agent."""
    host = SessionHost()
    host.begin("the weather?")
    host.go_on({"custom_tool_use_id": host.events[4]["id"], "content": [{"type": "text", "text": "sunny"}]})
    return host.events, host.thread


def told(tape: Transaction, events: list[Event], thread: bool = False, stream: bool = False) -> None:
    """A call tells of these events."""
    path = "/v1/sessions/sesn_1/threads/sthr_2/events" if thread else "/v1/sessions/sesn_1/events"
    body = json.dumps({"data": events}).encode()
    if stream:
        body = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in events)
    found = session_facts(by_name("managed_sessions"), path, body, stream, 1)
    assert found is not None
    record_events(tape, SpanEntry("reader", "a1", start_ns=1, upstream="a"), found, ("home", "a1"), None)


def spans_of(store: Store) -> list[Any]:
    """What the session has become, whatever the order on the tape."""
    made: list[Any] = []
    for one in store.spans("home", "a1"):
        exchange = store.exchange(one)
        bodies = (exchange.request_body, exchange.response_body) if exchange and one.body else ()
        made.append((one.start_ns, one.span_id, one.parent_id, one.kind, one.name, one.status, one.usage, bodies))
    return sorted(made, key=str)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made: list[Store] = []

    def new() -> Store:
        made.append(Store(tmp_path_factory.mktemp("tape")))
        return made[-1]

    yield new
    for store in made:
        store.close()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32).map(random.Random))
def test_readers_that_read_in_order_make_the_same_spans(stores: Any, chance: random.Random) -> None:
    """Whatever the pages and streams of several readers are, and in which order readers come."""
    events, thread = story()
    whole, several = stores(), stores()
    done(whole, lambda tape: told(tape, events))
    done(whole, lambda tape: told(tape, thread, thread=True))
    readers = [_pieces(chance, events, False) for _ in range(chance.randint(1, 3))] + [_pieces(chance, thread, True)]
    while any(readers):
        reader = chance.choice([one for one in readers if one])
        piece, of_thread, stream = reader[0] if chance.random() < 0.2 else reader.pop(0)
        done(several, lambda tape: told(tape, piece, of_thread, stream))  # noqa: B023
    assert spans_of(several) == spans_of(whole)


def _pieces(chance: random.Random, events: list[Event], thread: bool) -> list[tuple[list[Event], bool, bool]]:
    cuts = sorted({0, len(events), *(chance.randint(0, len(events)) for _ in range(chance.randint(0, 6)))})
    return [(events[a:b], thread, chance.random() < 0.5) for a, b in pairwise(cuts)]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32).map(random.Random))
def test_no_order_loses_or_repeats_anything(stores: Any, chance: random.Random) -> None:
    """Turns and runs of tools are the same in any order, and each event is in one span."""
    events, thread = story()
    shuffled, store = [*events, *events[:5]], stores()
    chance.shuffle(shuffled)
    while shuffled:
        count = chance.randint(1, 6)
        piece, shuffled = shuffled[:count], shuffled[count:]
        done(store, lambda tape: told(tape, piece))  # noqa: B023
    done(store, lambda tape: told(tape, thread, thread=True))
    spans = spans_of(store)
    assert [sum(one[3] == kind for one in spans) for kind in ("llm", "tool")] == [5, 2]
    assert sum(one[6].input_tokens for one in spans if one[6]) == 5 * 120
    texts = b"".join(body for one in spans if one[3] == "llm" for body in one[-1]).decode()
    texts += "".join(str(one.attributes) for one in store.spans("home", "a1") if one.kind == "event")
    for said in ("the weather?", "It is sunny in Bern.", "it is small"):
        assert texts.count(said) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32).map(random.Random))
def test_openai_s_events_are_taken_once_in_any_order(stores: Any, chance: random.Random) -> None:
    host, store = AgentSessionHost(), stores()
    host.begin("the weather?")
    host.go_on({"call_id": "call_1", "output": "sunny"})
    told_by = [(host.events, True, "events"), (host.turns, False, "turns"), (host.items, False, "items")]
    pieces = [(one, stream, what) for events, stream, what in told_by * 2 for one in events]
    chance.shuffle(pieces)
    for one, stream, what in pieces:
        body = b"data: %b\n\n" if stream else b'{"data": [%b]}'
        path = f"/v1/agents/sessions/as_1/{what}"
        found = session_facts(by_name("agent_sessions"), path, body % json.dumps(one).encode(), stream, 1)
        assert found is not None
        done(store, partial(record_events, entry=SpanEntry("r", "a1"), told=found, home=("home", "a1"), count=None))
    spans = spans_of(store)
    assert [sum(one[3] == kind for one in spans) for kind in ("llm", "tool")] == [1, 2]
    texts = b"".join(body for one in spans if one[3] == "llm" for body in one[-1]).decode()
    texts += "".join(str(one.attributes) for one in store.spans("home", "a1") if one.kind == "event")
    assert (texts.count("the weather?"), texts.count("It is sunny.")) == (1, 1)


FIELDS = (
    "id", "type", "object", "processed_at", "session_thread_id", "model_request_start_id", "model_usage", "usage",
    "turn", "turn_id", "item", "agent", "content", "input", "name", "tool_use_id", "status", "started_at", "session",
    "subagent", "opened_at", "duration_ms", "error", "parent_thread_id", "call_id", "summary", "stop_reason",
    "list_cost", "amount", "currency",
)  # fmt: skip
ODD: Any = st.recursive(
    st.sampled_from([
        None, True, -1, 2**60, 10**30, 1.5, "", "x", "a\0b", "y" * 300, "2026-11-01T00:00:00Z", "9999-01-01T00:00:00Z",
        "0001-01-01T00:00:00Z", "span.model_request_end", "agent.tool_use", "agent.session.turn", "session",
        "completed", "\ud800", "USD", "9" * 5000,
        "agent.session.turn.item.done", "function_call", "session.usage", "session.thread_created",
    ]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=8),
    max_leaves=30,
)  # fmt: skip


COST = {"type": "session.usage", "id": "e1", "processed_at": "2026-11-01T00:00:00Z"}


@settings(max_examples=60, deadline=None)
@example([COST | {"usage": {"list_cost": {"amount": "9" * 5000, "currency": "USD"}}}], False, False)
@example([COST | {"usage": {"list_cost": {"amount": "9" * 400, "currency": "USD"}}}], False, True)
@example([COST | {"type": "user.message", "content": "\ud800", "id": "\ud800"}], False, True)
@example(
    [{"id": "t", "object": "agent.session.turn", "status": "completed", "error": {"message": "\ud800"}}], True, True
)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=10), max_size=5), st.booleans(), st.booleans())
def test_odd_answers_harm_nothing(stores: Any, objects: list[Any], of_openai: bool, stream: bool) -> None:
    dialect = by_name("agent_sessions" if of_openai else "managed_sessions")
    path = "/v1/agents/sessions/as_1/events" if of_openai else "/v1/sessions/sesn_1/events"
    body = json.dumps({"data": objects}).encode()
    if stream:
        body = b"".join(b"data: %b\n\n" % json.dumps(one).encode() for one in objects)
    found = session_facts(dialect, path, body, stream, 1)
    assert found is not None
    store = stores()
    done(store, lambda tape: record_events(tape, SpanEntry("r", "a1", start_ns=1), found, ("home", "a1"), None))
    for span in store.spans("home", "a1"):
        exchange = store.exchange(span)
        if exchange is not None:
            _ = by_name(span.dialect).read(exchange.request_body, exchange.response_body, False)


def test_what_waits_goes_with_its_rollout(stores: Any) -> None:
    """A rollout that is forgotten leaves no event behind, and its session begins anew."""
    store, events = stores(), story()[0]
    done(store, lambda tape: told(tape, events[:5]))
    assert len([*store.records("hosted")]) > 5
    done(store, lambda tape: forget_rollout(tape, "home"))
    assert [key for key, _ in store.records("hosted")] == [b"\0"]


async def test_secrets_stay_out_of_spans(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, http) as here, here.client() as client:
        here.host.begin(f"my key is {KEY}")
        _ = [one async for one in await client.beta.sessions.events.list("sesn_1")]
        (turn,) = [one for one in await here.spans() if one.kind == "llm"]
        read = await here.tape.get(f"/api/rollouts/{HOME}/attempts/a1/spans/{turn.sequence}")
        said = read["turn"]["messages"][0]["parts"][0]["text"]
        assert said.startswith("my key is ")
        assert KEY not in json.dumps(read)


@pytest.mark.slow
async def test_a_gateway_is_killed_while_it_streams(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """What the stream had told is there, and the list adds the rest."""
    async with session_host() as (host, url), running(tmp_path, upstream("a", url, "anthropic")) as gateway:
        here = World(host, gateway, Tape(gateway.url, http))
        async with here.client() as client:
            _ = await client.beta.sessions.create(agent="agent_1", environment_id="env_1")
            await here.tape.written()
            async with await client.beta.sessions.events.stream("sesn_1"):
                said: Any = {"type": "user.message", "content": [{"type": "text", "text": "the weather?"}]}
                await client.beta.sessions.events.send("sesn_1", events=[said])

                async def told() -> bool:
                    return counted(await here.spans_so_far()) == {"llm": 1, "tool": 0, "event": 2}

                await until(told)
                await gateway.kill()
        await gateway.restart()
        half = await here.spans()
        assert counted(half) == {"llm": 1, "tool": 0, "event": 2}
        host.go_on({"custom_tool_use_id": host.events[4]["id"], "content": [{"type": "text", "text": "sunny"}]})
        async with here.client() as client:
            for _ in range(2):
                _ = [one async for one in await client.beta.sessions.events.list("sesn_1", limit=4)]
                _ = [one async for one in await client.beta.sessions.threads.events.list("sthr_2", session_id="sesn_1")]
        spans = await here.spans()
        assert counted(spans) == SPANS
        assert spans[: len(half)] == half


@pytest.mark.slow
async def test_workers_take_an_event_once(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also when many clients read the same at once, and a worker is killed meanwhile."""
    async with session_host() as (host, url):
        config = upstream("a", url, "anthropic")
        async with running(tmp_path, config, "--workers", "2") as gateway:
            here = World(host, gateway, Tape(gateway.url, http))
            host.begin("the weather?")
            host.go_on({"custom_tool_use_id": host.events[4]["id"], "content": [{"type": "text", "text": "sunny"}]})

            async def read() -> None:
                async with here.client() as client:
                    _ = [one async for one in await client.beta.sessions.events.list("sesn_1", limit=4)]
                    of_thread = client.beta.sessions.threads.events.list("sthr_2", session_id="sesn_1")
                    _ = [one async for one in await of_thread]

            await asyncio.gather(*(read() for _ in range(8)))
            before = await here.spans()
            assert counted(before) == SPANS
            await gateway.kill()
            await gateway.restart()
            await asyncio.gather(*(read() for _ in range(4)))
            assert await here.spans() == before


@pytest.mark.parametrize(
    ("family", "direct", "taken"),
    [("anthropic", True, True), ("openai", True, False), ("openai", False, True)],
)
def test_a_host_that_the_agent_names_tells_only_of_its_own_api(family: Any, direct: bool, taken: bool) -> None:
    """Another could name the session of another rollout."""
    request = HttpRequest()
    request.method = "POST"
    dialect, held = by_name("managed_sessions"), BufferUsage(1 << 20)
    call = CallRequest(CallAddress("mine"), dialect, "/v1/sessions", b"{}")
    record = CallRecord(call, request, Redactor(), 1 << 20, held)
    upstream = UpstreamSettings(name="u", base_url="https://h.example", dialect=family)
    record.pool = DirectPool(upstream, ()) if direct else ConnectionPool(upstream)
    record.add_pieces([b'{"type": "session", "id": "sesn_of_another"}'], request.started)
    record.status, record.end_ns, record.http_status = "ok", 1, 200
    entry = record.entry(final=True)
    assert entry is not None
    assert (entry.follow is not None) == taken
