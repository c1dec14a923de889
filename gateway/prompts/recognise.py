"""Which registered prompt is this text, and what stands in its slots?

All templates are looked for together (`gateway.prompts.tree`), which leaves the few that it may be; each of them is
matched by itself (`gateway.prompts.scan`). Both take time linear in the text, whatever is in the slots.

A text that no template matches, or those of several resources, or one that can be split in two ways, is left alone. Of
several versions of one resource the one with most literal text counts. What is recognised is rendered again and must
give the very same text.

Agents send the same system text with every call: the newest answers are kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from gateway.prompts.scan import Reason, match
from gateway.prompts.template import Template
from gateway.prompts.tree import Tree

KEPT = 128
KEPT_CHARACTERS = 1 << 17
"""How many texts are remembered, and how long they may be."""


@dataclass(frozen=True, slots=True)
class Known:
    """A registered text: what an agent sends when it means this resource."""

    resource: str
    """Name of the resource."""
    template: Template
    """A version of it that agents are known to send."""
    tool: str | None = None
    """The tool that it describes; None for a prompt."""


@dataclass(frozen=True, slots=True)
class Recognised:
    """A text that is one registered prompt."""

    known: Known
    slots: Mapping[str, str]
    """What stands in its slots."""
    sha256: str
    """Of the text, in UTF-8; hex."""


class Recogniser:
    """Tells registered texts. Immutable; made anew when something is registered."""

    def __init__(self, known: Iterable[Known]) -> None:
        """Templates that have a `weakness` are not used."""
        self.known = tuple(dict.fromkeys(it for it in known if it.template.weakness is None))
        self._of: dict[str | None, dict[Template, list[Known]]] = {}
        for it in self.known:
            self._of.setdefault(it.tool, {}).setdefault(it.template, []).append(it)
        self._trees = {tool: Tree(templates) for tool, templates in self._of.items()}
        self.tools = self._trees.keys() - {None}
        """The tools whose descriptions are known."""
        self._remembered = lru_cache(KEPT)(self._recognise)
        self.only = lru_cache(KEPT)(self._only)
        """The same recogniser, but one that knows nothing but the resource of this name."""

    def __bool__(self) -> bool:
        return bool(self.known)

    def _only(self, resource: str) -> Recogniser:
        return Recogniser(it for it in self.known if it.resource == resource)

    def forget(self) -> None:
        """Forgets the texts that it has seen, to measure what the first time takes."""
        self._remembered.cache_clear()

    def recognise(self, text: str, tool: str | None = None) -> Recognised | Reason:
        """The one registered prompt (or description of a tool) that a text is; otherwise why there is none."""
        return (self._remembered if len(text) <= KEPT_CHARACTERS else self._recognise)(text, tool)

    def _recognise(self, text: str, tool: str | None) -> Recognised | Reason:
        found: list[tuple[Known, Mapping[str, str] | None]] = []
        for template in self._trees[tool].possible(text) if tool in self._trees else ():
            split = match(template, text)
            if split != "miss":
                found += [(known, None if split == "ambiguous" else split) for known in self._of[tool][template]]
        if not found:
            return "miss"
        (known, slots), *others = sorted(found, key=lambda it: it[0].template.literal, reverse=True)
        if slots is None or any(_rivals(known, other) for other, _ in others):
            return "ambiguous"
        return Recognised(known, slots, sha256(text))


def _rivals(known: Known, other: Known) -> bool:
    return other.resource != known.resource or other.template.literal == known.template.literal


def sha256(text: str) -> str:
    """Of a text in UTF-8; hex. Half a surrogate pair counts as the bytes that it would have."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
