"""Tokens that a provider did not count: most streams have no usage unless their client asks for it. Pure.

Where the engine gave token ids, which are requested for models in training, they are counted: this is exact, and usage
like any other. Else there is an estimate, a token for every four bytes of text. The estimate is kept apart from usage,
enters no sum, and is not used in training. Tokens that nobody counted stay unknown; they are never 0.
"""

from __future__ import annotations

import re
import sys
from typing import Final, Protocol

from penstock.gateway.model.span import Estimate, Usage
from penstock.gateway.wire.dialects.base import STRING, Dialect
from penstock.gateway.wire.dialects.token_ids import length, read_tokens

BYTES: Final = 4
"""Bytes of text per token, about: of English, of code, of JSON, and of scripts with three bytes a letter."""
SAMPLE: Final = 8 << 10
"""Bytes at the start of an answer whose texts are measured; the rest is assumed to be alike."""
_MEDIA: Final = (b";base64,", b'"bytes"')
"""Marks of a request with images or files, whose texts alone are measured. In any other the whole body counts: its
names and braces make up for what the chat template adds."""
_ASKED = re.compile(rb'"(?:content|text|input|output|instructions|system|prompt|arguments|description)' + STRING)
"""Matches the texts in requests; images and other data are left out."""


def usage_from_token_ids(usage: Usage | None, response: bytes, stream: bool, whole: bool) -> Usage | None:
    """Usage with counts from the token ids of an answer where it has none. `whole`: the answer is complete."""
    if not lacks_counts(usage) or b'"prompt_token_ids"' not in response:
        return usage
    tokens = read_tokens(response, stream)
    if not (tokens.complete if whole else tokens.prompt):
        return usage
    known = usage or Usage()
    asked = length(tokens.prompt) if known.input_tokens is None else known.input_tokens
    made = tokens.generated if whole and known.output_tokens is None else known.output_tokens
    return known.model_copy(update={"input_tokens": asked, "output_tokens": made})


class CountableCall(Protocol):
    """The fields of a span, or of a call that becomes one, that tell its use of tokens."""

    @property
    def kind(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def upstream(self) -> str | None: ...
    @property
    def http_status(self) -> int | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def usage(self) -> Usage | None: ...


def lacks_token_counts(call: CountableCall, dialect: Dialect) -> bool:
    """True if a call has used tokens, or may have, and nobody counted them. A refused call has used none."""
    refused = (call.http_status or 0) >= 400 or call.error == "error_body"
    used = call.upstream is not None and call.status != "open" and not refused
    return used and call.kind == "llm" and dialect.uses_tokens and lacks_counts(call.usage, dialect.generates)


def lacks_counts(usage: Usage | None, output: bool = True) -> bool:
    """True if a count is missing. `output`: the call generates tokens."""
    return usage is None or usage.input_tokens is None or (output and usage.output_tokens is None)


def estimate_usage(usage: Usage | None, request: bytes, response: bytes, texts: re.Pattern[bytes]) -> Estimate:
    """An estimate of the counts that are missing in usage. `texts` matches the texts of the answer."""
    known = usage or Usage()
    asked = _length(_ASKED, request) if any(mark in request for mark in _MEDIA) else len(request)
    seen = min(len(response), SAMPLE)
    said = _length(texts, response, seen) * len(response) // (seen or 1)
    return Estimate(
        input_tokens=-(-asked // BYTES) if known.input_tokens is None else None,
        output_tokens=-(-said // BYTES) if known.output_tokens is None else None,
    )


def _length(texts: re.Pattern[bytes], body: bytes, end: int = sys.maxsize) -> int:
    return sum(map(len, texts.findall(body, 0, end)))
