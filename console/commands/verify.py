"""`penstock release verify`: makes every decision of a release again from the tape, far from the gateway that made it.

`gateway.releases.canary.verification.verify` checks the chain, the assignments and the decisions, but takes the
observations as given. This module compares these with the rewards on the tape that they name, the versions with their
content when the release began, and the calls with their arms. With the audit key it checks signatures, with anchors
that the chain contains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel

from penstock.console.views.pages import History
from penstock.gateway.client.connection import NotFound, map_concurrently
from penstock.gateway.client.resources import read_history
from penstock.gateway.model.base import GATEWAY
from penstock.gateway.model.release import Assignment, AuditTrailEntry, Pin, Release, RolloutEvidence
from penstock.gateway.model.rollout import Reward
from penstock.gateway.model.toml import pluralized
from penstock.gateway.releases.canary.outcomes import member_outcomes
from penstock.gateway.releases.canary.verification import (
    Anchor,
    anchor_problems,
    content_problems,
    serving_problems,
    signature_problems,
    verify,
)

if TYPE_CHECKING:
    from penstock.gateway.client.client import Client


class ReleaseVerification(BaseModel):
    """The result of verifying a release, as `--json` prints it."""

    release: str
    """Its name."""
    decisions: int
    """Decisions that the rules have made, each made again."""
    observations: int
    """Rollouts that were counted."""
    rewards: int
    """Rewards that were compared with the tape."""
    calls: int
    """Calls whose versions were compared with their arm."""
    signed: bool
    """Whether the signatures of the chain were checked."""
    anchored: bool
    """Whether anchors were."""
    problems: list[str]
    """A sentence for everything that does not agree."""

    @property
    def sentence(self) -> str:
        """The result for a person, when there are no problems."""
        made, seen = pluralized(self.decisions, "decision"), pluralized(self.observations, "observation")
        calls = pluralized(self.calls, "call")
        tape = f"{pluralized(self.rewards, 'reward')} as on the tape, {calls} by its arm's version"
        checked = [name for name, it in (("signatures", self.signed), ("anchors", self.anchored)) if it]
        chain = f" {' and '.join(checked).capitalize()} agree." if checked else ""
        return f"{self.release} is verified: {made} from {seen}, {tape}.{chain}"


async def history(client: Client, release: Release, after: int = 0) -> History:
    """The chain of a release at this state, and the assignments behind number `after` with their outcomes."""
    return History.of(release, *await read_history(client, release.id, after), after)


async def verify_release(
    client: Client, name: str, key: str | None = None, anchors: Sequence[Anchor] | None = None
) -> ReleaseVerification:
    """Verifies a release; again if it has moved on meanwhile and there are problems. `key`: the audit key, to check
    signatures; `anchors`: heads that were kept elsewhere."""
    while True:
        release = (await client.release(name)).release
        found = await history(client, release)
        problems = list(verify(release, found.assigned, found.seen, found.audit))
        problems += signature_problems(found.audit, key) if key is not None else ()
        problems += anchor_problems(release.id, found.audit, anchors) if anchors is not None else ()
        if not problems or (await client.release(name)).release.revision == release.revision:
            break
    problems += content_problems(
        release, [one for it in release.resources for one in (await client.resource(it)).versions]
    )
    looked = await map_concurrently(lambda one: _served(client, release, one, found.audit), list(_alone(found)))
    problems += [problem for some, _ in looked for problem in some]
    judged = [(one.number, part) for one in found.seen for part in member_outcomes(one) if part.left_out is None]
    problems += filter(None, await map_concurrently(lambda one: _reward(client, release, *one), judged))
    made = sum(entry.who == GATEWAY and entry.assignment is not None for entry in found.audit)
    compared = sum(part.span is not None for _, part in judged)
    return ReleaseVerification(
        release=name, decisions=made, observations=len(found.seen), rewards=compared,
        calls=sum(count for _, count in looked), signed=key is not None, anchored=anchors is not None,
        problems=problems,
    )  # fmt: skip


def _alone(found: History) -> Iterator[Assignment]:
    """Every rollout with its assignment: of a unit all rollouts that were counted, or the first one if none was."""
    for at, one in enumerate(found.assigned):
        rollouts = [part.rollout for part in member_outcomes(found.seen[at])] if at < len(found.seen) else [one.rollout]
        yield from (one.model_copy(update={"rollout": rollout}) for rollout in rollouts)


async def _served(
    client: Client, release: Release, assignment: Assignment, audit: Sequence[AuditTrailEntry]
) -> tuple[list[str], int]:
    """(problems of the versions of a rollout's calls, the number of its calls with the release's resources)."""
    pins = await client.pins(assignment.rollout)
    if _forgotten(pins, release, assignment.number):
        return [], 0  # there may be another rollout of its name
    pins = [pin for pin in pins if not pin.forgotten]
    try:
        spans = [one async for one in client.spans(assignment.rollout) if one.versions]
    except NotFound:
        # Its first call was pinned and has not ended, so no span exists.
        return [], 0
    mine = sum(not release.arm_versions("stable").keys().isdisjoint(one.versions or ()) for one in spans)
    return list(serving_problems(release, assignment, pins, spans, audit)), mine


def _forgotten(pins: Sequence[Pin], release: Release, number: int) -> bool:
    """True if the rollout of this assignment was forgotten."""
    mine = [pin for pin in pins if (pin.release, pin.number) == (release.id, number)]
    return bool(mine) and all(pin.forgotten for pin in mine)


async def _reward(client: Client, release: Release, number: int, seen: RolloutEvidence) -> str | None:
    """The problem of the reward of a rollout in an observation; None without one."""
    wrong = await _compared_reward(client, release, number, seen)
    if wrong is not None and _forgotten(await client.pins(seen.rollout), release, number):
        return None
    return wrong


async def _compared_reward(client: Client, release: Release, number: int, seen: RolloutEvidence) -> str | None:
    who = f"observation {number} of rollout {seen.rollout}"
    if seen.span is None:
        failed = seen.reward is None or seen.reward == 0
        return None if failed else f"{who} has the goodness {seen.reward:g} and names no reward"
    attempt, _, sequence = seen.span.rpartition("#")
    try:
        span = (await client.span(seen.rollout, attempt, int(sequence))).span
    except NotFound:
        return f"{who} names the reward {seen.span}, which is not on the tape"
    if span.kind != "reward":
        return f"{who} names {seen.span} as its reward, which is a span of kind {span.kind}"
    return _compared(who, release, seen, Reward.of(span))


def _compared(who: str, release: Release, seen: RolloutEvidence, reward: Reward) -> str | None:
    policy = release.policy
    value = reward.value if policy.reward is None else reward.dimensions.get(policy.reward)
    if value != seen.raw_reward or value is None:
        return f"{who} was counted with the reward {seen.raw_reward}, {seen.span} on the tape says {value}"
    if policy.goodness(value) != seen.reward:
        return f"{who}: a reward of {value:g} is a goodness of {policy.goodness(value):g}, not {seen.reward}"
    return None if reward.trusted else f"{who}: its reward {seen.span} is not trusted"
