"""Calls that the gateway refuses because an engine's format cannot say them.

Such a refusal is a part of a negotiation when its agent then asks otherwise and is answered: coding agents try out what
an API can do. It is an error as long as no later call of its attempt was answered.
"""

from __future__ import annotations

from typing import Final, Protocol

from penstock.gateway.model.span import SpanStatus

KIND: Final = "translation"
"""The reason of these refusals in spans."""


class Ended(Protocol):
    """The slice of a call that tells."""

    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def upstream(self) -> str | None: ...


def refused(call: Ended) -> bool:
    """Whether it was refused before any engine was asked."""
    return call.status == SpanStatus.ERROR and call.error == KIND and call.upstream is None
