"""Removes members of a body that repeat its text as tokens: ids, log-probabilities and bytes. Pure.

Anyone with the tokenizer can read the text out of them. So in a call with masked values they become `null` in all
bodies: readers take that for an engine that gave none, and training skips such a call.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from penstock.gateway.wire.dialects.json_scan import BodyFormatError, JsonNode, walk
from penstock.gateway.wire.masking.body_search import emptied, zeroed
from penstock.gateway.wire.masking.text import MaskableText

_SAID: Final = re.compile(
    r"tokens|top_tokens|prefill|prompt_fragments|logprobsResult|completion_probabilities|token_strs|\w*logprobs"
)
"""Members that repeat a text as tokens, whatever they hold."""
_IDS: Final = re.compile(r"prompt|inputs?|context|\w*_ids")
"""Members that do so if they hold only integers."""
_LISTED: Final = ("container", "deep")
_TOKEN: Final = ("token", "id")
_NAMED: Final = re.compile(
    rb'"(?:\w*_ids|\w*logprobs|(?:top_)?tokens|token_strs|logprobsResult|prefill|prompt_fragments|context'
    rb'|completion_probabilities)"'
)
_LISTS: Final = re.compile(rb'"(?:prompt|inputs?|tokens|prompt_ids|(?:\w*token|input)_ids)"\s*:\s*\[\s*(?:\[\s*)?-?\d')


def has_token_prompt(body: bytes) -> bool:
    """True if a request gives its text as token ids, which no pattern can read."""
    return _LISTS.search(body) is not None


def remove_token_members(texts: Iterable[MaskableText]) -> None:
    """Removes these members from JSON. A text that cannot be parsed and has one of them becomes asterisks."""
    for text in texts:
        try:
            documents = walk(text.data, containers=True)
        except BodyFormatError:
            if _NAMED.search(text.data) is not None:
                _ = text.write(0, len(text.data))
            continue
        for found in documents:
            _take_out(text, found)


def _take_out(text: MaskableText, found: list[JsonNode]) -> None:
    scalars = [one for one in found if one.kind != "container"]
    starts, whole = [one.start for one in scalars], [0]
    for one in scalars:
        whole.append(whole[-1] + (one.kind == "integer"))
        if one.kind == "integer" and one.path[-2:] == _TOKEN:
            _ = text.write(one.start, one.end, zeroed(text.data[one.start : one.end]))
    for one in found:
        name = one.path[-1] if one.path and one.kind in _LISTED else None
        if not isinstance(name, str):
            continue
        first, last = bisect_left(starts, one.start), bisect_left(starts, one.end)
        numbers = 0 < last - first == whole[last] - whole[first]
        if _SAID.fullmatch(name) or (numbers and _IDS.fullmatch(name)):
            _ = text.write(one.start, one.end, emptied(one.end - one.start))
