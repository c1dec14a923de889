"""Operations on the queue and its rollouts, inside a write transaction.

Each is one method of `QueueOperations` and decides by the tables of `gateway.model.rollout`. It checks everything
that can be refused before it writes anything, so a refusal changes nothing and the other operations of the transaction
stand.

An attempt that is handed back does not count as a try, and its rollout is in the queue again.

An attempt that the clock or a person has ended may still run at its worker. Its rollout is `requeuing` then, but joins
the queue only when the worker has let go of the attempt (by `finish`) or its lease is over. By then the worker must
have killed the agent, so nothing runs twice at the same time.

Two other classes have the rest: `SpanOperations` keeps rewards and other spans that are no calls, `DeadlineOperations`
ends attempts whose deadline has passed.

Operations and calls go through one queue in order: when one has been committed, so has every call that ended before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.gateway.model.base import ActionRequest, Mode
from penstock.gateway.model.known_secrets import Secrets, with_distinct_keys
from penstock.gateway.model.queue import (
    EnqueueResult,
    HeartbeatRequest,
    HeldAttempt,
    LeaseAnswer,
    QueueState,
    RewardAnswer,
    RolloutSpec,
)
from penstock.gateway.model.rollout import (
    FINAL,
    LIVE,
    WAITING,
    AttemptStatus,
    Judgement,
    Outcome,
    Reward,
    RewardSource,
    Rollout,
    RolloutStatus,
    Worker,
    after_attempt,
    quiet_deadline,
)
from penstock.gateway.tape.store import audit_log, keys, records
from penstock.gateway.tape.store.cache import CachedAttempt, CachedRollout
from penstock.gateway.tape.store.records import SpanEntry
from penstock.gateway.tape.store.transaction import OperationRefusedError, Transaction
from penstock.gateway.wire.http import redaction
from penstock.gateway.work.queue import (
    MODES,
    AttemptRecords,
    ClaimedAttempt,
    DeadlineCheck,
    FinishResult,
    attempt_of,
    deadline,
    decides,
    ended_quietly,
    get,
    put,
    status_of,
)

# -- rewards and other spans that are no calls ------------------------------------------------------------------------


class SpanOperations(AttemptRecords):
    """The operations on spans in one transaction."""

    def reward(self, name: tuple[str, str], judgement: Judgement, trusted: bool, now: int) -> tuple[RewardAnswer, bool]:
        """Keep a reward; returns its answer, and True if it is new. A reward whose key the attempt has already seen was
        kept then."""
        live = self._attempt(name)
        check_span(live, judgement)
        sequence, reward, new = self.judge(live, judgement, trusted, now)
        answer = RewardAnswer(sequence=sequence, trusted=reward.trusted, late=reward.late, reward=get(live, "reward"))
        return answer, new

    def judge(
        self, live: CachedAttempt, judgement: Judgement, trusted: bool, now: int, known_new: bool = False
    ) -> tuple[int, Reward, bool]:
        """Write a reward's span; returns (the span's sequence, the reward, True if it is new). `known_new` skips the
        search for its key."""
        late = status_of(live) not in LIVE
        reward = Reward(**dict(judgement), trusted=trusted, late=late)
        # An agent's reward must not keep a trusted one with the same key out.
        key = None if reward.key is None else live.key + (b"t" if trusted else b"u") + _digest(reward.key)
        earlier = None if key is None or known_new else self._tape.get("rewards", key)
        if earlier is not None:
            return int.from_bytes(earlier), reward, False
        entry = SpanEntry(*live.name, kind="reward", name="reward", method="", status="ok", start_ns=now, end_ns=now)
        secrets = self._tape.secrets.for_call()
        entry.attributes = without_secrets(reward, secrets).attributes() | secrets.span_attributes
        self._tape.record(entry, seen_ns=0)
        if key is not None:
            self._tape.put("rewards", key, keys.u32(entry.sequence))
        if reward.trusted and reward.value is not None:
            put(live, reward=reward.value)
            self._tape.touch_and_log(live)
        return entry.sequence, reward, True

    def reward_failure(self, rollout: Rollout, live: CachedAttempt, end: AttemptStatus, now: int) -> bool:
        """Give the attempt whose end fails the rollout the configured `reward_on_failure`, unless it has a reward
        already. Returns True if it did. An attempt ends once, so this happens once."""
        own = rollout.config.reward_on_failure
        value = get(live, "reward_on_failure") if own is None else own
        fails = after_attempt(end, rollout.tries, rollout.config) == RolloutStatus.FAILED
        if value is None or not (fails and decides(rollout, live)) or get(live, "reward") is not None:
            return False
        reason = f"reward_on_failure: it ended as {end}"
        self.judge(live, Judgement(value=value, source="rule", reason=reason), True, now)
        return True

    def add(self, entries: Sequence[SpanEntry], now: int, known: bool = False) -> list[int]:
        """Add spans that are no calls; returns their sequences. `known`: refuse spans of attempts that do not exist."""
        for name in {(entry.rollout, entry.attempt) for entry in entries} if known else ():
            self._attempt(name)
        made = [self.masked(entry) for entry in entries]
        for entry in made:
            self._tape.record(entry, seen_ns=now)
        return [entry.sequence for entry in made]

    def masked(self, entry: SpanEntry) -> SpanEntry:
        """A copy of a span as it may be kept; the original may still be read."""
        secrets, said = self._tape.secrets.for_call(), entry.attributes
        kept: dict[str, Any] | None = None if said is None else secrets.json(redaction.attributes(said))
        name, error = secrets.texts(
            [None if it is None else redaction.plain_text(it) for it in (entry.name, entry.error)]
        )
        if secrets.span_attributes:
            kept = (kept or {}) | secrets.span_attributes
        return replace(entry, sequence=0, name=name, error=error, attributes=kept)


def _digest(key: str) -> bytes:
    """A hash that stands for the key of a reward, which may contain text that must not be on the tape."""
    return hashlib.sha256(key.encode()).hexdigest().encode()


def without_secrets(reward: Reward, secrets: Secrets) -> Reward:
    """A reward without secrets. Numbers and values of a fixed set stay as they are, or it would be no reward any
    more."""
    reason, key = secrets.texts((reward.reason, reward.key))
    dimensions = with_distinct_keys((secrets.text(name), score) for name, score in reward.dimensions.items())
    return reward.model_copy(update={"reason": reason, "key": key, "dimensions": dimensions})


def check_span(live: CachedAttempt, judgement: Judgement) -> None:
    spans = get(live, "spans")
    if judgement.span is not None and judgement.span > spans:
        message = f"attempt {'/'.join(live.name)} has no span {judgement.span}: the last is {spans}"
        raise OperationRefusedError("invalid", message, "span", str(judgement.span))


FORGOTTEN_NS = 24 * 3600 * 10**9
"""Time after its last heartbeat at which a worker is forgotten; ns."""
_STATES: dict[QueueState, str] = {"open": "open_queue", "paused": "pause_queue", "draining": "drain_queue"}
"""The audit log's name for the change to each state."""


