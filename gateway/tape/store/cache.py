"""The writer's memory between transactions: attempts with their sums, and bodies that later ones are stored against.

All of it is on the tape too and is read back when it is needed again, so it may be dropped at any time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.gateway.model.rollout import Rollout
from penstock.gateway.tape.store import codec, keys
from penstock.gateway.tape.store.codec import DeltaBase
from penstock.gateway.tape.store.records import Origins

_KEYFRAMES = 64
SHARED_BY = 1000
"""Rollouts that one shared body serves. Then another is made, so that forgetting a rollout looks at few others."""
_MORE = 1024
"""Bytes that a new shared body must save beyond those that the best existing one saves."""
_ROLLOUTS = 4096
_SIGNATURE = 160
_WORTH = 256
_OVERHEAD = 2048
"""Estimated bytes of an attempt without its base, with a block of the index."""
K = TypeVar("K")


@dataclass(slots=True)
class CachedAttempt:
    """An attempt: its stored values, changed in place."""

    name: tuple[str, str]
    values: list[Any]
    """The values of `records.ATTEMPT`, in its order."""
    key: bytes
    """Prefix of the keys of its summaries."""
    origins: Origins
    """The number and the creation time of its rollout."""
    base: DeltaBase | None = None
    """The body that its next one may be stored against: its last one if `newest` is not 0."""
    sought: bool = False
    """True if its base was read back from the tape, or if the tape has none."""
    failed: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Sequences of its calls that failed and were not repeated yet, by the hash of their requests: the newest of
    them."""
    newest: int = 0
    """Sequence of the call whose body is the base, or of the call that it repeated; 0 if later bodies may exist."""
    dirty: bool = False
    block: int = 0
    """Number of its last block of the index."""
    cursors: list[int] = field(default_factory=list[int])
    """The cursors of that block; they are stored with the attempt."""
    stored: bytes | None = None
    """Its record, as it was last written or read."""
    turn: int = 0
    """The value of `TapeTables._turn` up to which `stored` is known to be its record."""
    outdated: bool = False
    """True if the tape has a newer record. Its base may still be used."""
    record_key: bytes = field(init=False)
    """Key of its record, and prefix of the keys of its blocks."""

    def __post_init__(self) -> None:
        self.record_key = keys.attempt_record_key(self.origins.number, self.name[1])


@dataclass(slots=True)
class CachedRollout:
    """A rollout, and the names of its attempts in order."""

    rollout: Rollout
    attempts: list[str]
    number: int = 0
    """The cursor of its creation; 0 until it has been made."""

    @property
    def origins(self) -> Origins:
        """The values that the records of its attempts are relative to."""
        return Origins(self.number, self.rollout.created_ns)


@dataclass(slots=True)
class SharedBody:
    """A shared body: text that several rollouts have in common."""

    base: DeltaBase
    left: int = SHARED_BY
    """Number of further rollouts that it may serve."""


