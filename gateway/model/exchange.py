"""The bytes of a call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.gateway.model.base import Noun


class Chunk(Noun):
    """One read from the upstream connection."""

    at_ns: int
    """Since the span's start; ns."""
    size: int
    """Body bytes that it carried."""


class Side(Noun):
    """What was said between the gateway and one party in another wire format than the exchange's own."""

    who: Literal["agent", "engine", "receipt"]
    """The party: the agent, whose call was translated, or the engine, which was asked with token ids. A
    `receipt` is what the agent was told at first, where another call has fetched its answer."""
    dialect: str
    """Wire format spoken with it."""
    path: str
    """Path and query that were called, secrets masked."""
    request_body: bytes
    """As the agent sent it, or as the engine got it."""
    response_body: bytes
    """As the agent got it, or as the engine sent it; without transfer framing."""


class Exchange(Noun):
    """The bytes of a call, exactly as they went upstream and came back. Headers are in order; secrets are masked."""

    url: str
    """What was called, secrets masked."""
    request_headers: list[tuple[str, str]]
    """As sent upstream."""
    request_body: bytes
    """As sent upstream, transfer framing removed."""
    response_headers: list[tuple[str, str]]
    """As received."""
    response_body: bytes
    """As received, transfer framing removed, content encoding kept."""
    trailers: list[tuple[str, str]] = Field(default_factory=list[tuple[str, str]])
    """Trailer fields after a chunked response."""
    chunks: list[Chunk] = Field(default_factory=list[Chunk])
    """Arrival of the response body, read by read."""
    sides: list[Side] = Field(default_factory=list[Side])
    """Parties that were spoken with in another wire format."""
