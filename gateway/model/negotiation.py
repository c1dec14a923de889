"""Calls that the gateway refuses because an engine's format cannot express them.

Such a refusal is part of a negotiation if the agent then calls in another way and is answered: coding agents try out
what an API can do. It is an error as long as no later call of its attempt was answered.
"""

from __future__ import annotations

from typing import Final, Protocol

from penstock.gateway.model.span import SpanStatus

KIND: Final = "translation"
"""The `error` of these refusals in spans."""


class CallResult(Protocol):
    """The fields of a call that tell a refusal."""

    @property
    def status(self) -> str: ...
    @property
    def error(self) -> str | None: ...
    @property
    def upstream(self) -> str | None: ...


def refused(call: CallResult) -> bool:
    """True if the call was refused before any engine was called."""
    return call.status == SpanStatus.ERROR and call.error == KIND and call.upstream is None