class WriterCache:
    """Recent attempts, rollouts, keyframes and shared bodies."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of bodies kept between transactions; keyframes take at most as much again."""
        self._limit = limit
        self._size = 0
        self._live: OrderedDict[tuple[str, str], CachedAttempt] = OrderedDict()
        self._keyframes: OrderedDict[bytes, tuple[str, DeltaBase]] = OrderedDict()
        """Keyframes by signature, each with the name of its rollout."""
        self._shared: OrderedDict[bytes, SharedBody] = OrderedDict()
        self._rollouts: OrderedDict[str, CachedRollout] = OrderedDict()

    def clear(self) -> None:
        self._size = 0
        self._live.clear()
        self._keyframes.clear()
        self._shared.clear()
        self._rollouts.clear()

    def rollout(self, name: str) -> CachedRollout | None:
        """Return a remembered rollout and mark it as recently used; None when it is not remembered."""
        known = self._rollouts.get(name)
        if known is not None:
            self._rollouts.move_to_end(name)
        return known

    def add_rollout(self, known: CachedRollout) -> None:
        self._rollouts[known.rollout.id] = known

    def find(self, name: tuple[str, str]) -> CachedAttempt | None:
        """Return a remembered attempt and mark it as recently used; None when it is not remembered."""
        live = self._live.get(name)
        if live is not None:
            self._live.move_to_end(name)
        return live

    def add(self, live: CachedAttempt) -> None:
        self._live[live.name] = live
        self._size += _OVERHEAD + (0 if live.base is None else live.base.size)

    def evict(self) -> None:
        """Drop the least recently used entries; only between transactions, when everything is written."""
        while self._size > self._limit and self._live:
            self._let_go(self._live.popitem(last=False)[1])
        while len(self._rollouts) > _ROLLOUTS:
            self._rollouts.popitem(last=False)

    def _let_go(self, live: CachedAttempt) -> None:
        self._size -= _OVERHEAD + (0 if live.base is None else live.base.size)

    def base(self, live: CachedAttempt, request: bytes) -> DeltaBase | SharedBody | bytes | None:
        """Return the body that this request of the attempt is stored against: one of its rollout, a shared one, or the
        text of a shared one that is worth making. None for a keyframe."""
        last = live.base
        if last is not None and last.depth < codec.DEPTH and last.depth * len(request) < codec.CHAIN:
            return last
        known = self._alike(self._keyframes, request, lambda one: one[1])
        if known is not None and known[0] == live.name[0]:
            return known[1]
        shared = self._alike(self._shared, request, lambda one: one.base)
        if known is not None:
            prefix, suffix = codec.common_affixes(known[1].request, request)
            spared = 0 if shared is None else sum(codec.common_affixes(shared.base.request, request))
            if prefix + suffix >= spared + (0 if shared is None else _MORE):
                theirs = known[1].request
                return theirs[:prefix] + theirs[len(theirs) - suffix :]
        return shared

    def drop(self, name: tuple[str, str]) -> CachedAttempt | None:
        """Drop an attempt and return it; its rollout and keyframes stay."""
        live = self._live.pop(name, None)
        if live is not None:
            self._let_go(live)
        return live

    def invalidate(self, name: tuple[str, str]) -> None:
        """Mark an attempt as changed by another process."""
        if (live := self._live.get(name)) is not None:
            live.outdated = True

    def drop_rollout(self, name: str) -> None:
        """Drop a rollout with the names of its attempts; the attempts themselves stay."""
        self._rollouts.pop(name, None)

    def set_base(self, live: CachedAttempt, base: DeltaBase) -> None:
        """Keep this body as the base of the attempt's next one."""
        self._size += base.size - (0 if live.base is None else live.base.size)
        live.base = base
        if not base.depth and base.size <= self._limit // _KEYFRAMES:
            _remember(self._keyframes, base.request, (live.name[0], base))

    def add_shared(self, base: DeltaBase) -> SharedBody:
        """Keep a shared body for all requests that begin or end as it does."""
        made = SharedBody(base)
        _remember(self._shared, base.request, made)
        return made

    def use_shared(self, shared: SharedBody) -> DeltaBase:
        """Count one more use of a shared body and return it as a base; it is dropped after its last use."""
        shared.left -= 1
        if not shared.left:
            self.forget_shared({shared.base.number})
        return shared.base

    def forget(self, rollout: str, attempts: Iterable[str]) -> None:
        """Drop a rollout, these attempts of it and its keyframes."""
        for attempt in attempts:
            self.drop((rollout, attempt))
        self.drop_rollout(rollout)
        for key in [key for key, (owner, _) in self._keyframes.items() if owner == rollout]:
            del self._keyframes[key]

    def attempts_of(self, rollouts: Container[str]) -> Mapping[str, Sequence[str]]:
        """Return the remembered attempts of these rollouts, by rollout; it scans all remembered attempts."""
        found = defaultdict[str, list[str]](list)
        for rollout, attempt in self._live:
            if rollout in rollouts:
                found[rollout].append(attempt)
        return found

    def forget_shared(self, numbers: Container[int]) -> None:
        """Drop the shared bodies with these numbers."""
        for key in [key for key, one in self._shared.items() if one.base.number in numbers]:
            del self._shared[key]

    def clear_shared(self) -> None:
        self._shared.clear()

    def _alike(self, known: OrderedDict[bytes, K], request: bytes, base: Callable[[K], DeltaBase]) -> K | None:
        """Return a remembered body that shares enough with the request to store it against; None when there is none."""
        for signature in _signatures(request):
            found = known.get(signature)
            if found is not None and _alike(base(found).request, request):
                known.move_to_end(signature)
                return found
        return None


def _remember(known: OrderedDict[bytes, K], request: bytes, one: K) -> None:
    for signature in _signatures(request):
        known[signature] = one
        known.move_to_end(signature)
    while len(known) > _KEYFRAMES:
        known.popitem(last=False)


def _signatures(request: bytes) -> tuple[bytes, bytes]:
    return b"^" + request[:_SIGNATURE], b"$" + request[-_SIGNATURE:]


def _alike(a: bytes, b: bytes) -> bool:
    if codec.common_prefix(a, b) >= _WORTH:
        return True
    return codec.common_suffix(a, b, min(_WORTH, len(a), len(b))) >= _WORTH
