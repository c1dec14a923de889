"""Live releases, in memory: every call that is pinned asks for them.

A release whose record is damaged is left out wherever releases are listed, so that it stops no other and no gateway.
Nobody drives it; rollouts keep the versions that it has given them, and others get the stable ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from penstock.gateway.model.base import parse_record
from penstock.gateway.model.release import Release
from penstock.gateway.tape.store.operation import OperationRefusedError
from penstock.gateway.tape.store.view import TapeView

_log: Final = logging.getLogger("penstock.releases")


def release_of(name: str, record: bytes) -> Release:
    """Return a release from its record; raises `OperationRefusedError` where the record is damaged."""
    if (release := parse_record(Release, record)) is None:
        raise OperationRefusedError(
            "conflict", f"release {name}: its record cannot be read; run `penstock check`", "release", name
        )
    return release


class LiveReleases:
    """The live releases by name (a `store.follower`)."""

    def __init__(self, audit_key: str | None = None) -> None:
        """`audit_key`: the key that signs entries of audit chains."""
        self.releases: dict[str, Release] = {}
        self.audit_key = audit_key
        self._records: dict[str, bytes] = {}

    def recall(self, view: TapeView) -> None:
        self.releases.clear()
        self._records.clear()
        for name, record in view.scan("releases"):
            self._read(name, record)

    def follow(self, view: TapeView, changes: Sequence[bytes]) -> None:
        """Read changed releases. The log tells of releases that begin and end, but not of counts of live ones: each is
        read."""
        told = {record[1:-1].decode("ascii") for record in changes if record.startswith(b"e")}
        for name in told | self.releases.keys():
            record = view.get("releases", name.encode())
            if record is not None and record != self._records.get(name):
                self._read(name.encode(), record)

    def _read(self, name: bytes, record: bytes) -> None:
        release = parse_record(Release, record)
        if release is not None:
            self.put(release, record)
        else:
            _log.error("release %s is left alone, its record cannot be read; run `penstock check`", name.decode())

    def put(self, release: Release, record: bytes) -> None:
        """Store a changed release; one that has ended is dropped."""
        self.releases.pop(release.id, None)
        self._records.pop(release.id, None)
        if release.live:
            self.releases[release.id], self._records[release.id] = release, record
