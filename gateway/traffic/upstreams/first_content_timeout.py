"""The time limit for the first content of a model's streams, after which another upstream is used. Pure; seconds.

Nobody can tell whether a stream that has begun and is silent will ever go on; but a model that has always begun within
two seconds does not think for twenty. So the limit is three times the longest of its last streams, and never less than
twelve seconds. The last upstream of a route has no such limit, and teaches it: a model that thinks for a minute costs a
detour once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

LEAST_S: Final = 12.0
TIMES: Final = 3.0
_LAST: Final = 16
_MODELS: Final = 1000


class FirstContentTimeouts:
    """The limit for each model."""

    def __init__(self) -> None:
        self._took: OrderedDict[str, deque[float]] = OrderedDict()
        """Seconds of the last streams, by model; the model of the newest one is at the end."""

    def limit_s(self, model: str) -> float:
        """Return the seconds to wait for the first content of one more stream."""
        return max(LEAST_S, TIMES * max(self._took.get(model, ()), default=0.0))

    def observe(self, model: str, seconds: float) -> None:
        """Note that a stream of a model had its first content after this many seconds."""
        self._took.setdefault(model, deque(maxlen=_LAST)).append(seconds)
        self._took.move_to_end(model)
        if len(self._took) > _MODELS:
            _ = self._took.popitem(last=False)
