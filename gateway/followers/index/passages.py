"""Reads the passages that each span adds to its conversation from the tape, in the order in which spans ended.

Bodies are stored against earlier ones, most often that of the attempt's last call, so these are remembered: then a body
takes one step of decoding and not a chain of them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Final

from penstock.gateway.followers.index.rows import SpanRecord
from penstock.gateway.model.passage import Passage
from penstock.gateway.reading.turns import decode_body, encoding
from penstock.gateway.tape.store import codec
from penstock.gateway.tape.store.codec import DeltaBase, StoredBody
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.exchanges import header_lines
from penstock.gateway.tape.store.view import TapeView
from penstock.gateway.traffic.calls.passages import attribute_passages, call_passages, is_conversation

_BASES_BYTES: Final = 64 << 20
_ATTEMPTS: Final = 100_000
_log = logging.getLogger("penstock.index")


class PassageReader:
    """Reads the passages of spans, and remembers the bodies that the next spans need."""

    def __init__(self) -> None:
        self._bases = OrderedDict[int, DeltaBase]()
        self._size = 0
        self._first_calls = OrderedDict[tuple[str, str], int]()

    def forget(self) -> None:
        """Called when a rollout was forgotten: another of its name may follow."""
        self._first_calls.clear()

    def read(self, view: TapeView, head: SpanRecord) -> list[Passage]:
        """The passages of a span that has ended."""
        return self.read_call(view, head)[0]

    def read_call(self, view: TapeView, head: SpanRecord) -> tuple[list[Passage], StoredBody | None]:
        """The passages of a span that has ended, and its bytes; None without bytes, or if they cannot be read."""
        if head.body is None:
            return attribute_passages(head.attributes), None
        if head.sequence == 1 and is_conversation(head):
            self._remember((head.rollout, head.attempt), 1)
        try:
            body, base = view.body(head.body, self._bases)
        except (TapeError, *codec.DECODE_ERRORS) as error:
            _log.error("the texts of a call are not in the index: %s", error)
            return [], None
        self._keep(base)
        request = _decoded(body.request, body.request_headers)
        response = _decoded(body.response, body.response_headers)
        said = call_passages(head, request, response, lambda: self._first_call(view, head) in (head.sequence, None))
        return said, body

    def _keep(self, base: DeltaBase) -> None:
        before = self._bases.pop(base.number, None)
        self._bases[base.number] = base
        self._size += base.size - (0 if before is None else before.size)
        while self._size > _BASES_BYTES:
            _, oldest = self._bases.popitem(last=False)
            self._size -= oldest.size

    def _first_call(self, view: TapeView, head: SpanRecord) -> int | None:
        """The sequence of the attempt's first call of a conversation."""
        name = head.rollout, head.attempt
        found = self._first_calls.get(name)
        after = 0
        while found is None and (spans := view.spans(*name, after, 1)):
            after += 1
            if is_conversation(spans[0]):
                found = after
                self._remember(name, found)
        return found

    def _remember(self, name: tuple[str, str], first_call: int) -> None:
        self._first_calls[name] = first_call
        if len(self._first_calls) > _ATTEMPTS:
            self._first_calls.popitem(last=False)


def _decoded(body: bytes, headers: bytes) -> bytes:
    if b"content-encoding" in headers.lower() and (packed := encoding(header_lines(headers))):
        return decode_body(body, packed)[0]
    return body
