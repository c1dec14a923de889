"""The part of the control API that changes the queue: enqueuing, claiming, finishing, rewarding.

Each function is an operation (`gateway.api.operations`): it gets the checked ids of its path and its checked body,
hands them to the dispatcher (`gateway.work.queue.dispatcher`) and answers when the change is durable. If the tape
refuses something, the guard makes an `ApiError` of it. An agent's own requests come through
`gateway.process.dispatch`, which has checked the rollout; they arrive below `/agent` with their scope in the path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from penstock.gateway.api.context import Control
from penstock.gateway.api.guard import ApiError
from penstock.gateway.api.operations import Ids
from penstock.gateway.model.audit import ActionRequest
from penstock.gateway.model.queue import (
    Claim,
    ClaimAnswer,
    ClaimRequest,
    EnqueueAnswer,
    EnqueueRequest,
    Event,
    EventsAnswer,
    EventsRequest,
    FeedbackAnswer,
    FeedbackRequest,
    FinishAnswer,
    FinishRequest,
    HeartbeatAnswer,
    HeartbeatRequest,
    QueueRequest,
    QueueStatus,
    RewardAnswer,
)
from penstock.gateway.model.rollout import Judgement, Rollout
from penstock.gateway.releases.canary.outcomes import is_hard
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.traffic.calls.call_request import CallAddress, path_of
from penstock.gateway.work.queue import ClaimedAttempt

TOKEN_S: Final = 7 * 86400
"""Seconds for which the token of a claim is valid."""


async def enqueue(control: Control, ids: Ids, asked: EnqueueRequest) -> EnqueueAnswer:
    """Queue tasks: all of them, or none when one cannot be. Sending the same again queues nothing twice: a name that is
    queued already is answered with `created: false`, and with 409 when anything else about it differs."""
    return EnqueueAnswer(rollouts=await control.dispatcher.enqueue(asked.rollouts))


async def cancel(control: Control, ids: Ids, asked: ActionRequest) -> Rollout:
    """Cancel a rollout that waits or runs. A worker that holds it hears of it with its next heartbeat and kills the
    agent."""
    return await control.dispatcher.cancel(ids["rid"], asked)


async def requeue(control: Control, ids: Ids, asked: ActionRequest) -> Rollout:
    """Queue a rollout again that has ended, whatever its number of attempts."""
    return await control.dispatcher.requeue(ids["rid"], asked)


async def claim(control: Control, ids: Ids, asked: ClaimRequest) -> ClaimAnswer:
    """Take work. When there is none the answer waits up to `wait_s` for it. Each claim comes with the address and the
    token that the agent is to use; it is lost unless the worker is heard of within `lease_s`."""
    claimed = await control.dispatcher.claim(asked)
    waiting = control.dispatcher.queue
    claims = [worker_claim(control, one) for one in claimed]
    return ClaimAnswer(claims=claims, queue=waiting.state, waiting=sum(waiting.counts().values()))


def worker_claim(control: Control, claimed: ClaimedAttempt) -> Claim:
    """The claim of an attempt, as its worker gets it."""
    rollout, attempt = claimed.rollout, claimed.attempt
    return Claim(
        rollout=rollout,
        attempt=attempt,
        address=path_of(CallAddress(rollout.id, attempt.id, mode=rollout.mode)),
        token=control.auth.mint(rollout.id, TOKEN_S, int(time.time())),
    )


async def heartbeat(control: Control, ids: Ids, asked: HeartbeatRequest) -> HeartbeatAnswer:
    """Say that a worker is alive: its leases begin anew. The answer tells which attempts it has lost; what they run is
    to be killed."""
    held = await control.dispatcher.heartbeat(ids["wid"], asked)
    return HeartbeatAnswer(attempts=held, queue=control.dispatcher.queue.state)


async def finish(control: Control, ids: Ids, asked: FinishRequest) -> FinishAnswer:
    """End an attempt, together with its last events and its rewards. When this is answered every earlier call of the
    attempt is durable and visible. The same end may be sent again; another one, or that of a worker that has lost the
    attempt, is refused."""
    events = _entries(control, ids, asked.events)
    done = await control.dispatcher.finish(ids["rid"], ids["aid"], asked, events)
    await _check_violations(control, ids, events)
    return FinishAnswer(rollout=done.rollout, attempt=done.attempt)


async def reward(control: Control, ids: Ids, asked: Judgement) -> RewardAnswer:
    """Say how well an attempt went. The newest trusted reward is the attempt's; one that comes after its end counts too
    and is marked `late`."""
    return await control.dispatcher.reward(ids["rid"], ids["aid"], asked)


async def add_events(control: Control, ids: Ids, asked: EventsRequest) -> EventsAnswer:
    """Add events to an attempt, such as lines of output."""
    return await _add(control, ids, asked, known=True)


async def feedback(control: Control, ids: Ids, asked: FeedbackRequest) -> FeedbackAnswer:
    """Say how good a response was, by the id that the provider gave it: for traffic whose rollouts nobody has named."""
    span = await asyncio.to_thread(control.tape.find_response, asked.response_id)
    if span is None:
        # The client may have been faster than the tape.
        _ = await control.dispatcher.flush_calls()
        span = await asyncio.to_thread(control.tape.find_response, asked.response_id)
    if span is None:
        message = f"no recorded response has the id {asked.response_id!r}"
        raise ApiError(404, message, "response_id", asked.response_id)
    said = Judgement(**asked.model_dump(exclude={"response_id", "span"}), span=span.sequence)
    kept = await control.dispatcher.reward(span.rollout, span.attempt, said)
    return FeedbackAnswer(**kept.model_dump(), rollout=span.rollout, attempt=span.attempt)


async def set_queue(control: Control, ids: Ids, asked: QueueRequest) -> QueueStatus:
    """Open, pause or drain the queue. It stays so over a restart."""
    await control.dispatcher.set_state(asked.state, asked)
    return await asyncio.to_thread(control.dispatcher.reader.queue)


# -- reports of agents -----------------------------------------------------------------------------------------------


async def agent_reward(control: Control, ids: Ids, asked: Judgement) -> RewardAnswer:
    """An agent judges its own attempt. It is kept with the source `agent` and not trained on, unless the configuration
    trusts agents (`trust_agent_rewards`)."""
    said = asked.model_copy(update={"source": "agent"})
    return await control.dispatcher.reward(ids["rid"], ids["aid"], said)


async def agent_events(control: Control, ids: Ids, asked: EventsRequest) -> EventsAnswer:
    """An agent adds events to its own attempt, which may be as new as a call's."""
    return await _add(control, ids, asked, known=False)


async def _add(control: Control, ids: Ids, asked: EventsRequest, known: bool) -> EventsAnswer:
    entries = _entries(control, ids, asked.events)
    added = EventsAnswer(sequences=await control.dispatcher.add(entries, known))
    await _check_violations(control, ids, entries)
    return added


async def _check_violations(control: Control, ids: Ids, events: Sequence[SpanEntry]) -> None:
    """Check releases at once if an event is a hard violation."""
    if any(is_hard(entry.kind, entry.name, entry.attributes) for entry in events):
        await control.releases.on_violation(ids["rid"])


def _entries(control: Control, ids: Ids, events: Sequence[Event]) -> list[SpanEntry]:
    now = control.dispatcher.now_ns()
    return [_entry(ids["rid"], ids["aid"], event, now) for event in events]


def _entry(rollout: str, attempt: str, event: Event, now: int) -> SpanEntry:
    at = now if event.time_ns is None else event.time_ns
    entry = SpanEntry(rollout, attempt, kind="event", name=event.name, method="", status="ok", start_ns=at, end_ns=at)
    entry.parent_id, entry.attributes = event.parent_id, dict(event.attributes) or None
    return entry
