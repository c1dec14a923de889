"""What a dialect is: one wire format, in one file, pure. Bytes in, values out.

A dialect owns its routes, says which model a request names, reads a recorded exchange into a `Turn`, draws the few
facts that a list shows out of it (`Facts`, cheap: no call of a function for an event of a stream), and fingerprints the
conversation so that clients that say nothing can be followed. What it shares with the other formats of its API, the
shape of errors among them, is its `Family`. No other package knows a dialect by its name: what depends on the format is
asked of it here.

A conversation is fingerprinted in two ways: message by message, from what was read of it (`conversation`, `reply`), and
item by item from the raw JSON (`items`, `source`, `replies`), which costs a call next to nothing where its items have
been seen before.

Nothing here raises on odd bytes: `read` puts what it could not understand into `Turn.problems`, `facts` leaves it None.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.gateway.dialects.ending import Failed
from penstock.gateway.dialects.family import Family
from penstock.gateway.dialects.items import Items
from penstock.gateway.dialects.loose_json import Json, Peek, label, peek
from penstock.gateway.dialects.passages import of_turn
from penstock.gateway.dialects.sse import begins
from penstock.gateway.dialects.text_spans import Place, Texts
from penstock.gateway.dialects.websocket_messages import ClientMessage, Event, Received, Sent
from penstock.gateway.model.passage import Passage
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Part, Turn

EVENT_STREAM = b"text/event-stream"
STRING = rb'"\s*:\s*"((?:[^"\\]++|\\.)*+)"'
"""What stands in JSON behind the name of a member that is a string."""
SAID = re.compile(rb'"(?:content|t(?:ext|hinking)|re(?:asoning(?:_content)?|fusal)|arguments|partial_json)' + STRING)
_STREAM = re.compile(rb'"stream"[ \t\r\n]*:[ \t\r\n]*true')
_BLANK = b"\xef\xbb\xbf \t\r\n"
DELTA = re.compile(rb'"delta' + STRING)
"""Where texts stand in answers: images and other data are left out."""


@dataclass(slots=True)
class Facts:
    """What a span's summary takes from the bodies."""

    model: str | None = None
    model_served: str | None = None
    response_id: str | None = None
    finish: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    choices: int = 0
    failed: Failed | None = None
    """Why it is no good answer although its HTTP status says so."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More for its span, by OpenTelemetry name."""
    answers: tuple[str, Facts] | None = None
    """The answer to an earlier call that this one has fetched: its name (`retrieval.kept_as`), and what is in it."""


class Otel(NamedTuple):
    """What OpenTelemetry's GenAI conventions call its calls."""

    operation: str
    """`gen_ai.operation.name`."""
    provider: str
    """`gen_ai.provider.name`, where the upstream's host does not tell more."""
    api: str | None = None
    """`openai.api.type`."""


