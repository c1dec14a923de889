"""Decides whether a request tells what the call may use. Pure.

No call is free because it was not understood. A call counts as unread unless its format is known and its body could be
read, or it uses nothing: by its method, or by the form of its path (`_FREE`). Each budget says what happens to an
unread call (`Budget.unread`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from penstock.gateway.wire.dialects.base import Dialect
from penstock.gateway.wire.dialects.loose_json import RequestFields, is_bulky, loads
from penstock.gateway.wire.http.redaction import url as redact_url

_ONLY_ASKS: Final = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_OVERRIDES: Final = frozenset({b"x-http-method-override", b"x-http-method", b"x-method-override"})
"""Headers that name another method than the request's own; Google's servers and some proxies heed one."""
_ONE = r"(?!v[0-9]+(?:/|$))[A-Za-z0-9_~-][A-Za-z0-9._~-]*"
"""A segment of a path: an id or a name, but no version of an API, behind which anything may follow."""
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
"""Paths of calls that use nothing, below the version of an API."""
_FREE: Final = re.compile(
    rf"(?:/openai|/anthropic|/upload)?(?:/v[0-9][a-z0-9]*)?(?:{'|'.join(_FORMS)})"
    r"|/model/[^/]+/count-tokens"
    r"|/v1internal:(?:countTokens|onboardUser|retrieveUserQuota|[a-z]+CodeAssist[A-Za-z]*)"
    rf"|/api/(?:hello|oauth|event_logging|claude_code|claude_cli){_MANY}"
)
"""Paths of POST requests that use nothing: counts of tokens, files, conversations, cancellations, logins, settings of
an organisation, telemetry. Any path that is not certainly one of these may be a generation."""
_SHOWN: Final = 200


_PATH_NAMES: Final = re.compile(r"/(?:(?:model|deployments|engines)/([^/]+)/|models/([^/:]+):)")
"""A path that names a model, or a deployment: its server heeds no other name."""
_BODY_NAMES: Final = re.compile(
    r"/(?:(?:chat/)?completions|complete|messages|responses(?:/compact)?|embeddings|interactions|audio/[a-z]+|images/[a-z]+"
    r"|videos|moderations|rerank|score|pooling|classify|generate|invocations|fine_tuning/jobs|cachedContents)/*$"
)
"""Ends of paths with which `model` of the body is certainly the model that answers."""


class UnreadCall(NamedTuple):
    """A call whose use cannot be counted."""

    what: str
    """The part that is not understood."""
    path: str


def uses_nothing(dialect: Dialect, method: str, path: str, headers: Iterable[tuple[bytes, bytes, bytes]] = ()) -> bool:
    """True if a call uses nothing, whatever its body says. `path`: with its query."""
    if dialect.uses_tokens or not dialect.unknown:
        return not dialect.uses_tokens
    overridden = method in _ONLY_ASKS and any(low in _OVERRIDES for low, _, _ in headers)
    return is_free("POST" if overridden else method, path.partition("?")[0])


def known_model(model: str | None, dialect: Dialect, path: str) -> str | None:
    """The model that a call is certainly for; None if that is unknown. `model`: the one that it names."""
    path = path.partition("?")[0]
    if not dialect.unknown or model is None:
        return model
    if (named := _PATH_NAMES.search(unquote(path))) is not None:
        return model if model in named.groups() else None
    return model if _BODY_NAMES.search(path) is not None else None


def is_read(dialect: Dialect, asked: RequestFields | None, body: bytes, packed: bool) -> bool:
    """True if a call that may use something tells what it may use. `asked`: the fields that were read of its body;
    `packed`: the body has a content encoding that cannot be undone."""
    return dialect.uses_tokens and not (packed or is_bulky(body) or _is_odd(asked, body))


@lru_cache(maxsize=8192)
def is_free(method: str, path: str) -> bool:
    """True if a call of no known format uses nothing. Cached: paths repeat."""
    return method in _ONLY_ASKS or _FREE.fullmatch(path) is not None


def unread_call(dialect: Dialect, method: str, path: str) -> UnreadCall:
    """The description of a call that is not read."""
    what = f"the body of a request of format {dialect.name}" if dialect.uses_tokens else "the format of this path"
    return UnreadCall(f"{what} is not understood", f"{method} {redact_url(path.partition('?')[0][:_SHOWN])}")


def _is_odd(asked: RequestFields | None, body: bytes) -> bool:
    """True if a body is no JSON object. If fields were read of it before, it is not parsed again."""
    return (asked is None or asked == _NOTHING) and not isinstance(loads(body), dict)


_NOTHING: Final = RequestFields()
