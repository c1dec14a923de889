"""Applies rules to one body by its format, which follows from its content type and from its beginning:

* JSON, JSON lines and streams of events (SSE, frames of AWS) are searched value by value;
* forms (`application/x-www-form-urlencoded`) are searched as sent and decoded, other text with and without escapes;
* images, sound, archives and the like, which no rule can read, are kept if their content type says so;
* to anything else rules cannot be applied.

A path needs JSON. In another body it certainly leads nowhere if its last name is not in the body; otherwise that is not
sure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.gateway.dialects.base import EVENT_STREAM
from penstock.gateway.dialects.json_scan import whole_bytes
from penstock.gateway.dialects.sse import begins
from penstock.gateway.masking.framing import Events, aws_frames, server_sent
from penstock.gateway.masking.json_walk import Found, Malformed, looks_like_json, walk
from penstock.gateway.masking.looking import Looking, Rules, Unsure
from penstock.gateway.masking.quick import is_json, possible
from penstock.gateway.masking.streams import Channels, joined_texts
from penstock.gateway.masking.text import Decoded, Root, Slice, Text
from penstock.gateway.masking.tokens import asks_by_tokens, take_out
from penstock.gateway.model.known_secrets import About

CUT_END: Final = 256
"""Bytes masked at the end of a body that the gateway has cut off: a value there may go on in the missing part."""
_AWS: Final = "application/vnd.amazon.eventstream"
_EVENTS: Final = EVENT_STREAM.decode()
_FORM: Final = "application/x-www-form-urlencoded"
_JSON: Final = re.compile(r"(?:application|text)/(?:[\w.-]*\+)?(?:json|x-ndjson|ndjson|jsonl|x-jsonlines|json-seq)$")
_OPAQUE: Final = re.compile(
    r"(?:image|audio|video|font)/|application/(?:octet-stream|pdf|zip|gzip|x-tar|zstd|x-protobuf|grpc|wasm)"
)
_SEVERAL: Final = re.compile(rb"\}[ \t\r\n\x1e]*+\{")
"""One JSON object behind another one, unless it is in a string."""
_CHARSET: Final = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]+)")
_READ: Final = frozenset({"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1"})
"""Character sets whose texts are read as UTF-8 if they are valid UTF-8."""


def look(root: Root, looking: Looking, about: About) -> None:
    """Masks the rules' finds in a body; raises `Unsure` and `Malformed`."""
    kind = _kind(about)
    if kind != _AWS and b"\xed" in root.data:
        root.read_as(whole_bytes(root.data))
    body = root.data
    if kind == _AWS:
        _events(looking, aws_frames(root))
    elif not _is_text(body, about):
        if _OPAQUE.match(kind) is None:
            raise Unsure(f"{looking.rules.first}: it is no UTF-8, and its content type is none that no rule can read")
        return
    elif kind == _EVENTS or begins(body):
        events = server_sent(root)
        _events(looking, events)
        if kind != _EVENTS and events.other:
            # It begins like a stream, but may be none.
            looking.search(root)
    elif _JSON.match(kind) or looks_like_json(body):
        _json(root, looking, about, kind)
    else:
        _plain(root, looking, kind)
    if about.cut:
        _ = root.write(max(len(body) - CUT_END, 0), len(body))


def without_tokens(body: bytes, about: About) -> bytes:
    """The body without members that repeat its text as tokens. The end of a body that was cut off is masked already."""
    root = Root(body)
    text, kind = Slice(root, 0, max(len(body) - CUT_END, 0)) if about.cut else root, _kind(about)
    try:
        if kind == _AWS:
            take_out(aws_frames(text).datas)
        else:
            take_out(server_sent(text).datas if kind == _EVENTS or begins(body) else [text])
    except Malformed:
        _ = root.write(0, len(body))
    return root.masked


def _kind(about: About) -> str:
    return about.content_type.partition(";")[0].strip().lower()


