"""Rows of training data as JSON lines or Parquet. Arrays stay arrays: lists of numbers in either format.

`COLUMNS` is what each form holds, in order; `docs/adapters.md` lists it. An object or a list of objects is a JSON value
in JSON lines and JSON text in Parquet. A log-probability that the engine did not give is null in JSON lines and nan in
Parquet. Rows are written as they come, Parquet by row groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Final, Literal, Protocol

import orjson

from penstock.adapters.chat import Conversation
from penstock.adapters.preferences import Pair, row

if TYPE_CHECKING:
    from penstock.adapters.samples import Sample

Form = Literal["samples", "chat", "preferences", "triplets"]
Format = Literal["jsonl", "parquet"]
Row = dict[str, Any]
Kind = Literal["text", "number", "json", "ids", "flags", "numbers"]

ARROW: Final[dict[Kind, str]] = {"text": "string", "number": "double", "json": "string"}
LISTS: Final[dict[Kind, str]] = {"ids": "int32", "flags": "bool", "numbers": "float"}
COLUMNS: Final[dict[Form, dict[str, Kind]]] = {
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
    },
    "preferences": {
        **{name: "text" for name in ("group", "chosen_rollout", "rejected_rollout")},
        **{name: "json" for name in ("prompt", "chosen", "rejected", "tools")},
        **{name: "number" for name in ("chosen_reward", "rejected_reward", "margin")},
    },
    "triplets": {"prompt": "json", "response": "json", "reward": "number", "metadata": "json"},
}
GROUP_ROWS: Final = 1000
"""Rows of a row group."""


def of_samples(samples: Iterable[Sample]) -> Iterator[Row]:
    """A row for each sample."""
    for sample in samples:
        made: Row = {field.name: getattr(sample, field.name) for field in fields(sample)}
        yield made | {"segments": [asdict(segment) for segment in sample.segments]}


def of_conversations(conversations: Iterable[Conversation]) -> Iterator[Row]:
    """A row for each conversation."""
    for conversation in conversations:
        yield {field.name: getattr(conversation, field.name) for field in fields(Conversation)}


def of_pairs(pairs: Iterable[Pair[Conversation]], strict: bool = True) -> Iterator[Row]:
    """A row for each pair that has a common prompt."""
    return (made for pair in pairs if (made := row(pair, strict)) is not None)


def of_triplets(samples: Iterable[Sample]) -> Iterator[Row]:
    """A row for each segment of the samples, which must be all those of their attempts."""
    # The other forms are written without numpy.
    from penstock.adapters.triplets import triplets

    return triplets(list(samples))


class Sink(Protocol):
    """Where rows go."""

    def write(self, row: Row) -> None:
        """Take a row."""
        ...

    def close(self) -> None:
        """Everything has been taken."""
        ...


class Lines:
    """JSON lines."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, row: Row) -> None:
        """A line."""
        self._file.write(_json(row) + b"\n")

    def close(self) -> None:
        """Nothing is held back."""


class Parquet:
    """Parquet, a row group at a time; raises ImportError where pyarrow is not installed."""

    def __init__(self, file: IO[bytes], form: Form) -> None:
        self._columns = COLUMNS[form]
        self._arrow = import_module("pyarrow")
        self._schema = self._arrow.schema([(name, self._type(kind)) for name, kind in self._columns.items()])
        self._writer = import_module("pyarrow.parquet").ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Row] = []

    def _type(self, kind: Kind) -> Any:
        named = self._arrow.type_for_alias
        return self._arrow.list_(named(LISTS[kind])) if kind in LISTS else named(ARROW[kind])

    def write(self, row: Row) -> None:
        """Hold the row until its group is large enough."""
        texts = {name for name, kind in self._columns.items() if kind == "json"}
        self._rows.append({name: _json(value).decode() if name in texts else value for name, value in row.items()})
        if len(self._rows) >= GROUP_ROWS:
            self._flush()

    def close(self) -> None:
        """Write what is held, and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_batch(self._arrow.RecordBatch.from_pylist(self._rows, schema=self._schema))
        self._rows = []


def sink(file: IO[bytes], form: Form, format: Format) -> Sink:
    """Where rows of a form go; raises ImportError for Parquet without pyarrow."""
    return Lines(file) if format == "jsonl" else Parquet(file, form)


def _json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
