"""Exact sessions through a gateway: an agent on the official SDK, and an engine whose template writes the past anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from conftest import StartGateway
from fakes.many_turns import TOOL, Agent, told
from fakes.process import upstream
from fakes.raw import connect, post
from fakes.rig import Inside, inside
from fakes.scale_out import CHAT, DERENDER, GENERATE, RENDER, ScaleOut, scale_out
from fakes.tape import Tape
from fakes.toy_template import CALL, CALLED, END, Json, Template, parsed
from fakes.waiting import PATIENCE_S, until

from penstock.adapters.samples import Options, samples
from penstock.adapters.source import load
from penstock.adapters.tokens import read_outputs
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span
from penstock.gateway.traffic.proxy.call import HttpCall

ROUTE: Json = {"model": "policy*", "upstream": ["vllm"], "train": "exact"}
DRIFTS = Template(strips=True, rewrites=True, thinks=True)
GET = f'  Let me look. {CALL}{{"name":  "get", "arguments": {{"y":2,"x":1}}}}{CALLED}'
SAYS = [GET, GET + GET, " It is 42. ", "Because.\n"]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def tell(agent: Agent, vllm: ScaleOut, *says: str, **more: Any) -> list[Json]:
    """A turn for each of what the model says; the answers."""
    vllm.says += says
    return [await (agent.go_on(**more) if agent.called else agent.turn("Why?", **more)) for _ in says]


async def codes(tape: Tape, rollout: str) -> list[str]:
    """What is found of its calls."""
    found = Diagnosis.model_validate(await tape.get(f"/api/rollouts/{rollout}/diagnosis"))
    return [one.code for attempt in found.attempts for call in attempt.calls for one in call.findings]


def began(spans: list[Span]) -> list[str | None]:
    """Why each began a session, where it did."""
    return [(span.attributes or {}).get("penstock.session.began") for span in spans]


def sessions(spans: list[Span]) -> list[str]:
    return [(span.attributes or {})["penstock.session"] for span in spans]


@dataclass(frozen=True, slots=True)
class World:
    """A gateway in this process, whose route is exact unless told otherwise, before an engine; and an agent of it."""

    made: Inside
    vllm: ScaleOut
    agent: Agent

    def another(self, stream: bool = False, **asks: Any) -> Agent:
        """Another agent of the same attempt."""
        agent = Agent(self.made.base.url + self.made.path("/v1"), stream, **asks)
        agent.messages.append({"role": "system", "content": "Be good."})
        return agent

    async def story(self, *says: str, **more: Any) -> list[Json]:
        return await tell(self.agent, self.vllm, *says, **more)

    async def begun(self, *says: str) -> None:
        """The engine is to say more; so far it has said this."""
        _ = await self.story(*(says or (" Yes. ",)))

    async def spans(self, count: int) -> list[Span]:
        return await self.made.tape.spans(self.made.rollout, count)

    async def began(self, count: int) -> list[str | None]:
        return began(await self.spans(count))

    async def codes(self) -> list[str]:
        return await codes(self.made.tape, self.made.rollout)

    async def on_tape(self, span: Span) -> tuple[str, list[str]]:
        """What the engine read and what it said, as text, by the ids on the tape."""
        outputs = read_outputs(await self.made.tape.raw(span, "response"), span.stream)
        assert outputs
        assert all(output.scored for output in outputs)
        said = [self.vllm.words.decode(output.ids.tolist()) for output in outputs]
        return self.vllm.words.decode(outputs[0].prompt.tolist()), said

    async def parties(self, span: Span) -> list[str]:
        """Those that were spoken with in another format."""
        exchange = (await self.made.tape.detail(span)).exchange
        return [] if exchange is None else [side.who for side in exchange.sides]


@asynccontextmanager
async def exact(
    home: Path, http: aiohttp.ClientSession, stream: bool = False, names: tuple[str, ...] = ("vllm",), **route: object
) -> AsyncGenerator[World]:
    """`names`: the upstreams of the route; nobody is at `gone`."""
    async with scale_out() as vllm:
        vllm.template = DRIFTS
        urls = {"vllm": vllm.openai_url, "gone": "http://127.0.0.1:1/v1"}
        upstreams = [{"name": name, "base_url": urls[name]} for name in names]
        async with inside(home, http, upstream=upstreams, route=[ROUTE | {"upstream": list(names)} | route]) as made:
            world = World(made, vllm, Agent(""))
            yield World(made, vllm, world.another(stream))


@pytest.fixture
def stream() -> bool:
    """Whether the agent streams; tests may say so."""
    return False


@pytest.fixture
async def it(tmp_path: Path, http: aiohttp.ClientSession, stream: bool) -> AsyncGenerator[World]:
    async with exact(tmp_path, http, stream) as made:
        yield made


@BOTH
async def test_without_it_the_past_is_retokenised(tmp_path: Path, http: aiohttp.ClientSession, stream: bool) -> None:
    async with exact(tmp_path, http, stream, train=True) as it:
        await it.story(*SAYS)
        await it.spans(4)
        assert await it.codes() == ["retokenised"] * 3
        assert {path for path, _ in it.vllm.asked} == {CHAT}


@BOTH
async def test_a_conversation_goes_on_from_the_very_tokens(it: World) -> None:
    """Usage is told, and a rollout is one sample."""
    if it.agent.stream:
        it.agent.asks["stream_options"] = {"include_usage": True}
    answers = await it.story(*SAYS)
    assert [told(answer) for answer in answers] == [told({"message": parsed(text)}) for text in SAYS]
    spans, read = await it.spans(4), ""
    for span, text in zip(spans, SAYS, strict=True):
        prompt, said = await it.on_tape(span)
        assert said == [text + END]
        assert prompt.startswith(read)
        read = prompt + said[0]
    assert [span.finish for span in spans] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert began(spans) == ["first", None, None, None]
    assert len(set(sessions(spans))) == 1
    assert it.made.gateway.metrics.exact_calls == {("first",): 1, ("generate",): 3}
    usage = spans[-1].usage
    assert usage is not None
    asked = len(it.vllm.of(GENERATE)[-1]["token_ids"])
    assert (usage.input_tokens, usage.output_tokens) == (asked, len(SAYS[-1]) + 1)

    async with Client(it.made.base.url) as client:
        await client.reward(it.made.rollout, "a1", Judgement(value=1.0))
        assert await it.codes() == []
        (episode,) = [one async for one in load(client, client.rollouts(""))]
    (sample,), report = samples(episode, Options(model="policy"))
    assert (len(sample.segments), report.reasons) == (4, {})
    made_by_model = "".join(it.vllm.words.decode(sample.response[sample.mask].tolist()))
    assert made_by_model == END.join([*SAYS, ""])


@BOTH
async def test_an_agent_that_strips_texts_and_drops_blank_ones_goes_on(it: World) -> None:
    """As Claude Code does: what stands between `</think>` and `<tool_call>` never comes back."""
    call = f'{CALL}{{"name":"get","arguments":{{}}}}{CALLED}'
    says = [f"<think>\nHm.\n</think>\n\n{call}", f"\n\n{call}", "\n It is 42.\n"]
    it.vllm.says += says
    it.agent.messages.append({"role": "user", "content": "Why?"})
    for _ in says:
        await it.agent.go_on()
        for message in it.agent.messages:
            if message["role"] == "assistant":
                message["content"] = (message["content"] or "").strip() or None
    await it.agent.turn("Sure?")
    spans = await it.spans(4)
    assert began(spans) == ["first", None, None, None]
    assert len(set(sessions(spans))) == 1
    prompt, _ = await it.on_tape(spans[-1])
    assert all(text + END in prompt for text in says)
    found = Diagnosis.model_validate(await it.made.tape.get(f"/api/rollouts/{it.made.rollout}/diagnosis"))
    assert [call.goes_on for call in found.attempts[0].calls] == [None, 1, 2, 3]


@pytest.mark.parametrize("stream", [True])
async def test_the_engines_own_bytes_are_on_the_tape(it: World) -> None:
    await it.story(*SAYS[:2])
    (first, second), tape = await it.spans(2), it.made.tape
    assert not await it.parties(first)
    asked = json.loads(await tape.raw(second, "request", "engine"))
    assert asked == it.vllm.of(GENERATE)[0]
    outputs = read_outputs(await tape.raw(second, "response"), True)
    assert outputs
    assert asked["token_ids"] == outputs[0].prompt.tolist()
    lines = (await tape.raw(second, "response", "engine")).decode().splitlines()
    events = [json.loads(line[6:]) for line in lines if line[6:] not in ("", "[DONE]")]
    ids = [id for event in events for choice in event["choices"] for id in choice["token_ids"]]
    assert ids == outputs[0].ids.tolist()


@BOTH
async def test_where_the_template_says_the_very_tokens_chat_is_asked(it: World) -> None:
    it.vllm.template = Template()
    # A single character is one token, to the model and to the tokenizer.
    await it.story("A", "B", "C")
    assert await it.began(3) == ["first", None, None]
    assert not it.vllm.of(GENERATE) + it.vllm.of(DERENDER)
    assert await it.codes() == []
    assert it.made.gateway.metrics.exact_calls == {("first",): 1, ("chat",): 2}


@BOTH
async def test_an_agent_that_asks_for_tokens_itself_gets_them(
    it: World, http: aiohttp.ClientSession, stream: bool
) -> None:
    it.vllm.says += SAYS
    more = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2, "stream": stream}
    body: Json = {"model": "policy", "messages": [{"role": "user", "content": "Go."}]} | more
    for number in range(2):
        async with http.post(it.made.base.url + it.made.path(CHAT), json=body) as response:
            assert response.status == 200
            outputs = read_outputs(await response.read(), stream)
        assert outputs
        assert it.vllm.words.decode(outputs[0].ids.tolist()) == SAYS[number] + END
        body["messages"] += [parsed(SAYS[0], ["chatcmpl-tool-1"]), {"role": "user", "content": "Go on."}]
    assert await it.began(2) == ["first", None]
    assert len(it.vllm.of(GENERATE)) == 1


@BOTH
async def test_every_one_of_several_choices(it: World) -> None:
    await it.begun()
    it.vllm.says += [" A ", GET, " C "]
    it.agent.messages.append({"role": "user", "content": "And?"})
    it.agent.asks["n"] = 3
    texts = [choice["message"]["content"] for choice in await it.agent.choices()]
    it.agent.asks["n"] = 1
    assert texts == [" A ", "  Let me look. ", " C "]
    assert (await it.on_tape((await it.spans(2))[1]))[1] == [" A " + END, GET + END, " C " + END]
    # Each of them can be gone on from.
    it.agent.messages.append({"role": "assistant", "content": " C "})
    await it.agent.turn("Why C?")
    prompt, _ = await it.on_tape((await it.spans(3))[2])
    assert " Yes. " + END in prompt
    assert " C " + END in prompt


@BOTH
@pytest.mark.parametrize("include", [False, True])
async def test_a_text_that_ends_the_answer_is_cut_off(it: World, include: bool) -> None:
    it.agent.asks["stop"] = ["Observation:", "@@"]
    says = [" Yes. ", " I Observe.@ Observation: no", "ok"]
    answers = await it.story(*says, include_stop_str_in_output=include)
    cut = " I Observe.@ " + ("Observation:" if include else "")
    assert [answer["message"]["content"] for answer in answers[:2]] == [" Yes. ", cut]
    assert await it.began(3) == ["first", None, "cut"]


async def test_text_flows_while_the_model_writes(it: World) -> None:
    await it.begun()
    it.vllm.hold, text = 6, "one two three"
    it.vllm.says.append(text)
    it.agent.messages.append({"role": "user", "content": "Count."})
    got = ""
    async with it.agent.client() as client:
        create: Any = client.chat.completions.create
        async for chunk in await create(messages=it.agent.messages, stream=True, **it.agent.asks):
            got += "".join(choice.delta.content or "" for choice in chunk.choices)
            if got == text[:6]:
                # All that was made so far is here, and the model has not gone on.
                it.vllm.go.set()
    assert got == text


async def test_a_client_that_leaves_ends_the_generation(it: World) -> None:
    await it.begun()
    it.vllm.hold = 3
    it.vllm.says.append("one two three")
    it.agent.messages.append({"role": "user", "content": "Count."})
    async with it.agent.client() as client:
        create: Any = client.chat.completions.create
        stream = await create(messages=it.agent.messages, stream=True, **it.agent.asks)
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(PATIENCE_S):
        await it.vllm.cancelled.wait()
    _, left = await it.spans(2)
    assert (left.status, left.error) == ("cancelled", "client_gone")
    assert await it.parties(left) == ["engine"]
    # What was not answered to its end is not gone on from; what was before it is.
    it.vllm.hold = None
    await it.agent.go_on()
    assert await it.began(3) == ["first", None, None]


async def test_an_agent_that_reads_slowly_holds_its_answer_back(it: World) -> None:
    it.agent.stream = True
    await it.begun()
    it.vllm.hold = 3
    it.vllm.says.append("one two three")
    asked = asyncio.ensure_future(it.agent.turn("Why?"))
    await it.vllm.until(DERENDER)
    (call,) = it.made.gateway.proxy.running
    assert isinstance(call, HttpCall)
    call.hold()
    it.vllm.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await it.vllm.generated.wait()
    assert not asked.done()
    call.go_on()
    assert told(await asked) == ("one two three", [])


def broken(name: str, value: object) -> Callable[[World], None]:
    """The engine is so from here on."""
    return lambda it: setattr(it.vllm, name, value)


def cannot_read_out(it: World) -> None:
    it.vllm.derender_fails = [400]


def too_old(it: World) -> None:
    it.vllm.enabled, it.vllm.unknown = False, True


def unreachable(it: World) -> None:
    it.made.gateway.pools["vllm"].origin = "http://127.0.0.1:1"


FAULTS = {
    "breaks off": (broken("breaks", 3), [True], openai.APIConnectionError, None, "upstream_closed"),
    "fails": (broken("fails", 3), [True], openai.APIError, "out of memory", "stream_error"),
    "cannot be read out": (cannot_read_out, [True, False], openai.APIError, None, "upstream_protocol"),
    "no model": (
        broken("models", {"another"}),
        [False],
        openai.NotFoundError,
        "The model `policy` does not",
        "http_404",
    ),
    "no flag": (broken("enabled", False), [True, False], openai.APIStatusError, "'vllm'.*--enable-scale", "scale_out"),
    "too old": (too_old, [True, False], openai.APIStatusError, "'vllm'.*--enable-scale", "scale_out"),
    "unreachable": (unreachable, [False], openai.APIStatusError, "502.*could not be reached", "connect"),
}
"""(what is wrong, whether the agent streams, what its SDK raises, what that says, the error of the span)."""


@pytest.mark.parametrize(
    ("fault", "stream"), [(name, stream) for name, (_, streams, *_) in FAULTS.items() for stream in streams]
)
async def test_an_engine_that_fails_says_so_as_its_chat_endpoint_does(it: World, fault: str) -> None:
    breaks, _, error, says, code = FAULTS[fault]
    begun = fault not in ("no flag", "too old", "unreachable")
    if begun:
        await it.begun()
    breaks(it)
    it.vllm.says.append("one two three")
    with pytest.raises(error, match=says):
        await it.agent.turn("Why?")
    span = (await it.spans(1 + begun))[-1]
    assert (span.status, span.error) == ("error", code)
    if fault == "fails":
        told = b'data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n'
        assert (await it.made.tape.raw(span, "response")).endswith(told)


@BOTH
@pytest.mark.parametrize("failures", [[0], [0, 0, 503], [500, 429]], ids=str)
async def test_a_derender_that_fails_for_a_while_costs_no_answer(it: World, failures: list[int]) -> None:
    await it.begun()
    it.vllm.derender_fails, it.vllm.says = failures.copy(), [GET]
    assert told(await it.agent.turn("Why?")) == told({"message": parsed(GET)})
    assert not it.vllm.derender_fails
    spans = await it.spans(2)
    assert [span.status for span in spans] == ["ok", "ok"]
    assert (await it.on_tape(spans[1]))[1] == [GET + END]


async def test_a_call_that_is_refused_for_its_parameters_is_in_no_session(it: World) -> None:
    for _ in range(2):
        it.agent.asks["temperature"] = 3
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            await it.agent.turn("Why?")
        it.agent.messages.pop()
        it.agent.asks["temperature"] = 1
        await it.begun()
    spans = await it.spans(4)
    assert [span.status for span in spans] == ["error", "ok", "error", "ok"]
    assert began(spans) == [None, "first", None, None]
    assert ["penstock.session" in (span.attributes or {}) for span in spans] == [False, True, False, True]


async def test_what_is_answered_though_it_could_not_be_rendered_begins_a_session(it: World) -> None:
    await it.begun()
    it.vllm.render_fails = 1
    await it.begun(" So. ", " Ah. ")
    assert await it.began(3) == ["first", "unrendered", None]


@BOTH
async def test_calls_that_go_on_at_the_same_time_are_sessions_of_their_own(it: World, stream: bool) -> None:
    await it.begun()
    agents = [it.another(stream) for _ in range(3)]
    # Not before all three have come does the first one get an answer.
    it.vllm.hold, it.vllm.says = (3, []) if stream else (None, ["ok"] * 3)
    for one in agents:
        one.messages = [*it.agent.messages]
    asked = [asyncio.ensure_future(one.turn(f"And {at}?")) for at, one in enumerate(agents)]
    await it.vllm.until(GENERATE, 3)
    it.vllm.go.set()
    await asyncio.gather(*asked)
    it.vllm.hold = None
    spans = await it.spans(4)
    assert sorted(map(str, began(spans))) == ["None", "first", "forked", "forked"]
    assert len(set(sessions(spans))) == 3
    assert await it.codes() == []
    # And each of them goes on.
    for one in agents:
        await one.turn("Then?")
    assert sorted(map(str, await it.began(7))) == ["None"] * 4 + ["first"] + ["forked"] * 2


async def test_one_that_was_given_up_leaves_the_session_to_the_next(it: World) -> None:
    await it.begun()
    it.vllm.derender_fails = [400]
    with pytest.raises(openai.APIError):
        await it.agent.turn("Why?")
    await it.agent.go_on()
    spans = await it.spans(3)
    assert began(spans) == ["first", None, None]
    assert len(set(sessions([spans[0], spans[2]]))) == 1


@pytest.mark.parametrize("names", [("gone", "vllm"), ("vllm", "gone")])
async def test_one_of_several_upstreams_that_cannot_be_reached_costs_nothing(
    tmp_path: Path, http: aiohttp.ClientSession, names: tuple[str, ...]
) -> None:
    async with exact(tmp_path, http, True, names) as it:
        await it.story(*SAYS)
        spans = await it.spans(4)
        assert [span.upstream for span in spans] == ["vllm"] * 4
        assert began(spans) == ["first", None, None, None]
        for span in spans:
            assert b'"role"' in await it.made.tape.raw(span, "response")
        # From then on it rests.
        assert (it.made.gateway.metrics.upstream_retries["gone", "connect"] >= 1) == (names[0] == "gone")


# -- where a session ends ----------------------------------------------------------------------------------------------


async def test_a_fork_has_the_same_tokens_and_another_name(it: World) -> None:
    await it.begun(" Yes. ", " Because. ")
    del it.agent.messages[3:]
    await it.agent.turn("Where?")
    spans = await it.spans(3)
    assert began(spans) == ["first", None, "forked"]
    assert len(set(sessions(spans))) == 2
    assert " Yes. " + END in (await it.on_tape(spans[2]))[0]
    assert await it.codes() == []


def compacts(it: World) -> None:
    it.agent.messages[2] = {"role": "assistant", "content": "A summary."}


def asks_again(it: World) -> None:
    del it.agent.messages[3:]


def has_more_tools(it: World) -> None:
    it.agent.asks["tools"] = [TOOL, {"type": "function", "function": {"name": "put"}}]


def has_another_template(it: World) -> None:
    it.vllm.template = Template(strips=True, moves=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [(compacts, "compacted"), (asks_again, "forked"), (has_more_tools, "tools"), (has_another_template, "template")],
)
async def test_what_begins_another_session(it: World, change: Callable[[World], None], why: str) -> None:
    await it.begun(" Yes. ", " Because. ")
    change(it)
    await it.agent.turn("Why?")
    assert await it.began(3) == ["first", None, why]


async def test_an_answer_that_was_cut_off_ends_its_session(it: World) -> None:
    it.agent.asks["max_tokens"] = 4
    await it.begun(" Yes, because. ", "ok")
    assert await it.began(2) == ["first", "cut"]


async def test_pictures_are_not_gone_on_from(it: World, http: aiohttp.ClientSession) -> None:
    await it.begun()
    it.agent.messages[1]["content"] = [{"type": "text", "text": "Why?"}]
    it.agent.messages.append({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]})
    body = {"model": "policy", "messages": it.agent.messages, "tools": [TOOL]}
    async with http.post(it.made.base.url + it.made.path(CHAT), json=body):
        pass
    assert await it.began(2) == ["first", "media"]


async def test_sub_agents_and_their_planner_have_sessions_of_their_own(it: World) -> None:
    await it.begun()
    other = it.another()
    other.messages = [{"role": "system", "content": "Be quick."}]
    await tell(other, it.vllm, " I am. ", " And how. ")
    await it.agent.turn("Why?")
    spans = await it.spans(4)
    assert began(spans) == ["first", "first", None, None]
    assert sessions(spans) == [sessions(spans)[at] for at in (0, 1, 1, 0)]


# -- what is not in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_session_goes_on_after_a_restart(
    start_gateway: StartGateway, http: aiohttp.ClientSession, how: str
) -> None:
    async with scale_out() as vllm:
        vllm.template = DRIFTS
        route = '[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = "exact"\n\n'
        strict = '[tape]\nrecord = "strict"\n'
        gateway = await start_gateway(route + upstream("vllm", vllm.openai_url, "openai") + strict)
        agent, tape = Agent(gateway.openai("r1"), stream=True), Tape(gateway.url, http)
        await tell(agent, vllm, *SAYS[:2])
        await (gateway.kill() if how == "kill" else gateway.terminate())
        await gateway.start(gateway.port)
        await agent.go_on()
        spans = await tape.spans("r1", 3)
        assert began(spans) == ["first", None, None]
        assert len(set(sessions(spans))) == 1
        assert await codes(tape, "r1") == []


async def test_calls_wait_while_weights_change(it: World, http: aiohttp.ClientSession) -> None:
    await it.begun()
    gate = it.made.gateway.pools["vllm"].gate
    gate.pause(60)
    before = len(it.vllm.asked)
    asked = asyncio.ensure_future(it.agent.turn("Why?"))

    async def is_told() -> bool:
        async with http.get(f"{it.made.base.url}/metrics") as metrics:
            return 'penstock_upstream_waiting{upstream="vllm"} 1' in await metrics.text()

    await until(is_told)
    assert len(it.vllm.asked) == before
    gate.open()
    await asked
    assert await it.began(2) == ["first", None]


async def test_other_models_and_apis_are_let_alone(it: World) -> None:
    it.vllm.models.add("judge")
    body: Json = {"model": "policy", "messages": [{"role": "user", "content": "Go."}], "echo": True}
    async with connect(it.made.base.url) as client:
        client.send(post(it.made.path(CHAT), json.dumps(body).encode()))
        assert b" 200 " in await client.message()
    (span,) = await it.spans(1)
    assert "penstock.session" not in (span.attributes or {})
    assert not it.vllm.of(RENDER)
