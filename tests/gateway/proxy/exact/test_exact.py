"""Exact sessions through a gateway: an agent on the official SDK, and an engine whose template writes the past anew."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
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
from fakes.waiting import PATIENCE_S

from penstock.adapters.samples import Options, samples
from penstock.adapters.source import load
from penstock.adapters.tokens import read_outputs
from penstock.gateway.client.client import Client
from penstock.gateway.model.answers import Diagnosis
from penstock.gateway.model.rollout import Judgement
from penstock.gateway.model.span import Span
from penstock.gateway.proxy.call import Call

ROUTE: Json = {"model": "policy*", "upstream": ["vllm"], "train": "exact"}
DRIFTS = Template(strips=True, rewrites=True, thinks=True)
GET = f'  Let me look. {CALL}{{"name":  "get", "arguments": {{"y":2,"x":1}}}}{CALLED}'
SAYS = [GET, GET + GET, " It is 42. ", "Because.\n"]
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


@pytest.fixture
async def vllm() -> AsyncGenerator[ScaleOut]:
    async with scale_out() as made:
        made.template = DRIFTS
        yield made


@asynccontextmanager
async def exact(home: Path, http: aiohttp.ClientSession, vllm: ScaleOut, **more: object) -> AsyncGenerator[Inside]:
    """A gateway in this process, whose route is exact unless told otherwise."""
    upstreams = [{"name": "vllm", "base_url": vllm.openai_url}]
    async with inside(home, http, upstream=upstreams, route=[ROUTE | more]) as made:
        yield made


@pytest.fixture
async def made(tmp_path: Path, http: aiohttp.ClientSession, vllm: ScaleOut) -> AsyncGenerator[Inside]:
    async with exact(tmp_path, http, vllm) as made:
        yield made


def agent_of(made: Inside, stream: bool = False, **asks: Any) -> Agent:
    """An agent of the test's rollout."""
    agent = Agent(made.base.url + made.path("/v1"), stream, **asks)
    agent.messages.append({"role": "system", "content": "Be good."})
    return agent


async def story(agent: Agent, vllm: ScaleOut, says: Sequence[str], **more: Any) -> list[Json]:
    """A turn for each of what the model says."""
    vllm.says += says
    return [await (agent.go_on(**more) if agent.called else agent.turn("Why?", **more)) for _ in says]


async def diagnosed(tape: Tape, rollout: str) -> Diagnosis:
    return Diagnosis.model_validate(await tape.get(f"/api/rollouts/{rollout}/diagnosis"))


def codes(diagnosis: Diagnosis) -> list[str]:
    return [one.code for attempt in diagnosis.attempts for call in attempt.calls for one in call.findings]


def began(spans: Sequence[Span]) -> list[str | None]:
    return [(span.attributes or {}).get("penstock.session.began") for span in spans]


def sessions(spans: Sequence[Span]) -> list[str]:
    return [(span.attributes or {})["penstock.session"] for span in spans]


async def sides(made: Inside, span: Span) -> list[Any]:
    """Parties that were spoken with in another format."""
    exchange = (await made.tape.detail(span)).exchange
    return [] if exchange is None else list(exchange.sides)


async def on_tape(made: Inside, vllm: ScaleOut, span: Span) -> tuple[str, list[str]]:
    """What the engine read and what it said, as text, by the ids on the tape."""
    outputs = read_outputs(await made.tape.raw(span, "response"), span.stream)
    assert outputs
    assert all(output.scored for output in outputs)
    said = [vllm.words.decode(output.ids.tolist()) for output in outputs]
    return vllm.words.decode(outputs[0].prompt.tolist()), said


@BOTH
async def test_without_it_the_past_is_retokenised(
    tmp_path: Path, http: aiohttp.ClientSession, vllm: ScaleOut, stream: bool
) -> None:
    async with exact(tmp_path, http, vllm, train=True) as made:
        await story(agent_of(made, stream), vllm, SAYS)
        await made.tape.spans(made.rollout, 4)
        assert codes(await diagnosed(made.tape, made.rollout)) == ["retokenised"] * 3
    assert {path for path, _ in vllm.asked} == {CHAT}


