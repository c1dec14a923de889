"""Rows of training data as JSON lines or Parquet. Arrays stay arrays: lists of numbers in either format.

`COLUMNS` has the columns of each form, in order; `docs/adapters.md` lists them. A log-probability that the engine did
not give is null in JSON lines and nan in Parquet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import IO, TYPE_CHECKING, Any, Final, Literal

import orjson

from penstock.adapters.chat import ChatConversation
from penstock.adapters.preferences import PreferencePair, row
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


def of_samples(samples: Iterable[Sample]) -> Iterator[Row]:
    for sample in samples:
        made: Row = {field.name: getattr(sample, field.name) for field in fields(sample)}
        yield made | {"segments": [asdict(segment) for segment in sample.segments]}


def of_conversations(conversations: Iterable[ChatConversation]) -> Iterator[Row]:
    for conversation in conversations:
        yield {field.name: getattr(conversation, field.name) for field in fields(ChatConversation)}


def of_pairs(pairs: Iterable[PreferencePair[ChatConversation]]) -> Iterator[Row]:
    return map(row, pairs)


def of_triplets(samples: Iterable[Sample]) -> Iterator[Row]:
    """A row for each segment of the samples, which must be all samples of their attempts."""
    # Imported late: the other forms do not need numpy.
    from penstock.adapters.triplets import triplets

    return triplets(list(samples))


def sink(file: IO[bytes], form: Form, format: Format) -> Sink:
    """A writer of rows of a form to a file."""
    return sinks.sink(file, COLUMNS[form], format, _json)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
