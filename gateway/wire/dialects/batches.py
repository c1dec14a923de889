"""Batches: many requests in one, whose answers are fetched later, all together. Pure.

The table `FORMS` lists the calls about batches. A provider gives ids to batches and to the files of requests and
answers; on the tape the provider's name stands before them (`openai/batch_1`). Requests are read from the call that
makes a batch, or from the file that it names. An answer has the format of its request's path.

    openai      requests are lines of a file, `{custom_id, url, body}`; answers are lines of two others, in any order:
                `{custom_id, response: {status_code, body}, error}`
    anthropic   requests stand in the call, `requests[{custom_id, params}]`; answers are lines, in any order:
                `{custom_id, result: {type: succeeded|errored|canceled|expired, message|error}}`
    gemini      requests and answers stand in the calls, in the same order, with a key in `metadata` or none:
                `inlinedResponses[{response|error, metadata}]`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from penstock.gateway.model.span import Usage
from penstock.gateway.wire.dialects import request_body
from penstock.gateway.wire.dialects.clouds import cloud_path
from penstock.gateway.wire.dialects.json_scan import LEAF, KeyTree, elements, locate, members
from penstock.gateway.wire.dialects.loose_json import Json, label, lenient, loads, obj, objs, text

TIER: Final = "batch"
"""The tier's name in lists of prices, whatever the answer calls it."""
LONGEST_LINE: Final = 32 << 20
"""Most bytes of a line of results that is read."""
BatchAction: TypeAlias = Literal["upload", "state", "make", "results"]
_ID: Final = r"[A-Za-z0-9._~-]{1,256}"
_NAME = re.compile(_ID)


class BatchRoute(NamedTuple):
    """One kind of call that makes, tells of, or fetches batches."""

    of: str
    """The provider, which stands before ids."""
    does: BatchAction
    """Uploads a file of requests; returns the state of one batch or many; makes a batch; fetches answers."""
    calls: re.Pattern[str]
    """Matches method and path; the group is the id of the fetched file or batch."""


def _form(of: str, does: BatchAction, calls: str) -> BatchRoute:
    return BatchRoute(of, does, re.compile(calls))


FORMS: Final = (
    _form("openai", "upload", "POST (?:/v1)?/files"),
    _form("openai", "make", "POST (?:/v1)?/batches"),
    _form("openai", "state", f"GET (?:/v1)?/batches(?:/{_ID})?|POST (?:/v1)?/batches/{_ID}/cancel"),
    _form("openai", "results", f"GET (?:/v1)?/files/({_ID})/content"),
    _form("anthropic", "make", "POST (?:/v1)?/messages/batches"),
    _form("anthropic", "results", f"GET (?:/v1)?/messages/batches/({_ID})/results"),
    _form("gemini", "make", rf"POST /v1(?:(?:alpha|beta)\w*)?/models/{_ID}:batchGenerateContent"),
    _form("gemini", "results", rf"GET /v1(?:alpha|beta)\w*/batches/({_ID})"),
)


_INLINED: Final = b'"inlinedResponses"'


class Batch(NamedTuple):
    """A batch as an answer describes it."""

    name: str
    made: bool = False
    """True if this call has made the batch."""
    requests: str | None = None
    """The file of requests."""
    results: tuple[str, ...] = ()
    """The files of answers."""
    url: str = ""
    """The path for requests that do not name one themselves."""
    created: str = ""
    """The provider's time of creation: a batch with another time is another batch."""


class BatchFacts(NamedTuple):
    """The facts about batches in one call."""

    batches: tuple[Batch, ...] = ()
    uploaded: str | None = None
    """The id of an uploaded file that may hold requests."""
    fetched: str | None = None
    """The id of the batch or the file whose answers the call has fetched."""
    is_file: bool = False


@lru_cache(maxsize=4096)
def find(method: str, path: str) -> tuple[BatchRoute, str | None] | None:
    """(kind of the call, id in its path) if the call has to do with batches; else None. Remembered: paths repeat."""
    cloud = cloud_path(path)
    call = f"{method} {path if cloud is None else cloud.path}"
    for route in FORMS:
        if (found := route.calls.fullmatch(call)) is not None:
            return route, found[1] if route.calls.groups else None
    return None


def batch_facts(method: str, path: str, response: bytes) -> BatchFacts | None:
    """The facts about batches in a call's answer; None where it has nothing to do with batches."""
    found = find(method, path.partition("?")[0])
    if found is None:
        return None
    form, name = found
    if form.does == "state" and _INLINED in response:
        # Gemini's stable version has the same path as OpenAI.
        form, name = FORMS[-1], path.partition("?")[0].rpartition("/")[2]
    if form.does == "results":
        return _fetched(form, f"{form.of}/{name}", response)
    answer = obj(loads(response))
    if form.does == "upload":
        file = _kept(form, answer.get("id")) if answer.get("purpose") == "batch" else None
        return None if file is None else BatchFacts(uploaded=file)
    whole = objs(answer.get("data")) or [answer]
    batches = [it for one in whole if (it := _batch(form, one, path)) is not None]
    return BatchFacts(tuple(batches)) if batches else None


