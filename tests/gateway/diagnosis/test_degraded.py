"""What agents lose behind a base URL, told from calls of real ones. `agents.json` has what Claude Code 2.1.330 and
2.1.197 (with 36 tools of a server) and Codex 0.169.0 sent in sessions of three calls; its long texts are cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes.memory_tape import call, exchange

from penstock.gateway.diagnosis.degraded import Degraded
from penstock.gateway.model.attributes import WEBSOCKET
from penstock.gateway.model.exchange import Exchange
from penstock.gateway.model.span import Span

AGENTS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("agents.json").read_text())
CODEX = "Codex 0.169.0, POST"


def reasons(calls: list[tuple[Span, Exchange]]) -> dict[str, str]:
    made = Degraded()
    for span, sent in calls:
        made.add(span, sent)
    return dict(made.reasons())


def calls(who: str, **about: Any) -> list[tuple[Span, Exchange]]:
    dialect = "responses" if who == CODEX else "messages"
    made: list[tuple[Span, Exchange]] = []
    for number, one in enumerate(AGENTS[who], 1):
        sent = exchange(json.dumps(one["body"]).encode(), b"{}")
        headers = [(name, value) for name, value in one["headers"]]
        made.append((call(number, dialect=dialect, **about), sent.model_copy(update={"request_headers": headers})))
    return made


def said(who: str, **about: Any) -> dict[str, str]:
    return reasons(calls(who, **about))


def sent_by(agent: str, *more: tuple[str, str]) -> list[tuple[Span, Exchange]]:
    """Codex's calls, by another agent."""
    headers = [("user-agent", agent), *more]
    return [(span, one.model_copy(update={"request_headers": headers})) for span, one in calls(CODEX)]


def test_nothing_is_said_of_an_agent_that_lacks_nothing() -> None:
    """It calls its maker's host, has its WebSocket, or never had one."""
    own = [who for who in AGENTS if who.endswith("own host")]
    assert [said(who) for who in own] == [{}] * len(own)
    assert own
    assert said(CODEX, attributes={WEBSOCKET: True}) == {}
    assert reasons(sent_by("codex_cli_rs/0.98.0 (Debian)")) == {}


def test_the_newest_claude_code_behind_a_base_url() -> None:
    assert said("Claude Code 2.1.330, base URL") == {
        "base_url": "Claude Code 2.1.330 runs degraded behind a base URL: no part of its system prompt is cached "
        "beyond its own account (scope global), its 8 beta flags lack prompt-caching-scope"
    }


def test_an_older_claude_code_behind_a_base_url_brings_all_tools_along() -> None:
    found = said("Claude Code 2.1.197, base URL")
    assert list(found) == ["base_url", "inlined_tools"]
    assert found["base_url"].endswith("its 8 beta flags lack advanced-tool-use")
    assert found["inlined_tools"].startswith("2 calls brought the schemas of all its tools along, 61 at most, ")


def test_a_sub_agent_with_few_tools_brings_none_along_that_are_searched_for() -> None:
    whole = calls("Claude Code 2.1.330, base URL")
    span, sent = whole[1]
    body = json.loads(sent.request_body)
    body["tools"] = body["tools"][:2]
    whole[1] = (span, sent.model_copy(update={"request_body": json.dumps(body).encode()}))
    assert list(reasons(whole)) == ["base_url"]


def test_a_claude_code_that_lacks_nothing_that_is_known_is_not_degraded() -> None:
    whole = calls("Claude Code 2.1.330, base URL")
    for at, (span, sent) in enumerate(whole):
        body = json.loads(sent.request_body)
        body["system"][-1]["cache_control"] = {"type": "ephemeral", "scope": "global"}
        headers = [("user-agent", "claude-cli/3.0.0"), ("anthropic-beta", "prompt-caching-scope-x,advanced-tool-use-x")]
        made = {"request_body": json.dumps(body).encode(), "request_headers": headers}
        whole[at] = (span, sent.model_copy(update=made))
    assert reasons(whole) == {}
    agent = {"request_headers": [("user-agent", "claude-cli/3.0.0")]}
    bare = [(span, one.model_copy(update=agent)) for span, one in whole]
    assert "its 0 beta flags lack prompt-caching-scope and advanced-tool-use" in reasons(bare)["base_url"]


def test_codex_without_its_websocket_sends_everything_again() -> None:
    found = said(CODEX)
    assert list(found) == ["no_websocket"]
    bodies = [json.loads(body.request_body) for _, body in calls(CODEX)]
    sizes = [[len(json.dumps(item)) for item in body["input"]] for body in bodies]
    repeated = sum(sizes[0]) + sum(sizes[1])
    assert f"{repeated / 1000:,.0f} KB of the " in found["no_websocket"]
    assert "in 3 calls were sent before: Codex 0.169 has lost its WebSocket" in found["no_websocket"]


@pytest.mark.parametrize("agent", ["codex-tui/0.170.1 (x)", "Codex Desktop/0.169.0", "codex_cli_rs/1.0.0"])
def test_threads_of_codex_are_told_apart(agent: str) -> None:
    both = zip(*(sent_by(agent, ("thread-id", name)) for name in ("one", "two")), strict=True)
    threads = [one for pair in both for one in pair]
    once, twice = said(CODEX)["no_websocket"], reasons(threads)["no_websocket"]
    assert 2 * int(once.split()[0]) - 1 <= int(twice.split()[0]) <= 2 * int(once.split()[0]) + 1


@pytest.mark.parametrize("body", [b"", b"[]", b'{"system":[1],"tools":[2]}', b'{"system":"x","tools":{}}', b"\xff"])
@pytest.mark.parametrize("agent", ["claude-cli/2.1.330", "codex_exec/0.169.0", "codex/x", ""])
def test_odd_bodies_say_nothing(body: bytes, agent: str) -> None:
    one = exchange(body, b"").model_copy(update={"request_headers": [("User-Agent", agent)]})
    assert reasons([(call(1, dialect="responses"), one)]) == {}
