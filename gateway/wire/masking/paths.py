"""Paths of JSON members, such as `messages[*].metadata.email`. `*` is any member, `[*]` any element, `**` any depth.

A path leads to a value and to everything below it. A name with other characters is written `["a.b"]`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, TypeAlias

from penstock.gateway.wire.dialects.json_scan import Path

_STEP: Final = re.compile(
    r"""(?P<dot>\.?)(?:(?P<deep>\*\*)|(?P<any>\*)|\[(?:(?P<each>\*)|(?P<index>\d{1,9})|"(?P<quoted>(?:[^"\\]|\\.)+)")\]"""
    r"""|(?P<name>[^.\[\]"*\\\s]+))"""
)


class MemberPaths:
    """Some paths, ready for use. The steps of all paths are the bits of a number, in which those are set that come
    next. So each step into a value takes a few operations, whatever the paths are."""

    def __init__(self, written: Iterable[str]) -> None:
        every = [parse_path(path) for path in written]
        self._said: defaultdict[str | int, int] = defaultdict(int)
        self._kinds: defaultdict[str, int] = defaultdict(int)
        self._ends = begins = 0
        bit = 1
        for steps in every:
            begins |= bit
            for kind, said in steps:
                if kind in ("name", "quoted", "index"):
                    self._said[int(said) if kind == "index" else said] |= bit
                else:
                    self._kinds[kind] |= bit
                bit <<= 1
            self._ends |= bit
            bit <<= 1
        self._begins = self._skipping(begins)
        self._last: tuple[Path, int] = (), self._begins
        """The last query: other values of the same list or object have the same beginning."""
        names = [_last_name(steps) for steps in every]
        self.names: tuple[bytes | None, ...] = tuple(names)
        """The last name of each path, None for a path without one: in a text without any of them no path leads
        anywhere."""
        known = b"|".join([re.escape(name) for name in names if name is not None])
        self._quoted = None if None in names else re.compile(rb"[\"'](?:%b)\\*+[\"']" % known)

    def lead_to(self, path: Path) -> bool:
        """True if one of the paths leads to a value, or to a container of it."""
        return bool(self._at(path) & self._ends)

    def quoted_below(self, path: Path, text: bytes) -> bool:
        """True if one of the paths may lead into a text that should be JSON and is malformed: the text has the path's
        last name in quotes."""
        return self._at(path) != 0 and (self._quoted is None or self._quoted.search(text) is not None)

    def _at(self, path: Path) -> int:
        """The steps that come next after a path."""
        outer, bits = self._last
        if outer != path[:-1]:
            outer, bits = path[:-1], self._begins
            for step in outer:
                bits = self._into(bits, step)
            self._last = outer, bits
        return self._into(bits, path[-1]) if path else bits

    def _into(self, bits: int, step: str | int) -> int:
        kinds = self._kinds
        met = kinds["any"] | self._said.get(step, 0) | (kinds["each"] if isinstance(step, int) else 0)
        # A path leads to everything below its end, too.
        return self._skipping((bits & met) << 1 | bits & (kinds["deep"] | self._ends))

    def _skipping(self, bits: int) -> int:
        """Adds the steps after `**`, which may match no step at all."""
        while (more := bits | (bits & self._kinds["deep"]) << 1) != bits:
            bits = more
        return bits


Step: TypeAlias = tuple[str, str]
"""The kind of a step, and its name or index."""


def parse_path(path: str) -> list[Step]:
    """The steps of a path; raises `ValueError`."""
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
    if not steps or steps[-1][0] == "deep":
        raise ValueError(f"{path!r} names no member: write **.email, or * for all of them")
    return steps


def _last_name(steps: list[Step]) -> bytes | None:
    return next((said.encode() for kind, said in reversed(steps) if kind in ("name", "quoted")), None)
