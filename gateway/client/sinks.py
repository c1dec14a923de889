"""Writers for the rows of a table: JSON lines or Parquet.

A column has a kind. An object or a list of objects is a JSON value in JSON lines and JSON text in Parquet; lists of
numbers are lists in either. Memory is bounded: lines are written as they come, Parquet by row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import IO, Any, Final, Literal, Protocol

ColumnKind = Literal["text", "whole", "number", "flag", "json", "ids", "flags", "numbers"]
Format = Literal["jsonl", "parquet"]
Row = dict[str, Any]
Encode = Callable[[Any], bytes]

ARROW: Final[dict[ColumnKind, str]] = {
    "text": "string",
    "whole": "int64",
    "number": "double",
    "flag": "bool",
    "json": "string",
}
LISTS: Final[dict[ColumnKind, str]] = {"ids": "int32", "flags": "bool", "numbers": "float"}
GROUP_ROWS, GROUP_BYTES = 10_000, 32 << 20
"""Rows, and bytes of JSON text and numbers, at which a row group ends."""


class Sink(Protocol):
    """Writes rows to a file in one format."""

    def write(self, row: Row) -> None:
        """Adds a row, which may be buffered."""
        ...

    def close(self) -> None:
        """Writes the buffered rows; called after the last row."""
        ...


class JsonLinesSink:
    def __init__(self, file: IO[bytes], encode: Encode) -> None:
        self._file, self._encode = file, encode

    def write(self, row: Row) -> None:
        self._file.write(self._encode(row) + b"\n")

    def close(self) -> None:
        """Does nothing: no row is buffered."""


class ParquetSink:
    """Writes Parquet, a row group at a time."""

    def __init__(self, file: IO[bytes], columns: Mapping[str, ColumnKind], encode: Encode) -> None:
        self._columns, self._encode = columns, encode
        self._arrow = import_module("pyarrow")
        self._schema = self._arrow.schema([(name, self._type(kind)) for name, kind in columns.items()])
        self._writer = import_module("pyarrow.parquet").ParquetWriter(file, self._schema, compression="zstd")
        self._rows: list[Row] = []
        self._bytes = 0

    def _type(self, kind: ColumnKind) -> Any:
        named = self._arrow.type_for_alias
        return self._arrow.list_(named(LISTS[kind])) if kind in LISTS else named(ARROW[kind])

    def write(self, row: Row) -> None:
        """Buffers the row until its group is large enough."""
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
        """Writes the buffered rows, and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            batch = self._arrow.RecordBatch.from_pylist(self._rows, schema=self._schema)
            # The rows are released before they are compressed.
            self._rows, self._bytes = [], 0
            self._writer.write_batch(batch)


def sink(file: IO[bytes], columns: Mapping[str, ColumnKind], format: Format, encode: Encode) -> Sink:
    """A sink for rows with these columns. `encode` makes JSON of a value."""
    return JsonLinesSink(file, encode) if format == "jsonl" else ParquetSink(file, columns, encode)
