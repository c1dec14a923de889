"""Whose call it is, whether it may pass, where it goes: addresses, sessions, tokens, and what a bug does to a call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import pytest
from fakes.odd import Script, close, gone, request, send, wait
from fakes.process import PATIENCE, Gateway, upstream
from fakes.raw import Headers, body_of, chunk, connect, error_of, events_head, get, head, post, reply
from fakes.rig import CHAT, MESSAGES, Rig, Within

from penstock.gateway import app
from penstock.gateway.model.rollout import RolloutSummary
from penstock.gateway.tape.store import Store
from penstock.gateway.traffic.calls.admission import Admission
from penstock.gateway.traffic.calls.call_record import CallRecord
from penstock.gateway.traffic.calls.conversation_matcher import ConversationMatcher
from penstock.gateway.traffic.proxy.call import HttpCall
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.wire.dialects.chat import ChatDialect

StartGateway = Callable[..., Awaitable[Gateway]]
OK = reply(200, b"{}")
MANY = 1000
"""Calls that take longer than some ticks."""
ANSWER = reply(200, b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"hi"}}]}')


def answering(count: int, answer: bytes = OK) -> Script:
    return [step for _ in range(count) for step in (request(), send(answer))]


async def only_rollout(rig: Rig, rollout: str) -> RolloutSummary:
    """A rollout with exactly one attempt."""
    await rig.tape.when(rollout, "a1", lambda heads: True)
    return RolloutSummary.model_validate(await rig.tape.get(f"/api/rollouts/{rollout}"))


# -- addresses ---------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, Headers]] = {
    "path": ("/rollout/{r}/attempt/t2/agent/planner/v1/chat/completions", ()),
    "lightning": ("/proxy/rollout/{r}/attempt/t2/mode/train/openai/v1/chat/completions", ()),
    "headers": (CHAT, [("X-Rollout-Id", "{r}"), ("x-attempt-id", "t2"), ("X-Agent-ID", "planner")]),
    "baggage": (
        CHAT,
        [("baggage", "k=v,penstock.rollout_id={r};p=1, penstock.attempt_id=t2,penstock.agent_id=planner")],
    ),
    "path-before-headers": ("/rollout/{r}/attempt/t2/v1/chat/completions", [("x-rollout-id", "other")]),
}


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_of_address_ends_at_its_attempt(rig: Rig, form: str) -> None:
    path, headers = FORMS[form]
    named = [(name, value.format(r=rig.rollout)) for name, value in headers]
    got, seen = await rig.passes(post(path.format(r=rig.rollout), b'{"model":"m"}', named))
    assert (got, seen.partition(b"\r\n")[0]) == (OK, b"POST /v1/chat/completions HTTP/1.1")
    (span,) = await rig.tape.spans(rig.rollout, 1, "t2")
    assert span.path == CHAT
    assert span.agent == (None if form in ("lightning", "path-before-headers") else "planner")
    rollout = RolloutSummary.model_validate(await rig.tape.get(f"/api/rollouts/{rig.rollout}"))
    assert (rollout.origin, rollout.mode) == ("header", "train" if form == "lightning" else "online")


async def test_an_attempt_need_not_be_named(rig: Rig) -> None:
    await rig.passes(post(f"/rollout/{rig.rollout}/v1/chat/completions", b"{}"))
    assert (await rig.span()).attempt == "a1"


@pytest.mark.parametrize("below", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    ("part", "path", "value"),
    [
        ("rollout", "/rollout/a%20b/attempt/a1", "a%20b"),
        ("attempt", "/rollout/r/attempt/a@1", "a@1"),
        ("agent", f"/rollout/r/agent/{'x' * 129}", "x" * 129),
    ],
)
async def test_an_id_that_may_not_be_one_is_named(rig: Rig, below: str, part: str, path: str, value: str) -> None:
    async with rig.client() as client:
        client.send(post(path + below, b"{}"))
        error = error_of(await client.message(), 400)
        assert f"{part} {value!r}" in error["message"]
        assert "A-Z a-z 0-9 . _ -" in error["message"]
        assert error.get("param") == (part if below == CHAT else None)
        # The connection is still good.
        client.send(get("/healthz", host="127.0.0.1"))
        assert (await client.message()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("name", "value"), [("x-rollout-id", "a b"), ("X-Attempt-Id", "../x"), ("x-agent-id", "\xe9"), ("x-rollout-id", "")]
)
async def test_a_header_that_may_not_be_an_id_is_named(rig: Rig, name: str, value: str) -> None:
    named = {"x-rollout-id": "r", name: value}
    async with rig.client() as client:
        client.send(post(CHAT, b"{}", list(named.items())))
        error = error_of(await client.message(), 400)
        assert error["param"] == name.lower()
        assert repr(value) in error["message"]


async def test_a_mode_that_is_none_is_named(rig: Rig) -> None:
    async with rig.client() as client:
        client.send(post(f"/proxy/rollout/r/attempt/a/mode/prod/openai{CHAT}", b"{}"))
        assert "train, val, test or online" in error_of(await client.message(), 400)["message"]


# -- who says nothing --------------------------------------------------------------------------------------------------

SESSIONS = {
    "claude code": ("x-claude-code-session-id", "5c0a-1", "claude-5c0a-1"),
    "codex": ("session_id", "0193/x", "session-0193-x"),
    "opencode": ("x-session-id", "ses_1", "session-ses_1"),
    "codex thread": ("thread-id", "th", "thread-th"),
}


@pytest.mark.parametrize("client_name", SESSIONS)
async def test_sessions_of_coding_agents_are_rollouts(rig: Rig, client_name: str) -> None:
    header, value, prefix = SESSIONS[client_name]
    async with rig.upstream(answering(2)):
        for _ in range(2):
            async with rig.client() as client:
                client.send(post(CHAT, b'{"model":"m"}', [(header, value + rig.rollout)]))
                await client.message()
    assert len(await rig.tape.spans(prefix + rig.rollout, 2)) == 2
    assert (await only_rollout(rig, prefix + rig.rollout)).origin == "implicit"


def conversation(*messages: tuple[str, str]) -> bytes:
    said = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"model": "m", "messages": said}).encode()


async def test_a_conversation_is_one_rollout(rig: Rig) -> None:
    mine, yours = ("user", f"mine {rig.rollout}"), ("user", f"yours {rig.rollout}")
    turns = [
        conversation(mine),
        conversation(yours),
        conversation(mine, ("assistant", "hi"), ("user", "more")),
        conversation(yours, ("assistant", "hi"), ("user", "more")),
    ]
    async with rig.upstream(answering(4, ANSWER)):
        for body in turns:
            async with rig.client() as client:
                client.send(post(f"{CHAT}?{rig.rollout}", body))
                await client.message()
    spans = await rig.unaddressed(4)
    assert spans[0].rollout == spans[2].rollout != spans[1].rollout == spans[3].rollout
    assert [span.sequence for span in spans] == [1, 1, 2, 2]


async def test_the_next_turn_is_known_at_once_even_on_the_same_connection(rig: Rig) -> None:
    opening = ("user", f"quick {rig.rollout}")
    async with rig.upstream(answering(2, ANSWER)), rig.client() as client, rig.client() as other:
        client.send(post(f"{CHAT}?{rig.rollout}", conversation(opening)))
        await client.message()
        other.send(post(f"{CHAT}?{rig.rollout}", conversation(opening, ("assistant", "hi"), ("user", "b"))))
        await other.message()
    first, second = await rig.unaddressed(2)
    assert first.rollout == second.rollout


async def test_a_response_is_continued_by_its_id(rig: Rig) -> None:
    answers = [reply(200, json.dumps({"id": f"{rig.rollout}-{number}", "output": []}).encode()) for number in range(2)]
    script = [step for answer in answers for step in (request(), send(answer))]
    async with rig.upstream(script):
        for body in ({"input": "a"}, {"input": "b", "previous_response_id": f"{rig.rollout}-0"}):
            async with rig.client() as client:
                client.send(post(f"/v1/responses?{rig.rollout}", json.dumps({"model": "m", **body}).encode()))
                await client.message()
    first, second = await rig.unaddressed(2)
    assert first.rollout == second.rollout


def event(value: object) -> bytes:
    return chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


ENDINGS: dict[str, tuple[str, dict[str, Any], Callable[[str], list[bytes]], Callable[[str], dict[str, Any]]]] = {
    "response": (
        "/v1/responses",
        {"input": "a"},
        lambda id: [
            event({"type": "response.created", "response": {"id": id, "output": []}}),
            event({"type": "response.completed", "response": {"id": id, "output": [said("hi")]}}),
        ],
        lambda id: {"input": "b", "previous_response_id": id},
    ),
    "response not stored": (
        "/v1/responses",
        {"input": [{"role": "user", "content": "not stored @"}], "store": False},
        lambda id: [
            event({"type": "response.created", "response": {"id": id, "output": []}}),
            event({"type": "response.completed", "response": {"id": id, "output": [said("hi")]}}),
        ],
        lambda _: {
            "input": [{"role": "user", "content": "not stored @"}, said("hi"), {"role": "user", "content": "b"}],
            "store": False,
        },
    ),
    "chat": (
        CHAT,
        {"messages": [{"role": "user", "content": "chat @"}]},
        lambda _: [
            event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "hi"}}]}),
            chunk(b"data: [DONE]\n\n"),
        ],
        lambda _: {"messages": [{"role": role, "content": text} for role, text in
                                (("user", "chat @"), ("assistant", "hi"), ("user", "b"))]},
    ),
    "messages": (
        MESSAGES,
        {"max_tokens": 1, "messages": [{"role": "user", "content": "messages @"}]},
        lambda id: [
            event({"type": "message_start", "message": {"id": id, "role": "assistant", "content": []}}),
            event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "hi"}}),
            event({"type": "message_stop"}),
        ],
        lambda _: {"max_tokens": 1, "messages": [{"role": role, "content": text} for role, text in
                                                 (("user", "messages @"), ("assistant", "hi"), ("user", "b"))]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("broken", [False, True], ids=["ends", "breaks off"])
@pytest.mark.parametrize(
    ("form", "stored"), [*((form, None) for form in ENDINGS), ("response", True), ("response", False)]
)
async def test_an_answer_is_continued_when_its_last_event_is_there(
    rig: Rig, form: str, broken: bool, stored: bool | None
) -> None:
    """Clients go on without waiting for the end of the body, which may come late, or not at all."""
    path, body, answer, more = ENDINGS[form]
    store, id = {} if stored is None else {"store": stored}, f"{rig.rollout}-1"

    def asked(body: dict[str, Any]) -> bytes:
        unique = json.dumps({"model": "m", "stream": True, **store, **body}).replace("@", rig.rollout)
        return post(f"{path}?{rig.rollout}", unique.encode())

    *events, last = answer(id)
    half = len(last) // 2
    end = close() if broken else send(chunk(b""))
    first = [request(), send(events_head() + b"".join(events)), send(last[:half]), wait("seen"), send(last[half:])]
    async with (
        rig.upstream([*first, wait("continued"), end], [request(), send(ANSWER)]) as upstream_,
        rig.client() as client,
        rig.client() as other,
    ):
        client.send(asked(body))
        await client.until(last[:half])
        upstream_.go("seen")
        await client.until(last[half:])
        other.send(asked(more(id)))
        await other.message()
        upstream_.go("continued")
        begun, continued = await rig.unaddressed(2)
    assert begun.rollout == continued.rollout


# -- tokens ------------------------------------------------------------------------------------------------------------


async def token_for(rig: Rig, rollout: str, key: str | None = None, url: str | None = None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with rig.tape.http.post(
        (url or rig.base.url) + "/api/tokens", json={"rollout": rollout}, headers=headers
    ) as made:
        return (await made.json())["token"]


PLACES: dict[str, str] = {
    "Authorization": "Bearer {}",
    "x-api-key": "{}",
    "api-key": "{}",
    "x-goog-api-key": "{}",
    "X-Penstock-Token": "{}",
}


@pytest.mark.parametrize("place", PLACES)
async def test_a_token_alone_is_an_address_and_goes_no_further(rig: Rig, place: str) -> None:
    token = await token_for(rig, rig.rollout)
    got, seen = await rig.passes(post(CHAT, b"{}", [("X-A", "1"), (place, PLACES[place].format(token)), ("X-B", "2")]))
    assert got == OK
    assert token.encode() not in seen
    assert place.lower().encode() not in seen.lower()
    assert b"X-A: 1\r\nX-B: 2\r\n" in seen
    assert (await rig.span()).status == "ok"


@pytest.mark.parametrize("client_name", SESSIONS)
async def test_a_token_says_more_than_the_session_of_a_coding_agent(rig: Rig, client_name: str) -> None:
    header, value, _ = SESSIONS[client_name]
    token = await token_for(rig, rig.rollout)
    got, _ = await rig.passes(post(CHAT, b"{}", [("Authorization", f"Bearer {token}"), (header, value)]))
    assert got == OK
    assert len(await rig.tape.spans(rig.rollout, 1)) == 1


async def test_a_token_beside_the_agents_own_key(rig: Rig) -> None:
    headers = [("Authorization", "Bearer sk-agent"), ("x-penstock-token", await token_for(rig, rig.rollout))]
    got, seen = await rig.passes(rig.call(headers=headers))
    assert (got, b"Authorization: Bearer sk-agent\r\n" in seen) == (OK, True)


async def test_a_token_anywhere_else_goes_no_further_either(rig: Rig) -> None:
    token, login = await token_for(rig, rig.rollout), f"pst_key_login.{'aB3-' * 20}"
    headers = [("X-Odd", f"a {token}"), ("X-Kept", "pst_ish"), ("X-Login", login)]
    sent = post(rig.path(f"{CHAT}?key={token}&b={login}&a=1"), b"{}", headers)
    got, seen = await rig.passes(sent)
    assert (got, token.encode() in seen, b"login" in seen.lower()) == (OK, False, False)
    assert b"&a=1 HTTP/1.1" in seen
    assert b"X-Kept: pst_ish\r\n" in seen


async def test_a_token_in_a_trailer_or_a_name_goes_no_further(rig: Rig) -> None:
    token = await token_for(rig, rig.rollout)
    body = chunk(b"{}") + f"0\r\nX-Odd: a {token}\r\n{token}: b\r\nX-Kept: pst_ish\r\n\r\n".encode()
    start = head(f"POST {rig.path()} HTTP/1.1", [("Host", "h"), (token, "a"), ("Transfer-Encoding", "chunked")])
    got, seen = await rig.passes(start + body)
    assert (got, token.encode() in seen) == (OK, False)
    assert seen.endswith(b"\r\n0\r\nX-Kept: pst_ish\r\n\r\n")
    with Store(rig.base.data, readonly=True) as store:
        assert token not in repr(store.exchange(await rig.span()))


@pytest.mark.parametrize("below", [CHAT, MESSAGES])
async def test_tokens_that_open_nothing(rig: Rig, below: str) -> None:
    token = await token_for(rig, "another")
    forged = f"{token[:-8]}{'B' if token[-8] == 'A' else 'A'}{token[-7:]}"
    for bad, status in ((token, 403), (forged, 401), ("pst_", 401), ("pst_*", 401), (token[:20], 401)):
        async with rig.upstream([request()]) as upstream_, rig.client() as client:
            client.send(rig.call(headers=[("x-api-key", bad)], below=below))
            error = error_of(await client.message(), status)
            assert bad.removeprefix("pst_") not in error["message"] or bad == "pst_"
            assert upstream_.connections == []
    async with rig.client() as client:
        client.send(get("/api/rollouts", [("Authorization", f"Bearer {token}")], host="127.0.0.1"))
        assert (await client.message()).startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 403 "))


async def test_with_a_key_of_its_own_and_tokens_required(rig: Rig, start_gateway: StartGateway) -> None:
    """The admin key is not passed on as the agent's either."""
    up, anthropic = f"http://{rig.host}/v1", f"http://{rig.host}"
    config = upstream("up", up, "openai", "UP_KEY") + upstream("a", anthropic, "anthropic", "UP_KEY")
    config += upstream("keyless", up, "openai") + '[[route]]\nmodel = "keyless"\nupstream = "keyless"\n'
    env = {"UP_KEY": "sk-upstream", "PENSTOCK_ADMIN_KEY": "admin-key"}
    gateway = await start_gateway("require_token = true\n" + config, env=env)
    token = await token_for(rig, "mine", "admin-key", gateway.url)
    agents = [
        ("Authorization", f"Bearer {token}"),
        ("x-api-key", "sk-agent"),
        ("Api-Key", "x"),
        ("X-Goog-Api-Key", "y"),
    ]
    admin = [("Authorization", "Bearer admin-key")]
    async with rig.upstream(answering(9)) as upstream_, connect(gateway.url) as client:
        for wrong in ([], [("Authorization", "Bearer wrong")]):
            client.send(post(f"/rollout/mine/attempt/a1{CHAT}", b"{}", wrong))
            assert "penstock token" in error_of(await client.message(), 401)["message"]
        keyless = b'{"model":"keyless"}'
        for below, body, admitted in (
            (CHAT, b"{}", agents), (MESSAGES, b"{}", agents), (CHAT, b"{}", admin), (CHAT, keyless, admin),
        ):  # fmt: skip
            client.send(post(f"/rollout/mine/attempt/a1{below}", body, [*admitted, ("X-Kept", "1")]))
            assert await client.message() == OK
        seen = [one for connection in upstream_.connections for one in connection.requests]
        assert len(seen) == 4
        for one in seen:
            assert b"X-Kept: 1\r\n" in one
            for secret in (token.encode(), b"sk-agent", b"admin-key", b"Goog", b"Api-Key: x"):
                assert secret not in one
        assert sum(b"Authorization: Bearer sk-upstream\r\n" in one for one in seen) == 2
        assert sum(b"x-api-key: sk-upstream\r\n" in one for one in seen) == 1


