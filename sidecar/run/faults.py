"""Faults of an agent's surroundings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.gateway.model.span import Span, SpanStatus
from penstock.gateway.model.times import Backoff

# Decides whether the surroundings of an agent ended its attempt: the gateway, or the engine behind it. Pure.
#
# An agent that fails because nothing answered it has not tried its task. Its attempt is handed back (`environment`):
# the rollout waits again, keeps all its tries, and gets no reward for failing. The surroundings are at fault in two
# cases only:
#
#     the gateway    did not answer the runner while the agent ran or when it ended
#     the engine     the newest call of the attempt ended because no upstream could be reached, it broke off in the
#                    middle, it said that it cannot serve now (502, 503, 504), or the gateway died
#
# A runner that goes on handing back the same rollout waits longer each time (`PAUSES`), and after `MOST` times the
# end counts: a wrong address does not mend itself.

MOST: Final = 30
"""How many times a runner hands back one rollout: about a quarter of an hour in all."""
PAUSES: Final = Backoff(0.5, 30.0)
"""The pauses before a worker takes more work, by how often a rollout was handed back."""
AWAY: Final = frozenset({"connect", "connect_timeout", "upstream_closed", "paused", "http_502", "http_503", "http_504"})
"""Errors of a call whose upstream is absent, or unavailable for now."""


def find_fault(calls: Sequence[Span], gateway_away: bool) -> str | None:
    """The fault of the surroundings, in words; None when the agent itself failed. `calls`: the calls of the attempt."""
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
