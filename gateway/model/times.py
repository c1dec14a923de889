"""Lengths of time in people's notation, such as 250ms, 90s, 10m, 1.5h or 7d: one for filters and options. And the
pauses between tries (`Backoff`). Needs the standard library alone."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

UNITS: Final = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9, "d": 86400 * 10**9}
"""Nanoseconds of each unit."""
NOTATION: Final = "a number above 0 and us, ms, s, m, h or d, such as 90s, 10m or 1.5h"
_LENGTH: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(us|ms|s|m|h|d)")


def nanoseconds(text: str) -> int | None:
    """A length of time in nanoseconds; None when the text is none."""
    match = _LENGTH.fullmatch(text)
    return round(float(match[1]) * UNITS[match[2]]) if match else None


def seconds(option: str, text: str) -> float:
    """The length of time in an option's value, above 0; s. Raises `ValueError`, which names the option."""
    found = nanoseconds(text)
    if not found:
        raise ValueError(f"{option}: {text!r} is not a time: {NOTATION}")
    return found / 10**9


class Backoff(NamedTuple):
    """The pauses between tries of what fails: each is twice as long as the one before."""

    first_s: float
    longest_s: float

    def after(self, failures: int, vary: float = 1.0) -> float:
        """Return the seconds to wait after so many failures in a row. `vary`: a random factor, so that what failed
        together does not come back together."""
        return min(self.first_s * 2.0 ** min(failures - 1, 30), self.longest_s) * vary
