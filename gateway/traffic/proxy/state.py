"""The states of a call as a table of moves. Pure.

    planning      its destination and its changes are being decided. Ends in the same turn of the loop
    waiting       for something other than its upstream: the reading of its conversation, the tape, weights that change,
                  an adapter that is loaded, the tools of a rehearsal, a free place at an MCP server
    connecting    to an upstream
    sent          its request is written; nothing has come back
    streaming     its answer is passed on as it comes
    ending        its record is complete, and the recorder has it
    ended         the recorder has reported whether it was recorded

Until a byte of the answer has been passed on, a call can go back to planning: for the next upstream, or for the same
one once more. If a wait ends after the client has left, the call is already ending, and nothing happens.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class CallState(IntEnum):
    """The states of a call. From `ENDING` on, nothing can change its record."""

    PLANNING = 0
    WAITING = 1
    CONNECTING = 2
    SENT = 3
    STREAMING = 4
    ENDING = 5
    ENDED = 6


MOVES: Final[dict[CallState, dict[CallState, str]]] = {
    CallState.PLANNING: {
        CallState.WAITING: "something is needed that is not there yet",
        CallState.CONNECTING: "an upstream was chosen",
        CallState.SENT: "an idle connection to it was taken",
        CallState.STREAMING: "no upstream is left: the refusal of one of them is passed on",
        CallState.ENDING: "refused, the client left, the gateway stops",
    },
    CallState.WAITING: {
        CallState.PLANNING: "it is there",
        CallState.ENDING: "answered by the gateway, refused, the client left, the gateway stops",
    },
    CallState.CONNECTING: {
        CallState.SENT: "connected",
        CallState.PLANNING: "unreachable: the next upstream, or this one when its weights have changed",
        CallState.ENDING: "unreachable, the client left, the gateway stops",
    },
    CallState.SENT: {
        CallState.STREAMING: "the head of the answer came",
        CallState.PLANNING: "broke off before it answered, silent, down, lacks an adapter: another one, or once more",
        CallState.ENDING: "broke off, silent for too long, the client left, the gateway stops",
    },
    CallState.STREAMING: {
        CallState.ENDING: "complete, broke off, silent for too long, the client left, the gateway stops"
    },
    CallState.ENDING: {CallState.ENDED: "recorded, or lost"},
    CallState.ENDED: {},
}
"""State -> next state -> cause. Every move of a call is one of these."""
