"""The header `Retry-After` (RFC 9110, 10.2.3): how long a client should wait. Pure."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time


def retry_after(value: str | None, longest_s: float) -> float | None:
    """Seconds to wait, at most `longest_s`; the header holds a number of them, or a date. None if it cannot be read."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(value or "").timestamp() - time())
        except (ValueError, OverflowError):
            return None
    # NaN is not >= 0 either.
    return min(seconds, longest_s) if seconds >= 0 else None
