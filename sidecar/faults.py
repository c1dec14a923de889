"""Was it what stands around the agent that ended its attempt: the gateway, or the engine behind it? Pure.

An agent that fails because nobody answered it has made no try at its task. Its attempt is handed back (`environment`):
the rollout waits again, keeps all its tries, and nobody is punished. This is certain in two cases only:

    the gateway    did not answer the runner while the agent ran or when it ended
    the engine     the newest call of the attempt ended because no upstream could be reached, it broke off in the
                   middle, it said that it cannot serve now (502, 503, 504), or the gateway died

A runner that goes on handing back the same rollout waits longer each time (`pause_s`), and after `MOST` times the end
counts: an address that is wrong is no passing fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.gateway.model.span import Span, SpanStatus

MOST: Final = 30
"""Times that one rollout is handed back by a runner: about a quarter of an hour."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
AWAY: Final = frozenset({"connect", "connect_timeout", "upstream_closed", "paused", "http_502", "http_503", "http_504"})
"""Errors of a call to an upstream that is not there, or not now."""


def fault(calls: Sequence[Span], gateway_away: bool) -> str | None:
    """What failed around an agent that has failed, in words; None where it was the agent. `calls`: the attempt's."""
    if gateway_away:
        return "the gateway was away"
    newest = max(calls, key=lambda span: span.sequence, default=None)
    if newest is None:
        return None
    if newest.status == SpanStatus.INTERRUPTED:
        return f"the gateway went away during call #{newest.sequence}"
    if newest.status == SpanStatus.ERROR and newest.error in AWAY:
        return f"the engine did not answer call #{newest.sequence} ({newest.error})"
    return None


def pause_s(times: int) -> float:
    """How long a worker waits before it takes more work, after a rollout was handed back so many times; s."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (times - 1))
