"""Writes an answer of chat completions as one of responses.

litellm makes the response around the items: the fields echoed from the request, status, usage. The items and the events
are made here, because of what litellm's iterator (1.106.2) does to a stream. It ends every item only when the answer is
over, in another order than they began, and agents such as Codex keep them in the order of their ends. It cuts arguments
into pieces of ten characters, skips sequence numbers, and gives the response another id. For the last event it calls a
function that writes to stdout and counts tokens anew.

A plain answer and a streamed one have the same items with the same ids, which are derived from the engine's.
"""

from __future__ import annotations

from typing import Any, Final

from penstock.gateway.traffic.proxy.translation.chat_pieces import AnswerPiece, ChatAnswer, PieceKind
from penstock.gateway.traffic.proxy.translation.litellm import LiteLlmApi
from penstock.gateway.traffic.proxy.translation.responses_tools import NamespacedTool, namespaced_tools
from penstock.gateway.wire.dialects.loose_json import Json, obj

_FINISHES: Final = {"function_call": "tool_calls"}
_OPENS: Final[dict[PieceKind, str]] = {"reasoning": "reasoning", "text": "message", "refusal": "message"}
"""Type of item that a piece belongs to, by its kind; arguments belong to the call before them."""
_PARTS: Final[dict[PieceKind, tuple[str, str, str]]] = {
    "reasoning": ("reasoning_text", "text", "response.reasoning_text"),
    "text": ("output_text", "text", "response.output_text"),
    "refusal": ("refusal", "refusal", "response.refusal"),
}
"""(type, field, prefix of events) of a part, by the kind of its pieces."""
_ENDS: Final = {"completed": "response.completed", "incomplete": "response.incomplete"}
_CUT: Final = ("length", "content_filter")


