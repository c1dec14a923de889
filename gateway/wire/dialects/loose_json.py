"""Access to JSON that may be anything, and copies of JSON that decoders refuse although clients and servers write it.

A provider's body is read through these functions, so that an odd value counts as absent; none raises, unless it says
so. msgspec and orjson refuse half a surrogate pair, a byte order mark, bytes that are no UTF-8, `NaN`, `Infinity`,
numbers beyond a double and more than about a thousand levels. Other parsers take them, and so do engines. `readable`
and `shallow` make a copy that can be read and is as long as the text, so an offset in the copy is valid in the text as
well.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Final, TypeVar

import msgspec
import orjson

Json = dict[str, Any]
T = TypeVar("T")

UNREADABLE = (ValueError, RecursionError)
"""The exceptions of msgspec and orjson for bytes that are no JSON, or are nested too deep."""

MOST_OBJECTS = 1 << 20
MOST_VALUES = 1 << 22
"""Most objects and arrays, and most values, of a body that is read. Three bytes of JSON can take two hundred of memory,
and a microsecond in which nothing else runs."""
BOM: Final = b"\xef\xbb\xbf"
MOST_PROBLEMS = 20
"""Most unreadable entries or events of one body that are named; beyond, only their number is noted."""
LONGEST_LABEL = 256
_SLICE = 1 << 20
_BEGINS = re.compile(rb'(?:\xef\xbb\xbf)?[ \t\n\r]*+[\[{"NI0-9-]')
_SCALARS = frozenset({str, int, float, bool, type(None)})
MOST_TOKENS = 1 << 53
DEEPEST: Final = 100
"""Most levels of nesting that are read. pydantic takes about 200 and orjson writes 254, a Turn around the value
included."""
MOST_LEVELS: Final = 20_000
"""A text with more levels is not read: each takes a microsecond, in which nothing else runs."""
STRING: Final = rb'"(?:[^"\\]++|\\.)*+"'
_BRACKET: Final = re.compile(rb'(?:[^"{}\[\]]++|%b)*+([{}\[\]])' % STRING, re.DOTALL)
_OPEN: Final = (b"{", b"[")
_HALVES: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
"""Half a surrogate pair as bytes, which valid UTF-8 never has."""
_SURROGATE: Final = re.compile(
    rb"\\u(?:[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?+|[dD][c-fC-F][0-9a-fA-F]{2})"
)
_LARGE: Final = re.compile(rb"[0-9](?:[0-9]{199}|[eE]\+?[0-9]{3})")
_USUAL: Final = re.compile(
    rb'(?:[^"NI0-9-]++|%b|-?[0-9]{1,200}+(?:\.[0-9]++)?+(?:[eE](?:\+?[0-9]{1,2}+|-[0-9]++))?+(?![0-9.eE]))*+' % STRING,
    re.DOTALL,
)
_NUMBER: Final = re.compile(rb"-?(?:Infinity|[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+)|NaN")


class RequestFields(msgspec.Struct):
    """The fields of a request that the hot path needs; all others are skipped without making objects of them."""

    model: Any = None
    n: Any = None
    tools: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    max_gen_len: Any = None
    max_tokens_to_sample: Any = None
    best_of: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    generationConfig: msgspec.Raw = msgspec.Raw()
    generation_config: msgspec.Raw = msgspec.Raw()
    inferenceConfig: msgspec.Raw = msgspec.Raw()


_RAW = frozenset(name for name, kind in RequestFields.__annotations__.items() if kind == "msgspec.Raw")
_members = attrgetter(*RequestFields.__struct_fields__)


def is_text(body: bytes) -> bool:
    """True for UTF-8 without NUL. A character that was cut off at the end is no error."""
    if b"\0" in body:
        return False
    try:
        _ = body.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start >= len(body) - 3
    return True


def is_bulky(body: bytes | str) -> bool:
    """True if a body may hold more objects or values than are read. Commas and brackets in texts count as well."""
    if len(body) <= MOST_OBJECTS:
        return False
    objects = values = 0
    # A `msgspec.Raw`, which may be one message of a request, cannot be sliced.
    whole = body if isinstance(body, str) else memoryview(body)
    for start in range(0, len(body), _SLICE):
        piece = whole[start : start + _SLICE]
        part = piece if isinstance(piece, str) else bytes(piece)
        objects += _brackets(part)
        values += part.count(",") if isinstance(part, str) else part.count(b",")
        if objects > MOST_OBJECTS or values > MOST_VALUES:
            return True
    return False


def repaired(decode: Callable[[bytes], T], body: bytes) -> T:
    """Decode a copy of a text that the decoder has refused (`readable`, `shallow`); offsets are the same.
    Raises one of `UNREADABLE` where the decoder refuses the copy as well."""
    if _BEGINS.match(body) is None or is_bulky(body):
        raise ValueError("it is no JSON, or holds more than is read")
    made = readable(body)
    try:
        if made is not body:
            return decode(made)
    except UNREADABLE:
        pass
    # Nesting takes longer to look for.
    last = shallow(made) if _brackets(body) > DEEPEST else made
    last = finite(last) if has_large_numbers(last) else last
    if last is made:
        raise ValueError("it is no JSON")
    return decode(last)


def lenient(kind: type[T]) -> Callable[[bytes], T]:
    """A JSON decoder of a struct whose fields all have defaults; unreadable bytes give the defaults."""
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> T:
        if len(body) > MOST_OBJECTS and is_bulky(body):
            return kind()
        try:
            return decode(body)
        except UNREADABLE:
            try:
                return repaired(decode, bytes(body))
            except UNREADABLE:
                return kind()

    return read


class _BoundedRequestFields(msgspec.Struct):
    """A `RequestFields` for which no large object is made, whatever the body holds."""

    model: str | None = None
    n: int | None = None
    tools: msgspec.Raw = msgspec.Raw()


class _AnyObject(msgspec.Struct):
    """Any JSON object; nothing of it is kept."""


_fields = msgspec.json.Decoder(RequestFields).decode
_named = msgspec.json.Decoder(_BoundedRequestFields).decode
_object = msgspec.json.Decoder(_AnyObject).decode


def peek(body: bytes) -> RequestFields:
    """The few fields of a request's body that its head needs."""
    try:
        if len(body) <= MOST_OBJECTS or not is_bulky(body):
            return _fields(body)
        found = _named(body)
        return RequestFields(found.model, found.n, found.tools)
    except UNREADABLE:
        try:
            return repaired(_fields, bytes(body))  # which refuses a bulky body
        except UNREADABLE:
            return RequestFields()


