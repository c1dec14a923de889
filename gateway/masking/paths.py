"""Paths of JSON members, such as `messages[*].metadata.email`. `*` is any member, `[*]` any element, `**` any depth.

A path leads to a value and to all that is below it. A name with other characters is written `["a.b"]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str | int, ...]
"""Keys and indexes that lead to a value."""
_STEP: Final = re.compile(
    r"""(?P<dot>\.?)(?:(?P<deep>\*\*)|(?P<any>\*)|\[(?:(?P<each>\*)|(?P<index>\d{1,9})|"(?P<quoted>(?:[^"\\]|\\.)+)")\]"""
    r"""|(?P<name>[^.\[\]"*\\\s]+))"""
)
_BELOW: Final = r"(?:\Z|\0)"


class MemberPaths:
    """Some paths, ready to be asked."""

    def __init__(self, written: Iterable[str]) -> None:
        steps = [parsed(path) for path in written]
        self._find = re.compile("|".join(f"(?:{''.join(map(_regex, one))}){_BELOW}" for one in steps), re.DOTALL).match
        self.names: tuple[bytes | None, ...] = tuple(map(_last_name, steps))
        """The last name of each path, None where it has none: where none of them stands, no path leads anywhere."""

    def lead_to(self, path: Path) -> bool:
        """Whether one of them leads to a value, or to something that it is in."""
        return self._find("".join([f"\0k{one}" if isinstance(one, str) else f"\0i{one}" for one in path])) is not None


Step: TypeAlias = tuple[str, str]
"""What kind of step, and its name or index."""


def parsed(path: str) -> list[Step]:
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


def _regex(step: Step) -> str:
    kind, said = step
    if kind == "deep":
        return r"(?:\0[^\0]*+)*"
    if kind == "any":
        return r"\0[^\0]*+"
    if kind in ("each", "index"):
        return r"\0i\d++" if kind == "each" else rf"\0i{int(said)}(?!\d)"
    return r"\0k" + re.escape(said) + r"(?=\Z|\0)"


def _last_name(steps: list[Step]) -> bytes | None:
    return next((said.encode() for kind, said in reversed(steps) if kind in ("name", "quoted")), None)
