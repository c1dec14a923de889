"""The template of texts that are one prompt: the shortest text, reduced to the tokens that every other text shares.

Values that change by their nature (`gateway.releases.prompts.volatile_values`) are slots even where all texts agree on
them. Pieces too short to be recognised become part of the slots beside them. So does the rest of a number or date that
a slot cuts: the days of one month do not make the month a part of the prompt. If values in the texts make a split
ambiguous, the anchor that causes it is dropped.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, chain, pairwise

from penstock.gateway.model.resource import SHORTEST, Template
from penstock.gateway.releases.prompts.anchors import match
from penstock.gateway.releases.prompts.volatile_values import find_volatile_values, kind_of

# Aligns two texts: finds their common tokens, in order, from runs of tokens that are unique in both (patience diff).
#
# Runs of several tokens are matched first, so that words that happen to occur twice are kept apart. Between two
# matches the same is repeated, down to single tokens. Time is near to linear: no region is processed more than
# `DEEPEST` times.

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
    ours, theirs = _alignment_runs(one, region[0], region[1], size), _alignment_runs(other, region[2], region[3], size)
    pairs = [(a, b) for run, a in ours.items() if a >= 0 and (b := theirs.get(run, -1)) >= 0]
    blocks: list[Block] = []
    chosen = _increasing(pairs)
    for (a, b), (a_next, b_next) in pairwise(chain(chosen, [(region[1], region[3])])):
        if not blocks or (a >= blocks[-1][0] + blocks[-1][2] and b >= blocks[-1][1] + blocks[-1][2]):
            blocks.append((a, b, _equal(one, other, a, b, min(max(a_next - a, size), max(b_next - b, size)))))
    return blocks


def _alignment_runs(side: list[str], start: int, end: int, size: int) -> dict[tuple[str, ...], int]:
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


Runs = list[tuple[int, int]]
"""(start, end) of runs of the pivot's tokens. The pivot is the shortest text."""

JOINERS = frozenset("-./:,+@_")
"""Characters that join the parts of numbers and dates."""
LETTERS = 3
"""Least number of characters of an anchor that are no white space."""
TAIL = 80
GIVEN_UP = 8
_LABEL = re.compile(r"(?:^|[.;,|{(]\s*)[-*#>\s\"'`]*([A-Za-z][\w-]*(?: [\w-]+){0,2})[*_\"'`]*\s*[:=][*\"'`(\[<\s]*$")
_TAG = re.compile(r"<([A-Za-z][\w-]{0,30})>$")


def common_template(texts: Counter[str]) -> Template | None:
    """The common text as a template with slots between; None if there is too little of it. The counts tell how often
    each text was sent."""
    shortest = min(texts, key=len)
    pivot = tokens(shortest)
    together = _without(pivot, _together(pivot, texts))
    runs = [run for run in _loosened(pivot, _runs(together)) if _tells("".join(pivot[slice(*run)]))]
    if not runs:
        return None
    anchors = ["".join(pivot[slice(*run)]) for run in runs]
    opens, closes = runs[0][0] == 0 and together[0], runs[-1][1] == len(pivot) and together[-1]
    anchors = [*([] if opens else [""]), *anchors, *([] if closes else [""])]
    return name_slots(_mended(anchors, texts), shortest)


def _together(pivot: list[str], texts: Counter[str]) -> list[bool | None]:
    """For each token of the pivot: True if every text has it right behind the token before, False if every text has it
    but not so, None if not. The last entry: True if every text ends with the pivot's last token."""
    found: list[bool | None] = [True] * (len(pivot) + 1)
    for text in texts:
        other = tokens(text)
        here: list[bool | None] = [None] * len(pivot) + [False]
        a_end = b_end = 0
        for a, b, size in aligned(pivot, other):
            here[a : a + size] = [(a, b) == (a_end, b_end)] + [True] * (size - 1)
            a_end, b_end = a + size, b + size
        here[-1] = (a_end, b_end) == (len(pivot), len(other))
        found = [None if one is None or two is None else one and two for one, two in zip(found, here, strict=True)]
    return found


