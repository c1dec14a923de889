"""What the queue should do, once more and as plainly as possible: dictionaries, no transactions, no tape.

It is written from the documentation of `gateway.work` and `gateway.lifecycle`, not from the store, and shares nothing
with it but the tables. Every change of a status goes through `Model.move` and `Model.turn`, which look it up there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gateway.lifecycle import ATTEMPT_MOVES, FINAL, LIVE, ROLLOUT_MOVES, WAITING
from gateway.model import AttemptStatus, Mode, RolloutStatus
from gateway.work import QueueState, RolloutSpec

SECOND = 10**9
GRACE_NS = 30 * SECOND
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
    ended: int | None = None
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

    def due(self, name: Name) -> tuple[int, AttemptStatus] | None:
        """When a live attempt ends by itself, and how."""
        task, one = self.tasks[name[0]], self.attempt(name)
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
        one.status, one.ended, one.watched = status, None if status in LIVE else now, False

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

    def follow(self, task: Task, attempt: str, end: AttemptStatus, now: int) -> None:
        """The rollout goes where the end of its newest attempt sends it."""
        if task.status not in (RolloutStatus.PREPARING, RolloutStatus.RUNNING) or task.attempt not in (None, attempt):
            return
        again = task.spec is not None and end.value in task.spec.config.retry_on
        if end == AttemptStatus.SUCCEEDED:
            self.move(task, RolloutStatus.SUCCEEDED)
        elif end == AttemptStatus.CANCELLED:
            self.move(task, RolloutStatus.CANCELLED)
        elif task.spec is not None and again and task.tries < task.spec.config.max_attempts:
            self.move(task, RolloutStatus.REQUEUING)
            self.queue_again(task, attempt, now)
        else:
            self.move(task, RolloutStatus.FAILED)

    def sign_of_life(self, name: Name, now: int, lease: int) -> None:
        """Wakes an attempt that is its rollout's newest: one that prepares, one that was given up too early."""
        task, one = self.tasks[name[0]], self.attempt(name)
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

    def claim(self, worker: str, limit: int, modes: Sequence[Mode], lease: int, now: int) -> list[Name]:
        claimed: list[Name] = []
        while self.state == "open" and len(claimed) < limit and (waiting := self.queue(modes)):
            task = self.tasks[waiting[0]]
            task.tries, task.queued = task.tries + 1, False
            number = task.tries
            while f"a{number}" in task.attempts:
                number += 1
            task.attempt = f"a{number}"
            task.attempts[task.attempt] = Try(AttemptStatus.PREPARING, now, now, worker, now + lease)
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
            self.sign_of_life(name, now, lease)
        return one.status in LIVE

    def finish(
        self, name: Name, worker: str | None, end: AttemptStatus, rewards: Sequence[tuple[float, str | None]], now: int
    ) -> AttemptStatus:
        one = self.attempt(name)
        if worker is not None and one.worker not in (None, worker):
            raise No("conflict")
        if one.status == AttemptStatus.UNRESPONSIVE:
            self.call_revives(name, now)
        if one.status not in LIVE:
            self.release(name)
            if one.status != end:
                raise No("conflict")
        for place, (value, key) in enumerate(rewards):
            self.reward(name, value, key or f"finish.{place}", True)
        if one.status in LIVE:
            self.turn(one, end, now)
            one.lease = None
            self.follow(self.tasks[name[0]], name[1], end, now)
        return end

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

    def expire(self, name: Name, now: int) -> tuple[int | None, Mode | None]:
        """When to look again, and the mode of the rollout if it can be claimed again now."""
        if not self.there(name):
            return None, None
        task, one, due = self.tasks[name[0]], self.attempt(name), self.due(name)
        if one.status in LIVE:
            if due is None or due[0] > now:
                return None if due is None else due[0], None
            self.turn(one, due[1], now)
            self.follow(task, name[1], due[1], now)
        if task.status != RolloutStatus.REQUEUING or task.attempt != name[1]:
            one.watched = False
            return None, None
        if one.lease is not None and one.lease > now:
            return one.lease, None
        self.release(name)
        return None, task.spec.mode if task.spec else None

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

    def call(self, name: Name, now: int) -> None:
        """A call of this attempt has ended, whoever made it."""
        task = self.tasks.setdefault(name[0], Task(None, RolloutStatus.RUNNING, len(self.tasks)))
        one = task.attempts.setdefault(name[1], Try(AttemptStatus.RUNNING, now, now))
        one.spans += 1
        one.seen = max(one.seen, now)
        self.call_revives(name, now)

    def take_up(self, now: int, grace: int) -> None:
        """The gateway has started: workers have time to come back."""
        for name in self.live():
            one = self.attempt(name)
            one.seen = max(one.seen, now)
            if one.lease is not None:
                one.lease = max(one.lease, now + grace)