class Dialect(ABC):
    """One wire format. What a format does not say of itself is as it is here: nothing is understood of its calls."""

    name: str
    """As it stands in `Span.dialect`."""
    family: Family
    """Whose API it is."""
    families: tuple[Family, ...] = ()
    """Others that have the same route: the path or the headers of a call then tell whose it is (`owners`)."""
    unknown: bool = False
    """Whether any family may have the route, and nothing is known of what it means."""
    answers: bool = False
    """Whether its calls are answered by a conversation's next message. Counting tokens is not."""
    generates: bool = False
    """Whether a model generates the answer, which can then be compared with another."""
    uses_tokens: bool = False
    """Whether its calls use tokens up: those that generate, and embeddings, which use them on one side only."""
    retrieves: bool = False
    """Whether its calls fetch answers to earlier ones (`Facts.answers`)."""
    stateful: bool = False
    """Whether a request may name an earlier response in place of the conversation."""
    conversation_field: str = ""
    """The request's field that lists the items of the conversation; empty where nothing is followed."""
    instructions: tuple[str, ...] = ()
    """Its fields that hold instructions apart from that list."""
    token_fields: Mapping[str, bytes] = MappingProxyType({})
    """Fields, as JSON, that ask an engine for token ids and log-probabilities; empty where no engine gives them."""
    streaming_content_type: bytes = EVENT_STREAM
    """The media type of an answer that is a stream."""
    last_mark: bytes | None = None
    """What stands in the last event of such a stream (`over`), and seldom in others."""
    websocket: bool = False
    """Whether it is spoken on WebSockets too: there messages ask (`sent`), and events answer (`received`)."""
    otel: Otel | None = None
    """None where the conventions have no name for it: its calls are plain HTTP there."""

    @abstractmethod
    def matches(self, method: str, path: str) -> bool:
        """True when a call of this method to this path (no query, below the rollout's address) is this dialect's."""

    def peek(self, request: bytes) -> Peek | None:
        """What `model` and `facts` need of a request's body: read once for both. None where that is nothing."""
        return peek(request)

    def model(self, request: bytes, path: str = "", asked: Peek | None = None) -> str | None:
        """The model a request names in its body or path; None if it names none or cannot be read. `asked`: what was
        read of the body already."""
        return label((asked or peek(request)).model)

    def asks_stream(self, request: bytes, path: str) -> bool:
        """Whether a request wants its answer as a stream."""
        return _STREAM.search(request) is not None

    def begins_stream(self, body: bytes) -> bool | None:
        """Whether an answer that begins so is a stream; None while there are too few bytes to tell."""
        return begins(body)

    def is_stream(self, labelled: bool, request: bytes, path: str, response: bytes) -> bool:
        """Whether an answer is a stream, whatever its head calls it. `labelled`: that calls it one. Servers stream what
        was asked for under any type, and answer an error or the whole under that of streams."""
        if labelled:
            return response.lstrip(_BLANK)[:1] not in (b"{", b"[")
        return self.begins_stream(response) is True and self.asks_stream(request, path)

    @abstractmethod
    def facts(self, request: bytes, response: bytes, stream: bool, asked: Peek | None = None) -> Facts:
        """The summary's facts from decoded bodies. Must be cheap, but of a stream all events count.
        `asked`: what was read of the request already."""

    @abstractmethod
    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The whole exchange as a Turn, from decoded bodies."""

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """What a call adds to its conversation: what the request says after the model's last answer, and the answer.
        `whole`, asked where the request has such an answer: is what was said before it new as well?"""
        return of_turn(self.read(request, response, stream))

    def system_texts(self, request: bytes) -> Texts:
        """The system and developer texts of a request, in the order of the wire format. None of them if the body cannot
        be read."""
        return Texts([])

    def tool_texts(self, request: bytes) -> list[Place]:
        """The descriptions of the tools on offer. Their names and schemas are not texts."""
        return []

    @staticmethod
    def sent(message: bytes) -> Sent:
        """A client's message on a WebSocket."""
        return Sent(ClientMessage.OTHER)

    @staticmethod
    def received(message: bytes) -> Received:
        """A server's message on a WebSocket."""
        return Received(Event.OTHER)

    def only_prepares(self, request: bytes) -> bool:
        """Whether a request wants no answer, only that its beginning is read already."""
        return False

    def over(self, response: bytes) -> bool:
        """True when a stream has sent its last event: its client may leave without waiting for the end of the body, as
        the official SDKs do."""
        return False

    def conversation(self, request: bytes) -> list[bytes]:
        """One fingerprint source per message, oldest first, equal for equal messages whatever the JSON formatting
        or cache markers. Empty when the request holds no conversation."""
        return []

    def reply(self, response: bytes, stream: bool) -> bytes:
        """Fingerprint source of the assistant's answer, equal to the one `conversation` gives for the same message
        when the client sends it back; empty when there is none."""
        return b""

    def items(self, request: bytes) -> Items:
        """The items of a request's conversation as raw JSON, and what a summary needs of it. None of them where it
        holds no conversation or cannot be read."""
        return Items(None, [])

    def source(self, item: bytes) -> bytes:
        """Fingerprint source of an item, equal for equal ones whatever the JSON formatting or cache markers; empty for
        what clients drop and move, such as reasoning."""
        return b""

    def replies(self, response: bytes, stream: bool) -> list[bytes]:
        """Fingerprint sources of the items of the answer, as `source` gives them when the client sends them back."""
        return []

    def response_id(self, response: bytes, stream: bool) -> str | None:
        """The id that a later request may name instead of sending the conversation. Must be cheap."""
        return None

    def server_tools(self, asked: Json) -> list[str]:
        """The kinds of those tools of a request that the provider would run itself, and not its client."""
        return []

    def continued(self, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json] | None:
        """An answer and the results of its tool calls, in their order, as items of the next request's conversation, as
        the official SDK sends them back; None where there are calls without a result that could be written."""
        return None

    def texts_said(self, stream: bool) -> re.Pattern[bytes]:
        """Finds the texts in an answer, each once: where nobody counted tokens, their length tells about how many."""
        return SAID