class ResponsesConverter:
    """Writes one answer of responses."""

    def __init__(self, library: LiteLlmApi, asked: Json) -> None:
        self._library = library
        self._asked = asked
        self._known = namespaced_tools(asked)
        self._answer = ChatAnswer()
        self._sequence = 0
        self._items: list[Json] = []
        self._open: PieceKind | None = None
        """Kind of pieces that the newest item, or its newest part, still takes; None if it is closed."""

    def whole(self, answer: ChatAnswer, pieces: list[AnswerPiece]) -> Json:
        self._answer = answer
        for piece in pieces:
            self.feed(piece)
        self._close(_status(answer))
        return self._response(answer)

    def begin(self, answer: ChatAnswer) -> list[Json]:
        """Return the begin of a response, under the engine's id."""
        self._answer = answer
        response = self._unfinished("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def feed(self, piece: AnswerPiece) -> list[Json]:
        """Return a delta, with the ends of items that are over and the begins of new ones."""
        if piece.kind == "call":
            return [*self._close(), *self._begin_item(_call(piece, self._known.get(piece.name)), "arguments")]
        if piece.kind == "arguments":
            self._items[-1]["arguments"] += piece.text
            return [self._event("response.function_call_arguments.delta", **self._place(), delta=piece.text)]
        events = [] if self._open == piece.kind else self._begin_part(piece.kind)
        _, key, name = _PARTS[piece.kind]
        self._items[-1]["content"][-1][key] += piece.text
        return [*events, self._event(f"{name}.delta", **self._part_place(), delta=piece.text)]

    def end(self, answer: ChatAnswer) -> list[Json]:
        """Return the ends of the last item and of the response."""
        events = self._close(_status(answer))
        response = self._response(answer)
        return [*events, self._event(_ENDS[response["status"]], response=response)]

    def broken(self, message: str) -> list[Json]:
        """Return a failed response, or an error if it has not begun."""
        if not self._sequence:
            return [self._event("error", code="server_error", message=message, param=None)]
        response = self._unfinished("failed") | {"error": {"code": "server_error", "message": message}}
        return [self._event("response.failed", response=response)]

    # -- items and parts ---------------------------------------------------------------------------------------------

    def _begin_item(self, item: Json, takes: PieceKind | None) -> list[Json]:
        self._items.append(item)
        self._open = takes
        return [self._event("response.output_item.added", output_index=self._index, item=_copied(item))]

    def _begin_part(self, kind: PieceKind) -> list[Json]:
        """Begin a part of this kind, in the open item if it belongs there."""
        fits = self._open is not None and _OPENS.get(self._open) == _OPENS[kind]
        events = self._end_part() if fits else [*self._close(), *self._begin_item(self._item(_OPENS[kind]), kind)]
        self._open = kind
        self._items[-1]["content"].append(_part(kind))
        return [*events, self._event("response.content_part.added", **self._part_place(), part=_part(kind))]

    def _end_part(self) -> list[Json]:
        if self._open is None or self._open not in _PARTS:
            return []
        _, key, name = _PARTS[self._open]
        part = self._items[-1]["content"][-1]
        said: Json = {key: part[key]} | ({"logprobs": []} if self._open == "text" else {})
        return [
            self._event(f"{name}.done", **self._part_place(), **said),
            self._event("response.content_part.done", **self._part_place(), part=dict(part)),
        ]

    def _close(self, status: str = "completed") -> list[Json]:
        """End the newest item if it is open."""
        if self._open is None:
            return []
        item, events = self._items[-1], self._end_part()
        if self._open == "arguments":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **self._place(), **told)]
        self._open = None
        item["status"] = status
        return [*events, self._event("response.output_item.done", output_index=self._index, item=_copied(item))]

    def _item(self, kind: str) -> Json:
        prefix = {"reasoning": "rs", "message": "msg"}[kind]
        before = sum(item["type"] == kind for item in self._items)
        about = {"type": kind, "id": f"{prefix}_{self._answer.id}" + (f"_{before + 1}" if before else "")}
        rest: Json = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        return about | rest | {"status": "in_progress", "content": []}

    # -- events ------------------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": self._index}

    def _part_place(self) -> Json:
        parts = len(self._items[-1]["content"])
        return self._place() | {"content_index": parts - 1}

    def _event(self, kind: str, **told: Any) -> Json:
        event = {"type": kind, "sequence_number": self._sequence, **told}
        if kind == "response.output_text.delta":
            event["logprobs"] = []
        self._sequence += 1
        return event

    def _unfinished(self, status: str) -> Json:
        """The response so far, without an end."""
        about = ChatAnswer(self._answer.id, self._answer.model, self._answer.created)
        return self._response(about) | {"status": status, "incomplete_details": None, "usage": None}

    def _response(self, answer: ChatAnswer) -> Json:
        """The response with all items."""
        finish = _FINISHES.get(answer.finish or "", answer.finish)
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": finish}
        chat = self._library.answer(
            id=answer.id, created=answer.created, model=answer.model, choices=[choice], usage=answer.usage
        )
        made = self._library.responses.transform_chat_completion_response_to_responses_api_response(
            request_input="", responses_api_request=self._asked, chat_completion_response=chat
        ).model_dump(mode="json")
        made["output"] = [_copied(item) for item in self._items]
        made["parallel_tool_calls"] = self._asked.get("parallel_tool_calls") is not False
        made["usage"] = _usage(obj(made.get("usage")))
        return made


def _status(answer: ChatAnswer) -> str:
    """The status of the answer's last item."""
    return "incomplete" if answer.finish in _CUT else "completed"


def _call(piece: AnswerPiece, known: NamespacedTool | None) -> Json:
    """A tool call. `namespaced_tools`: the agent's name of its function if that is in a namespace."""
    made = {
        "type": "function_call",
        "id": f"fc_{piece.text}",
        "call_id": piece.text,
        "name": piece.name,
        "arguments": "",
        "status": "in_progress",
    }
    return made if known is None else made | {"name": known.name, "namespace": known.namespace}


def _part(kind: PieceKind) -> Json:
    name, key, _ = _PARTS[kind]
    return {"type": name, key: ""} | ({"annotations": [], "logprobs": []} if kind == "text" else {})


def _copied(item: Json) -> Json:
    """A copy of an item in its current state."""
    return item | ({"content": [dict(part) for part in item["content"]]} if "content" in item else {})


def _usage(usage: Json) -> Json:
    """Usage with the details that clients read without checking that they exist."""
    read, made = obj(usage.get("input_tokens_details")), obj(usage.get("output_tokens_details"))
    details = {
        "input_tokens_details": {"cached_tokens": read.get("cached_tokens") or 0},
        "output_tokens_details": {"reasoning_tokens": made.get("reasoning_tokens") or 0},
    }
    return usage | details