def is_readable(body: bytes) -> bool:
    """True if `peek` can read a request at all."""
    try:
        _ = _object(body)
    except UNREADABLE:
        try:
            _ = repaired(_object, body)
        except UNREADABLE:
            return False
    return True


def base_fields(asked: RequestFields) -> RequestFields:
    """The `RequestFields` alone, without further fields of a dialect, which would keep the whole conversation's
    objects."""
    return RequestFields(*_members(asked))


def detached_fields(asked: RequestFields) -> RequestFields:
    """The `RequestFields` without a reference to the request that it was read from."""
    return RequestFields(
        *[msgspec.Raw(bytes(it)) if isinstance(it, msgspec.Raw) and it else it for it in _members(asked)]
    )


def fields_from_members(members: Mapping[str, bytes]) -> RequestFields:
    """A `RequestFields` of members that are cut out already."""
    return RequestFields(**{name: msgspec.Raw(said) if name in _RAW else loads(said) for name, said in members.items()})


def loads(body: bytes | str) -> Any:
    """The JSON value, without values nested too deep to be shown again; None when there is none, or when it holds more
    than is read."""
    if is_bulky(body):
        return None
    try:
        value = orjson.loads(body)
    except UNREADABLE:
        try:
            value = repaired(orjson.loads, _bytes(body))
        except UNREADABLE:
            return None
    if len(body) <= 2 * DEEPEST or _SCALARS.issuperset(map(type, obj(value).values() or (value,))):
        return value
    deep = _brackets(body) > DEEPEST and _depth(value) > DEEPEST
    return orjson.loads(shallow(readable(_bytes(body)))) if deep else value


def strict(body: bytes) -> Any:
    """The JSON value of a body that is to be written again: None where reading it would drop or change something."""
    try:
        value = None if is_bulky(body) else orjson.loads(body)
    except UNREADABLE:
        return None
    return None if _brackets(body) > DEEPEST and _depth(value) > DEEPEST else value


def _bytes(body: bytes | str) -> bytes:
    return body.encode("utf-8", "surrogatepass") if isinstance(body, str) else bytes(body)


def _brackets(body: bytes | str) -> int:
    # Almost every event and many bodies have too few brackets to be deep: counting is faster than walking through them.
    return body.count("{") + body.count("[") if isinstance(body, str) else body.count(b"{") + body.count(b"[")


