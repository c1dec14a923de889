"""When is another upstream asked in place of one that has begun to answer? Pure.

Until a call's client has a byte of its answer, the next upstream of its route can still serve it. So an answer that
says that this upstream cannot do it now is not passed on while another one is left, and neither is the head of a
stream before something stands in it: a model that accepts a call and then says nothing is as good as one that does not
answer. What a call asks for a second time must do no harm twice, so that is held to calls that generate or read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from penstock.gateway.dialects.base import EVENT_STREAM, Dialect

_DATA: Final = re.compile(rb"(?:\A|[\r\n])data:")
_READS: Final = frozenset({"GET", "HEAD"})
_NEVER: Final = frozenset({501, 505})
"""Another upstream would say the same."""


def may_repeat(method: str, dialect: Dialect) -> bool:
    """Whether a call may be served twice: it makes nothing that stays."""
    return dialect.generates or dialect.uses_tokens or method in _READS


def is_down(status: int) -> bool:
    """Whether an answer says that this upstream cannot serve the call now, while another one may."""
    return status in (408, 429) or (status >= 500 and status not in _NEVER)


def says_something(payload: Iterable[bytes], content_type: bytes) -> bool:
    """Whether there is something of the answer in what came: in a stream of events the data of one, no comment."""
    if not content_type.startswith(EVENT_STREAM):
        return any(payload)
    return _DATA.search(b"".join(payload)) is not None
