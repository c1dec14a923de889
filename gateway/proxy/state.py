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


class State(IntEnum):
    """The states of a call. From `ENDING` on, nothing can change its record."""

    PLANNING = 0
    WAITING = 1
    CONNECTING = 2
    SENT = 3
    STREAMING = 4
    ENDING = 5
    ENDED = 6


MOVES: Final[dict[State, dict[State, str]]] = {
    State.PLANNING: {
        State.WAITING: "something is needed that is not there yet",
        State.CONNECTING: "an upstream was chosen",
        State.SENT: "an idle connection to it was taken",
        State.STREAMING: "no upstream is left: the refusal of one of them is passed on",
        State.ENDING: "refused, the client left, the gateway stops",
    },
    State.WAITING: {
        State.PLANNING: "it is there",
        State.ENDING: "answered by the gateway, refused, the client left, the gateway stops",
    },
    State.CONNECTING: {
        State.SENT: "connected",
        State.PLANNING: "unreachable: the next upstream, or this one when its weights have changed",
        State.ENDING: "unreachable, the client left, the gateway stops",
    },
    State.SENT: {
        State.STREAMING: "the head of the answer came",
        State.PLANNING: "broke off before it answered, silent, down, lacks an adapter: another one, or once more",
        State.ENDING: "broke off, silent for too long, the client left, the gateway stops",
    },
    State.STREAMING: {State.ENDING: "complete, broke off, silent for too long, the client left, the gateway stops"},
    State.ENDING: {State.ENDED: "recorded, or lost"},
    State.ENDED: {},
}
"""State -> next state -> cause. Every move of a call is one of these."""