def _depth(value: Any) -> int:
    depth, layer = -1, [[value]]
    while layer:
        # Most values are token ids, where there are any: a list of them is recognised by its types.
        mixed = [items for items in layer if not _SCALARS.issuperset(map(type, items))]
        inner = [list(obj(it).values()) or arr(it) for items in mixed for it in items]
        layer = [items for items in inner if items]
        depth += 1
    return depth


def document(body: bytes, what: str, problems: list[str]) -> Json:
    """A body as a JSON object; if it is none, a problem is noted and {} returned."""
    value = loads(body)
    if isinstance(value, list) and "error" in obj(next(iter(arr(value)), None)):
        # Google's servers of OpenAI's format put an error into a list.
        value = arr(value)[0]
    if not isinstance(value, dict):
        problems.append(f"{what}: {_problem(body)}")
    elif _brackets(body) > DEEPEST and _depth(value) == DEEPEST and shallow(body) != body:
        problems.append(f"{what}: nested deeper than {DEEPEST} levels, which are not read")
    return obj(value)


def _problem(body: bytes) -> str:
    if is_bulky(body):
        return f"more than {MOST_OBJECTS:,} objects or {MOST_VALUES:,} values, which are not read"
    return "not a readable JSON object" if body else "empty"


def obj(value: Any) -> Json:
    """The value if it is an object, else {}."""
    found: Json = value
    return found if isinstance(value, dict) else {}


def arr(value: Any) -> list[Any]:
    """The value if it is an array, else []."""
    found: list[Any] = value
    return found if isinstance(value, list) else []


def objs(value: Any) -> list[Json]:
    """The objects in an array."""
    return [item for item in arr(value) if isinstance(item, dict)]


def entries(document: Json, key: str, problems: list[str]) -> list[Json]:
    """The objects in an array of a request; a problem is noted for each entry that is no object."""
    items = arr(document.get(key))
    odd = [at for at, it in enumerate(items) if not isinstance(it, dict)]
    problems += [f"request: {key}[{at}] is not an object" for at in odd[:MOST_PROBLEMS]]
    if len(odd) > MOST_PROBLEMS:
        problems.append(f"request: {len(odd) - MOST_PROBLEMS:,} more of {key} are no objects")
    return objs(items)


def text(value: Any) -> str | None:
    """The value if it is a string; else None."""
    return value if isinstance(value, str) else None


def label(value: Any) -> str | None:
    """The value if it is a string of at most `LONGEST_LABEL` characters; else None."""
    return value if isinstance(value, str) and len(value) <= LONGEST_LABEL else None


def labels(*values: Any) -> list[str | None]:
    """Each value as `label` takes it, for many at once."""
    found = list(values)
    for at, value in enumerate(values):
        if not isinstance(value, str) or len(value) > LONGEST_LABEL:
            found[at] = None
    return found


def count(value: Any) -> int | None:
    """The value if it is an integer from 0 to `MOST_TOKENS`; else None."""
    return value if type(value) is int and 0 <= value < MOST_TOKENS else None


def joined(pieces: list[Json], key: str) -> str | None:
    """The strings under a key, put together; None when there is none."""
    found = [value for piece in pieces if isinstance(value := piece.get(key), str)]
    return "".join(found) if found else None


def earliest(pieces: list[Json], key: str) -> Any:
    """The first value under a key that is not empty; None when there is none."""
    return next((value for piece in pieces if (value := piece.get(key))), None)


def dumps(value: Any) -> str:
    """Compact JSON text of a value that was read from JSON."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def error_message(answer: Json) -> str | None:
    """The provider's message, if the body is an error in any of the shapes that servers use; else None."""
    error = answer.get("error")
    if not error and ("error" in (answer.get("object"), answer.get("type")) or answer.keys() == {"detail"}):
        error = answer
    if not error:
        return None
    fields = obj(error)
    return text(error) or text(fields.get("message")) or text(fields.get("detail")) or dumps(error)


# -- JSON that every reader takes alike -------------------------------------------------------------------------------


class AmbiguousJsonError(ValueError):
    """Readers may take different values from a text, or none; the message says why."""


