"""The header `Retry-After` (RFC 9110, 10.2.3): how long a server asks to be left alone. Pure."""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from time import time


def retry_after(value: str | None, longest_s: float) -> float:
    """Seconds, at most `longest_s`: the header has a number of them, or a date. 0 when there is none that can be
    read."""
    try:
        seconds = 0.0 if value is None else float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value or "").timestamp() - time()
        except ValueError:
            seconds = 0.0
    # What is no number at all is neither smaller nor larger.
    return min(seconds, longest_s) if seconds > 0 else 0.0
