"""The progress of a session on the tape, from which a gateway continues after a restart."""

from __future__ import annotations

import msgspec


class OpenRequest(msgspec.Struct, array_like=True):
    """A request without its answer. The wrapper keeps its bytes and sends them again."""

    sequences: list[int]
    """Sequence numbers of the frames of its line."""
    index: int
    """Its place in that line."""
    parent: str | None = None
    gap: bool = False
    """True if lines were lost since."""


class SessionProgress(msgspec.Struct, array_like=True):
    """The progress of one session."""

    done: int = 0
    """Frames up to this number are on the tape, or of open requests or lines."""
    over: bool = False
    protocol: str | None = None
    owed: list[OpenRequest] = []
    begun: list[list[int]] = []
    """Frames of incomplete lines, for each direction."""

    def open_frames(self) -> list[int]:
        """The frames that the wrapper must keep, in order."""
        found = {number for one in self.owed for number in one.sequences}
        return sorted(found.union(*self.begun))


def key_of(rollout: str, attempt: str, session: str) -> str:
    """The name of a session's note on the tape. It includes the rollout, so that no other rollout can write it."""
    return f"wrapped {rollout}/{attempt}/{session}"


_decode = msgspec.json.Decoder(SessionProgress).decode


def decode(note: bytes | None) -> SessionProgress:
    """Decodes a session's note; a new session has none."""
    return SessionProgress() if note is None else _decode(note)


def encode(saved: SessionProgress) -> bytes:
    """Encodes the note of a session."""
    return msgspec.json.encode(saved)