class QueueOperations(AttemptRecords):
    """The operations on the queue in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._spans = SpanOperations(transaction)

    # -- giving work -------------------------------------------------------------------------------------------------

    def enqueue(self, specs: Sequence[tuple[str, RolloutSpec]], now: int) -> list[EnqueueResult]:
        """Queue tasks by name. A rollout that exists under a name with the same content is left alone, one with another
        content is refused."""
        seen: dict[str, RolloutSpec] = {}
        present: dict[str, Rollout] = {}
        for place, (name, spec) in enumerate(specs):
            found = self._known(name)
            if found is not None:
                _same(place, name, spec, found)
                present[name] = found
            elif seen.setdefault(name, spec) != spec:
                raise _taken(place, name, "another rollout of this request")
            else:
                self._check_versions(place, spec)
        made: list[EnqueueResult] = []
        for name, spec in specs:
            created = name not in present
            if created:
                present[name] = self._enqueue(name, spec, now)
            made.append(EnqueueResult(id=name, status=present[name].status, created=created))
        return made

    def _check_versions(self, place: int, spec: RolloutSpec) -> None:
        """Refuse a version that is not registered."""
        for resource, version in spec.config.versions.items():
            if self._tape.get("resources", keys.attempt_key(resource, version)) is None:
                message = (
                    f"rollouts[{place}].config.versions: there is no version {version!r} of a resource {resource!r}; "
                    f"`penstock resource list` lists them, `penstock resource add {resource}` registers one"
                )
                raise OperationRefusedError(
                    "invalid", message, f"rollouts[{place}].config.versions.{resource}", version
                )

    def _enqueue(self, name: str, spec: RolloutSpec, now: int) -> Rollout:
        rollout = Rollout(
            id=name,
            origin="queued",
            mode=spec.mode,
            status=RolloutStatus.QUEUING,
            created_ns=now,
            input=spec.input,
            group=spec.group,
            metadata=spec.metadata,
            priority=spec.priority,
            config=spec.config,
        )
        rollout.place = self._tape.add_rollout(CachedRollout(rollout, []))
        self._tape.put_rollout(rollout)
        task = records.task_record(spec.input, spec.metadata)
        if task is not None:
            self._tape.put("tasks", keys.rollout_key(name), task)
        self._join_queue(rollout)
        return rollout

    def cancel(self, name: str, said: ActionRequest | None, now: int) -> Rollout:
        """End a rollout that waits or runs; one that was cancelled already stays so. `said`: None where the gateway
        itself cancels it, without a request."""
        rollout = self._rollout(name)
        if rollout.status == RolloutStatus.CANCELLED:
            return rollout.model_copy()
        if rollout.status in FINAL:
            raise OperationRefusedError("conflict", f"rollout {name!r} has {rollout.status} already", "rid", name)
        for attempt in self._attempts(name):
            live = self._live(name, attempt)
            if live is not None and status_of(live) in LIVE:
                self._end_attempt(live, AttemptStatus.CANCELLED, now, Outcome(reason="its rollout was cancelled"))
        self._leave_queue(rollout)
        self._move(rollout, RolloutStatus.CANCELLED, now)
        if said is not None:
            audit_log.write(self._tape, said, "cancel_rollout", name, now)
        return rollout.model_copy()

    def requeue(self, name: str, said: ActionRequest | None, now: int) -> Rollout:
        """Queue again a rollout that has ended. `said`: see `cancel`."""
        rollout = self._rollout(name)
        if rollout.origin != "queued":
            raise OperationRefusedError(
                "conflict", f"rollout {name!r} did not come from the queue: it has no task", "rid", name
            )
        if rollout.status in WAITING:
            return rollout.model_copy()
        if rollout.status not in FINAL:
            raise OperationRefusedError(
                "conflict", f"rollout {name!r} is {rollout.status}: cancel it first", "rid", name
            )
        self._move(rollout, RolloutStatus.REQUEUING, now)
        if rollout.attempt is None:
            self._join_queue(rollout)
        else:
            self._queue_again(rollout, self._attempt((name, rollout.attempt)), now)
        if said is not None:
            audit_log.write(self._tape, said, "requeue_rollout", name, now)
        return rollout.model_copy()

    def set_state(self, state: QueueState, said: ActionRequest, now: int) -> None:
        """Open, pause or drain the queue."""
        if state != self._waiting.state:
            audit_log.write(self._tape, said, _STATES[state], "", now)
        self._tape.put("meta", b"queue", state.encode())
        self._waiting.state = state

    def note(self, name: str, value: bytes) -> None:
        """Keep a small value under a name, for a part of the gateway that must find it again after a restart."""
        self._tape.put("meta", b"note " + name.encode(), value)

    # -- doing it ----------------------------------------------------------------------------------------------------

    def claim(
        self,
        worker: str,
        limit: int,
        modes: Iterable[Mode] | None,
        lease_ns: int,
        now: int,
        reward_on_failure: float | None = None,
    ) -> list[ClaimedAttempt]:
        """Hand out the next rollouts; none while the queue is not open."""
        wanted = [MODES.index(mode) for mode in modes or MODES]
        claimed: list[ClaimedAttempt] = []
        while self._waiting.state == "open" and len(claimed) < limit:
            found = self._waiting.next(wanted)
            if found is None:
                break
            claimed.append(self.begin_attempt(found[1], worker, now + lease_ns, now, reward_on_failure))
        return claimed

    def hand_out(self, name: str, spec: RolloutSpec, worker: str, lease_ns: int, now: int) -> ClaimedAttempt:
        """Hand out this task and no other, again if it has ended. It is in the queue within this transaction only, so
        no other worker can claim it."""
        if self._known(name) is None:
            self._enqueue(name, spec, now)
        else:
            self.requeue(name, None, now)
        return self.begin_attempt(name, worker, now + lease_ns, now)

    def begin_attempt(
        self,
        name: str,
        worker: str,
        lease_ns: int | None,
        now: int,
        reward_on_failure: float | None = None,
        attempt: str | None = None,
    ) -> ClaimedAttempt:
        """Give a rollout that waits to a worker. `lease_ns`: when the worker loses it, None for never; `attempt`: a
        name that is free."""
        rollout = self._rollout(name)
        self._leave_queue(rollout)
        rollout.tries += 1
        rollout.attempt = attempt or self._free_name(rollout)
        live = self._tape.attempt(SpanEntry(name, rollout.attempt, start_ns=now))
        put(live, status=AttemptStatus.PREPARING, worker=worker, lease_ns=lease_ns, last_seen_ns=now)
        put(live, reward_on_failure=reward_on_failure)
        self._tape.put("live", live.key, b"")
        self._tape.touch(live)
        self._move(rollout, RolloutStatus.PREPARING, now)
        return ClaimedAttempt(rollout.model_copy(), attempt_of(live))

    def _free_name(self, rollout: Rollout) -> str:
        """The first of `a1`, `a2` ... from the number of tries on that is free: an agent may have used such a name
        itself."""
        taken, number = self._attempts(rollout.id), rollout.tries
        while f"a{number}" in taken:
            number += 1
        return f"a{number}"

    def heartbeat(
        self, worker: str, asked: HeartbeatRequest, lease_ns: int, now: int, finished: int = 0
    ) -> list[LeaseAnswer]:
        """Renew a worker's leases, and return for each attempt if it is still held. `finished`: number of attempts that
        the worker has finished since its last heartbeat."""
        answers = [self._renew(worker, one, lease_ns, now) for one in asked.attempts]
        known = self._worker(worker, now)
        if asked.complete:
            names = [f"{one.rollout}/{one.attempt}" for one in asked.attempts]
            for name in set(known.attempts) - set(names):
                self._let_go(worker, name)
            known.attempts, known.figures = names, asked.figures
        known.last_seen_ns = now
        known.finished += finished
        self._tape.put("workers", worker.encode(), known.model_dump_json(exclude_defaults=True).encode())
        return answers

    def _renew(self, worker: str, held: HeldAttempt, lease_ns: int, now: int) -> LeaseAnswer:
        live = self._live(held.rollout, held.attempt)
        status = None if live is None else status_of(live)
        if live is not None and get(live, "worker") == worker:
            if status in LIVE:
                put(live, lease_ns=now + lease_ns)
                self._tape.touch(live)
            if held.running or status == AttemptStatus.UNRESPONSIVE:
                self.sign_of_life(live, now, lease_ns)
            status = status_of(live)
            return LeaseAnswer(rollout=held.rollout, attempt=held.attempt, held=status in LIVE, status=status)
        return LeaseAnswer(rollout=held.rollout, attempt=held.attempt, held=False, status=status)

    def _let_go(self, worker: str, name: str) -> None:
        """Release an attempt that its worker no longer names; if it had ended before, another attempt may begin."""
        live = self._live(*name.split("/"))
        if live is not None and get(live, "worker") == worker and status_of(live) not in LIVE:
            self._release(live)

    def _worker(self, name: str, now: int) -> Worker:
        stored = self._tape.get("workers", name.encode())
        if stored is not None:
            return Worker.model_validate_json(stored)
        for key, record in list(self._tape.scan("workers")):
            if Worker.model_validate_json(record).last_seen_ns < now - FORGOTTEN_NS:
                self._tape.delete("workers", key)
        return Worker(id=name, first_seen_ns=now)

    def finish(
        self,
        name: tuple[str, str],
        worker: str | None,
        end: AttemptStatus,
        outcome: Outcome,
        rewards: Sequence[tuple[Judgement, bool]],
        now: int,
        events: Sequence[SpanEntry] = (),
    ) -> FinishResult:
        """End an attempt with its last events and its rewards (each with True if it is trusted). The same end may be
        sent again: its events and rewards are not kept twice."""
        live, outcome = self._attempt(name), self._outcome(outcome)
        holder = get(live, "worker")
        if worker is not None and holder is not None and worker != holder:
            raise OperationRefusedError(
                "conflict", f"attempt {'/'.join(name)} is held by worker {holder!r}", "worker", worker
            )
        for judgement, _ in rewards:
            check_span(live, judgement)
        if end == AttemptStatus.ENVIRONMENT and holder is None:
            message = f"attempt {'/'.join(name)} was not claimed, so it cannot be handed back; finish it as failed"
            raise OperationRefusedError("conflict", message, "status", end)
        if status_of(live) == AttemptStatus.UNRESPONSIVE or ended_quietly(live):
            self.sign_of_life(live, now)
        if end == AttemptStatus.ENVIRONMENT and status_of(live) == AttemptStatus.FAILED:
            _ = self._spans.add(events, now)
            return self._hand_back(live, outcome, now)
        ended = status_of(live) not in LIVE
        if ended:
            self._release(live)
        if ended and status_of(live) != end:
            raise OperationRefusedError(
                "conflict", f"attempt {'/'.join(name)} has ended as {status_of(live)}", "status", end
            )
        # The clock may have ended the attempt; the end that its worker reports counts.
        more = get(live, "outcome") is None or get(live, "outcome")[records.OUTCOME.index("duration_ns")] is None
        if not ended or (more and outcome.duration_ns is not None):
            _ = self._spans.add(events, now)
        rewarded: list[RewardSource] = []
        for place, (judgement, trusted) in enumerate(rewards):
            # Rewards of a repeated end are not kept again.
            made = judgement.key is None
            keyed = judgement.model_copy(update={"key": f"finish.{place}"}) if made else judgement
            if self._spans.judge(live, keyed, trusted, now, known_new=made and not ended)[2]:
                rewarded.append(judgement.source)
        rollout = self._rollout(name[0])
        if not ended:
            put(live, lease_ns=None)
            if self._spans.reward_failure(rollout, live, end, now):
                rewarded.append("rule")
            self._end_attempt(live, end, now, outcome)
            rollout.tries -= end == AttemptStatus.ENVIRONMENT
            self._follow(rollout, live, end, now)
        elif more:
            put(live, outcome=records.outcome_values(outcome))
            self._tape.touch_and_log(live)
        made = FinishResult(rollout.model_copy(), attempt_of(live), None if ended else end, rewarded)
        return made if ended else replace(made, by=holder)

    def _outcome(self, said: Outcome) -> Outcome:
        """The outcome as it may be kept: without keys, which agents print."""
        secrets = self._tape.secrets
        told = {"reason": secrets.texts([said.reason])[0], "output": secrets.json(said.output)}
        return said.model_copy(update=told)

    def _hand_back(self, live: CachedAttempt, outcome: Outcome, now: int) -> FinishResult:
        """Take back a failed attempt that was no try, as its worker reports later. Its rewards do not count, and its
        rollout waits again if this attempt had ended it."""
        rollout = self._rollout(live.name[0])
        self._end_attempt(live, AttemptStatus.ENVIRONMENT, get(live, "ended_ns"), outcome)
        put(live, reward=None)
        rollout.tries -= 1
        if rollout.status == RolloutStatus.FAILED and rollout.attempt == live.name[1]:
            self._move(rollout, RolloutStatus.REQUEUING, now)
            self._queue_again(rollout, live, now)
        else:
            self._write_rollout(rollout)
        return FinishResult(rollout.model_copy(), attempt_of(live), AttemptStatus.ENVIRONMENT, [])

    def give_back(self, names: Iterable[tuple[str, str]], now: int) -> None:
        """Take back claimed attempts that could not be handed over: they do not count as tries."""
        for name in names:
            live, rollout = self._attempt(name), self._rollout(name[0])
            if status_of(live) != AttemptStatus.PREPARING or rollout.attempt != name[1]:
                continue
            put(live, lease_ns=None)
            self._end_attempt(live, AttemptStatus.CANCELLED, now, Outcome(reason="its worker left before it had it"))
            rollout.tries -= 1
            self._move(rollout, RolloutStatus.REQUEUING, now)
            self._join_queue(rollout)


_GIVEN = ("input", "mode", "group", "metadata", "priority", "config")


def _same(place: int, name: str, spec: RolloutSpec, present: Rollout) -> None:
    """Refuse a name that another task has."""
    if present.origin != "queued":
        raise _taken(place, name, "a rollout that did not come from the queue")
    for field in _GIVEN:
        if getattr(present, field) != getattr(spec, field):
            raise _taken(place, name, f"a rollout with another {field}")


def _taken(place: int, name: str, by: str) -> OperationRefusedError:
    message = f"rollouts[{place}].id: {name!r} is the name of {by}; choose another"
    return OperationRefusedError("conflict", message, f"rollouts[{place}].id", name)


# -- ends by the clock ---------------------------------------------------------------------------------------------

_STATUS, _SEEN, _WORKER = map(records.ATTEMPT.index, ("status", "last_seen_ns", "worker"))
_REASONS = {
    AttemptStatus.TIMEOUT: "it took longer than config.timeout_s",
    AttemptStatus.UNRESPONSIVE: "nothing was heard of it in time",
}


class DeadlineOperations(AttemptRecords):
    """The operations of the clock in one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        super().__init__(transaction)
        self._spans = SpanOperations(transaction)

    def expire(self, names: Iterable[tuple[str, str]], now: int, quiet_s: float) -> list[DeadlineCheck]:
        """End the attempts whose deadline has passed. `quiet_s`: seconds that an attempt that nobody has claimed may be
        silent."""
        return [self._expire(name, now, quiet_s) for name in names]

    def _expire(self, name: tuple[str, str], now: int, quiet_s: float) -> DeadlineCheck:
        if (again := self._not_quiet_yet(name, now, quiet_s)) is not None:
            return DeadlineCheck(*name, again, unclaimed=True)
        live = self._live(*name)
        if live is None:
            return DeadlineCheck(*name, None)
        rollout = self._rollout(name[0])
        if status_of(live) not in LIVE:
            return self._look_at_ended(live, rollout, now)
        if self._calling(live):
            # An agent that waits for an answer is not silent.
            put(live, last_seen_ns=max(now, get(live, "last_seen_ns")))
        if get(live, "worker") is None:
            quiet = quiet_deadline(get(live, "last_seen_ns"), quiet_s)
            if quiet > now:
                return DeadlineCheck(*name, quiet, unclaimed=True)
            return DeadlineCheck(*name, None, ended=self._end_quietly(live, rollout))
        due = deadline(rollout, live)
        if due is None or due[0] > now:
            return DeadlineCheck(*name, None if due is None else due[0])
        rewarded = self._spans.reward_failure(rollout, live, due[1], now)
        self._end_attempt(live, due[1], now, Outcome(reason=_REASONS[due[1]]))
        self._follow(rollout, live, due[1], now)
        looked = self._look_at_ended(live, rollout, now)
        return looked._replace(ended=due[1], rewarded="rule" if rewarded else None)

    def _not_quiet_yet(self, name: tuple[str, str], now: int, quiet_s: float) -> int | None:
        """The time at which to check an unclaimed attempt again, if it had a sign of life meanwhile; else None. Most of
        them had one, and there may be very many, so that this costs as little as possible."""
        values = self._tape.peek(name)
        if values is None or values[_WORKER] is not None or values[_STATUS] not in LIVE:
            return None
        due = quiet_deadline(values[_SEEN], quiet_s)
        return due if due > now else None

    def _calling(self, live: CachedAttempt) -> bool:
        """True while the attempt has a call in flight."""
        return self._tape.has_running_call(live.key)

    def _look_at_ended(self, live: CachedAttempt, rollout: Rollout, now: int) -> DeadlineCheck:
        """Keep the next attempt waiting until the lease is over, because the worker may still have to kill the
        agent."""
        lease = get(live, "lease_ns")
        if rollout.status != RolloutStatus.REQUEUING or rollout.attempt != live.name[1]:
            self._forget(live)
            return DeadlineCheck(*live.name, None)
        if lease is not None and lease > now:
            return DeadlineCheck(*live.name, lease)
        self._release(live)
        return DeadlineCheck(*live.name, None, requeued=rollout.mode)

    def adopt(self, names: Iterable[tuple[str, str]], now: int, grace_ns: int) -> list[tuple[str, str, int | None]]:
        """(rollout, attempt, time of the next check) of those of these attempts, handed out by an earlier process, that
        still live. Leases are extended so that workers have time to come back."""
        found: list[tuple[str, str, int | None]] = []
        for name in names:
            live = self._live(*name)
            if live is None or self._tape.get("live", live.key) is None:
                continue  # The attempt has ended since.
            lease = get(live, "lease_ns")
            if lease is not None and lease < now + grace_ns:
                put(live, lease_ns=now + grace_ns)
            # While there was no gateway, it could not notice signs of life.
            put(live, last_seen_ns=max(now, get(live, "last_seen_ns")))
            self._tape.touch(live)
            due = deadline(self._rollout(name[0]), live)
            found.append((*name, now if status_of(live) not in LIVE else None if due is None else due[0]))
        return found
