"""Compares the result that a model was shown with the one that the tool server returned. Pure.

Hosts rewrite results before they show them to a model. These are matches, the best first:

* `SAME`: the text of the content blocks, white space aside (hosts join blocks by nothing, blanks or line ends); or the
  same JSON as `structuredContent`, its only member, the content blocks, the whole result, or text that is JSON itself,
  however it was encoded; or the same images and sounds.
* `WRAPPED`: the same within tags (`<result>`...`</result>`), a code fence, members of an object with a name for results
  (`ENVELOPE`), or behind a label (`Error: `...); or anywhere in other text, also quoted or escaped (`repr`, JSON,
  HTML), if it has `DISTINCT` characters or more.
* `CUT`: `LEAST_CUT` characters or more from the beginning, the end or both, with nothing beside them or a mark of at
  most `MARK` characters that says so (`...[truncated 912 characters]`).

Everything else (a summary, a short text within a longer one, an image made smaller) is no match: the result is no
evidence for the run, nor against it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, Final

import orjson

from penstock.gateway.model.turn import Part
from penstock.gateway.wire.dialects.loose_json import UNREADABLE, Json, arr, loads, obj, objs, text

# Compares the tool call in an answer with the request to a tool server: names and arguments. Pure.
#
# **Names.** Hosts tell a model a server's tool under a name that they make of both: `NAMES` lists how. Names are
# compared in lower case and with every other sign than letters and digits as one separator, because hosts replace what
# providers refuse (`mcp__git-hub__search.code`, `mcp__git_hub__search_code`), and as cut to 64 characters. A name that
# only ends in the tool's name has a prefix that is not declared, such as the agent's own name of the server: it counts
# half.
#
# **Arguments** match whole (`MatchDegree.SAME`) if they are the same JSON: order, white space, `1.0` for `1`, members
# that are null, JSON within a string, and no arguments for an empty object make no difference. They match in part
# (`MatchDegree.PART`) if one side has additional members (defaults that a host fills in or leaves out, a session that
# it adds) and the common members are the same, where `"1"` counts as `1`.

NAMES: Final = (
    "{tool}",
    "{server}__{tool}",
    "mcp__{server}__{tool}",
    "{tool}_mcp_{server}",
)
"""Patterns by which hosts name a server's tool. Other separators (`SERVER-tool`, `SERVER_tool`, `SERVER.tool`,
`SERVER/tool`, `mcp_SERVER_tool`) count as the second and the third."""
LONGEST_NAME: Final = 64
"""Maximum length of a name that providers take; hosts cut longer names."""
_OTHER = re.compile(r"[^a-z0-9]+")


class MatchDegree(IntEnum):
    """The degree to which two sides agree."""

    NO = 0
    PART = 1
    SAME = 2


# -- names -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """A name in the form in which names are compared."""
    return _OTHER.sub("_", name.lower()).strip("_")


@lru_cache(maxsize=4096)
def names(server: str, tool: str) -> frozenset[str]:
    """The plain names under which a host may tell a model this tool."""
    whole = [it.format(server=server, tool=tool) for it in NAMES]
    return frozenset(plain(it) for it in [*whole, *(name[:LONGEST_NAME] for name in whole)])


def run_keys(server: str, tool: str) -> frozenset[str]:
    """The keys among those of `request_keys` under which the asks of a run are found."""
    return frozenset({plain(tool)}) | names(server, tool)


@lru_cache(maxsize=4096)
def request_keys(name: str) -> frozenset[str]:
    """The keys of a name: itself, and each part of it that may be the tool's name behind a prefix."""
    whole = plain(name)
    pieces = whole.split("_")
    return frozenset("_".join(pieces[at:]) for at in range(len(pieces))) | {whole.partition("_mcp_")[0]}


def match_name(name: str, server: str, tool: str, others: Iterable[str] = ()) -> MatchDegree:
    """The match of a tool's name as a model knows it with this server's tool: `PART` if it only ends in the tool's
    name. `others`: the rollout's other servers; a name that the patterns give to one of them is not this server's name
    with a prefix of the host."""
    known, short = plain(name), plain(tool)
    if known in names(server, tool):
        return MatchDegree.SAME
    if not short or not known.endswith("_" + short):
        return MatchDegree.NO
    return MatchDegree.NO if any(known in names(other, tool) for other in others) else MatchDegree.PART


# -- arguments -------------------------------------------------------------------------------------------------------


def parse_arguments(arguments: str) -> Any:
    """The arguments of an answer as JSON; the text itself if it is not JSON."""
    value = loads(arguments or "{}")
    if isinstance(value, str):
        inner = loads(value or "{}")
        return value if inner is None else inner
    return arguments if value is None and arguments.strip() != "null" else value