def distinct_members(pairs: list[tuple[str, Any]]) -> Json:
    """The object of these members (an `object_pairs_hook`); raises `AmbiguousJsonError` if a key stands twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise AmbiguousJsonError(f"the key {twice[:64]!r} stands twice in one object")
    return made


def _refuse(name: str) -> Any:
    raise AmbiguousJsonError(f"{name} is no JSON")


_unambiguous: Final = json.JSONDecoder(object_pairs_hook=distinct_members, parse_constant=_refuse).decode


def unambiguous(body: bytes) -> Any:
    """The JSON value that all readers take from a body; raises `AmbiguousJsonError`. Numbers keep their digits."""
    try:
        return _unambiguous(body.decode())
    except AmbiguousJsonError:
        raise
    except RecursionError:
        raise AmbiguousJsonError("it is nested too deep") from None
    except UnicodeDecodeError as error:
        raise AmbiguousJsonError(f"it is not UTF-8: byte {error.start + 1}") from None
    except ValueError as error:
        raise AmbiguousJsonError(f"it is not JSON ({error})") from None


# -- JSON that decoders refuse ----------------------------------------------------------------------------------------


def replace_invalid_characters(body: bytes) -> bytes:
    """The text at the same length, with U+FFFD for half surrogate pairs and bytes that are no UTF-8, and without a byte
    order mark; the same object where it has none of these."""
    return _whole(valid_utf8(b"   " + body[len(BOM) :] if body.startswith(BOM) else body))


def readable(body: bytes) -> bytes:
    """The text at the same length, as decoders take it; the same object where nothing in it is unusual. Characters that
    cannot be written become U+FFFD, and `NaN` and `Infinity` become empty lists, which no reader takes for a number."""
    body = replace_invalid_characters(body)
    return finite(body) if b"NaN" in body or b"Infinity" in body else body


def valid_utf8(body: bytes) -> bytes:
    """The text without bytes that are no UTF-8; half a surrogate pair becomes U+FFFD, any other such byte `?`."""
    try:
        if not body.isascii():
            _ = body.decode()
        return body
    except UnicodeDecodeError:
        return replace_surrogate_bytes(body).decode("utf-8", "surrogateescape").encode("utf-8", "replace")


def replace_surrogate_bytes(body: bytes) -> bytes:
    """A text at the same length, without half surrogate pairs that are written as bytes."""
    return _HALVES.sub("\ufffd".encode(), body)


def _whole(body: bytes) -> bytes:
    """The text with U+FFFD for escapes of half a surrogate pair."""
    made: bytearray | None = None
    for found in _SURROGATE.finditer(body):
        begin = at = found.start()
        while at and body[at - 1] == 0x5C:
            at -= 1
        # After an odd number of backslashes, this one belongs to the escape of a backslash.
        if ((begin - at) % 2 == 0) == (found[1] is None):
            made = made or bytearray(body)
            made[found.end() - 6 : found.end()] = b"\\ufffd"
    return body if made is None else bytes(made)


def finite(body: bytes) -> bytes:
    """The text at the same length, with `NaN`, `Infinity` and numbers beyond a double replaced, such a number by a very
    large one. The text is unchanged from the point where it is no JSON."""
    pieces, done, at = list[bytes](), 0, 0
    while (usual := _USUAL.match(body, at)) is not None and (found := _NUMBER.match(body, usual.end())) is not None:
        at = found.end()
        if (new := _instead(found[0])) is not None:
            pieces += (body[done : found.start()], new)
            done = at
    return b"".join([*pieces, body[done:]]) if pieces else body


def has_large_numbers(body: bytes) -> bool:
    """True if a number in the text may be beyond a double."""
    return _LARGE.search(body) is not None


def _instead(number: bytes) -> bytes | None:
    """A replacement of the same length; None for a number that stays."""
    if number[-1:] in b"Ny":
        return b"[" + b"]".rjust(len(number) - 1)
    sign = b"-" if number.startswith(b"-") else b""
    return sign + b"1e" + b"308".rjust(len(number) - len(sign) - 2, b"0") if math.isinf(float(number)) else None


def shallow(body: bytes) -> bytes:
    """The text at the same length, without values nested deeper than `DEEPEST` levels: lists and objects of the next
    level are empty; the same object where there are none. Raises `ValueError` beyond `MOST_LEVELS`."""
    made: bytearray | None = None
    depth = begun = 0
    for found in _BRACKET.finditer(body):
        if found[1] in _OPEN:
            depth += 1
            if depth == DEEPEST + 1:
                begun = found.end()
            elif depth > MOST_LEVELS:
                raise too_deep()
        else:
            if depth == DEEPEST + 1:
                end, made = found.end() - 1, made or bytearray(body)
                made[begun:end] = b" " * (end - begun)
            depth -= 1
    return body if made is None else bytes(made)


def too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_LEVELS:,} levels")
