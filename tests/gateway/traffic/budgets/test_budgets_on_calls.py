"""Budgets on the calls of a real gateway: how many pass, what is counted of them, and what clients and
`penstock budgets` say."""

from __future__ import annotations

import asyncio
import json
from io import StringIO
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from fakes.budgets import CHAT, budget, call, spans_of, toml, uses, world
from fakes.formats import Failure
from fakes.local import locally
from fakes.mistakes import tells
from fakes.odd import odd, request, send
from fakes.process import upstream, upstreams
from fakes.provider import serving
from fakes.raw import reply
from fakes.rig import inside
from fakes.shell import Shell
from rich.console import Console

from examples.demo.model import DemoAnswer
from penstock.console.views.administration import BUDGETS, empty_reason
from penstock.gateway.model.state import BudgetPage, BudgetUse

PRICED = {"dear": 500, "cheap": 2}
"""Dollars of a million tokens."""


async def test_no_more_calls_pass_than_there_may(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget()) as (gateway, provider):
        answers = await asyncio.gather(*(call(http, gateway, f"r{n % 3}") for n in range(12)))
        assert sorted(one.status for one in answers) == [200] * 3 + [429] * 9
        assert len(provider.log) == 3, "what is refused goes nowhere"
        assert await uses(http, gateway.url) == [("b", "", 3, 0)]
        refused = await call(http, gateway)
        assert tells(refused.message, "budget 'b'", "all calls have used 3 calls of 3")
        assert refused.headers["ratelimit-policy"] == '"b";q=3'
        async with http.get(gateway.url + "/metrics") as page:
            assert 'penstock_budget_refusals_total{budget="b"} 10.0' in await page.text()
        spans = await spans_of(http, gateway, "error:budget", 10)
        assert [(one["http_status"], one["upstream"]) for one in spans] == [(429, None)] * 10


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_reserved_for_calls_that_run_at_once_is_never_more_than_the_limit(
    tmp_path: Path, http: aiohttp.ClientSession, stream: bool
) -> None:
    """Every call has a limit of its own, so there is no error at all: what is used is what was reported, and no more
    than there was."""
    limit = 20_000
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    async with world(tmp_path, budget(unit="tokens", limit=limit, window="1h")) as (gateway, _):
        answers = await asyncio.gather(
            *(call(http, gateway, max_tokens=900, stream=stream, **options) for _ in range(30))
        )
        assert {one.status for one in answers} == {200, 429}, "more at once than may be reserved"
        for one in answers:
            assert one.status == 200 or "calls that run may use" in one.message or "call that runs may" in one.message
        (told,) = await uses(http, gateway.url)
        passed = len([one for one in answers if one.status == 200])
        counted = [one["usage"] for one in await spans_of(http, gateway, "status:ok", passed)]
        assert told[2] == sum(one["input_tokens"] + one["output_tokens"] for one in counted) <= limit
        assert told[3] == 0


APIS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/messages",
    "/v1beta/models/m:generateContent",
    "/model/m/converse",
)


