"""The process of one query: `python -m penstock.gateway.followers.index.sql.child`, started by `runner`.

It reads an `SqlJob` from its standard input, gives up its rights, runs the query and writes an `SqlOutcome`, as
MessagePack. `runner` kills it at the deadline.
"""

from __future__ import annotations

import base64
import csv
import ctypes
import io
import json
import math
import os
import re
import resource
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from zoneinfo import ZoneInfo

import duckdb
import msgspec

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
    except SandboxError as error:
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
    limit_resources(work.seconds)
    if work.enclosed:
        enclose(Path(work.directory))
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
    check_query(tree, VIEWS)
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


# A query is one statement that reads only the views, in the tree that DuckDB has parsed. The sandbox is the protection;
# this check gives early errors in words.

Tree = dict[str, Any]
TABLE_FUNCTIONS: Final = frozenset({"range", "generate_series", "unnest", "generate_subscripts"})
"""Table functions that read no file."""
FORBIDDEN: Final = frozenset({"current_setting", "getenv", "getvariable", "nextval", "currval", "write_log"})
"""Functions that reveal the process, or change it."""
_NAME: Final = re.compile(r"[^\W\d]\w*")
_NODES: Final = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})


class ForbiddenQueryError(ValueError):
    """A query that is not run; the text says why."""


def check_query(parsed: Tree, views: Collection[str]) -> None:
    """Raises `ForbiddenQueryError`. `parsed`: the query's tree from `json_serialize_sql`."""
    if parsed.get("error"):
        message = str(parsed.get("error_message"))
        if message.startswith("Only SELECT"):
            message = "only SELECT, DESCRIBE and SUMMARIZE are answered: nothing can be changed here"
        raise ForbiddenQueryError(message)
    if len(parsed["statements"]) != 1:
        raise ForbiddenQueryError("one statement at a time")
    named = {name.lower() for tree in _trees(parsed) for name in _ctes(tree)}
    if odd := next((name for name in named if not _NAME.fullmatch(name)), None):
        # Outside its WITH such a name could be that of a file.
        raise ForbiddenQueryError(f"{odd!r} is no name for a WITH: letters, digits and _ are")
    for tree in _trees(parsed):
        _check(tree, {*views, *named})


def _check(tree: Tree, tables: Collection[str]) -> None:
    kind = str(tree.get("type"))
    if kind.endswith("_NODE") and kind not in _NODES:
        raise ForbiddenQueryError(f"only SELECT: nothing can be changed here ({kind.removesuffix('_QUERY_NODE')})")
    if kind == "TABLE_FUNCTION":
        name = str(tree["function"].get("function_name")).lower()
        if name not in TABLE_FUNCTIONS:
            raise ForbiddenQueryError(
                f"the function {name!r} cannot be read from here: the views are {_listed(tables)}"
            )
    if kind == "FUNCTION" and str(tree.get("function_name")).lower() in FORBIDDEN:
        raise ForbiddenQueryError(f"the function {tree['function_name']!r} is not answered here")
    if kind == "BASE_TABLE" or (kind == "SHOW_REF" and tree.get("table_name")):
        _check_table(tree, tables)


def _check_table(tree: Tree, tables: Collection[str]) -> None:
    path = [part for part in (tree.get("catalog_name"), tree.get("schema_name"), tree.get("table_name")) if part]
    name = ".".join(map(str, path))
    if name.strip('"').lower() not in ({*tables, "tables"} if tree["type"] == "SHOW_REF" else tables):
        raise ForbiddenQueryError(f"there is no view {name!r}: the views are {_listed(tables)}")


def _listed(tables: Collection[str]) -> str:
    return " ".join(sorted(tables))


def _ctes(tree: Tree) -> Iterator[str]:
    """The names that a WITH defines."""
    listed = cast("Tree", tree.get("cte_map") or {}).get("map")
    for one in cast("list[Tree]", listed if isinstance(listed, list) else []):
        yield str(one.get("key"))
    if tree.get("type") == "RECURSIVE_CTE_NODE":
        yield str(tree.get("cte_name"))


def _trees(value: Any) -> Iterator[Tree]:
    """Every object of a tree. Uses an explicit stack: a query may be nested deeper than Python recurses."""
    rest: list[Any] = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            tree = cast("Tree", one)
            yield tree
            rest += tree.values()
        elif isinstance(one, list):
            rest += cast("list[Any]", one)


# The sandbox: files outside one directory, the network, and unlimited memory and processor time are out of reach.
#
# Landlock (Linux 5.13 and later; https://docs.kernel.org/userspace-api/landlock.html) takes rights from the calling
# thread and from those that it starts: so it comes before DuckDB starts any. A handled right is lost except for paths
# with a rule for it. TCP is handled from version 4 of its interface on, signals and abstract sockets from version 6
# on.

MEMORY_BYTES: Final = 2 << 30
"""Limit of the address space. DuckDB's own limit is half of it, because DuckDB does not count all that it allocates."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
_FILES: Final = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""The number of file access rights in each version of the interface; later versions have no more."""
_READ_FILE, _LIST = 0b100, 0b1000
_NEEDED: Final = (Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
"""DuckDB reads the memory limit of its cgroup, and does not start if it cannot."""
_TCP, _TCP_FROM = 0b11, 4
_SCOPES, _SCOPES_FROM = 0b11, 6


class SandboxError(Exception):
    """The kernel has no Landlock, or refuses it."""


def landlock_version() -> int:
    """The version of the kernel's Landlock interface; 0 without Landlock."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, _VERSION))


def limit_resources(seconds: float) -> None:
    """Limits the resources of this process. It can write no file at all."""
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(4 * seconds) + 5),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard))


def enclose(directory: Path) -> None:
    """Restricts this process to reading this directory, without network. Raises `SandboxError`."""
    known = landlock_version()
    if not known:
        raise SandboxError("this kernel has no Landlock")
    libc = _libc()
    handled = struct.pack(
        "=QQQ",
        (1 << _FILES.get(known, 16)) - 1,
        _TCP if known >= _TCP_FROM else 0,
        _SCOPES if known >= _SCOPES_FROM else 0,
    )
    size = 8 if known < _TCP_FROM else 16 if known < _SCOPES_FROM else 24
    rules = _called(libc.syscall(_CREATE_RULESET, handled, size, 0))
    for path in (directory, *filter(Path.exists, _NEEDED)):
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = _READ_FILE | (_LIST if path.is_dir() else 0)
        _called(libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, at), 0))
        os.close(at)
    _called(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _called(libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(result: int) -> int:
    if result < 0:
        raise SandboxError(f"the kernel refuses Landlock: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
