"""How long to wait for the first content of a model's streams, before another upstream is asked. Pure; seconds.

Whether a stream that has begun and says nothing will ever go on, nobody can tell; but a model that has always begun to
speak within two seconds does not think for twenty. So the limit is three times the longest of its last streams, and
never less than twelve seconds. The last upstream of a route is waited for without this limit, and teaches it: a model
that thinks for a minute costs a detour once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

LEAST_S: Final = 12.0
TIMES: Final = 3.0
_LAST: Final = 16
_MODELS: Final = 1000


class Patience:
    """With each model."""

    def __init__(self) -> None:
        self._took: OrderedDict[str, deque[float]] = OrderedDict()
        """Of its last streams, by model; the one that was heard of last is at the end."""

    def limit_s(self, model: str) -> float:
        """How long to wait for one more stream."""
        return max(LEAST_S, TIMES * max(self._took.get(model, ()), default=0.0))

    def took(self, model: str, seconds: float) -> None:
        """A stream of it has said something after so long."""
        self._took.setdefault(model, deque(maxlen=_LAST)).append(seconds)
        self._took.move_to_end(model)
        if len(self._took) > _MODELS:
            _ = self._took.popitem(last=False)