def _without(pivot: list[str], together: list[bool | None]) -> list[bool | None]:
    """The same list, with None for the tokens of values that change by their nature."""
    begins = [0, *accumulate(map(len, pivot))]
    values, at = find_volatile_values("".join(pivot)), 0
    found = list(together)
    for value in values:
        while begins[at + 1] <= value.begin:
            at += 1
        while at < len(pivot) and begins[at] < value.end:
            found[at] = None
            at += 1
        at = max(at - 1, 0)
    if values and values[-1].end == begins[-1]:
        found[-1] = False
    return found


def _runs(together: list[bool | None]) -> Runs:
    """Runs of tokens that all texts have, one right behind the other."""
    runs: Runs = []
    for at, follows in enumerate(together[:-1]):
        if follows and runs and runs[-1][1] == at:
            runs[-1] = (runs[-1][0], at + 1)
        elif follows is not None:
            runs.append((at, at + 1))
    return runs


def _loosened(pivot: list[str], runs: Runs) -> Iterator[tuple[int, int]]:
    """Runs without parts of numbers at the edges beside a slot."""
    for start, end in runs:
        while start > 0 and start < end and _cut(pivot[start : start + 2]):
            start += 1
        while end < len(pivot) and start < end and _cut(pivot[start:end][:-3:-1]):
            end -= 1
        yield start, end


def _cut(edge: list[str]) -> bool:
    """True if an edge (its outermost token first) belongs to a number: a digit, or a joiner with a digit behind it."""
    return _has_digit(edge[0]) or (edge[0] in JOINERS and len(edge) > 1 and _has_digit(edge[1]))


def _has_digit(token: str) -> bool:
    return any(map(str.isdigit, token))


def _tells(anchor: str) -> bool:
    return len(anchor) >= SHORTEST and len("".join(anchor.split())) >= LETTERS


def _mended(anchors: list[str], texts: Counter[str]) -> list[str]:
    """The anchors without those (of the shortest ones) whose removal lets more texts match."""
    best = count_matches(anchors, texts)
    while best < texts.total():
        inner = sorted(range(1, len(anchors) - 1), key=lambda at: len(anchors[at]))[:GIVEN_UP]
        without = [[*anchors[:at], *anchors[at + 1 :]] for at in inner]
        counts = [count_matches(fewer, texts) for fewer in without]
        if max(counts, default=0) <= best:
            break
        best = max(counts)
        anchors = without[counts.index(best)]
    return anchors


def count_matches(anchors: list[str], texts: Counter[str]) -> int:
    """Number of messages that a template with these anchors matches."""
    template = Template(tuple(anchors), _places(anchors))
    return sum(count for text, count in texts.items() if not isinstance(match(template, text), str))


def name_slots(anchors: list[str], example: str) -> Template:
    """A template whose slots are named by the labels before them: `Date: {date}`, `<user>{user}</user>`; without a
    label, by the kind of their value in the example, such as `date`, or by their place."""
    slots: list[str] = []
    for place, anchor, kind in zip(_places(anchors), anchors[:-1], _kinds(anchors, example), strict=True):
        label = _label(anchor) or kind or place
        again = sum(slot == label or slot.startswith(f"{label}_") for slot in slots)
        slots.append(f"{label}_{again + 1}" if again else label)
    return Template(tuple(anchors), tuple(slots))


def _places(anchors: list[str]) -> tuple[str, ...]:
    return tuple(f"slot{at}" for at in range(1, len(anchors)))


def _kinds(anchors: list[str], example: str) -> Iterator[str | None]:
    """The kind of the value in each slot of a text, if it changes by its nature; else None."""
    places, at = _places(anchors), 0
    values, there = match(Template(tuple(anchors), places), example), find_volatile_values(example)
    for anchor, place in zip(anchors[:-1], places, strict=True):
        value = "" if isinstance(values, str) else values[place]
        at += len(anchor)
        yield kind_of(example, at, at + len(value), there)
        at += len(value)


def _label(anchor: str) -> str | None:
    before = anchor.rstrip()[-TAIL:].rpartition("\n")[2]
    found = _TAG.search(before) or _LABEL.search(before)
    return None if found is None else re.sub(r"[^a-z0-9]+", "_", found[1].lower()).strip("_") or None
