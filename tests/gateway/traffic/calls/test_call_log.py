"""The log of a real gateway: every line parses, each call has one, levels hold, and OPERATIONS names what they have."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from conftest import StartGateway
from fakes.formats import Failure
from fakes.preloaded import penstock
from fakes.process import ROOT, Gateway, upstreams, write_config
from fakes.provider import Provider
from fakes.tape import Tape
from fakes.waiting import until

from examples.demo.model import DemoAnswer
from penstock.gateway.model.span import Usage
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls import call_log

OPERATIONS = ROOT / "docs" / "operations.md"
LOG = '[log]\nformat = "json"\ncalls = true\n'
SAID = "what nobody but the model should read"
ODD = 'm\n{"forged": 1}'
KEY = "sk-agent-PLANTED-0123456789"
HEADERS = {"Authorization": f"Bearer {KEY}", "X-Odd": KEY, "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


def lines(gateway: Gateway) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gateway.log.splitlines()]


def calls(gateway: Gateway) -> list[dict[str, Any]]:
    return [line for line in lines(gateway) if line["log.logger"] == call_log.LOGGER]


async def ask(http: aiohttp.ClientSession, gateway: Gateway, model: str = "gpt-5", **more: Any) -> int:
    body = {"model": model, "messages": [{"role": "user", "content": SAID}], **more}
    url = gateway.openai("r1") + "/chat/completions"
    async with http.post(url, json=body, headers=HEADERS | {"x-penstock-agent": "planner"}) as answer:
        await answer.read()
        return answer.status


async def test_each_call_has_a_line_that_says_how_it_went_and_nothing_of_what_was_said(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    provider.script = [DemoAnswer("hello"), Failure(401, message=f"Incorrect API key provided: {KEY}")]
    gateway = await start_gateway(f'{LOG}level = "debug"\n' + upstreams(openai=provider.openai_url))
    assert await ask(http, gateway, stream=True, stream_options={"include_usage": True}) == 200
    assert await ask(http, gateway, model=ODD) == 401
    # Nor where it cannot be read.
    broken = f'{{"model": "m", "messages": [{{"role": "user", "content": "{SAID}"'.encode()
    async with http.post(gateway.openai("r1") + "/chat/completions", data=broken, headers=HEADERS) as answer:
        assert answer.status == 400
    tape = Tape(gateway.url, http)
    first, second, _ = await tape.spans("r1", 3)

    async def told() -> bool:
        return len(calls(gateway)) == 3

    await until(told)
    good, bad, _ = calls(gateway)
    assert good["message"] == "call ok"
    assert good["penstock.duration_ms"] == pytest.approx((first.duration_ns or 0) / 1e6, abs=0.001)
    assert 0 < good["penstock.first_byte_ms"] <= good["penstock.duration_ms"]
    assert first.usage is not None
    shown = {
        "penstock.rollout.id": "r1",
        "penstock.attempt.id": "a1",
        "penstock.span.sequence": 1,
        "penstock.span.status": "ok",
        "gen_ai.request.model": "gpt-5",
        "gen_ai.response.model": first.model_served,
        "gen_ai.usage.input_tokens": first.usage.input_tokens,
        "gen_ai.usage.output_tokens": first.usage.output_tokens,
        "http.response.status_code": 200,
        "http.request.body.size": first.request_bytes,
        "http.response.body.size": first.response_bytes,
        "penstock.upstream": "fake-openai",
        "penstock.recorded": True,
        "trace.id": "ab" * 16,
        "span.id": first.span_id,
    }
    assert {name: good.get(name) for name in shown} == shown
    how = (bad["penstock.span.status"], bad["error.type"], bad["http.response.status_code"])
    assert how == ("error", "http_401", 401)
    assert bad["gen_ai.request.model"] == second.model == ODD
    assert [said for said in (SAID, KEY, "hello") if said in gateway.log] == []


async def test_levels_leave_lines_out_but_not_those_of_calls_which_are_there_if_they_are_asked_for(
    start_gateway: StartGateway, provider: Provider, http: aiohttp.ClientSession
) -> None:
    """The gateway warns when a rule cannot read a text that it may be about."""
    rule = '[[masking]]\nname = "rule"\npaths = ["a"]\n'
    for level, asked_for, seen in (("warning", "false", {"warning"}), ("error", "true", set[str]())):
        log = LOG.replace("true", asked_for) + f'level = "{level}"\n'
        gateway = await start_gateway(log + rule + upstreams(openai=provider.openai_url))
        assert await ask(http, gateway) == 200
        assert await gateway.terminate() == 0
        assert {line["log.level"] for line in lines(gateway) if line["log.logger"] != call_log.LOGGER} == seen
        assert len(calls(gateway)) == (asked_for == "true")


def test_a_call_that_the_tape_did_not_take_says_so() -> None:
    entry = SpanEntry("r1", "a1", status="ok", start_ns=1, end_ns=2)
    found = call_log.fields(entry, False)
    assert found["penstock.recorded"] is False
    assert not {"span.id", "penstock.span.sequence"} & found.keys()


def test_a_name_with_the_shape_of_a_key_is_not_told() -> None:
    key = "sk-proj-0123456789abcdef"
    entry = SpanEntry("r1", "a1", name=f"n {key}", model=key, model_served=f"{'m' * 190} {key}", error=key)
    found = call_log.fields(entry, True)
    assert (found["penstock.span.name"], found["gen_ai.request.model"], found["error.type"]) == ("n ***", "***", "***")
    assert found["gen_ai.response.model"] == f"{'m' * 190} ***"


@pytest.mark.slow
async def test_a_gateway_that_cannot_start_logs_an_object(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("no folder")
    config = write_config(tmp_path, LOG)
    words = ("serve", "--config", config, "--data", tmp_path / "data", "--port", "0")
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    process = await penstock(*words, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    (line,) = err.decode().splitlines()
    assert json.loads(line)["log.level"] == "critical"


def test_the_page_names_what_lines_have() -> None:
    page = OPERATIONS.read_text(encoding="utf-8").partition("\n## The log\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `([\w.@]+)` \|", page, re.MULTILINE)
    entry = SpanEntry(
        "r", "a", name="n", agent="a", model="m", model_served="m", upstream="u", http_status=200, error="e"
    )
    entry.first_byte_ns, entry.sequence, entry.versions, entry.arm = 1, 1, {"p": "v1"}, "x:candidate"
    entry.usage = Usage(input_tokens=1, output_tokens=1)
    of_every_line = ["@timestamp", "log.level", "log.logger", "message", "error.type", "error.message"]
    of_calls = [name for name in call_log.fields(entry, True) if name != "error.type"]
    assert named == [*of_every_line, "error.stack_trace", *of_calls]
