"""Answers and requests with a content encoding, by real clients through a real gateway: not a byte is changed, and what
they say is read: heads, turns, `penstock doctor`, filters, routes, and conversations of clients that say nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from fakes.packing import PACKERS
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider, serving
from fakes.tape import Tape
from fakes.waiting import when
from openai import AsyncOpenAI

from penstock.gateway.model.span import Span, SpanStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION: Any = [{"role": "user", "content": "How much is 19 times 23?"}]
ALIAS = '[[route]]\nmodel = "alias"\nupstream = "fake-openai"\nalias = "gpt-5"\n'

ACCEPTED = pytest.mark.parametrize("name", ["gzip", "deflate", "br"], indirect=True)
"""What the SDKs say they accept."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncGenerator[Provider]:
    async with serving() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> AsyncGenerator[Gateway]:
    config = upstreams(openai=provider.openai_url, anthropic=provider.url) + ALIAS
    async with running(tmp_path_factory.mktemp("encodings"), config) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def tape(gateway: Gateway) -> AsyncGenerator[Tape]:
    async with aiohttp.ClientSession() as session:
        yield Tape(gateway.url, session)


@pytest.fixture(params=list(PACKERS))
def name(request: pytest.FixtureRequest, provider: Provider) -> str:
    """A content encoding, in which the provider answers."""
    provider.encoding, provider.log = request.param, []
    return request.param


async def check(tape: Tape, span: Span, provider: Provider) -> None:
    """The tape has the provider's bytes and understands them."""
    seen = provider.log[-1]
    assert await tape.raw(span, "response") == seen.response
    assert ("Content-Encoding", provider.encoding) in seen.response_headers
    assert span.status == SpanStatus.OK
    assert span.usage is not None
    assert (span.usage.input_tokens or 0) > 0
    assert (span.usage.output_tokens or 0) > 0
    assert (span.model_served, span.choices) == (span.model, 1)
    assert span.finish in ("stop", "end_turn", "completed")
    turn = (await tape.detail(span)).turn
    assert turn is not None
    assert turn.problems == []
    assert "You said" in str(turn.choices[0].message)
    found = await tape.get(f"/api/rollouts/{span.rollout}/diagnosis")
    codes = {finding["code"] for call in found["attempts"][0]["calls"] for finding in call["findings"]}
    assert codes == {"no_token_ids"}
    assert (await tape.get(f"/api/spans?filter=text~%22You%20said%22+rollout={span.rollout}"))["spans"]


