"""The control API over real HTTP: pages, filters, bodies, errors, keys, the change feed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from fakes.memory_tape import T0, MemoryTape, Serving, call, chat_exchange, exchange, serving
from fakes.waiting import PATIENCE_S

from penstock.gateway.api import pagination
from penstock.gateway.api.guard import HEADERS
from penstock.gateway.api.pagination import encode_cursor
from penstock.gateway.model.answers import Change, RolloutPage, SpanDetail, SpanPage, Stats
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.model.span import SpanStatus

KEY = "the admin key"
SEARCHES = ("search", "mcp__web__search")


def small_tape() -> MemoryTape:
    tape = MemoryTape()
    tape.add(
        call(1, tool_calls=1),
        chat_exchange([{"role": "user", "content": "Where is the timeout set?"}], {"content": "In config.py."}),
        mode="train",
        metadata={"task": "t1"},
    )
    tape.add(call(2, model="qwen3-8b", ms=3000), exchange(b"\xff\x00", b"data: x\n\n", "text/event-stream"))
    tape.add(call(1, attempt="a2", status="error", http_status=429, error="http_429", body=None))
    tape.add(call(1, rollout="r2", at_ms=9000, agent="planner"), chat_exchange([], {"content": "hi"}))
    return tape


@pytest.fixture
async def served() -> AsyncGenerator[Serving]:
    async with serving(small_tape()) as running:
        yield running


async def get(http: aiohttp.ClientSession, served: Serving, path: str, status: int = 200, **headers: str) -> Any:
    async with http.get(served.url + path, headers=headers) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def problem(http: aiohttp.ClientSession, served: Serving, path: str, status: int) -> dict[str, Any]:
    return (await get(http, served, path, status))["error"]


# --- lists ---


async def test_rollouts_are_found_by_their_tools_and_versions(http: aiohttp.ClientSession) -> None:
    tape = MemoryTape()
    tape.add(call(1, kind="tool", upstream="web", model=None, usage=None, attributes={"gen_ai.tool.name": "search"}))
    asks = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in SEARCHES]
    answer = chat_exchange([{"role": "user", "content": "Find it."}], {"content": None, "tool_calls": asks})
    tape.add(call(1, rollout="r2", tool_calls=2, versions={"planner": "v2"}), answer)
    tape.add(call(1, rollout="r3"), chat_exchange([], {"content": "search"}))
    async with serving(tape) as running:
        for filter, found in {
            "tool:search": ["r2", "r1"],
            "tool:search kind:tool": ["r1"],
            "tool=mcp__web__search": ["r2"],
            "tool:other": [],
            "server:web": ["r1"],
            "version:planner@v2": ["r2"],
            "version:planner@v1": [],
        }.items():
            page = RolloutPage.model_validate(await get(http, running, f"/api/rollouts?filter={filter}"))
            assert [rollout.id for rollout in page.rollouts] == found, filter


async def test_rollouts_come_newest_first_with_attempts_and_sums(served: Serving, http: aiohttp.ClientSession) -> None:
    page = RolloutPage.model_validate(await get(http, served, "/api/rollouts"))
    assert [rollout.id for rollout in page.rollouts] == ["r2", "r1"]
    r1 = page.rollouts[1]
    assert [attempt.id for attempt in r1.attempts] == ["a1", "a2"]
    assert (r1.totals.calls, r1.totals.errors, r1.totals.tool_calls, r1.totals.input_tokens) == (3, 1, 1, 300)
    assert r1.last_seen_ns == T0 + 2 * 10**9
    assert page.next is None
    assert r1 == RolloutSummary.model_validate(await get(http, served, "/api/rollouts/r1"))


async def test_rollouts_are_filtered(served: Serving, http: aiohttp.ClientSession) -> None:
    for query, ids in {
        "mode:train": ["r1"],
        "-mode:train": ["r2"],
        "metadata.task:t*": ["r1"],
        "model:qwen*": ["r1"],
        "model:qwen* tool_calls>0": [],
        "agent:planner": ["r2"],
        "text~timeout": ["r1"],
        "status:running": ["r2", "r1"],
        "error:http_*": ["r1"],
        "status:failed": [],
        "started>2000d": ["r2", "r1"],
    }.items():
        async with http.get(f"{served.url}/api/rollouts", params={"filter": query}) as response:
            assert [rollout["id"] for rollout in (await response.json())["rollouts"]] == ids, query


async def test_spans_of_a_rollout_and_of_an_attempt_come_in_order(served: Serving, http: aiohttp.ClientSession) -> None:
    found = SpanPage.model_validate(await get(http, served, "/api/rollouts/r1/spans"))
    assert [(s.attempt, s.sequence) for s in found.spans] == [("a1", 1), ("a1", 2), ("a2", 1)]
    found = SpanPage.model_validate(await get(http, served, "/api/rollouts/r1/attempts/a1/spans?filter=latency>2s"))
    assert [s.sequence for s in found.spans] == [2]
    assert found.scanned == 2


async def test_recent_spans_come_newest_first(served: Serving, http: aiohttp.ClientSession) -> None:
    found = SpanPage.model_validate(await get(http, served, "/api/spans?filter=-status:failed"))
    assert [(s.rollout, s.sequence) for s in found.spans] == [("r2", 1), ("r1", 2), ("r1", 1)]
    found = SpanPage.model_validate(await get(http, served, "/api/spans?filter=mode:train&limit=1"))
    assert [(s.rollout, s.attempt) for s in found.spans] == [("r1", "a2")]


async def test_a_page_stops_after_a_bounded_number_of_spans(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagination, "SLICE", 7)
    monkeypatch.setattr("penstock.gateway.api.rollouts.SCAN", 20)
    tape = MemoryTape()
    for sequence in range(1, 51):
        tape.add(call(sequence, model="rare" if sequence == 3 else "common"))
    tape.add(call(1, rollout="r2", model="other"))
    async with serving(tape) as served:
        for path, key in (
            ("/api/spans?", "spans"),
            ("/api/rollouts/r1/spans?", "spans"),
            ("/api/rollouts?", "rollouts"),
        ):
            found, scanned, cursor = list[Any](), list[int](), ""
            while cursor is not None:
                page = await get(http, served, f"{path}filter=model:rare{cursor and '&cursor=' + cursor}")
                found, cursor = found + page[key], page["next"]
                scanned.append(page["scanned"])
            assert len(found) == 1
            assert max(scanned) <= 20


# --- single things ---


async def test_a_span_is_shown_whole(served: Serving, http: aiohttp.ClientSession) -> None:
    answer = await get(http, served, "/api/rollouts/r1/attempts/a1/spans/1")
    detail = SpanDetail.model_validate(answer)
    assert detail.span.sequence == 1
    assert detail.turn is not None
    assert detail.exchange is not None
    assert [part.text for part in detail.turn.messages[0].parts] == ["Where is the timeout set?"]
    assert detail.turn.choices[0].message.parts[0].text == "In config.py."
    body = detail.exchange.request_body
    assert json.loads(body.text or "")["messages"][0]["role"] == "user"
    assert body.base64 is None
    assert detail.exchange.chunks[0].at_ns == 500_000_000
    body = (await get(http, served, "/api/rollouts/r1/attempts/a1/spans/2"))["exchange"]["request_body"]
    assert body == {"text": None, "base64": "/wA=", "size": 2}
    bare = SpanDetail.model_validate(await get(http, served, "/api/rollouts/r1/attempts/a2/spans/1"))
    assert (bare.span.status, bare.turn, bare.exchange) == (SpanStatus.ERROR, None, None)


async def test_exact_bytes(served: Serving, http: aiohttp.ClientSession) -> None:
    for side, body in (("request", b"\xff\x00"), ("response", b"data: x\n\n")):
        async with http.get(f"{served.url}/api/rollouts/r1/attempts/a1/spans/2/{side}") as response:
            assert await response.read() == body
            assert response.headers["Content-Type"] == "application/octet-stream"
            assert response.headers["Content-Disposition"] == f'attachment; filename="r1-a1-2-{side}.bin"'


# --- refusals ---


R1, NOWHERE = "/api/rollouts/r1/attempts", "0" * 32
REFUSED: list[tuple[str, int, str | None, str]] = [
    ("/api/rollouts/none", 404, "rid", "there is no rollout 'none'; `penstock rollouts` lists them"),
    ("/api/rollouts/none/spans", 404, "rid", "there is no rollout 'none'"),
    (f"{R1}/a9/spans", 404, "aid", "`penstock show r1` shows them"),
    (f"{R1}/a1/spans/99", 404, "sequence", "`penstock spans r1/a1` lists them"),
    (f"{R1}/a1/spans/zero", 400, "sequence", "sequence is a whole number from 1"),
    (f"{R1}/a2/spans/1/request", 404, None, "no bytes of span 1 are stored: it is error"),
    ("/api/rollouts/a%20b", 400, "rid", "rollout: 'a b' is not an id"),
    ("/api/nothing", 404, None, "GET /api/docs lists what there is"),
    ("/api/tokens", 405, "method", "/api/tokens does not know GET"),
    ("/api/spans?limit=0", 400, "limit", "limit: '0' is not 1 or more"),
    ("/api/spans?limit=many", 400, "limit", "limit: 'many' is not a whole number"),
    ("/api/spans?limt=5", 400, "limt", "did you mean 'limit'?"),
    ("/api/spans?limit=5&limit=6", 400, "limit", "given more than once"),
    ("/api/spans?filter=statsu:ok", 400, "filter", "did you mean 'status'?"),
    ("/api/spans?cursor=garbage!", 400, "cursor", "is not a cursor that this gateway gave"),
    (f"/api/spans?cursor={encode_cursor('rollouts', (1,))}", 400, "cursor", "is a cursor of another list"),
    (f"/api/spans?cursor={encode_cursor('recent', (-1,))}", 400, "cursor", "is a cursor of another list"),
    (f"/api/spans?cursor={encode_cursor('recent', ('a', 1))}", 400, "cursor", "is a cursor of another list"),
    ("/api/changes?since=99999", 400, "since", "must be a cursor of this feed, which ends at 6"),
    (f"/api/changes?tape={NOWHERE}", 400, "tape", "begin anew, without a cursor"),
    (f"/api/digest?tape={NOWHERE}", 400, "tape", "begin anew, without a cursor"),
    ("/api/changes?tape=mine", 400, "tape", "tape: 'mine'"),
    ("/api/changes?limit=3", 400, "limit", "limit goes with follow=false only"),
    ("/api/stats?spans=-1", 400, "spans", "spans: '-1' is not 0 or more"),
]


async def test_refusals_name_the_field_and_what_is_allowed(served: Serving, http: aiohttp.ClientSession) -> None:
    for path, status, field, message in REFUSED:
        error = await problem(http, served, path, status)
        assert (error.get("field"), message in error["message"]) == (field, True), (path, error)
    for path, status, allowed in (
        ("/api/spans?limit=0", 400, ["1 to 1000"]),
        ("/api/spans?limt=0", 400, ["filter", "limit", "cursor"]),
        ("/api/rollouts/r1/attempts/x/spans", 404, ["a1", "a2"]),
    ):
        assert (await problem(http, served, path, status))["allowed"] == allowed
    assert "cancelled" in (await problem(http, served, "/api/spans?filter=status:x", 400))["allowed"]


async def test_a_feed_says_of_which_tape_its_cursors_are(served: Serving, http: aiohttp.ClientSession) -> None:
    for path in ("/api/changes", "/api/changes?follow=false", "/api/digest?since=0"):
        async with http.get(f"{served.url}{path}") as response:
            tape = response.headers["Penstock-Tape"]
        assert tape == served.tape.identity()
        async with http.get(f"{served.url}{path}", params={"tape": tape}) as response:
            assert response.status == 200


async def test_a_failure_of_ours_is_logged_and_not_shown(
    served: Serving, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(rid: str) -> None:
        raise RuntimeError("the secret detail")

    monkeypatch.setattr(served.tape, "rollout", broken)
    error = await problem(http, served, "/api/rollouts/r1", 500)
    assert error == {"message": "the gateway failed; its log says why", "type": "internal"}
    assert "the secret detail" in caplog.text


async def test_every_answer_carries_the_security_headers(served: Serving, http: aiohttp.ClientSession) -> None:
    for path in ("/api/rollouts", "/api/nothing", "/api/docs", "/healthz", "/api/changes"):
        async with http.get(served.url + path) as response:
            assert {name: response.headers[name] for name in HEADERS} == HEADERS
            assert "Access-Control-Allow-Origin" not in response.headers


# --- keys ---


async def test_with_a_key_only_the_key_opens(http: aiohttp.ClientSession) -> None:
    async with serving(small_tape(), admin_key=KEY) as served:
        assert "admin key is missing" in (await problem(http, served, "/api/rollouts", 401))["message"]
        for name, value in (("Authorization", f"Bearer {KEY}"), ("x-api-key", KEY)):
            await get(http, served, "/api/rollouts", 200, **{name: value})
        await get(http, served, "/metrics", 401)
        wrong = await get(http, served, "/api/rollouts", 401, Authorization="Bearer no")
        assert wrong["error"]["message"].startswith("this is not the gateway's admin key; ")
        for path in ("/healthz", "/readyz", "/api/openapi.json"):
            await get(http, served, path)


@pytest.mark.parametrize("admin_key", [None, KEY])
async def test_an_agent_token_never_opens_the_control_api(http: aiohttp.ClientSession, admin_key: str | None) -> None:
    async with serving(small_tape(), admin_key) as served:
        for path in ("/api/rollouts", "/api/rollouts/r1", "/api/openapi.json", "/metrics", "/api/changes"):
            answer = await get(http, served, path, 403, Authorization=f"Bearer {served.auth.mint('r1')}")
            assert "own rollout only, never the control API" in answer["error"]["message"]


async def test_a_foreign_host_name_is_refused(served: Serving, http: aiohttp.ClientSession) -> None:
    for host in ("evil.example", "evil.example:4747", "127.0.0.1.evil.example", "localhost@evil", ""):
        answer = await get(http, served, "/api/rollouts", 403, Host=host)
        assert answer["error"]["field"] == "Host", host
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:65535", "[::1]:4747", "[::1]"):
        await get(http, served, "/api/rollouts", 200, Host=host)


async def test_with_a_key_any_host_name_passes(http: aiohttp.ClientSession) -> None:
    async with serving(small_tape(), KEY) as served:
        await get(http, served, "/api/rollouts", 200, Host="gateway.example", Authorization=f"Bearer {KEY}")


async def test_tokens_are_made(served: Serving, http: aiohttp.ClientSession) -> None:
    async with http.post(f"{served.url}/api/tokens", json={"rollout": "new-one", "expires_s": 60}) as response:
        token = await response.json()
    end = token["expires_ns"] // 10**9
    assert served.auth.rollout_of(token["token"], now=end - 1) == "new-one"


async def test_bad_token_requests_are_refused(served: Serving, http: aiohttp.ClientSession) -> None:
    for body, kind, status, field in (
        (b'{"rollout": "a b"}', "application/json", 400, "rollout"),
        (b'{"rollout": "a", "expires_s": 0}', "application/json", 400, "expires_s"),
        (b'{"rollout": "a", "expire": 1}', "application/json", 400, "expire"),
        (b"{}", "application/json", 400, "rollout"),
        (b"{", "application/json", 400, None),
        (b'{"rollout": "a"}', "text/plain", 415, "Content-Type"),
    ):
        async with http.post(f"{served.url}/api/tokens", data=body, headers={"Content-Type": kind}) as response:
            assert (response.status, (await response.json())["error"].get("field")) == (status, field), body


# --- figures ---


async def test_stats(served: Serving, http: aiohttp.ClientSession) -> None:
    served.metrics.recording_gaps = 2
    stats = Stats.model_validate(await get(http, served, "/api/stats"))
    assert (stats.counted_spans, stats.complete, stats.since_ns) == (4, True, T0 + 10**9)
    assert stats.by_status == {"ok": 3, "error": 1}
    assert (stats.totals.calls, stats.totals.errors, stats.totals.output_tokens) == (4, 1, 80)
    assert list(stats.by_model) == ["gpt-5-mini", "qwen3-8b"]
    assert stats.by_model["qwen3-8b"].p95_ns == 3 * 10**9
    assert (stats.cursor, stats.gaps, stats.tape["rollouts"]) == (6, 2, 2)
    part = Stats.model_validate(await get(http, served, "/api/stats?spans=2"))
    assert (part.counted_spans, part.complete) == (2, False)
    none = Stats.model_validate(await get(http, served, "/api/stats?spans=0"))
    assert (none.counted_spans, none.since_ns, none.cursor) == (0, None, 6)


async def test_health_and_readiness(served: Serving, http: aiohttp.ClientSession) -> None:
    assert await get(http, served, "/healthz") == {"status": "ok"}
    assert await get(http, served, "/readyz") == {"status": "ok"}
    served.state.not_ready = "the gateway is draining: it stops soon"
    assert "draining" in (await problem(http, served, "/readyz", 503))["message"]
    await get(http, served, "/healthz")


async def test_metrics(served: Serving, http: aiohttp.ClientSession) -> None:
    served.metrics.call_ended("chat", "ok", 0.1)
    async with http.get(f"{served.url}/metrics") as response:
        text = await response.text()
        assert response.content_type == "text/plain"
    assert 'penstock_calls_total{dialect="chat",status="ok"} 1.0' in text
    assert "penstock_tape_bytes 1.048576e+06" in text


# --- the change feed ---


async def events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, str]]:
    """Events of a stream, comments under the name `comment`."""
    while True:
        text = (await response.content.readuntil(b"\n\n")).decode().strip()
        pairs = (line.partition(": ") for line in text.split("\n"))
        yield {name or "comment": value for name, _, value in pairs}


async def test_changes_stream_everything_and_then_what_comes(served: Serving, http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(PATIENCE_S), http.get(f"{served.url}/api/changes") as response:
        stream = events(response)
        assert "comment" in await anext(stream)
        found = [await anext(stream) for _ in range(6)]
        assert [event["id"] for event in found] == ["1", "2", "3", "4", "5", "6"]
        assert [event["event"] for event in found] == ["rollout", "span", "span", "span", "rollout", "span"]
        assert Change.model_validate_json(found[1]["data"]).span == served.tape.span("r1", "a1", 1)
        served.tape.add(call(3))
        await served.tape.tell()
        assert (await anext(stream))["id"] == "7"


async def test_changes_resume_after_a_cursor(served: Serving, http: aiohttp.ClientSession) -> None:
    for path, headers, first in (
        ("/api/changes?since=4", {}, "5"),
        ("/api/changes", {"Last-Event-ID": "5"}, "6"),
        ("/api/changes?since=1", {"Last-Event-ID": "3"}, "4"),
    ):
        async with asyncio.timeout(PATIENCE_S), http.get(served.url + path, headers=headers) as response:
            stream = events(response)
            await anext(stream)
            assert (await anext(stream))["id"] == first, path


async def test_a_quiet_feed_is_kept_alive(http: aiohttp.ClientSession) -> None:
    async with (
        asyncio.timeout(PATIENCE_S),
        serving(small_tape(), keep_alive_s=0.01) as served,
        http.get(f"{served.url}/api/changes?since=6") as response,
    ):
        stream = events(response)
        found = [await anext(stream) for _ in range(3)]
        assert found[1:] == [{"comment": "keep-alive"}] * 2


async def test_followers_end_when_the_gateway_stops(served: Serving, http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(PATIENCE_S), http.get(f"{served.url}/api/changes?since=6") as response:
        await anext(events(response))
        await served.runner.cleanup()
        with pytest.raises((aiohttp.ClientError, asyncio.IncompleteReadError)):
            await response.content.readuntil(b"\n\n")


async def test_a_feed_that_fails_ends_the_stream_and_is_logged(
    served: Serving, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the tape is gone")

    monkeypatch.setattr(served.tape, "changes", broken)
    async with asyncio.timeout(PATIENCE_S), http.get(f"{served.url}/api/changes") as response:
        assert await response.read() == b": penstock changes\n\n"
    assert "the tape is gone" in caplog.text


async def test_a_finite_page_of_changes(served: Serving, http: aiohttp.ClientSession) -> None:
    page = await get(http, served, "/api/changes?follow=false&since=2&limit=2")
    assert ([change["cursor"] for change in page["changes"]], page["next"]) == ([3, 4], 4)
    end = await get(http, served, "/api/changes?follow=false&since=6")
    assert end == {"changes": [], "next": 6}
