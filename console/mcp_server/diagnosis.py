"""The tool that tells whether a rollout can be trained on, and why not."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.console.mcp_server.tool import ToolAnswer, ToolArguments, ToolContext, ToolDefinition, ToolResult
from penstock.gateway.model.answers import Diagnosis, Finding
from penstock.gateway.model.base import Id

PLACES = 10
"""Most places that are named for one kind of finding."""


class DiagnoseArguments(ToolArguments):
    rollout: Id
    """The rollout."""
    model: str | None = None
    """The model that would be trained; the one that most of its calls asked for if not given."""


class FindingGroup(ToolAnswer):
    """A kind of finding, once, with the places where it was found."""

    code: str
    blocks: bool
    """Whether it keeps what it concerns out of training; else it is only worth knowing."""
    reason: str
    """Of the first."""
    fix: str
    """What repairs it, or avoids it the next time."""
    places: list[str]
    """Where: `rollout`, ATTEMPT or ATTEMPT#SEQUENCE; some of them when there are many."""
    count: int
    """How many there are."""


class DiagnosisAnswer(ToolAnswer):
    """The diagnosis of a rollout: whether it can be trained on, and the findings that prevent it."""

    rollout: str
    status: str
    model: str | None
    reward: float | None
    trainable: bool
    verdict: str
    trainable_calls: int
    calls: int
    findings: list[FindingGroup]
    """What blocks first; one for each kind."""


async def diagnose(context: ToolContext, asked: DiagnoseArguments) -> ToolResult:
    """Read the diagnosis of a rollout from the gateway, its findings grouped by kind."""
    found = await context.client.diagnosis(asked.rollout, asked.model)
    calls = [call for attempt in found.attempts for call in attempt.calls]
    answer = DiagnosisAnswer(
        rollout=found.rollout,
        status=found.status,
        model=found.model,
        reward=found.reward,
        trainable=found.trainable,
        verdict=found.verdict,
        trainable_calls=sum(call.trainable for call in calls),
        calls=len(calls) + found.skipped,
        findings=_gathered(found),
    )
    return ToolResult(answer, "\n".join(_text(answer)))


def _gathered(found: Diagnosis) -> list[FindingGroup]:
    """Each kind of finding once, blocking ones first."""
    kinds = dict[str, FindingGroup]()
    for place, finding in _places(found):
        told = kinds.get(finding.code)
        if told is None:
            told = FindingGroup(**finding.model_dump(), places=[], count=0)
            kinds[finding.code] = told
        told.count += 1
        if len(told.places) < PLACES:
            told.places.append(place)
    return sorted(kinds.values(), key=lambda told: not told.blocks)


def _places(found: Diagnosis) -> Iterator[tuple[str, Finding]]:
    yield from (("rollout", finding) for finding in found.findings)
    for attempt in found.attempts:
        yield from ((attempt.attempt, finding) for finding in attempt.findings)
        for call in attempt.calls:
            yield from ((f"{attempt.attempt}#{call.sequence}", finding) for finding in call.findings)


def _text(told: DiagnosisAnswer) -> Iterator[str]:
    reward = "no reward" if told.reward is None else f"reward {told.reward:.6g}"
    yield f"{told.rollout}  {told.status}  {reward}  {told.trainable_calls:,} of {told.calls:,} calls can be trained on"
    yield told.verdict
    for one in told.findings:
        more = f" and {one.count - len(one.places):,} more" if one.count > len(one.places) else ""
        yield f"- {one.code}{' (blocks)' if one.blocks else ''} at {', '.join(one.places)}{more}: {one.reason}"
        if one.fix:
            yield f"  way out: {one.fix}"


TOOLS = (
    ToolDefinition(
        "diagnose_rollout",
        "Diagnose a rollout",
        "Say whether a rollout can be trained on and, if not, why: no reward, errors, truncation, missing token ids, "
        "mixed versions and so on, each with its way out. One entry for each kind of finding, with at most "
        f"{PLACES} places. For what went wrong in the task itself use read_transcript.",
        DiagnoseArguments,
        DiagnosisAnswer,
        diagnose,
    ),
)
