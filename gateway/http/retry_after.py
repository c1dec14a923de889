"""The header `Retry-After` (RFC 9110, 10.2.3): how long a server asks to be left alone. Pure."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time


def retry_after(value: str | None, longest_s: float) -> float | None:
    """Seconds, at most `longest_s`: the header has a number of them, or a date. None when there is none that can be
    read."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            seconds = max(0.0, parsedate_to_datetime(value or "").timestamp() - time())
        except (ValueError, OverflowError):
            return None
    # What is no number at all is neither smaller nor larger.
    return min(seconds, longest_s) if seconds >= 0 else None
