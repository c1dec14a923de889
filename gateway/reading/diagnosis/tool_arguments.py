"""Compares the tool call in an answer with the request to a tool server: names and arguments. Pure.

**Names.** Hosts tell a model a server's tool under a name that they make of both: `NAMES` lists how. Names are compared
in lower case and with every other sign than letters and digits as one separator, because hosts replace what providers
refuse (`mcp__git-hub__search.code`, `mcp__git_hub__search_code`), and as cut to 64 characters. A name that only ends in
the tool's name has a prefix that is not declared, such as the agent's own name of the server: it counts half.

**Arguments** match whole (`MatchDegree.SAME`) if they are the same JSON: order, white space, `1.0` for `1`, members
that are null, JSON within a string, and no arguments for an empty object make no difference. They match in part
(`MatchDegree.PART`) if one side has additional members (defaults that a host fills in or leaves out, a session that it
adds) and the common members are the same, where `"1"` counts as `1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

import orjson

from penstock.gateway.wire.dialects.loose_json import UNREADABLE, arr, loads, obj

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
        return dict(_members(obj(value)))
    if isinstance(value, list):
        return [_plain_value(inner) for inner in arr(value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _members(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((key, _plain_value(inner)) for key, inner in value.items() if inner is not None)
