"""The audit log: the author, the reason and the content of each change by the control API, in the order of the changes.

An entry is written by the operation that makes the change, in its transaction (`write`), or right after a change that
is not on the tape (`AuditLog.record`). A release has a chain of its own, so an entry of a release only names its link
(`write_reference`), and its content is read from there. Entries have consecutive numbers and are never changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from pydantic import BaseModel

from penstock.gateway.model.answers import AuditEntry
from penstock.gateway.model.base import NOBODY, ActionRequest
from penstock.gateway.model.release import AuditTrailEntry
from penstock.gateway.tape.store import keys
from penstock.gateway.tape.store.directory import TapeError
from penstock.gateway.tape.store.reader import StoreReader, descending_slice
from penstock.gateway.tape.store.recorder import Recorder
from penstock.gateway.tape.store.transaction import Transaction
from penstock.gateway.tape.store.view import TapeView

DATABASE: Final = "audit_log"
_SLICE: Final = 256
_log = logging.getLogger("penstock.control")


class ChainReference(BaseModel):
    """Names a link of a release's chain."""

    release: str
    """The release."""
    number: int
    """The link."""

    @property
    def key(self) -> bytes:
        """The key of the link in `audit`."""
        return keys.numbered_key(self.release, self.number)


class AuditRecord(BaseModel):
    """The stored record of a change; its key is the change's number."""

    at_ns: int = 0
    who: str = ""
    key: str = ""
    action: str = ""
    target: str = ""
    why: str = ""
    link: ChainReference | None = None
    """Set for a change of a release; all other fields are empty then."""


def write(tape: Transaction, said: ActionRequest, action: str, target: str, now: int) -> None:
    """Write a change. Known secrets are removed from the author's name and reason."""
    who, why = map(tape.secrets.text, (said.who, said.why))
    _append(tape, AuditRecord(at_ns=now, who=who or NOBODY, key=said.key, action=action, target=target, why=why))


def write_reference(tape: Transaction, release: str, number: int) -> None:
    """Write an entry that names a link of a release's audit chain."""
    _append(tape, AuditRecord(link=ChainReference(release=release, number=number)))


def _append(tape: Transaction, change: AuditRecord) -> None:
    number = tape.last(DATABASE) + 1
    tape.put(DATABASE, keys.number(number), change.model_dump_json(exclude_defaults=True).encode(), append=True)


def entry_of(view: TapeView, key: bytes, record: bytes) -> AuditEntry:
    """Return a stored change as an `AuditEntry`; raises `TapeError` when the link that it names is missing."""
    change, number = AuditRecord.model_validate_json(record), keys.to_number(key)
    if change.link is None:
        return AuditEntry(number=number, **change.model_dump(exclude={"link"}))
    stored = view.get("audit", change.link.key)
    if stored is None:
        raise TapeError(f"link {change.link.number} of release {change.link.release} is missing")
    link = AuditTrailEntry.model_validate_json(stored)
    action = f"{link.action}_release"
    return AuditEntry(
        number=number, at_ns=link.at_ns, who=link.who, key=link.key, action=action, target=change.link.release,
        why=link.why,
    )  # fmt: skip


class AuditLog:
    """The audit log of a gateway."""

    def __init__(self, tape: StoreReader, recorder: Recorder, now_ns: Callable[[], int]) -> None:
        self._tape, self._recorder, self._now_ns = tape, recorder, now_ns

    async def record(self, said: ActionRequest, action: str, target: str) -> None:
        """Write a change that is not itself on the tape. A tape that cannot be written must not hinder the change: a
        paused server must be opened also when the disk is full."""
        now = self._now_ns()
        try:
            await self._recorder.submit(lambda tape: write(tape, said, action, target, now))
        except TapeError as error:
            _log.error("the audit log lacks %s of %s by %r: %s", action, target, said.who or NOBODY, error)

    def entries(self, before: int | None = None) -> Iterator[AuditEntry]:
        """Yield all changes, newest first; with `before`, only those with a lower number."""
        start = None if before is None else keys.number(before)
        while True:
            with self._tape.view() as view:
                with view.cursor(DATABASE) as cursor:
                    found = descending_slice(cursor, start, _SLICE)
                entries = [entry_of(view, key, record) for key, record in found]
            yield from entries
            if len(found) < _SLICE:
                return
            start = found[-1][0]
