"""Several system messages and engines whose template takes one: what is folded, when, and what the span says."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from fakes.many_turns import Agent
from fakes.rig import Inside, Within
from fakes.scale_out import CHAT, ScaleOut, scale_out
from fakes.toy_template import Json, Template
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.facts import BEGAN, FOLDED
from penstock.gateway.model.span import Span
from penstock.gateway.traffic.proxy.plan import fold_system_messages

CLAUDE: list[Json] = [
    {"role": "system", "content": [{"type": "text", "text": "Be good."}, {"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "system", "content": "Five tools are there."},
]
CODEX: list[Json] = [
    {"role": "system", "content": "Be good."},
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
]
TOLD = "<system>\nFive tools are there.\n</system>"


@pytest.fixture
async def vllm() -> AsyncGenerator[ScaleOut]:
    async with scale_out() as made:
        made.template = Template(strips=True, one_system=True)
        yield made


@pytest.fixture
def gateway(within: Within, vllm: ScaleOut) -> Within:
    """Gateways before it, whose route may say more."""

    def started(**more: object) -> Any:
        route: Json = {"model": "policy*", "upstream": ["vllm"], "train": True}
        return within(upstream=[{"name": "vllm", "base_url": vllm.openai_url}], route=[route | more])

    return started


def agent_of(made: Inside, said: list[Json], stream: bool = False) -> Agent:
    agent = Agent(made.base.url + made.path("/v1"), stream)
    agent.messages = [*said]
    return agent


def roles(body: Json) -> list[str]:
    return [one["role"] for one in body["messages"]]


def marks(spans: list[Span], name: str = FOLDED) -> list[Any]:
    return [(span.attributes or {}).get(name) for span in spans]


def of(messages: Any, **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "temperature": 1e-7} | more).encode()


def told(body: bytes) -> list[Json]:
    return json.loads(body)["messages"]


# -- what is folded ----------------------------------------------------------------------------------------------------


def test_system_messages_at_the_beginning_become_one() -> None:
    body, count = fold_system_messages(of(CODEX))
    assert (told(body), count) == ([{"role": "system", "content": "Be good.\n\nBe brief."}, CODEX[2]], 1)


def test_a_later_one_is_told_by_the_user_where_it_stood() -> None:
    answer: Json = {"role": "assistant", "content": "So."}
    body, count = fold_system_messages(
        of([*CLAUDE, answer, {"role": "system", "content": "Now."}, {"role": "user", "content": "?"}])
    )
    assert count == 2
    assert told(body) == [
        {"role": "system", "content": "Be good.\nBe brief."},
        {"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "text", "text": TOLD}]},
        answer,
        {"role": "user", "content": "<system>\nNow.\n</system>"},
        {"role": "user", "content": "?"},
    ]
    plain, _ = fold_system_messages(of([{"role": "user", "content": "Why?"}, CLAUDE[2]]))
    assert told(plain) == [{"role": "user", "content": f"Why?\n\n{TOLD}"}]


@pytest.mark.parametrize("odd", [rb'"cut \ud83d"', b"NaN", b"[" * 150 + b"]" * 150])
def test_what_decoders_refuse_is_folded_and_kept(odd: bytes) -> None:
    system, user = b'{"role": "system", "content": "a"}', b'{"role": "user", "content": "b", "x": %b}' % odd
    body, count = fold_system_messages(
        b'{"messages": 7, "messages": [%b, %b, %b], "n": %b}' % (system, system, user, odd)
    )
    assert (count, body.count(odd)) == (1, 2)
    assert body.startswith(b'{"messages": 7,')
    assert json.loads(body)["messages"][0] == {"role": "system", "content": "a\n\na"}


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    whole = [*CLAUDE, {"role": "assistant", "content": "So."}, {"role": "system", "content": "Now."}]
    first, then = fold_system_messages(of(CLAUDE))[0], fold_system_messages(of(whole))[0]
    assert told(then)[: len(told(first))] == told(first)


@pytest.mark.parametrize(
    "body",
    [
        of(CODEX[1:]),
        of([]),
        of("x"),
        of([CODEX[0], "x", CODEX[1]]),
        of([CODEX[0], {"role": "system", "content": [{"type": "image_url"}]}]),
        of([CODEX[0], {"role": "system", "content": [{"type": {"text": "x"}, "text": "x"}]}]),
        of([CODEX[0], {"role": ["system"], "content": "x"}]),
        of([CODEX[0], {"role": "user", "content": "?"}, {"role": "system", "content": None}]),
        b"[1]",
        b"{",
    ],
)
def test_what_needs_no_folding_or_cannot_be_stays_as_it_is(body: bytes) -> None:
    assert fold_system_messages(body) == (body, 0)


ROLES = st.sampled_from(["system", "developer", "user", "assistant"])


@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text()})))
def test_no_system_message_is_left_but_at_the_beginning_and_no_text_is_lost(messages: list[Json]) -> None:
    body, count = fold_system_messages(of(messages))
    made = told(body)
    assert all(one["role"] != "system" for one in made[1:]) or not count
    assert count == sum(one["role"] in ("system", "developer") for one in messages[1:])
    assert all(any(one["content"] in other["content"] for other in made) for one in messages)
    assert fold_system_messages(body) == (body, 0) or not count
    assert json.loads(body) | {"messages": 0} == json.loads(of(messages)) | {"messages": 0}


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("train", [True, "exact"])
@pytest.mark.parametrize("said", [CLAUDE, CODEX], ids=["claude", "codex"])
async def test_what_the_template_refuses_is_folded_and_the_span_says_so(
    gateway: Within, vllm: ScaleOut, stream: bool, train: Any, said: list[Json]
) -> None:
    async with gateway(train=train) as made:
        agent = agent_of(made, said, stream)
        vllm.says += [" A b. ", " C d. "]
        await agent.go_on()
        await agent.turn("And?")
        spans = await made.tape.spans(made.rollout, 2)
    assert [span.status for span in spans] == ["ok", "ok"]
    assert marks(spans) == [1, 1]
    # Only the first call had to be refused to be known.
    asked = [roles(body) for body in vllm.of(CHAT)]
    assert [names.count("system") + names.count("developer") for names in asked[:2]] == [2, 1]
    assert all("developer" not in names and names.count("system") == 1 for names in asked[1:])
    if train == "exact":
        assert marks(spans, BEGAN) == ["first", None]


async def test_what_is_taken_as_it_is_stays(gateway: Within, vllm: ScaleOut) -> None:
    vllm.template = Template()
    async with gateway() as made:
        await agent_of(made, CLAUDE).go_on()
        spans = await made.tape.spans(made.rollout, 1)
    assert marks(spans) == [None]
    assert [roles(body) for body in vllm.of(CHAT)] == [["system", "user", "system"]]


async def test_a_refusal_for_another_reason_is_told_as_it_is(gateway: Within, vllm: ScaleOut) -> None:
    async with gateway() as made:
        vllm.refuses.append("max_tokens is too large.")
        with pytest.raises(openai.BadRequestError, match="max_tokens is too large"):
            await agent_of(made, CLAUDE).go_on()
        spans = await made.tape.spans(made.rollout, 1)
    assert (spans[0].error, marks(spans)) == ("http_400", [None])
    assert len(vllm.of(CHAT)) == 1


async def test_what_is_refused_folded_too_is_told_and_not_remembered(gateway: Within, vllm: ScaleOut) -> None:
    async with gateway() as made:
        vllm.refuses += ["System message must be at the beginning.", "No roles at all."]
        with pytest.raises(openai.BadRequestError, match="No roles at all"):
            await agent_of(made, CLAUDE).go_on()
        vllm.template = Template()
        await agent_of(made, CLAUDE).go_on()
        spans = await made.tape.spans(made.rollout, 2)
    assert [span.status for span in spans] == ["error", "ok"]
    assert marks(spans) == [1, None]


async def test_calls_to_a_model_that_is_not_trained_stay_as_they_are(gateway: Within, vllm: ScaleOut) -> None:
    vllm.template = Template(one_system=True)
    async with gateway(train=False) as made:
        with pytest.raises(openai.BadRequestError, match="at the beginning"):
            await agent_of(made, CODEX).go_on()
