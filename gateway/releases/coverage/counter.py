"""Adds calls to the coverage of resources. It runs in a thread: each new text is searched for many pieces."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from penstock.gateway.model.coverage import LastMiss, TextDifference
from penstock.gateway.model.known_secrets import Secrets
from penstock.gateway.releases.catalog import Catalog
from penstock.gateway.releases.coverage.notes import CallNote, MissNote
from penstock.gateway.releases.coverage.operations import CoverageDelta
from penstock.gateway.releases.prompts.nearest_text import NearestTextFinder, difference
from penstock.gateway.releases.prompts.rewrite import names_of
from penstock.gateway.wire.dialects.text_spans import TextLocation

REMEMBERED: Final = 16_384
"""Rollouts whose first call was counted that are remembered."""
TEXTS: Final = 1_024
"""Texts whose nearest prompt is remembered."""
NEW_TEXTS: Final = 50
"""New texts that are searched at most: each takes about a millisecond of a process that serves calls. Further ones are
counted as no resource's miss."""


class NearestResource(NamedTuple):
    """The resource whose text another text nearly is."""

    resource: str
    difference: TextDifference | None
    """The place where they differ; None also where the text has a secret."""


class CoverageCounter:
    """Adds calls to the coverage of resources, and remembers texts and rollouts from call to call."""

    def __init__(self, secrets: Secrets) -> None:
        """`secrets` are removed from shown texts."""
        self._secrets = secrets
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._near: OrderedDict[tuple[bytes, str | None], NearestResource | None] = OrderedDict()
        self._new = NEW_TEXTS
        self._catalog: Catalog | None = None
        self._nearest = NearestTextFinder(())

    def count(self, calls: Iterable[CallNote], catalog: Catalog, now: int) -> dict[str, CoverageDelta]:
        """Return the additions of these calls, by the resource's name. A call in which a resource was recognised did
        not miss it."""
        if catalog is not self._catalog:
            self._catalog, self._nearest = catalog, NearestTextFinder(catalog.sent)
            self._near.clear()
        found: dict[str, CoverageDelta] = {}
        self._new = NEW_TEXTS
        for call in calls:
            for name in set(call.matched):
                added = found.setdefault(name, CoverageDelta())
                added.matched += 1
                self._first(added, call.rollout, name, True)
            for name, last in self._missed(call, now).items():
                added = found.setdefault(name, CoverageDelta())
                added.missed[last.why] += 1
                added.last = last
                self._first(added, call.rollout, name, False)
        return found

    def _missed(self, call: CallNote, now: int) -> Mapping[str, LastMiss]:
        found: dict[str, LastMiss] = {}
        for miss in call.missed:
            near = self._near_of(miss)
            if near is not None and near.resource not in call.matched:
                found[near.resource] = LastMiss(
                    rollout=call.rollout, at_ns=now, why=miss.why, difference=near.difference
                )
        return found

    def _near_of(self, miss: MissNote) -> NearestResource | None:
        if miss.resource is not None or miss.place is None:
            return None if miss.resource is None else NearestResource(miss.resource, None)
        key = hashlib.sha256(miss.place.literal).digest(), miss.place.name
        if key not in self._near:
            if self._new == 0:
                return None
            self._new -= 1
            self._near[key] = self._looked_for(miss.place)
            if len(self._near) > TEXTS:
                self._near.popitem(last=False)
        return self._near[key]

    def _looked_for(self, place: TextLocation) -> NearestResource | None:
        text = place.text
        sent = self._nearest.of(text, names_of(place))
        if sent is None:
            return None
        # A piece of a text may end in the middle of a secret.
        shown = not self._secrets.by_place and self._secrets.text(text) is text
        return NearestResource(sent.resource, difference(sent, text) if shown else None)

    def _first(self, added: CoverageDelta, rollout: str, name: str, matched: bool) -> None:
        """Count the first call of a rollout, which stands for all of it."""
        if (rollout, name) not in self._seen:
            self._seen[rollout, name] = None
            added.rollouts.append(matched)
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
