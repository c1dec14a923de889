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
    keys: set[tuple[bool, str]] = field(default_factory=set[tuple[bool, str]])


@dataclass
class Task:
    """A rollout."""

    spec: RolloutSpec | None
    status: RolloutStatus
    order: int
    tries: int = 0
    attempt: str | None = None
    attempts: dict[str, Try] = field(default_factory=dict[str, Try])


class Model:
    """All that should be on the tape."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.state: QueueState = "open"
        self.finished: dict[str, int] = {}
        """Attempts that each worker that was heard of has finished."""

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
        waiting = [(task, name) for name, task in self.tasks.items() if task.status in WAITING]
        urgent = [(-t.spec.priority, t.order, name) for t, name in waiting if t.spec and t.spec.mode in wanted]
        return [name for _, _, name in sorted(urgent)]

    def live(self) -> set[Name]:
        """Attempts that were claimed and have not ended."""
        return {name for name in self.names() if (t := self.attempt(name)).status in LIVE and t.worker is not None}

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
        one.status, one.ended = status, None if status in LIVE else now

    def follow(self, task: Task, attempt: str, end: AttemptStatus) -> None:
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
        else:
            self.move(task, RolloutStatus.FAILED)

    def sign_of_life(self, name: Name, now: int) -> None:
        """Wakes an attempt that is its rollout's newest: one that prepares, one that was given up too early."""
        task, one = self.tasks[name[0]], self.attempt(name)
        if task.attempt != name[1]:
            return
        if one.status == AttemptStatus.PREPARING and task.status == RolloutStatus.PREPARING:
            self.turn(one, AttemptStatus.RUNNING, now)
            self.move(task, RolloutStatus.RUNNING)
        elif one.status == AttemptStatus.UNRESPONSIVE and task.status == RolloutStatus.REQUEUING:
            before, one.lease = one.lease, max(one.lease or 0, now + GRACE_NS)
            due = self.due(name)
            if due is not None and due[0] <= now:
                one.lease = before
                return
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
        self.tasks[spec.id or ""] = Task(spec, RolloutStatus.QUEUING, len(self.tasks))
        return True

    def claim(self, worker: str, limit: int, modes: Sequence[Mode], lease: int, now: int) -> list[Name]:
        claimed: list[Name] = []
        while self.state == "open" and len(claimed) < limit and (waiting := self.queue(modes)):
            task = self.tasks[waiting[0]]
            task.tries += 1
            number = task.tries
            while f"a{number}" in task.attempts:
                number += 1
            task.attempt = f"a{number}"
            task.attempts[task.attempt] = Try(AttemptStatus.PREPARING, now, now, worker, now + lease)
            self.move(task, RolloutStatus.PREPARING)
            claimed.append((waiting[0], task.attempt))
        return claimed

    def heartbeat(self, worker: str, held: Sequence[tuple[Name, bool]], lease: int, now: int) -> list[bool]:
        """Whether each is still the worker's."""
        self.finished.setdefault(worker, 0)
        return [self._renew(worker, name, running, now + lease, now) for name, running in held]

    def _renew(self, worker: str, name: Name, running: bool, lease: int, now: int) -> bool:
        if name[0] not in self.tasks or name[1] not in self.tasks[name[0]].attempts:
            return False
        one = self.attempt(name)
        if one.worker != worker:
            return False
        one.lease = lease
        if running or one.status == AttemptStatus.UNRESPONSIVE:
            self.sign_of_life(name, now)
        return one.status in LIVE

    def finish(
        self, name: Name, worker: str | None, end: AttemptStatus, rewards: Sequence[tuple[float, str | None]], now: int
    ) -> AttemptStatus:
        one = self.attempt(name)
        if worker is not None and one.worker not in (None, worker):
            raise No("conflict")
        if one.status == AttemptStatus.UNRESPONSIVE:
            self.sign_of_life(name, now)
        if one.status == end:
            return end
        if one.status not in LIVE:
            raise No("conflict")
        for value, key in rewards:
            self.reward(name, value, key, True)
        self.turn(one, end, now)
        if one.worker in self.finished:
            self.finished[one.worker] += 1
        self.follow(self.tasks[name[0]], name[1], end)
        return end

    def reward(self, name: Name, value: float, key: str | None, trusted: bool) -> None:
        one = self.attempt(name)
        if key is not None and (trusted, key) in one.keys:
            return
        if key is not None:
            one.keys.add((trusted, key))
        one.spans += 1
        if trusted:
            one.reward = value

    def expire(self, name: Name, now: int) -> bool:
        """Whether it has ended now."""
        if name[0] not in self.tasks or name[1] not in self.tasks[name[0]].attempts:
            return False
        one, due = self.attempt(name), self.due(name)
        if one.status not in LIVE or due is None or due[0] > now:
            return False
        self.turn(one, due[1], now)
        self.follow(self.tasks[name[0]], name[1], due[1])
        return True

    def cancel(self, name: str, now: int) -> None:
        task = self.task(name)
        if task.status == RolloutStatus.CANCELLED:
            return
        if task.status in FINAL:
            raise No("conflict")
        for one in task.attempts.values():
            if one.status in LIVE:
                self.turn(one, AttemptStatus.CANCELLED, now)
        self.move(task, RolloutStatus.CANCELLED)

    def requeue(self, name: str) -> None:
        task = self.task(name)
        if task.spec is None:
            raise No("conflict")
        if task.status in WAITING:
            return
        if task.status not in FINAL:
            raise No("conflict")
        self.move(task, RolloutStatus.REQUEUING)

    def call(self, name: Name, now: int) -> None:
        """A call of this attempt has ended, whoever made it."""
        task = self.tasks.setdefault(name[0], Task(None, RolloutStatus.RUNNING, len(self.tasks)))
        one = task.attempts.setdefault(name[1], Try(AttemptStatus.RUNNING, now, now))
        one.spans += 1
        one.seen = max(one.seen, now)
        self.sign_of_life(name, now)

    def take_up(self, now: int, grace: int) -> None:
        """The gateway has started: workers have time to come back."""
        for name in self.live():
            one = self.attempt(name)
            one.lease = max(one.lease or 0, now + grace)
