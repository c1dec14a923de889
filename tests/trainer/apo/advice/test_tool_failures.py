"""Which tool calls failed, and who is to blame: the one that asked, or the tool."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.model.rollout import Attempt, Outcome, Rollout
from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.model.turn import Message, Part, Transcript, TranscriptCall, Turn
from penstock.trainer.apo.advice.session import blame, complains_of_tools, tool_failures


def inside(call: str) -> ToolUse:
    """A tool that ran inside the agent."""
    return ToolUse(tool="search", grade="certain", reason="", call_id=call, start_ns=0, end_ns=1)


def transcript(*results: Part) -> Transcript:
    turn = Turn(dialect="chat", messages=[Message(role="tool", parts=list(results))])
    span = Span(rollout="r", attempt="a", sequence=1, kind="llm")
    return Transcript(
        rollout=Rollout(id="r"),
        attempt=Attempt(rollout="r", id="a"),
        outcome=Outcome(),
        calls=[TranscriptCall(span=span, turn=turn)],
    )


def result(text: str, data: Any = None) -> Part:
    return Part(type="tool_call_response", id="c", text=text, data=data)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        (result("sunny, 21 degrees"), (1, 0, 0)),
        (result("Errors in orders are rare."), (1, 0, 1)),
        (result("Error: missing required argument 'city'"), (1, 1, 0)),
        (result('{"error": "unknown field town"}'), (1, 1, 0)),
        (result("bad input: expected an integer", {"is_error": True}), (1, 1, 0)),
        (result("Error: request timed out"), (1, 0, 1)),
        (result("Traceback (most recent call last): ..."), (1, 0, 1)),
    ],
)
def test_a_tool_inside_the_agent_is_judged_by_its_result(part: Part, found: tuple[int, int, int]) -> None:
    assert tool_failures([inside("c")], transcript(part)) == found


def test_a_tool_behind_the_gateway_says_itself_that_it_failed() -> None:
    use = inside("c").model_copy(update={"status": SpanStatus.ERROR, "error": "-32602 invalid params", "span": 3})
    assert tool_failures([use], None) == (1, 1, 0)
    assert tool_failures([use.model_copy(update={"error": "timeout"})], None) == (1, 0, 1)
    assert tool_failures([], None) == (0, 0, 0)


def test_a_timeout_is_nobody_s_wrong_argument() -> None:
    assert blame("connection refused: invalid response") == "broken"
    assert blame("something else") == "broken"
    assert blame("no such tool") == "misused"


def test_graders_complain_of_tools_in_words() -> None:
    assert complains_of_tools("it used the wrong tool")
    assert not complains_of_tools("the toolbox is missing")
    assert not complains_of_tools("")
