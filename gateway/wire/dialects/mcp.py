"""MCP, the Model Context Protocol: JSON-RPC 2.0 between an agent and a server of tools, at `/mcp/{server}`.

An exchange carries messages: requests, notifications and answers. The agent POSTs one of them (several in revision
2025-03-26). The server answers with one JSON document, or with a stream of events, in which it may send notifications
and requests of its own before the answer. Revisions up to 2025-11-25 have sessions, whose answers may come in a later
exchange; 2026-07-28 has none.

The span of an exchange is named by its request: a `tools/call` is of kind `tool`, everything else of kind `mcp`. Names
of attributes are those of the OpenTelemetry conventions for MCP (semantic-conventions-genai, status Development).
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, NamedTuple

import msgspec
import orjson

from penstock.gateway.model.known_secrets import fingerprint
from penstock.gateway.model.turn import Choice, Message, Part, Passage, Tool, Turn
from penstock.gateway.wire.dialects import sse
from penstock.gateway.wire.dialects.base import Facts
from penstock.gateway.wire.dialects.family import Failure, Family, prefix_field
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, elements, locate
from penstock.gateway.wire.dialects.loose_json import (
    BOM,
    UNREADABLE,
    Json,
    RequestFields,
    arr,
    dumps,
    label,
    lenient,
    loads,
    obj,
    objs,
    repaired,
    text,
)
from penstock.gateway.wire.dialects.opaque import OpaqueDialect
from penstock.gateway.wire.dialects.parts import turn_passages
from penstock.gateway.wire.dialects.request_body import FlatToolFields, TextLocation, TextPointer, texts, tool_pointers

PREFIX: Final = "/mcp/"
CALL: Final = "tools/call"
LISTENING: Final = ("listen", "subscriptions/listen")
"""Names of exchanges whose answer is an open-ended stream: a GET, and the request of 2026-07-28. The tape has the
stream's length; each message in it is a span of its own."""
_INVALID, _FAILED = -32600, -32603
"""JSON-RPC's codes for an invalid request, and for an internal error."""
_PACKED: Final = re.compile(rb"=\?base64\?([A-Za-z0-9+/=]*)\?=")
_EXACT: Final = 1 << 53
"""Integers below this are exact however they are written."""
_WHOLE: Final = re.compile(rb"0|-?[1-9][0-9]{0,39}")
"""Matches ids as nearly all are. Each can be written in one way only; a large one, read as a number, would equal
another."""
_CROWDED: Final = 500_000
"""Most commas in a body of several messages that is read: three bytes could become an object each."""
_TAIL: Final = 4
"""Number of events at the end of a stream in which the answer is looked for first."""


class _McpFamily(Family):
    """Servers of tools: they have a table of their own in penstock.toml, and no model."""

    name = "mcp"
    credential_header = b"Authorization"
    credential_scheme = b"Bearer "
    models: ClassVar[bool] = False

    def error_body(self, status: int, message: str, kind: str | None = None, field: str | None = None) -> bytes:
        return error_of(b"null", status, message, kind, field)


MCP: Final[Family] = _McpFamily()


def error_of(
    id: bytes,
    status: int,
    message: str,
    kind: str | None,
    field: str | None,
    code: int | None = None,
    data: Mapping[str, str] | None = None,
) -> bytes:
    """An error answer of JSON-RPC for a refused request. `id`: the request's id, as JSON; `code`, `data`: where they
    are not the usual ones."""
    code = code or (_INVALID if status < 500 else _FAILED)
    error = {"code": code, "message": prefix_field(field, message), "data": {"reason": kind, **(data or {})}}
    return b'{"jsonrpc":"2.0","id":%b,"error":%b}' % (id, orjson.dumps(error))


# -- messages ---------------------------------------------------------------------------------------------------------


class JsonRpcMessage(NamedTuple):
    """The fields of a message that the gateway reads."""

    kind: Literal["request", "notification", "answer", "unreadable"]
    id: bytes
    """The id of a request or an answer, as canonical JSON: `1` is not `"1"`. Empty where there is none."""
    method: str
    raw: bytes


