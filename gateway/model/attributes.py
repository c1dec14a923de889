"""Names of the attributes that the gateway itself gives to spans of calls.

The attributes of replays, shadows and rehearsals mark calls that were made for a release. Such a call is on the tape
like every other, but excluded from everything about agents (`gateway.model.release_calls`).
"""

from __future__ import annotations

from typing import Final

REPLAY_OF: Final = "penstock.replay_of"
"""The call that this one repeats."""
SHADOW_OF: Final = "penstock.shadow_of"
"""The live call that this one mirrors."""
LEG: Final = "penstock.leg"
"""The arm for which it repeats that call."""
BEGAN: Final = "penstock.session.began"
"""Why a session of exact tokens begins with this call."""
AMBIGUOUS: Final = "penstock.ambiguous"
"""A call without an address that could be another rollout's as well."""
TOOL: Final = "gen_ai.tool.name"
"""The tool that a span ran, by its server's own name."""
POLICY_RULE: Final = "penstock.policy.rule"
"""The rule that has decided about a tool call."""
POLICY_HARD: Final = "penstock.policy.hard"
"""Whether the violation of a policy ends the release whose candidate it happens on."""
WEBSOCKET: Final = "penstock.websocket"
"""The call came as a message on a WebSocket, and its answer is the messages after that."""
PREWARM: Final = "penstock.prewarm"
"""The call asked for no answer, only that its beginning is read already."""
UNATTRIBUTED: Final = "penstock.unattributed"
"""Something came on the call's WebSocket that may be of this answer or not, or nobody has asked for it."""
STEER_TEXT: Final = "penstock.steer.text"
"""Input that a client has sent for a response that ran."""
STEER_TARGET: Final = "penstock.steer.response_id"
"""That response."""
STEER_FATE: Final = "penstock.steer.fate"
"""What became of it: `used` by the response that came after it, `failed`, `refused` here, or `unknown`."""
WHOLE: Final = "penstock.whole"
"""True where the answer was to be passed on when all of it was there (`stream = "whole"` of its route)."""
TRIES: Final = "penstock.tries"
"""The upstreams that were asked before the one that served it: for each its name, when it was given up (milliseconds
after the call began) and why."""
LEFT_OUT: Final = "penstock.credentials.left_out"
"""The headers and parameters that did not go upstream, because another provider's key was in them."""
FOLDED: Final = "penstock.system.folded"
"""How many system messages of the call became a part of another message."""
CAPTURED: Final = "penstock.captured"
"""The names of the fields that were added to the request."""
MASKED: Final = "penstock.masked"
"""How much masking rules have found in it, by rule."""
MASKING_FAILED: Final = "penstock.masking"
"""Which masking rule could not be applied to it, and why: what it could not be applied to is not kept."""
