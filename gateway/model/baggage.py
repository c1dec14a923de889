"""The `baggage` header: names and values that agents pass along (W3C Baggage). Pure.

    baggage: user.id=ada%20l,penstock.rollout_id=r1;properties

Commas separate members, properties of a member follow a semicolon, values are percent-encoded. The header belongs to
other tools: members that cannot be read are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final
from urllib.parse import unquote

TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"
"""A character of the names of headers and of `baggage` members (RFC 9110, 5.6.2)."""
BAGGAGE_NAME: Final = rf"^{TOKEN}{{1,128}}$"
"""Matches a member's name: a token of HTTP."""
LONGEST: Final = 256
"""Most characters of a value that is read."""


def members(header: str) -> Iterator[tuple[str, str]]:
    """(name, value as it was sent) of each member, without properties."""
    for member in header.split(","):
        name, equals, value = member.partition(";")[0].partition("=")
        if equals:
            yield name.strip(), value.strip()


def entry(header: str, name: str) -> str | None:
    """The value of the first member of this name; None where there is none, or one that is empty, longer than
    `LONGEST`, or not UTF-8."""
    sent = next((value for found, value in members(header) if found == name), "")
    try:
        value = unquote(sent, errors="strict").strip()
    except UnicodeDecodeError:
        return None
    return value if 0 < len(value) <= LONGEST else None


def masked(header: str, names: Collection[str], mask: str) -> str:
    """The header with a mask in place of the values and properties of these names."""
    found = header.split(",")
    for at, member in enumerate(found):
        name, equals, _ = member.partition("=")
        if equals and name.strip() in names:
            found[at] = f"{name}={mask}"
    return ",".join(found)
