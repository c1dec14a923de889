"""Webhooks for a terminal. Pure, as `console.views.rollouts` is."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from penstock.console.views.table import Column, Listing, figure
from penstock.console.views.text import age, ago, duration, plain
from penstock.gateway.model.webhook import Delivery, WebhookTestResult, WebhookView

WEBHOOKS = (
    Column("webhook"), Column("state"), figure("waiting"), Column("last taken"), Column("what", 1), Column("failing"),
    Column("next try", 2), figure("given up", 3), Column("why", narrows="fold", least=16), Column("where", 0),
)  # fmt: skip
DELIVERIES = (
    figure("#", 3), Column("when", 2), Column("release"), Column("event"), figure("entry", 1), Column("state"),
    figure("tries"), Column("last try", 4), Column("next try", 5), figure("answer", 6),
    Column("why", narrows="fold", least=16),
)  # fmt: skip
_STATES = {"waiting": "yellow", "delivered": "green", "given_up": "red"}


def webhooks(rows: Iterable[WebhookView], now_ns: int) -> Listing:
    """A line for each webhook."""
    made = Listing(*WEBHOOKS)
    for one in rows:
        state = Text("ok", style="green") if one.failing_ns is None else Text("failing", style="red")
        last = ("", "") if one.last is None else (_ago(one.last.tried_ns, now_ns), _what(one.last))
        failing, then = _ago(one.failing_ns, now_ns), _until(one.next_ns, now_ns)
        numbers = f"{one.waiting:,}", f"{one.given_up:,}"
        made.add_row(
            plain(one.name), state, numbers[0], *map(plain, last), failing, then, numbers[1], plain(one.error),
            plain(one.url),
        )  # fmt: skip
    return made


def deliveries(rows: Iterable[Delivery], now_ns: int) -> Listing:
    """A line for each delivery."""
    made = Listing(*DELIVERIES)
    for one in rows:
        state = Text(one.status.replace("_", " "), style=_STATES[one.status])
        answer = "" if one.answer is None else str(one.answer)
        times = _ago(one.tried_ns, now_ns), _until(one.next_ns, now_ns)
        made.add_row(
            str(one.number), ago(one.made_ns, now_ns), plain(one.release), one.event.replace("_", " "),
            str(one.entry), state, f"{one.attempts:,}", *times, answer, plain(one.error),
        )  # fmt: skip
    return made


def tried(one: WebhookTestResult) -> Text:
    """The answer to a test, in a sentence."""
    answer = "no answer" if one.answer is None else f"answer {one.answer}"
    return plain(f"{one.webhook}: {answer} after {duration(int(one.seconds * 1e9))}, id {one.id}")


def _what(delivery: Delivery) -> str:
    return f"{delivery.event.replace('_', ' ')} of {delivery.release}"


def _ago(ns: int | None, now_ns: int) -> str:
    return "" if ns is None else ago(ns, now_ns)


def _until(ns: int | None, now_ns: int) -> str:
    """The time until then; `now` if it is due, empty for None."""
    if ns is None:
        return ""
    return "now" if ns - now_ns < 10**9 else f"in {age(now_ns, ns)}"
