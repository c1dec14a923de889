"""The half of the control API that changes things: giving work, doing it, judging it.

Handlers are thin: they check what was asked (`gateway.guard`), hand it to the desk (`gateway.dispatcher`) and answer
when it is durable. What the tape refuses becomes an `ApiError` in the guard. An agent's own requests come through the
data plane, which has checked whose they are (`gateway.proxy`); they arrive below `/agent` with their scope in the path.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from aiohttp import web

from gateway.address import Address, path_of
from gateway.context import CONTROL, Control
from gateway.guard import ApiError, answer, body_of, id_of
from gateway.model import Judgement, Worker
from gateway.pages import Tape
from gateway.store import Claimed, Entry
from gateway.work import (
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Empty,
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
    WorkerList,
)

TOKEN_S: Final = 7 * 86400
"""How long the token of a claim is valid."""
SHOWN_NS: Final = 15 * 60 * 10**9
"""How long a worker that is not heard of is still listed."""


async def post_rollouts(request: web.Request) -> web.Response:
    """Queue tasks: all of them, or none when one cannot be. Sending the same again queues nothing twice: a name that is
    queued already is answered with `created: false`, and with 409 when it stands for another input, mode or group."""
    asked = await body_of(request, EnqueueRequest)
    return answer(EnqueueAnswer(rollouts=await _desk(request).desk.enqueue(asked.rollouts)))


async def post_cancel(request: web.Request) -> web.Response:
    """Cancel a rollout that waits or runs. A worker that holds it hears of it with its next heartbeat and kills the
    agent."""
    await body_of(request, Empty)
    return answer(await _desk(request).desk.cancel(id_of(request, "rid")))


async def post_requeue(request: web.Request) -> web.Response:
    """Queue a rollout again that has ended, whatever its number of attempts."""
    await body_of(request, Empty)
    return answer(await _desk(request).desk.requeue(id_of(request, "rid")))


async def post_claims(request: web.Request) -> web.Response:
    """Take work. When there is none the answer waits up to `wait_s` for it. Each claim comes with the address and the
    token that the agent is to use; it is lost unless the worker is heard of within `lease_s`."""
    control, asked = _desk(request), await body_of(request, ClaimRequest)
    claimed = await control.desk.claim(asked)
    state, waiting = control.tape.queue_state()
    claims = [_claim(control, one) for one in claimed]
    return answer(ClaimAnswer(claims=claims, queue=state, waiting=sum(waiting.values())))


def _claim(control: Control, claimed: Claimed) -> Claim:
    rollout, attempt = claimed.rollout, claimed.attempt
    return Claim(
        rollout=rollout,
        attempt=attempt,
        address=path_of(Address(rollout.id, attempt.id, mode=rollout.mode)),
        token=control.auth.mint(rollout.id, TOKEN_S, int(time.time())),
    )


async def post_heartbeat(request: web.Request) -> web.Response:
    """Say that a worker is alive: its leases begin anew. The answer tells which attempts it has lost; what they run is
    to be killed."""
    control, asked = _desk(request), await body_of(request, HeartbeatRequest)
    held = await control.desk.heartbeat(id_of(request, "wid"), asked)
    return answer(HeartbeatAnswer(attempts=held, queue=control.tape.queue_state()[0]))


async def post_finish(request: web.Request) -> web.Response:
    """End an attempt, together with its rewards. When this is answered every earlier call of the attempt is durable and
    visible. The same end may be sent again; another one, or that of a worker that has lost the attempt, is refused."""
    asked = await body_of(request, FinishRequest)
    done = await _desk(request).desk.finish(id_of(request, "rid"), id_of(request, "aid"), asked)
    return answer(FinishAnswer(rollout=done.rollout, attempt=done.attempt))


async def post_reward(request: web.Request) -> web.Response:
    """Say how well an attempt went. The newest trusted reward is the attempt's; one that comes after its end counts too
    and is marked `late`."""
    asked = await body_of(request, Judgement)
    return answer(await _desk(request).desk.reward(id_of(request, "rid"), id_of(request, "aid"), asked))


async def post_events(request: web.Request) -> web.Response:
    """Add events to an attempt, such as lines of output."""
    asked = await body_of(request, EventsRequest)
    return await _add(request, asked, known=True)


async def post_feedback(request: web.Request) -> web.Response:
    """Say how good a response was, by the id that the provider gave it: for traffic whose rollouts nobody has named."""
    control, asked = _desk(request), await body_of(request, FeedbackRequest)
    span = await asyncio.to_thread(control.tape.find_response, asked.response_id)
    if span is None:
        message = f"no recorded response has the id {asked.response_id!r}"
        raise ApiError(404, message, "response_id", asked.response_id)
    said = Judgement(**asked.model_dump(exclude={"response_id", "span"}), span=span.sequence)
    kept = await control.desk.reward(span.rollout, span.attempt, said)
    return answer(FeedbackAnswer(**kept.model_dump(), rollout=span.rollout, attempt=span.attempt))


async def get_queue(request: web.Request) -> web.Response:
    """How much work there is."""
    return answer(await asyncio.to_thread(_desk(request).tape.queue))


async def post_queue(request: web.Request) -> web.Response:
    """Open, pause or drain the queue. It stays so over a restart."""
    control, asked = _desk(request), await body_of(request, QueueRequest)
    await control.desk.set_state(asked.state)
    return answer(await asyncio.to_thread(control.tape.queue))


async def get_workers(request: web.Request) -> web.Response:
    """The workers that were heard of in the last quarter of an hour."""
    control = _desk(request)
    return answer(WorkerList(workers=await asyncio.to_thread(recent_workers, control.tape, control.desk.now_ns())))


def recent_workers(tape: Tape, now_ns: int) -> list[Worker]:
    """Those who were heard of lately, by name."""
    return [worker for worker in tape.workers() if worker.last_seen_ns >= now_ns - SHOWN_NS]


# -- what agents say of themselves -----------------------------------------------------------------------------------


async def post_agent_reward(request: web.Request) -> web.Response:
    """An agent judges its own attempt. It is kept with the source `agent` and not trained on, unless the configuration
    trusts agents (`rewards.trust_agent`)."""
    asked = await body_of(request, Judgement)
    said = asked.model_copy(update={"source": "agent"})
    return answer(await _desk(request).desk.reward(id_of(request, "rid"), id_of(request, "aid"), said))


async def post_agent_events(request: web.Request) -> web.Response:
    """An agent adds events to its own attempt, which may be as new as a call's."""
    return await _add(request, await body_of(request, EventsRequest), known=False)


def _desk(request: web.Request) -> Control:
    return request.app[CONTROL]


async def _add(request: web.Request, asked: EventsRequest, known: bool) -> web.Response:
    desk, rollout, attempt = _desk(request).desk, id_of(request, "rid"), id_of(request, "aid")
    now = desk.now_ns()
    entries = [_entry(rollout, attempt, event, now) for event in asked.events]
    return answer(EventsAnswer(sequences=await desk.add(entries, known)))


def _entry(rollout: str, attempt: str, event: Event, now: int) -> Entry:
    at = now if event.time_ns is None else event.time_ns
    entry = Entry(rollout, attempt, kind="event", name=event.name, method="", status="ok", start_ns=at, end_ns=at)
    entry.attributes = dict(event.attributes) or None
    return entry
