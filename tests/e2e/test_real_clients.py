"""Official clients through a real gateway: they must not notice it, and the tape must hold what happened.

Every case of `e2e.clients` runs twice, straight against the provider and through the gateway. What the client returns
must be equal, what the provider saw must be equal, and the tape must hold one span per call with the provider's bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from agents import set_tracing_disabled
from e2e.clients import CASES, Case, Endpoint
from fakes.process import Gateway, running, upstreams
from fakes.provider import Provider, Seen, serving
from fakes.tape import Tape

from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.span import Span, SpanStatus

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def provider() -> AsyncGenerator[Provider]:
    set_tracing_disabled(True)
    async with serving() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> AsyncGenerator[Gateway]:
    config = upstreams(openai=provider.openai_url, anthropic=provider.url)
    async with running(tmp_path_factory.mktemp("clients"), config) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def tape(gateway: Gateway) -> AsyncGenerator[Tape]:
    async with aiohttp.ClientSession() as session:
        yield Tape(gateway.url, session)


@dataclass(slots=True)
class Ran:
    """What a run left behind: with the client and with the provider."""

    returned: Any
    seen: list[Seen]


async def run(case: Case, at: Endpoint, provider: Provider) -> Ran:
    """Run a case against an endpoint."""
    provider.script, provider.log = case.script(), []
    return Ran(await case.run(at), provider.log)


def as_asked(seen: Seen) -> Any:
    """A request, less what is only between a client and its peer."""
    headers = [(name, value) for name, value in seen.headers if name.lower() not in ("host", "connection")]
    return seen.method, seen.path, headers, seen.body


def masked(recorded: list[tuple[str, str]], sent: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that were sent, with those values masked that are masked on the tape."""
    hidden = {name for name, value in recorded if value == "***"}
    return [(name, "***" if name in hidden else value) for name, value in sent]


async def check_span(tape: Tape, span: Span, seen: Seen, case: Case) -> None:
    """The tape holds this call as the provider saw it."""
    assert (span.dialect, span.http_status, span.model) == (case.dialect, seen.status, seen.model)
    assert span.status == (SpanStatus.OK if seen.status < 400 else SpanStatus.ERROR)
    assert span.stream == seen.streamed
    assert await tape.raw(span, "request") == seen.body
    assert await tape.raw(span, "response") == seen.response
    detail = await tape.detail(span)
    check_exchange(detail, seen)
    assert detail.turn is not None
    assert detail.turn.problems == []


def check_exchange(detail: SpanDetail, seen: Seen) -> None:
    """Headers on the tape are those that the provider got and gave, in order, secrets masked."""
    exchange = detail.exchange
    assert exchange is not None
    assert exchange.request_headers == masked(exchange.request_headers, seen.headers)
    assert exchange.response_headers == masked(exchange.response_headers, seen.response_headers)
    hidden = {name.lower() for name, value in exchange.request_headers + exchange.response_headers if value == "***"}
    assert hidden <= {"authorization", "x-api-key"}
    assert "sk-a" not in detail.model_dump_json()


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_the_gateway_goes_unnoticed(case: Case, provider: Provider, gateway: Gateway, tape: Tape) -> None:
    rollout = f"case-{CASES.index(case)}"
    direct = await run(case, Endpoint(provider.openai_url, provider.url), provider)
    through = await run(case, Endpoint(gateway.openai(rollout), gateway.address(rollout)), provider)
    assert through.returned == direct.returned
    assert [as_asked(seen) for seen in through.seen] == [as_asked(seen) for seen in direct.seen]
    spans = await tape.spans(rollout, case.calls)
    assert len(through.seen) == case.calls
    for span, seen in zip(spans, through.seen, strict=True):
        await check_span(tape, span, seen, case)
