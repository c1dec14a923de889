"""The tokens of an answer with their probabilities: unlikely tokens stand out. Pure.

    The ca|pital of| Peru| is|?Lima|.

A token with a probability below one half has a `?` before it, one below a tenth `‼`. Colours only repeat that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock.console.views.table import Column, Listing, clean, figure
from penstock.gateway.wire.dialects.tokens import TokenLogprob

UNSURE, UNLIKELY = math.log(0.5), math.log(0.1)
MOST: Final = 2_000
"""The most tokens that are drawn."""
WORST: Final = 12
"""The number of least likely tokens that are listed."""
NONE = (
    "The engine gave no tokens with this answer. vLLM and SGLang give them for `return_token_ids` and `logprobs`: "
    "capture_tokens of the upstream asks for both, see docs/training-data.md."
)
UNLIKELY_ONES = (figure("at"), Column("token"), figure("id"), figure("probability"), figure("log-probability"))


def tokens(found: Sequence[TokenLogprob]) -> RenderableType:
    """The answer token by token, and the least likely tokens in a table."""
    if not found:
        return Text(NONE)
    known = [token.logprob for token in found if token.logprob is not None]
    pieces: list[RenderableType] = [Text(_sums(found, known), style="bold"), Text()]
    if any(token.text is not None for token in found):
        pieces.append(_marked(found[:MOST]))
    else:
        pieces.append(Text(" ".join(str(token.id) for token in found[:MOST])))
    if len(found) > MOST:
        pieces.append(Text(f"{len(found) - MOST:,} more tokens are not drawn.", style="dim"))
    return Group(*pieces, *_worst(found))


def _sums(found: Sequence[TokenLogprob], known: Sequence[float]) -> str:
    ids = "with their ids" if any(token.id is not None for token in found) else "without ids"
    count = f"{len(found):,} token{'s' if len(found) != 1 else ''}, {ids}"
    if not known:
        return f"{count}; no log-probabilities"
    mean = sum(known) / len(known)
    return f"{count}; mean log-probability {mean:.3f}, perplexity {math.exp(min(-mean, 700)):.4g}"


def _marked(found: Sequence[TokenLogprob]) -> Text:
    made = Text()
    for at, token in enumerate(found):
        sign, style = _doubt(token.logprob)
        text = clean(token.text if token.text is not None else f"<{token.id}>")
        made.append(("|" if at else "") + sign, "dim").append(text, style)
    return made


def _doubt(logprob: float | None) -> tuple[str, str]:
    if logprob is None or logprob >= UNSURE:
        return "", ""
    return ("?", "yellow") if logprob >= UNLIKELY else ("‼", "bold red")


def _worst(found: Sequence[TokenLogprob]) -> Iterator[RenderableType]:
    doubted = [(token.logprob, at) for at, token in enumerate(found) if (token.logprob or 0.0) < UNSURE]
    if not doubted:
        return
    made = Listing(*UNLIKELY_ONES)
    for logprob, at in sorted((logprob or 0.0, at) for logprob, at in doubted)[:WORST]:
        token = found[at]
        name = "" if token.text is None else repr(clean(token.text))
        made.add_row(
            str(at), name, "" if token.id is None else str(token.id), f"{math.exp(logprob):.2%}", f"{logprob:.3f}"
        )
    yield from (Text(), Text("The least likely tokens"), made)
