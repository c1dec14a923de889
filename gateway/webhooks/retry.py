"""What follows from an answer: taken, sent again later, or given up. Pure.

Standard Webhooks has it so: 2xx takes a message, 410 wants no more of them, everything else is sent again. Pauses
double, vary, and are as long as `Retry-After` asks for. A day after the change the message is sent for the last time,
but each is sent once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.gateway.model.webhook import Delivery

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 3600.0
PATIENCE_NS: Final = 24 * 3600 * 10**9
GONE: Final = 410


class Answer(NamedTuple):
    """What came of a request."""

    status: int | None
    """HTTP status; None where there was no answer."""
    error: str
    """Why the message was not taken; empty where it was."""
    after_s: float = 0.0
    """How long the receiver asks to wait."""


def pause_s(attempts: int, vary: float) -> float:
    """Seconds until the next attempt after so many. `vary`: between 0.5 and 1.5, by chance: what failed together must
    not come back together."""
    return min(FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 30), LONGEST_PAUSE_S) * vary


def after(delivery: Delivery, answer: Answer, sent_ns: int, now_ns: int, vary: float) -> Delivery:
    """The delivery after an attempt. `sent_ns`: when that began."""
    tried = delivery.model_copy(
        update={
            "attempts": delivery.attempts + 1,
            "tried_ns": sent_ns,
            "next_ns": None,
            "answer": answer.status,
            "error": answer.error,
        }
    )
    if not answer.error:
        return tried.model_copy(update={"status": "delivered"})
    tried.failing_ns = delivery.failing_ns or sent_ns
    last_ns = delivery.made_ns + PATIENCE_NS
    if answer.status == GONE or now_ns >= last_ns:
        return given_up(tried)
    seconds = max(pause_s(tried.attempts, vary), answer.after_s)
    return tried.model_copy(update={"next_ns": min(now_ns + int(seconds * 1e9), last_ns)})


def given_up(delivery: Delivery, why: str = "") -> Delivery:
    """The delivery when it will not be sent any more."""
    return delivery.model_copy(update={"status": "given_up", "next_ns": None, "error": why or delivery.error})
