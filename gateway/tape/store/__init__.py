"""The tape: the only package that opens LMDB. It imports nothing of the layers above `tape`.

`keys` has the layout, `codec` the record formats, `tables` the changes of a transaction. Begin with `transaction` and
`reader`.

*Writing.* `Store.write` takes a batch of entries and commits them in one transaction with one fsync. It is called from
  one thread, the recorder's; a write transaction never leaves it (`transaction`).

*Reading.* Every read is one short transaction or a series of slices, from any thread and beside the writer (`reader`).

*Dying.* LMDB is copy-on-write: after a kill the tape is as of the last commit. Calls that were announced as running and
  never finished are found in `open` when the tape is next opened for writing, and end as `interrupted`.

*Handing over.* For a while two processes write one tape: the one that serves its last calls, and the next one. LMDB has
  one write transaction at a time; each reads back what the other has changed (`transaction`, `tables`), and knows which
  calls belong to which process (`directory`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from penstock.gateway.model.known_secrets import NO_SECRETS, Secrets
from penstock.gateway.tape.store.codec import DECODE_ERRORS
from penstock.gateway.tape.store.directory import WriterRegistry
from penstock.gateway.tape.store.environment import Environment, TapeError, Txn
from penstock.gateway.tape.store.erasure import OverwritePass
from penstock.gateway.tape.store.feed import Follower
from penstock.gateway.tape.store.reader import SECRET, StoreReader
from penstock.gateway.tape.store.tables import no_op
from penstock.gateway.tape.store.transaction import ActivityHook, WriteItem, Writer

F = TypeVar("F")

MAP_BYTES = 1 << 30
"""Initial size of the map, which doubles when needed. Address space, not disk: the file is as large as its content."""
MEMORY_BYTES = 32 << 20
"""Memory that the writer uses for bases of the next bodies: enough for the last hundreds of conversations."""


class Store(StoreReader):
    """One tape. Any thread may read; one thread writes."""

    def __init__(
        self,
        path: Path,
        *,
        readonly: bool = False,
        map_bytes: int = MAP_BYTES,
        memory_bytes: int = MEMORY_BYTES,
        followers: Iterable[Follower] = (),
        woken: ActivityHook | None = None,
        secrets: Secrets = NO_SECRETS,
        lock: int | None = None,
    ) -> None:
        """Open the tape in `path`/tape, making it if need be.

        `followers`: memories that the writer keeps equal to the tape. `woken`: called when an agent shows a sign of
        life. `secrets`: known secrets, removed from all text that others supply. `lock`: the descriptor of the writer's
        lock, if another process has handed it over. Raises `TapeError` when it is not a tape of this format or is in
        use.
        """
        super().__init__(Environment(path, readonly=readonly, map_bytes=map_bytes, lock=lock))
        self.path = path
        self._processes: WriterRegistry | None = None
        try:
            self._processes = None if readonly else WriterRegistry(path)
        except TapeError:
            self._env.close()
            raise
        self._writer = Writer(self._env, self.process, memory_bytes, followers, woken, secrets)
        if self._processes is not None:
            self._end_what_was_open(self._processes.live_writers())

    def _end_what_was_open(self, living: Collection[str]) -> None:
        try:
            self._writer.interrupt_open(living)
        except (TapeError, *DECODE_ERRORS) as error:
            self.close()
            raise TapeError(f"cannot open the tape in {self.path}: {error}; run `penstock check`") from error

    def close(self) -> None:
        """Close the tape; no call may follow."""
        if self._processes is not None:
            self._processes.close()
        self._env.close()

    def hide(self, secrets: Secrets) -> None:
        """Remove these secrets instead of those before from all text that others supply."""
        self._writer.secrets = secrets

    @property
    def lock(self) -> int | None:
        """The descriptor of the writer's lock; None for a tape that is opened only for reading."""
        return self._env.lock

    def live_writers(self) -> set[str]:
        """Return the names of the processes that write this tape now, including this one."""
        return set() if self._processes is None else self._processes.live_writers()

    @property
    def process(self) -> str:
        """The name of this process among those that write the tape; empty for a tape that is opened only for
        reading."""
        return "" if self._processes is None else self._processes.own

    @property
    def behind(self) -> bool:
        """True if another process has written since this one's last transaction; any thread may ask."""
        return self._writer.behind

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, items: Sequence[WriteItem], between: Callable[[], object] = no_op) -> int:
        """Commit entries and tasks durably in one transaction, in order, and return the newest cursor. `between` is
        called between two pieces of that work.

        Raises `TapeError` when the disk is full or read-only; then nothing of the batch is on the tape.
        """
        return self._writer.write(items, between)

    @property
    def newest(self) -> Sequence[bytes]:
        """The records that the last transaction has added to the log; for the thread that writes."""
        return self._writer.newest

    def follower(self, kind: type[F]) -> F:
        """Return the follower of this type; it may be a moment ahead of the tape. Raises `KeyError` when there is
        none."""
        return self._writer.follower(kind)

    def overwrite_pass(self) -> OverwritePass:
        """Return a pass that writes zeros over deleted bytes; for one thread, beside the one that writes."""
        return OverwritePass(self._env)

    def secret(self) -> bytes:
        """Return the key that signs agent tokens; made once per tape."""
        with self.view() as view:
            found = view.get("meta", SECRET)
        if found is not None:
            return found
        made = secrets.token_bytes(32)

        def apply(txn: Txn) -> None:
            txn.put(SECRET, made, db=self._env.dbs["meta"])

        self._env.write(apply)
        return made