# -- recording ---------------------------------------------------------------------------------------------------------


async def test_retries_are_linked_and_twins_are_kept(rig: Rig) -> None:
    retry = [("x-stainless-retry-count", "1")]
    async with rig.upstream(answering(6)):
        for headers in ([("x-stainless-retry-count", "0")], retry):
            async with rig.client() as client:
                client.send(rig.call(b'{"model":"m","a":1}', headers))
                await client.message()
                await rig.tape.spans(rig.rollout, 2 if headers is retry else 1)

        async def twin() -> None:
            async with rig.client() as client:
                client.send(post(f"/rollout/{rig.rollout}/attempt/twins{CHAT}", b'{"model":"m"}'))
                await client.message()

        await asyncio.gather(*(twin() for _ in range(4)))
    assert [span.retry_of for span in await rig.tape.spans(rig.rollout, 2)] == [None, 1]
    assert [span.retry_of for span in await rig.tape.spans(rig.rollout, 4, "twins")] == [None] * 4


async def test_a_running_call_is_seen(rig: Rig) -> None:
    script = [request(), send(events_head()), wait("seen"), send(chunk(b"data: [DONE]\n\n") + chunk(b""))]
    async with rig.upstream(script) as upstream_, rig.client() as client:
        client.send(rig.call())
        span = await rig.tape.open_span(rig.rollout)
        assert (span.model, span.end_ns, span.http_status) == ("m", None, None)
        assert await rig.tape.raw(span, "request") == b'{"model":"m"}'
        upstream_.go("seen")
        await client.until(b"0\r\n\r\n")
    assert (await rig.span()).status == "ok"
    attempts = (await rig.tape.get(f"/api/rollouts/{rig.rollout}/attempts"))["attempts"]
    assert attempts[0]["totals"]["calls"] == 1


