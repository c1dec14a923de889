"""Paths of values in JSON, such as `messages[*].metadata.email`; docs/paths.md describes them.

Masking rules follow them through bytes, policies through the values of a call. `*` is any member, `[*]` any element,
`[0]` the first one, `**` any depth, also none. A name with other characters is written `["a.b"]`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile
from typing import Final, NamedTuple, TypeAlias

from penstock.gateway.wire.dialects.json_scan import Path

EVERYTHING: Final = "**"
"""The path of the whole value."""
_NAME: Final = r"[^.\[\]\"*\\\s]+"
_STEP: Final = re.compile(
    r"""(?P<dot>\.?)(?:(?P<deep>\*\*)|(?P<any>\*)|\[(?:(?P<each>\*)|(?P<index>\d{1,9})|"(?P<quoted>(?:[^"\\]|\\.)*)")\]"""
    rf"|(?P<name>{_NAME}))"
)
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_PLAIN_NAME: Final = re.compile(rf"(?!.*/){_NAME}")
Step: TypeAlias = tuple[str, str]
"""The kind of a step, and its name or index."""


class NextSteps(NamedTuple):
    """The members and elements that paths may lead to next, from some place."""

    names: tuple[str, ...]
    indexes: tuple[int, ...]
    any_member: bool
    any_element: bool


class JsonPaths:
    """Some paths, ready for use. The steps of all paths are the bits of a number, in which those are set that come
    next. So each step into a value takes a few operations, whatever the paths are."""

    def __init__(self, written: Iterable[str]) -> None:
        self.written = tuple(written)
        every = [parse_path(path) for path in self.written]
        self._said: defaultdict[str | int, int] = defaultdict(int)
        self._kinds: defaultdict[str, int] = defaultdict(int)
        self._next: dict[int, NextSteps] = {}
        self.end = begins = 0
        bit = 1
        for steps in every:
            begins |= bit
            for kind, said in steps:
                if kind in ("name", "quoted", "index"):
                    self._said[int(said) if kind == "index" else said] |= bit
                else:
                    self._kinds[kind] |= bit
                bit <<= 1
            self.end |= bit
            bit <<= 1
        self.begin = self.behind_stem = self._skipping(begins)
        alone = every[0] if len(every) == 1 else []
        self.stem = tuple(said for _, said in takewhile(lambda step: step[0] in ("name", "quoted"), alone))
        """The names before any other step, where there is one path."""
        for name in self.stem:
            self.behind_stem = self.into(self.behind_stem, name)
        self._last: tuple[Path, int] = (), self.begin
        """The last query: other values of the same list or object have the same beginning."""
        names = [_last_name(steps) for steps in every]
        self.names: tuple[bytes | None, ...] = tuple(names)
        """The last name of each path, None for a path without one: in a text without any of them no path leads
        anywhere."""
        known = b"|".join([re.escape(name) for name in names if name is not None])
        self._quoted = None if None in names else re.compile(rb"[\"'](?:%b)\\*+[\"']" % known)

    def lead_to(self, path: Path) -> bool:
        """True if one of the paths leads to a value, or to a container of it."""
        return bool(self._at(path) & self.end)

    def quoted_below(self, path: Path, text: bytes) -> bool:
        """True if one of the paths may lead into a text that should be JSON and is malformed: the text has the path's
        last name in quotes."""
        return self._at(path) != 0 and (self._quoted is None or self._quoted.search(text) is not None)

    def into(self, bits: int, step: str | int) -> int:
        """The steps that come next behind a member or an element. Those of `begin` come first, and a path has ended
        where one of `end` is among them."""
        kinds = self._kinds
        met = kinds["any"] | self._said.get(step, 0) | (kinds["each"] if isinstance(step, int) else 0)
        return self._skipping((bits & met) << 1 | bits & kinds["deep"])

    def next_steps(self, bits: int) -> NextSteps:
        """The members and elements that these steps name."""
        found = self._next.get(bits)
        if found is None:
            said = [name for name, there in self._said.items() if there & bits]
            wide = bool((self._kinds["any"] | self._kinds["deep"]) & bits)
            found = self._next[bits] = NextSteps(
                tuple(name for name in said if isinstance(name, str)),
                tuple(index for index in said if isinstance(index, int)),
                wide,
                wide or bool(self._kinds["each"] & bits),
            )
        return found

    def _at(self, path: Path) -> int:
        """The steps that come next after a path."""
        outer, bits = self._last
        if outer != path[:-1]:
            outer, bits = path[:-1], self.begin
            for step in outer:
                bits = self.into(bits, step) | bits & self.end
            self._last = outer, bits
        # A path leads to everything below its end, too.
        return self.into(bits, path[-1]) | bits & self.end if path else bits

    def _skipping(self, bits: int) -> int:
        """Adds the steps after `**`, which may match no step at all."""
        while (more := bits | (bits & self._kinds["deep"]) << 1) != bits:
            bits = more
        return bits


@lru_cache(maxsize=1024)
def compiled_paths(*written: str) -> JsonPaths:
    """The `JsonPaths` of some paths, kept: redactions ask for the same ones again."""
    return JsonPaths(written)


def parse_path(path: str) -> list[Step]:
    """The steps of a path; raises `ValueError`."""
    if not path or path.startswith("/"):
        raise ValueError(f"{path!r} is a JSON pointer and no path: write {_of_pointer(path)}{_note_of(path)}")
    steps, at = list[Step](), 0
    while at < len(path):
        found = _STEP.match(path, at)
        bracket = found is not None and path[found.end("dot")] == "["
        if found is None or bool(found["dot"]) == (bracket or not steps):
            raise ValueError(f"{path!r} is no path at {path[at:]!r}: write messages[*].content, or **.email, "
                             'and ["a b"] for a name with other characters')  # fmt: skip
        kind = found.lastgroup or ""
        steps.append((kind, re.sub(r"\\(.)", r"\1", found[kind]) if kind == "quoted" else found[kind]))
        at = found.end()
    if steps[-1][0] == "deep" and len(steps) > 1:
        raise ValueError(f"{path!r} ends with **, but a path leads to everything below it: leave .** out")
    return steps


def _of_pointer(pointer: str) -> str:
    """The path that says what a JSON pointer (RFC 6901) says."""
    made = ""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if _INDEX.fullmatch(part):
            made += f"[{part}]"
        elif part == "*" or _PLAIN_NAME.fullmatch(name):
            made += f".{name}"
        else:
            quoted = re.sub(r'(["\\])', r"\\\1", name)
            made += f'["{quoted}"]'
    return made.removeprefix(".") or EVERYTHING


def _note_of(pointer: str) -> str:
    """The note on a number in a pointer: it is an element of a list, or the name of a member. Empty without one."""
    number = next(filter(_INDEX.fullmatch, pointer.split("/")), None)
    return "" if number is None else f', or ["{number}"] for [{number}] where that is the name of a member'


def _last_name(steps: list[Step]) -> bytes | None:
    return next((said.encode() for kind, said in reversed(steps) if kind in ("name", "quoted")), None)