def _fetched(form: BatchRoute, name: str, response: bytes) -> BatchFacts | None:
    if form.of == "gemini":
        return BatchFacts(fetched=name) if _INLINED in response else None
    # The same call fetches files of any purpose.
    of_batch = form.of != "openai" or b'"custom_id"' in response[: 1 << 16]
    return BatchFacts(fetched=name, is_file=form.of == "openai") if of_batch else None


def _batch(form: BatchRoute, answer: Json, path: str) -> Batch | None:
    made = form.does == "make"
    if form.of == "gemini":
        name = _kept(form, (text(answer.get("name")) or "").removeprefix("batches/"))
        url = path.partition("?")[0].replace(":batchGenerateContent", ":generateContent")
        created = str(obj(answer.get("metadata")).get("createTime", ""))
        return None if name is None else Batch(name, made, url=url, created=created)
    name = _kept(form, answer.get("id"))
    if name is None:
        return None
    files = [_kept(form, answer.get(it)) for it in ("output_file_id", "error_file_id")]
    url = label(answer.get("endpoint")) or "" if form.of == "openai" else "/v1/messages"
    requests, created = _kept(form, answer.get("input_file_id")), str(answer.get("created_at", ""))
    return Batch(name, made, requests, tuple(it for it in files if it), url, created)


def _kept(form: BatchRoute, name: Any) -> str | None:
    """An id in the form that the tape has it; None if it is not valid."""
    return f"{form.of}/{name}" if isinstance(name, str) and _NAME.fullmatch(name) else None


def with_batch_tier(usage: Usage | None) -> Usage | None:
    """Usage at a batch's price."""
    return None if usage is None else usage.model_copy(update={"billed": {**(usage.billed or {}), "tier": TIER}})


# -- requests --------------------------------------------------------------------------------------------------------


class BatchRequest(NamedTuple):
    """One request of a batch."""

    body: bytes
    url: str = ""
    """The request's path, if it names one."""


class _RequestLine(msgspec.Struct):
    custom_id: str | None = None
    url: str | None = None
    body: msgspec.Raw = msgspec.Raw()
    params: msgspec.Raw = msgspec.Raw()


class _InlineMetadata(msgspec.Struct):
    key: Any = None


class _InlineEntry(msgspec.Struct):
    request: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    metadata: _InlineMetadata | None = None


class _InlineRequests(msgspec.Struct):
    requests: list[_InlineEntry] = []


class _InputConfig(msgspec.Struct):
    requests: _InlineRequests | None = None


class _BatchConfig(msgspec.Struct):
    inputConfig: _InputConfig | None = None
    input_config: _InputConfig | None = None


class _BatchCreation(msgspec.Struct):
    batch: _BatchConfig | None = None


_line, _order = lenient(_RequestLine), lenient(_BatchCreation)


class BatchInput:
    """The requests of a batch, by the name that their answers carry. Keeps the body in which they stand."""

    def __init__(self, of: str, body: bytes, content_type: str) -> None:
        """`body`: that of the call that made the batch, or that uploaded its file."""
        self._body = body
        self._places = dict[str, tuple[int, int]]()
        self._inline = dict[str, bytes]()
        if of == "gemini":
            batch = _order(body).batch or _BatchConfig()
            inlined = (batch.inputConfig or batch.input_config or _InputConfig()).requests or _InlineRequests()
            self._inline = {_key(one, at): bytes(one.request) for at, one in enumerate(inlined.requests)}
            return
        with suppress(ValueError):  # Requests before the first unreadable byte are known.
            for start, end in _posted(body) if of == "anthropic" else _lines_of(body, content_type):
                if end - start <= LONGEST_LINE and (name := _line(body[start:end]).custom_id):
                    self._places[name] = (start, end)

    def of(self, name: str) -> BatchRequest:
        """The request that belongs to an answer; an empty one if it is not known."""
        if (place := self._places.get(name)) is None:
            return BatchRequest(self._inline.get(name, b""))
        whole = self._body[slice(*place)]
        line = _line(whole)
        return BatchRequest(_exact(whole, line.body, "body") or _exact(whole, line.params, "params"), line.url or "")


def _posted(body: bytes) -> Iterator[tuple[int, int]]:
    """The offsets of the requests in the body of a call; raises `ValueError` where it cannot be read."""
    for name, at, _ in members(body):
        if name == "requests" and body[at : at + 1] == b"[":
            yield from elements(body, at)


def _lines_of(body: bytes, content_type: str) -> Iterator[tuple[int, int]]:
    """The offsets of the lines of the file in a form."""
    at, end = next(
        ((one.start, one.end) for one in request_body.form_fields(body, content_type) if one.name == "file"), (0, 0)
    )
    while at < end:
        stop = body.find(b"\n", at, end)
        stop = end if stop < 0 else stop
        yield at, stop
        at = stop + 1


