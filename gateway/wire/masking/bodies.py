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

from penstock.gateway.model.known_secrets import BodyContext
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.json_scan import BodyFormatError, JsonNode, looks_like_json, walk
from penstock.gateway.wire.dialects.loose_json import replace_surrogate_bytes
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.masking.body_search import BodySearch, MaskingError, RuleSet
from penstock.gateway.wire.masking.prefilter import candidate_rules, is_json
from penstock.gateway.wire.masking.stream_frames import StreamContents, aws_frames, server_sent
from penstock.gateway.wire.masking.streams import ChannelTable, joined_texts
from penstock.gateway.wire.masking.text import BodyText, EscapedText, MaskableText, TextSlice
from penstock.gateway.wire.masking.tokens import has_token_prompt, remove_token_members

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


def mask_body(root: BodyText, looking: BodySearch, about: BodyContext) -> None:
    """Masks the rules' finds in a body; raises `MaskingError` and `BodyFormatError`."""
    kind = _kind(about)
    if kind != _AWS and b"\xed" in root.data:
        root.read_as(replace_surrogate_bytes(root.data))
    body = root.data
    if kind == _AWS:
        _events(looking, aws_frames(root))
    elif not _is_text(body, about):
        if _OPAQUE.match(kind) is None:
            raise MaskingError(
                f"{looking.rules.first}: it is no UTF-8, and its content type is none that no rule can read"
            )
        return
    elif kind == _EVENTS or begins_event_stream(body):
        events = server_sent(root)
        _events(looking, events)
        if kind != _EVENTS and events.other:
            # It begins like a stream, but may be none.
            looking.mask_patterns(root)
    elif _JSON.match(kind) or looks_like_json(body):
        _json(root, looking, about, kind)
    else:
        _plain(root, looking, kind)
    if about.cut:
        _ = root.write(max(len(body) - CUT_END, 0), len(body))


def without_tokens(body: bytes, about: BodyContext) -> bytes:
    """The body without members that repeat its text as tokens. The end of a body that was cut off is masked already."""
    root = BodyText(body)
    text, kind = TextSlice(root, 0, max(len(body) - CUT_END, 0)) if about.cut else root, _kind(about)
    try:
        if kind == _AWS:
            remove_token_members(aws_frames(text).datas)
        else:
            remove_token_members(server_sent(text).datas if kind == _EVENTS or begins_event_stream(body) else [text])
    except BodyFormatError:
        _ = root.write(0, len(body))
    return root.masked


def _kind(about: BodyContext) -> str:
    return about.content_type.partition(";")[0].strip().lower()


def _is_text(body: bytes, about: BodyContext) -> bool:
    charset = _CHARSET.search(about.content_type.lower())
    if b"\0" in body or (charset is not None and charset[1] not in _READ):
        return False
    try:
        _ = body.decode()
    except UnicodeDecodeError as error:
        # A character that was cut off at the end is no error.
        return error.reason == "unexpected end of data" and error.start >= len(body) - 3
    return True


def _json(root: BodyText, looking: BodySearch, about: BodyContext, kind: str) -> None:
    body = root.data
    in_list = about.answer and body.lstrip()[:1] == b"["
    stream = in_list or (about.answer and _SEVERAL.search(body) is not None and not is_json(body))
    if not about.answer and looking.rules.patterns and has_token_prompt(body):
        remove_token_members([root])
        looking.notes.failed = f"{looking.rules.patterns[0][0]}: the request gives its text as token ids"
    if not stream:
        few = candidate_rules(looking.rules, body, looking.clock)
        # Only in valid JSON a name that never stands in quotes is certainly no member.
        sure = few.paths or not _names(looking.rules, body) or is_json(body)
        looking = looking.with_rules(few if sure else looking.rules)
    if looking.rules.is_empty:
        return
    try:
        documents = walk(body)
    except BodyFormatError as malformed:
        if _JSON.match(kind):
            raise MaskingError(f"{looking.rules.first}: {malformed}") from None
        _plain(root, looking, kind)
        return
    for found in documents:
        looking.search_values(root, found, pieces=stream)
    if stream:
        channels, paths = ChannelTable(), looking.with_rules(RuleSet((), looking.rules.paths, None))
        for event in _elements(documents):
            channels.add(root, event)
            if in_list and looking.rules.paths:
                paths.search_values(root, event, pieces=True)
        looking.search_channels(channels)


def _elements(documents: list[list[JsonNode]]) -> Iterable[list[JsonNode]]:
    """The values of JSON lines, and the elements of a list."""
    for found in documents:
        by_place: dict[str | int | None, list[JsonNode]] = {}
        for one in found:
            in_list = bool(one.path) and isinstance(one.path[0], int)
            place = one.path[0] if in_list else None
            by_place.setdefault(place, []).append(one._replace(path=one.path[1:]) if in_list else one)
        yield from by_place.values()


def _events(looking: BodySearch, events: StreamContents) -> None:
    datas, few = events.datas, _alone(looking, events)
    for line in events.other:
        _none_named(looking, line.data)
    if few.is_empty and _nothing_joined(looking, datas):
        return
    single = looking.with_rules(few)
    channels = ChannelTable()
    for data in datas:
        try:
            documents = walk(data.data)
        except BodyFormatError:
            _none_named(looking, data.data)
            channels.add_text(data)
            looking.mask_patterns(data)
            continue
        for found in documents:
            channels.add(data, found)
            if not few.is_empty:
                single.search_values(data, found, pieces=True)
    for line in (*events.fields, *events.other):
        _ = looking.search_text(line)
    looking.search_channels(channels)


def _alone(looking: BodySearch, events: StreamContents) -> RuleSet:
    """The rules that may find something within one event, and not only in texts that were cut apart."""
    every = [*events.datas, *events.fields, *events.other]
    return candidate_rules(looking.rules, b"\n".join([one.data for one in every]), looking.clock)


def _nothing_joined(looking: BodySearch, datas: Sequence[MaskableText]) -> bool:
    """True if no rule finds anything in joined texts. Searches them without their places, which takes a tenth of the
    time."""
    joined = joined_texts(one.data for one in datas)
    return joined is not None and all(candidate_rules(looking.rules, text, looking.clock).is_empty for text in joined)


def _plain(root: BodyText, looking: BodySearch, kind: str) -> None:
    texts: list[MaskableText] = [root]
    if kind == _FORM:
        texts.append(EscapedText(root, 0, len(root.data), percent=True))
    elif b"\\" in root.data:
        texts.append(EscapedText(root, 0, len(root.data)))
    for text in texts:
        _none_named(looking, text.data)
        looking.mask_patterns(text)


def _names(rules: RuleSet, text: bytes) -> bool:
    return any(name is None or name in text for _, paths in rules.paths for name in paths.names)


def _none_named(looking: BodySearch, text: bytes) -> None:
    for name, paths in looking.rules.paths:
        for said in paths.names:
            if said is None or said in text:
                where = "" if said is None else f", and {said.decode()} stands in it"
                raise MaskingError(f"{name}: it is not the JSON that a path needs{where}")
