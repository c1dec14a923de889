"""The link to the gateway: its state, and the pauses between questions.

A far link (to another machine) has a budget of bytes: after an answer of B bytes the next question waits for B /
`FAR_BYTES_S` seconds. So a screen that changes all the time costs a bounded rate, whatever its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from yarl import URL

from penstock.console.views.text import age

FAR_BYTES_S: Final = 8_000
"""Bytes a second that looks may take from a far gateway: below 10 KB/s, which leaves room for the feed."""
NEAR_S, FAR_S = 0.25, 1.0
"""Least time between two looks at the same screen; s."""
LONGEST_S: Final = 15.0
"""Longest pause that a large answer causes; s."""
AWAY_S: Final = 1.0
"""Time between two looks while the gateway does not answer; s."""


def is_remote(url: str) -> bool:
    """True if a gateway is on another machine."""
    host = URL(url).host or ""
    return not (host == "localhost" or host.startswith("127.") or host == "::1")


def pause(far: bool, received: int, took_s: float) -> float:
    """The pause after a look that received so many bytes in so much time; s."""
    if not far:
        return max(NEAR_S, 2 * took_s)
    return min(max(FAR_S, received / FAR_BYTES_S), LONGEST_S)


@dataclass(slots=True)
class GatewayLink:
    """The state of the link."""

    state: Literal["connecting", "live", "lost"] = "connecting"
    since_ns: int = 0
    """The beginning of this state; ns since the epoch."""
    why: str = ""
    """The last error; empty while there is none."""

    def record_answer(self, now_ns: int) -> bool:
        """Note an answer; True if the state changes."""
        if self.state == "live":
            return False
        self.state, self.since_ns, self.why = "live", now_ns, ""
        return True

    def record_failure(self, why: str, now_ns: int) -> bool:
        """Note a failure; True if the state changes."""
        news = self.state != "lost"
        if news:
            self.since_ns = now_ns
        self.state, self.why = "lost", why
        return news

    def words(self, now_ns: int) -> str:
        """The state for the line on top."""
        match self.state:
            case "connecting":
                return "connecting ..."
            case "live":
                return "live"
            case "lost":
                return f"lost for {age(self.since_ns, now_ns)}, trying again"
