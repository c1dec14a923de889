"""The state behind the health endpoints."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.tape.store.recorder import Recorder


@dataclass(slots=True)
class ProcessHealth:
    """The state that the health endpoints report."""

    recorder: Recorder
    started: bool = False
    draining: bool = False

    @property
    def not_ready(self) -> str | None:
        """The reason why the gateway takes no calls or cannot record them; None while it does both."""
        if self.draining:
            return "the gateway is draining: it stops soon"
        if not self.started:
            return "the gateway is not ready yet: it is starting"
        failing = self.recorder.failing
        return None if failing is None else f"recording has stopped: {failing}"
