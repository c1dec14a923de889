"""Counts the failed tool calls of a rollout, and attributes each to the agent or to the tool. Pure.

A call was *misused* when its result complains about the request: an argument that is missing or of the wrong type, a
tool that does not exist. A better description of the tool may fix that. It *broke* when the tool failed by itself, such
as by a timeout, which no text fixes; errors that fit neither count as this. A tool that was run behind the gateway
reports its failure. Of a tool inside the agent only the result is known, so a result counts as a failure when it begins
like one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from penstock.gateway.model.span import SpanStatus
from penstock.gateway.model.tools import ToolUse
from penstock.gateway.model.transcript import Transcript
from penstock.gateway.model.turn import Part
from penstock.gateway.wire.dialects.loose_json import loads, obj

SHOWN: Final = 400
"""Characters of a result that are checked: an error begins with its kind."""
_FAILED: Final = re.compile(
    r"^\W*(tool |the tool |internal )?(error|exception|traceback|failed|failure|invalid|unknown|cannot|validation)",
    re.IGNORECASE,
)
_BROKE: Final = re.compile(
    r"time[d ]?-?out|timeout|unavailable|connection|refused|unreachable|overloaded|rate.?limit|too many requests|"
    r"\b(429|500|502|503|504)\b|permission|unauthori[sz]ed|forbidden",
    re.IGNORECASE,
)
_MISUSED: Final = re.compile(
    r"argument|parameter|\bfield|required|missing|invalid|unexpected|unknown|unrecogni[sz]ed|no such|not found|"
    r"does not exist|must be|should be|schema|malformed|expected|validation|not a valid|-3260[12]|http_4",
    re.IGNORECASE,
)
Blame = Literal["misused", "broken"]


class ToolFailures(NamedTuple):
    """Counts of a rollout's tool calls."""

    tools: int
    """All tool calls."""
    misused: int
    """Calls that failed because the agent's request was wrong."""
    broken: int
    """Calls that failed by themselves."""


def tool_failures(uses: Sequence[ToolUse], transcript: Transcript | None) -> ToolFailures:
    """Count the tool calls of an attempt; `transcript` has the results that the model was shown."""
    results = {} if transcript is None else _results(transcript)
    blames = [_blame(use, results.get(use.call_id or "")) for use in uses]
    return ToolFailures(len(blames), blames.count("misused"), blames.count("broken"))


def _results(transcript: Transcript) -> Mapping[str, Part]:
    """Return the results of tools, by the id of their call."""
    turns = (call.turn for call in transcript.calls if call.turn is not None)
    parts = (part for turn in turns for message in turn.messages for part in message.parts)
    return {part.id: part for part in parts if part.type == "tool_call_response" and part.id}


def _blame(use: ToolUse, result: Part | None) -> Blame | None:
    """Return the cause of a call's failure; None if it has not failed."""
    said = "" if result is None else (result.text or "")[:SHOWN]
    if use.status == SpanStatus.OK and not _says_failed(said, result):
        return None
    return blame(f"{use.error or ''} {said}")


def _says_failed(said: str, result: Part | None) -> bool:
    if result is None:
        return False
    told = obj(result.data) | obj(loads(said))
    return bool(told.get("is_error") or told.get("isError") or told.get("error") or _FAILED.match(said))


def blame(said: str) -> Blame:
    """Return the cause of a failure, by the words of its error."""
    return "misused" if _MISUSED.search(said) and not _BROKE.search(said) else "broken"


def complains_of_tools(reasons: Iterable[str]) -> bool:
    """True if a grader's reason is about the choice or the use of a tool."""
    return any(re.search(r"\btools?\b", reason, re.IGNORECASE) for reason in reasons)
