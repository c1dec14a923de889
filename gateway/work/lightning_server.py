"""Operations on rollouts of Agent Lightning 1.0's server API, inside a write transaction.

Its rollouts wait in the gateway's queue. Either a controller of Agent Lightning runs them, which says so by their
state, or a worker of the gateway claims them. An attempt that a controller runs has no lease, because controllers send
no heartbeats.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from penstock.gateway.model.lightning import AttemptExtra, Json, pack, seconds, unpack
from penstock.gateway.model.lightning_server import (
    FIRST,
    MOVES,
    WORDS,
    ServerConfig,
    ServerEvent,
    ServerRecord,
    ServerTask,
    StatusPatch,
    rollout_answer,
)
from penstock.gateway.model.rollout import FINAL, LIVE, WAITING, AttemptStatus, Judgement, Outcome, Rollout
from penstock.gateway.model.rollout import RolloutStatus as Status
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.wire.http import redaction
from penstock.gateway.work.operations import QueueOperations, SpanOperations
from penstock.gateway.work.queue import AttemptRecords, QueueChange, attempt_of, ended_quietly, put, status_of

CONTROLLER: Final = "agent-lightning"
"""The worker of attempts that a controller runs."""
REWARD: Final = "agl1-"
"""Begins the keys of rewards that came as events."""


class LightningServerOperations(AttemptRecords):
    """The operations in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._queue, self._spans = QueueOperations(transaction), SpanOperations(transaction)

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def enqueue(self, tasks: Sequence[ServerTask], now: int) -> QueueChange[list[Json]]:
        """Queue tasks; one whose id is queued already stays as it is."""
        named = [(task.rollout_id or uuid.uuid4().hex, task) for task in tasks]
        for name, _ in named:
            if self._known(name) is not None and self._record(name, hidden=False) is None:
                message = f"{name!r} is the name of another rollout on the tape; choose another"
                raise OperationRefusedError("conflict", message, "rollout_id", name)
        change = QueueChange[list[Json]]([])
        for name, task in named:
            if self._known(name) is None:
                spec = task.spec()
                _ = self._queue.enqueue([(name, spec)], now)
                self._put(name, ServerRecord((task.config or ServerConfig()).model_dump(), updated_ns=now))
                change.waiting.append(spec.mode)
            change.answer.append(self._answer(name))
        return change

    def patch(self, name: str, asked: StatusPatch, now: int) -> QueueChange[Json]:
        """Change the status of a rollout. When its end is answered, it is durable."""
        rollout, record = self._found(name)
        given = asked.model_fields_set
        change = QueueChange[Json]({})
        if "state" in given:
            before = WORDS[rollout.status]
            if asked.state is None or asked.state not in MOVES[before]:
                message = f"Rollout {name}: cannot transition {before} -> {asked.state}"
                raise OperationRefusedError("conflict", message, "state", str(asked.state))
        for field in given - {"state", "error_message"}:
            setattr(record, field, getattr(asked, field))
        if "error_message" in given:
            [record.error_message] = self._tape.secrets.texts([asked.error_message])
        if asked.state is not None:
            live = self._begin(rollout, record.last_attempt_id or FIRST, now)
            if asked.state != "running":
                end = AttemptStatus(asked.state)
                outcome = Outcome(reason=(asked.error_message or "")[:2000] or None)
                done = self._queue.finish(live.name, None, end, outcome, [], now)
                change.ended, change.rewarded = done.ended, done.rewarded
            record.last_attempt_id = live.name[1]
        if given:
            record.version, record.updated_ns = record.version + 1, now
            self._put(name, record)
        change.answer = self._answer(name)
        return change

    def _begin(self, rollout: Rollout, attempt: str, now: int) -> CachedAttempt:
        """The attempt at a rollout, which runs. Its agent may have called already, before its controller said so."""
        if rollout.status not in WAITING:
            return self._attempt((rollout.id, rollout.attempt or attempt))
        live = self._live(rollout.id, attempt)
        if live is not None and ended_quietly(live):
            self.sign_of_life(live, now)
        if live is not None and status_of(live) not in LIVE:
            message = f"attempt {'/'.join(live.name)} has ended as {status_of(live)}; name another"
            raise OperationRefusedError("conflict", message, "last_attempt_id", attempt)
        if live is not None:
            self._forget(live)
        _ = self._queue.begin_attempt(rollout.id, CONTROLLER, None, now, attempt=attempt)
        live = self._attempt((rollout.id, attempt))
        self._tape.put("lightning", keys.LIGHTNING_ATTEMPT + live.key, pack(AttemptExtra(None)))
        put(live, status=AttemptStatus.RUNNING)
        self._tape.touch_and_log(live)
        self._move(rollout, Status.RUNNING, now)
        return live

    def hide(self, name: str, now: int) -> None:
        """Leave a rollout out of this API; one that has not ended is cancelled. Its calls stay on the tape."""
        rollout, record = self._known(name), self._record(name)
        if rollout is None or record is None or record.hidden:
            return
        if rollout.status not in FINAL:
            _ = self._queue.cancel(name, None, now)
        record.hidden = True
        self._put(name, record)

    # -- events ------------------------------------------------------------------------------------------------------

    def add_event(self, name: tuple[str, str], said: ServerEvent, now: int) -> QueueChange[Json]:
        """Keep an event of an attempt, which is made if it is new. The value of a reward is a reward."""
        rollout, _ = self._found(name[0])
        judgement = judgement_of(said)
        live = self._tape.attempt(SpanEntry(*name, mode=rollout.mode, start_ns=now))
        entry = SpanEntry(*name, kind="event", name=said.event_type, method="", status="ok", start_ns=now, end_ns=now)
        kept = self._spans.masked(entry)
        self._tape.record(kept, seen_ns=now)
        data = self._tape.secrets.json(redaction.attributes(said.data))
        key = keys.LIGHTNING_EVENT + live.record_key + keys.u32(kept.sequence)
        self._tape.put("lightning", key, pack({"event_type": kept.name, "data": data}))
        change = QueueChange[Json](event_answer(name, said.event_type, now, said.data))
        if judgement is not None:
            keyed = judgement.model_copy(update={"key": f"{REWARD}{kept.sequence}"})
            _ = self._spans.judge(live, keyed, True, now, known_new=True)
            change.rewarded.append(judgement.source)
        return change

    # -- models ------------------------------------------------------------------------------------------------------

    def put_models(self, models: list[Json], now: int) -> None:
        """Keep which engines serve which models from now on."""
        self._tape.put("lightning", keys.LIGHTNING_MODELS + keys.number(now), pack(models))

    # -- records -----------------------------------------------------------------------------------------------------

    def _found(self, name: str) -> tuple[Rollout, ServerRecord]:
        rollout, record = self._known(name), self._record(name, hidden=False)
        if rollout is None or record is None:
            raise OperationRefusedError("not_found", f"Rollout not found: {name}", "rollout_id", name)
        return rollout, record

    def _record(self, name: str, hidden: bool = True) -> ServerRecord | None:
        found = server_record(self._tape.get("lightning", keys.LIGHTNING_SERVED + keys.rollout_key(name)))
        return None if found is None or (found.hidden and not hidden) else found

    def _put(self, name: str, record: ServerRecord) -> None:
        self._tape.put("lightning", keys.LIGHTNING_SERVED + keys.rollout_key(name), pack(record))

    def _answer(self, name: str) -> Json:
        rollout, record = self._found(name)
        return rollout_answer(rollout, record, [attempt_of(one) for one in self._lives(name)])


def server_record(record: bytes | None) -> ServerRecord | None:
    """The record of a rollout; None for one that did not come by this API."""
    return None if record is None else msgspec.convert(unpack(record), ServerRecord)


def event_answer(name: tuple[str, str], event_type: str, at_ns: int, data: Json) -> Json:
    """An event in Agent Lightning's words."""
    rollout, attempt = name
    return {
        "event_type": event_type,
        "rollout_id": rollout,
        "attempt_id": attempt,
        "timestamp": seconds(at_ns),
        "data": data,
    }


def judgement_of(said: ServerEvent) -> Judgement | None:
    """The reward that an event is; None where it is none, or its value is no number."""
    value: Any = said.data.get("value")
    if said.event_type != "reward" or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    reason: Any = said.data.get("reason") or said.data.get("message")
    why = reason[:10_000] if isinstance(reason, str) else None
    return Judgement(value=number, source="runner", reason=why) if math.isfinite(number) else None
