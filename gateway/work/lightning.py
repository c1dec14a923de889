"""Agent Lightning's operations on its store, inside a write transaction.

Its rollouts are the gateway's: they wait in the same queue, and change by the same tables. What it has besides is in
the database `lightning`, written in the same transaction. Where its clients say how something stands, that counts
(`gateway.model.rollout`): an attempt may then live beside a newer one, and report its end, which changes nothing of
the rollout. An attempt that its workers take has no lease, because they send no heartbeats for it; its limits are those
of its rollout.

Spans get numbers that grow within a rollout. A number is taken, or named by the span; calls and other spans of the
gateway's own that came meanwhile count as if each had taken one (`LightningReader` numbers them so).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.gateway.model.base import Id, Mode
from penstock.gateway.model.lightning import (
    LATEST,
    AttemptExtra,
    AttemptUpdate,
    Json,
    LightningStart,
    LightningTask,
    RolloutExtra,
    RolloutUpdate,
    attempt_answer,
    attempt_word,
    nanoseconds,
    new_worker,
    own_mode,
    pack,
    rollout_answer,
    rollout_word,
    seconds,
    unpack,
)
from penstock.gateway.model.queue import RolloutSpec
from penstock.gateway.model.rollout import (
    ACTIVE,
    ATTEMPT_MOVES,
    FINAL,
    LIVE,
    ROLLOUT_MOVES,
    WAITING,
    AttemptStatus,
    Judgement,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutStatus,
    Worker,
    after_attempt,
    move_attempt,
)
from penstock.gateway.model.span import Span
from penstock.gateway.tape.store import keys, records
from penstock.gateway.tape.store.cache import CachedAttempt
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.wire.http import redaction
from penstock.gateway.work.operations import QueueOperations, SpanOperations
from penstock.gateway.work.queue import (
    AttemptRecords,
    ClaimedAttempt,
    QueueChange,
    attempt_of,
    get,
    put,
    status_of,
)


@dataclass(slots=True)
class SpanArrival:
    """A span that has come."""

    span: Json
    """The span in Agent Lightning's words."""
    entry: SpanEntry
    """The span in the gateway's."""
    judgement: Judgement | None = None
    """The reward that it carries."""
    numbered: bool = True
    """False if the span needs a number."""
    judged: Callable[[Sequence[Span]], list[int]] | None = None
    """Finds the calls that the reward is of, among the spans of the attempt; None if it names none."""


