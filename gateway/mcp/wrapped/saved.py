"""How far a session has come, as the tape has it: what a gateway needs to go on with it after a restart."""

from __future__ import annotations

import msgspec


class Owed(msgspec.Struct, array_like=True):
    """A request without its answer. Its bytes are the wrapper's to send again."""

    sequences: list[int]
    """Of the frames of its line."""
    index: int
    """Its place in that line."""
    parent: str | None = None
    gap: bool = False
    """Whether lines were lost since."""


class Saved(msgspec.Struct, array_like=True):
    """A session of a wrapper."""

    done: int = 0
    """Its frames up to this number are on the tape, or owed."""
    over: bool = False
    protocol: str | None = None
    owed: list[Owed] = []
    begun: list[list[int]] = []
    """Frames of lines that have not ended, for each direction."""

    def open(self) -> list[int]:
        """The frames that the wrapper must keep, in order."""
        found = {number for one in self.owed for number in one.sequences}
        return sorted(found.union(*self.begun))


def key_of(rollout: str, attempt: str, session: str) -> str:
    """The name of its note on the tape. A session belongs to its rollout: no other can speak for it."""
    return f"wrapped {rollout}/{attempt}/{session}"


_decode = msgspec.json.Decoder(Saved).decode


def read(note: bytes | None) -> Saved:
    """What the tape has of a session; of a new one nothing."""
    return Saved() if note is None else _decode(note)


def written(saved: Saved) -> bytes:
    """The same as the tape keeps it."""
    return msgspec.json.encode(saved)
