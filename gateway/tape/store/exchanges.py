"""A stored body as an `Exchange`, the noun that people and programs read."""

from __future__ import annotations

from penstock.gateway.model.exchange import Chunk, Exchange
from penstock.gateway.tape.store.codec import StoredBody


def header_lines(block: bytes) -> list[tuple[str, str]]:
    """Return `name: value CRLF` lines as pairs, bytes above 0x7f as latin-1 (RFC 9110 §5.5)."""
    lines = block.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return [(name, value.strip(" \t")) for name, _, value in pairs]


def exchange(body: StoredBody) -> Exchange:
    """Return a stored body as an `Exchange`."""
    marks = iter(body.marks)
    return Exchange(
        url=body.url,
        request_headers=header_lines(body.request_headers),
        request_body=body.request,
        response_headers=header_lines(body.response_headers),
        response_body=body.response,
        trailers=header_lines(body.trailers),
        chunks=[Chunk(at_ns=at * 1000, size=size) for at, size in zip(marks, marks, strict=True)],
        sides=body.sides,
    )
