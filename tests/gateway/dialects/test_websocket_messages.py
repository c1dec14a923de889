"""What a message on a WebSocket is, however odd its JSON."""

from __future__ import annotations

import json

import pytest

from penstock.gateway.dialects import by_name
from penstock.gateway.dialects.websocket_messages import ClientMessage, Event, as_one, joined

RESPONSES = by_name("responses")
CREATE = b'{"type": "response.create", "stream_id": "a", "input": "%b"}'


@pytest.mark.parametrize(
    ("message", "kind", "lane"),
    [
        (CREATE % b"x", ClientMessage.CREATE, "a"),
        (CREATE % rb"half \ud83d", ClientMessage.CREATE, "a"),
        (b'{"type": "x", "type": "response.create"}', ClientMessage.CREATE, None),
        (b'{"type": "response.create", "temperature": NaN}', ClientMessage.CREATE, None),
        (b'{"type": "response.steer", "previous_response_id": "r"}', ClientMessage.STEER, None),
        (b'{"type": "response.cancel"}', ClientMessage.OTHER, None),
        (b"{}", ClientMessage.OTHER, None),
        (b'{"type": "response.create", "stream_id": 5}', ClientMessage.UNREADABLE, None),
        (b'[{"type": "response.create"}]', ClientMessage.UNREADABLE, None),
        (b'{"type": "response.create"', ClientMessage.UNREADABLE, None),
        (b"", ClientMessage.UNREADABLE, None),
    ],
)
def test_what_a_client_says(message: bytes, kind: ClientMessage, lane: str | None) -> None:
    said = RESPONSES.sent(message)
    assert (said.kind, said.lane) == (kind, lane)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b'{"type": "response.created", "stream_id": "a", "response": {"id": "r"}}', (Event.BEGIN, "a", "r", 101)),
        (rb'{"type": "response.output_text.delta", "delta": "\ud83d", "stream_id": "a"}', (Event.PART, "a", None, 101)),
        (b'{"type": "response.incomplete", "response": {"id": "r"}}', (Event.END, None, "r", 101)),
        (b'{"type": "error", "status": 429.0, "stream_id": "a"}', (Event.ERROR, "a", None, 500)),
        (b'{"type": "error", "status": 429}', (Event.ERROR, None, None, 429)),
        (b'{"type": "response.steer.failed", "steer": {"previous_response_id": "r"}}', (Event.FAILED, None, "r", 101)),
        (b'{"type": "codex.rate_limits"}', (Event.OTHER, None, None, 101)),
        (b'{"type": "response.created", "stream_id": ["a"]}', (Event.UNREADABLE, None, None, 101)),
    ],
)
def test_what_a_server_says(message: bytes, expected: tuple[Event, str | None, str | None, int]) -> None:
    said = RESPONSES.received(message)
    assert (said.kind, said.lane, said.response, said.status) == expected


def test_several_messages_are_one_request() -> None:
    steers = [b'{"type": "response.steer", "input": "one"}', b'{"type": "response.steer", "input": [{"role": "user"}]}']
    own = b'{"type": "response.create", "model": "m", "input": [{"call_id": "c"}]}'
    said = json.loads(as_one(joined([*steers, own])))
    assert (said["model"], said["type"]) == ("m", "response.create")
    assert said["input"] == [{"type": "message", "role": "user", "content": "one"}, {"role": "user"}, {"call_id": "c"}]
    pretty = json.dumps({"model": "m", "input": []}, indent=1).encode()
    assert as_one(pretty) is pretty


@pytest.mark.parametrize("more", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}, {}])
def test_what_only_prepares(more: dict[str, object]) -> None:
    assert RESPONSES.only_prepares(json.dumps({"type": "response.create", **more}).encode()) is bool(more)
