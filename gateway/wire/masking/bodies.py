"""Applies rules to one body by its format, which follows from its content type and from its beginning:

* JSON, JSON lines and streams of events (SSE, frames of AWS) are searched value by value;
* forms with files (`multipart/form-data`) are searched part by part, each by its own content type; a path may begin
  with a field's name;
* other forms (`application/x-www-form-urlencoded`) are searched as sent and decoded, other text with and without
  escapes;
* images, sound, archives and the like, which no rule can read, are kept if their content type says so;
* to anything else rules cannot be applied.

A path needs JSON. In another body it certainly leads nowhere if its last name is not in the body; otherwise that is not
sure.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from penstock.gateway.model.known_secrets import BodyContext
from penstock.gateway.wire.dialects.base import EVENT_STREAM
from penstock.gateway.wire.dialects.json_scan import (
    BodyFormatError,
    JsonNode,
    JsonPaths,
    Path,
    looks_like_json,
    plain,
    walk,
)
from penstock.gateway.wire.dialects.loose_json import is_text, replace_surrogate_bytes
from penstock.gateway.wire.dialects.request_body import MULTIPART, form_fields
from penstock.gateway.wire.dialects.sse import begins_event_stream
from penstock.gateway.wire.masking.streams import (
    ChannelTable,
    StreamContents,
    aws_frames,
    joined_texts,
    may_continue,
    server_sent,
)
from penstock.gateway.wire.masking.text import (
    BodyText,
    CpuBudget,
    EscapedText,
    JoinedText,
    MaskableText,
    MaskingPattern,
    PatternTimeout,
    TextSlice,
    literal,
)

CUT_END: Final = 256
"""Bytes masked at the end of a body that the gateway has cut off: a value there may go on in the missing part."""
DEEPEST: Final = 6
"""Most levels of JSON in strings of JSON."""
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
_DIGITS: Final = re.compile(rb"\d")


class MaskingError(Exception):
    """A rule cannot be applied for sure; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules that may find something in a body."""

    patterns: Sequence[tuple[str, MaskingPattern]]
    paths: Sequence[tuple[str, JsonPaths]]
    any_pattern: MaskingPattern | None
    """One that finds something if any pattern does; None if they cannot be joined."""

    @property
    def is_empty(self) -> bool:
        """True if there are no rules."""
        return not self.patterns and not self.paths

    @property
    def first(self) -> str:
        """The name of the first rule."""
        return next(iter([*self.patterns, *self.paths]))[0]


@dataclass(slots=True)
class MaskingResult:
    """The result of masking a call's bodies."""

    found: dict[str, int] = field(default_factory=dict[str, int])
    """The number of masked places, by rule."""
    failed: str | None = None
    """The rule that could not be applied, and why."""

    def add(self, name: str) -> None:
        self.found[name] = self.found.get(name, 0) + 1


def mask_body(root: BodyText, looking: BodySearch, about: BodyContext) -> None:
    """Masks the rules' finds in a body; raises `MaskingError` and `BodyFormatError`."""
    kind = _kind(about)
    if kind == MULTIPART:
        _parts(root, looking, about)
        return
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
    return (charset is None or charset[1] in _READ) and is_text(body)


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


def _parts(root: BodyText, looking: BodySearch, about: BodyContext) -> None:
    try:
        fields = list(form_fields(root.data, about.content_type))
    except ValueError as error:
        raise MaskingError(f"{looking.rules.first}: the form cannot be read: {error}") from None
    at = 0
    for one in fields:
        # The names of fields and files are text too.
        looking.mask_patterns(TextSlice(root, at, one.start))
        part, at = TextSlice(root, one.start, one.end), one.end
        rule = next((name for name, paths in looking.rules.paths if paths.lead_to((one.name,))), None)
        if rule is not None:
            if part.write(0, len(part.data)):
                looking.notes.add(rule)
        elif _is_text(part.data, BodyContext(one.kind)):
            _ = looking.search_text(part, (one.name,))
        elif _OPAQUE.match(one.kind) is None:
            raise MaskingError(f"{looking.rules.first}: part {one.name!r} of the form is no UTF-8, and no media")


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


# -- the texts of a body -----------------------------------------------------------------------------------------------

# Also JSON in strings of JSON. In JSON a pattern is searched for in strings, keys and integers. An integer becomes 0,
# or 1 and zeros; so do other numbers at a masked path; `true` and `false` become null. So JSON stays JSON, and numbers
# keep their type.


