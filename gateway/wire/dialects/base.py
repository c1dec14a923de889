"""A dialect: one wire format, in one file, pure. Bytes in, values out.

A dialect owns its routes, says which model a request names, reads a recorded exchange into a `Turn`, extracts the few
facts that a list of spans shows (`Facts`, cheap: no function is called for an event of a stream), and fingerprints the
conversation, so that calls of clients that name no rollout can be matched to it. Its `Family` holds what it shares with
the other formats of its API, such as the shape of errors. No other package knows a dialect by its name: each asks the
dialect, by these methods, what depends on the format.

A conversation is fingerprinted in two ways: message by message, after reading it (`message_fingerprints`,
`reply_fingerprint`), and item by item from the raw JSON (`items`, `item_fingerprint`, `reply_fingerprints`), which
costs a call next to nothing where its items have been seen before.

Nothing here raises on odd bytes: `read` notes the parts that it could not read in `Turn.problems`, `facts` leaves their
facts None.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Passage, Tool, Turn
from penstock.gateway.wire.dialects.family import Failure, Family
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    arr,
    count,
    document,
    error_message,
    label,
    lenient,
    loads,
    obj,
    objs,
    peek,
    text,
)
from penstock.gateway.wire.dialects.parts import (
    body_passages,
    error_passage,
    fingerprint,
    forcing_field,
    message_passages,
    plain_fingerprint,
    sampling_parameters,
    turn_passages,
)
from penstock.gateway.wire.dialects.request_body import (
    ConversationItems,
    RequestMembers,
    RequestTexts,
    TextLocation,
    TextPointer,
    TextPointers,
    cutter,
    member_json,
    texts,
)
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.dialects.websocket_messages import (
    ClientMessageFacts,
    ClientMessageKind,
    ServerMessageFacts,
    ServerMessageKind,
)

EVENT_STREAM = b"text/event-stream"
STRING = rb'"\s*:\s*"((?:[^"\\]++|\\.)*+)"'
"""The text that follows the name of a member in JSON whose value is a string."""
ANSWER_TEXT = re.compile(
    rb'"(?:content|t(?:ext|hinking)|re(?:asoning(?:_content)?|fusal)|arguments|partial_json)' + STRING
)
_STREAM = re.compile(rb'"stream"[ \t\r\n]*:[ \t\r\n]*true')
_BLANK = b"\xef\xbb\xbf \t\r\n"
DELTA_TEXT = re.compile(rb'"delta' + STRING)
"""These match the texts in answers; images and other data are left out."""


@dataclass(slots=True)
class Facts:
    """The facts of a span's summary that are read from the bodies."""

    model: str | None = None
    model_served: str | None = None
    response_id: str | None = None
    finish: str | None = None
    usage: Usage | None = None
    tool_calls: int = 0
    choices: int = 0
    failed: Failure | None = None
    """Why the answer is an error although its HTTP status is good."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further attributes of the span, by OpenTelemetry name."""
    answers: tuple[str, Facts] | None = None
    """The answer to an earlier call that this call has fetched: that call's name (`responses.answer_name`), and its
    facts."""


class GenAiNames(NamedTuple):
    """The names of a dialect's calls in OpenTelemetry's GenAI conventions."""

    operation: str
    """`gen_ai.operation.name`."""
    provider: str
    """`gen_ai.provider.name`, where the upstream's host does not tell more."""
    api: str | None = None
    """`openai.api.type`."""


