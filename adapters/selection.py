"""Chooses the attempts and calls to train on, before tokens are read, and reports all others.

The reasons are those of `penstock doctor`, from the same rules (`gateway.reading.diagnosis.findings`), except those
about tokens; and those of the selection itself: another agent, another attempt, the retries of a client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from penstock.adapters.attempt_rewards import AttemptRewards, collect_rewards
from penstock.adapters.episode import Episode, EpisodeAttempt, EpisodeCall
from penstock.adapters.options import AttemptChoice, Options
from penstock.adapters.report import Reason, SampleReport
from penstock.gateway.model.answers import Finding
from penstock.gateway.model.rollout import AttemptStatus, deciding_attempt
from penstock.gateway.reading.diagnosis.findings import RETRIED, of_attempt, of_head, of_unread, recovered_refusals
from penstock.gateway.reading.diagnosis.rows import superseded
from penstock.gateway.wire.dialects import by_name

REWARDS = ("no_reward", "untrusted_reward")


def select_attempts(episode: Episode, which: AttemptChoice, report: SampleReport) -> list[EpisodeAttempt]:
    """The attempts that count; the calls of the others are reported."""
    good = [one for one in episode.attempts if one.attempt.status == AttemptStatus.SUCCEEDED][-1:]
    newest, counts = list(episode.attempts[-1:]), deciding_attempt([one.attempt for one in episode.attempts])
    found = {
        "final": [one for one in episode.attempts if one.attempt is counts],
        "succeeded": good,
        "last": newest,
        "all": list(episode.attempts),
    }[which]
    for one in episode.attempts:
        if not any(one is other for other in found):
            _drop(report, one.calls, "other_attempt", f"the attempt that counts is another one ({which})")
    return found


def select_calls(
    episode: Episode,
    one: EpisodeAttempt,
    options: Options,
    readable: Callable[[EpisodeCall], bool],
    report: SampleReport,
) -> tuple[AttemptRewards, list[EpisodeCall]]:
    """The rewards of an attempt, and its calls that may be trained on, by sequence; of a client's retries only one is
    taken. `readable`: True if the answer of a call with bytes can be read.
    """
    judged = collect_rewards(one, options.weights)
    report.notes += judged.notes
    blocked = next((it for it in _about(episode, one, judged) if it[0] not in options.allow), None)
    if blocked is not None:
        _drop(report, one.calls, *blocked)
        return judged, []
    model, found = options.model or main_model(episode), list[EpisodeCall]()
    refused = recovered_refusals([call.span for call in one.calls])
    for call in one.calls:
        blocks = of_head(episode.rollout, one.attempt, call.span, model, refused)
        trouble = next((it for it in _of(call, blocks, options.agent) if it[0] not in options.allow), None)
        if trouble is None and (call.bodies is None or not readable(call)):
            trouble = "unreadable", f"its {'answer cannot be read' if call.bodies else 'bytes are not on the tape'}"
        if trouble is None:
            found.append(call)
        else:
            report.drop(call.span, None, *trouble)
    late = superseded(call.span for call in found)
    lost: dict[int, tuple[Reason, str]] = {sequence: ("retry", RETRIED) for sequence in late}
    for call in found:
        unread = of_unread(episode.rollout, call.span, *(call.bodies or (b"", b"")))
        told = next((it for it in _of(call, unread, None) if it[0] not in options.allow), None)
        if (trouble := lost.get(call.span.sequence, told)) is not None:
            lost[call.span.sequence] = trouble
            report.drop(call.span, None, *trouble)
    return judged, [call for call in found if call.span.sequence not in lost]


def main_model(episode: Episode) -> str | None:
    """The model that most calls of a rollout request, by the same rule as `penstock doctor`."""
    heads = [call.span for one in episode.attempts for call in one.calls]
    counts = Counter(head.model for head in heads if head.model and by_name(head.dialect).generates)
    return counts.most_common(1)[0][0] if counts else None


def _about(episode: Episode, one: EpisodeAttempt, judged: AttemptRewards) -> Iterator[tuple[Reason, str]]:
    """Findings that exclude a whole attempt."""
    for finding in of_attempt(episode.rollout, one.attempt, [call.span for call in one.calls]):
        if finding.blocks and finding.code not in REWARDS:
            yield finding.code, finding.reason
    if judged.trouble is not None:
        yield judged.trouble


def _of(call: EpisodeCall, about: Iterable[Finding], agent: str | None) -> Iterator[tuple[Reason, str]]:
    """Findings that exclude a call. `about`: those from its head."""
    for finding in about:
        if finding.blocks:
            yield finding.code, finding.reason
    if agent is not None and call.span.agent != agent:
        yield "other_agent", f"it is of agent {call.span.agent}, not of {agent}"


def _drop(report: SampleReport, calls: Iterable[EpisodeCall], reason: Reason, detail: str) -> None:
    for call in calls:
        report.drop(call.span, None, reason, detail)
