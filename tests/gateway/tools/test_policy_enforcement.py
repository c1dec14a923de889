"""Policies where calls pass, through a gateway process: what is denied reaches no server, by no way."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import logging
from typing import Any, cast

import aiohttp
import pytest
from conftest import StartGateway
from fakes.mcp_wire import Client, McpServer, call, config, mcp_server
from fakes.process import PATIENCE, Gateway
from fakes.tape import Tape

from penstock.gateway.client.client import Client as Control
from penstock.gateway.client.client import ClientError
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.span import Span
from penstock.gateway.reading.policy.questions import PolicyAnswer, Question
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tools.policy_enforcement import PolicyAudit

RULES = """
[[policy]]
name = "marked"
tool = "echo"
argument = [{ at = "city", equals = "Oslo" }]
verdict = "dry"

[[policy]]
name = "no-etc"
tool = "echo"
argument = [{ at = "path", glob = "/etc/*" }]
verdict = "deny"
message = "Read below /srv."

[[policy]]
name = "mails"
tool = ["echo", "stream", "later"]
argument = [{ at = "mails", absent = false }]
verdict = "redact"
redact = { arguments = ["secret"], results = ["**"], pattern = "[a-z]+@[a-z.]+|done|at last" }

[[policy]]
name = "ask-first"
tool = "ask"
verdict = "ask"
message = "It costs money."
wait = 60.0

[[policy]]
name = "soon"
tool = "fails"
verdict = "ask"
wait = 0.2

[[policy]]
name = "unlisted"
tool = "refused"
annotations = { readOnlyHint = true }
verdict = "deny"
hard = true

