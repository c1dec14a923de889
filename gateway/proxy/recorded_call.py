"""A call over HTTP as the recorder sees it (`gateway.proxy.recording`), and how it ends. The base of
`gateway.proxy.call`.
"""

from __future__ import annotations

from time import monotonic

from penstock.gateway.calls.admitted import Admitted
from penstock.gateway.dialects import family
from penstock.gateway.http.client_connection import ClientConnection
from penstock.gateway.http.errors import Refusal, UpstreamFault
from penstock.gateway.http.headers import refusal_body, refusal_head
from penstock.gateway.http.request import Request
from penstock.gateway.proxy.recording import SLOTS, Recording, told_answer
from penstock.gateway.proxy.relay import Relay
from penstock.gateway.proxy.shared import Shared


class RecordedCall(Relay, Recording):
    """One call, without what moves it on."""

    __slots__ = (*SLOTS, "_tail")

    def __init__(self, shared: Shared, client: ClientConnection, request: Request, admitted: Admitted) -> None:
        super().__init__(client, request)
        self._prepare(shared, request, admitted)
        self.own = shared.redactor.own
        self._tail = b""
        """The end of the answer, while it waits for the tape."""

    def _write_last(self, out: bytes) -> None:
        """Writes the end of the answer; all but one byte of it while the span must, or the queue makes it, wait."""
        recorder = self._shared.recorder
        if self.durable or recorder.full:
            self._tail, self._waits_since = out[-1:], monotonic()
            if len(out) > 1:
                self.client.transport.write(out[:-1])
            recorder.put(self.record, self._let_go)
        else:
            if out:
                self.client.transport.write(out)
            recorder.put(self.record, self._recorded)
            self.end_answer()

    def _let_go(self, kept: bool) -> None:
        """The span is on disk, or lost: the last byte may go, unless the mode refuses unrecorded answers."""
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        self._recorded(kept)
        if self.client.served is not self:
            return
        if not kept and self.started and self._shared.refuses_gaps(self._admitted.address.mode):
            # What the gateway itself has to say may pass: nobody learns from it.
            self.break_off()
            return
        if self._tail:
            self.client.transport.write(self._tail)
        self.end_answer()

    def _cut_off(self, status: str, reason: str) -> None:
        """Ends a call whose client has got a part of the answer, or nothing."""
        self._end(status, reason)
        self._shared.recorder.put(self.record, self._recorded)
        self.break_off()
        if status == "error":
            self._hand_over()

    def _fail(self, refusal: Refusal) -> None:
        """Ends a call whose answer has not begun with one of our own, in the shape of its API."""
        # What an engine answers may be in the message.
        body = self.own.hide(self._refusal_body(refusal))
        head = refusal_head(refusal, len(body), self.keep_alive)
        body = b"" if self.head_only else body
        self.record.answered(refusal.status, body)
        self._end("error", refusal.kind)
        self._write_last(head + body)
        if isinstance(refusal, UpstreamFault):
            self._hand_over()

    def _hand_over(self) -> None:
        """Its upstream has answered, or failed, and the recorder has its record."""
        for part in self._parts:
            part.handed_over(self.record)

    def _refusal_body(self, refusal: Refusal) -> bytes:
        return refusal_body(family(self._admitted.dialect, self._admitted.path, self.request.headers), refusal)

    def cancel_upstream(self) -> None:
        """Nobody wants the answer any more, also where it has not been asked for yet."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        super().cancel_upstream()

    def give_up(self) -> None:
        """The gateway stops and cannot wait any longer."""
        self.cancel_upstream()
        self._cut_off("interrupted", "gateway_stopped")

    def told(self) -> bytes:
        """The answer as its client got it, but for what was asked for in its name."""
        return told_answer(self._parts, self.record.pieces, self.record.encoding)
