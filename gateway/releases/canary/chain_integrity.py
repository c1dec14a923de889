"""Checks that an audit chain is the one that was written: by signatures with a key that is not on the tape, and by
heads kept elsewhere. Pure.

Whoever can write the tape can make a whole chain anew, hashes included. But its entries then lack signatures, unless
the forger has the key too; and a head that was printed before (an *anchor*) is not in the forged chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from hmac import compare_digest
from typing import NamedTuple

from penstock.gateway.model.release import AuditTrailEntry, Release, signature

_LINE = re.compile(r"(\S+) ([1-9][0-9]{0,8}) ([0-9a-f]{64})")


class Anchor(NamedTuple):
    """The end of a chain at a moment, to keep elsewhere."""

    release: str
    """Name of the release."""
    number: int
    """Number of the last entry at that moment."""
    head: str
    """The hash of that entry; hex."""

    @property
    def line(self) -> str:
        """The anchor as it is printed and read: RELEASE NUMBER HASH."""
        return " ".join(map(str, self))


def anchor_of(release: Release) -> Anchor:
    """The end of a release's chain now."""
    return Anchor(release.id, release.revision, release.head)


def parse_anchors(text: str) -> list[Anchor]:
    """The anchors in a text, one a line. Raises `ValueError` naming a line that is none."""
    found: list[Anchor] = []
    for number, line in enumerate(text.splitlines(), 1):
        read = _LINE.fullmatch(line.strip())
        if read is None and line.strip():
            raise ValueError(f"line {number} is no anchor: {line.strip()[:80]!r}; one is RELEASE NUMBER HASH")
        if read is not None:
            found.append(Anchor(read[1], int(read[2]), read[3]))
    return found


def anchor_problems(name: str, audit: Sequence[AuditTrailEntry], kept: Iterable[Anchor]) -> Iterator[str]:
    """A sentence for each anchor of a release that is not in its chain."""
    hashes = {entry.number: entry.hash for entry in audit}
    mine = [one for one in kept if one.release == name]
    if not mine:
        yield f"the anchors have none of {name}"
    for one in mine:
        if hashes.get(one.number) != one.head:
            ended = "there is none" if one.number not in hashes else "it has another hash"
            yield f"entry {one.number} is not the one that was anchored: {ended}"


def signature_problems(audit: Iterable[AuditTrailEntry], key: str) -> Iterator[str]:
    """A sentence for each entry that this key has not signed."""
    for entry in audit:
        if not entry.signature:
            yield f"entry {entry.number} is not signed"
        elif not compare_digest(entry.signature, signature(entry.hash, key)):
            yield f"entry {entry.number} is signed by another key, or its signature was changed"
