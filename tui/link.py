"""How the gateway is reached: whether it answers, and how often it may be asked.

A link that is far away (it is not this machine) has a budget of bytes: after an answer of B bytes the next question
waits for B / `FAR_BYTES_S` seconds. So a screen that changes all the time costs a bounded rate, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from yarl import URL

from penstock.gateway.display.text import age

FAR_BYTES_S: Final = 8_000
"""Bytes a second that looks may take from a gateway far away: below 10 KB/s, which leaves room for the feed."""
NEAR_S, FAR_S = 0.25, 1.0
"""Least time between two looks at the same screen; s."""
LONGEST_S: Final = 15.0
"""Longest pause that a large answer causes; s."""
AWAY_S: Final = 1.0
"""Between two looks while the gateway does not answer; s."""


def is_far(url: str) -> bool:
    """Whether a gateway is on another machine."""
    host = URL(url).host or ""
    return not (host == "localhost" or host.startswith("127.") or host == "::1")


def pause(far: bool, received: int, took_s: float) -> float:
    """How long the next look waits after one that has brought so many bytes in so much time; s."""
    if not far:
        return max(NEAR_S, 2 * took_s)
    return min(max(FAR_S, received / FAR_BYTES_S), LONGEST_S)


@dataclass(slots=True)
class Link:
    """Whether the gateway answers."""

    state: Literal["connecting", "live", "lost"] = "connecting"
    since_ns: int = 0
    """Since when it is so."""
    why: str = ""
    """What stood in the way."""

    def answered(self, now_ns: int) -> bool:
        """It has answered; True when that is news."""
        if self.state == "live":
            return False
        self.state, self.since_ns, self.why = "live", now_ns, ""
        return True

    def failed(self, why: str, now_ns: int) -> bool:
        """It has not; True when that is news."""
        news = self.state != "lost"
        if news:
            self.since_ns = now_ns
        self.state, self.why = "lost", why
        return news

    def words(self, now_ns: int) -> str:
        """For the line on top."""
        match self.state:
            case "connecting":
                return "connecting ..."
            case "live":
                return "live"
            case "lost":
                return f"lost for {age(self.since_ns, now_ns)}, trying again"