class Dialect(ABC):
    """One wire format. The defaults here are those of a format of whose calls nothing is understood."""

    name: str
    """The value of `Span.dialect`."""
    family: Family
    """The provider's API."""
    unknown: bool = False
    """True if any family may have the route, and nothing is known of its meaning."""
    answers: bool = False
    """True if a call's answer is the next message of a conversation. That of a count of tokens is not."""
    generates: bool = False
    """True if a model generates the answer, which can then be compared with another."""
    uses_tokens: bool = False
    """True if calls use tokens up: those that generate, and embeddings, which use input tokens only."""
    creates: bool = False
    """True if calls create something that stays, such as a job: they are not sent twice."""
    media: bool = False
    """True if requests or answers are media, whose length tells no number of tokens (`most`). Requests may be forms."""
    nested: bool = False
    """True if bodies are in one of several other formats (`unwrap`)."""
    uses_headers: bool = False
    """True if headers of an answer tell facts too (`with_headers`)."""
    peeks: bool = True
    """True if `model` and `facts` need some fields of the body, which are then read once for both."""
    retrieves: bool = False
    """True if calls fetch answers to earlier ones (`Facts.answers`)."""
    tells_sessions: bool = False
    """True if calls are about sessions of hosted agents: answers tell what these have done (`dialects.hosted`)."""
    hosted: bool = False
    """True if a span is a turn of a hosted agent: the provider has the whole conversation, the span its newest part."""
    stateful: bool = False
    """True if a later request may name an answer in place of the conversation (`continuation_names`)."""
    state_field: bytes | None = None
    """The field, in quotes, by which a request asks for that, where not every request does."""
    conversation_field: str = ""
    """The request's field that lists the items of the conversation; empty where no conversation is followed."""
    instructions: tuple[str, ...] = ()
    """The request's fields that hold instructions apart from that list."""
    request_fields: Callable[[bytes], RequestFields] = staticmethod(peek)
    """Reads the few fields of a request's body that its head needs; all None where it cannot be read."""
    token_fields: Mapping[str, bytes] = MappingProxyType({})
    """Fields, as JSON, that ask an engine for token ids and log-probabilities; empty where no engine gives them."""
    streaming_content_type: bytes = EVENT_STREAM
    """The media type of a streamed answer."""
    end_marker: bytes | None = None
    """Bytes that stand in the last event of a stream (`is_complete`), and seldom in others."""
    websocket: bool = False
    """True if the format is spoken on WebSockets: there messages are requests (`read_client_message`), and events are
    answers (`read_server_message`)."""
    session: bool = False
    """True if a WebSocket of this format is one session: what a request refers to was said in earlier messages, and the
    server may answer unasked. Such a call is never a sample. Both bodies of it are streams of events."""
    undivided: bool = False
    """True if the answers of a session cannot be told apart, so that the session is the call."""
    error_events: bool = True
    """True if a message of a WebSocket can say an error; otherwise only the reason of its end can."""
    otel: GenAiNames | None = None
    """None where the conventions have no name for the format: its calls are plain HTTP there."""

    @property
    def makes_samples(self) -> bool:
        """True if a call may be trained on."""
        return self.generates and not self.session and not self.hosted

    @abstractmethod
    def matches(self, method: str, path: str) -> bool:
        """True if a call of this method to this path (no query, below the rollout's address) is in this format. The
        method `WEBSOCKET` stands for the opening of a WebSocket."""

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """The model a request names in its body or path; None if it names none or cannot be read. `asked`: the fields
        that were read of the body (`request_fields`), if they were."""
        return label((asked or self.request_fields(request)).model)

    def renamed(self, path: str, model: str) -> str:
        """A path (with its query) with this model in the place of the one that it names; the same path where it names
        none."""
        return path

    def asks_stream(self, request: bytes, path: str) -> bool:
        """True if a request asks for a streamed answer."""
        return _STREAM.search(request) is not None

    def begins_stream(self, body: bytes) -> bool | None:
        """True if an answer with these first bytes is a stream; None while there are too few bytes to tell."""
        return begins_event_stream(body)

    def is_stream(self, labelled: bool, request: bytes, path: str, response: bytes) -> bool:
        """True if an answer is a stream, whatever its content type. `labelled`: the content type is that of streams.
        Servers send a stream that was asked for under any type, and an error or a plain answer under that of
        streams."""
        if labelled:
            return response.lstrip(_BLANK)[:1] not in (b"{", b"[")
        return self.begins_stream(response) is True and self.asks_stream(request, path)

    @abstractmethod
    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The summary's facts from decoded bodies. Must be cheap, but of a stream all events count. `asked`: the fields
        that were read of the body (`request_fields`), if they were."""

    def with_headers(self, facts: Facts, headers: Iterable[tuple[bytes, bytes]]) -> Facts:
        """The facts with those that an answer's headers (name, value) tell."""
        return facts

    def unwrap(self, request: bytes, response: bytes, stream: bool) -> tuple[Dialect, bytes] | None:
        """The format of bodies that are `nested`, and the answer as that format's own API would send it. None if this
        version does not know the format."""
        return None

    @abstractmethod
    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The whole exchange as a Turn, from decoded bodies."""

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """The passages that a call adds to its conversation: those of the request after the model's last answer, and
        those of the answer. `whole` is called where the request has such an answer; it returns True if the earlier
        messages are new as well."""
        return turn_passages(self.read(request, response, stream))

    def system_texts(self, request: bytes) -> RequestTexts:
        """The system and developer texts of a request, in the order of the wire format. Empty if the body cannot be
        read."""
        return RequestTexts([])

    def tool_texts(self, request: bytes) -> list[TextLocation]:
        """The descriptions of the tools on offer. Their names and schemas are not texts."""
        return []

    @staticmethod
    def read_client_message(message: bytes) -> ClientMessageFacts:
        """Read a client's message on a WebSocket."""
        return ClientMessageFacts(ClientMessageKind.OTHER)

    @staticmethod
    def read_server_message(message: bytes) -> ServerMessageFacts:
        """Read a server's message on a WebSocket."""
        return ServerMessageFacts(ServerMessageKind.OTHER)

    def session_id(self, path: str) -> str | None:
        """The id of the hosted agent's session that a path names (no query); None if it names none."""
        return None

    def gives_work(self, method: str, path: str) -> bool:
        """True if a call may make a hosted agent work, which then uses tokens."""
        return False

    def is_idle(self, path: str) -> bool:
        """True if a POST to a path about hosted agents (no query) certainly gives no agent work."""
        return False

    def tool_run(self, request: bytes, response: bytes, stream: bool) -> tuple[Any, Any, str | None]:
        """(arguments, result, error message) of a run of a tool, as JSON values; None for each that is missing."""
        return None, None, None

    def is_prewarm(self, request: bytes) -> bool:
        """True if a request wants no answer, and only has the provider read its beginning in advance."""
        return False

    def most(self, request: bytes, form: str = "") -> Usage | None:
        """The most that a call may use, by its request; None where that follows from the request's length. `form`: the
        content type of a form."""
        return None

    def is_complete(self, response: bytes) -> bool:
        """True when a stream has sent its last event: its client may leave without waiting for the end of the body, as
        the official SDKs do."""
        return False

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        """One fingerprint source per message, oldest first, equal for equal messages whatever the JSON formatting
        or cache markers. Empty when the request holds no conversation."""
        return []

    def reply_fingerprint(self, response: bytes, stream: bool) -> bytes:
        """Fingerprint source of the assistant's answer, equal to the one `message_fingerprints` gives for the same
        message when the client sends it back; empty when there is none."""
        return b""

    def items(self, request: bytes) -> ConversationItems:
        """The items of a request's conversation as raw JSON, and the fields that the summary needs. Empty where it
        holds no conversation or cannot be read."""
        return ConversationItems(None, [])

    def item_fingerprint(self, item: bytes) -> bytes:
        """Fingerprint source of an item, equal for equal ones whatever the JSON formatting or cache markers; empty for
        items that clients drop or move, such as reasoning."""
        return b""

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        """Fingerprint sources of the items of the answer, as `item_fingerprint` gives them when the client sends
        them back."""
        return []

    def continuation_names(self, response: bytes, stream: bool) -> list[str]:
        """The names by which a later request may refer to this answer instead of sending the conversation: its id, or
        that of the conversation that the provider keeps; also names of compactions (`COMPACTED`). Must be cheap."""
        return []

    def fetched_response(self, path: str) -> str | None:
        """The provider's id of the answer that a call fetches, where `retrieves`."""
        return None

    def resumed(self, begun: bytes, rest: bytes, path: str) -> bytes | None:
        """A whole stream, of its beginning and the rest that a call of this path has fetched. None where the second is
        whole by itself, or does not follow the first."""
        return None

    def server_tools(self, asked: Json) -> list[str]:
        """The kinds of a request's tools that the provider would run itself, instead of its client."""
        return []

    def continuation(self, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json] | None:
        """An answer and the results of its tool calls, in their order, as items of the next request's conversation, as
        the official SDK sends them back; None where a call has no result that can be written."""
        return None

    def conversation(self, asked: Json) -> list[Any]:
        """The items of a request's conversation, unchanged, to which those of `continuation` may be added."""
        found = asked.get(self.conversation_field)
        if isinstance(found, str):
            return [{"role": "user", "content": found}]
        return list(arr(found)) if isinstance(found, list) else [] if found is None else [found]

    def with_conversation(self, asked: Json, items: Sequence[Any]) -> Json:
        """The request with these items as its conversation."""
        return asked | {self.conversation_field: list(items)}

    def answer_text_pattern(self, stream: bool) -> re.Pattern[bytes]:
        """Return a pattern that finds each text in an answer once: where nobody counted tokens, they are estimated from
        its length."""
        return ANSWER_TEXT