def canonical(value: Any) -> str:
    """A JSON value in the form in which values are compared."""
    return _dumped({} if value is None else _plain_value(value))


def match_arguments(asked: Any, given: Any) -> MatchDegree:
    """The match of two sets of arguments, both as JSON values: whole, in part, or none."""
    if canonical(asked) == canonical(given):
        return MatchDegree.SAME
    one, other = _plain_value(asked), _plain_value(given)
    if not isinstance(asked, dict) or not isinstance(given, dict):
        return MatchDegree.NO
    common = one.keys() & other.keys()
    nested = common == one.keys() or common == other.keys()
    return (
        MatchDegree.PART if nested and all(_said(one[key]) == _said(other[key]) for key in common) else MatchDegree.NO
    )


def _said(value: Any) -> str:
    """A value as an untyped host may write it."""
    return value.lower() if isinstance(value, str) else _dumped(value)


def _dumped(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except (TypeError, *UNREADABLE):
        # Nested too deeply, an integer above 64 bits, or half a surrogate pair.
        return repr(value)


def _plain_value(value: Any) -> Any:
    """A value with whole numbers as integers, and without members that are null."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return dict(_arguments_members(obj(value)))
    if isinstance(value, list):
        return [_plain_value(inner) for inner in arr(value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _arguments_members(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, _plain_value(inner)) for key, inner in value.items() if inner is not None)


DISTINCT: Final = 24
"""Number of characters, white space aside, from which a text is hardly found in another by chance."""
LEAST_CUT: Final = 48
"""Minimum number of characters that remain of a result that was cut."""
MARK: Final = 300
"""Maximum number of characters that a host puts beside the remaining text."""
LABEL: Final = 80
"""Maximum length of a label before a short result, its colon included."""
ENVELOPE: Final = ("result", "output", "content", "text", "data", "response", "structuredContent", "value", "error")
_ENVELOPES = 4
"""Maximum number of nested envelopes that are opened."""
_TAG = re.compile(r"<([A-Za-z][\w.:-]*)[^<>]*>(.*)</\1>", re.DOTALL)
_FENCE = re.compile(r"```\w*\n(.*)\n```", re.DOTALL)
_MARK = re.compile(r"\.\.\.|…|truncat|omit|clip|elid|shorten|exceed|limit", re.IGNORECASE)
_QUOTES = re.compile(r"""\\[nrt]|[\\"'\s]""")


class Likeness(IntEnum):
    """The relation of a shown result to a returned one, the best last."""

    NONE = 0
    CUT = 1
    WRAPPED = 2
    SAME = 3


def squeezed(said: str) -> str:
    """A text without white space."""
    return "".join(said.split())


class ReturnedResult:
    """The result that a tool server returned. `result`: of `tools/call`, as JSON; `error`: the message of a JSON-RPC
    error."""

    def __init__(self, result: Any, error: str | None = None) -> None:
        self._result, self._error = obj(result), error

    @cached_property
    def text(self) -> str:
        """The text of its content blocks, without white space."""
        if self._error is not None:
            return squeezed(self._error)
        return squeezed("".join(filter(None, map(_block_text, objs(self._result.get("content"))))))

    @cached_property
    def media(self) -> frozenset[str]:
        """Its images and sounds, in base64."""
        return frozenset(data for block in objs(self._result.get("content")) if (data := text(block.get("data"))))

    @cached_property
    def values(self) -> frozenset[str]:
        """Its content as JSON that is not empty, in each form in which a host may extract it."""
        return frozenset(canonical(value) for value in self._values() if value not in (None, {}, []))

    @cached_property
    def bare(self) -> str:
        """Its text without the characters that quoting changes."""
        return _QUOTES.sub("", self.text)

    @property
    def distinct(self) -> bool:
        """True if another tool's result is hardly the same by chance."""
        structured = self._result.get("structuredContent")
        return bool(self.media) or max(len(self.text), len(canonical(structured))) >= DISTINCT

    @property
    def empty(self) -> bool:
        """True if it has no content."""
        return not (self.text or self.media or self._result.get("structuredContent"))

    @property
    def lookup_keys(self) -> Iterator[str]:
        """The keys among those of `ShownResult.lookup_keys` under which the same result may be found."""
        yield from (self.text, *self.values)

    def _values(self) -> Iterator[Any]:
        blocks, structured = objs(self._result.get("content")), self._result.get("structuredContent")
        texts = [said for block in blocks if (said := _block_text(block)) is not None]
        yield structured
        if len(obj(structured)) == 1:
            yield from obj(structured).values()
        yield blocks
        yield [{key: block[key] for key in ("type", "text") if key in block} for block in blocks]
        yield {"content": blocks}
        yield self._result
        yield {key: value for key, value in self._result.items() if key not in ("_meta", "isError", "resultType")}
        yield texts
        if len(texts) == 1 and isinstance(value := loads(texts[0]), dict | list):
            yield value


class ShownResult:
    """The result of a tool in the form in which a model was shown it."""

    def __init__(self, part: Part) -> None:
        self.part = part

    @cached_property
    def text(self) -> str:
        """Its text, without white space."""
        return squeezed(self.part.text or "")

    @cached_property
    def value(self) -> Any:
        """Its text as JSON; None where it is not JSON."""
        return loads(self.part.text or "")

    @cached_property
    def media(self) -> frozenset[str]:
        """Long strings of its wire object, which contain images and sounds."""
        return frozenset(_long_strings(self.part.data))

    @cached_property
    def bare(self) -> str:
        """Its text without the characters that quoting changes."""
        return _QUOTES.sub("", html.unescape(self.text))

    @cached_property
    def unwrapped(self) -> tuple[ShownResult, ...]:
        """Its content, if it is a wrapper; else empty."""
        said = (self.part.text or "").strip()
        match = _TAG.fullmatch(said) or _FENCE.fullmatch(said)
        inner = [match[match.lastindex or 0]] if match else [_text_of(it) for it in _members(self.value)]
        return tuple(ShownResult(Part(type="tool_call_response", text=it)) for it in inner)

    @property
    def lookup_keys(self) -> Iterator[str]:
        """The keys among those of `ReturnedResult.lookup_keys` under which the same result may be found."""
        yield self.text
        if self.value is not None:
            yield canonical(self.value)


def likeness(returned: ReturnedResult, shown: ShownResult) -> Likeness:
    """The likeness of a shown result and a returned one."""
    if _same(returned, shown):
        return Likeness.SAME
    inside, layer = [shown], shown.unwrapped
    for _ in range(_ENVELOPES):
        if any(_same(returned, it) for it in layer):
            return Likeness.WRAPPED
        inside += layer
        layer = tuple(inner for it in layer for inner in it.unwrapped)
    if _labelled(returned.text, shown.text) or _contained(returned, shown):
        return Likeness.WRAPPED
    return Likeness.CUT if any(_cut(returned.text, it.text) for it in inside) else Likeness.NONE


def _same(returned: ReturnedResult, shown: ShownResult) -> bool:
    if returned.media and returned.media <= shown.media:
        return returned.text in shown.text
    if returned.text == shown.text:
        return bool(returned.text) or (returned.empty and not shown.media)
    return bool(returned.values) and shown.value is not None and canonical(shown.value) in returned.values


def _labelled(returned: str, shown: str) -> bool:
    return bool(returned) and shown.endswith(":" + returned) and len(shown) - len(returned) <= LABEL


def _contained(returned: ReturnedResult, shown: ShownResult) -> bool:
    if len(returned.text) < DISTINCT or len(returned.text) > 2 * len(shown.text):
        return False
    return returned.text in shown.text or (len(returned.bare) >= DISTINCT and returned.bare in shown.bare)


def _cut(returned: str, shown: str) -> bool:
    """True if a text is the remainder of a longer one."""
    if len(returned) <= LEAST_CUT or len(shown) < LEAST_CUT:
        return False
    kept = 0
    if (at := shown.find(returned[:LEAST_CUT])) >= 0:
        kept = _common(returned, shown[at:])
    rest, left = shown[max(at, 0) + kept :], returned[kept:]
    tail = _common(left[::-1], rest[::-1])
    if kept == 0 and tail < LEAST_CUT:
        return False
    beside = shown[: max(at, 0)] + rest[: len(rest) - tail]
    return not beside or (len(beside) <= MARK and _MARK.search(beside) is not None)


def _common(one: str, other: str) -> int:
    """The length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _block_text(block: Json) -> str | None:
    """The text of a content block: its own, or that of the resource in it."""
    return text(block.get("text")) if "text" in block else text(obj(block.get("resource")).get("text"))


def _members(value: Any) -> list[Any]:
    """The content of an envelope: the members with one of the names, the only item, or the text of a JSON string."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return arr(value)[:1] if len(arr(value)) == 1 else []
    return [obj(value)[key] for key in ENVELOPE if key in obj(value)]


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else canonical(value)


def _long_strings(value: Any) -> Iterator[str]:
    """The strings in a value that may be media; of a data URL, its data."""
    layer: list[Any] = [value]
    while layer:
        inner: list[Any] = []
        for it in layer:
            if isinstance(it, str) and len(it) >= DISTINCT:
                yield it.partition(";base64,")[2] if it.startswith("data:") else it
            inner += [*obj(it).values(), *arr(it)]
        layer = inner
