"""The process of one query: `python -m penstock.gateway.followers.index.sql.child`, started by `runner`.

It reads an `SqlJob` from its standard input, gives up its rights, runs the query and writes an `SqlOutcome`, as
MessagePack. `runner` kills it at the deadline.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from zoneinfo import ZoneInfo

import duckdb
import msgspec

from penstock.gateway.followers.index.sql import sandbox
from penstock.gateway.followers.index.sql.syntax import ForbiddenQueryError, check
from penstock.gateway.followers.index.sql.views import (
    GIVEN,
    READY,
    VIEWS,
    SqlFailure,
    SqlJob,
    SqlResult,
    given,
    statements,
)

pa: Final[Any] = import_module("pyarrow")
_MEMORY: Final = "1GB"
_THREADS: Final = 2
_UNREADABLE: Final = ("pandas", "polars")
_STEP, _BATCH = 256, 5_000
"""Rows that are fetched at once, and rows of a batch of Parquet."""
_TYPES: Final[dict[str, Any]] = {"varchar": pa.string(), "bigint": pa.int64(), "double": pa.float64()}
_SETTINGS: Final[Mapping[str, Any]] = {
    "threads": _THREADS,
    "memory_limit": _MEMORY,
    "async_threads": 1,
    "temp_directory": "",
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,
}


Columns = list[dict[str, str]]
T = TypeVar("T")


class _ImportBlocker:
    """An import finder for which `_UNREADABLE` packages are not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises `ModuleNotFoundError` for these packages; None leaves all others to the other finders."""
        if name.partition(".")[0] in _UNREADABLE:
            raise ModuleNotFoundError(name, name=name)


class RowTooLargeError(Exception):
    """One row exceeds the size of an answer."""


def main() -> None:
    """Reads one query from stdin and answers it."""
    work = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SqlJob)
    opened = _tried(work, lambda: _opened(work))
    _say(READY)
    outcome = opened if isinstance(opened, SqlFailure) else _tried(work, lambda: execute(opened, work))
    _say(msgspec.msgpack.encode(outcome))
    # DuckDB's threads may be in the middle of something large.
    os._exit(0)


def _say(message: bytes) -> None:
    sys.stdout.buffer.write(message)
    sys.stdout.buffer.flush()


def _tried(work: SqlJob, do: Callable[[], T]) -> T | SqlFailure:
    try:
        return do()
    except sandbox.SandboxError as error:
        return SqlFailure("no_sandbox", str(error))
    except ForbiddenQueryError as error:
        return SqlFailure("query", str(error))
    except RowTooLargeError:
        return SqlFailure("too_large", f"a row is larger than {work.bytes:,} bytes")
    except (MemoryError, duckdb.OutOfMemoryException):
        return SqlFailure("memory", f"it needs more memory than the {_MEMORY} that it may have")
    except duckdb.Error as error:
        return SqlFailure("query", _brief(str(error), work.directory))
    except Exception as error:
        # The result cannot be written in this format: an interval as Parquet, a date outside Python's range.
        return SqlFailure("query", _brief(f"{type(error).__name__}: {error}", work.directory))


def _opened(work: SqlJob) -> duckdb.DuckDBPyConnection:
    """A connection with the views, in a process that has given up its rights. Raises `SandboxError`."""
    # Loads the time zone's files now: in the sandbox they cannot be read.
    ZoneInfo("UTC")
    # DuckDB and Arrow try to import these for every value, and their files cannot be read: hide them.
    sys.meta_path.insert(0, _ImportBlocker())
    if work.format == "parquet":
        import_module("pyarrow.parquet")
    sandbox.limit(work.seconds)
    if work.enclosed:
        sandbox.enclose(Path(work.directory))
    duck = duckdb.connect(config={name: str(value).lower() for name, value in _SETTINGS.items()})
    duck.execute("set allowed_directories = [?]", [work.directory])
    duck.execute("set enable_external_access = false")
    for table in GIVEN:
        shape = {name: _TYPES[kind] for name, kind in given(table).items()}
        rows = work.given.get(table, [])
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in shape.items()}
        duck.register(f"_{table}", pa.table(columns))
    for statement in statements(work.files):
        duck.execute(statement)
    for table in GIVEN:
        duck.unregister(f"_{table}")
    duck.execute("set timezone = 'UTC'; set lock_configuration = true")
    return duck


def execute(duck: duckdb.DuckDBPyConnection, work: SqlJob) -> SqlResult:
    """Runs the query and returns its answer."""
    query = _checked(duck, work)
    return _parquet(duck, query, work) if work.format == "parquet" else _rows(duck.execute(query), work)


def _checked(duck: duckdb.DuckDBPyConnection, work: SqlJob) -> str:
    """The query with a limit of rows; raises `ForbiddenQueryError`."""
    if "\0" in work.query:
        raise ForbiddenQueryError("there is a NUL in it, behind which DuckDB reads nothing")
    [(parsed,)] = duck.execute("select json_serialize_sql(cast(? as varchar))", [work.query]).fetchall()
    tree = json.loads(parsed)
    check(tree, VIEWS)
    if tree["statements"][0]["node"].get("from_table", {}).get("type") == "SHOW_REF":
        return work.query
    [(plain,)] = duck.execute("select json_deserialize_sql(cast(? as json))", [parsed]).fetchall()
    return f"select * from ({plain.rstrip().rstrip(';')}) limit {work.rows + 1}"


def _rows(found: Any, work: SqlJob) -> SqlResult:
    """The rows, up to the limits of `work`."""
    columns = [{"name": str(name), "type": str(kind).lower()} for name, kind, *_ in found.description or ()]
    rows: list[bytes] = []
    text = io.StringIO()
    writer, size, more = csv.writer(text), 0, False
    writer.writerow([column["name"] for column in columns])
    for row in _fetched(found):
        plain = [_plain(value) for value in row]
        written = msgspec.json.encode(plain)
        size += len(written)
        if max(size, text.tell()) > work.bytes and not rows:
            raise RowTooLargeError
        if len(rows) >= work.rows or max(size, text.tell()) > work.bytes:
            more = True
            break
        rows.append(written)
        if work.format == "csv":
            writer.writerow([_cell(value) for value in plain])
    if work.format == "csv":
        return _result(columns, len(rows), more, file=text.getvalue())
    return _result(columns, len(rows), more, rows)


def _result(columns: Columns, count: int, more: bool, rows: Sequence[bytes] = (), file: str = "") -> SqlResult:
    head = msgspec.json.encode({"columns": columns, "count": count, "more": more, "file": file})
    return SqlResult(head[:-1] + b',"rows":[' + b",".join(rows) + b"]}")


def _fetched(found: Any) -> Iterator[Sequence[Any]]:
    while some := found.fetchmany(_STEP):
        yield from some


def _parquet(duck: duckdb.DuckDBPyConnection, query: str, work: SqlJob) -> SqlResult:
    """A Parquet file, made in memory. Base64 makes it a third larger."""
    pq: Any = import_module("pyarrow.parquet")
    found: Any = duck.sql(query)
    columns = [
        {"name": str(name), "type": str(kind).lower()} for name, kind in zip(found.columns, found.types, strict=True)
    ]
    reader = found.to_arrow_reader(_BATCH)
    sink, rows, full, more = pa.BufferOutputStream(), 0, False, False
    with pq.ParquetWriter(sink, reader.schema, compression="zstd") as writer:
        for batch in reader:
            if full:
                more = True
                break
            kept = batch.slice(0, work.rows - rows)
            writer.write_batch(kept)
            rows += len(kept)
            more = len(kept) < len(batch)
            full = rows >= work.rows or sink.tell() > work.bytes * 3 // 4
            if more:
                break
    file = sink.getvalue().to_pybytes()
    if len(file) > 2 * work.bytes:
        raise RowTooLargeError
    return _result(columns, rows, more, file=base64.b64encode(file).decode())


def _plain(value: Any) -> Any:
    """A value for JSON: times as ISO texts, bytes as base64, integers from 2**53 and infinite numbers as text."""
    if value is None or isinstance(value, bool | int | str):
        return str(value) if isinstance(value, int) and abs(value) >= 2**53 and not isinstance(value, bool) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _cell(value: Any) -> Any:
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def _brief(message: str, directory: str) -> str:
    """DuckDB's message without the paths of files and without Python's traceback."""
    return message.partition("Traceback")[0].replace(directory, "…").strip()[:2000]


if __name__ == "__main__":
    main()
