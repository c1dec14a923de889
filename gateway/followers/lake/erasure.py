"""Writes a file of a lake anew without the rows of some rollouts, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from penstock.gateway.followers.lake.location import LakeFiles

pa: Final[Any] = import_module("pyarrow")
pq: Final[Any] = import_module("pyarrow.parquet")
_BATCH: Final = 4096


@dataclass(slots=True)
class RewriteStats:
    """The rows of a rewritten file: their number, first and last cursor."""

    rows: int = 0
    first: int = 0
    last: int = 0
    erased: int = 0
    """Rows of the old file that were left out."""


def rewrite_without(
    files: LakeFiles, old: str, new: str, key: str, forgotten: Mapping[str, int]
) -> RewriteStats | None:
    """Writes the file `new` without forgotten rows, unless no row is left for it. None if the old file has no row of
    these rollouts. `forgotten`: for each rollout the change from which on a new one of this name may be there."""
    with files.open_file(old) as source:
        parquet = pq.ParquetFile(source)
        if not _concerns(parquet, key, forgotten):
            return None
    kept = RewriteStats()
    with files.open_file(old) as source:
        parquet = pq.ParquetFile(source)
        batches = (_without(batch, key, forgotten, kept) for batch in parquet.iter_batches(_BATCH))
        batches = (batch for batch in batches if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return kept
        with (
            files.create_file(new) as out,
            pq.ParquetWriter(out, parquet.schema_arrow, compression="zstd") as writer,
        ):
            writer.write_batch(first)
            for batch in batches:
                writer.write_batch(batch)
    return kept


def _concerns(parquet: Any, key: str, forgotten: Mapping[str, int]) -> bool:
    return any(
        not all(_stay(batch, key, forgotten)) for batch in parquet.iter_batches(_BATCH, columns=[key, "rollout"])
    )


def _stay(batch: Any, key: str, forgotten: Mapping[str, int]) -> list[bool]:
    cursors, rollouts = batch.column(key).to_pylist(), batch.column("rollout").to_pylist()
    return [at >= forgotten.get(name, 0) for at, name in zip(cursors, rollouts, strict=True)]


def _without(batch: Any, key: str, forgotten: Mapping[str, int], kept: RewriteStats) -> Any:
    stay = batch.filter(pa.array(_stay(batch, key, forgotten)))
    kept.erased += batch.num_rows - stay.num_rows
    if stay.num_rows:
        cursors = stay.column(key).to_pylist()
        kept.first = min(cursors) if not kept.rows else min(kept.first, *cursors)
        kept.last = max(kept.last, *cursors)
        kept.rows += stay.num_rows
    return stay
