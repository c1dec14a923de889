"""Tokens that a provider did not count: most streams have no usage unless their client asks for it. Pure.

Where the engine gave token ids, as it is asked to for models that are trained, they are counted: that is exact, and is
usage like any other. Else there is an estimate, a token for every four bytes of text. It is kept apart from usage, is
in no sum, and nothing is trained on it. What nobody counted stays unknown; it is never 0.
"""

from __future__ import annotations

import re
import sys
from typing import Final, Protocol

from penstock.gateway.dialects.base import STRING, Dialect
from penstock.gateway.dialects.token_ids import length, read_tokens
from penstock.gateway.model.span import Estimate, Usage

BYTES: Final = 4
"""Bytes of text that make a token, about: of English, of code, of JSON, and of scripts with three bytes a letter."""
SAMPLE: Final = 8 << 10
"""Bytes at the start of an answer whose texts are measured; the rest is taken to be alike."""
_MEDIA: Final = (b";base64,", b'"bytes"')
"""One of them stands in a request that holds images or files. Of any other, names and braces are about what a template
adds."""
_ASKED = re.compile(rb'"(?:content|text|input|output|instructions|system|prompt|arguments|description)' + STRING)
"""Where texts stand in requests: images and other data are left out."""


def counted(usage: Usage | None, response: bytes, stream: bool, whole: bool) -> Usage | None:
    """Usage with what the token ids of an answer tell where it does not. `whole`: whether they are all there."""
    if not missing(usage) or b'"prompt_token_ids"' not in response:
        return usage
    tokens = read_tokens(response, stream)
    if not (tokens.complete if whole else tokens.prompt):
        return usage
    known = usage or Usage()
    asked = length(tokens.prompt) if known.input_tokens is None else known.input_tokens
    made = tokens.generated if whole and known.output_tokens is None else known.output_tokens
    return known.model_copy(update={"input_tokens": asked, "output_tokens": made})


class Call(Protocol):
    """The slice of a span, or of what becomes one, that tells what it used up."""

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


def uncounted(call: Call, dialect: Dialect) -> bool:
    """Whether a call has used tokens, or may have, and nobody counted them. A refusal has used none."""
    refused = (call.http_status or 0) >= 400 or call.error == "error_body"
    used = call.upstream is not None and call.status != "open" and not refused
    return used and call.kind == "llm" and dialect.uses_tokens and missing(call.usage, dialect.generates)


def missing(usage: Usage | None, output: bool = True) -> bool:
    """Whether a count is not there. `output`: whether anything is generated."""
    return usage is None or usage.input_tokens is None or (output and usage.output_tokens is None)


def estimated(usage: Usage | None, request: bytes, response: bytes, texts: re.Pattern[bytes]) -> Estimate:
    """An estimate of what usage does not tell. `texts`: finds those of the answer."""
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
