"""Computes log-probabilities from a model's last hidden states in pieces, so that memory does not grow with the tokens.

A row of logits has a number for each token of the vocabulary: 32,000 trained tokens of a vocabulary of 150,000 are 20
GB in float32, and as much again for their gradients. Here at most `LOGITS` numbers exist at a time. The backward pass
computes the pieces again (`torch.utils.checkpoint`), which costs the output layer once more and nothing else.

The output layer is replaced while the model runs, so that its wrappers (an adapter, FSDP) see one call and one output.
A model that changes its logits afterwards would change log-probabilities instead; `agrees` detects such models, and
their logits are computed in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS: Final = 1 << 25
"""Logits computed at a time: 128 MiB in float32."""


def score_logits(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return [2, N] in nats, from logits [N, V] and tokens [N]: log-probabilities, with gradients, and entropies,
    without."""
    chosen = logits.float() / temperature
    whole = chosen.logsumexp(-1)
    logprobs = chosen.gather(1, targets[:, None])[:, 0] - whole
    with torch.no_grad():
        entropy = whole - (torch.softmax(chosen, -1) * chosen).sum(-1)
    return torch.stack((logprobs, entropy))


@contextmanager
def chunked_head(
    network: torch.nn.Module, rows: Tensor, places: Tensor, targets: Tensor, temperature: float, size: int
) -> Generator[None]:
    """Replace the network's output layer: within the context its logits are `score_logits` of the hidden states at
    [rows, places], `size` tokens at a time."""
    head = cast(Any, network).get_output_embeddings()
    whole: Callable[[Tensor], Tensor] = head.forward

    def piece(hidden: Tensor, wanted: Tensor) -> Tensor:
        return score_logits(whole(hidden), wanted, temperature)

    def forward(hidden: Tensor) -> Tensor:
        chosen = hidden[rows, places]
        parts = zip(chosen.split(size), targets.split(size), strict=True)
        # cast: `checkpoint` has no type for its result.
        return torch.cat([cast(Tensor, checkpoint(piece, *part, use_reentrant=False)) for part in parts], 1)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def chunk_size(vocabulary: int) -> int:
    """Return the number of tokens of a piece."""
    return max(1, LOGITS // vocabulary)


def agrees(whole: Tensor, pieces: Tensor) -> bool:
    """True if a model's log-probabilities are the same in one piece and in pieces, up to rounding."""
    return whole.shape == pieces.shape and torch.allclose(whole, pieces, atol=0.05)
