"""Forms: `multipart/form-data`, with which files are sent, and `application/x-www-form-urlencoded`. Pure.

Only the fields' places are looked for, in one search for the boundary: a file of 100 MB takes some 10 to 50 ms. A form
that names a field twice with different values, or cannot be read, has no certain value: servers differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import quote_plus, unquote_to_bytes

from penstock.gateway.wire.dialects.loose_json import RequestFields

MULTIPART: Final = "multipart/form-data"
URLENCODED: Final = "application/x-www-form-urlencoded"
UNCLEAR: Final = ("unclear",)
"""Stands for a value that is uncertain: a form names the field twice, or cannot be read."""
_BOUNDARY: Final = re.compile(r';\s*boundary\s*=\s*(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_DISPOSITION: Final = re.compile(rb"(?:^|\n)content-disposition:([^\r\n]*)", re.IGNORECASE)
_NAME: Final = re.compile(
    rb'(?:[^";]|"(?:[^"\\]|\\.)*"|;(?!\s*name\s*=))*;\s*name\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE
)
"""The name of a part. What is in the quotes of a file's name is no parameter."""
_AFTER: Final = re.compile(rb"(--)|[ \t]*\r?\n")
_HEADERS_END: Final = re.compile(rb"\r?\n\r?\n|\A\r?\n")
_HEADERS: Final = 16 << 10
_PARTS: Final = 1000
_LONGEST: Final = 1 << 20
"""Most bytes of an urlencoded form, and of a field, that are read."""
_READ: Final = ("model", "n")


class FormField(NamedTuple):
    """A field, and the offsets of its value."""

    name: str
    start: int
    end: int


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() in (MULTIPART, URLENCODED)


def peek(body: bytes, content_type: str) -> RequestFields:
    """Read from a form the fields that the summary needs."""
    said: dict[str, Any] = {}
    try:
        for one in fields(body, content_type):
            if one.name in _READ:
                value = _value(body, one, content_type)
                said[one.name] = value if said.get(one.name, value) == value else UNCLEAR
    except ValueError:
        return RequestFields(model=UNCLEAR)
    return RequestFields(**said)


def replaced(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """A form with another value of a field and every other byte unchanged; the same form if it has no such field."""
    new = quote_plus(value).encode() if _is_urlencoded(content_type) else value.encode()
    pieces, view, done = list[bytes | memoryview](), memoryview(body), 0
    try:
        for one in fields(body, content_type):
            if one.name == name:
                pieces += (view[done : one.start], new)
                done = one.end
    except ValueError:
        return body
    return b"".join([*pieces, view[done:]]) if pieces else body


def fields(body: bytes, content_type: str) -> Iterator[FormField]:
    """The fields of a form, files among them; raises `ValueError` if the body is no form."""
    return _pairs(body) if _is_urlencoded(content_type) else _parts(body, content_type)


def _is_urlencoded(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == URLENCODED


def _pairs(body: bytes) -> Iterator[FormField]:
    if len(body) > _LONGEST or body.count(b"&") > _PARTS:
        raise ValueError("the form is too long to be read")
    at = 0
    for pair in body.split(b"&"):
        name, _, _ = pair.partition(b"=")
        yield FormField(_plus(name), min(at + len(name) + 1, at + len(pair)), at + len(pair))
        at += len(pair) + 1


def _parts(body: bytes, content_type: str) -> Iterator[FormField]:
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise ValueError("its content type has no boundary")
    mark = b"--" + (found[1] or found[2]).encode("latin-1")
    at = 0 if body.startswith(mark) else _next(body, mark, 0)[1]
    for _ in range(_PARTS):
        after = _AFTER.match(body, at + len(mark))
        if after is None:
            raise ValueError("a part does not begin")
        if after[1]:
            return
        head = _HEADERS_END.search(body, after.end() - 1, after.end() + _HEADERS)
        if head is None:
            raise ValueError("the headers of a part do not end")
        end, at = _next(body, mark, head.end())
        yield FormField(_named(body[after.end() : head.start()]), head.end(), end)
    raise ValueError("it has too many parts")


def _next(body: bytes, mark: bytes, at: int) -> tuple[int, int]:
    """(end of a part, offset of the boundary behind it); raises `ValueError` where there is none."""
    while (found := body.find(b"\n" + mark, max(at - 1, 0))) >= 0:
        if _AFTER.match(body, found + 1 + len(mark)) is not None:
            return max(at, found - (body[found - 1 : found] == b"\r")), found + 1
        at = found + 2
    raise ValueError("the form ends early")


def _named(head: bytes) -> str:
    disposition = _DISPOSITION.search(head)
    name = None if disposition is None else _NAME.match(disposition[1])
    if name is None:
        if disposition is not None and b'"' in disposition[1]:
            raise ValueError("the name of a part cannot be read")
        return ""
    said = name[2] if name[1] is None else re.sub(rb"\\(.)", rb"\1", name[1])
    return said.decode("utf-8", "replace")


def _value(body: bytes, one: FormField, content_type: str) -> Any:
    said = body[one.start : one.end]
    if len(said) > _LONGEST:
        return UNCLEAR
    return _plus(said) if _is_urlencoded(content_type) else said.decode("utf-8", "replace")


def _plus(said: bytes) -> str:
    return unquote_to_bytes(said.replace(b"+", b" ")).decode("utf-8", "replace")
