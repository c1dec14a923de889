"""The errors of engines and checkpoints. Free of torch: whoever ends a run knows them."""

from __future__ import annotations


class EngineError(Exception):
    """The ranks of an engine have failed; the message says what the first of them said."""


class CheckpointError(Exception):
    """Something could not be written or read; the message says what is still there."""
