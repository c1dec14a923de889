"""Finds the prompts in messages: system texts are grouped by call-site and prompt, and each group gives a template.

Within one call-site (agent and tools on offer), runs of four tokens that occur in many texts belong to a prompt. Text
that only one message has is in a slot and does not count, however long it is. Texts that share many of the counted runs
form a group, and the common text of a group (`common_template`) is its template. If a slot
holds prompts itself, which are a few long texts again and again, the group is split by them. Texts that a template
does not match are tried again by themselves.

The result is measured with the same scan that recognises prompts later. It is a proposal: a person registers it.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

from penstock.gateway.model.resource import SHORTEST, Template
from penstock.gateway.releases.prompt_recogniser import match, tokens

TextCounts: TypeAlias = Counter[str]
"""Different texts, with the number of times each was sent."""
Values: TypeAlias = Mapping[str, str]

FEWEST = 20
"""Least number of messages from which a prompt is proposed."""
GROUPED, ALIGNED, CHARACTERS = 256, 64, 1_500_000
"""Most texts that are grouped, most texts of a group that are aligned, and most characters of these together: they
bound the time."""
RUN = 4
ALIKE = 0.35
"""Tokens in a run, and the least similarity of two texts of one group (`_alike`)."""
LONG_VALUE, OFTEN, MOSTLY, NEARLY_ALL = 60, 5, 0.3, 0.8
"""Thresholds from which a slot is taken to hold prompts: characters of its values, messages, share of common text, and
share of the messages."""
LEVELS = 3
EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class PromptSample:
    """A system text that was sent."""

    text: str
    agent: str | None = None
    """Name of the agent or call-site, where it is known."""
    tools: frozenset[str] = frozenset()
    """Names of the tools on offer."""
    rollout: str | None = None
    """The rollout: agents resend their prompt with every call, so that within one rollout a text counts once."""


@dataclass(frozen=True, slots=True)
class PromptProposal:
    """A prompt that was found."""

    template: Template
    messages: int
    """Number of messages that match it."""
    coverage: float
    """Their share, from 0 to 1, of those messages of the call-site that are this prompt or none that was found."""
    slots: Mapping[str, list[str]]
    """A few values of each slot, the most frequent first."""
    agent: str | None
    """The agent's name, as in the samples."""
    call_site: str
    """A hash of agent, tools and template; 16 hex digits."""


def propose(samples: Iterable[PromptSample]) -> list[PromptProposal]:
    """The prompts that at least `FEWEST` messages match, the most frequent first."""
    sites: defaultdict[tuple[str | None, frozenset[str]], TextCounts] = defaultdict(TextCounts)
    seen: set[PromptSample] = set()
    for it in samples:
        if it.rollout is None or it not in seen:
            seen.add(it)
            sites[it.agent, it.tools][it.text] += 1
    found = [proposal for (agent, tools), texts in sites.items() for proposal in _of_site(texts, agent, tools)]
    return sorted((it for it in found if it.messages >= FEWEST), key=lambda it: -it.messages)


def _of_site(texts: TextCounts, agent: str | None, tools: frozenset[str]) -> Iterator[PromptProposal]:
    templates = list(dict.fromkeys(induce_templates(_spread(texts, GROUPED))))
    found: dict[Template, list[tuple[Values, int]]] = {template: [] for template in templates}
    strange = 0
    for text, count in texts.items():
        ways = [(template, way) for template in templates if not isinstance(way := match(template, text), str)]
        if len(ways) == 1:
            found[ways[0][0]].append((ways[0][1], count))
        else:
            strange += count
    for template, values in found.items():
        messages = sum(count for _, count in values)
        if messages:
            coverage = messages / (messages + strange)
            examples = {slot: _examples(slot, values) for slot in template.slots}
            yield PromptProposal(template, messages, coverage, examples, agent, call_site(agent, tools, template))


def call_site(agent: str | None, tools: Iterable[str], template: Template) -> str:
    """The id of a prompt at its call-site: a hash; 16 hex digits."""
    return hashlib.sha256(json.dumps([agent, sorted(tools), template.source]).encode()).hexdigest()[:16]


def _examples(slot: str, values: list[tuple[Values, int]]) -> list[str]:
    counts = TextCounts()
    for value, count in values:
        counts[value[slot]] += count
    return [value for value, _ in counts.most_common(EXAMPLES)]