@BOTH
async def test_a_conversation_goes_on_from_the_very_tokens(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    answers = await story(agent_of(made, stream), vllm, SAYS)
    assert [told(answer) for answer in answers] == [told({"message": parsed(text)}) for text in SAYS]
    spans = await made.tape.spans(made.rollout, 4)
    read = ""
    for span, text in zip(spans, SAYS, strict=True):
        prompt, said = await on_tape(made, vllm, span)
        assert said == [text + END]
        assert prompt.startswith(read)
        read = prompt + said[0]
    assert [span.finish for span in spans] == ["tool_calls", "tool_calls", "stop", "stop"]
    assert began(spans) == ["first", None, None, None]
    assert len(set(sessions(spans))) == 1
    assert made.gateway.metrics.exact_calls == {("first",): 1, ("generate",): 3}


@BOTH
async def test_a_rollout_is_one_sample_and_nothing_is_retokenised(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    await story(agent_of(made, stream), vllm, SAYS)
    await made.tape.spans(made.rollout, 4)
    async with Client(made.base.url) as client:
        await client.reward(made.rollout, "a1", Judgement(value=1.0))
        found = await diagnosed(made.tape, made.rollout)
        assert codes(found) == []
        assert found.attempts[0].sequences == 1
        (episode,) = [one async for one in load(client, client.rollouts(""))]
    (sample,), report = samples(episode, Options(model="policy"))
    assert len(sample.segments) == 4
    assert not report.reasons
    made_by_model = "".join(vllm.words.decode(sample.response[sample.mask].tolist()))
    assert made_by_model == END.join([*SAYS, ""])


@BOTH
async def test_an_agent_that_strips_texts_and_drops_blank_ones_goes_on(
    made: Inside, vllm: ScaleOut, stream: bool
) -> None:
    """As Claude Code does: what stands between `</think>` and `<tool_call>` never comes back."""
    call = f'{CALL}{{"name":"get","arguments":{{}}}}{CALLED}'
    says = [f"<think>\nHm.\n</think>\n\n{call}", f"\n\n{call}", "\n It is 42.\n"]
    vllm.says, agent = says.copy(), agent_of(made, stream)
    agent.messages.append({"role": "user", "content": "Why?"})
    for _ in says:
        await agent.go_on()
        for message in agent.messages:
            if message["role"] == "assistant":
                message["content"] = (message["content"] or "").strip() or None
    await agent.turn("Sure?")
    spans = await made.tape.spans(made.rollout, 4)
    assert began(spans) == ["first", None, None, None]
    assert len(set(sessions(spans))) == 1
    prompt, _ = await on_tape(made, vllm, spans[-1])
    assert all(text + END in prompt for text in says)
    found = await diagnosed(made.tape, made.rollout)
    assert [call.goes_on for call in found.attempts[0].calls] == [None, 1, 2, 3]


async def test_the_engines_own_bytes_are_on_the_tape(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made, stream=True)
    await story(agent, vllm, SAYS[:2])
    first, second = await made.tape.spans(made.rollout, 2)
    assert not await sides(made, first)
    asked = json.loads(await made.tape.raw(second, "request", "engine"))
    assert asked == vllm.of(GENERATE)[0]
    outputs = read_outputs(await made.tape.raw(second, "response"), True)
    answer = await made.tape.raw(second, "response", "engine")
    assert outputs
    assert asked["token_ids"] == outputs[0].prompt.tolist()
    events = [json.loads(line[6:]) for line in answer.decode().splitlines() if line[6:] not in ("", "[DONE]")]
    assert [id for event in events for choice in event["choices"] for id in choice["token_ids"]] == outputs[
        0
    ].ids.tolist()


@BOTH
async def test_where_the_template_says_the_very_tokens_chat_is_asked(
    made: Inside, vllm: ScaleOut, stream: bool
) -> None:
    vllm.template = Template()
    # A single character is one token, to the model and to the tokenizer.
    await story(agent_of(made, stream), vllm, ["A", "B", "C"])
    assert began(await made.tape.spans(made.rollout, 3)) == ["first", None, None]
    assert not vllm.of(GENERATE) + vllm.of(DERENDER)
    assert codes(await diagnosed(made.tape, made.rollout)) == []
    assert made.gateway.metrics.exact_calls == {("first",): 1, ("chat",): 2}


@BOTH
async def test_an_agent_that_asks_for_tokens_itself_gets_them(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    vllm.says += SAYS
    more = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2, "stream": stream}
    body: Json = {"model": "policy", "messages": [{"role": "user", "content": "Go."}]} | more
    async with aiohttp.ClientSession() as http:
        for number in range(2):
            async with http.post(made.base.url + made.path(CHAT), json=body) as response:
                assert response.status == 200
                outputs = read_outputs(await response.read(), stream)
            assert outputs
            assert vllm.words.decode(outputs[0].ids.tolist()) == SAYS[number] + END
            body["messages"] += [parsed(SAYS[0], ["chatcmpl-tool-1"]), {"role": "user", "content": "Go on."}]
    spans = await made.tape.spans(made.rollout, 2)
    assert began(spans) == ["first", None]
    assert len(vllm.of(GENERATE)) == 1


@BOTH
async def test_every_one_of_several_choices(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    agent = agent_of(made, stream)
    await story(agent, vllm, [" Yes. "])
    vllm.says += [" A ", GET, " C "]
    agent.messages.append({"role": "user", "content": "And?"})
    agent.asks["n"] = 3
    texts = [choice["message"]["content"] for choice in await agent.choices()]
    agent.asks["n"] = 1
    assert texts == [" A ", "  Let me look. ", " C "]
    spans = await made.tape.spans(made.rollout, 2)
    assert (await on_tape(made, vllm, spans[1]))[1] == [" A " + END, GET + END, " C " + END]
    # Each of them can be gone on from.
    agent.messages.append({"role": "assistant", "content": " C "})
    await agent.turn("Why C?")
    third = (await made.tape.spans(made.rollout, 3))[2]
    prompt, _ = await on_tape(made, vllm, third)
    assert " Yes. " + END in prompt
    assert " C " + END in prompt


@BOTH
@pytest.mark.parametrize("include", [False, True])
async def test_a_text_that_ends_the_answer_is_cut_off(
    made: Inside, vllm: ScaleOut, stream: bool, include: bool
) -> None:
    agent = agent_of(made, stream, stop=["Observation:", "@@"])
    says = [" Yes. ", " I Observe.@ Observation: no", "ok"]
    answers = await story(agent, vllm, says, include_stop_str_in_output=include)
    assert [answer["message"]["content"] for answer in answers[:2]] == [
        " Yes. ",
        " I Observe.@ " + ("Observation:" if include else ""),
    ]
    assert began(await made.tape.spans(made.rollout, 3)) == ["first", None, "cut"]


@BOTH
async def test_usage_is_told(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    asks: Json = {"stream_options": {"include_usage": True}} if stream else {}
    await story(agent_of(made, stream, **asks), vllm, SAYS)
    last = (await made.tape.spans(made.rollout, 4))[-1]
    assert last.usage is not None
    assert last.usage.output_tokens == len(SAYS[-1]) + 1
    assert last.usage.input_tokens == len(vllm.of(GENERATE)[-1]["token_ids"])


async def test_text_flows_while_the_model_writes(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.hold, text = 6, "one two three"
    vllm.says.append(text)
    agent.messages.append({"role": "user", "content": "Count."})
    got = ""
    async with agent.client() as client:
        create: Any = client.chat.completions.create
        async for chunk in await create(messages=agent.messages, stream=True, **agent.asks):
            got += "".join(choice.delta.content or "" for choice in chunk.choices)
            if got == text[:6]:
                # All that was made so far is here, and the model has not gone on.
                vllm.go.set()
    assert got == text


async def test_a_client_that_leaves_ends_the_generation(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.hold = 3
    vllm.says.append("one two three")
    agent.messages.append({"role": "user", "content": "Count."})
    async with agent.client() as client:
        create: Any = client.chat.completions.create
        stream = await create(messages=agent.messages, stream=True, **agent.asks)
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(PATIENCE_S):
        await vllm.cancelled.wait()
    spans = await made.tape.spans(made.rollout, 2)
    assert (spans[1].status, spans[1].error) == ("cancelled", "client_gone")
    assert [side.who for side in await sides(made, spans[1])] == ["engine"]
    # What was not answered to its end is not gone on from; what was before it is.
    vllm.hold = None
    await agent.go_on()
    assert began(await made.tape.spans(made.rollout, 3)) == ["first", None, None]


async def test_an_engine_that_breaks_off_breaks_the_call(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.breaks, agent.stream = 3, True
    vllm.says.append("one two three")
    with pytest.raises(openai.APIConnectionError):
        await agent.turn("Why?")
    spans = await made.tape.spans(made.rollout, 2)
    assert (spans[1].status, spans[1].error) == ("error", "upstream_closed")


async def test_an_engine_that_fails_says_so_as_its_chat_endpoint_does(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made, stream=True)
    await story(agent, vllm, [" Yes. "])
    vllm.fails = 3
    vllm.says.append("one two three")
    with pytest.raises(openai.APIError, match="out of memory"):
        await agent.turn("Why?")
    spans = await made.tape.spans(made.rollout, 2)
    assert (await made.tape.raw(spans[1], "response")).endswith(
        b'data: {"error":{"message":"out of memory","code":500}}\n\ndata: [DONE]\n\n'
    )


async def test_an_agent_that_reads_slowly_holds_its_answer_back(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made, stream=True)
    await story(agent, vllm, [" Yes. "])
    vllm.hold = 3
    vllm.says.append("one two three")
    asked = asyncio.ensure_future(agent.turn("Why?"))
    await vllm.until(DERENDER)
    (call,) = made.gateway.proxy.running
    assert isinstance(call, Call)
    call.hold()
    vllm.go.set()
    async with asyncio.timeout(PATIENCE_S):
        await vllm.generated.wait()
    assert not asked.done()
    call.go_on()
    assert told(await asked) == ("one two three", [])


@BOTH
@pytest.mark.parametrize("unknown", [False, True])
async def test_an_engine_without_the_flag_is_a_clear_error(
    made: Inside, vllm: ScaleOut, stream: bool, unknown: bool
) -> None:
    vllm.enabled, vllm.unknown = False, unknown
    with pytest.raises(openai.APIStatusError) as caught:
        await agent_of(made, stream).turn("Go.")
    assert caught.value.status_code == 502
    assert "--enable-scale-out" in caught.value.message
    assert "'vllm'" in caught.value.message
    (span,) = await made.tape.spans(made.rollout, 1)
    assert (span.status, span.error) == ("error", "scale_out")


@BOTH
@pytest.mark.parametrize("failures", [[0], [0, 0, 503], [500, 429]], ids=str)
async def test_a_derender_that_fails_for_a_while_costs_no_answer(
    made: Inside, vllm: ScaleOut, stream: bool, failures: list[int]
) -> None:
    agent = agent_of(made, stream)
    await story(agent, vllm, [" Yes. "])
    vllm.derender_fails, vllm.says = failures.copy(), [GET]
    assert told(await agent.turn("Why?")) == told({"message": parsed(GET)})
    assert not vllm.derender_fails
    spans = await made.tape.spans(made.rollout, 2)
    assert [span.status for span in spans] == ["ok", "ok"]
    assert (await on_tape(made, vllm, spans[1]))[1] == [GET + END]


@BOTH
async def test_a_derender_that_refuses_breaks_the_answer(made: Inside, vllm: ScaleOut, stream: bool) -> None:
    agent = agent_of(made, stream)
    await story(agent, vllm, [" Yes. "])
    vllm.derender_fails = [400]
    with pytest.raises(openai.APIError):
        await agent.turn("Why?")
    spans = await made.tape.spans(made.rollout, 2)
    assert (spans[1].status, spans[1].error) == ("error", "upstream_protocol")


async def test_a_call_that_is_refused_for_its_parameters_is_in_no_session(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made, temperature=3)
    for _ in range(2):
        with pytest.raises(openai.BadRequestError, match="temperature must be"):
            await agent.turn("Why?")
        agent.messages.pop()
        agent.asks["temperature"] = 1
        await story(agent, vllm, [" Yes. "])
        agent.asks["temperature"] = 3
    spans = await made.tape.spans(made.rollout, 4)
    assert [span.status for span in spans] == ["error", "ok", "error", "ok"]
    assert began(spans) == [None, "first", None, None]
    assert ["penstock.session" in (span.attributes or {}) for span in spans] == [False, True, False, True]


async def test_what_is_answered_though_it_could_not_be_rendered_begins_a_session(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.render_fails = 1
    await story(agent, vllm, [" So. ", " Ah. "])
    assert began(await made.tape.spans(made.rollout, 3)) == ["first", "unrendered", None]


@BOTH
async def test_calls_that_go_on_at_the_same_time_are_sessions_of_their_own(
    made: Inside, vllm: ScaleOut, stream: bool
) -> None:
    agent = agent_of(made, stream)
    await story(agent, vllm, [" Yes. "])
    agents = [agent_of(made, stream) for _ in range(3)]
    # Not before all three have come does the first one get an answer.
    vllm.hold, vllm.says = (3, []) if stream else (None, ["ok"] * 3)
    for one in agents:
        one.messages = [*agent.messages]
    asked = [asyncio.ensure_future(one.turn(f"And {at}?")) for at, one in enumerate(agents)]
    await vllm.until(GENERATE, 3)
    vllm.go.set()
    await asyncio.gather(*asked)
    vllm.hold = None
    spans = await made.tape.spans(made.rollout, 4)
    assert sorted(map(str, began(spans))) == ["None", "first", "forked", "forked"]
    assert len(set(sessions(spans))) == 3
    assert codes(await diagnosed(made.tape, made.rollout)) == []
    # And each of them goes on.
    for one in agents:
        await one.turn("Then?")
    assert sorted(map(str, began(await made.tape.spans(made.rollout, 7)))) == ["None"] * 4 + ["first"] + ["forked"] * 2


async def test_one_that_was_given_up_leaves_the_session_to_the_next(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.derender_fails = [400]
    with pytest.raises(openai.APIError):
        await agent.turn("Why?")
    await agent.go_on()
    spans = await made.tape.spans(made.rollout, 3)
    assert began(spans) == ["first", None, None]
    assert len(set(sessions([spans[0], spans[2]]))) == 1


async def test_errors_are_those_of_the_chat_endpoint(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    await story(agent, vllm, [" Yes. "])
    vllm.models = set()
    with pytest.raises(openai.NotFoundError) as caught:
        await agent.turn("Why?")
    assert "The model `policy` does not exist." in caught.value.message


async def test_an_upstream_that_cannot_be_reached_is_said_so(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made)
    pool = made.gateway.pools["vllm"]
    pool.origin = "http://127.0.0.1:1"
    with pytest.raises(openai.APIStatusError) as caught:
        await agent.turn("Go.")
    assert caught.value.status_code == 502
    assert "could not be reached" in caught.value.message


async def test_the_next_upstream_is_tried_where_one_cannot_be_reached(
    tmp_path: Path, http: aiohttp.ClientSession, vllm: ScaleOut
) -> None:
    upstreams = [{"name": "gone", "base_url": "http://127.0.0.1:1/v1"}, {"name": "vllm", "base_url": vllm.openai_url}]
    route = [ROUTE | {"upstream": ["gone", "vllm"]}]
    async with inside(tmp_path, http, upstream=upstreams, route=route) as made:
        await story(agent_of(made, stream=True), vllm, SAYS)
        spans = await made.tape.spans(made.rollout, 4)
        assert [span.upstream for span in spans] == ["vllm"] * 4
        assert began(spans) == ["first", None, None, None]
        # From then on it rests.
        assert made.gateway.metrics.upstream_retries["gone", "connect"] >= 1


async def test_nothing_of_a_stream_is_lost_while_another_upstream_is_left(
    tmp_path: Path, http: aiohttp.ClientSession, vllm: ScaleOut
) -> None:
    upstreams = [{"name": "vllm", "base_url": vllm.openai_url}, {"name": "gone", "base_url": "http://127.0.0.1:1/v1"}]
    route = [ROUTE | {"upstream": ["vllm", "gone"]}]
    async with inside(tmp_path, http, upstream=upstreams, route=route) as made:
        await story(agent_of(made, stream=True), vllm, SAYS)
        for span in await made.tape.spans(made.rollout, 4):
            assert b'"role"' in await made.tape.raw(span, "response")


# -- where a session ends ----------------------------------------------------------------------------------------------


async def begun(made: Inside, vllm: ScaleOut, *says: str) -> Agent:
    agent = agent_of(made)
    await story(agent, vllm, says or (" Yes. ", " Because. "))
    return agent


async def last(made: Inside, count: int) -> str | None:
    return began(await made.tape.spans(made.rollout, count))[-1]


async def test_a_fork_has_the_same_tokens_and_another_name(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm)
    agent.messages = agent.messages[:3]
    await agent.turn("Where?")
    spans = await made.tape.spans(made.rollout, 3)
    assert began(spans) == ["first", None, "forked"]
    assert len(set(sessions(spans))) == 2
    assert " Yes. " + END in (await on_tape(made, vllm, spans[2]))[0]
    assert codes(await diagnosed(made.tape, made.rollout)) == []


async def test_a_compaction_begins_a_session(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm)
    agent.messages[2] = {"role": "assistant", "content": "A summary."}
    await agent.turn("Where?")
    assert await last(made, 3) == "compacted"


async def test_a_question_that_is_asked_again_begins_a_session(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm, " Yes. ")
    agent.messages = agent.messages[:2]
    await agent.go_on()
    assert await last(made, 2) == "forked"


async def test_other_tools_begin_a_session(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm)
    agent.asks["tools"] = [TOOL, {"type": "function", "function": {"name": "put"}}]
    await agent.turn("Where?")
    assert await last(made, 3) == "tools"


async def test_another_template_begins_a_session(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm)
    vllm.template = Template(strips=True, moves=True)
    await agent.turn("Where?")
    assert await last(made, 3) == "template"


async def test_an_answer_that_was_cut_off_ends_its_session(made: Inside, vllm: ScaleOut) -> None:
    agent = agent_of(made, max_tokens=4)
    await story(agent, vllm, [" Yes, because. ", "ok"])
    assert await last(made, 2) == "cut"


async def test_pictures_are_not_gone_on_from(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm, " Yes. ")
    agent.messages[1]["content"] = [{"type": "text", "text": "Why?"}]
    agent.messages.append({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]})
    body = {"model": "policy", "messages": agent.messages, "tools": [TOOL]}
    async with aiohttp.ClientSession() as http, http.post(made.base.url + made.path(CHAT), json=body):
        pass
    assert await last(made, 2) == "media"


async def test_sub_agents_and_their_planner_have_sessions_of_their_own(made: Inside, vllm: ScaleOut) -> None:
    planner = await begun(made, vllm, " Yes. ")
    other = agent_of(made)
    other.messages = [{"role": "system", "content": "Be quick."}]
    await story(other, vllm, [" I am. ", " And how. "])
    await planner.turn("Why?")
    spans = await made.tape.spans(made.rollout, 4)
    assert began(spans) == ["first", "first", None, None]
    assert sessions(spans) == [sessions(spans)[at] for at in (0, 1, 1, 0)]


# -- what is not in memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_session_goes_on_after_a_restart(
    start_gateway: StartGateway, http: aiohttp.ClientSession, vllm: ScaleOut, how: str
) -> None:
    route = '[[route]]\nmodel = "policy"\nupstream = "vllm"\ntrain = "exact"\n\n'
    gateway = await start_gateway(route + upstream("vllm", vllm.openai_url, "openai") + '[tape]\nrecord = "strict"\n')
    agent, tape = Agent(gateway.openai("r1"), stream=True), Tape(gateway.url, http)
    await story(agent, vllm, SAYS[:2])
    await (gateway.kill() if how == "kill" else gateway.terminate())
    await gateway.start(gateway.port)
    await agent.go_on()
    spans = await tape.spans("r1", 3)
    assert began(spans) == ["first", None, None]
    assert len(set(sessions(spans))) == 1
    assert codes(await diagnosed(tape, "r1")) == []


async def test_calls_wait_while_weights_change(made: Inside, vllm: ScaleOut) -> None:
    agent = await begun(made, vllm, " Yes. ")
    gate = made.gateway.pools["vllm"].gate
    gate.pause(60)
    before = len(vllm.asked)
    async with aiohttp.ClientSession() as http:
        asked = asyncio.ensure_future(agent.turn("Why?"))
        # The gateway says so when a call waits.
        while 'penstock_upstream_waiting{upstream="vllm"} 1' not in await metrics(made, http):
            pass
    assert len(vllm.asked) == before
    gate.open()
    await asked
    assert await last(made, 2) is None


async def metrics(made: Inside, http: aiohttp.ClientSession) -> str:
    async with http.get(made.base.url + "/metrics") as response:
        return await response.text()


async def test_other_models_and_apis_are_let_alone(made: Inside, vllm: ScaleOut) -> None:
    vllm.models.add("judge")
    body: Json = {"model": "policy", "messages": [{"role": "user", "content": "Go."}], "echo": True}
    async with connect(made.base.url) as client:
        client.send(post(made.path(CHAT), json.dumps(body).encode()))
        assert b" 200 " in await client.message()
    (span,) = await made.tape.spans(made.rollout, 1)
    assert "penstock.session" not in (span.attributes or {})
    assert not vllm.of(RENDER)