class BodySearch:
    """The search of one body."""

    def __init__(self, rules: RuleSet, clock: CpuBudget, notes: MaskingResult) -> None:
        self.rules, self.clock, self.notes = rules, clock, notes

    def with_rules(self, rules: RuleSet) -> BodySearch:
        """The same search with fewer rules."""
        return BodySearch(rules, self.clock, self.notes)

    def search_text(self, text: MaskableText, path: Path = (), depth: int = 0, piece: bool = False) -> bool:
        """Searches a text, and its values if it is JSON. True if it is JSON. `piece`: True if a stream may have cut it
        off from others."""
        self.mask_patterns(text)
        if not looks_like_json(text.data):
            return False
        try:
            documents = walk(text.data)
        except BodyFormatError as malformed:
            # It only begins like JSON, or is a piece of JSON, which is searched when it is joined.
            if not piece:
                self._none_quoted(text.data, path, malformed)
            return False
        if depth >= DEEPEST:
            raise MaskingError(f"{self.rules.first}: JSON in JSON is nested deeper than {DEEPEST} levels")
        for found in documents:
            self.search_values(text, found, path, depth + 1)
        return True

    def search_values(
        self, outer: MaskableText, found: Sequence[JsonNode], path: Path = (), depth: int = 0, pieces: bool = False
    ) -> None:
        """Searches the values of a JSON document. `pieces`: True if it is an event of a stream."""
        for one in found:
            there = (*path, *one.path) if path else one.path
            rule = next((name for name, paths in self.rules.paths if paths.lead_to(there)), None)
            if rule is not None and not (one.kind == "key" and not self._inside(there)):
                self._mask(outer, one, rule)
            elif one.kind in ("text", "key"):
                _ = self.search_text(literal(outer, one.start, one.end), there, depth, pieces and may_continue(one))
            elif one.kind == "integer":
                self._number(outer, one)
            elif one.kind == "deep":
                # A rule may find something in it, and it is not searched.
                self._mask(outer, one, self.rules.first)

    def search_channels(self, channels: ChannelTable) -> None:
        """Searches texts that a stream has cut apart."""
        read: set[int] = set()
        for path, parts, exact in channels.joined():
            text = JoinedText(parts) if len(parts) > 1 else parts[0]
            if len(parts) == 1 and not looks_like_json(text.data):
                continue
            # Malformed JSON may be a piece of JSON that was read.
            if self.search_text(text, path, piece=not exact or read.issuperset(map(id, parts))):
                read.update(map(id, parts))

    def _inside(self, path: Path) -> bool:
        """True if a key is below the value of a path. The key that the path names is kept."""
        return any(paths.lead_to(path[:-1]) for _, paths in self.rules.paths)

    def _mask(self, outer: MaskableText, one: JsonNode, rule: str) -> None:
        if one.start == one.end:
            return
        said = outer.data[one.start : one.end]
        new = emptied(len(said)) if one.kind == "deep" else zeroed(said) if one.kind in ("integer", "other") else None
        if new != said and outer.write(one.start, one.end, new):
            self.notes.add(rule)

    def _number(self, outer: MaskableText, one: JsonNode) -> None:
        said = outer.data[one.start : one.end]
        for name, pattern in self.rules.patterns:
            if pattern.occurs_in(said, self.clock) and outer.write(one.start, one.end, zeroed(said)):
                self.notes.add(name)

    def _none_quoted(self, text: bytes, path: Path, malformed: BodyFormatError) -> None:
        """Raises `MaskingError` if a path may lead into a text that begins like JSON and is malformed."""
        for _ in range(DEEPEST + 1):
            for name, paths in self.rules.paths:
                if paths.quoted_below(path, text):
                    raise MaskingError(f"{name}: JSON in a string cannot be read: {malformed}")
            if b"\\" not in text:
                return
            text = plain(text)

    def mask_patterns(self, text: MaskableText) -> None:
        """Masks the patterns' finds in a text."""
        rules, data = self.rules, text.data
        if not data or (rules.any_pattern is not None and not rules.any_pattern.occurs_in(data, self.clock)):
            return
        for name, pattern in rules.patterns:
            try:
                for start, end in pattern.find(data, self.clock):
                    if text.write(start, end):
                        self.notes.add(name)
            except PatternTimeout as slow:
                raise MaskingError(f"{name}: {slow}") from None


def emptied(size: int) -> bytes:
    """The JSON of that size that replaces a list or object."""
    return b"null".ljust(size) if size >= 4 else b"[" + b"]".rjust(size - 1)


def zeroed(said: bytes) -> bytes:
    """A number of the same length and type without its value; null for a word."""
    if said[:1] not in b"-0123456789" or not _DIGITS.search(said):
        return (b"null" if len(said) >= 4 else b"0").ljust(len(said))
    begin = 1 if said.startswith(b"-") else 0
    whole = len(said) - begin - len(said[begin:].lstrip(b"0123456789"))
    rest = _DIGITS.sub(b"0", said[begin + whole :])
    return said[:begin] + (b"0" if whole == 1 else b"1" + b"0" * (whole - 1)) + rest


# -- rules that can match at all, found without parsing the values of a body -------------------------------------------

# The escapes of the whole body are undone at once, once for each level of JSON in JSON, so that a string that a rule
# could match appears in one piece. A pattern that matches by the beginning or end of its text is always kept.

_UNICODE: Final = re.compile(rb"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})")
_SHORT: Final = [(b'\\"', b'"'), (b"\\/", b"/"), (b"\\n", b"\n"), (b"\\t", b"\t"), (b"\\r", b"\r"), (b"\\b", b"\b"),
                 (b"\\f", b"\f")]  # fmt: skip