class _RpcMessage(msgspec.Struct):
    id: msgspec.Raw = msgspec.Raw()
    method: Any = None
    params: msgspec.Raw = msgspec.Raw()
    result: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class _RpcParams(msgspec.Struct):
    name: Any = None
    uri: Any = None
    meta: Any = msgspec.field(default=None, name="_meta")
    requestState: Any = None


class _RpcRequest(msgspec.Struct):
    method: Any = None
    params: _RpcParams | None = None


class _CancellationParams(msgspec.Struct):
    requestId: msgspec.Raw = msgspec.Raw()


class _Cancellation(msgspec.Struct):
    params: _CancellationParams | None = None


class _RpcResult(msgspec.Struct):
    isError: Any = None
    resultType: Any = None
    requestState: Any = None
    protocolVersion: Any = None


class _RpcError(msgspec.Struct):
    code: Any = None


class _RpcAnswer(msgspec.Struct):
    result: _RpcResult | None = None
    error: _RpcError | None = None


_ID: Final[KeyTree] = {"id": LEAF}
_wire = msgspec.json.Decoder(_RpcMessage).decode
_batch = msgspec.json.Decoder(list[msgspec.Raw]).decode
_request = lenient(_RpcRequest)
_answer = lenient(_RpcAnswer)
_unwanted = lenient(_Cancellation)


def messages(body: bytes) -> list[JsonRpcMessage]:
    """The messages of a body, or of an event's data. One that cannot be read has the kind `unreadable`."""
    if body.removeprefix(BOM).lstrip()[:1] != b"[":
        return [message(body)]
    try:
        if body.count(b",") > _CROWDED:
            raise ValueError("too many messages")
        return [message(bytes(raw)) for raw in _batch(body)]
    except UNREADABLE:
        return _apart(body)


def _apart(body: bytes) -> list[JsonRpcMessage]:
    """The messages of a list that msgspec refuses."""
    try:
        if body.count(b",") > _CROWDED:
            raise ValueError("too many messages")
        _ = repaired(_batch, body)
        return [message(body[start:end]) for start, end in elements(body)]
    except UNREADABLE:
        return [JsonRpcMessage("unreadable", b"", "", body)]


def message(raw: bytes) -> JsonRpcMessage:
    """Read one message. Its parameters and its result are skipped, not made into objects."""
    try:
        wire = _wire(raw)
        id = _canonical(bytes(wire.id))
    except UNREADABLE:
        try:
            wire = repaired(_wire, raw)
            start, end = locate(raw, _ID).get(("id",), (0, 0))
            id = _canonical(raw[start:end])
        except UNREADABLE:
            return JsonRpcMessage("unreadable", b"", "", raw)
    answered = bytes(wire.result) or bytes(wire.error)
    if isinstance(wire.method, str):
        if answered:
            # One reader takes it for a request, another one for an answer.
            return JsonRpcMessage("unreadable", id, "", raw)
        return JsonRpcMessage("request" if id else "notification", id, wire.method[:128], raw)
    return JsonRpcMessage("answer" if answered else "unreadable", id, "", raw)


def _canonical(id: bytes) -> bytes:
    """An id as canonical JSON. Raises `ValueError` for an id that only looked like JSON while it was skipped: no UTF-8,
    an infinite number, more levels than can be written."""
    if id in (b"", b"null"):
        return b""
    if _WHOLE.fullmatch(id):
        return id
    try:
        value = orjson.loads(id)
    except ValueError:
        # Half a surrogate pair stays as it is.
        value = json.loads(id)
        if not isinstance(value, str):
            raise
        return json.dumps(value).encode()
    if isinstance(value, float):
        # A number is the same however it is written; one that orjson cannot hold exactly keeps its text.
        return b"%d" % int(value) if value.is_integer() and abs(value) < _EXACT else id
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise ValueError(str(error)) from None


