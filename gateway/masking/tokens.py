"""Takes out of a body what says its text once more by tokens: their ids, log-probabilities and bytes. Pure.

Who knows the tokenizer reads the text out of them. So where something was masked in a call, they become `null` in all
its bodies: readers take that for an engine that gave none, and training passes such a call over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from penstock.gateway.masking.json_walk import Found, Malformed, walk
from penstock.gateway.masking.text import Text

_SAID_BY_TOKENS: Final = frozenset({
    "token_ids", "prompt_token_ids", "response_token_ids", "output_token_ids", "input_token_ids", "output_ids",
    "input_ids", "tokens", "prompt_tokens_ids", "logprobs", "prompt_logprobs", "top_logprobs", "logprobsResult",
    "output_token_logprobs", "input_token_logprobs", "completion_probabilities",
})  # fmt: skip
_ASKED_BY_TOKENS: Final = frozenset({"prompt", "input", "inputs"})
_LISTS: Final = re.compile(rb'"(?:prompt|inputs?|input_ids)"\s*:\s*\[\s*(?:\[\s*)?-?\d')


def asks_by_tokens(body: bytes) -> bool:
    """Whether a request gives its text as token ids, which no pattern can read."""
    return _LISTS.search(body) is not None


def take_out(texts: Iterable[Text]) -> None:
    """Takes them out of some JSON."""
    for text in texts:
        try:
            documents = walk(text.data, containers=True)
        except Malformed:
            continue
        for found in documents:
            _take_out(text, found)


def _take_out(text: Text, found: list[Found]) -> None:
    others = {one.path[:-1] for one in found if one.kind in ("text", "key")}
    for one in found:
        if one.kind != "container" or not one.path:
            continue
        name, at = one.path[-1], one.path
        if name in _SAID_BY_TOKENS or (name in _ASKED_BY_TOKENS and at not in others and _is_numbers(found, at)):
            size = one.end - one.start
            _ = text.write(one.start, one.end, b"null".ljust(size) if size >= 4 else b"[" + b"]".rjust(size - 1))


def _is_numbers(found: list[Found], path: tuple[str | int, ...]) -> bool:
    """Whether a list holds integers and nothing else."""
    inner = [
        one for one in found if len(one.path) > len(path) and one.path[: len(path)] == path and one.kind != "container"
    ]
    return bool(inner) and all(one.kind == "integer" for one in inner)
