"""What a chaos run has left behind: the journals of the agents against the tape.

Nothing is taken on trust. A call that its agent saw answered must be on the tape, once, with the id that the agent
saw. A call on the tape that the agent did not see must be one that it asked for and that was cut off: the gateway or
the agent was killed between the commit and the last byte.
"""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from e2e.chaos.plan import Plan

from penstock.gateway.client.client import Client
from penstock.gateway.model.rollout import LIVE, Attempt, AttemptStatus, Reward, RolloutStatus, RolloutSummary
from penstock.gateway.model.span import Span, SpanStatus

Name = tuple[str, str]
ENDS = {"broken": {RolloutStatus.FAILED}, "unwanted": {RolloutStatus.CANCELLED, RolloutStatus.SUCCEEDED}}


@dataclass(frozen=True, slots=True)
class Journal:
    """What one agent has written down."""

    asked: list[str]
    seen: set[str]
    ended: bool
    """It did its work and left by itself."""


@dataclass(slots=True)
class Verdict:
    """What was found."""

    rollouts: Counter[str] = field(default_factory=Counter[str])
    attempts: Counter[str] = field(default_factory=Counter[str])
    seen: int = 0
    """Calls that agents saw answered."""
    cut: int = 0
    """Calls on the tape whose answer was cut off on its way."""
    rewards: int = 0
    problems: list[str] = field(default_factory=list[str])


async def judge(plan: Plan, client: Client, root: Path) -> Verdict:
    """Compares everything with everything."""
    found = Verdict()
    journals = {_name(path): read(path) for path in (root / "journals").iterdir()}
    rollouts = {rollout.id: rollout async for rollout in client.rollouts()}
    spans: dict[Name, list[Span]] = {}
    async for span in client.recent_spans():
        spans.setdefault((span.rollout, span.attempt), []).append(span)
    found.problems += [f"rollout {name} is not there" for name in set(plan.names) ^ set(rollouts)]
    for rollout in rollouts.values():
        found.rollouts[rollout.status] += 1
        found.problems += _rollout(plan, rollout)
        for attempt in rollout.attempts:
            name = rollout.id, attempt.id
            found.attempts[attempt.status] += 1
            found.problems += _attempt(plan, attempt, journals.pop(name, None), spans.pop(name, []), found)
    found.problems += [f"{name} ran but is not on the tape" for name in journals]
    found.problems += [f"{name} is on the tape but is no attempt" for name in spans]
    found.problems += [f"{path.name} ran beside {path.read_text()!r}" for path in (root / "overlaps").iterdir()]
    found.problems += [f"something of {path.name} is still alive" for path in (root / "locks").iterdir() if held(path)]
    return found


def _name(path: Path) -> Name:
    rollout, _, attempt = path.name.partition(".")
    return rollout, attempt


def read(path: Path) -> Journal:
    """A journal; a line that was cut off by a kill has not happened."""
    steps = [line.split(" ") for line in path.read_text().split("\n")[:-1]]
    asked = [f"chatcmpl-{step[1]}" for step in steps if step[0] == "asked"]
    seen = {f"chatcmpl-{step[1]}" for step in steps if step[0] == "seen"}
    return Journal(asked, seen, ["end"] in steps)


def held(path: Path) -> bool:
    """Whether some process holds this lock."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _rollout(plan: Plan, rollout: RolloutSummary) -> Iterator[str]:
    expected = ENDS.get(plan.kind(rollout.id), {RolloutStatus.SUCCEEDED})
    if rollout.status not in expected:
        yield f"rollout {rollout.id} ({plan.kind(rollout.id)}) is {rollout.status}"
    won = [attempt for attempt in rollout.attempts if attempt.status == AttemptStatus.SUCCEEDED]
    if len(won) != (rollout.status == RolloutStatus.SUCCEEDED):
        yield f"rollout {rollout.id} is {rollout.status} with {len(won)} attempts that succeeded"
    if won and rollout.attempts[-1] != won[0]:
        yield f"rollout {rollout.id}: {rollout.attempts[-1].id} was made after {won[0].id} had succeeded"
    if [attempt.sequence for attempt in rollout.attempts] != list(range(1, len(rollout.attempts) + 1)):
        yield f"rollout {rollout.id}: its attempts are not numbered"


def _attempt(plan: Plan, attempt: Attempt, journal: Journal | None, spans: list[Span], found: Verdict) -> Iterator[str]:
    where = f"{attempt.rollout}/{attempt.id} ({attempt.status})"
    if attempt.status in LIVE:
        yield f"{where} has no end"
    if attempt.totals.gaps:
        yield f"{where} has {attempt.totals.gaps} gaps"
    if journal is None:
        if attempt.status == AttemptStatus.SUCCEEDED or any(span.kind == "llm" for span in spans):
            yield f"{where} was never run"
        return
    yield from _calls(where, attempt, journal, spans, found)
    yield from _rewards(where, plan, attempt, journal, spans, found)


def _calls(where: str, attempt: Attempt, journal: Journal, spans: list[Span], found: Verdict) -> Iterator[str]:
    calls = [span for span in spans if span.kind == "llm"]
    taped = Counter(str(span.response_id) for span in calls if span.status == SpanStatus.OK)
    found.seen += len(journal.seen)
    yield from (f"{where}: {name} is on the tape {times} times" for name, times in taped.items() if times > 1)
    yield from (f"{where}: {name} was seen and is not on the tape" for name in journal.seen - taped.keys())
    cut = taped.keys() - journal.seen
    found.cut += len(cut)
    yield from (f"{where}: {name} is on the tape and was never asked for" for name in cut - set(journal.asked))
    # Without a kill of its own an agent misses only what a dying gateway has cut off, and asks for it again.
    if journal.ended and any(not _asked_again(name, journal) for name in cut):
        yield f"{where}: of {sorted(cut)} the agent knows nothing"
    if any(span.status == SpanStatus.OPEN for span in calls):
        yield f"{where}: a call is still open"
    if attempt.totals.calls != len(calls):
        yield f"{where}: counts {attempt.totals.calls} calls, {len(calls)} are there"


def _asked_again(name: str, journal: Journal) -> bool:
    stem, _, tried = name.rpartition(".")
    return f"{stem}.{int(tried) + 1}" in journal.asked


def _rewards(
    where: str, plan: Plan, attempt: Attempt, journal: Journal, spans: list[Span], found: Verdict
) -> Iterator[str]:
    given = [Reward.of(span).value for span in spans if span.kind == "reward"]
    found.rewards += len(given)
    expected = plan.reward(attempt.rollout)
    if attempt.status == AttemptStatus.SUCCEEDED and (not journal.ended or given != [expected]):
        yield f"{where}: rewards {given}, its agent {'said' if journal.ended else 'did not say'} {expected}"
    if len(given) > 1 or any(value != expected for value in given) or (given and not journal.ended):
        yield f"{where}: rewards {given}, its agent {'said' if journal.ended else 'did not say'} {expected}"
    if attempt.reward != (given[-1] if given else None):
        yield f"{where}: its reward is {attempt.reward}, its rewards are {given}"