class LightningOperations(AttemptRecords):
    """Agent Lightning's operations in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._queue, self._spans = QueueOperations(transaction), SpanOperations(transaction)

    # -- work --------------------------------------------------------------------------------------------------------

    def enqueue(self, tasks: Sequence[LightningTask], now: int) -> QueueChange[list[Json]]:
        """Queue tasks."""
        latest = self._latest_resources()
        specs = [(self._new_name(), task, _spec(task)) for task in tasks]
        _ = self._queue.enqueue([(name, spec) for name, _, spec in specs], now)
        answers: list[Json] = []
        for name, task, _ in specs:
            self._keep_task(name, task, latest)
            answers.append(self._answer(self._rollout(name)))
        modes: list[Mode] = [spec.mode for _, _, spec in specs]
        return QueueChange(answers, waiting=modes)

    def start(self, task: LightningStart, now: int) -> QueueChange[Json]:
        """Begin a task without the queue."""
        name = self._new_name()
        _ = self._queue.enqueue([(name, _spec(task))], now)
        self._keep_task(name, task, self._latest_resources())
        return self._begun(self._begin(name, task.worker_id, now), task.worker_id, now)

    def _keep_task(self, name: str, task: LightningTask, latest: Id | None) -> None:
        config = None if task.config is None else task.config.model_dump()
        self._put_rollout_extra(name, RolloutExtra(task.mode, task.resources_id or latest, config))

    def dequeue(self, limit: int, worker: Id | None, now: int) -> list[ClaimedAttempt]:
        """Hand out the next rollouts; the worker is busy with the last one, or idle."""
        claimed: list[ClaimedAttempt] = []
        while self._waiting.state == "open" and len(claimed) < limit:
            found = self._waiting.next(range(256))
            if found is None:
                break
            claimed.append(self._begin(found[1], worker, now))
        if worker is not None:
            last = claimed[-1] if claimed else None
            self._tell_worker(worker, now, None if last is None else (last.rollout.id, last.attempt.id), dequeued=True)
        return claimed

    def start_attempt(self, name: str, worker: Id | None, now: int) -> QueueChange[Json]:
        """Begin another attempt, also beside one that lives: its client says that it is the one that counts."""
        rollout = self._rollout(name)
        if rollout.origin != "queued":
            message = f"rollout {name!r} did not come from the queue: its agent makes its attempts itself"
            raise OperationRefusedError("conflict", message, "rollout_id", name)
        if rollout.status in FINAL:
            _ = self._queue.requeue(name, None, now)
        elif rollout.status in ACTIVE:
            self._move(rollout, RolloutStatus.REQUEUING, now)
        return self._begun(self._begin(name, worker, now), worker, now)

    def _begin(self, name: str, worker: Id | None, now: int) -> ClaimedAttempt:
        taken = self._attempts(name)
        attempt = next(made for _ in iter(int, 1) if (made := f"at-{secrets.token_hex(4)}") not in taken)
        claimed = self._queue.begin_attempt(name, worker or f"agl-{attempt[3:]}", None, now, attempt=attempt)
        self._put_attempt_extra(keys.attempt_key(name, attempt), AttemptExtra(worker))
        return claimed

    def _begun(self, claimed: ClaimedAttempt, worker: Id | None, now: int) -> QueueChange[Json]:
        if worker is not None:
            self._tell_worker(worker, now, (claimed.rollout.id, claimed.attempt.id))
        return QueueChange(self.attempted(claimed), [claimed])

    def attempted(self, claimed: ClaimedAttempt) -> Json:
        """A rollout with an attempt that has begun."""
        extra = self._attempt_extra(keys.attempt_key(claimed.rollout.id, claimed.attempt.id))
        return self._answer(claimed.rollout, attempt_answer(claimed.attempt, extra))

    def _new_name(self) -> str:
        return next(made for _ in iter(int, 1) if self._known(made := f"ro-{secrets.token_hex(6)}") is None)

    # -- changes -----------------------------------------------------------------------------------------------------

    def update_rollout(self, name: str, asked: RolloutUpdate, now: int) -> QueueChange[Json]:
        """Change a rollout as its client says."""
        rollout, given = self._rollout(name), asked.model_fields_set
        if asked.status is not None:
            self._check_rollout_move(rollout, RolloutStatus(asked.status))
        if {"input", "metadata"} & given:
            rollout.input = asked.input if "input" in given else rollout.input
            rollout.metadata = asked.metadata if "metadata" in given else rollout.metadata
            task = records.task_record(rollout.input, rollout.metadata)
            if task is None:
                self._tape.delete("tasks", keys.rollout_key(name))
            else:
                self._tape.put("tasks", keys.rollout_key(name), task)
        extra = self._rollout_extra(name) or RolloutExtra(None if rollout.mode == "online" else rollout.mode)
        if "mode" in given:
            extra.mode = asked.mode
            self._change_mode(rollout, asked)
        if "resources_id" in given:
            extra.resources_id = asked.resources_id
        if asked.config is not None:
            extra.config, rollout.config = asked.config.model_dump(), asked.config.own(rollout.config)
        if given & {"mode", "resources_id", "config"}:
            self._put_rollout_extra(name, extra)
        if given - {"status"}:
            self._write_rollout(rollout)
        if asked.status is not None:
            self._set_status(rollout, RolloutStatus(asked.status), now)
        live = None if rollout.attempt is None else self._live(name, rollout.attempt)
        watched = [] if live is None else [ClaimedAttempt(rollout.model_copy(), attempt_of(live))]
        waiting: list[Mode] = [rollout.mode] if rollout.status in WAITING else []
        return QueueChange(self._answer(self._rollout(name)), watched, waiting=waiting)

    def _change_mode(self, rollout: Rollout, asked: RolloutUpdate) -> None:
        waits = rollout.status in WAITING and self._waits(rollout)
        self._leave_queue(rollout)
        rollout.mode = own_mode(asked.mode)
        if waits:
            self._join_queue(rollout)

    def _waits(self, rollout: Rollout) -> bool:
        """True if a rollout is in the queue, and no lease keeps it out."""
        live = None if rollout.attempt is None else self._live(rollout.id, rollout.attempt)
        return live is None or get(live, "lease_ns") is None

    def _check_rollout_move(self, rollout: Rollout, wanted: RolloutStatus) -> None:
        """Refuse a status that the rollout cannot get by a word of its client."""
        before = rollout.status
        if wanted == RolloutStatus(rollout_word(before)) or (before in WAITING and wanted in WAITING):
            return
        by_queue = wanted in (RolloutStatus.QUEUING, RolloutStatus.PREPARING)
        unqueued = wanted == RolloutStatus.REQUEUING and rollout.origin != "queued"
        if by_queue or unqueued or wanted not in ROLLOUT_MOVES[before]:
            way = "enqueue a new one, or start an attempt" if by_queue else "it stays as it is"
            message = f"rollout {rollout.id!r} is {before} and cannot be made {wanted}: {way}"
            raise OperationRefusedError("conflict", message, "status", wanted)

    def _set_status(self, rollout: Rollout, wanted: RolloutStatus, now: int) -> None:
        before = rollout.status
        if wanted == RolloutStatus(rollout_word(before)) or (before in WAITING and wanted in WAITING):
            return
        if wanted == RolloutStatus.CANCELLED:
            _ = self._queue.cancel(rollout.id, None, now)
        elif wanted == RolloutStatus.REQUEUING and before in FINAL:
            _ = self._queue.requeue(rollout.id, None, now)
        else:
            self._leave_queue(rollout)
            self._move(rollout, wanted, now)
            if wanted == RolloutStatus.REQUEUING:
                self._join_queue(rollout)

    def update_attempt(self, name: str, attempt: str, asked: AttemptUpdate, now: int) -> QueueChange[Json]:
        """Change an attempt as its client says; the newest decides how its rollout stands."""
        rollout, known = self._rollout(name), self._attempts(name)
        if not known:
            raise OperationRefusedError("not_found", f"No attempts found for rollout {name}", "attempt_id", attempt)
        live = self._attempt((name, known[-1] if attempt == LATEST else attempt))
        change = QueueChange[Json]({})
        if asked.status is not None:
            self._say(rollout, live, AttemptStatus(asked.status), now, change)
        extra = self._attempt_extra(live.key) or AttemptExtra(get(live, "worker"))
        if asked.worker_id is not None:
            extra.worker_id = asked.worker_id
            self._give_to(live, asked.worker_id)
        if asked.last_heartbeat_time is not None:
            put(live, last_seen_ns=nanoseconds(asked.last_heartbeat_time))
        if asked.metadata is not None:
            extra.metadata = asked.metadata
        self._put_attempt_extra(live.key, extra)
        self._tape.touch_and_log(live)
        if extra.worker_id is not None and (asked.status or asked.worker_id):
            self._tell_worker_of(extra.worker_id, live, now)
        change.answer = attempt_answer(attempt_of(live), extra)
        if status_of(live) in LIVE:
            change.watched.append(ClaimedAttempt(rollout.model_copy(), attempt_of(live)))
        return change

    def _say(
        self, rollout: Rollout, live: CachedAttempt, wanted: AttemptStatus, now: int, change: QueueChange[Json]
    ) -> None:
        """Let an attempt stand as its client says."""
        before, newest = status_of(live), self._attempts(rollout.id)[-1] == live.name[1]
        same = wanted == AttemptStatus(attempt_word(before))
        if not same and wanted not in ATTEMPT_MOVES[before]:
            message = f"attempt {'/'.join(live.name)} is {before} and cannot be made {wanted}; start another attempt"
            raise OperationRefusedError("conflict", message, "status", wanted)
        follows = self._following(rollout, wanted) if newest and (not same or rollout.status in ACTIVE) else None
        if not same:
            if wanted in LIVE:
                self._wake_up(live, wanted)
            elif before in LIVE:
                if wanted in (AttemptStatus.SUCCEEDED, AttemptStatus.FAILED):
                    put(live, lease_ns=None)  # its worker has let go of it
                if self._spans.reward_failure(rollout, live, wanted, now):
                    change.rewarded.append("rule")
                self._end_attempt(live, wanted, now, Outcome())
                change.ended = wanted
            else:
                put(live, status=move_attempt(before, wanted), ended_ns=now)
                put(live, outcome=records.outcome_values(Outcome()))
        if follows is not None and follows != rollout.status:
            self._leave_queue(rollout)
            self._move(rollout, follows, now)
            self._queue_again(rollout, live, now)
            if follows in WAITING:
                change.waiting.append(rollout.mode)

    def _following(self, rollout: Rollout, wanted: AttemptStatus) -> RolloutStatus:
        """The state of a rollout that follows from that of its newest attempt; raises `OperationRefusedError`."""
        follows = RolloutStatus(wanted) if wanted in LIVE else after_attempt(wanted, rollout.tries, rollout.config)
        if follows != rollout.status and follows not in ROLLOUT_MOVES[rollout.status]:
            message = f"rollout {rollout.id!r} is {rollout.status} and cannot be {follows}; requeue it first"
            raise OperationRefusedError("conflict", message, "status", wanted)
        return follows

    def _wake_up(self, live: CachedAttempt, status: AttemptStatus = AttemptStatus.RUNNING) -> None:
        """Let an attempt live, whatever its rollout does."""
        ended = status_of(live) not in LIVE
        put(live, status=move_attempt(status_of(live), status))
        if ended:
            put(live, ended_ns=None, outcome=None)
            self._tape.put(*(("live", live.key) if get(live, "worker") else ("unclaimed", live.record_key)), b"")
        self._tape.touch_and_log(live)

    def _give_to(self, live: CachedAttempt, worker: Id) -> None:
        """Name an attempt's worker."""
        if get(live, "worker") is None and status_of(live) in LIVE:
            self._forget(live)
            self._tape.put("live", live.key, b"")
        put(live, worker=worker)

    # -- spans -------------------------------------------------------------------------------------------------------

    def next_sequence(self, name: str) -> int:
        """Take the next number of a rollout's spans."""
        _ = self._rollout(name)
        value, spans = self._count(name)
        self._put_count(name, value + 1, spans)
        return value + 1

    def _count(self, name: str) -> tuple[int, int]:
        """(The highest number of a rollout's spans, the number of all its spans)."""
        live = map(self._live, [name] * len(self._attempts(name)), self._attempts(name))
        spans = sum(get(one, "spans") for one in live if one is not None)
        stored = self._tape.get("lightning", keys.LIGHTNING_COUNTER + keys.rollout_key(name))
        value, before = (0, 0) if stored is None else keys.to_numbers(stored)
        return value + spans - before, spans

    def _put_count(self, name: str, value: int, spans: int) -> None:
        key = keys.LIGHTNING_COUNTER + keys.rollout_key(name)
        self._tape.put("lightning", key, keys.numbers((max(0, value), spans)))

    def add_spans(self, arrived: Iterable[SpanArrival], now: int, made: bool = False) -> QueueChange[list[Json | None]]:
        """Keep spans, with their rewards; None for one that the attempt has. Each is a sign of life. `made`: an attempt
        that does not exist is made."""
        change = QueueChange[list[Json | None]]([])
        for one in arrived:
            change.answer.append(kept := self._add_span(one, now, made))
            if kept is not None and one.judgement is not None:
                change.rewarded.append(one.judgement.source)
        return change

    def _add_span(self, arrived: SpanArrival, now: int, made: bool) -> Json | None:
        entry = arrived.entry
        name = entry.rollout, entry.attempt
        live = self._tape.attempt(entry) if made else self._attempt(name)
        seen = keys.LIGHTNING_SEEN + live.record_key + arrived.span["span_id"].encode()
        if self._tape.get("lightning", seen) is not None:
            return None
        value, _ = self._count(name[0])
        if not arrived.numbered:
            arrived.span["sequence_id"] = value + 1
        self._hear(live)
        kept = self._spans.masked(entry)
        self._tape.record(kept, seen_ns=now)
        sequence = keys.u32(kept.sequence)
        span = self._tape.secrets.json(redaction.attributes(arrived.span))
        self._tape.put("lightning", seen, sequence)
        self._tape.put("lightning", keys.LIGHTNING_SPAN + live.record_key + sequence, pack(span))
        if (judgement := arrived.judgement) is not None:
            judged = [] if arrived.judged is None else arrived.judged(list(self._tape.newest_spans(live)))
            if len(judged) == 1:
                judgement = judgement.model_copy(update={"span": judged[0]})
            _ = self._spans.judge(live, judgement, True, now)
        self._put_count(name[0], max(value, arrived.span["sequence_id"]), self._count(name[0])[1])
        return span

    def _hear(self, live: CachedAttempt) -> None:
        """Take a span as a sign of life of an attempt whose rollout does not follow it; any other follows as it does
        for calls (`AttemptRecords.sign_of_life`)."""
        status = status_of(live)
        if status not in (AttemptStatus.PREPARING, AttemptStatus.UNRESPONSIVE):
            return
        rollout = self._rollout(live.name[0])
        follows = rollout.status in (RolloutStatus.PREPARING, RolloutStatus.REQUEUING)
        if rollout.attempt != live.name[1] or not follows:
            self._wake_up(live)

    # -- resources ---------------------------------------------------------------------------------------------------

    def put_resources(self, name: Id | None, resources: Json, now: int) -> Json:
        """Keep resources under a name, as its next version; without a name one is made. They are the newest then."""
        key = keys.LIGHTNING_RESOURCES + (name or f"rs-{secrets.token_hex(6)}").encode()
        stored = None if name is None else self._tape.get("lightning", key)
        at, before = seconds(now), None if stored is None else unpack(stored)
        found: Json = {
            "resources_id": key[1:].decode(),
            "create_time": at if before is None else before["create_time"],
            "update_time": at,
            "version": 1 if before is None else before["version"] + 1,
            "resources": resources,
        }
        self._tape.put("lightning", key, pack(found))
        self._tape.put("lightning", keys.LIGHTNING_LATEST, key[1:])
        return found

    def _latest_resources(self) -> Id | None:
        found = self._tape.get("lightning", keys.LIGHTNING_LATEST)
        return None if found is None else found.decode()

    # -- workers -----------------------------------------------------------------------------------------------------

    def update_worker(self, name: Id, stats: Json | None, now: int) -> Json:
        """Note a worker's sign of life."""
        found = self._stored_worker(name)
        found["last_heartbeat_time"] = seconds(now)
        if stats is not None:
            found["heartbeat_stats"] = stats
        return self._put_worker(found, now)

    def _tell_worker_of(self, name: str, live: CachedAttempt, now: int) -> None:
        word = attempt_word(status_of(live))
        lost = word in ("timeout", "unresponsive")
        self._tell_worker(name, now, None if lost or word in ("succeeded", "failed") else live.name, lost=lost)

    def _tell_worker(
        self, name: str, now: int, holds: tuple[str, str] | None, dequeued: bool = False, lost: bool = False
    ) -> None:
        """Note what a worker does. `lost`: it has lost what it held; `dequeued`: it has asked for work."""
        found, at = self._stored_worker(name), seconds(now)
        idle_already = dequeued and holds is None and found["status"] == "idle"
        if dequeued:
            found["last_dequeue_time"] = at
        if not idle_already:
            found["status"] = "busy" if holds is not None else "unknown" if lost else "idle"
            found["last_busy_time" if holds is not None else "last_idle_time"] = at
            found["current_rollout_id"], found["current_attempt_id"] = holds or (None, None)
        _ = self._put_worker(found, now)

    def _stored_worker(self, name: str) -> Json:
        stored = self._tape.get("lightning", keys.LIGHTNING_WORKER + name.encode())
        return new_worker(name) if stored is None else unpack(stored)

    def _put_worker(self, found: Json, now: int) -> Json:
        name = found["worker_id"].encode()
        self._tape.put("lightning", keys.LIGHTNING_WORKER + name, pack(found))
        stored = self._tape.get("workers", name)
        own = Worker(id=found["worker_id"], first_seen_ns=now) if stored is None else Worker.model_validate_json(stored)
        held = f"{found['current_rollout_id']}/{found['current_attempt_id']}"
        own.last_seen_ns, own.attempts = now, [held] if found["current_rollout_id"] else []
        self._tape.put("workers", name, own.model_dump_json(exclude_defaults=True).encode())
        return found

    # -- records -----------------------------------------------------------------------------------------------------

    def _answer(self, rollout: Rollout, attempt: Json | None = None) -> Json:
        return rollout_answer(rollout, self._rollout_extra(rollout.id), attempt)

    def _rollout_extra(self, name: str) -> RolloutExtra | None:
        return rollout_extra(self._tape.get("lightning", keys.LIGHTNING_ROLLOUT + keys.rollout_key(name)))

    def _put_rollout_extra(self, name: str, extra: RolloutExtra) -> None:
        self._tape.put("lightning", keys.LIGHTNING_ROLLOUT + keys.rollout_key(name), pack(extra))

    def _attempt_extra(self, key: bytes) -> AttemptExtra | None:
        return attempt_extra(self._tape.get("lightning", keys.LIGHTNING_ATTEMPT + key))

    def _put_attempt_extra(self, key: bytes, extra: AttemptExtra) -> None:
        self._tape.put("lightning", keys.LIGHTNING_ATTEMPT + key, pack(extra))


def _spec(task: LightningTask) -> RolloutSpec:
    config = RolloutConfig(max_attempts=1, retry_on=[]) if task.config is None else task.config.own()
    metadata: dict[str, Any] = task.metadata or {}
    return RolloutSpec(input=task.input, mode=own_mode(task.mode), config=config, metadata=metadata)


def rollout_extra(record: bytes | None) -> RolloutExtra | None:
    """What the tape keeps of a rollout; None for one that did not come from Agent Lightning."""
    return None if record is None else msgspec.convert(unpack(record), RolloutExtra)


def attempt_extra(record: bytes | None) -> AttemptExtra | None:
    """What the tape keeps of an attempt; None for one that did not come from Agent Lightning."""
    return None if record is None else msgspec.convert(unpack(record), AttemptExtra)
