"""The messages of MCP as a dialect: the facts for an exchange's span, and the exchange as a turn.

`dialects.mcp` reads the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.gateway.model.passage import Passage
from penstock.gateway.model.turn import Choice, Message, Part, Tool, Turn
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.family import Family
from penstock.gateway.wire.dialects.loose_json import Json, RequestFields, arr, dumps, loads, obj, objs, text
from penstock.gateway.wire.dialects.mcp import CALL, MCP, PREFIX, JsonRpcMessage, answer_to, id_text, messages, outcome
from penstock.gateway.wire.dialects.opaque import OpaqueDialect
from penstock.gateway.wire.dialects.passages import turn_passages
from penstock.gateway.wire.dialects.text_spans import FlatToolFields, TextLocation, TextPointer, texts, tool_pointers


class _ToolListAnswer(msgspec.Struct):
    result: FlatToolFields | None = None


_offered = msgspec.json.Decoder(_ToolListAnswer).decode


class McpDialect(OpaqueDialect):
    """Messages between an agent and a server of tools."""

    name = "mcp"
    family: Family = MCP
    unknown = False

    def matches(self, method: str, path: str) -> bool:
        """True for every path of a server."""
        return path.startswith(PREFIX)

    def peek(self, request: bytes) -> RequestFields | None:
        """None: no model is named."""
        return None

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: no model is called."""
        return None

    def asks_stream(self, request: bytes, path: str) -> bool:
        """False: the server chooses how it answers."""
        return False

    def facts(self, request: bytes, response: bytes, stream: bool, asked: RequestFields | None = None) -> Facts:
        """The facts of the request's answer. Of several requests in one body (revision 2025-03-26) the first counts."""
        first = next((one for one in messages(request) if one.kind == "request"), None)
        answer = None if first is None else answer_to(first.id, response, stream)
        if answer is None:
            return Facts(failed="error_body" if first is not None and _refused(response) else None)
        failed, finish, attributes = outcome(answer.raw)
        return Facts(failed=failed, finish=finish, attributes=attributes)

    def read(self, request: bytes, response: bytes, stream: bool) -> Turn:
        """The messages in both directions; a tool's call and result as such."""
        turn = Turn(dialect=self.name, stream=stream)
        sent, told = messages(request) if request else [], list(_in_order(response, stream))
        called = {one.id for one in sent if one.method == CALL}
        turn.messages = [Message(role="client", parts=[_part_sent(one)]) for one in sent]
        parts = [part for one in told for part in _parts_told(one, called, turn)]
        turn.choices = [Choice(message=Message(role="server", parts=parts))] if parts else []
        return turn

    def passages(self, request: bytes, response: bytes, stream: bool, whole: Callable[[], bool]) -> Iterable[Passage]:
        return turn_passages(self.read(request, response, stream))

    def tool_texts(self, request: bytes) -> list[TextLocation]:
        """The descriptions of the tools in an answer to `tools/list`; a request has none."""
        return texts(request, lambda body: (_described(body), None)).places

    def is_complete(self, response: bytes) -> bool:
        """False: the bytes do not tell whether this was the last event."""
        return False


def _described(answer: bytes) -> Iterator[TextPointer]:
    offers = _offered(answer).result
    for at, tool in enumerate(offers.tools or () if offers is not None else ()):
        yield from tool_pointers(tool, ("result", "tools", at))


def _refused(response: bytes) -> bool:
    """True if an error has no request id: the server could not read the request."""
    return any(one.kind == "answer" and not one.id for one in messages(response))


def _in_order(response: bytes, stream: bool) -> Iterator[JsonRpcMessage]:
    bodies = (event.data.encode() for event in sse.events(response)) if stream else iter([response] if response else [])
    return (one for body in bodies for one in messages(body))


def _part_sent(one: JsonRpcMessage) -> Part:
    value = loads(one.raw)
    if one.method == CALL and one.kind == "request":
        params = obj(obj(value).get("params"))
        arguments = None if "arguments" not in params else dumps(params["arguments"])
        return Part(type="tool_call", id=id_text(one.id), name=text(params.get("name")), arguments=arguments)
    return Part(type="unknown", data=_params(value))


def _parts_told(one: JsonRpcMessage, called: set[bytes], turn: Turn) -> Sequence[Part]:
    value = obj(loads(one.raw))
    if one.kind == "answer" and (message := text(obj(value.get("error")).get("message"))) is not None:
        turn.error = message
    result = obj(value.get("result"))
    if one.kind == "answer" and one.id in called and result:
        content = objs(result.get("content"))
        said = [words for block in content if (words := text(block.get("text"))) is not None]
        return [
            Part(type="tool_call_response", id=id_text(one.id), text="\n".join(said) or None, data=_rest(result, said))
        ]
    turn.tools += [_tool(tool) for tool in objs(result.get("tools"))]
    return [Part(type="unknown", data=result or _params(value))]


def _params(value: Any) -> Any:
    """A message's parameters without `_meta`; its method and id are on its span. The whole value if it is no
    message."""
    said = obj(value)
    params = obj(said.get("params"))
    return ({name: one for name, one in params.items() if name != "_meta"} or None) if "method" in said else value


def _rest(result: Json, said: list[str]) -> Any:
    """The whole result where its texts do not hold all of it; else None."""
    plain = len(said) == len(arr(result.get("content"))) and not result.keys() - {"content", "isError"}
    return None if plain and result.get("isError") is not True else result


def _tool(tool: Json) -> Tool:
    return Tool(
        name=text(tool.get("name")) or "", description=text(tool.get("description")), parameters=tool.get("inputSchema")
    )