def _is_text(body: bytes, about: About) -> bool:
    charset = _CHARSET.search(about.content_type.lower())
    if b"\0" in body or (charset is not None and charset[1] not in _READ):
        return False
    try:
        _ = body.decode()
    except UnicodeDecodeError as error:
        # A character that was cut off at the end is no error.
        return error.reason == "unexpected end of data" and error.start >= len(body) - 3
    return True


def _json(root: Root, looking: Looking, about: About, kind: str) -> None:
    body = root.data
    in_list = about.answer and body.lstrip()[:1] == b"["
    stream = in_list or (about.answer and _SEVERAL.search(body) is not None and not is_json(body))
    if not about.answer and looking.rules.patterns and asks_by_tokens(body):
        take_out([root])
        looking.notes.failed = f"{looking.rules.patterns[0][0]}: the request gives its text as token ids"
    if not stream:
        few = possible(looking.rules, body, looking.clock)
        # Only in valid JSON a name that never stands in quotes is certainly no member.
        sure = few.paths or not _names(looking.rules, body) or is_json(body)
        looking = looking.narrowed(few if sure else looking.rules)
    if looking.rules.none:
        return
    try:
        documents = walk(body)
    except Malformed as malformed:
        if _JSON.match(kind):
            raise Unsure(f"{looking.rules.first}: {malformed}") from None
        _plain(root, looking, kind)
        return
    for found in documents:
        looking.values(root, found, pieces=stream)
    if stream:
        channels, paths = Channels(), looking.narrowed(Rules((), looking.rules.paths, None))
        for event in _elements(documents):
            channels.add(root, event)
            if in_list and looking.rules.paths:
                paths.values(root, event, pieces=True)
        looking.joined(channels)


def _elements(documents: list[list[Found]]) -> Iterable[list[Found]]:
    """The values of JSON lines, and the elements of a list."""
    for found in documents:
        by_place: dict[str | int | None, list[Found]] = {}
        for one in found:
            in_list = bool(one.path) and isinstance(one.path[0], int)
            place = one.path[0] if in_list else None
            by_place.setdefault(place, []).append(one._replace(path=one.path[1:]) if in_list else one)
        yield from by_place.values()


def _events(looking: Looking, events: Events) -> None:
    datas, few = events.datas, _alone(looking, events)
    for line in events.other:
        _none_named(looking, line.data)
    if few.none and _nothing_joined(looking, datas):
        return
    single = looking.narrowed(few)
    channels = Channels()
    for data in datas:
        try:
            documents = walk(data.data)
        except Malformed:
            _none_named(looking, data.data)
            channels.add_text(data)
            looking.search(data)
            continue
        for found in documents:
            channels.add(data, found)
            if not few.none:
                single.values(data, found, pieces=True)
    for line in (*events.fields, *events.other):
        _ = looking.text(line)
    looking.joined(channels)


def _alone(looking: Looking, events: Events) -> Rules:
    """The rules that may find something within one event, and not only in texts that were cut apart."""
    every = [*events.datas, *events.fields, *events.other]
    return possible(looking.rules, b"\n".join([one.data for one in every]), looking.clock)


def _nothing_joined(looking: Looking, datas: Sequence[Text]) -> bool:
    """True if no rule finds anything in joined texts. Searches them without their places, which takes a tenth of the
    time."""
    joined = joined_texts(one.data for one in datas)
    return joined is not None and all(possible(looking.rules, text, looking.clock).none for text in joined)


def _plain(root: Root, looking: Looking, kind: str) -> None:
    texts: list[Text] = [root]
    if kind == _FORM:
        texts.append(Decoded(root, 0, len(root.data), percent=True))
    elif b"\\" in root.data:
        texts.append(Decoded(root, 0, len(root.data)))
    for text in texts:
        _none_named(looking, text.data)
        looking.search(text)


def _names(rules: Rules, text: bytes) -> bool:
    return any(name is None or name in text for _, paths in rules.paths for name in paths.names)


def _none_named(looking: Looking, text: bytes) -> None:
    for name, paths in looking.rules.paths:
        for said in paths.names:
            if said is None or said in text:
                where = "" if said is None else f", and {said.decode()} stands in it"
                raise Unsure(f"{name}: it is not the JSON that a path needs{where}")
