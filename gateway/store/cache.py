"""What the writer remembers between transactions: attempts with their sums, and bodies that later ones are stored
against.

All of it is on the tape too and is read back when it is needed again, so it may be dropped at any time.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from penstock.gateway.model.rollout import Rollout
from penstock.gateway.store import codec, keys
from penstock.gateway.store.codec import Base
from penstock.gateway.store.records import Origins

_KEYFRAMES = 64
_ROLLOUTS = 4096
_SIGNATURE = 160
_WORTH = 256
_OVERHEAD = 2048
"""A block of the index included."""


@dataclass(slots=True)
class CachedAttempt:
    """An attempt: the stored record, changed in place."""

    name: tuple[str, str]
    values: list[Any]
    """The values of `records.ATTEMPT`, in its order."""
    key: bytes
    """What the keys of its summaries start with."""
    origins: Origins
    """Number and beginning of its rollout."""
    base: Base | None = None
    newest: int = 0
    """Sequence of the call whose body is the base, or of the call that it repeated."""
    dirty: bool = False
    block: int = 0
    """Which block of the index is its last."""
    cursors: list[int] = field(default_factory=list[int])
    """That block; it is stored with the attempt."""

    @property
    def place(self) -> bytes:
        """Key of its record, and what the keys of its blocks start with."""
        return keys.place_key(self.origins.number, self.name[1])


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


class Memory:
    """Recent attempts, rollouts and keyframes."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of bodies kept between transactions; keyframes take at most as much again."""
        self._limit = limit
        self._size = 0
        self._live: OrderedDict[tuple[str, str], CachedAttempt] = OrderedDict()
        self._keyframes: OrderedDict[bytes, Base] = OrderedDict()
        self._rollouts: OrderedDict[str, CachedRollout] = OrderedDict()

    def clear(self) -> None:
        """Forgets everything."""
        self._size = 0
        self._live.clear()
        self._keyframes.clear()
        self._rollouts.clear()

    def rollout(self, name: str) -> CachedRollout | None:
        """A rollout that is remembered."""
        known = self._rollouts.get(name)
        if known is not None:
            self._rollouts.move_to_end(name)
        return known

    def add_rollout(self, known: CachedRollout) -> None:
        """Remembers a rollout."""
        self._rollouts[known.rollout.id] = known

    def find(self, name: tuple[str, str]) -> CachedAttempt | None:
        """An attempt that is remembered."""
        live = self._live.get(name)
        if live is not None:
            self._live.move_to_end(name)
        return live

    def add(self, live: CachedAttempt) -> None:
        """Remembers an attempt."""
        self._live[live.name] = live
        self._size += _OVERHEAD + (0 if live.base is None else live.base.size)

    def shed(self) -> None:
        """Drops what was not used for longest; only between transactions, when everything is written."""
        while self._size > self._limit and self._live:
            _, live = self._live.popitem(last=False)
            self._size -= _OVERHEAD + (0 if live.base is None else live.base.size)
        while len(self._rollouts) > _ROLLOUTS:
            self._rollouts.popitem(last=False)

    def base(self, live: CachedAttempt, request: bytes) -> Base | None:
        """The body that this request of the attempt is stored against."""
        if live.base is not None and live.base.carries(request):
            return live.base
        return self._keyframe(request)

    def keep(self, live: CachedAttempt, base: Base) -> None:
        """Keeps this body as the base of the attempt's next one."""
        self._size += base.size - (0 if live.base is None else live.base.size)
        live.base = base
        if not base.depth and base.size <= self._limit // _KEYFRAMES:
            self._keep_keyframe(base)

    def _keyframe(self, request: bytes) -> Base | None:
        """A keyframe of any attempt that shares enough with the request to store it against."""
        for signature in _signatures(request):
            base = self._keyframes.get(signature)
            if base is not None and _alike(base.request, request):
                self._keyframes.move_to_end(signature)
                return base
        return None

    def _keep_keyframe(self, base: Base) -> None:
        for signature in _signatures(base.request):
            self._keyframes[signature] = base
            self._keyframes.move_to_end(signature)
        while len(self._keyframes) > _KEYFRAMES:
            self._keyframes.popitem(last=False)


def _signatures(request: bytes) -> tuple[bytes, bytes]:
    return b"^" + request[:_SIGNATURE], b"$" + request[-_SIGNATURE:]


def _alike(a: bytes, b: bytes) -> bool:
    if codec.common_prefix(a, b) >= _WORTH:
        return True
    return codec.common_suffix(a, b, min(_WORTH, len(a), len(b))) >= _WORTH
