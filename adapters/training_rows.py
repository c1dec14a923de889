"""Makes rows of training data from episodes, for `penstock samples`. Pure.

An episode and its rows are released before the next one is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.adapters.chat import REWARD_REASONS, ChatConversation, conversations
from penstock.adapters.episode import Episode
from penstock.adapters.export import Form, Row, of_conversations, of_pairs, of_samples, of_triplets
from penstock.adapters.options import Options
from penstock.adapters.preferences import pairing_advice, pairs
from penstock.adapters.report import SampleReport, Unpaired

TOKENS: Final = ("samples", "triplets")
"""Forms that hold token ids, as arrays."""


async def rows(
    episodes: AsyncIterable[Episode], form: Form, options: Options, margin: float, report: SampleReport
) -> AsyncGenerator[Row]:
    """Yield rows of a form as episodes come. For preferences the episodes of a group must follow each other, as from
    `source.by_group`: of its conversations the longest of each rollout are held in memory. Everything left out is added
    to the report. Raises ValueError for a wrong margin.
    """
    told = replace(options, allow=options.allow | REWARD_REASONS) if form == "chat" else options
    groups = PairBuilder(margin)
    async for episode in episodes:
        made = groups.add(episode, told, report) if form == "preferences" else _of(episode, form, told, report)
        del episode
        for row in made:
            yield row
            del row
        del made
    for row in groups.finish(report) if form == "preferences" else ():
        yield row


def _of(episode: Episode, form: Form, options: Options, report: SampleReport) -> Iterator[Row]:
    if form in TOKENS:
        # Imported late: conversations do not need numpy.
        from penstock.adapters.samples import samples

        made, found = samples(episode, options)
        report.add(found)
        return of_samples(made) if form == "samples" else of_triplets(made)
    said, found = conversations(episode, options)
    report.add(found)
    return of_conversations(said)


@dataclass(slots=True)
class PairBuilder:
    """Makes pairs of conversations, group by group."""

    margin: float
    """The least difference of the rewards of a pair."""
    _held: dict[str, ChatConversation] = field(default_factory=dict[str, ChatConversation])
    """The longest conversation of each rollout of the current group."""
    _group: str | None = None
    _branches: int = 0
    _left: dict[str, Unpaired] = field(default_factory=dict[str, Unpaired])
    """Groups without a pair, with the reason."""
    _sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Number of rollouts of each group without a pair."""

    def add(self, episode: Episode, options: Options, report: SampleReport) -> Iterator[Row]:
        """Add an episode; if it begins another group, return the rows of the group before."""
        made = self._made(report) if episode.group != self._group else iter(())
        self._group = episode.group
        said, found = conversations(episode, options)
        report.add(found)
        self.add_conversations(said)
        return made

    def add_conversations(self, said: Iterable[ChatConversation]) -> None:
        """Add conversations of the current group."""
        for one in said:
            before = self._held.get(one.rollout)
            self._held[one.rollout] = one if before is None or len(one.calls) > len(before.calls) else before
            self._branches += before is not None

    def _made(self, report: SampleReport) -> Iterator[Row]:
        found, left = pairs(self._held.values(), self.margin)
        sizes = Counter(one.group for one in self._held.values())
        self._left |= left
        self._sizes |= {group: sizes[group] for group in left}
        self._held = {}
        report.pairs += len(found)
        return of_pairs(found)

    def finish(self, report: SampleReport) -> Iterator[Row]:
        """The rows of the last group. Groups without a pair are counted in the report."""
        made = self._made(report)
        report.unpaired.update(self._left.values())
        report.unpaired.update({"branch": self._branches})
        report.unpaired = +report.unpaired
        report.hints += pairing_advice(self._left, self._sizes, self.margin)
        return made


def preferences(held: Iterable[ChatConversation], margin: float, report: SampleReport) -> list[Row]:
    """The rows of conversations that are in memory, of any groups in any order."""
    groups = PairBuilder(margin)
    groups.add_conversations(held)
    return list(groups.finish(report))
