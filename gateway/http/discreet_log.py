"""The log of a gateway: it holds none of the gateway's own keys."""

from __future__ import annotations

import logging

from penstock.gateway.model.known_secrets import Secrets


class Discreet(logging.Formatter):
    """Writes lines of the log without the gateway's own keys: engines repeat keys, and their answers are logged."""

    def __init__(self, form: str, own: Secrets) -> None:
        super().__init__(form)
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        """The line, with its traceback."""
        return self._own.text(super().format(record))
