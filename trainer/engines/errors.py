"""The errors of engines and checkpoints. Free of torch, because every command that ends a run imports them."""

from __future__ import annotations


class EngineError(Exception):
    """The ranks of an engine have failed; the message is that of the first failure."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which one is still there."""
