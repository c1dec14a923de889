"""Engines that compute updates: one of a single process, and one on verl's workers on several machines.

They use no gateway and no network; only `verl_backend` imports verl and Ray. Begin with `local`. The errors are here,
without torch, because every command that ends a run imports them.
"""


class EngineError(Exception):
    """The ranks of an engine have failed; the message is that of the first failure."""


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message says which one is still there."""