async def test_a_gateway_that_rests_wakes_for_a_call_and_for_its_end(
    within: Within, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between ticks of a gateway that has nothing to do is more time than this test has."""
    monkeypatch.setattr(app, "_CHECK_SECONDS", 10 * PATIENCE)
    script = [request(), send(events_head()), wait("seen"), send(chunk(b"data: [DONE]\n\n") + chunk(b""))]
    limits = {"drain_seconds": PATIENCE}
    async with within(limits=limits) as rig, rig.upstream(script) as upstream_, rig.client() as client:
        client.send(rig.call())
        _ = await rig.tape.open_span(rig.rollout)
        upstream_.go("seen")
        await client.until(b"0\r\n\r\n")
        await asyncio.sleep(0.3)
        stopped_at = monotonic()
    assert monotonic() - stopped_at < limits["drain_seconds"]


async def test_calls_that_follow_each_other_put_no_tick_off(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = 0
    sweep = ProxyContext.sweep

    def counted(context: ProxyContext, now: float) -> None:
        nonlocal swept
        swept += 1
        sweep(context, now)

    monkeypatch.setattr(app, "_CHECK_SECONDS", 10 * PATIENCE)
    async with within() as rig, rig.upstream(answering(MANY)), rig.client() as client:
        monkeypatch.setattr(ProxyContext, "sweep", counted)
        for _ in range(MANY):
            client.send(rig.call())
            await client.message()
            if swept > 1:
                break
        assert swept > 1


# -- bugs --------------------------------------------------------------------------------------------------------------


BUGS = {
    "admission": (Admission, "admit", 500, 0),
    "begin": (HttpCall, "on_connected", 500, 1),
    "answer": (HttpCall, "begin_answer", 502, 1),
}


def fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError("planted")


@pytest.mark.parametrize("where", BUGS)
async def test_a_bug_ends_the_call_and_is_logged(
    within: Within, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name, status, spans = BUGS[where]
    monkeypatch.setattr(owner, name, fail)
    async with within() as rig, rig.upstream([request(), send(OK), gone()]), rig.client() as client:
        with caplog.at_level(logging.ERROR):
            client.send(rig.call())
            assert error_of(await client.message(), status)["code"] == "internal"
        assert "ZeroDivisionError: planted" in caplog.text
        found = await rig.tape.when(rig.rollout, "a1", lambda heads: len(heads) == spans)
        assert [(span.status, span.error) for span in found] == [("error", "internal")] * spans


async def test_a_bug_in_following_a_conversation_costs_only_that(
    within: Within, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ConversationMatcher, "_given", fail)
    said = [{"role": "user", "content": "a" * (300 << 10)}]
    body = json.dumps({"model": "m", "messages": said}).encode()
    async with within() as rig:
        assert (await rig.passes(post(f"{CHAT}?{rig.rollout}", body)))[0] == OK
        assert "planted" in caplog.text
        (span,) = await rig.unaddressed(1)
        assert (span.status, span.rollout[:2]) == ("ok", "i-")


async def test_a_bug_in_the_middle_of_an_answer_breaks_it(
    within: Within, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = [request(), send(events_head()), wait("seen"), send(chunk(b"x")), gone()]
    async with within() as rig:
        async with rig.upstream(script) as upstream_, rig.client() as client:
            client.send(rig.call())
            await client.until(b"\r\n\r\n")
            monkeypatch.setattr(CallRecord, "add_pieces", fail)
            upstream_.go("seen")
            assert await client.rest() == b""
        assert "planted" in caplog.text
        monkeypatch.undo()
        assert (await rig.span()).error == "internal"


async def test_a_bug_in_reading_facts_costs_only_the_facts(
    within: Within, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ChatDialect, "facts", fail)
    async with within() as rig:
        assert (await rig.passes(answer=ANSWER))[0] == ANSWER
        span = await rig.span()
        assert (span.status, span.response_id) == ("ok", None)
        assert await rig.tape.raw(span, "response") == body_of(ANSWER)
        assert "planted" in caplog.text
