"""Whether it can be read of a request what the call may use. Pure.

Nothing is free because nobody has understood it. A call counts as unread unless its format is known and its body could
be read, or it is one that uses nothing: by its method, or by the form of its path (`_FREE`). What happens to an unread
call is for each budget to say (`Budget.unread`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from penstock.gateway.dialects.base import Dialect
from penstock.gateway.dialects.loose_json import Peek, is_bulky, loads
from penstock.gateway.http.redact import url as redact_url

_ONLY_ASKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_OVERRIDES: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})
"""Headers that name another method than the request's own; Google's servers and some proxies heed one."""
_ONE = r"(?!v[0-9]+(?:/|$))[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
"""A segment of a path: an id, or a name, and no version of an API, behind which anything may follow."""
_MANY = f"(?:/{_ONE})*"
_AT = rf"/(?:models|projects/{_ONE}/locations/{_ONE}{_MANY})/{_ONE}"
"""A model of Google's."""
_FORMS = (
    "/messages/count_tokens", "/responses/input_tokens", "/tokenize", "/detokenize", f"{_AT}:(?:count|compute)Tokens",
    f"/(?:responses|interactions|batches|messages/batches)/{_ONE}/cancel", f"/batches/{_ONE}:cancel",
    rf"/projects/{_ONE}/locations/{_ONE}{_MANY}/count-tokens:rawPredict", "/files",
    f"/uploads(?:/{_ONE}/(?:parts|complete|cancel))?", f"/conversations(?:/{_ONE}(?:/items)?)?", f"/oauth{_MANY}",
    f"/organizations?{_MANY}", "/traces", "/logs", "/metrics", "/health", "/ping",
)  # fmt: skip
"""Below the version of an API."""
_FREE: Final = re.compile(
    rf"(?:/openai|/anthropic|/upload)?(?:/v[0-9][a-z0-9]*)?(?:{'|'.join(_FORMS)})"
    r"|/model/[^/]+/count-tokens"
    r"|/v1internal:(?:countTokens|onboardUser|retrieveUserQuota|[a-z]+CodeAssist[A-Za-z]*)"
    rf"|/api/(?:hello|oauth|event_logging|claude_code|claude_cli){_MANY}"
)
"""What uses nothing up although it is posted: counts of tokens, files, conversations, ends of what runs, logins,
settings of an organisation, telemetry. Whatever is not surely one of these may be a generation."""
_SHOWN: Final = 200


_PATH_NAMES: Final = re.compile(r"/(?:(?:model|deployments|engines)/([^/]+)/|models/([^/:]+):)")
"""Where a path names a model, or what stands for one: its server heeds no other name."""
_BODY_NAMES: Final = re.compile(
    r"/(?:(?:chat/)?completions|complete|messages|responses(?:/compact)?|embeddings|interactions|audio/[a-z]+|images/[a-z]+"
    r"|videos|moderations|rerank|score|pooling|classify|generate|invocations|fine_tuning/jobs|cachedContents)/*$"
)
"""How a path ends behind which `model` of the body is surely the one that is asked."""


class Unread(NamedTuple):
    """A call whose use nobody can count."""

    what: str
    """What of it is not understood."""
    path: str


def uses_nothing(dialect: Dialect, method: str, path: str, headers: Iterable[tuple[bytes, bytes, bytes]] = ()) -> bool:
    """Whether a call uses nothing up, whatever its body says. `path`: with its query."""
    if dialect.uses_tokens or not dialect.unknown:
        return not dialect.uses_tokens
    overridden = method in _ONLY_ASKS and any(low in _OVERRIDES for low, _, _ in headers)
    return is_free("POST" if overridden else method, path.partition("?")[0])


def known_model(model: str | None, dialect: Dialect, path: str) -> str | None:
    """The model that a call is surely for; None where nobody knows. `model`: the one that it names."""
    path = path.partition("?")[0]
    if not dialect.unknown or model is None:
        return model
    if (named := _PATH_NAMES.search(unquote(path))) is not None:
        return model if model in named.groups() else None
    return model if _BODY_NAMES.search(path) is not None else None


def is_read(dialect: Dialect, asked: Peek | None, body: bytes, packed: bool) -> bool:
    """Whether any other call says what it may use. `asked`: what was read of its body; `packed`: whether that has a
    content encoding which cannot be undone."""
    return dialect.uses_tokens and not (packed or is_bulky(body) or _is_odd(asked, body))


@lru_cache(maxsize=8192)
def is_free(method: str, path: str) -> bool:
    """Whether a call of no known format uses nothing up. Remembered: paths repeat."""
    return method in _ONLY_ASKS or _FREE.fullmatch(path) is not None


def unread(dialect: Dialect, method: str, path: str) -> Unread:
    """What is said of such a call."""
    what = f"the body of a request of format {dialect.name}" if dialect.uses_tokens else "the format of this path"
    return Unread(f"{what} is not understood", f"{method} {redact_url(path.partition('?')[0][:_SHOWN])}")


def _is_odd(asked: Peek | None, body: bytes) -> bool:
    """Whether a body is no JSON object. Where something was read of it, nobody looks again."""
    return (asked is None or asked == _NOTHING) and not isinstance(loads(body), dict)


_NOTHING: Final = Peek()
