"""The base of dialects whose calls POST one JSON object and get one answer, plain or streamed.

Such a dialect is a handful of pure functions over wire objects. `assemble` folds a stream into the body that a plain
call would have had, so that answers are read in one way and not in two.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from penstock.gateway.model.passage import Passage
from penstock.gateway.model.span import Usage
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn
from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.items import ConversationItems, RequestMembers, cutter, member_json
from penstock.gateway.wire.dialects.loose_json import (
    Json,
    RequestFields,
    count,
    document,
    error_message,
    lenient,
    loads,
    obj,
    objs,
    text,
)
from penstock.gateway.wire.dialects.parts import fingerprint, plain_fingerprint
from penstock.gateway.wire.dialects.passages import body_passages, error_passage, message_passages
from penstock.gateway.wire.dialects.sampling import forcing_field, sampling_parameters
from penstock.gateway.wire.dialects.text_spans import RequestTexts, TextLocation, TextPointer, TextPointers, texts

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
        """Point at the strings that are system texts; none unless a dialect has any. Raises `wire.UNREADABLE`."""
        return (), None

    def description_pointers(self, request: bytes) -> Iterable[TextPointer]:
        """Point at the strings that describe tools; none unless a dialect has any. Raises `wire.UNREADABLE`."""
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
