"""What passes on a WebSocket, each way as it came; how a message is left out of one or put into the other. Sans-I/O.

A client's messages are held until they may pass. One that may not is dropped: what comes after it passes as frames of
the gateway's own from then on, since a compressed message may refer to those before it, the dropped one too. What the
gateway itself says to the client stands between two messages of the upstream.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.http.websocket import BINARY, TEXT, Message, Packing, Reader, frame

DATA = (TEXT, BINARY)


class ToUpstream:
    """A client's messages."""

    def __init__(self, limit: int, packing: Packing | None, write: Callable[[bytes], None]) -> None:
        self.reader = Reader(limit, packing)
        self._write = write
        self._held = bytearray()
        """As it came, from the first byte that has not passed."""
        self._passed = 0
        self._controls: list[Message] = []
        """Frames of control that came within a message which is held."""
        self._own_frames = False

    @property
    def held(self) -> int:
        """Bytes."""
        return len(self._held)

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole."""
        self._held += data
        return self.reader.feed(data)

    def forward(self, message: Message) -> None:
        """It may pass, and so may all before it."""
        if self._own_frames:
            self._forget(message.end)
            self._write(frame(message.kind, message.body, masked=True))
        elif message.end > self._passed:
            self._forward_until(message.end)
        else:
            self._controls.append(message)

    def forward_rest(self) -> None:
        """All messages may pass, and so may what stands between them."""
        if not self._own_frames:
            self._forward_until(self.reader.whole)

    def drop(self, message: Message) -> None:
        """It does not pass; what came within it does."""
        self._own_frames = True
        for control in self._controls:
            self._write(frame(control.kind, control.body, masked=True))
        self._controls.clear()
        self._forget(message.end)

    def _forward_until(self, end: int) -> None:
        if end > self._passed:
            self._write(bytes(self._held[: end - self._passed]))
            self._controls.clear()
            self._forget(end)

    def _forget(self, end: int) -> None:
        if end > self._passed:
            del self._held[: end - self._passed]
            self._passed = end


class ToClient:
    """An upstream's messages, and the gateway's own."""

    def __init__(self, limit: int, packing: Packing | None) -> None:
        self.reader = Reader(limit, packing)
        self._came = 0
        self._own = b""
        """What waits for the end of a message."""

    def feed(self, data: bytes) -> tuple[list[Message], bytes]:
        """The messages that end within these bytes, and the bytes with what the gateway says besides."""
        begins = self._came
        self._came += len(data)
        messages = self.reader.feed(data)
        at = self.reader.whole - begins
        if self._own and at > 0:
            data, self._own = data[:at] + self._own + data[at:], b""
        return messages, data

    def say(self, text: bytes) -> bytes:
        """The gateway says something: what is to be written now."""
        said = frame(TEXT, text)
        if self.reader.between_messages:
            return said
        self._own += said
        return b""