# The base of dialects whose calls POST one JSON object and get one answer, plain or streamed.
#
# Such a dialect is a handful of pure functions over wire objects. `assemble` folds a stream into the body that a
# plain call would have had, so that answers are read in one way and not in two.

MODEL = ("assistant", "model")
"""The roles of the model's own messages."""


class _RoleField(msgspec.Struct):
    role: Any = None


_made = lenient(_RoleField)


class JsonPostDialect(Dialect):
    """Base of the dialects whose calls POST one JSON object."""

    answers = generates = uses_tokens = True
    routes: ClassVar[frozenset[str]]
    """The dialect's paths; each with and without /v1, since a base URL may end in it or not."""
    non_sampling_fields: ClassVar[frozenset[str]]
    """The request's fields that are no sampling parameters."""
    cut: Callable[[bytes], tuple[RequestFields, RequestMembers]] = staticmethod(cutter(RequestFields))
    """Reads the fields that hold the conversation."""
    client_tools: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the types of tools that the client runs itself."""
    untyped_tool: ClassVar[str] = "function"
    """The type of a tool that names none."""
    model_field: ClassVar[str] = "model"
    id_field: ClassVar[str] = "id"
    """The answer's fields for the model that served it, and for its id."""

    def matches(self, method: str, path: str) -> bool:
        """True for a POST to exactly one of the routes."""
        return method == "POST" and path in self.routes

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        problems: list[str] = []
        asked = document(request, "request", problems)
        answer = self.answer(response, stream, problems)
        said = self.sampling(asked)
        return Turn(
            dialect=self.name,
            model=text(asked.get("model")),
            model_served=text(answer.get(self.model_field)),
            response_id=text(answer.get(self.id_field)),
            stream=stream,
            sampling=said,
            effective=sampling_parameters(said, answer),
            forced=self.forcing_field(asked),
            messages=self.messages(asked, problems),
            tools=self.tools(asked),
            choices=self.choices(answer),
            usage=self.usage(answer),
            error=self.error(answer),
            problems=problems,
        )

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        """The passages of the items after the last one that the model made, and those of the answer."""
        asked = self.without_history(request, whole)
        answer = self.answer(response, stream, []) if response else Json()
        error = self.error(answer)
        return chain(
            body_passages(request, False) if asked is None else self.request_passages(asked),
            self.answer_passages(answer),
            () if error is None else (error_passage(error),),
        )

    def without_history(self, request: bytes, whole: Callable[[], bool]) -> Json | None:
        """A request reduced to the items that it adds to the conversation; None if it cannot be read."""
        items = self.items(request).raw if self.conversation_field else []
        # Messages in the model's role at the end were put there for the model to continue (a prefill): they are new.
        asked = next((at for at in range(len(items), 0, -1) if not self.is_model_item(items[at - 1])), 0)
        begins = next((at for at in range(asked, 0, -1) if self.is_model_item(items[at - 1])), 0)
        if begins and not whole():
            return {self.conversation_field: [loads(bytes(item)) for item in items[begins:]]}
        whole_request = loads(request)
        return obj(whole_request) if isinstance(whole_request, dict) or not request else None

    def is_model_item(self, item: msgspec.Raw) -> bool:
        """True if the model made this item of a conversation."""
        return _made(item).role in MODEL

    def request_passages(self, asked: Json) -> Iterable[Passage]:
        return (passage for message in self.messages(asked, []) for passage in message_passages(message, False))

    def answer_passages(self, answer: Json) -> Iterable[Passage]:
        return (passage for choice in self.choices(answer) for passage in message_passages(choice.message, True))

    def system_texts(self, request: bytes) -> RequestTexts:
        """The texts that `system_pointers` points at."""
        return texts(request, self.system_pointers)

    def tool_texts(self, request: bytes) -> list[TextLocation]:
        """The texts that `description_pointers` points at."""
        return texts(request, lambda body: (self.description_pointers(body), None)).places

    def system_pointers(self, request: bytes) -> TextPointers:
        """Point at the strings that are system texts; none unless a dialect has any. Raises `loose_json.UNREADABLE`."""
        return (), None

    def description_pointers(self, request: bytes) -> Iterable[TextPointer]:
        """Point at the strings that describe tools; none unless a dialect has any. Raises `loose_json.UNREADABLE`."""
        return ()

    def message_fingerprints(self, request: bytes) -> list[bytes]:
        """One fingerprint source per message; none where the dialect's requests list no conversation."""
        said = self.messages(obj(loads(request)), []) if self.conversation_field else []
        sources = [fingerprint(message) for message in said]
        return [source for source in sources if source]

    def reply_fingerprint(self, response: bytes, stream: bool) -> bytes:
        """Fingerprint source of the first choice."""
        choices = self.choices(self.answer(response, stream, [])) if self.conversation_field else []
        return fingerprint(choices[0].message) if choices else b""

    def items(self, request: bytes) -> ConversationItems:
        """The instructions, then each item of the conversation."""
        asked, values = self.cut(request)
        return ConversationItems(asked, self.conversation_items(values))

    def conversation_items(self, values: RequestMembers) -> list[msgspec.Raw]:
        """The items among the members that were read of a request."""
        turns = values.get(self.conversation_field)
        said = [member_json(values[name]) for name in self.instructions if name in values]
        before = [msgspec.Raw(self.instruction_item(it)) for it in said if it not in (b"", b"null", b'""', b"[]")]
        if isinstance(turns, list):
            return [*before, *turns] if before else turns
        one = member_json(turns)
        if one.startswith(b'"'):
            one = b'{"role":"user","content":' + one + b"}"
        return [*before, msgspec.Raw(one)] if one.startswith(b"{") else before

    def instruction_item(self, said: bytes) -> bytes:
        """Instructions as an item of the conversation."""
        return b'{"role":"system","content":' + said + b"}"

    def item_fingerprint(self, item: bytes) -> bytes:
        """Fingerprint source of the message in an item."""
        wire = loads(item)
        return plain_fingerprint(wire) or b"".join(
            map(fingerprint, self.messages({self.conversation_field: [wire]}, []))
        )

    def reply_fingerprints(self, response: bytes, stream: bool) -> list[bytes]:
        """Fingerprint source of the first choice, as a list."""
        said = self.reply_fingerprint(response, stream)
        return [said] if said else []

    def server_tools(self, asked: Json) -> list[str]:
        """The types of tools that clients do not run."""
        offered = asked.get("tools")
        kinds = [
            text(tool.get("type")) or self.untyped_tool
            for tool in objs([offered] if isinstance(offered, dict) else offered)
        ]
        return [kind for kind in kinds if not kind.startswith(self.client_tools)]

    def continuation(self, response: bytes, stream: bool, results: Sequence[Part]) -> list[Json] | None:
        """`next_items` of an answer, plain or streamed."""
        return self.next_items(self.answer(response, stream, []), results)

    def next_items(self, answer: Json, results: Sequence[Part]) -> list[Json] | None:
        """The items that stand for an answer and its results in the next request; None unless a dialect overrides
        it."""
        return None

    def answer(self, response: bytes, stream: bool, problems: list[str]) -> Json:
        """The body of a plain answer, also of one that was streamed."""
        return self.assemble(response, problems) if stream else document(response, "response", problems)

    def sampling(self, asked: Json) -> Json:
        """The sampling parameters of a request."""
        return {key: value for key, value in asked.items() if key not in self.non_sampling_fields}

    def forcing_field(self, asked: Json) -> str | None:
        """The field of a request that makes a grammar force tokens; None if nothing does."""
        return forcing_field(asked)

    @abstractmethod
    def assemble(self, body: bytes, problems: list[str]) -> Json:
        """Fold a stream into the body of a plain answer."""

    @abstractmethod
    def messages(self, asked: Json, problems: list[str]) -> list[Message]:
        """The conversation of a request."""

    def tools(self, asked: Json) -> list[Tool]:
        """The tools of a request; none unless a dialect has any."""
        return []

    @abstractmethod
    def choices(self, answer: Json) -> list[Choice]:
        """The choices of an answer."""

    @abstractmethod
    def usage(self, answer: Json) -> Usage | None:
        """The token counts of an answer."""

    def error(self, answer: Json) -> str | None:
        """The error message of an answer; None if it is no error."""
        return error_message(answer)


def routes(*paths: str) -> frozenset[str]:
    """Each path with and without /v1."""
    return frozenset(path for tail in paths for path in (tail, "/v1" + tail))


def choices_of(items: Any, message: Callable[[Json], Message], finish: str) -> list[Choice]:
    """The choices in a list, each with its index, or its place where it has none. `message` makes the message of a
    choice; `finish` is the field of its finish reason."""
    return [
        Choice(
            index=at if (index := count(item.get("index"))) is None else index,
            message=message(item),
            finish=text(item.get(finish)),
        )
        for at, item in enumerate(objs(items))
    ]
