"""Calls as the recorder hands them to the store, made up for tests."""

from __future__ import annotations

from penstock.gateway.model.span import Usage
from penstock.gateway.tape.store.codec import StoredBody
from penstock.gateway.tape.store.records import SpanEntry

HEADERS = b"host: 127.0.0.1:4747\r\nuser-agent: OpenAI/Python 3.52.0\r\nauthorization: ***\r\n"


def body(request: bytes, response: bytes = b"") -> StoredBody:
    """The bytes of a call; the response arrived in one read."""
    marks = [900, len(response)] if response else []
    return StoredBody("https://api.example/v1/chat/completions", HEADERS, request, b"date: x\r\n", response, b"", marks)


def call(rollout: str = "r1", attempt: str = "a1", request: bytes = b"{}", response: bytes = b"yes") -> SpanEntry:
    """A finished call."""
    return finish(running(rollout, attempt, request), response)


def running(rollout: str = "r1", attempt: str = "a1", request: bytes = b"{}") -> SpanEntry:
    """A call that has not been answered."""
    return SpanEntry(
        rollout,
        attempt,
        start_ns=1_700_000_000_000_000_123,
        dialect="chat",
        path="/v1/chat/completions",
        model="m-1",
        agent="planner",
        request_bytes=len(request),
        body=body(request),
    )


def finish(entry: SpanEntry, response: bytes = b"yes", status: str = "ok") -> SpanEntry:
    """The same call, answered."""
    assert entry.body is not None
    entry.body = body(entry.body.request, response)
    entry.status, entry.http_status = status, 200
    entry.end_ns, entry.first_byte_ns = entry.start_ns + 1_000_000_007, 900_000_000
    entry.response_bytes = len(response)
    entry.usage = Usage(input_tokens=len(entry.body.request), output_tokens=len(response), cached_tokens=1)
    entry.response_id, entry.finish, entry.choices = f"resp-{entry.start_ns}", "stop", 1
    return entry


def conversation(turns: int, rollout: str = "r1", attempt: str = "a1") -> list[SpanEntry]:
    """Calls that each resend what was said before."""
    told = b'{"messages":[{"role":"system","content":"' + b"You help people to change flights. " * 20
    made: list[SpanEntry] = []
    for turn in range(turns):
        answer = b'{"content":"answer %d"}' % turn
        told += b'"},{"role":"user","content":"question %d"}' % turn
        made.append(call(rollout, attempt, told + b'],"model":"m-1"}', answer))
        told += answer
    return made