[[policy]]
name = "not-in-training"
tool = "never"
mode = "train"
verdict = "deny"
"""


@pytest.fixture
def more() -> str:
    return RULES


@pytest.fixture
async def client(gateway: Gateway, http: aiohttp.ClientSession) -> Client:
    made = Client(f"{gateway.address('r1')}/mcp/tools", http, {})
    await made.open()
    return made


def attributes(span: Span, prefix: str = "penstock.policy.") -> dict[str, Any]:
    given = span.attributes or {}
    return {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}


def calls(server: McpServer) -> list[Any]:
    """Bodies that ran a tool."""
    return [json.loads(body) for _, _, _, body in server.asked if b"tools/call" in body]


async def test_a_denied_call_is_an_error_that_the_model_can_read(client: Client, server: McpServer, tape: Tape) -> None:
    status, body = await client.say(call("echo", {"path": "/etc/passwd"}, id="a"))
    error = json.loads(body)
    assert (status, error["id"], error["error"]["code"]) == (200, "a", -32010)
    assert error["error"]["data"] == {"reason": "policy", "rule": "no-etc"}
    assert error["error"]["message"].endswith(": Read below /srv.")
    assert calls(server) == []
    made = (await tape.spans("r1", 2))[1]
    assert (made.kind, made.name, made.status, made.error) == ("tool", "tools/call echo", "error", "policy_violation")
    assert (made.http_status, made.upstream, attributes(made)) == (200, "tools", {"rule": "no-etc", "verdict": "deny"})


async def test_what_no_rule_is_about_passes_as_it_came(client: Client, server: McpServer, tape: Tape) -> None:
    body = b'{ "jsonrpc":"2.0","id":1.0, "method":"tools/call","params":{"name":"echo","arguments":{"path":"/srv/a"}} }'
    async with client.http.post(client.url, data=body, headers=client.headers) as reply:
        assert reply.status == 200
    assert server.asked[-1][3] == body
    assert attributes((await tape.spans("r1", 2))[1]) == {}


async def test_a_dry_rule_only_marks(client: Client, server: McpServer, tape: Tape) -> None:
    _ = await client.say(call("echo", {"city": "Oslo"}))
    assert len(calls(server)) == 1
    made = (await tape.spans("r1", 2))[1]
    assert (made.status, attributes(made)) == ("ok", {"dry": ["marked"]})


async def test_a_batch_goes_only_if_all_of_it_may(client: Client, server: McpServer) -> None:
    batch = [call("echo", {"path": "/srv"}, id=1), call("echo", {"path": "/etc/x"}, id=2)]
    async with client.post(batch) as reply:
        told = await reply.json()
        assert (reply.status, [one["id"] for one in told]) == (200, [1, 2])
    assert "one of 2 messages sent together" in told[0]["error"]["message"]
    assert calls(server) == []


DENIED = call("echo", {"path": "/etc/passwd"})
TEXT = json.dumps(DENIED)


FORMS: list[tuple[bytes, dict[str, str]]] = [
    (TEXT.replace('"/etc/passwd"', '"\\u002fetc/passwd"').encode(), {}),
    (TEXT.replace('"path"', '"p": 1, "Path"').encode(), {}),
    (TEXT.replace('"path"', '"path": "/srv", "path"').encode(), {}),
    (TEXT.replace('"name"', '"name": "other", "name"').encode(), {}),
    (TEXT.replace('"method"', '"Method"').encode(), {}),
    (TEXT.replace('{"path"', '{"padding": "%s", "path"' % ("x" * 2_000_000)).encode(), {}),
    (TEXT.replace('{"path"', '{"deep": %s, "path"' % ("[" * 5000 + "]" * 5000)).encode(), {}),
    (gzip.compress(TEXT.encode()), {"Content-Encoding": "gzip"}),
    (b"no gzip", {"Content-Encoding": "gzip"}),
    (TEXT.encode(), {"Content-Encoding": "unheard-of"}),
    (TEXT.encode("utf-16"), {"Content-Type": "application/json; charset=utf-16"}),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping"}', {"Content-Type": "application/json; charset = utf-7"}),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping"}', {"Content-Type": "application/json; charset*=us-ascii''utf-7"}),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping"}', {"Mcp-Method": "tools/call"}),
    (json.dumps(call("never")).encode(), {"Mcp-Method": "tools/call", "Mcp-Name": "echo"}),
    (json.dumps(call("never")).encode(), {"Mcp-Method": "tools/call", "Mcp-Name": "=?base64?ZWNobw==?="}),
    (b"\xef\xbb\xbf" + TEXT.encode(), {}),
    (TEXT.encode() + b"\n{}", {}),
    (b"{", {}),
]


async def test_no_form_of_a_call_gets_past(client: Client, server: McpServer) -> None:
    before = len(server.asked)
    for body, headers in FORMS:
        async with client.http.post(client.url, data=io.BytesIO(body), headers=client.headers | headers) as reply:
            error = await reply.json()
            assert (error["error"]["data"]["reason"], reply.status in (200, 400)) == ("policy", True), body[:200]
    async with client.http.put(client.url, data=TEXT.encode(), headers=client.headers) as reply:
        assert reply.status == 400
    assert len(server.asked) == before


async def test_what_was_read_is_what_goes_on(client: Client, server: McpServer) -> None:
    """A decoder may stop where another one goes on: behind the end of what was compressed."""
    body = json.dumps(call("echo", {"path": "/srv"})).encode()
    packed = gzip.compress(body)
    headers = {**client.headers, "Content-Encoding": "gzip", "Mcp-Name": "=?base64?ZWNobw==?="}
    async with client.http.post(client.url, data=packed, headers=headers) as reply:
        assert reply.status == 200
    assert server.asked[-1][3] == body
    assert "content-encoding" not in server.asked[-1][2]


async def test_arguments_and_results_are_redacted(client: Client, server: McpServer, tape: Tape) -> None:
    given = {"mails": "a@b.de", "secret": "c@d.de and more", "big": 12345678901234567890123}
    _, body = await client.say(call("echo", given))
    (got,) = calls(server)
    assert got["params"]["arguments"] == given | {"secret": "[redacted] and more"}
    text = json.loads(body)["result"]["content"][0]["text"]
    assert "@" not in text
    assert "[redacted]" in text
    made = (await tape.spans("r1", 2))[1]
    assert (made.status, attributes(made)) == ("ok", {"rule": "mails", "verdict": "redact"})
    # What went there is on the tape; what came from there, too.
    assert b"c@d.de" not in await tape.raw(made, "request")
    assert b"a@b.de" in await tape.raw(made, "response")


async def test_what_cannot_be_written_again_is_refused_and_what_was_packed_is_not_passed_on_unread(
    client: Client, server: McpServer
) -> None:
    text = json.dumps(call("echo", {"mails": 1, "secret": "a@b.de"}))
    async with client.http.post(
        client.url, data=text.replace('"mails": 1', '"mails": 1e999'), headers=client.headers
    ) as reply:
        assert "a number that is too large" in (await reply.json())["error"]["message"]
    assert calls(server) == []
    plain = json.dumps(call("echo", {"mails": "a@b.de"})).encode()
    headers = client.headers | {"Content-Encoding": "gzip"}
    async with client.http.post(client.url, data=gzip.compress(plain), headers=headers) as reply:
        assert b"[redacted]" in await reply.read()
    assert server.asked[-1][3] == plain


async def test_results_in_streams_are_redacted(client: Client, server: McpServer) -> None:
    _, body = await client.say(call("stream", {"mails": 1}))
    assert b'"text":"[redacted]"' in body
    assert b"done" not in body
    _ = await client.say(call("later", {"mails": 1}, id=7))
    async with client.listen() as stream:
        told = await stream.content.readuntil(b"\n\n")
    assert b"[redacted]" in told


async def test_what_no_person_can_be_shown_is_refused(
    apart: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    """How deep a call can be nested that is read, and cannot be written again, depends on who asks."""
    client = Client(f"{apart.address('r1')}/mcp/tools", http, {})
    await client.open()

    async def said(arguments: str) -> str:
        body = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"fails","arguments":{arguments}}}}}'
        async with client.http.post(client.url, data=body, headers=client.headers) as reply:
            message: str = (await reply.json())["error"]["message"]
            return message.rpartition(": ")[2]

    deep = await asyncio.gather(*(said("[" * depth + "]" * depth) for depth in range(940, 1000)))
    assert set(deep) == {"nobody approved it in time", "it is nested too deep"}
    assert calls(server) == []


async def test_a_result_that_would_come_as_that_of_a_task_is_refused(client: Client, server: McpServer) -> None:
    sent = call("echo", {"mails": 1})
    sent["params"]["task"] = {"ttl": 1}
    _, body = await client.say(sent)
    assert "that of a task" in json.loads(body)["error"]["message"]
    assert calls(server) == []


async def test_hints_count_as_last_listed_and_unknown_ones_restrict(
    client: Client, server: McpServer, tape: Tape
) -> None:
    _, body = await client.say(call("refused"))
    assert json.loads(body)["error"]["data"] == {"reason": "policy", "rule": "unlisted"}
    assert attributes((await tape.spans("r1", 2))[1])["hard"] is True
    server.tools = ["refused"]
    _ = await client.say({"jsonrpc": "2.0", "id": 5, "method": "tools/list"})
    # What a server lists is read after it has passed.
    async with asyncio.timeout(PATIENCE):
        while "tools" not in (await tape.get("/api/mcp/definitions/tools"))["newest"]:
            pass
    _, body = await client.say(call("refused"))
    assert json.loads(body)["error"]["message"] == "Unknown tool: refused"


async def test_the_mode_is_the_rollouts_and_not_what_an_address_says(
    client: Client, gateway: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    async with Control(gateway.url) as control:
        _ = await control.enqueue([RolloutSpec(id="q1", mode="train", input={})])
    agent = Client(f"{gateway.address('q1')}/mcp/tools", http, {})
    await agent.open()
    _, body = await agent.say(call("never"))
    assert json.loads(body)["error"]["data"]["rule"] == "not-in-training"
    _, body = await client.say(call("never"))
    assert b"error" not in body


async def test_a_denied_message_of_http_with_sse_is_a_failed_post(
    gateway: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{gateway.address('r2')}/mcp/old") as stream:
        path = (await stream.content.readuntil(b"\n\n")).decode().split("data: ")[1].strip()
        async with http.post(gateway.url + path, json=DENIED) as reply:
            assert (reply.status, (await reply.json())["error"]["data"]["rule"]) == (400, "no-etc")
    assert calls(server) == []


# -- those that wait for a person ------------------------------------------------------------------------------------


async def asked(gateway: Gateway) -> Question:
    """The call that waits, as soon as one does."""
    async with Control(gateway.url) as control, asyncio.timeout(PATIENCE):
        found: list[Question] = []
        while not found:
            found = await control.waiting()
        return found[0]


async def say(gateway: Gateway, question: str, verdict: Any, reason: str | None = None) -> Question:
    async with Control(gateway.url) as control:
        said = PolicyAnswer(verdict=verdict, who="ann", why=reason or "")
        answered = await control.answer_waiting(question, said)
        (entry,) = [one async for one in control.audit_log(1)]
        assert (entry.who, entry.action, entry.why) == ("ann", f"{verdict}_call", reason or "")
        assert answered.tool in entry.target
        return answered


async def events(tape: Tape, rollout: str = "r1") -> list[Span]:
    """What the tape says of those that waited."""
    spans = await tape.when(rollout, "a1", lambda spans: any(one.name == "policy" for one in spans))
    return [one for one in spans if one.name == "policy"]


@pytest.mark.parametrize("verdict", ["approve", "refuse"])
async def test_a_person_decides(client: Client, server: McpServer, gateway: Gateway, tape: Tape, verdict: str) -> None:
    waiting = asyncio.ensure_future(client.say(call("ask", {"n": 1})))
    question = await asked(gateway)
    assert (question.rule, question.tool, question.server, question.arguments) == (
        "ask-first",
        "ask",
        "tools",
        '{"n":1}',
    )
    assert (question.message, question.rollout, question.attempt) == ("It costs money.", "r1", "a1")
    assert question.until_ns - question.asked_ns == 60 * 10**9
    assert calls(server) == []
    server.answered.put_nowait({"result": {"content": {"text": "ok"}}})
    assert await say(gateway, question.id, verdict, "not today") == question
    _, body = await waiting
    made = next(one for one in await tape.spans("r1", 3) if one.kind == "tool")
    if verdict == "approve":
        assert (len(calls(server)), made.status, b'"result"' in body) == (1, "ok", True)
    else:
        assert (calls(server), made.error) == ([], "policy_violation")
        assert "a person refused it: not today" in body.decode()
    (event,) = await events(tape)
    said = {"rule": "ask-first", "verdict": verdict, "who": "ann", "reason": "not today"}
    assert attributes(made) == said
    assert attributes(event) == said | {"question": question.id}
    assert (event.kind, event.parent_id, event.upstream) == ("event", made.span_id, "tools")
    with pytest.raises(ClientError, match="no call waits under this id, or not any more"):
        _ = await say(gateway, question.id, verdict)


async def test_nobody_answers_in_time(client: Client, server: McpServer, tape: Tape) -> None:
    _, body = await client.say(call("fails"))
    assert "nobody approved it in time" in json.loads(body)["error"]["message"]
    assert calls(server) == []
    (event,) = await events(tape)
    assert attributes(event)["verdict"] == "timeout"


async def test_who_leaves_takes_the_question_back(client: Client, gateway: Gateway, tape: Tape) -> None:
    waiting = asyncio.ensure_future(client.say(call("ask")))
    question = await asked(gateway)
    _ = waiting.cancel()
    (event,) = await events(tape)
    assert attributes(event)["verdict"] == "withdrawn"
    with pytest.raises(ClientError):
        _ = await say(gateway, question.id, "approve")


async def test_a_gateway_that_stops_lets_nobody_wait(
    apart: Gateway, server: McpServer, http: aiohttp.ClientSession
) -> None:
    client = Client(f"{apart.address('r1')}/mcp/tools", http, {})
    await client.open()
    waiting = asyncio.ensure_future(client.say(call("ask")))
    _ = await asked(apart)
    port = apart.port
    _ = await apart.terminate()
    assert b"the gateway stops" in (await waiting)[1]
    await apart.start(port)
    async with Control(apart.url) as control:
        assert await control.waiting() == []
    assert calls(server) == []


async def test_large_calls_wait_for_a_person_too(client: Client, gateway: Gateway, server: McpServer) -> None:
    waiting = asyncio.ensure_future(client.say(call("ask", {"text": "x" * 1_000_000})))
    question = await asked(gateway)
    assert len(question.arguments) > 1_000_000
    _ = await say(gateway, question.id, "refuse")
    assert b"a person refused it" in (await waiting)[1]
    assert calls(server) == []


async def test_rules_of_one_server_are_not_about_another(
    start_gateway: StartGateway, http: aiohttp.ClientSession, server: McpServer
) -> None:
    """And a server without rules is not read at all."""
    async with mcp_server(sessions=False) as free:
        text = config(server) + f'[mcp.servers.free]\nurl = "{free.url}"\n[[policy]]\nname = "none"\nserver = "tools"\n'
        gateway = await start_gateway(text + 'verdict = "deny"\n')
        body = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo","name":"echo"}}'
        for name, reason in (("free", None), ("tools", "policy")):
            async with http.post(f"{gateway.address('r1')}/mcp/{name}", data=body) as reply:
                assert (await reply.json()).get("error", {}).get("data", {}).get("reason") == reason


# What policing leaves behind: releases react to a hard violation when it is on the tape, and not before ---------------


class Around:
    """A recorder, a dispatcher and releases that note what they are told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def flush(self) -> None:
        self.told.append("flushed")

    async def on_violation(self, rollout: str) -> None:
        self.told.append(rollout)

    async def add(self, entries: list[SpanEntry]) -> None:
        self.told.append([entry.name for entry in entries])
        if entries[0].name == "bad":
            raise ValueError("the tape is full")


def audit(around: Around) -> PolicyAudit:
    return PolicyAudit(cast(Any, None), cast(Any, around), cast(Any, around), cast(Any, around), lambda: 7)


async def test_a_hard_violation_is_on_the_tape_first() -> None:
    around = Around()
    made = audit(around)
    made.report_violation("r1")
    # The call that it is about ends in a later turn of the loop.
    waiting = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(waiting.set_result, None)
    await waiting
    around.told.append("recorded")
    await made.finish(60)
    assert around.told == ["recorded", "flushed", "r1"]


async def test_what_cannot_be_noted_is_said(caplog: pytest.LogCaptureFixture) -> None:
    around = Around()
    made = audit(around)
    with caplog.at_level(logging.ERROR):
        for name in ("good", "bad"):
            made.record_event(SpanEntry("r1", "a1", kind="event", name=name))
        await made.finish(60)
        await asyncio.sleep(0)
    assert around.told == [["good"], ["bad"]]
    assert "not be noted: the tape is full" in caplog.text
