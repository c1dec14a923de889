"""A call over HTTP as the recorder sees it (`gateway.traffic.proxy.call_lifecycle`), and its ends. The base of
`gateway.traffic.proxy.call`."""

from __future__ import annotations

from time import monotonic

from penstock.gateway.traffic.calls.call_request import CallRequest
from penstock.gateway.traffic.proxy.call_lifecycle import SLOTS, CallLifecycle, client_body
from penstock.gateway.traffic.proxy.proxy_context import ProxyContext
from penstock.gateway.traffic.proxy.relay import Relay
from penstock.gateway.wire.dialects import family
from penstock.gateway.wire.http.client_connection import ClientConnection
from penstock.gateway.wire.http.errors import Refusal, UpstreamFault
from penstock.gateway.wire.http.headers import refusal_body, refusal_head
from penstock.gateway.wire.http.request import HttpRequest


class RecordedCall(Relay, CallLifecycle):
    """One call, without the steps that move it on."""

    __slots__ = (*SLOTS, "_tail")

    def __init__(
        self, shared: ProxyContext, client: ClientConnection, request: HttpRequest, admitted: CallRequest
    ) -> None:
        super().__init__(client, request)
        self._prepare(shared, request, admitted)
        self.own = shared.redactor.own
        self._tail = b""
        """The last byte of the answer while it waits for the tape."""

    def _write_last(self, out: bytes) -> None:
        """Write the end of the answer; hold its last byte back while the span must wait for the tape or a full
        queue."""
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
        """Write the last byte of the answer: its span is on disk, or lost. A lost span breaks the answer off if the
        rollout's mode refuses unrecorded answers."""
        self._shared.metrics.recorder_wait_seconds += monotonic() - self._waits_since
        self._recorded(kept)
        if self.client.served is not self:
            return
        if not kept and self.started and self._shared.refuses_gaps(self._admitted.address.mode):
            # An error of the gateway's own may pass: no trainer learns from it.
            self.break_off()
            return
        if self._tail:
            self.client.transport.write(self._tail)
        self.end_answer()

    def _cut_off(self, status: str, reason: str) -> None:
        """End a call whose client has a part of the answer, or nothing."""
        self._end(status, reason)
        self._shared.recorder.put(self.record, self._recorded)
        self.break_off()
        if status == "error":
            self._hand_over()

    def _fail(self, refusal: Refusal) -> None:
        """End a call with an error of the gateway's own, in the shape of its API; its answer has not begun."""
        # The message may quote an engine's answer.
        body = self.own.hide(self._refusal_body(refusal))
        head = refusal_head(refusal, len(body), self.keep_alive)
        body = b"" if self.head_only else body
        self.record.set_own_answer(refusal.status, body)
        self._end("error", refusal.kind)
        self._write_last(head + body)
        if isinstance(refusal, UpstreamFault):
            self._hand_over()

    def _hand_over(self) -> None:
        """Notify the parts: the upstream has answered or failed, and the recorder has the record."""
        for part in self._parts:
            part.on_recorded(self.record)

    def _refusal_body(self, refusal: Refusal) -> bytes:
        return refusal_body(family(self._admitted.dialect, self._admitted.path, self.request.headers), refusal)

    def cancel_upstream(self) -> None:
        """Cancel the upstream, or the wait before it."""
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
        super().cancel_upstream()

    def give_up(self) -> None:
        """Cut the call off: the gateway stops and cannot wait any longer."""
        self.cancel_upstream()
        self._cut_off("interrupted", "gateway_stopped")

    def client_body(self) -> bytes:
        """The answer's body as the client got it, plus the fields that the gateway asked for itself."""
        return client_body(self._parts, self.record.pieces, self.record.encoding)