class McpRequestFacts(NamedTuple):
    """The facts in a request for its span."""

    target: str | None
    """The tool, prompt or resource of the request."""
    protocol: str | None
    traceparent: str | None
    attributes: dict[str, Any]


_TARGETS: Final = {CALL: "gen_ai.tool.name", "prompts/get": "gen_ai.prompt.name", "resources/read": "mcp.resource.uri"}


def request_facts(sent: JsonRpcMessage) -> McpRequestFacts:
    """The facts in a request or a notification for its span."""
    params = _request(sent.raw).params or _RpcParams()
    about = _TARGETS.get(sent.method)
    target = None if about is None else label(params.uri if sent.method == "resources/read" else params.name)
    meta = obj(params.meta)
    protocol = label(meta.get("io.modelcontextprotocol/protocolVersion"))
    attributes: dict[str, Any] = {"mcp.method.name": sent.method}
    if sent.id:
        attributes["jsonrpc.request.id"] = id_text(sent.id)
    if about is not None and target is not None:
        attributes[about] = target
    if sent.method == CALL:
        attributes["gen_ai.operation.name"] = "execute_tool"
    if (state := _hashed(params.requestState)) is not None:
        attributes["penstock.mcp.continues"] = state
    return McpRequestFacts(target, protocol, text(meta.get("traceparent")), attributes)


def meta(sent: JsonRpcMessage) -> Json:
    """The `_meta` of a request or a notification."""
    return obj((_request(sent.raw).params or _RpcParams()).meta)


def progress_token(sent: JsonRpcMessage) -> bytes | None:
    """The progress token that a notification reports on, as canonical JSON; None where it has none."""
    params = obj(obj(loads(sent.raw)).get("params"))
    return orjson.dumps(params["progressToken"]) if "progressToken" in params else None


def mismatches(sent: JsonRpcMessage, about: McpRequestFacts, headers: Mapping[bytes, bytes]) -> str | None:
    """Names of headers that contradict the message (since 2026-07-28 a server must refuse that); None where there are
    none. A missing header contradicts nothing."""
    said = {b"mcp-method": sent.method, b"mcp-name": about.target, b"mcp-protocol-version": about.protocol}
    odd = [
        name.decode()
        for name, value in said.items()
        if name in headers and value is not None and label(header_text(headers[name])) != value
    ]
    return ",".join(odd) or None


def header_text(value: bytes) -> str:
    """The text of a header, which is in base64 where it is not plain ASCII."""
    packed = _PACKED.fullmatch(value)
    try:
        return b64decode(packed[1], validate=True).decode() if packed else value.decode("latin-1").strip()
    except ValueError:
        return ""


def cancelled_request_id(sent: JsonRpcMessage) -> bytes | None:
    """The id of the request that a notification cancels; None if it cannot be read or is no cancellation."""
    params = _unwanted(sent.raw).params if sent.method == "notifications/cancelled" else None
    # An id that was read from a repaired copy may differ in the text itself.
    id = b"" if params is None or (said := bytes(params.requestId)) not in sent.raw else said
    try:
        return _canonical(id) or None
    except UNREADABLE:
        return None


def id_text(id: bytes) -> str:
    """An id as the conventions want it: a string of at most 128 characters."""
    return id.decode("utf-8", "replace").strip('"')[:128]


def _hashed(state: Any) -> str | None:
    """A short hash of the state that a multi-round request hands on from round to round; None where there is none."""
    return fingerprint(state.encode("utf-8", "surrogatepass")) if isinstance(state, str) else None


def outcome(answer: bytes) -> tuple[Failure | None, str | None, dict[str, Any]]:
    """(why an answer is an error, how it ended, attributes)."""
    said = _answer(answer)
    if said.error is not None:
        code = said.error.code
        found = str(code) if isinstance(code, int) else "0"
        return "rpc_error", None, {"rpc.response.status_code": found, "error.type": found}
    result, attributes = said.result or _RpcResult(), dict[str, Any]()
    if (state := _hashed(result.requestState)) is not None:
        attributes["penstock.mcp.state"] = state
    if (version := label(result.protocolVersion)) is not None:
        attributes["mcp.protocol.version"] = version
    finish = None if result.resultType in (None, "complete") else label(result.resultType)
    if result.isError is True:
        return "tool_error", finish, attributes | {"error.type": "tool_error"}
    return None, finish, attributes