@ACCEPTED
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_an_answer_to_the_openai_sdk_is_read(
    name: str, stream: bool, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    rollout = f"openai-{name}-{stream}"
    more: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answers = list[Any]()
    for url in (provider.openai_url, gateway.openai(rollout)):
        async with AsyncOpenAI(base_url=url, api_key="sk-agent", max_retries=0) as client:
            create: Any = client.chat.completions.create
            made = await create(model="gpt-5", messages=QUESTION, stream=stream, **more)
            answers.append([one.model_dump() async for one in made] if stream else made.model_dump())
    assert answers[0] == answers[1]
    (span,) = await tape.spans(rollout, 1)
    await check(tape, span, provider)


@ACCEPTED
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_an_answer_to_the_anthropic_sdk_is_read(
    name: str, stream: bool, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    rollout = f"anthropic-{name}-{stream}"
    async with AsyncAnthropic(base_url=gateway.address(rollout), api_key="sk-ant-agent", max_retries=0) as client:
        made: Any = await client.messages.create(model="claude", messages=QUESTION, max_tokens=99, stream=stream)
        kinds = [one.type async for one in made] if stream else [made.type]
    assert kinds[-1] == ("message_stop" if stream else "message")
    (span,) = await tape.spans(rollout, 1)
    await check(tape, span, provider)


@ACCEPTED
async def test_an_answer_of_the_responses_api_is_read(
    name: str, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    rollout = f"responses-{name}"
    async with AsyncOpenAI(base_url=gateway.openai(rollout), api_key="sk-agent", max_retries=0) as client:
        made = await client.responses.create(model="gpt-5", input=QUESTION, stream=True)
        assert [one.type async for one in made][-1] == "response.completed"
    (span,) = await tape.spans(rollout, 1)
    await check(tape, span, provider)


@pytest.mark.slow
async def test_curl_gets_every_byte(name: str, gateway: Gateway, provider: Provider, tape: Tape) -> None:
    rollout = f"curl-{name}"
    asked = json.dumps({"model": "gpt-5", "messages": QUESTION})
    curl = await asyncio.create_subprocess_exec(
        *("curl", "-sS", "--compressed", "-H", "content-type: application/json", "-d", asked),
        f"{gateway.openai(rollout)}/chat/completions",
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await curl.communicate()
    assert curl.returncode == 0
    assert "You said" in json.loads(said)["choices"][0]["message"]["content"]
    (span,) = await tape.spans(rollout, 1)
    await check(tape, span, provider)


async def test_the_bytes_and_the_headers_pass_as_they_are(name: str, gateway: Gateway, provider: Provider) -> None:
    raw = list[bytes]()
    asked = {"model": "gpt-5", "messages": QUESTION, "stream": True}
    async with httpx.AsyncClient() as client:
        for url in (provider.openai_url, gateway.openai(f"raw-{name}")):
            async with client.stream("POST", f"{url}/chat/completions", json=asked) as answer:
                assert answer.headers["content-encoding"] == name
                raw.append(b"".join([piece async for piece in answer.aiter_raw()]))
    assert raw[0] == raw[1] == provider.log[-1].response


async def test_a_request_with_an_encoding_passes_as_it_is_and_is_read(
    name: str, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    rollout, body = f"asked-{name}", packed(name, "gpt-5")
    await ask(f"{gateway.openai(rollout)}/chat/completions", name, body)
    seen = provider.log[-1]
    assert (seen.body, seen.header("content-encoding")) == (body, name)
    (span,) = await tape.spans(rollout, 1)
    assert (span.model, span.request_bytes) == ("gpt-5", len(body))
    assert await tape.raw(span, "request") == body
    await check(tape, span, provider)
    turn = (await tape.detail(span)).turn
    assert turn is not None
    assert turn.messages[0].parts[0].text == QUESTION[0]["content"]


async def test_a_request_in_which_something_must_change_goes_without_its_encoding(
    name: str, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    rollout = f"changed-{name}"
    await ask(f"{gateway.openai(rollout)}/chat/completions", name, packed(name, "alias"))
    seen = provider.log[-1]
    assert json.loads(seen.body) == {"model": "gpt-5", "messages": QUESTION}
    assert (seen.header("content-encoding"), seen.header("content-length")) == (None, str(len(seen.body)))
    (span,) = await tape.spans(rollout, 1)
    assert span.model == "alias"
    assert await tape.raw(span, "request") == seen.body


async def test_a_conversation_without_an_address_goes_on(
    name: str, gateway: Gateway, provider: Provider, tape: Tape
) -> None:
    messages = [*QUESTION, {"role": "user", "content": name}]
    for _ in range(2):
        said = await ask(f"{gateway.url}/v1/chat/completions", name, packed(name, "gpt-5", messages))
        answer = said["choices"][0]["message"]
        messages = [*messages, answer, {"role": "user", "content": "And now?"}]
    asked = f"/api/spans?filter=raw~%22{name}%22+origin%3Dimplicit"
    found = await when(lambda: tape.get(asked), lambda page: len(page["spans"]) >= 2)
    assert len({span["rollout"] for span in found["spans"]}) == 1


async def test_what_is_no_encoding_passes_unread(gateway: Gateway, provider: Provider, tape: Tape) -> None:
    """The upstream decides about it, as it would without us."""
    provider.encoding = ""
    async with httpx.AsyncClient() as client:
        url = f"{gateway.openai('broken')}/files"
        answer = await client.post(url, content=b"{}", headers={"content-encoding": "br"})
    assert answer.status_code == 404
    (span,) = await tape.spans("broken", 1)
    assert (span.model, await tape.raw(span, "request")) == (None, b"{}")


def packed(name: str, model: str, messages: Any = QUESTION) -> bytes:
    return PACKERS[name](json.dumps({"model": model, "messages": messages}).encode())


async def ask(url: str, name: str, body: bytes) -> Any:
    """Posts a body with an encoding."""
    headers = {"content-type": "application/json", "content-encoding": name}
    async with httpx.AsyncClient() as client:
        answer = await client.post(url, content=body, headers=headers)
    assert answer.status_code == 200
    return answer.json()
