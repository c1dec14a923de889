"""Messages of OpenAI's responses on a WebSocket, each with the response that it belongs to. Pure.

A request names its lane (`stream_id`; the default lane has none), and every event of its answer repeats the lane. Only
events that hold a response have its id. `response.steer` names the response that it changes and no lane; the server
then ends that one and begins a successor whose request is this message. Where several messages form one request on the
tape, each is a line of it (`join_messages`, `merge_messages`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from penstock.gateway.wire.dialects.loose_json import UNREADABLE, Json, arr, is_bulky, loads, obj

ENDS: Final = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")
_PLAIN: Final = {"type": "message", "role": "user"}


class ClientMessageKind(Enum):
    """The kind of a client's message."""

    CREATE = "a request"
    STEER = "more input for a response that runs"
    OTHER = "nothing that is answered by a model"
    UNREADABLE = "no JSON object"


class ServerMessageKind(Enum):
    """The kind of a server's message."""

    BEGIN = "a response as it begins, with its id"
    PART = "of a response that has begun"
    END = "a response as it ended"
    ERROR = "an error in place of an answer"
    ACCEPTED = "steering input will be used"
    PENDING = "steering input waits for the results of tools"
    FAILED = "steering input is not used"
    OTHER = "of no response"
    UNREADABLE = "nobody knows what of"


STEERING: Final = (ServerMessageKind.ACCEPTED, ServerMessageKind.PENDING, ServerMessageKind.FAILED)


class ClientMessageFacts(NamedTuple):
    """The facts in a client's message."""

    kind: ClientMessageKind
    lane: str | None = None
    previous: str | None = None
    """The id of the response that it continues or steers."""
    metadata: bytes = b""
    """The client's metadata about the request, as JSON: in the body, since a WebSocket has one set of headers."""
    model: str | None = None
    """The model that the session has from here on."""
    event: str | None = None
    """The client's own id of the message, by which an error names it."""
    most: Any = None
    """Most tokens of the answer, as the request says it."""


class ServerMessageFacts(NamedTuple):
    """The facts in a server's message."""

    kind: ServerMessageKind
    lane: str | None = None
    response: str | None = None
    """The id of the response, or of the one that is steered."""
    previous: str | None = None
    """The id of the response that this one continues."""
    steer: str | None = None
    """The id of steering input."""
    status: int = 101
    """The HTTP status of an answer that ends with this message."""
    model: str | None = None
    """The model that the session has from here on."""
    transcriber: str | None = None
    """The model that writes down what users of the session say."""
    transcribes: bool = False
    """True if `response` is not a response, but a user's item that is written down."""
    event: str | None = None
    """The client's id of the message that an error is about."""
    conflict: bool = False
    """True if a request failed because another response ran."""


class _ResponseIds(msgspec.Struct):
    id: str | None = None
    previous_response_id: str | None = None


class _SocketMessage(msgspec.Struct):
    """A message of either side. No large object is made for a field that should be a string and is not."""

    type: str | None = None
    stream_id: str | None = None
    previous_response_id: str | None = None
    status: float | int | str | None = None
    response: _ResponseIds | None = None
    steer: _ResponseIds | None = None
    client_metadata: msgspec.Raw = msgspec.Raw()


_event = msgspec.json.Decoder(_SocketMessage).decode
_SENT: Final = {"response.create": ClientMessageKind.CREATE, "response.steer": ClientMessageKind.STEER}
_RECEIVED: Final = {
    "response.created": ServerMessageKind.BEGIN,
    "response.queued": ServerMessageKind.BEGIN,
    "response.in_progress": ServerMessageKind.BEGIN,
    "response.steer.accepted": ServerMessageKind.ACCEPTED,
    "response.steer.pending": ServerMessageKind.PENDING,
    "response.steer.failed": ServerMessageKind.FAILED,
    "error": ServerMessageKind.ERROR,
    **dict.fromkeys(ENDS, ServerMessageKind.END),
}


def read_client_message(message: bytes) -> ClientMessageFacts:
    """Read the kind and the ids of a client's message."""
    said = _read(message)
    if said is None:
        return ClientMessageFacts(ClientMessageKind.UNREADABLE)
    kind = _SENT.get(said.type or "", ClientMessageKind.OTHER)
    return ClientMessageFacts(kind, said.stream_id, said.previous_response_id, bytes(said.client_metadata))


def read_server_message(message: bytes) -> ServerMessageFacts:
    """Read the kind and the ids of a server's message."""
    said = _read(message)
    if said is None:
        return ServerMessageFacts(ServerMessageKind.UNREADABLE)
    of = said.type or ""
    kind = _RECEIVED.get(of) or (ServerMessageKind.PART if of.startswith("response.") else ServerMessageKind.OTHER)
    about = (said.steer if kind in STEERING else said.response) or _ResponseIds()
    if kind in STEERING:
        target = about.previous_response_id or said.previous_response_id
        return ServerMessageFacts(kind, said.stream_id, target, steer=about.id)
    status = said.status if isinstance(said.status, int) and 400 <= said.status < 600 else 500
    status = status if kind is ServerMessageKind.ERROR else 101
    return ServerMessageFacts(kind, said.stream_id, about.id, about.previous_response_id, status=status)


def _read(message: bytes) -> _SocketMessage | None:
    """Decode a message; None where it is no JSON object, or its lane, its type or an id is no string."""
    try:
        return _event(message)
    except UNREADABLE:
        pass
    try:
        # Half a surrogate pair in a text is JSON as well, and models split pairs between two events.
        said = None if is_bulky(message) else json.loads(message)
        if not isinstance(said, dict):
            return None
        given = obj(said)
        metadata = json.dumps(given.pop("client_metadata", {})).encode()
        return msgspec.structs.replace(msgspec.convert(given, _SocketMessage), client_metadata=msgspec.Raw(metadata))
    except UNREADABLE:
        return None


def is_steering_event(kind: Any) -> bool:
    """True if an event of this type tells of steering input. It may have an error, which is not the answer's."""
    return isinstance(kind, str) and kind.startswith("response.steer.")


def join_messages(messages: Iterable[bytes]) -> bytes:
    """Several messages as one request: steering input stands before the request that takes it along."""
    return b"\n".join(messages)


def merge_messages(request: bytes) -> bytes:
    """The messages of a request as one: the last one, with the input of the earlier ones before its own. A single
    message is returned as it is."""
    if b"\n" not in request:
        return request
    said = [loads(line) for line in request.split(b"\n")]
    if not all(isinstance(one, dict) and "type" in one for one in said):
        return request
    return orjson.dumps(obj(said[-1]) | {"input": [item for one in said for item in _items(obj(one))]})


def _items(message: Json) -> list[Any]:
    given = message.get("input")
    return [{**_PLAIN, "content": given}] if isinstance(given, str) else arr(given)
