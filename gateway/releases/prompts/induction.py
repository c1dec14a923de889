"""Finds the prompts in messages: system texts are grouped by call-site and prompt, and each group gives a template.

Within one call-site (agent and tools on offer), runs of four tokens that occur in many texts belong to a prompt. Text
that only one message has is in a slot and does not count, however long it is. Texts that share many of the counted runs
form a group, and the common text of a group (`gateway.releases.prompts.common_template`) is its template. If a slot
holds prompts itself, which are a few long texts again and again, the group is split by them. Texts that a template
does not match are tried again by themselves.

The result is measured with the same scan that recognises prompts later. It is a proposal: a person registers it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from penstock.gateway.model.resource import Template
from penstock.gateway.releases.prompts.anchors import match
from penstock.gateway.releases.prompts.common_template import common_template, tokens

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