def error_code(answer: bytes) -> int | None:
    """The code of an answer that is an error; None of any other."""
    error = _answer(answer).error
    return error.code if error is not None and isinstance(error.code, int) else None


# -- reading ----------------------------------------------------------------------------------------------------------


def _said(response: bytes, stream: bool) -> Iterator[JsonRpcMessage]:
    """The messages of an answer; those of a stream's last events first, since the answer is among them."""
    if not stream:
        yield from messages(response)
        return
    tail = sse.last_data(response, _TAIL)
    yield from (one for data in reversed(tail) for one in messages(data))
    yield from (one for event in sse.events(response) for one in messages(event.data.encode()))


def answer_to(id: bytes, response: bytes, stream: bool) -> JsonRpcMessage | None:
    """The answer to a request in the body of an exchange; None where there is none."""
    return next((one for one in _said(response, stream) if one.kind == "answer" and one.id == id), None)


# The messages of MCP as a dialect: the facts for an exchange's span, and the exchange as a turn.


class _ToolListAnswer(msgspec.Struct):
    result: FlatToolFields | None = None


_offered = msgspec.json.Decoder(_ToolListAnswer).decode


class McpDialect(OpaqueDialect):
    """Messages between an agent and a server of tools."""

    name = "mcp"
    peeks = False
    family: Family = MCP
    unknown = False

    def matches(self, method: str, path: str) -> bool:
        """True for every path of a server."""
        return path.startswith(PREFIX)

    def model(self, request: bytes, path: str = "", asked: RequestFields | None = None) -> str | None:
        """None: no model is called."""
        return None

    def tool_run(self, request: bytes, response: bytes, stream: bool) -> tuple[Any, Any, str | None]:
        sent = next((one for one in messages(request) if one.kind == "request"), None)
        if sent is None:
            return None, None, None
        answered = answer_to(sent.id, response, stream)
        told = obj(loads(answered.raw)) if answered is not None else {}
        arguments = obj(obj(loads(sent.raw)).get("params")).get("arguments")
        return arguments, told.get("result"), text(obj(told.get("error")).get("message"))

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


# MCP messages whose middle is missing, because they were too long to be kept: reads their two ends.
#
# A message of 100 MB is one large result or one large argument. Its id and its method are short, and stand before it
# or behind it: the scalar members at the beginning of the object, and those at its end, are read as if the object had
# no others.

_SCALAR: Final = rb'(?:"(?:[^"\\]|\\.)*"|-?[0-9][0-9.eE+-]*|true|false|null)'
_MEMBER: Final = rb'"(?:[^"\\]|\\.)*"\s*:\s*' + _SCALAR
_BEGINNING: Final = re.compile(rb"\s*\{((?:\s*" + _MEMBER + rb"\s*,)*)")
_END: Final = re.compile(rb"((?:,\s*" + _MEMBER + rb"\s*)+)\}\s*\Z")
_READ: Final = 2048
"""Bytes of each end that are read."""


def read_truncated_message(head: bytes, tail: bytes) -> JsonRpcMessage:
    """A message of which only the beginning and the end are known."""
    begun, ended = _BEGINNING.match(head[:_READ]), _END.search(tail[-_READ:])
    before = b"" if begun is None else begun[1].rstrip().rstrip(b",")
    after = b"" if ended is None else ended[1].lstrip(b",")
    said = message(b"{%b}" % b",".join(filter(None, (before, after))))
    # The missing part is the parameters or the result: a message with an id and without a method is an answer.
    kind = "answer" if said.kind == "unreadable" and said.id else said.kind
    return said._replace(kind=kind, raw=head)
