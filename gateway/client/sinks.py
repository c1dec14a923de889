"""Where rows of a table go: JSON lines or Parquet.

A column has a kind. What is an object or a list of objects is a JSON value in JSON lines and JSON text in Parquet;
lists of numbers are lists in either. Memory is bounded: lines leave as they come, Parquet by row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO, Any, Final, Literal, Protocol

Kind = Literal["text", "whole", "number", "flag", "json", "ids", "flags", "numbers"]
Format = Literal["jsonl", "parquet"]
Row = dict[str, Any]
Encode = Callable[[Any], bytes]

ARROW: Final[dict[Kind, str]] = {
    "text": "string",
    "whole": "int64",
    "number": "double",
    "flag": "bool",
    "json": "string",
}
LISTS: Final[dict[Kind, str]] = {"ids": "int32", "flags": "bool", "numbers": "float"}
GROUP_ROWS, GROUP_BYTES = 10_000, 32 << 20
"""A row group ends when it has so many rows, or so much JSON text and numbers."""


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

    def __init__(self, file: IO[bytes], encode: Encode) -> None:
        self._file, self._encode = file, encode

    def write(self, row: Row) -> None:
        """A line."""
        self._file.write(self._encode(row) + b"\n")

    def close(self) -> None:
        """Nothing is held back."""


class Parquet:
    """Parquet, a row group at a time."""

    def __init__(self, file: IO[bytes], columns: Mapping[str, Kind], encode: Encode) -> None:
        self._columns, self._encode = columns, encode
        self._arrow = import_module("pyarrow")
        self._schema = self._arrow.schema([(name, self._type(kind)) for name, kind in columns.items()])
        self._writer = import_module("pyarrow.parquet").ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._bytes = 0

    def _type(self, kind: Kind) -> Any:
        named = self._arrow.type_for_alias
        return self._arrow.list_(named(LISTS[kind])) if kind in LISTS else named(ARROW[kind])

    def write(self, row: Row) -> None:
        """Hold the row until its group is large enough."""
        held = dict(row)
        for name, kind in self._columns.items():
            if kind == "json" and held[name] is not None:
                held[name] = self._encode(held[name]).decode()
                self._bytes += len(held[name])
            elif kind in LISTS:
                self._bytes += 4 * len(held[name])
        self._rows.append(held)
        if len(self._rows) >= GROUP_ROWS or self._bytes >= GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is held, and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            batch = self._arrow.RecordBatch.from_pylist(self._rows, schema=self._schema)
            # Its rows are not held while it is compressed.
            self._rows, self._bytes = [], 0
            self._writer.write_batch(batch)


def sink(file: IO[bytes], columns: Mapping[str, Kind], format: Format, encode: Encode) -> Sink:
    """Where rows with these columns go."""
    return Lines(file, encode) if format == "jsonl" else Parquet(file, columns, encode)
