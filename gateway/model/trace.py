"""W3C trace context: reads a caller's `traceparent`, and derives ids for callers that sent none.

Ids are derived, not drawn: the trace id from the attempt, the span id from its place in it. They cost no bytes on the
tape and are the same whenever a span is read or exported. Source: W3C Trace Context, §3.2.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import blake2b

# Version 00 ends with the flags, later versions may continue; ff is forbidden, and so are ids of only zeros.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


@lru_cache(maxsize=1024)
def trace_id(rollout: str, attempt: str) -> str:
    """The trace id of an attempt: 32 hex digits."""
    return blake2b(f"{rollout}\0{attempt}".encode(), digest_size=16, person=b"penstock.trace").hexdigest()


def span_id(trace: str, rollout: str, attempt: str, sequence: int) -> str:
    """The span id of a call: 16 hex digits."""
    name = f"{trace}\0{rollout}\0{attempt}\0{sequence}".encode()
    return blake2b(name, digest_size=8, person=b"penstock.span").hexdigest()


def parse(traceparent: str) -> tuple[str, str] | None:
    """(trace id, parent span id) of a traceparent header; None when it is not valid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip().lower())
    return None if found is None or (found[1] == "00" and found[4]) else (found[2], found[3])
