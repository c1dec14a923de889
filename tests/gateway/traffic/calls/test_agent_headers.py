"""The headers in which Claude Code and Codex say which of their agents makes a call, and what for."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Any

import pytest
from fakes.odd import request, send
from fakes.raw import reply
from fakes.rig import CHAT, GOOD, Within
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.model.base import ID_PATTERN
from penstock.gateway.model.facts import (
    AGENT_ID,
    CALL_CLASS,
    COMPACTED,
    COMPACTION,
    PARENT_AGENT,
    PROMPT_ID,
    TOOL_DURATIONS,
)
from penstock.gateway.traffic.calls.call_request import NOTED, agent_facts, agent_kind
from penstock.gateway.wire.http.request import FoundHead, HttpRequest, KnownHeads

CLAUDE = {
    "x-claude-code-agent-id": "a5b368de", "x-claude-code-parent-agent-id": "a1", "x-claude-code-agent-type": "Explore",
    "x-claude-code-request-class": "subagent", "x-claude-code-prompt-id": "b6e409be-fbc2",
    "x-claude-code-prev-tool-durations": "Bash=271;mcp__a%3Bb=0",
}  # fmt: skip
COMPACTS = {"x-claude-code-request-class": "compaction", "x-claude-code-compaction": "auto"}
TURN = '{"thread_id":"t2","request_kind":"compaction","root_turn_id":"u1","compaction":{"trigger":"manual"}}'
ODD = (
    b'{"request_kind":"\\ud800"}',
    b'{"compaction":{"trigger":"sk-ant-api03-\\ud800xxxxxxxxxxxxxxxxxxxxxx"}}',
    b"[" * 9_000,
    b"%",
)
CODEX = {"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t1", "thread-id": "t2"}


@pytest.mark.parametrize(
    ("headers", "kind", "facts"),
    [
        (
            CLAUDE,
            "Explore",
            {
                AGENT_ID: "a5b368de", PARENT_AGENT: "a1", CALL_CLASS: "subagent", PROMPT_ID: "b6e409be-fbc2",
                TOOL_DURATIONS: ["Bash=271", "mcp__a;b=0"],
            },
        ),
        (
            {"x-claude-code-prev-tool-durations": f"a%0A%1B[m=1;b=x;=2;{'sk-ant-' + 'Ab1' * 9}=3; c =4"},
            None,
            {TOOL_DURATIONS: ["a--[m=1", f"{sha256(('sk-ant-' + 'Ab1' * 9).encode()).hexdigest()[:32]}=3", "c =4"]},
        ),
        ({"x-claude-code-agent-id": "a1"}, "subagent", {AGENT_ID: "a1"}),
        ({"x-claude-code-agent-type": "my own!"}, "my-own-", {}),
        ({"x-claude-code-agent-type": "."}, "subagent", {}),
        ({"x-openai-subagent": ".."}, "subagent", {}),
        (COMPACTS, None, {CALL_CLASS: "compaction", COMPACTION: "auto"}),
        ({"x-claude-code-context-compacted": "auto"}, None, {COMPACTED: "auto"}),
        (CODEX, "collab_spawn", {AGENT_ID: "t2", PARENT_AGENT: "t1"}),
        ({"thread-id": "t1"}, None, {}),
        ({"x-codex-turn-metadata": TURN}, None, {CALL_CLASS: "compaction", PROMPT_ID: "u1", COMPACTION: "manual"}),
        ({"x-codex-turn-metadata": '["?"]'}, None, {}),
        ({"x-codex-turn-metadata": '{"request_kind":{},"compaction":1}'}, None, {}),
    ],
)  # fmt: skip
def test_what_headers_say(headers: dict[str, str], kind: str | None, facts: dict[str, Any]) -> None:
    given = {name.encode(): value.encode() for name, value in headers.items()}
    assert (agent_kind(given), agent_facts(given)) == (kind, facts)


def test_a_key_in_a_header_is_not_shown() -> None:
    key = b"sk-ant-api03-" + b"x" * 40
    told = f"{agent_kind({b'x-claude-code-agent-type': key})} {agent_facts({b'x-claude-code-agent-id': key})}"
    assert "sk-ant" not in told


@given(st.dictionaries(st.sampled_from(sorted(NOTED)), st.binary() | st.sampled_from(ODD)))
def test_headers_may_hold_anything(headers: dict[bytes, bytes]) -> None:
    """The recorder reads them: nothing in them may keep a call from the tape."""
    assert isinstance(agent_facts(headers), dict)
    assert agent_kind(headers) is None or re.fullmatch(ID_PATTERN, agent_kind(headers) or "")


async def test_a_span_has_its_sub_agent(within: Within, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind stands in for the agent's name, unless the address gives one. Times of tools make no new known heads."""
    added, add = list[HttpRequest](), KnownHeads.add

    def adding(heads: KnownHeads, found: FoundHead, asked: HttpRequest) -> None:
        added.append(asked)
        add(heads, found, asked)

    monkeypatch.setattr(KnownHeads, "add", adding)
    timed = [{**CLAUDE, "x-claude-code-prev-tool-durations": f"Bash={ms}"} for ms in (1, 20)]
    async with within() as rig, rig.upstream([request(), send(GOOD)] * 4), rig.client() as client:
        for below, headers in ((CHAT, timed[0]), (CHAT, timed[1]), (f"/agent/planner{CHAT}", CLAUDE), (CHAT, {})):
            client.send(rig.call(headers=[*headers.items()], below=below))
            assert await client.message() == GOOD
        assert len(added) == 3
        spans = await rig.tape.spans(rig.rollout, 4)
        rows = (await rig.tape.get("/api/spans?filter=agent:Explore%20class:subagent%20agent_id:a5b368de"))["spans"]
    assert [span.agent for span in spans] == ["Explore", "Explore", "planner", None]
    assert [(span.attributes or {}).get(TOOL_DURATIONS) for span in spans] == [
        ["Bash=1"], ["Bash=20"], ["Bash=271", "mcp__a;b=0"], None,
    ]  # fmt: skip
    assert sorted(row["sequence"] for row in rows) == [1, 2]


async def test_a_try_that_claude_code_does_not_count_repeats_the_call_that_failed(within: Within) -> None:
    count = ("x-stainless-retry-count", "0")
    claude = [count, ("x-claude-code-session-id", "s1")]
    answers = [reply(500, b"{}"), GOOD, GOOD, reply(500, b"{}"), GOOD]
    script = [step for answer in answers for step in (request(), send(answer))]
    async with within() as rig, rig.upstream(script), rig.client() as client:
        for headers in (claude, claude, claude, [count], [count]):
            client.send(rig.call(b'{"model":"m","n":%d}' % len(headers), headers))
            _ = await client.message()
        spans = await rig.tape.spans(rig.rollout, 5)
    assert [span.retry_of for span in spans] == [None, 1, None, None, None]
