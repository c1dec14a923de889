"""The error of an engine that cannot go on."""

from __future__ import annotations


class EngineError(Exception):
    """The ranks of an engine have failed; the message says what the first of them said."""
