"""Forwards a WebSocket's bytes unchanged, each way; leaves single messages out, or puts own ones in. Sans-I/O.

A client's messages are held until they may pass. One that may not is dropped: all later ones pass as frames of the
gateway's own, since a compressed message may refer to earlier ones, including the dropped one. The gateway's own
messages to the client go between two messages of the upstream.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.wire.http.websocket import (
    BINARY,
    TEXT,
    DeflateParameters,
    WebSocketMessage,
    WebSocketReader,
    frame,
)

DATA = (TEXT, BINARY)


class ClientMessageForwarder:
    """The direction from client to upstream."""

    def __init__(self, limit: int, packing: DeflateParameters | None, write: Callable[[bytes], None]) -> None:
        self.reader = WebSocketReader(limit, packing)
        self._write = write
        self._held = bytearray()
        """The client's bytes from the first one that has not passed."""
        self._passed = 0
        self._controls: list[WebSocketMessage] = []
        """Control frames that came within a held message."""
        self._own_frames = False

    @property
    def held(self) -> int:
        """Number of bytes that have not passed yet."""
        return len(self._held)

    def feed(self, data: bytes) -> list[WebSocketMessage]:
        """Take bytes and return the messages that are complete."""
        self._held += data
        return self.reader.feed(data)

    def forward(self, message: WebSocketMessage) -> None:
        """Forward this message and all before it."""
        if self._own_frames:
            self._forget(message.end)
            self._write(frame(message.kind, message.body, masked=True))
        elif message.end > self._passed:
            self._forward_until(message.end)
        else:
            self._controls.append(message)

    def forward_rest(self) -> None:
        """Forward all complete messages, and the frames between them."""
        if not self._own_frames:
            self._forward_until(self.reader.whole)

    def drop(self, message: WebSocketMessage) -> None:
        """Drop this message; control frames within it pass."""
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


class UpstreamMessageForwarder:
    """The direction from upstream to client, with the gateway's own messages."""

    def __init__(self, limit: int, packing: DeflateParameters | None) -> None:
        self.reader = WebSocketReader(limit, packing)
        self._came = 0
        self._own = b""
        """Own messages that wait for the end of an upstream's message."""

    def feed(self, data: bytes) -> tuple[list[WebSocketMessage], bytes]:
        """Return the messages that end within these bytes, and the bytes to write, with the gateway's own messages."""
        begins = self._came
        self._came += len(data)
        messages = self.reader.feed(data)
        at = self.reader.whole - begins
        if self._own and at > 0:
            data, self._own = data[:at] + self._own + data[at:], b""
        return messages, data

    def inject(self, text: bytes) -> bytes:
        """Send a text message of the gateway's own: return the bytes to write now, or hold it for the end of a
        message."""
        said = frame(TEXT, text)
        if self.reader.between_messages:
            return said
        self._own += said
        return b""
