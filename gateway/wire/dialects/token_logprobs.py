"""The tokens of an answer one by one, each with its text and log-probability, as far as the engine gave them. Pure.

Chat completions give `logprobs.content` with an entry for each token, completions parallel lists (`tokens`,
`token_logprobs`). vLLM gives `token_ids` besides, in the same order. `token_ids` reads the ids alone, for training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import NamedTuple

from penstock.gateway.wire.dialects.loose_json import Json, arr, chunks, count, loads, obj, objs


class TokenLogprob(NamedTuple):
    """One generated token, as far as the engine described it."""

    text: str | None
    """Text; None when only the id is known."""
    id: int | None
    """Id in the engine's vocabulary; None when the engine did not give it."""
    logprob: float | None
    """Natural logarithm of the probability; None when the engine did not give it."""


def read_logprobs(response: bytes, stream: bool, choice: int = 0) -> list[TokenLogprob]:
    """The tokens of one choice of a decoded response body, plain or streamed; empty where the engine gave none."""
    pieces: Iterable[Json] = chunks(response, []) if stream else filter(None, [obj(loads(response))])
    choices = (one for piece in pieces for one in objs(piece.get("choices")))
    return [token for one in choices if (count(one.get("index")) or 0) == choice for token in _tokens(one)]


def _tokens(choice: Json) -> Iterator[TokenLogprob]:
    ids = (id if isinstance(id, int) else None for id in arr(choice.get("token_ids")))
    for id, said in zip_longest(ids, _said(obj(choice.get("logprobs")))):
        text, logprob = said or (None, None)
        yield TokenLogprob(text, id, logprob)


def _said(logprobs: Json) -> Iterator[tuple[str | None, float | None]]:
    """Texts and log-probabilities, in either of the two shapes."""
    for entry in objs(logprobs.get("content")):
        yield _text(entry.get("token")), _number(entry.get("logprob"))
    for text, value in zip_longest(arr(logprobs.get("tokens")), arr(logprobs.get("token_logprobs"))):
        yield _text(text), _number(value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
