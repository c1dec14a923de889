"""The log of a gateway, on stderr: text for a person, or one JSON object a line for machines.

It holds none of the gateway's own keys, and nothing that has the shape of a key: engines repeat keys in their answers,
which are logged. Values of JSON are masked before they are encoded, so every line can be parsed whatever a key looks
like.

A record may bring `fields` (`extra={"fields": {...}}`): members of the JSON object, `name=value` in text. Whoever makes
them masks what has the shape of a key.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from datetime import UTC, datetime
from typing import Any, Final

from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.model.settings import LogSettings
from penstock.gateway.wire.http.redaction import plain_text

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BARE: Final = re.compile(r"[A-Za-z0-9_./:@+-]+")
"""Values that need no quotes in text."""


class TextFormatter(logging.Formatter):
    """Formats a record as text for a person."""

    def __init__(self, own: Secrets, form: str = FORMAT) -> None:
        super().__init__(form)
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, with its traceback and its fields."""
        line, fields = plain_text(self._own.text(super().format(record))), _fields(record, self._own)
        return line + "".join([f" {name}={_written(value)}" for name, value in fields.items()])


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object for machines, with the names of the Elastic Common Schema."""

    def __init__(self, own: Secrets) -> None:
        super().__init__()
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        """One object without a line feed: JSON escapes those in messages and tracebacks."""
        line = {
            "@timestamp": moment(record.created),
            "log.level": record.levelname.lower(),
            "log.logger": record.name,
            "message": self._without_keys(record.getMessage()),
        }
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, _ = record.exc_info
            line["error.type"], line["error.message"] = kind.__qualname__, self._without_keys(str(error))
            line["error.stack_trace"] = self._without_keys(self.formatException(record.exc_info))
        return json.dumps(line | _fields(record, self._own))

    def _without_keys(self, text: str) -> str:
        return plain_text(self._own.text(text))


def moment(seconds: float) -> str:
    """A POSIX time in ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord, own: Secrets) -> dict[str, Any]:
    """The fields of a record, masked in one pass: a call has two dozen."""
    fields: dict[str, Any] = getattr(record, "fields", {})
    texts = {name: value for name, value in fields.items() if isinstance(value, str)}
    return fields | dict(zip(texts, own.texts(list(texts.values())), strict=True))


def _written(value: Any) -> str:
    """The text of a value, quoted if it could be taken for another line or for a part of this one."""
    bare = _BARE.fullmatch(value) is not None if isinstance(value, str) else type(value) in (int, float)
    return str(value) if bare else json.dumps(value)


def set_up(log: LogSettings, own: Secrets = NO_SECRETS) -> None:
    """Sets up the logging of this process. Uncaught exceptions are logged, too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(own) if log.format == "json" else TextFormatter(own))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _uncaught("the process", (kind, error, trace))
    threading.excepthook = lambda it: _uncaught("a thread", (it.exc_type, it.exc_value, it.exc_traceback))


def fatal_exit(log: LogSettings, message: str) -> SystemExit:
    """Returns the exception that ends a process that cannot go on. Its message is the last line of the log."""
    if log.format == "text":
        return SystemExit(message)
    logging.getLogger("penstock.app").critical(message)
    return SystemExit(1)


def _uncaught(whose: str, error: Any) -> None:
    logging.getLogger("penstock.app").critical("an error has ended %s", whose, exc_info=error)
