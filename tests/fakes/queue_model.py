"""What the queue should do, once more and as plainly as possible: dictionaries, no transactions, no tape.

It is written from the documentation of `gateway.model.queue` and `gateway.model.rollout`, not from the store, and
shares nothing with it but the tables. Every change of a status goes through `Model.move` and `Model.turn`, which look
it up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.gateway.model.base import Mode
from penstock.gateway.model.queue import QueueState, RolloutSpec
from penstock.gateway.model.rollout import (
    ATTEMPT_MOVES,
    FINAL,
    LIVE,
    ROLLOUT_MOVES,
    WAITING,
    AttemptStatus,
    RolloutStatus,
)

SECOND = 10**9
GRACE_NS = 30 * SECOND
QUIET_S = 25
"""How long an attempt that nobody has claimed may be silent."""
MODES: tuple[Mode, ...] = ("train", "val", "test", "online")
Name = tuple[str, str]


class No(Exception):
    """It is refused, for this kind of reason."""


@dataclass
class Try:
    """An attempt."""

    status: AttemptStatus
    created: int
    seen: int
    worker: str | None = None
    lease: int | None = None
    spans: int = 0
    reward: float | None = None
    on_failure: float | None = None
    """What its worker has it rewarded with if the rollout fails."""
    ended: int | None = None
    broken: bool = False
    """Its last call has failed."""
    quiet: bool = False
    """It has ended because nothing was heard of it."""
    watched: bool = False
    """It has ended and the next attempt waits until its worker has let go of it."""
    keys: set[tuple[bool, str]] = field(default_factory=set[tuple[bool, str]])


@dataclass
class Task:
    """A rollout."""

    spec: RolloutSpec | None
    status: RolloutStatus
    order: int
    queued: bool = False
    """Whether it can be claimed now."""
    tries: int = 0
    attempt: str | None = None
    attempts: dict[str, Try] = field(default_factory=dict[str, Try])


class Model:
    """All that should be on the tape."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.state: QueueState = "open"
        self.workers: dict[str, set[Name]] = {}
        """Those who were heard of, and what they have named last."""

    # -- what is there -------------------------------------------------------------------------------------------------

    def task(self, name: str) -> Task:
        if name not in self.tasks:
            raise No("not_found")
        return self.tasks[name]

    def attempt(self, name: Name) -> Try:
        if name[1] not in self.task(name[0]).attempts:
            raise No("not_found")
        return self.tasks[name[0]].attempts[name[1]]

    def names(self) -> list[Name]:
        return [(name, attempt) for name, task in self.tasks.items() for attempt in task.attempts]

    def queue(self, modes: Iterable[Mode] = MODES) -> list[str]:
        """Who waits, the next first."""
        wanted = set(modes)
        waiting = [(task, name) for name, task in self.tasks.items() if task.queued]
        urgent = [(-t.spec.priority, t.order, name) for t, name in waiting if t.spec and t.spec.mode in wanted]
        return [name for _, _, name in sorted(urgent)]

    def live(self) -> set[Name]:
        """Attempts that were claimed and have not ended, or that the next one waits for."""
        return {name for name in self.names() if self.claimed(name) or self.attempt(name).watched}

    def claimed(self, name: Name) -> bool:
        """Whether it is in a worker's hands."""
        one = self.attempt(name)
        return one.status in LIVE and one.worker is not None

    def unclaimed(self) -> set[Name]:
        """Attempts that run and that nobody has claimed."""
        return {
            name for name in self.names() if self.attempt(name).worker is None and self.attempt(name).status in LIVE
        }

    def due(self, name: Name) -> tuple[int, AttemptStatus] | None:
        """When a live attempt ends by itself, and how."""
        task, one = self.tasks[name[0]], self.attempt(name)
        if one.worker is None:
            return one.seen + QUIET_S * SECOND, AttemptStatus.FAILED if one.broken else AttemptStatus.ENDED
        ends: list[tuple[int, AttemptStatus]] = []
        config = None if task.spec is None else task.spec.config
        if config is not None and config.timeout_s is not None:
            ends.append((one.created + round(config.timeout_s * SECOND), AttemptStatus.TIMEOUT))
        if config is not None and config.unresponsive_s is not None:
            ends.append((one.seen + round(config.unresponsive_s * SECOND), AttemptStatus.UNRESPONSIVE))
        if one.lease is not None:
            ends.append((one.lease, AttemptStatus.UNRESPONSIVE))
        return min(ends, default=None)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move(self, task: Task, status: RolloutStatus) -> None:
        assert status in ROLLOUT_MOVES[task.status], f"{task.status} -> {status}"
        task.status = status

    def turn(self, one: Try, status: AttemptStatus, now: int) -> None:
        assert status in ATTEMPT_MOVES[one.status], f"{one.status} -> {status}"
        one.status, one.ended, one.watched, one.quiet = status, None if status in LIVE else now, False, False

    def queue_again(self, task: Task, attempt: str, now: int) -> None:
        """At once, or when the worker of the last attempt must have killed its agent."""
        one = task.attempts[attempt]
        if one.lease is not None and one.lease > now:
            one.watched = True
        else:
            task.queued = True

    def release(self, name: Name) -> None:
        """A worker has nothing to do any more with what has ended."""
        task, one = self.tasks[name[0]], self.attempt(name)
        one.watched, one.lease = False, None
        if task.status == RolloutStatus.REQUEUING and task.attempt == name[1]:
            task.queued = True

    def decides(self, task: Task, attempt: str) -> bool:
        """Whether the rollout goes where the end of this attempt sends it."""
        return task.status in (RolloutStatus.PREPARING, RolloutStatus.RUNNING) and task.attempt in (None, attempt)

    def again(self, task: Task, end: AttemptStatus) -> bool:
        """Whether another attempt follows this end."""
        if task.spec is None or end == AttemptStatus.ENVIRONMENT:
            return task.spec is not None
        return end.value in task.spec.config.retry_on and task.tries < task.spec.config.max_attempts

    def follow(self, task: Task, attempt: str, end: AttemptStatus, now: int) -> None:
        """The rollout goes where the end of its newest attempt sends it."""
        if not self.decides(task, attempt):
            return
        if end == AttemptStatus.SUCCEEDED:
            self.move(task, RolloutStatus.SUCCEEDED)
        elif end == AttemptStatus.CANCELLED:
            self.move(task, RolloutStatus.CANCELLED)
        elif self.again(task, end):
            self.move(task, RolloutStatus.REQUEUING)
            self.queue_again(task, attempt, now)
        else:
            self.move(task, RolloutStatus.FAILED)

    def reward_failure(self, task: Task, attempt: str, end: AttemptStatus) -> bool:
        """The last attempt of a rollout that fails is rewarded as it was said, where nobody has rewarded it."""
        one = task.attempts[attempt]
        value = None if task.spec is None else task.spec.config.reward_on_failure
        value = one.on_failure if value is None else value
        bad = end in (AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE)
        if (
            value is None
            or one.reward is not None
            or not bad
            or not self.decides(task, attempt)
            or self.again(task, end)
        ):
            return False
        one.spans, one.reward = one.spans + 1, value
        return True

    def sign_of_life(self, name: Name, now: int, lease: int) -> None:
        """Wakes an attempt that is its rollout's newest: one that prepares, one that was given up too early."""
        task, one = self.tasks[name[0]], self.attempt(name)
        if one.quiet:
            self.turn(one, AttemptStatus.RUNNING, now)
            self.run_on(task)
            return
        if task.attempt != name[1]:
            return
        if one.status == AttemptStatus.PREPARING and task.status == RolloutStatus.PREPARING:
            self.turn(one, AttemptStatus.RUNNING, now)
            self.move(task, RolloutStatus.RUNNING)
        elif one.status == AttemptStatus.UNRESPONSIVE and task.status == RolloutStatus.REQUEUING:
            before, one.lease = one.lease, lease
            due = self.due(name)
            if due is not None and due[0] <= now:
                one.lease = before
                return
            task.queued = False
            self.turn(one, AttemptStatus.RUNNING, now)
            self.move(task, RolloutStatus.RUNNING)

    def run_on(self, task: Task) -> None:
        """An attempt that nobody has claimed has shown itself: its rollout runs, unless somebody has said its end."""
        told = any(one.ended is not None and not one.quiet for one in task.attempts.values())
        if task.spec is None and task.status in (RolloutStatus.ENDED, RolloutStatus.FAILED) and not told:
            self.move(task, RolloutStatus.RUNNING)

    # -- operations: what they answer, or `No` -------------------------------------------------------------------------

    def enqueue(self, specs: Sequence[RolloutSpec]) -> list[tuple[str, bool]]:
        """(name, whether it is new) of each; all of them or none."""
        given: dict[str, RolloutSpec] = {}
        for spec in specs:
            name = spec.id or ""
            there = self.tasks.get(name)
            if there is not None:
                known = there.spec
                if known is None or (known.input, known.mode, known.group) != (spec.input, spec.mode, spec.group):
                    raise No("conflict")
            elif given.setdefault(name, spec) != spec:
                raise No("conflict")
        return [(spec.id or "", self._add(spec)) for spec in specs]

    def _add(self, spec: RolloutSpec) -> bool:
        if spec.id in self.tasks:
            return False
        self.tasks[spec.id or ""] = Task(spec, RolloutStatus.QUEUING, len(self.tasks), queued=True)
        return True

    def claim(
        self, worker: str, limit: int, modes: Sequence[Mode], lease: int, now: int, on_failure: float | None = None
    ) -> list[Name]:
        claimed: list[Name] = []
        while self.state == "open" and len(claimed) < limit and (waiting := self.queue(modes)):
            task = self.tasks[waiting[0]]
            task.tries, task.queued = task.tries + 1, False
            number = task.tries
            while f"a{number}" in task.attempts:
                number += 1
            task.attempt = f"a{number}"
            made = Try(AttemptStatus.PREPARING, now, now, worker, now + lease, on_failure=on_failure)
            task.attempts[task.attempt] = made
            self.move(task, RolloutStatus.PREPARING)
            claimed.append((waiting[0], task.attempt))
        return claimed

    def give_back(self, names: Sequence[Name], now: int) -> None:
        """Nobody has received what was claimed."""
        for name in names:
            task, one = self.task(name[0]), self.attempt(name)
            if one.status == AttemptStatus.PREPARING and task.attempt == name[1]:
                self.turn(one, AttemptStatus.CANCELLED, now)
                self.move(task, RolloutStatus.REQUEUING)
                one.lease, task.queued, task.tries = None, True, task.tries - 1

    def heartbeat(self, worker: str, held: Sequence[tuple[Name, bool]], lease: int, now: int) -> list[bool]:
        """Whether each is still the worker's."""
        answers = [self._renew(worker, name, running, now + lease, now) for name, running in held]
        names = {name for name, _ in held}
        for name in self.workers.get(worker, set()) - names:
            if self.there(name) and self.attempt(name).worker == worker and self.attempt(name).status not in LIVE:
                self.release(name)
        self.workers[worker] = names
        return answers

    def there(self, name: Name) -> bool:
        """Whether there is such an attempt."""
        return name[0] in self.tasks and name[1] in self.tasks[name[0]].attempts

    def _renew(self, worker: str, name: Name, running: bool, lease: int, now: int) -> bool:
        if not self.there(name) or self.attempt(name).worker != worker:
            return False
        one = self.attempt(name)
        if one.status in LIVE:
            one.lease = lease
        if running or one.status == AttemptStatus.UNRESPONSIVE:
            # What its worker relies on is never cut short by a revival.
            self.sign_of_life(name, now, max(one.lease or 0, lease))
        return one.status in LIVE

    def finish(
        self, name: Name, worker: str | None, end: AttemptStatus, rewards: Sequence[tuple[float, str | None]], now: int
    ) -> AttemptStatus:
        one, task = self.attempt(name), self.tasks[name[0]]
        if worker is not None and one.worker not in (None, worker):
            raise No("conflict")
        if end == AttemptStatus.ENVIRONMENT and one.worker is None:
            raise No("conflict")
        if one.status == AttemptStatus.UNRESPONSIVE or one.quiet:
            self.call_revives(name, now)
        if end == AttemptStatus.ENVIRONMENT and one.status == AttemptStatus.FAILED:
            self.hand_back(task, name[1], now)
            return end
        if one.status not in LIVE:
            self.release(name)
            if one.status != end:
                raise No("conflict")
        for place, (value, key) in enumerate(rewards):
            self.reward(name, value, key or f"finish.{place}", True)
        if one.status in LIVE:
            self.reward_failure(task, name[1], end)
            self.turn(one, end, now)
            one.lease = None
            task.tries -= end == AttemptStatus.ENVIRONMENT
            self.follow(task, name[1], end, now)
        return end

    def hand_back(self, task: Task, attempt: str, now: int) -> None:
        """What had failed was no try."""
        one = task.attempts[attempt]
        self.turn(one, AttemptStatus.ENVIRONMENT, one.ended or 0)
        one.reward = None
        task.tries -= 1
        if task.status == RolloutStatus.FAILED and task.attempt == attempt:
            self.move(task, RolloutStatus.REQUEUING)
            self.queue_again(task, attempt, now)

    def call_revives(self, name: Name, now: int) -> None:
        """A sign of life that brings no lease of its own."""
        self.sign_of_life(name, now, max(self.attempt(name).lease or 0, now + GRACE_NS))

    def reward(self, name: Name, value: float, key: str | None, trusted: bool) -> None:
        one = self.attempt(name)
        if key is not None and (trusted, key) in one.keys:
            return
        if key is not None:
            one.keys.add((trusted, key))
        one.spans += 1
        if trusted:
            one.reward = value

    def expire(self, name: Name, now: int) -> tuple[int | None, Mode | None, str | None]:
        """When to look again, the mode of the rollout if it can be claimed again now, and the source of a reward."""
        if not self.there(name):
            return None, None, None
        task, one, due = self.tasks[name[0]], self.attempt(name), self.due(name)
        if one.status in LIVE:
            if due is None or due[0] > now:
                return None if due is None else due[0], None, None
            if one.worker is None:
                self.end_quietly(task, one, due[1])
                return None, None, None
            rewarded = "rule" if self.reward_failure(task, name[1], due[1]) else None
            self.turn(one, due[1], now)
            self.follow(task, name[1], due[1], now)
            return (*self.look_at_ended(task, name, now), rewarded)
        return (*self.look_at_ended(task, name, now), None)

    def look_at_ended(self, task: Task, name: Name, now: int) -> tuple[int | None, Mode | None]:
        """Its rollout can be claimed when its worker must have killed its agent."""
        one = self.attempt(name)
        if task.status != RolloutStatus.REQUEUING or task.attempt != name[1]:
            one.watched = False
            return None, None
        if one.lease is not None and one.lease > now:
            return one.lease, None
        self.release(name)
        return None, task.spec.mode if task.spec else None

    def end_quietly(self, task: Task, one: Try, end: AttemptStatus) -> None:
        """It has ended when it was heard of last; its rollout like the attempt that was heard of last."""
        self.turn(one, end, one.seen)
        one.quiet = True
        others = any(other.status in LIVE for other in task.attempts.values())
        if task.spec is None and task.status == RolloutStatus.RUNNING and not others:
            last = max(task.attempts.values(), key=lambda other: other.seen)
            self.move(task, RolloutStatus.FAILED if last.broken else RolloutStatus.ENDED)

    def cancel(self, name: str, now: int) -> None:
        task = self.task(name)
        if task.status == RolloutStatus.CANCELLED:
            return
        if task.status in FINAL:
            raise No("conflict")
        for one in task.attempts.values():
            if one.status in LIVE:
                self.turn(one, AttemptStatus.CANCELLED, now)
        task.queued = False
        self.move(task, RolloutStatus.CANCELLED)

    def requeue(self, name: str, now: int) -> None:
        task = self.task(name)
        if task.spec is None:
            raise No("conflict")
        if task.status in WAITING:
            return
        if task.status not in FINAL:
            raise No("conflict")
        self.move(task, RolloutStatus.REQUEUING)
        if task.attempt is None:
            task.queued = True
        else:
            self.queue_again(task, task.attempt, now)

    def call(self, name: Name, now: int, fails: bool = False) -> None:
        """A call of this attempt has ended, whoever made it."""
        task = self.tasks.setdefault(name[0], Task(None, RolloutStatus.RUNNING, len(self.tasks)))
        if name[1] not in task.attempts:
            task.attempts[name[1]] = Try(AttemptStatus.RUNNING, now, now)
            self.run_on(task)
        one = task.attempts[name[1]]
        one.spans, one.broken = one.spans + 1, fails
        one.seen = max(one.seen, now)
        self.call_revives(name, now)

    def take_up(self, now: int, grace: int) -> None:
        """The gateway has started: workers have time to come back."""
        for name in self.live():
            one = self.attempt(name)
            one.seen = max(one.seen, now)
            if one.lease is not None:
                one.lease = max(one.lease, now + grace)
