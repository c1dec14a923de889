"""Rows of training data from episodes, for `penstock samples`, as JSON lines or Parquet. Pure.

`COLUMNS` has the columns of each form, in order; `docs/adapters.md` lists them. Arrays stay arrays: lists of numbers in
either format. A log-probability that the engine did not give is null in JSON lines and nan in Parquet. An episode and
its rows are released before the next one is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import orjson

from penstock.adapters.chat import REWARD_REASONS, ChatConversation, conversations
from penstock.adapters.episode import Episode
from penstock.adapters.preferences import pairing_advice, pairs, row
from penstock.adapters.selection import Options, SampleReport, Unpaired
from penstock.gateway.client import sinks
from penstock.gateway.client.sinks import ColumnKind, Format, Row, Sink

if TYPE_CHECKING:
    from penstock.adapters.samples import Sample

Form = Literal["samples", "chat", "preferences", "triplets"]

COLUMNS: Final[dict[Form, dict[str, ColumnKind]]] = {
    "samples": {
        **{name: "text" for name in ("rollout", "attempt", "group", "agent", "model")},
        "prompt": "ids",
        "response": "ids",
        "mask": "flags",
        "logprobs": "numbers",
        "segments": "json",
        "reward": "number",
        "rewards": "json",
    },
    "chat": {
        **{name: "text" for name in ("rollout", "attempt", "group", "agent", "model")},
        "calls": "json",
        "messages": "json",
        "tools": "json",
        "reward": "number",
        "rewards": "json",
        "tool_errors": "whole",
    },
    "preferences": {
        **{name: "text" for name in ("group", "chosen_rollout", "rejected_rollout")},
        **{name: "json" for name in ("prompt", "chosen", "rejected", "tools")},
        **{name: "number" for name in ("chosen_reward", "rejected_reward", "margin")},
    },
    "triplets": {"prompt": "json", "response": "json", "reward": "number", "metadata": "json"},
}
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
        for line in made:
            yield line
            del line
        del made
    for line in groups.finish(report) if form == "preferences" else ():
        yield line


def _of(episode: Episode, form: Form, options: Options, report: SampleReport) -> Iterator[Row]:
    if form in TOKENS:
        # Imported late: conversations do not need numpy.
        from penstock.adapters.samples import samples, triplets

        made, found = samples(episode, options)
        report.add(found)
        return of_samples(made) if form == "samples" else triplets(made)
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
        return map(row, found)

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


def of_samples(samples: Iterable[Sample]) -> Iterator[Row]:
    for sample in samples:
        made: Row = {field.name: getattr(sample, field.name) for field in fields(sample)}
        yield made | {"segments": [asdict(segment) for segment in sample.segments]}


def of_conversations(conversations: Iterable[ChatConversation]) -> Iterator[Row]:
    for conversation in conversations:
        yield {field.name: getattr(conversation, field.name) for field in fields(ChatConversation)}


def sink(file: IO[bytes], form: Form, format: Format) -> Sink:
    """A writer of rows of a form to a file."""
    return sinks.sink(file, COLUMNS[form], format, _json)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
