"""Aligns two texts: finds their common tokens, in order, from runs of tokens that are unique in both (patience diff).

Runs of several tokens are matched first, so that words that happen to occur twice are kept apart. Between two matches
the same is repeated, down to single tokens. Time is near to linear: no region is processed more than `DEEPEST` times.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain, pairwise

Block = tuple[int, int, int]
"""(index in the first, index in the second, number of tokens)."""
Region = tuple[int, int, int, int]

RUNS = (8, 4, 2, 1)
DEEPEST = 12
_ALONE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # Scripts that put no spaces between words: a token a character.
_SPACE = r"[^\S\n]"
_TOKEN = re.compile(rf"[^\W{_ALONE}]+|(?<!{_SPACE}){_SPACE}|{_SPACE}+?(?={_SPACE}(?!{_SPACE}))|.", re.DOTALL)


def tokens(text: str) -> list[str]:
    """Words, runs of spaces, and every other character by itself; joined, they are the text. The first and the last
    space of a run are tokens, so that those around an empty value are the same as those around another."""
    return _TOKEN.findall(text)


def aligned(one: list[str], other: list[str]) -> list[Block]:
    """Blocks of equal tokens, in the order of both."""
    found: list[Block] = []
    todo = [((0, len(one), 0, len(other)), 0, 0)]
    while todo:
        region, size, depth = todo.pop()
        region, ends = _trimmed(one, other, region)
        found += ends
        if depth == DEEPEST or region[0] == region[1] or region[2] == region[3]:
            continue
        blocks = _unique(one, other, region, RUNS[size])
        found += blocks
        if blocks:
            todo += [(gap, size, depth + 1) for gap in _gaps(region, blocks)]
        elif size + 1 < len(RUNS):
            todo.append((region, size + 1, depth + 1))
    return sorted(found)


def _trimmed(one: list[str], other: list[str], region: Region) -> tuple[Region, list[Block]]:
    """(the region without its common beginning and end, the blocks that these are)."""
    a, a_end, b, b_end = region
    head = _equal(one, other, a, b, min(a_end - a, b_end - b))
    a, b = a + head, b + head
    tail, most = 0, min(a_end - a, b_end - b)
    while tail < most and one[a_end - tail - 1] == other[b_end - tail - 1]:
        tail += 1
    blocks = [(a - head, b - head, head), (a_end - tail, b_end - tail, tail)]
    return (a, a_end - tail, b, b_end - tail), [block for block in blocks if block[2]]


def _equal(one: list[str], other: list[str], a: int, b: int, most: int) -> int:
    size = 0
    while size < most and one[a + size] == other[b + size]:
        size += 1
    return size


def _unique(one: list[str], other: list[str], region: Region, size: int) -> list[Block]:
    """The longest chain of runs that are unique on either side, each extended to the right as far as both sides
    agree."""
    ours, theirs = _runs(one, region[0], region[1], size), _runs(other, region[2], region[3], size)
    pairs = [(a, b) for run, a in ours.items() if a >= 0 and (b := theirs.get(run, -1)) >= 0]
    blocks: list[Block] = []
    chosen = _increasing(pairs)
    for (a, b), (a_next, b_next) in pairwise(chain(chosen, [(region[1], region[3])])):
        if not blocks or (a >= blocks[-1][0] + blocks[-1][2] and b >= blocks[-1][1] + blocks[-1][2]):
            blocks.append((a, b, _equal(one, other, a, b, min(max(a_next - a, size), max(b_next - b, size)))))
    return blocks


def _runs(side: list[str], start: int, end: int, size: int) -> dict[tuple[str, ...], int]:
    """The index of each run of `size` tokens; -1 for runs that occur more than once."""
    places: dict[tuple[str, ...], int] = {}
    shifted = [side[start + shift : end] for shift in range(size)]
    for at, run in enumerate(zip(*shifted, strict=False), start):
        places[run] = -1 if run in places else at
    return places


def _increasing(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest chain of pairs that increases on both sides; the pairs are sorted by the first."""
    lasts: list[int] = []
    chosen: list[int] = []
    before: list[int] = []
    for at, (_, b) in enumerate(pairs):
        place = bisect_left(lasts, b)
        before.append(chosen[place - 1] if place else -1)
        lasts[place : place + 1] = [b]
        chosen[place : place + 1] = [at]
    found: list[tuple[int, int]] = []
    at = chosen[-1] if chosen else -1
    while at >= 0:
        found.append(pairs[at])
        at = before[at]
    return found[::-1]


def _gaps(region: Region, blocks: list[Block]) -> Iterator[Region]:
    """The regions between the blocks of a region."""
    a, b = region[0], region[2]
    for start_a, start_b, size in [*blocks, (region[1], region[3], 0)]:
        yield (a, start_a, b, start_b)
        a, b = start_a + size, start_b + size
