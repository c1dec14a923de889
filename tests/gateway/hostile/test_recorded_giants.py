"""What was recorded is odd or very large in one place: every reader gets past it, says what it leaves out, and a
terminal gets none of what would control it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from fakes.indexed import until_indexed
from fakes.mistakes import tells
from fakes.odd import odd, request, send
from fakes.process import running, upstreams
from fakes.raw import connect, post, reply
from fakes.shell import Shell
from fakes.tape import Tape
from rich.console import Console

from penstock.console.mcp_server.tool import ToolContext
from penstock.console.mcp_server.transcripts import ReadCallArguments, read_call
from penstock.console.views import rollout_tree
from penstock.console.views.table import LONG, abbreviate, clean
from penstock.gateway.client.connection import LARGE as LARGE_CALL
from penstock.gateway.client.connection import PARALLEL, concurrency_for
from penstock.gateway.model.answers import SpanDetail
from penstock.gateway.model.span import Span
from penstock.gateway.model.turn import Choice, Message, Part, Turn
from penstock.gateway.wire.dialects import by_name, loose_json
from penstock.tui.screens.compare import STEPS

CHAT = "/v1/chat/completions"
MANY = 20_000
LARGE = "large " * (loose_json.MOST_OBJECTS // 4)
"""A message of more bytes than those in which nobody counts objects."""
CONTROLS = [chr(n) for n in (*range(32), *range(0x7F, 0xA0)) if n not in (9, 10)]
BIDI = [chr(n) for n in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]
"""All characters that Unicode calls controls of direction."""
EVIL = "seen\x1b]0;owned\x07\x1b[2J" + "".join(CONTROLS + BIDI)
READ = (
    ("show", "r1"), ("show", "r1/a1#2"), ("tools", "r1"), ("search", "seen"), ("search", "large"),
    ("spans", "r2"), ("tui", "--plain", "rollout", "r1"), ("tui", "--plain", "compare", "rollouts", "r1", "r2"),
    ("tui", "--plain", "compare", "rollouts", "r2", "r3"), ("sql", "select model, error from spans"),
)  # fmt: skip


def asked(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **more}, ensure_ascii=False).encode()


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answered(text: str) -> bytes:
    calls = [{"id": f"c{text}", "type": "function", "function": {"name": f"f{text}", "arguments": json.dumps(text)}}]
    said = {"role": "assistant", "content": text, "tool_calls": calls}
    choice = {"index": 0, "message": said, "finish_reason": f"stop{text}"}
    return json.dumps({"model": f"m{text}", "choices": [choice]}, ensure_ascii=False).encode()


@pytest.mark.slow
async def test_every_reader_gets_past_it(tmp_path: Path, http: aiohttp.ClientSession) -> None:
    """Also what stands behind it on the tape is found, and no command prints what a terminal obeys."""
    failed = json.dumps({"error": {"message": EVIL, "type": EVIL, "code": EVIL}}, ensure_ascii=False).encode()
    calls = [
        ("r1", asked(user(LARGE)), reply(200, answered("ok"))),
        ("r1", asked(user(EVIL) | {"role": f"u{EVIL}"}, user=EVIL), reply(200, answered(EVIL))),
        ("r2", json.dumps({"model": EVIL, "messages": [user(EVIL)]}, ensure_ascii=False).encode(), reply(500, failed)),
        ("r3", asked(*(user(f"number {n}") for n in range(STEPS + 7))), reply(200, answered("ok"))),
        ("r2", b'{"model":"m","messages":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001, reply(200, answered("ok"))),
    ]
    script = [step for _, _, answer in calls for step in (request(), send(answer))]
    async with odd(script) as upstream:
        settings = upstreams(openai=upstream.url + "/v1") + '[index]\nwhen = "always"\n'
        async with running(tmp_path, settings) as gateway:
            async with connect(gateway.url) as client:
                for rollout, body, answer in calls:
                    client.send(post(f"/rollout/{rollout}/attempt/a1{CHAT}", body))
                    assert (await client.message()).startswith(answer[:12])
            await until_indexed(gateway, Tape(gateway.url, http), len(calls))
            shell = Shell(gateway.url, tmp_path)
            said = [await shell.run(*command) for command in READ]
    for command, done in zip(READ, said, strict=True):
        assert done.code == 0, (command, done.err)
        assert not [one for one in (*CONTROLS, *BIDI) if one in done.text + done.err], command
    assert f"8 steps after the first {STEPS:,} are not compared" in " ".join(said[8].text.split())


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_a_large_message_is_found(dialect: str) -> None:
    field = "input" if dialect == "responses" else "messages"
    body = json.dumps({"model": "m", field: [user(LARGE)]}).encode()
    (passage,) = by_name(dialect).passages(body, b"", False, lambda: True)
    assert passage.text == LARGE


def test_large_calls_are_asked_for_one_at_a_time() -> None:
    assert concurrency_for([]) == concurrency_for([10, LARGE_CALL]) == PARALLEL
    assert concurrency_for([10, LARGE_CALL + 1]) == 1


def drawn(turn: Turn, whole: bool) -> str:
    """A call as `penstock show` prints it."""
    console = Console(width=1000, color_system=None)
    with console.capture() as captured:
        span = Span.model_construct(kind="llm", status="ok", sequence=1)
        if whole:
            console.print(rollout_tree.call_tree(SpanDetail.model_construct(span=span, turn=turn)))
        else:
            console.print(rollout_tree.added_messages(span, turn, []))
    return captured.get()


async def test_no_control_reaches_a_coding_agent() -> None:
    """By the tools that read transcripts, whatever a message says of who speaks."""
    said = [Message(role=EVIL, parts=[text_of(EVIL)])]
    turn = Turn(dialect="chat", messages=said, choices=[Choice(index=0, message=said[0], finish=EVIL)])
    span = Span.model_construct(kind="llm", status="ok", sequence=1, attempt="a1", rollout="r1", model=EVIL)
    client = OneCall(SpanDetail.model_construct(span=span, turn=turn, exchange=None))
    told = await read_call(
        ToolContext(cast("Any", client), "a test"), ReadCallArguments(rollout="r1", attempt="a1", sequence=1)
    )
    assert "seen" in told.text
    assert not [one for one in (*CONTROLS, *BIDI) if one in told.text]


class OneCall:
    """What a client of a gateway with one call answers."""

    def __init__(self, detail: SpanDetail) -> None:
        self._detail = detail

    async def span(self, rollout: str, attempt: str, sequence: int) -> SpanDetail:
        return self._detail


def text_of(text: str) -> Part:
    return Part(type="text", text=text)


def test_of_many_messages_the_first_and_the_last_are_shown() -> None:
    messages = [Message(role="user", parts=[text_of(f"number {n};")]) for n in range(MANY)]
    turn = Turn(dialect="chat", messages=messages)
    lines = drawn(turn, False)
    left = MANY - rollout_tree.MOST
    assert "number 0;" in lines
    assert f"number {MANY - 1};" in lines
    assert tells(lines, f"… {left:,} messages are not shown", "`penstock show`", "--json", "--raw")
    assert lines.count("number ") == rollout_tree.MOST


def test_of_many_parts_and_tools_some_are_shown() -> None:
    parts = [text_of(f"number {n};") for n in range(MANY)]
    lines = drawn(Turn(dialect="chat", messages=[Message(role="user", parts=parts)]), False)
    assert f"… {MANY - rollout_tree.MOST:,} parts are not shown" in lines


def test_of_a_giant_text_as_much_is_shown_as_a_model_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_tree, "LONGEST", 10_000)
    text = "x" * (rollout_tree.LONGEST + 1234)
    lines = drawn(Turn(dialect="chat", messages=[Message(role="user", parts=[text_of(text)])]), False)
    assert "… 1,234 characters are not shown" in lines
    assert lines.count("x") <= rollout_tree.LONGEST


def test_to_abbreviate_a_giant_text_costs_little() -> None:
    text = "a b\n" * LONG
    assert abbreviate(text, 10) == f"a b a b a … {len(text) - 10:,} characters more"


def test_not_every_odd_entry_is_a_problem_of_its_own() -> None:
    body = b'{"model":"m","messages":[' + b"1," * MANY + b"1]}"
    turn = by_name("chat").read(body, b"x", False)
    told = [problem for problem in turn.problems if problem.startswith("request: ")]
    assert len(told) == loose_json.MOST_PROBLEMS + 1
    assert told[-1] == f"request: {MANY + 1 - loose_json.MOST_PROBLEMS:,} more of messages are no objects"


def test_not_every_odd_event_is_a_problem_of_its_own() -> None:
    turn = by_name("chat").read(b'{"model":"m","messages":[]}', b"data: x\n\n" * MANY, True)
    told = [problem for problem in turn.problems if problem.startswith("response: ")]
    assert f"response: {MANY - loose_json.MOST_PROBLEMS:,} more events are no readable JSON objects" in told
    assert len(told) <= loose_json.MOST_PROBLEMS + 2


@pytest.mark.parametrize("one", [*CONTROLS, *BIDI], ids=lambda one: f"U+{ord(one):04X}")
def test_no_control_reaches_a_terminal(one: str) -> None:
    assert one not in clean(f"a{one}b")