async def test_every_api_is_refused_in_its_own_shape(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """And no request has changed on its way before that, nor has an answer."""
    cloud = upstream("cloud", "http://127.0.0.1:9", "bedrock")
    async with world(tmp_path, budget(unit="tokens", limit=5), more=cloud) as (gateway, _):
        for path in APIS:
            async with http.post(f"{gateway.address('r')}{path}", json=CHAT | {"max_tokens": 9}) as answer:
                said = await answer.json()
            assert answer.status == 429, said
            assert "That is more than the whole budget" in said.get("error", said)["message"], path
            assert {"RateLimit", "RateLimit-Policy", "x-should-retry"} <= answer.headers.keys()
        async with openai.AsyncOpenAI(base_url=gateway.openai("r"), api_key="k") as sdk:
            with pytest.raises(openai.RateLimitError, match="budget 'b'"):
                await sdk.responses.create(model="m", input="hello")
        async with anthropic.AsyncAnthropic(base_url=gateway.address("r"), api_key="k") as other:
            with pytest.raises(anthropic.RateLimitError, match="budget 'b'"):
                await other.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
        _ = await spans_of(http, gateway, "error:budget", len(APIS) + 2)  # no SDK asks again in vain


async def test_what_uses_no_tokens_counts_nowhere(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(limit=1)) as (gateway, _):
        assert (await call(http, gateway)).status == 200
        for path in ("/v1/messages/count_tokens", "/v1/models"):
            do = http.get if path.endswith("models") else http.post
            async with do(gateway.address("r") + path, **({} if do == http.get else {"json": CHAT})) as answer:
                assert answer.status == 200, path
        assert (await call(http, gateway)).status == 429


async def test_a_refusal_of_the_provider_uses_nothing(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(limit=1), budget(name="t", unit="tokens", limit=50_000)) as (gateway, provider):
        provider.script = [Failure(400), Failure(429), Failure(500), DemoAnswer("yes")]
        assert [(await call(http, gateway)).status for _ in range(3)] == [400, 429, 500]
        assert [use[2:] for use in await uses(http, gateway.url)] == [(0, 0), (0, 0)]
        assert (await call(http, gateway)).status == 200


async def test_a_call_of_which_several_upstreams_are_asked_counts_once(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with serving() as down, serving() as up:
        down.script = lambda asked: Failure(503)
        config = upstream("down", down.openai_url, "openai") + upstream("up", up.openai_url, "openai")
        config += '[[route]]\nmodel = "gpt*"\nupstream = ["down", "up"]\n' + toml(budget(limit=2))
        async with locally(tmp_path, config) as gateway:
            assert [(await call(http, gateway)).status for _ in range(3)] == [200, 200, 429]
            assert len(down.log) >= 1
            assert await uses(http, gateway.url) == [("b", "", 2, 0)]


async def test_agents_and_rollouts_have_budgets_of_their_own(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    budgets = (
        budget(per="rollout", limit=2), budget(name="cheap", per="agent", only=["plan*"], model="gpt-4*", limit=1)
    )  # fmt: skip
    async with world(tmp_path, *budgets) as (gateway, _):

        async def asked(rollout: str, agent: str, model: str = "gpt-4o") -> int:
            url = f"{gateway.url}/rollout/{rollout}/attempt/a1/agent/{agent}/v1/chat/completions"
            async with http.post(url, json=CHAT | {"model": model}) as answer:
                return answer.status

        assert [await asked("r1", "planner"), await asked("r2", "planner")] == [200, 429]
        assert [await asked("r2", "planner", "gpt-5"), await asked("r1", "coder")] == [200, 200]
        assert [await asked("r1", "coder"), await asked("r2", "coder")] == [429, 200]
        found = await uses(http, gateway.url)
        assert found == [("b", "r1", 2, 0), ("b", "r2", 2, 0), ("cheap", "planner", 1, 0)]


async def test_money_is_counted_by_the_prices_of_the_day(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(
        'as_of = 2026-01-01\n[[price]]\nmodel = "gpt-4o"\nsince = 2024-01-01\ninput = 1_000.0\noutput = 2_000.0\n'
    )
    more = f'prices = "{prices}"\n'
    async with world(tmp_path, budget(unit="usd", limit=25.0), more=more) as (gateway, provider):
        answer = await call(http, gateway, max_tokens=100)
        usage = json.loads(answer.body)["usage"]
        paid = (usage["prompt_tokens"] * 1000 + usage["completion_tokens"] * 2000) / 1e6
        assert await uses(http, gateway.url) == [("b", "", pytest.approx(paid), 0)]
        refused = await call(http, gateway, max_tokens=20_000)
        assert "this call may use up to 41." in refused.message
        unknown = await call(http, gateway, model="unheard-of")
        assert (unknown.status, json.loads(unknown.body)["error"]["code"]) == (403, "budget_price")
        assert "model 'unheard-of' has no price" in unknown.message
        assert len(provider.log) == 1


async def test_a_call_costs_what_its_model_is_called_where_it_was_served(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """The answer names a model of which nobody knows the price."""
    prices = tmp_path / "prices.toml"
    rows = [f'[[price]]\nmodel = "{name}"\ninput = {dollars}.0\noutput = 0.0\n' for name, dollars in PRICED.items()]
    prices.write_text("as_of = 2026-01-01\n" + "".join(rows).replace("input", "since = 2024-01-01\ninput"))
    async with inside(
        tmp_path, http, [{"name": "down", "base_url": "http://127.0.0.1:1/v1"}], prices=prices,
        route=[{"model": "any", "upstream": ["down", "up"], "alias": {"down": "dear", "up": "cheap"}}],
        budget=[budget(unit="usd", limit=9000)],
    ) as made:  # fmt: skip
        said: dict[str, Any] = {
            "model": "made-up",
            "choices": [{}],
            "usage": {"prompt_tokens": 10**6, "completion_tokens": 0},
        }
        async with made.upstream([request(), send(reply(200, json.dumps(said).encode()))]), made.client() as client:
            client.send(made.call(b'{"model":"any","messages":[],"max_tokens":1}'))
            assert (await client.message()).startswith(b"HTTP/1.1 200 ")
        assert await uses(http, made.base.url) == [("b", "", PRICED["cheap"], 0)]


async def test_money_is_settled_as_the_provider_bills(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """By the tier that served, or by its own word; sums have the same costs."""
    flex = {"service_tier": "flex", "usage": {"prompt_tokens": 1e5, "completion_tokens": 1e5}}
    answers = [
        {"model": "gpt-5-2025-08-07"} | flex,
        {"model": "none-such", "usage": {"prompt_tokens": 1, "completion_tokens": 1, "cost": 0.315}},
        {"model": "gpt-5", "choices": [{"usage": {"prompt_tokens": "1000", "completion_tokens": 0}}]},
    ]
    bodies = [json.dumps({"choices": [{}]} | one).encode() for one in answers]
    script = [step for body in bodies for step in (request(), send(reply(200, body)))]
    config = toml(budget(unit="usd", limit=9))
    async with odd(script) as up, locally(tmp_path, upstreams(up.url + "/v1") + config) as gateway:
        for _ in answers:
            assert (await call(http, gateway, model="gpt-5", max_tokens=9)).status == 200
        right = 0.5625 + 0.315 + 0.00125
        assert await uses(http, gateway.url) == [("b", "", pytest.approx(right), 0)]
        await spans_of(http, gateway, "", len(answers))
        async with http.get(gateway.url + "/api/breakdown?by=status") as page:
            (row,) = (await page.json())["rows"]
        assert (row["cost"], row["reported"], row["unpriced"]) == (pytest.approx(right), 1, 0)


async def test_a_model_that_costs_nothing_here_is_free_where_that_is_said(
    tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with world(tmp_path, budget(unit="usd", limit=0.000001, unknown="pass")) as (gateway, _):
        assert (await call(http, gateway, model="our-own")).status == 200
        assert (await call(http, gateway, model="gpt-4o")).status == 429


async def test_models_of_routes_without_a_price_are_told_of_at_the_start(tmp_path: Path) -> None:
    more = '[[route]]\nmodel = "policy"\nupstream = "fake-openai"\n'
    async with world(tmp_path, budget(unit="usd", limit=1.0)) as (gateway, _):
        assert "refuses calls" not in gateway.log
    (tmp_path / "two").mkdir()
    async with serving() as provider:
        config = upstreams(provider.openai_url) + more + toml(budget(unit="usd", limit=1.0))
        async with locally(tmp_path / "two", config) as gateway:
            assert tells(gateway.log, "budget 'b'", "model 'policy' of [[route]]", "no price")


@pytest.mark.parametrize(
    ("configured", "name", "said"),
    [
        ([], None, "The gateway's penstock.toml has no [[budget]]."),
        ([], "day", "The gateway's penstock.toml has no [[budget]]."),
        (["day", "team"], None, "No call was counted yet of day, team."),
        (["day", "team"], "team", "No call was counted yet of team."),
        (["day", "team"], "night", "there is no budget 'night'; the gateway's penstock.toml has day, team"),
    ],
)
def test_why_there_is_no_row(configured: list[str], name: str | None, said: str) -> None:
    assert empty_reason(BudgetPage(budgets=[], total=0, configured=configured), name) == said


@pytest.mark.parametrize(
    ("frees_ns", "said"),
    [(None, "never"), (61 * 10**9, "1 m 01 s"), (1_999_999_999, "1 s"), (999_999_999, "now"), (0, "now"), (-5, "now")],
)
def test_when_it_frees(frees_ns: int | None, said: str) -> None:
    use = BudgetUse(
        budget="day", per="all", unit="calls", limit=10, used=1, reserved=0, running=0, window="1d", since_ns=0,
        frees_ns=frees_ns,
    )  # fmt: skip
    console = Console(width=120, file=StringIO())
    console.print(BUDGETS.table([use], 0))
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().rstrip().endswith(said)


@pytest.mark.slow
async def test_a_budget_of_which_nothing_was_counted_is_named(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    async with world(tmp_path, budget(name="day", per="rollout")) as (gateway, _):
        shell = Shell(gateway.url, tmp_path)
        assert (await shell.run("budgets")).err == "No call was counted yet of day.\n"
        unknown = await shell.run("budgets", "night")
        assert (unknown.code, tells(unknown.err, "no budget 'night'", "day")) == (1, True), unknown.err
        await call(http, gateway, "anna")
        assert "rollout anna" in (await shell.run("budgets")).text