def _exact(whole: bytes, read: msgspec.Raw, *path: str) -> bytes:
    """The bytes of a decoded value as they stand in the text. JSON that decoders refuse was decoded from a copy
    (`loose_json.repaired`)."""
    found = bytes(read)
    if found in whole:
        return found
    tree: KeyTree = LEAF
    for name in reversed(path):
        tree = {name: tree}
    return whole[slice(*locate(whole, tree).get(path, (0, 0)))]


# -- answers ---------------------------------------------------------------------------------------------------------


class BatchResult(NamedTuple):
    """One answer of a batch."""

    name: str
    """The name by which the batch knows the request: `custom_id`, Gemini's key, or its index."""
    body: bytes
    """The answer; where there is none, the line that gives the reason."""
    status: int | None = 200
    """The HTTP status that the provider gives."""
    error: str | None = None
    """Why the request has no good answer."""


class _LineResponse(msgspec.Struct):
    status_code: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _LineResult(msgspec.Struct):
    type: Any = None
    message: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()


class _LineError(msgspec.Struct):
    code: Any = None


class _ResultLine(msgspec.Struct):
    custom_id: str | None = None
    id: Any = None
    response: _LineResponse | None = None
    error: _LineError | None = None
    result: _LineResult | None = None


class _InlineResponses(msgspec.Struct):
    inlinedResponses: list[_InlineEntry] = []


class _OperationResponse(msgspec.Struct):
    inlinedResponses: _InlineResponses | list[_InlineEntry] | None = None


class _Operation(msgspec.Struct):
    done: Any = None
    response: _OperationResponse | None = None


_answered, _operation = lenient(_ResultLine), lenient(_Operation)
BatchError: TypeAlias = Literal["batch_error", "batch_expired", "batch_cancelled"]
"""Why a request of a batch has no answer."""
_ENDS: Final[Mapping[str, BatchError]] = {
    "errored": "batch_error",
    "canceled": "batch_cancelled",
    "expired": "batch_expired",
}
"""Anthropic's types of results that are no answers, and the error of each."""
_CODES: Final[Mapping[str, BatchError]] = {"batch_expired": "batch_expired", "batch_cancelled": "batch_cancelled"}
_BAD: Final = 400


def results(of: str, pieces: Iterable[bytes]) -> Iterator[BatchResult | None]:
    """Yield the answers in a body that comes in pieces, one after the other; None for one that cannot be read."""
    if of == "gemini":
        yield from _inlined(b"".join(pieces))
        return
    read: Callable[[bytes], BatchResult | None] = _of_openai if of == "openai" else _of_anthropic
    for line in _lines(pieces):
        if line is None or line.strip():
            yield None if line is None else read(line)


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes | None]:
    """Lines without their ends; None for one that is too long."""
    held, size = list[bytes](), 0
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            yield b"".join([*held, part]) if size + len(part) <= LONGEST_LINE else None
            held, size = [], 0
        size += len(rest)
        held = [*held, rest] if size <= LONGEST_LINE else []
    if size:
        yield b"".join(held) if held else None


def _of_openai(line: bytes) -> BatchResult | None:
    read = _answered(line)
    name = read.custom_id or (None if read.response is None and read.error is None else label(read.id))
    if not name:
        return None
    if read.response is None or not read.response.body:
        code = None if read.error is None else label(read.error.code)
        return BatchResult(name, line, None, _CODES.get(code or "", "batch_error"))
    status = read.response.status_code if isinstance(read.response.status_code, int) else 200
    body = _exact(line, read.response.body, "response", "body")
    return BatchResult(name, body, status, f"http_{status}" if status >= _BAD else None)


def _of_anthropic(line: bytes) -> BatchResult | None:
    read = _answered(line)
    if not read.custom_id or read.result is None:
        return None
    outcome = read.result
    if outcome.type == "succeeded" and outcome.message:
        return BatchResult(read.custom_id, _exact(line, outcome.message, "result", "message"))
    body = _exact(line, outcome.error, "result", "error") or line
    return BatchResult(read.custom_id, body, None, _ENDS.get(str(outcome.type), "batch_error"))


def _inlined(body: bytes) -> Iterator[BatchResult | None]:
    held = (_operation(body).response or _OperationResponse()).inlinedResponses
    for at, one in enumerate(held.inlinedResponses if isinstance(held, _InlineResponses) else held or ()):
        if one.response:
            yield BatchResult(_key(one, at), bytes(one.response))
        elif one.error:
            yield BatchResult(_key(one, at), b'{"error":%b}' % bytes(one.error), None, "batch_error")
        else:
            yield None


def _key(one: _InlineEntry, at: int) -> str:
    """The name of an answer of Gemini's: its key, or else its index."""
    return (label(one.metadata.key) if one.metadata else None) or str(at)
