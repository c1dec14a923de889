"""What commands print of a tape whose every text was written by somebody hostile."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest
from fakes.local import locally
from fakes.odd import odd, request, send
from fakes.process import upstreams
from fakes.raw import reply
from fakes.rig import CHAT
from fakes.shell import Shell
from fakes.tape import Tape
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.foreign_text import terminal_safe, terminal_safe_json

EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202eevil\u2066\u200f\x7f"
CALLED = {"id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": EVIL}}
SAID = {"role": "assistant", "content": EVIL, "tool_calls": [CALLED]}
ANSWER = json.dumps({"id": EVIL, "model": EVIL, "choices": [{"index": 0, "finish_reason": EVIL, "message": SAID}]})
ERROR = json.dumps({"error": {"message": EVIL, "code": EVIL, "type": EVIL}})
TOOLS = [{"type": "function", "function": {"name": EVIL, "description": EVIL, "parameters": {EVIL: EVIL}}}]
ASKED = [{"role": "system", "content": EVIL}, {"role": "user", "content": EVIL}]
TURNS = (ASKED, [*ASKED, SAID, {"role": "tool", "tool_call_id": EVIL, "content": EVIL}], ASKED)
COMMANDS = (
    "rollouts", "spans r1", "show r1", "tools r1", "stats", "queue", "audit", "doctor r1", "resource list",
    "resource show travel", "prompts discover", "search evil", "sql|select * from spans", "sql|select * from messages",
    "sql|select * from rewards", f"show|{EVIL}", f"search|{EVIL}", f"sql|select '{EVIL}' as \"{EVIL}\"", f"sql|{EVIL}",
)  # fmt: skip
AS_JSON = ("rollouts --json", "spans r1 --json", "show r1 --json", "audit --json", "sql|select * from spans|--json")


def obeyed(text: str) -> set[str]:
    """What a terminal obeys."""
    return {one for one in text if one not in "\n\t" and terminal_safe(one) != one}


@pytest.mark.slow
@pytest.mark.timeout(600)  # two dozen commands
async def test_nothing_on_the_tape_speaks_to_the_terminal(
    http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [(200, ANSWER), (200, ANSWER), (400, ERROR)]
    async with (
        odd([step for one in said for step in (request(), send(reply(one[0], one[1].encode())))]) as upstream,
        locally(tmp_path, '[index]\nwhen = "always"\n' + upstreams(openai=f"{upstream.url}/v1")) as gateway,
    ):
        agent = "/rollout/r1/attempt/a1"
        sent = [
            ("/api/rollouts", {"rollouts": [{"id": "r1", "input": {EVIL: EVIL}, "metadata": {"k": EVIL}}]}),
            *((agent + CHAT, {"model": EVIL, "messages": messages, "tools": TOOLS}) for messages in TURNS),
            (f"{agent}/rewards", {"value": 1.0, "reason": EVIL}),
            (f"{agent}/events", {"events": [{"name": EVIL, "attributes": {EVIL: EVIL, "text": EVIL}}]}),
            ("/api/queue", {"state": "paused", "who": EVIL, "why": EVIL}),
            ("/api/resources/travel", {"kind": "prompt", "content": {"text": EVIL}, "note": EVIL, "author": EVIL}),
        ]
        for path, body in sent:
            async with http.post(gateway.url + path, json=body) as answer:
                assert answer.status == (400 if body is sent[3][1] else 200), (path, await answer.text())
        await Tape(gateway.url, http).spans("r1", 5)
        shell, told = Shell(gateway.url, tmp_path), ""
        for command in (*COMMANDS, *AS_JSON):
            done = await shell.run(*command.split("|" if "|" in command else " "))
            assert obeyed(done.text + done.err) == set(), command
            assert done.code == 0 or EVIL in command, (command, done.err)
            told += done.text
            assert command not in AS_JSON or "\\u202e" in done.text, command
    assert "evil" in told


@given(st.text() | st.lists(st.characters(max_codepoint=0xFF)).map("".join))
def test_json_says_the_same_without_them(text: str) -> None:
    shown = terminal_safe_json(json.dumps({text: text}, ensure_ascii=False))
    assert json.loads(shown) == {text: text}
    assert obeyed(shown) == set()