_BACKSLASH: Final = b"\xff"
"""Stands for a backslash meanwhile: no text in UTF-8 has this byte."""


def candidate_rules(rules: RuleSet, body: bytes, clock: CpuBudget) -> RuleSet:
    """The rules that may find something in a body of JSON; raises `PatternTimeout`."""
    levels = _levels(body)
    if levels is None:
        return rules
    patterns, paths = rules.patterns, [one for one in rules.paths if any(_named(one[1], level) for level in levels)]
    together = rules.any_pattern
    if together is None or together.at_edges or _stands(together, levels, clock):
        patterns = [one for one in patterns if one[1].at_edges or _stands(one[1], levels, clock)]
    else:
        patterns = []
    return RuleSet(patterns, paths, together if len(patterns) > 1 else None)


def is_json(body: bytes) -> bool:
    """True if the body certainly is one JSON value."""
    try:
        _ = msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _stands(pattern: MaskingPattern, levels: list[bytes], clock: CpuBudget) -> bool:
    return any(pattern.occurs_in(level, clock) for level in levels)


def _named(paths: JsonPaths, level: bytes) -> bool:
    return any(name is None or name + b'"' in level or name + b"'" in level for name in paths.names)


def _levels(body: bytes) -> list[bytes] | None:
    """The body, and the body with its escapes undone once, twice ...; None if they cannot be undone for sure."""
    levels = [body]
    while b"\\" in levels[-1]:
        if _BACKSLASH in levels[-1] or len(levels) > DEEPEST:
            return None
        levels.append(_undone(levels[-1]))
    return levels


def _undone(text: bytes) -> bytes:
    text = text.replace(b"\\\\", _BACKSLASH)
    for escape, meant in _SHORT:
        if escape in text:
            text = text.replace(escape, meant)
    if b"\\u" in text:
        text = _UNICODE.sub(_character, text)
    # Removes backslashes of invalid escapes, so that the levels come to an end.
    return text.replace(b"\\", b"").replace(_BACKSLASH, b"\\")


def _character(found: re.Match[bytes]) -> bytes:
    high, low, one = found.groups()
    if one is not None and int(one, 16) == 0x5C:
        return _BACKSLASH
    if one is None:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00).encode()
    return chr(int(one, 16)).encode("utf-8", "surrogatepass")


# -- members that repeat a text as tokens: ids, log-probabilities and bytes --------------------------------------------

# Anyone with the tokenizer can read the text out of them. So in a call with masked values they become `null` in all
# bodies: readers take that for an engine that gave none, and training skips such a call.

_SAID: Final = re.compile(
    r"tokens|top_tokens|prefill|prompt_fragments|logprobsResult|completion_probabilities|token_strs|\w*logprobs"
)
"""Members that repeat a text as tokens, whatever they hold."""
_IDS: Final = re.compile(r"prompt|inputs?|context|\w*_ids")
"""Members that do so if they hold only integers."""
_LISTED: Final = ("container", "deep")
_TOKEN: Final = ("token", "id")
_NAMED: Final = re.compile(
    rb'"(?:\w*_ids|\w*logprobs|(?:top_)?tokens|token_strs|logprobsResult|prefill|prompt_fragments|context'
    rb'|completion_probabilities)"'
)
_LISTS: Final = re.compile(rb'"(?:prompt|inputs?|tokens|prompt_ids|(?:\w*token|input)_ids)"\s*:\s*\[\s*(?:\[\s*)?-?\d')


def has_token_prompt(body: bytes) -> bool:
    """True if a request gives its text as token ids, which no pattern can read."""
    return _LISTS.search(body) is not None


def remove_token_members(texts: Iterable[MaskableText]) -> None:
    """Removes these members from JSON. A text that cannot be parsed and has one of them becomes asterisks."""
    for text in texts:
        try:
            documents = walk(text.data, containers=True)
        except BodyFormatError:
            if _NAMED.search(text.data) is not None:
                _ = text.write(0, len(text.data))
            continue
        for found in documents:
            _take_out(text, found)


def _take_out(text: MaskableText, found: list[JsonNode]) -> None:
    scalars = [one for one in found if one.kind != "container"]
    starts, whole = [one.start for one in scalars], [0]
    for one in scalars:
        whole.append(whole[-1] + (one.kind == "integer"))
        if one.kind == "integer" and one.path[-2:] == _TOKEN:
            _ = text.write(one.start, one.end, zeroed(text.data[one.start : one.end]))
    for one in found:
        name = one.path[-1] if one.path and one.kind in _LISTED else None
        if not isinstance(name, str):
            continue
        first, last = bisect_left(starts, one.start), bisect_left(starts, one.end)
        numbers = 0 < last - first == whole[last] - whole[first]
        if _SAID.fullmatch(name) or (numbers and _IDS.fullmatch(name)):
            _ = text.write(one.start, one.end, emptied(one.end - one.start))
