"""Makes rows of training data of episodes, for `penstock samples`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import replace
from typing import Final

from penstock.adapters.chat import UNJUDGED, Conversation, conversations
from penstock.adapters.export import Form, Row, of_conversations, of_pairs, of_samples, of_triplets
from penstock.adapters.options import Options
from penstock.adapters.preferences import more, pairs
from penstock.adapters.report import Report
from penstock.adapters.turns import Episode

TOKENS: Final = ("samples", "triplets")
"""Forms of token ids, which are arrays."""


async def rows(
    episodes: AsyncIterable[Episode], form: Form, options: Options, margin: float, report: Report
) -> AsyncGenerator[Row]:
    """Rows of a form, as episodes come. Preferences come at the end, because a group may be anywhere: until then the
    conversations are held in memory. Everything left out is added to the report. Raises ValueError for a wrong
    margin.
    """
    told = replace(options, allow=options.allow | UNJUDGED) if form == "chat" else options
    held: list[Conversation] = []
    async for episode in episodes:
        if form in TOKENS:
            # Conversations are made without numpy.
            from penstock.adapters.samples import samples

            made, found = samples(episode, options)
            given = of_samples(made) if form == "samples" else of_triplets(made)
        else:
            said, found = conversations(episode, told)
            given = of_conversations(said if form == "chat" else ())
            held += said if form == "preferences" else []
        report.add(found)
        for row in given:
            yield row
    for row in preferences(held, margin, report) if form == "preferences" else ():
        yield row


def preferences(held: list[Conversation], margin: float, report: Report) -> list[Row]:
    """Pairs of conversations, each rollout's longest, as `preferences.row` writes them; groups that give none are
    counted in the report."""
    longest: dict[str, Conversation] = {}
    for one in held:
        before = longest.get(one.rollout)
        longest[one.rollout] = one if before is None or len(one.calls) > len(before.calls) else before
    found, left = pairs(longest.values(), margin)
    report.unpaired.update(left.values())
    report.unpaired.update({"branch": len(held) - len(longest)})
    report.unpaired = +report.unpaired
    report.hints += more(left, Counter(one.group for one in longest.values()), margin)
    report.pairs += len(found)
    return list(of_pairs(found))