def _spread(texts: TextCounts, most: int) -> TextCounts:
    """At most `most` texts, and no more than can be processed in a moment, evenly spread over all."""
    longest = max(map(len, texts), default=1)
    size = min(most, max(CHARACTERS // max(longest, 1), OFTEN))
    return TextCounts(dict(list(texts.items())[:: -(-len(texts) // size) or 1]))


def induce_templates(texts: TextCounts, levels: int = LEVELS) -> Iterator[Template]:
    """The templates of a call-site's texts."""
    for group in group_texts(texts):
        template = _template(group)
        if template is None:
            continue
        parts = list(_parts(template, group))
        if not (parts and levels):
            yield template
            parts = [TextCounts({text: count for text, count in group.items() if match(template, text) == "miss"})]
        for part in parts if levels else ():
            yield from induce_templates(part, levels - 1)


def _template(group: TextCounts) -> Template | None:
    template = common_template(_spread(group, ALIGNED)) if group.total() >= OFTEN else None
    return None if template is None or template.weakness else template


def group_texts(texts: TextCounts) -> list[TextCounts]:
    """Group texts by the prompt that they are."""
    runs = {text: _token_runs(text) for text in texts}
    others = Counter(run for its in runs.values() for run in its)
    others.subtract(list(others))
    found: list[tuple[set[int], TextCounts]] = []
    for text, count in texts.items():
        alike = [_alike(runs[text], leader, others) for leader, _ in found]
        if max(alike, default=0.0) < ALIKE:
            found.append((runs[text], TextCounts({text: count})))
        else:
            found[alike.index(max(alike))][1][text] += count
    return [group for _, group in found]


def _token_runs(text: str) -> set[int]:
    cut = tokens(text)
    return set(map(hash, zip(*(cut[shift:] for shift in range(RUN)), strict=False)))


def _alike(one: set[int], other: set[int], others: Mapping[int, int]) -> float:
    """Similarity of two texts, from 0 to 1: the share of their runs that both have, each run weighted by the number of
    other texts with it."""
    both, either = (sum(map(others.__getitem__, runs)) for runs in (one & other, one | other))
    return both / either if either else 0.0


def _parts(template: Template, group: TextCounts) -> Iterator[TextCounts]:
    """Split a group by the prompts in the first slot that holds prompts; nothing if there is none."""
    ways = [(text, count, way) for text, count in group.items() if not isinstance(way := match(template, text), str)]
    for slot in template.slots:
        held = TextCounts()
        for _, count, way in ways:
            held[way[slot]] += count
        if min(map(len, held), default=0) < LONG_VALUE:
            continue
        kinds = [kind for kind in group_texts(_spread(held, GROUPED)) if _is_prompt(kind)]
        if len(kinds) > 1 and sum(kind.total() for kind in kinds) >= NEARLY_ALL * held.total():
            for kind in kinds:
                yield TextCounts({text: count for text, count, way in ways if way[slot] in kind})
            return


def _is_prompt(kind: TextCounts) -> bool:
    template = _template(kind)
    mean = sum(map(len, kind)) / len(kind)
    return template is not None and sum(map(len, template.anchors)) >= MOSTLY * mean


# -- the template of texts that are one prompt ------------------------------------------------------------------------
#
# It is the shortest text, reduced to the tokens that every other text shares. Values that change by their nature
# (`find_volatile_values`) are slots even where all texts agree on them. Pieces too short to be recognised become part
# of the slots beside them. So does the rest of a number or date that a slot cuts: the days of one month do not make the
# month a part of the prompt. If values in the texts make a split ambiguous, the anchor that causes it is dropped.

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


# -- the common tokens of two texts -----------------------------------------------------------------------------------
#
# They are found in order, from runs of tokens that are unique in both (patience diff). Runs of several tokens are
# matched first, so that words that happen to occur twice are kept apart. Between two matches the same is repeated, down
# to single tokens. Time is near to linear: no region is processed more than `DEEPEST` times.

Block = tuple[int, int, int]
"""(index in the first, index in the second, number of tokens)."""
Region = tuple[int, int, int, int]

RUNS = (8, 4, 2, 1)
DEEPEST = 12


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


# -- values that change by their nature: dates, times, paths, versions, ids and names of models -----------------------
#
# `Today is 2026-11-22` is the same text in every call of one day, and in none of the next. So such a value is never a
# part of a prompt, even where all messages agree on it. A text that is wrongly taken for one does little harm: a slot
# whose value never changes is written again as it came. A value that is missed reverts a release unnoticed.
#
# Wording that looks like one is left alone: numbers of sections, decimals, limits, one word behind a slash (`/help`),
# relative paths and URLs.

Kind: TypeAlias = Literal["model", "date", "time", "path", "version", "id"]


class VolatileValue(NamedTuple):
    """A changing value in a text."""

    begin: int
    """Offset of its first character."""
    end: int
    """Offset behind its last character."""
    kind: Kind
    """Its kind, which names its slot."""


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|"
    r"Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b\.?"
_YEAR = r"(?:19|20)\d\d"
_DAY = r"\d{1,2}(?:st|nd|rd|th|[.º])?"
_WORD = r"[^\W\d_]{3,12}\.?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?"
_ZONE = (
    r"(?:Z\b|(?:UTC|GMT)(?:[+-]\d{1,2}(?::?\d\d)?)?|[ECMP][SD]T\b|[CEW]ES?T\b|[BIJK]ST\b|A[CEW][SD]T\b|"
    r"[+-]\d\d:?\d\d|(?:Africa|America|Asia|Atlantic|Australia|Europe|Indian|Pacific)/\w+)"
)
_TIME = rf"(?:{_CLOCK}(?:\s?[AaPp]\.?[Mm]\b\.?)?|\d{{1,2}}\s?(?:AM|PM|am|pm)\b)(?:\s?{_ZONE}|\s\({_ZONE}\))?"
_DATE = (
    rf"(?:{_WEEKDAY},? (?:the )?)?(?:{_MONTH} +{_DAY} +{_CLOCK}(?: {_ZONE})? +{_YEAR}"
    rf"|{_YEAR}([-/.])\d{{1,2}}\1\d{{1,2}}|\d{{1,2}}([-/.])\d{{1,2}}\2(?:{_YEAR}|\d\d)|{_YEAR}-(?:0[1-9]|1[0-2])(?![\w-])"
    rf"|{_YEAR}\s?[年년]\s?\d{{1,2}}\s?[月월](?:\s?\d{{1,2}}\s?[日일])?"
    # A word between a day and a year is a month in some language.
    rf"|{_DAY}(?: of| de)? {_WORD},?(?: of| de)? {_YEAR}|{_DAY} (?:of )?{_MONTH}|{_MONTH} {_DAY}(?:,? {_YEAR})?"
    rf"|{_MONTH},? {_YEAR})"
)
_VERSION = r"v\d+(?:\.\d+)+(?:[-+]\w+)*|\d+\.\d+\.\d+(?:[-+.]\w+)*"
_NAMES = (
    r"(?i:chatgpt|claude|codestral|codex|command-[ar]|deepseek|devstral|gemini|gemma|glm|gpt|grok|haiku|kimi|llama|"
    r"magistral|minimax|ministral|mistral|mixtral|nova|opus|phi|qwen|sonnet)"
)
_TIER = r"(?:[Oo]pus|[Ss]onnet|[Hh]aiku|[Pp]ro|[Ff]lash|[Ll]ite|[Mm]ini|[Nn]ano|[Tt]urbo|[Ii]nstruct|[Pp]review|\d+B)"
_MODEL = (
    # Bounds keep a long line from being read anew from each of its places.
    rf"(?:[\w.-]{{1,100}}/)?(?:[\w-]{{1,100}}\.){{0,9}}{_NAMES}(?![A-Za-z])(?=[\w.:@-]{{0,100}}\d)[\w.:@-]*\w"
    rf"(?:\[\w+\])?|{_NAMES}(?: {_TIER}){{0,9}}[ -]\d+(?:\.\d+)*[a-z]?(?: {_TIER})*|o[1-9](?:-(?:mini|pro|preview))?"
)
_UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
_ID = (
    # Hexadecimal digits of both kinds; a prefix with a distinguishing part; long mixtures; digits.
    r"0x[0-9a-fA-F]{4,}|"
    r"(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,}|(?=[A-F]*\d)(?=\d*[A-F])[0-9A-F]{7,}|"
    r"[A-Za-z]{1,12}[_-](?=[A-Za-z]*\d)[A-Za-z0-9]{6,}|(?=(?:[A-Za-z]*\d){3})[A-Za-z0-9]{16,}|\d{8,}"
)
_PATH = r"(?:~|(?<![<}\])*/\\]))/[^\s/\"'`<>|{}()\[\],;:=*?]+(?:/[^\s/\"'`<>|{}()\[\],;:=*?]+)+/?|~/[^\s\"'`<>|,;:]*"
_LINE_OF_PATH = (
    # All of a line behind a label, spaces included, or one name.
    r"(?<=[:=>])[ \t]?[\"'`]?"
    r"(?P<value>~?/(?!/)(?:(?=[^\n\"'`<>,;:/]{0,1000}/)[^\n\"'`<>,;:]{0,4000}+|[^\s\"'`<>,;:]{0,4000}+))"
    r"(?=[\s\"'`]*(?:$|<))"
)
_WINDOWS_PATH = (
    r"[A-Za-z]:\\[^\s\"'`<>|,;:*?]*(?: [^\s\\\"'`<>|,;:*?]+\\[^\s\"'`<>|,;:*?]*)*|"
    r"\\\\\w[^\s\"'`<>|,;:*?]*\\[^\s\"'`<>|,;:*?]*"
)
_WHOLE = r"(?<![\w@:/-])(?<!\w\.)(?:{})(?!\w)"
_APART = r"(?<![^\W_])(?<!\d[-/.:])(?:{})(?![^\W_])"
"""A match may be one piece of a name with `-` or `_` in it."""
_PATTERNS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "model": (
        _WHOLE.format(_MODEL),
        r"(?i:model)(?: name| id| ID| named)?(?: is|:|=| named)\s?[\"'`]?"
        r"(?P<value>(?=[\w./:@-]{0,100}\d)[\w./:@-]*\w(?:\[\w+\])?)",
    ),
    "date": (
        _APART.format(rf"{_DATE}(?:T{_TIME})?"),
        rf"(?:[Tt]oday|[Nn]ow|[Dd]ay|[Dd]ate)\b[^\n.]{{0,16}}?\b(?P<value>{_WEEKDAY})",
        rf"[Yy]ear\W{{1,3}}(?:is )?(?P<value>{_YEAR})\b",
        rf"[Mm]onth\W{{1,3}}(?:is )?(?P<value>{_MONTH})",
    ),
    "time": (rf"(?<![\w.:/-]){_TIME}(?!\w)",),
    "path": (rf"(?<![\w.:]){_PATH}", _LINE_OF_PATH, rf"(?<!\w)(?:{_WINDOWS_PATH})"),
    "version": (
        _WHOLE.format(_VERSION),
        r"(?:[Vv]ersion|[Rr]elease|[Bb]uild)\W{0,3}(?:is )?(?P<value>v?\d+(?:\.\d+)*(?:[-+.]\w+)*)",
    ),
    "id": (_APART.format(_UUID), _WHOLE.format(_ID), r"(?<=#)\d{4,}\b"),
}
_COMPILED: Final[list[tuple[Kind, re.Pattern[str]]]] = [
    (kind, re.compile(one, re.MULTILINE)) for kind, some in _PATTERNS.items() for one in some
]
_SECTION = re.compile(r"(?:^|\n)[ \t]*(?:[#*>-]+[ \t]*)*(?:[Ss]ection )?$|[Ss]ection $")
_BETWEEN = re.compile(r",? (?:at )?|T")
"""Matches the text between the date and the time of one moment."""


def find_volatile_values(text: str) -> list[VolatileValue]:
    """The changing values of a text, in order; they do not overlap."""
    found: list[VolatileValue] = []
    for one in sorted(_all(text), key=lambda it: (it.begin, -it.end)):
        before = found[-1] if found else None
        if before is not None and one.begin < before.end:
            longer = max(before, one, key=lambda it: it.end - it.begin)
            found[-1] = VolatileValue(before.begin, max(before.end, one.end), longer.kind)
        elif before is not None and _one_moment(text, before, one):
            found[-1] = VolatileValue(before.begin, one.end, "date")
        else:
            found.append(one)
    return found


def kind_of(text: str, begin: int, end: int, values: Iterable[VolatileValue]) -> Kind | None:
    """The kind of the single changing value in a part of a text that has only punctuation besides; None where there is
    no such value."""
    found = [it for it in values if it.begin >= begin and it.end <= end]
    if len(found) != 1 or any(map(str.isalnum, text[begin : found[0].begin] + text[found[0].end : end])):
        return None
    return found[0].kind


def _all(text: str) -> Iterator[VolatileValue]:
    for kind, pattern in _COMPILED:
        for it in pattern.finditer(text):
            begin, end = it.span("value" if "value" in pattern.groupindex else 0)
            end = begin + len(text[begin:end].rstrip(" \t.,"))
            if begin < end and not (kind == "version" and _is_section(text, begin)):
                yield VolatileValue(begin, end, kind)


def _is_section(text: str, begin: int) -> bool:
    """True if a number stands where those of headings do."""
    return text[begin].isdigit() and _SECTION.search(text, max(0, begin - 20), begin) is not None


def _one_moment(text: str, one: VolatileValue, other: VolatileValue) -> bool:
    """True if a date and a time are one value."""
    both = {one.kind, other.kind} == {"date", "time"}
    return both and _BETWEEN.fullmatch(text, one.end, other.begin) is not None
