"""The effect of an answer on a delivery: taken, sent again later, or given up. Pure.

By Standard Webhooks 2xx takes a message, 410 wants no more of them, everything else is sent again. Pauses double, vary,
and are as long as `Retry-After` asks for. A day after the change the message is sent for the last time, but each is
sent once.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from penstock.gateway.model.times import Backoff
from penstock.gateway.model.webhook import Delivery

PAUSES: Final = Backoff(1.0, 3600.0)
PATIENCE_NS: Final = 24 * 3600 * 10**9
GONE: Final = 410


class DeliveryResult(NamedTuple):
    """The result of a request."""

    status: int | None
    """HTTP status; None where there was no answer."""
    error: str
    """The reason why the message was not taken; empty where it was."""
    after_s: float = 0.0
    """Seconds that the receiver asks to wait."""


def apply_result(delivery: Delivery, answer: DeliveryResult, sent_ns: int, now_ns: int, vary: float) -> Delivery:
    """Return the delivery after an attempt, which began at `sent_ns`. `vary`: a random factor between 0.5 and 1.5."""
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
        return give_up(tried)
    seconds = max(PAUSES.after(tried.attempts, vary), answer.after_s)
    return tried.model_copy(update={"next_ns": min(now_ns + int(seconds * 1e9), last_ns)})


def give_up(delivery: Delivery, why: str = "") -> Delivery:
    """Return the delivery as given up."""
    return delivery.model_copy(update={"status": "given_up", "next_ns": None, "error": why or delivery.error})
